"""The OpenAPI 3.1 document (https://spec.openapis.org/oas/v3.1.1) of a list of routes.

It has what `operations` says of each route that is really served, and schemas made of the types
that handlers encode. Does not know any region.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

import msgspec
from aiohttp import web

from deploy.gateway.errors import JSON_TYPE, AnthropicErrorAnswer, ErrorAnswer, ErrorShape
from deploy.gateway.openapi.operations import OPERATIONS, STRUCTS, Key, Operation, ref
from kvmanager.program_version import program_version

PATH: Final = "/openapi.json"
_PATTERN: Final = re.compile(r"\{(\w+):[^{}]*\}")
_REFERENCES: Final = "#/components/schemas/{name}"
_SCHEMES: Final = {
    "apiKeyHeader": {
        "type": "apiKey",
        "in": "header",
        "name": "X-Api-Key",
        "description": "Any API key, as Anthropic's clients send it. `Authorization` goes first.",
    },
    "clientKey": {
        "type": "http",
        "scheme": "bearer",
        "description": "An API key of a client. Regions without keys need none.",
    },
    "operatorKey": {
        "type": "http",
        "scheme": "bearer",
        "description": (
            "An API key of an operator. Regions without keys need none, and pages that change "
            "nothing need one only with gateway.protect_admin."
        ),
    },
}
# An empty requirement: a region may have no keys. The document must not say which ones have.
_SECURITY: Final[dict[Key, list[dict[str, list[str]]]]] = {
    "none": [],
    "client": [{}, {"clientKey": []}, {"apiKeyHeader": []}],
    "operator": [{}, {"operatorKey": []}, {"apiKeyHeader": []}],
}
_ERRORS: Final[dict[ErrorShape, type]] = {
    "openai": ErrorAnswer,
    "anthropic": AnthropicErrorAnswer,
}
_MEANINGS: Final = {
    400: "The body, a field or a parameter is wrong or not supported.",
    401: "There are API keys, and this request has none of them.",
    403: "The API key does not permit this.",
    404: "There is no such model, or nothing of this name.",
    408: "The body came too slowly.",
    409: "The state of the cluster does not allow this.",
    413: "The body is too large.",
    415: "The body is not sent as JSON.",
    429: "A limit of the gateway or of the tenant is reached.",
    500: "The gateway failed.",
    502: "An engine or a cluster failed.",
    503: (
        "Nothing can serve this now. With the code `prefill_unavailable` no prefill cluster can "
        "take the prompt, and `gateway.scheduling.routing.local_prefill` refuses to do without."
    ),
    504: "An engine or a cluster did not answer in time.",
}
_MAY_NAME_A_TIME: Final = frozenset({429, 503})
_RETRY_AFTER: Final = {
    "Retry-After": {"description": "Seconds.", "schema": {"type": "integer", "minimum": 0}}
}


def documented(routes: Iterable[web.RouteDef]) -> list[web.RouteDef]:
    """`routes` and the one of their document, which everybody may read: its text is the same for
    every region.
    """
    body = b""

    async def answer(_request: web.Request) -> web.Response:
        return web.Response(body=body, headers={"Content-Type": JSON_TYPE})

    found = [*routes, web.get(PATH, answer)]
    body = msgspec.json.encode(document((route.method, route.path) for route in found))
    return found


def document(routes: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """The document of routes, each a method and a path as aiohttp writes it. Leaves out those that
    `OPERATIONS` does not have, such as the files of a page.
    """
    paths: dict[str, dict[str, Any]] = {}
    for method, path in sorted((method, plain_path(path)) for method, path in routes):
        operation = OPERATIONS.get((method, path))
        if operation is not None:
            paths.setdefault(path, {})[method.lower()] = _described(method, path, operation)
    _, schemas = msgspec.json.schema_components(STRUCTS, ref_template=_REFERENCES)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "PrfaaS gateway",
            "version": program_version(),
            "description": "A region's endpoints: OpenAI's and Anthropic's APIs, health, pages.",
        },
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": _SCHEMES},
    }


def plain_path(path: str) -> str:
    """A path of aiohttp without the patterns of its parameters, as OpenAPI writes it."""
    return _PATTERN.sub(r"{\1}", path)


def _described(method: str, path: str, operation: Operation) -> dict[str, Any]:
    words = re.findall(r"\w+", path)
    described: dict[str, Any] = {
        "operationId": "_".join((method.lower(), *words)),
        "summary": operation.summary,
        "tags": [operation.tag],
        "security": _SECURITY[operation.key],
        "responses": _answers(operation),
    }
    if operation.parameters:
        described["parameters"] = list(operation.parameters)
    if operation.body:
        content = {JSON_TYPE: {"schema": operation.body}}
        described["requestBody"] = {"required": True, "content": content}
    return described


def _answers(operation: Operation) -> dict[str, Any]:
    error = {JSON_TYPE: {"schema": ref(_ERRORS[operation.shape])}}
    found: dict[str, Any] = {
        str(status): {"description": _MEANINGS[status], "content": error}
        for status in (*operation.errors, 500)
    }
    for status in _MAY_NAME_A_TIME & set(operation.errors):
        found[str(status)]["headers"] = _RETRY_AFTER
    for status, content in operation.answers.items():
        media = {name: {"schema": schema} for name, schema in content.items()}
        found[str(status)] = {"description": operation.summary, "content": media}
    if operation.engine_errors:
        found["default"] = {"description": "An error of the engine.", "content": error}
    return dict(sorted(found.items()))
