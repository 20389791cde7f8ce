"""What each route of a gateway takes and answers, for its OpenAPI document.

The table is static: it has nothing of a region's configuration, so that everybody may read it. A
test compares it with the routes. Does not know handlers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Literal

from deploy.gateway.cache.api import CacheOverview, Explanation, TopPrefixes
from deploy.gateway.errors import JSON_TYPE, AnthropicErrorAnswer, ErrorAnswer, ErrorShape
from deploy.gateway.intake.accept import ModelCard
from deploy.gateway.intake.endpoints import ENDPOINTS, Endpoint, Kind
from deploy.gateway.links.region_links import LinksOverview
from deploy.gateway.members.pages import InstanceNow, InstancesOverview
from deploy.gateway.openapi.answers import answer_schema
from deploy.gateway.openapi.bodies import Schema, body_schema
from deploy.gateway.scheduling.overview import SchedulingOverview
from deploy.gateway.scheduling.plan_overview import PlanOverview
from deploy.gateway.scheduling.role_pages import InstanceRole, RoleOrder, RolesOverview
from deploy.gateway.serving.records import RequestRecord
from deploy.gateway.sharing.overview import SharingOverview

Key = Literal["none", "client", "operator"]
"""Whose API key a route needs, where there are keys."""

_EVENTS: Final = "text/event-stream"
_TEXT: Final = "text/plain"
_STREAMED: Final = frozenset(kind for kind, endpoint in ENDPOINTS.items() if endpoint.is_routed)
_ANY_OBJECT: Final[Schema] = {"type": "object"}

STRUCTS: Final = (
    ErrorAnswer,
    AnthropicErrorAnswer,
    ModelCard,
    RequestRecord,
    SchedulingOverview,
    PlanOverview,
    LinksOverview,
    SharingOverview,
    CacheOverview,
    TopPrefixes,
    Explanation,
    InstanceNow,
    InstancesOverview,
    RoleOrder,
    InstanceRole,
    RolesOverview,
)
"""The types that schemas are made of."""


def ref(struct: type) -> Schema:
    """A reference to the schema of a type in `STRUCTS`."""
    return {"$ref": f"#/components/schemas/{struct.__name__}"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One route. `answers` has the schema of each media type by status, and `errors` the statuses
    of error objects besides 500, which have `shape`. With `engine_errors` an engine's error comes
    with the engine's status, too.
    """

    summary: str
    tag: str
    answers: dict[int, dict[str, Schema]]
    key: Key = "none"
    errors: tuple[int, ...] = ()
    shape: ErrorShape = "openai"
    engine_errors: bool = False
    parameters: tuple[dict[str, Any], ...] = ()
    body: Schema = field(default_factory=dict)


def _query(name: str, schema: Schema, description: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "schema": schema, "description": description}


def _path(name: str) -> dict[str, Any]:
    schema = {"type": "string", "minLength": 1}
    return {"name": name, "in": "path", "required": True, "schema": schema}


_LIMIT: Final = _query(
    "limit", {"type": "integer", "minimum": 1, "maximum": 1000}, "At most so many."
)
_KEY_ERRORS: Final = (401, 403)
_BODY_ERRORS: Final = (400, 401, 403, 404, 408, 413, 415, 429, 503)
_ENGINE_ERRORS: Final = (*_BODY_ERRORS, 502, 504)
_ORDER_ERRORS: Final = (*_BODY_ERRORS, 409, 502, 504)


def _json(schema: Schema, status: int = 200) -> dict[int, dict[str, Schema]]:
    return {status: {JSON_TYPE: schema}}


def _page(
    summary: str,
    schema: Schema,
    *parameters: dict[str, Any],
    errors: tuple[int, ...] = (),
) -> Operation:
    """A page for operators."""
    return Operation(
        summary=summary,
        tag="operators",
        answers=_json(schema),
        key="operator",
        errors=(*_KEY_ERRORS, *errors),
        parameters=parameters,
    )


def _list_of(name: str, struct: type) -> Schema:
    items = {"type": "array", "items": ref(struct)}
    return {"type": "object", "properties": {name: items}, "required": [name]}


_STATUS: Final[Schema] = {
    "type": "object",
    "properties": {"status": {"type": "string"}, "open": {"type": "string"}},
    "required": ["status"],
}
_MODELS: Final[Schema] = {
    "type": "object",
    "properties": {"object": {"const": "list"}, "data": {"type": "array", "items": ref(ModelCard)}},
    "required": ["object", "data"],
}
_REGION: Final[Schema] = {
    "type": "object",
    "description": "What routing sees: thresholds, load, and the last report of each cluster.",
    "required": ["threshold_tokens", "in_flight", "links", "thresholds", "pds", "prefill"],
}
_JOIN: Final[Schema] = {
    "type": "object",
    "properties": {
        name: {"type": "string"} for name in ("cluster", "name", "url", "agent", "node", "model")
    }
    | {"role": {"enum": ["both", "encode", "prefill", "decode"]}}
    | {name: {"type": "integer", "minimum": 1} for name in ("max_concurrent", "decode_slots")},
    "required": ["cluster", "name", "url", "agent"],
    "additionalProperties": False,
}
_VERSION: Final[Schema] = {
    "type": "object",
    "properties": {"version": {"type": "string"}},
    "required": ["version"],
}


