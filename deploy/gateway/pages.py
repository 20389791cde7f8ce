"""What the gateway answers besides completions: its models, its health, and what operators ask.

Reads arguments and makes JSON of values that others own. Where the configuration protects them,
those for operators ask for an API key. Does not route or relay anything.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Final, TypeAlias

import msgspec
from aiohttp import web

from deploy.gateway.cache.pages import CachePages
from deploy.gateway.config import GatewayConfig
from deploy.gateway.errors import JSON_TYPE, ApiError
from deploy.gateway.intake.accept import Intake
from deploy.gateway.intake.auth import KeyRing
from deploy.gateway.intake.limits import Limits
from deploy.gateway.intake.models import ServedModels
from deploy.gateway.links.region_links import RegionLinks
from deploy.gateway.links.watcher import RegionWatcher
from deploy.gateway.metrics import CONTENT_TYPE, GatewayMetrics
from deploy.gateway.scheduling.admission import Admission
from deploy.gateway.scheduling.long_term import LongTermService
from deploy.gateway.scheduling.overview import scheduling_overview
from deploy.gateway.scheduling.role_pages import RolePages
from deploy.gateway.scheduling.scheduler import RegionScheduler
from deploy.gateway.serving.background import Background
from deploy.gateway.serving.planning import Planner
from deploy.gateway.serving.records import RecordRing

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]
Page: TypeAlias = Callable[[web.Request], Awaitable[object]]
"""Gives a JSON-ready value."""

_MAX_LISTED_RECORDS: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSources:
    """What pages are made of. `link_names` names the link to each prefill cluster; `planner` raises
    `ApiError` until the gateway has started.
    """

    config: GatewayConfig
    keys: KeyRing
    limits: Limits
    intake: Intake
    models: ServedModels
    metrics: GatewayMetrics
    records: RecordRing
    watcher: RegionWatcher
    background: Background
    scheduler: RegionScheduler
    admission: Admission
    long_term: LongTermService
    roles: RolePages
    caches: CachePages
    links: RegionLinks | None
    link_names: Mapping[str, str]
    planner: Callable[[], Planner]


class Pages:
    """Every endpoint of one gateway but those for completions."""

    def __init__(self, sources: PageSources) -> None:
        self._from = sources

    def routes(self) -> Iterable[web.RouteDef]:
        """For the application's router."""
        for_operators: dict[str, Page] = {
            "/prfaas/requests": self._requests,
            "/prfaas/requests/{id}": self._request,
            "/prfaas/region": self._region,
            "/prfaas/scheduling": self._scheduling,
            "/prfaas/plan": self._plan,
            "/prfaas/links": self._links,
            "/prfaas/cache": self._caches,
            "/prfaas/cache/top": self._prefixes,
            "/v1/pd_role": self._roles,
        }
        return [
            web.get("/v1/models", self._list_models),
            web.get("/v1/models/{model:.+}", self._show_model),
            web.get("/health", self._health),
            web.get("/version", self._version),
            web.get("/metrics", self._metrics),
            *(web.get(path, self._for_operators(page)) for path, page in for_operators.items()),
            web.post("/v1/pd_role", self._change_role),
            web.post("/prfaas/cache/explain", self._explain_cache),
        ]

    async def _list_models(self, request: web.Request) -> web.Response:
        """GET /v1/models."""
        self._check_key(request)
        return _json({"object": "list", "data": self._from.models.cards()})

    async def _show_model(self, request: web.Request) -> web.Response:
        """GET /v1/models/{model}."""
        self._check_key(request)
        return _json(self._from.models.card(request.match_info["model"]))

    async def _health(self, _request: web.Request) -> web.Response:
        """GET /health: 200 when a request could be served."""
        if self._from.limits.is_draining:
            return _json({"status": "draining"}, 503)
        if not self._from.watcher.is_healthy():
            return _json({"status": "no healthy engine"}, 503)
        return _json({"status": "ok"})

    async def _version(self, _request: web.Request) -> web.Response:
        """GET /version."""
        return _json({"version": _own_version()})

    async def _metrics(self, request: web.Request) -> web.Response:
        """GET /metrics."""
        self._check_operator(request)
        body = self._from.metrics.render()
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})

    async def _requests(self, request: web.Request) -> object:
        """GET /prfaas/requests?limit=N: the latest records, newest first."""
        text = request.query.get("limit", "100")
        if not (text.isascii() and text.isdigit() and 0 < int(text) <= _MAX_LISTED_RECORDS):
            message = f"limit must be a number from 1 to {_MAX_LISTED_RECORDS}."
            raise ApiError(400, "invalid_limit", message, param="limit")
        return {"requests": self._from.records.latest(int(text))}

    async def _request(self, request: web.Request) -> object:
        """GET /prfaas/requests/{id}."""
        found = self._from.records.find(request.match_info["id"])
        if not found:
            raise ApiError(404, "unknown_request", "No record of this request (any more).")
        return {"requests": found}

    async def _region(self, _request: web.Request) -> object:
        """GET /prfaas/region: what routing sees."""
        sources = self._from
        return {
            "threshold_tokens": sources.config.threshold_tokens,
            "in_flight": sources.limits.num_in_flight,
            "buffered_bytes": sources.limits.num_body_bytes,
            "settling": len(sources.background),
            "links": sources.link_names,
            "thresholds": sources.scheduler.thresholds_now(),
            "admission": sources.admission.overview(),
            "pd": sources.watcher.pd_report(),
            "prefill": sources.watcher.prefill_reports(),
        }

    async def _scheduling(self, _request: web.Request) -> object:
        """GET /prfaas/scheduling: what was learnt, and what routes rest on."""
        return scheduling_overview(self._from.scheduler)

    async def _plan(self, _request: web.Request) -> object:
        """GET /prfaas/plan."""
        return self._from.long_term.overview()

    async def _links(self, _request: web.Request) -> object:
        """GET /prfaas/links."""
        if self._from.links is None:
            message = "This gateway was started without following its links."
            raise ApiError(404, "no_links", message)
        return self._from.links.overview()

    async def _caches(self, _request: web.Request) -> object:
        """GET /prfaas/cache."""
        return await self._from.caches.overview()

    async def _prefixes(self, request: web.Request) -> object:
        """GET /prfaas/cache/top."""
        return await self._from.caches.top(request.query)

    async def _explain_cache(self, request: web.Request) -> web.Response:
        """POST /prfaas/cache/explain: a body as for a completion or a chat completion. It is
        rendered by an engine, so it needs a key and room as these do.
        """
        planner = self._from.planner()
        async with self._from.intake.received(request) as exchange:
            return _json(await self._from.caches.explain(planner, exchange))

    async def _roles(self, _request: web.Request) -> object:
        """GET /v1/pd_role."""
        return await self._from.roles.overview()

    async def _change_role(self, request: web.Request) -> web.Response:
        """POST /v1/pd_role. Changes something: where there are keys, it takes an operator's."""
        self._from.keys.check_operator(_authorization(request))
        self._from.limits.check_accepting()
        body = await self._from.limits.read_small(request)
        status, role = await self._from.roles.change(body, request.query)
        return _json(role, status)

    def _for_operators(self, page: Page) -> Handler:
        """Answers with `page` whoever may see it."""

        async def answer(request: web.Request) -> web.Response:
            self._check_operator(request)
            return _json(await page(request))

        return answer

    def _check_key(self, request: web.Request) -> None:
        self._from.keys.check(_authorization(request))

    def _check_operator(self, request: web.Request) -> None:
        if self._from.config.protect_admin:
            self._from.keys.check_operator(_authorization(request))


def _authorization(request: web.Request) -> str | None:
    return request.headers.get("Authorization")


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(
        status=status, body=msgspec.json.encode(value), headers={"Content-Type": JSON_TYPE}
    )


def _own_version() -> str:
    try:
        return version("prfaas")
    except PackageNotFoundError:
        return "unknown"
