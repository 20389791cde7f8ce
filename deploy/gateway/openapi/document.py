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

from deploy.gateway.errors import JSON_TYPE, ErrorAnswer
from deploy.gateway.openapi.operations import OPERATIONS, STRUCTS, Key, Operation, ref
from kvmanager.program_version import program_version

PATH: Final = "/openapi.json"
_PATTERN: Final = re.compile(r"\{(\w+):[^{}]*\}")
_REFERENCES: Final = "#/components/schemas/{name}"
_SCHEMES: Final = {
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
    "client": [{}, {"clientKey": []}],
    "operator": [{}, {"operatorKey": []}],
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
            "description": "The endpoints of a region: OpenAI's API, health, and operators' pages.",
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
    error = {JSON_TYPE: {"schema": ref(ErrorAnswer)}}
    found: dict[str, Any] = {
        str(status): {"description": "An OpenAI error object.", "content": error}
        for status in (*operation.errors, 500)
    }
    for status, content in operation.answers.items():
        media = {name: {"schema": schema} for name, schema in content.items()}
        found[str(status)] = {"description": operation.summary, "content": media}
    if operation.engine_errors:
        found["default"] = {"description": "An error of the engine, as it came.", "content": error}
    return dict(sorted(found.items()))