def _of_engines(kind: Kind, endpoint: Endpoint) -> Operation:
    """An endpoint that passes requests on to engines."""
    content = {JSON_TYPE: answer_schema(kind)}
    if kind in _STREAMED:
        content[_EVENTS] = {}
    return Operation(
        summary=f"{endpoint.summary}.",
        tag=endpoint.errors,
        answers={200: content},
        key="client",
        errors=_ENGINE_ERRORS,
        shape=endpoint.errors,
        engine_errors=True,
        body=body_schema(kind),
    )


OPERATIONS: Final[dict[tuple[str, str], Operation]] = {
    ("POST", path): _of_engines(kind, endpoint)
    for kind, endpoint in ENDPOINTS.items()
    for path in endpoint.paths
} | {
    ("GET", "/v1/models"): Operation(
        summary="List the models and their adapters.",
        tag="openai",
        answers=_json(_MODELS),
        key="client",
        errors=_KEY_ERRORS,
    ),
    ("GET", "/v1/models/{model}"): Operation(
        summary="Show one model or adapter.",
        tag="openai",
        answers=_json(ref(ModelCard)),
        key="client",
        errors=(*_KEY_ERRORS, 404),
        parameters=(_path("model"),),
    ),
    ("GET", "/health"): Operation(
        summary="Whether a request could be served.",
        tag="health",
        answers=_json(_STATUS) | _json(_STATUS, 503),
    ),
    ("GET", "/livez"): Operation(
        summary="Whether the process is alive.", tag="health", answers={200: {_TEXT: {}}}
    ),
    ("GET", "/readyz"): Operation(
        summary="Whether a request could be served, as text.",
        tag="health",
        answers={200: {_TEXT: {}}, 503: {_TEXT: {}}},
    ),
    ("GET", "/version"): Operation(
        summary="The version of the gateway.", tag="health", answers=_json(_VERSION)
    ),
    ("GET", "/openapi.json"): Operation(
        summary="This document.", tag="health", answers=_json(_ANY_OBJECT)
    ),
    ("GET", "/metrics"): Operation(
        summary="Metrics for Prometheus.",
        tag="operators",
        answers={200: {_TEXT: {}}},
        key="operator",
        errors=(*_KEY_ERRORS, 503),
    ),
    ("POST", "/prfaas/cache/explain"): Operation(
        summary="How a prompt would fare now. The body is that of a completion, chat or response.",
        tag="operators",
        answers=_json(ref(Explanation)),
        key="client",
        errors=_ENGINE_ERRORS,
        body={"anyOf": [body_schema(kind) for kind in ("completion", "chat", "responses")]},
    ),
    ("GET", "/prfaas/requests"): _page(
        "The latest requests, newest first.",
        _list_of("requests", RequestRecord),
        _LIMIT,
        errors=(400,),
    ),
    ("GET", "/prfaas/requests/{id}"): _page(
        "All records with this request id, newest first.",
        _list_of("requests", RequestRecord),
        _path("id"),
        errors=(404,),
    ),
    ("GET", "/prfaas/region"): _page("The region as routing sees it.", _REGION),
    ("GET", "/prfaas/scheduling"): _page(
        "What was learnt, and what routes rest on.", ref(SchedulingOverview)
    ),
    ("GET", "/prfaas/plan"): _page("The plan in force.", ref(PlanOverview), errors=(503,)),
    ("GET", "/prfaas/links"): _page(
        "The links and their paths.", ref(LinksOverview), errors=(404,)
    ),
    ("GET", "/prfaas/gateways"): _page(
        "The gateways of the region, and which one leads.", ref(SharingOverview), errors=(404,)
    ),
    ("GET", "/prfaas/cache"): _page("What every node holds.", ref(CacheOverview), errors=(404,)),
    ("GET", "/prfaas/cache/top"): _page(
        "The cached prefixes that matter most.",
        ref(TopPrefixes),
        _LIMIT,
        _query("order", {"enum": ["hits", "size", "recent"]}, "What goes first."),
        errors=(400, 404),
    ),
    ("GET", "/prfaas/instances"): _page("All instances.", ref(InstancesOverview)),
    ("POST", "/prfaas/instances"): Operation(
        summary="Have an instance join a cluster.",
        tag="operators",
        answers=_json(ref(InstanceNow), 202),
        key="operator",
        errors=_ORDER_ERRORS,
        body=_JOIN,
    ),
    ("DELETE", "/prfaas/instances/{name}"): Operation(
        summary="Have an instance leave, once its requests are over.",
        tag="operators",
        answers=_json(ref(InstanceNow), 202),
        key="operator",
        errors=(400, 401, 403, 404, 409, 502, 503, 504),
        parameters=(
            _path("name"),
            _query("cluster", {"type": "string"}, "Its cluster, if several have the name."),
            _query("limit", {"type": "string", "examples": ["5m"]}, "How long requests may take."),
            _query("force", {"enum": ["0", "1", "true", "false"]}, "Also the last of its role."),
        ),
    ),
    ("GET", "/v1/pd_role"): _page(
        "The roles of a PD cluster's instances.",
        ref(RolesOverview),
        _query("cluster", {"type": "string"}, "Another cluster than the first one."),
        errors=(404, 502, 503, 504),
    ),
    ("POST", "/v1/pd_role"): Operation(
        summary="Change the role of an instance.",
        tag="operators",
        answers=_json(ref(InstanceRole)) | _json(ref(InstanceRole), 202),
        key="operator",
        errors=_ORDER_ERRORS,
        parameters=(
            _query("cluster", {"type": "string"}, "Its cluster, if several have the name."),
        ),
        body=ref(RoleOrder),
    ),
}
"""By method and path, as OpenAPI writes paths."""
