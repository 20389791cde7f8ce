"""The OpenAPI document and the routes of a gateway are the same."""

import json
from typing import Any, get_args

import jsonschema
import pytest
from gateway_region import Region, open_region

from deploy.gateway.errors import ApiError
from deploy.gateway.intake.endpoints import ENDPOINTS, KINDS, Kind
from deploy.gateway.intake.fields import Body
from deploy.gateway.openapi.answers import answer_schema
from deploy.gateway.openapi.bodies import body_schema
from deploy.gateway.openapi.document import PATH, document, plain_path
from deploy.gateway.openapi.operations import OPERATIONS


def methods_and_paths(found: dict[str, Any]) -> set[tuple[str, str]]:
    return {(method.upper(), path) for path, item in found["paths"].items() for method in item}


async def test_every_route_is_described_and_every_description_has_a_route(region: Region) -> None:
    async with region.session.get(region.url + PATH) as response:
        assert response.content_type == "application/json"
        found = await response.json()
    routes = {(route.method, plain_path(route.path)) for route in region.gateway.routes()}
    # The files of the page at /ui are no API.
    routes = {route for route in routes if not route[1].startswith("/ui")} | {("GET", PATH)}
    assert routes == set(OPERATIONS), "describe the route in deploy/gateway/openapi/operations.py"
    assert methods_and_paths(found) == routes


async def test_each_address_describes_its_own_routes_to_everybody() -> None:
    async with open_region(api_keys=("one",), admin="127.0.0.1:0") as region:
        async with region.session.get(region.url + PATH) as response:
            clients = methods_and_paths(await response.json())
        async with region.session.get(region.admin_url + PATH) as response:
            operators = methods_and_paths(await response.json())
    assert ("POST", "/v1/completions") in clients - operators
    assert ("GET", "/prfaas/region") in operators - clients
    assert clients | operators == set(OPERATIONS)


@pytest.mark.parametrize("path", KINDS)
def test_every_endpoint_of_engines_tells_its_body_and_its_errors(path: str) -> None:
    endpoint = ENDPOINTS[KINDS[path]]
    found = document(OPERATIONS)
    operation = found["paths"][path]["post"]
    body = operation["requestBody"]["content"]["application/json"]["schema"]
    jsonschema.Draft202012Validator.check_schema(body)
    for example in body["examples"]:
        jsonschema.Draft202012Validator(body).validate(example)
    jsonschema.Draft202012Validator.check_schema(answer_schema(KINDS[path]))
    assert ("text/event-stream" in operation["responses"]["200"]["content"]) == endpoint.is_routed
    assert "prefill_unavailable" in operation["responses"]["503"]["description"]
    error = operation["responses"]["503"]["content"]["application/json"]["schema"]
    told = json.loads(ApiError(503, "prefill_unavailable", "no way").body(endpoint.errors))
    jsonschema.Draft202012Validator(error | {"components": found["components"]}).validate(told)
    assert {"apiKeyHeader": []} in operation["security"]


def test_all_fields_that_the_gateway_reads_are_described() -> None:
    described = {name for kind in get_args(Kind) for name in body_schema(kind)["properties"]}
    assert set(Body.__struct_fields__) <= described


def test_schemas_are_valid_and_all_references_lead_somewhere() -> None:
    found = document(OPERATIONS)
    schemas = found["components"]["schemas"]
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)

    def check(value: Any) -> None:
        if isinstance(value, dict):
            if "$ref" in value:
                assert value["$ref"].rpartition("/")[2] in schemas
            for item in value.values():
                check(item)
        elif isinstance(value, list):
            for item in value:
                check(item)

    check(found)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models", PATH])
async def test_another_method_is_refused_with_the_allowed_ones(region: Region, path: str) -> None:
    async with region.session.patch(region.url + path) as response:
        assert response.status == 405
        assert response.headers["Allow"]
        body = await response.json()
    error = document(OPERATIONS)["components"]["schemas"]["ErrorDetail"]
    jsonschema.Draft202012Validator(error).validate(body["error"])
