"""Every endpoint but the completions: models, health, metrics, and the pages for operators.

Reads arguments and makes JSON of values that others own. Where there are API keys, the pages for
operators need one of theirs. Does not route or relay anything.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Final, TypeAlias, get_args

import msgspec
from aiohttp import web

from deploy.gateway.cache.api import (
    CacheOverview,
    KeyNames,
    TopPrefixes,
    explanation,
    hot_prefixes,
    node_caches,
)
from deploy.gateway.cache.region_caches import Order, RegionCaches
from deploy.gateway.config import GatewayConfig
from deploy.gateway.errors import JSON_TYPE, ApiError
from deploy.gateway.intake.accept import Intake, ServedModels
from deploy.gateway.intake.auth import KeyRing, authorization_of
from deploy.gateway.intake.limits import Limits
from deploy.gateway.links.region_links import RegionLinks
from deploy.gateway.links.watcher import RegionWatcher
from deploy.gateway.members.pages import MemberPages
from deploy.gateway.metrics import CONTENT_TYPE, GatewayMetrics
from deploy.gateway.region_overview import RegionNow
from deploy.gateway.scheduling.admission import Admission
from deploy.gateway.scheduling.long_term import LongTermService
from deploy.gateway.scheduling.overview import scheduling_overview
from deploy.gateway.scheduling.role_pages import RegionRolePages
from deploy.gateway.scheduling.scheduler import RegionScheduler
from deploy.gateway.serving.background import Background
from deploy.gateway.serving.exchange import Services
from deploy.gateway.serving.planning import NotRendered, judge_alone
from deploy.gateway.serving.records import RequestRecord
from kvmanager.program_version import program_version
from scheduler.live.snapshots import LinkPair
from scheduler.routing.decision import Reason

if TYPE_CHECKING:
    from deploy.gateway.sharing.region_sharing import RegionSharing

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]
Page: TypeAlias = Callable[[web.Request], Awaitable[object]]
"""Returns a JSON-ready value."""

NUM_LISTED: Final = 100
"""The records in a list, if the request names no number."""
_MAX_LISTED: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """The pages of one gateway, and everything that they show.

    `link_names` names the links from each prefill cluster; `services` raises `ApiError` until the
    gateway has started.
    """

    config: GatewayConfig
    keys: KeyRing
    limits: Limits
    intake: Intake
    models: ServedModels
    metrics: GatewayMetrics
    records: deque[RequestRecord]
    watcher: RegionWatcher
    background: Background
    scheduler: RegionScheduler
    admission: Admission
    long_term: LongTermService
    role_pages: RegionRolePages
    member_pages: MemberPages
    caches: RegionCaches | None
    links: RegionLinks | None
    link_names: Mapping[str, str]
    key_names: KeyNames
    services: Callable[[], Services]
    sharing: RegionSharing | None
    exposure: str | None
    """The rights that this configuration gives anybody on the network; None if there are none."""

    def for_everybody(self) -> Iterable[web.RouteDef]:
        """The pages that clients and operators need, for an application's router."""
        return [
            web.get("/health", self._health),
            web.get("/livez", self._live),
            web.get("/readyz", self._ready),
            web.get("/version", self._version),
            web.post("/prfaas/cache/explain", self._explain_cache),
        ]

    def for_clients(self) -> Iterable[web.RouteDef]:
        """The pages that only clients need, for an application's router."""
        return [
            web.get("/v1/models", self._list_models),
            web.get("/v1/models/{model:.+}", self._show_model),
        ]

    def for_operators(self) -> Iterable[web.RouteDef]:
        """The pages that only operators need, for an application's router."""
        pages: dict[str, Page] = {
            "/prfaas/requests": self._requests,
            "/prfaas/requests/{id}": self._request,
            "/prfaas/region": self._region,
            "/prfaas/scheduling": self._scheduling,
            "/prfaas/plan": self._plan,
            "/prfaas/links": self._links,
            "/prfaas/instances": self._instances,
            "/prfaas/gateways": self._gateways,
            "/prfaas/cache": self._caches,
            "/prfaas/cache/top": self._prefixes,
            "/v1/pd_role": self._roles,
        }
        return [
            web.get("/metrics", self._metrics),
            *(web.get(path, self._protected(page)) for path, page in pages.items()),
            web.post("/v1/pd_role", self._change_role),
            web.post("/prfaas/instances", self._join),
            web.delete("/prfaas/instances/{name}", self._leave),
        ]

    async def _list_models(self, request: web.Request) -> web.Response:
        """GET /v1/models."""
        self._check_key(request)
        return _json({"object": "list", "data": self.models.cards()})

    async def _show_model(self, request: web.Request) -> web.Response:
        """GET /v1/models/{model}."""
        self._check_key(request)
        return _json(self.models.card(request.match_info["model"]))

    async def _health(self, _request: web.Request) -> web.Response:
        """GET /health: 200 when a request could be served."""
        if why_not := self._why_not_ready():
            return _json({"status": why_not}, 503)
        shown = {} if self.exposure is None else {"open": self.exposure}
        return _json({"status": "ok"} | shown)

    async def _live(self, _request: web.Request) -> web.Response:
        """GET /livez: 200 as long as the event loop turns, whatever else is broken."""
        return web.Response(text="ok\n")

    async def _ready(self, _request: web.Request) -> web.Response:
        """GET /readyz: 200 when a request could be served."""
        why_not = self._why_not_ready()
        return web.Response(status=503 if why_not else 200, text=f"{why_not or 'ok'}\n")

    def _why_not_ready(self) -> str:
        # Load balancers must leave a gateway that drains, however healthy its engines are.
        if self.limits.is_draining:
            return "draining"
        return "" if self.watcher.is_healthy() else "no healthy engine"

    async def _version(self, _request: web.Request) -> web.Response:
        """GET /version."""
        return _json({"version": program_version()})

    async def _metrics(self, request: web.Request) -> web.Response:
        """GET /metrics."""
        self.check_operator(request)
        body = self.metrics.render()
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})

    async def _requests(self, request: web.Request) -> object:
        """GET /prfaas/requests?limit=N: the latest records, newest first."""
        return {"requests": list(islice(reversed(self.records), _limit(request, NUM_LISTED)))}

    async def _request(self, request: web.Request) -> object:
        """GET /prfaas/requests/{id}: all records with this id, newest first."""
        # There may be several: clients choose ids, and may use one again.
        request_id = request.match_info["id"]
        found = [record for record in reversed(self.records) if record.request_id == request_id]
        if not found:
            raise ApiError(404, "unknown_request", "No record of this request (any more).")
        return {"requests": found}

    async def _region(self, _request: web.Request) -> object:
        """GET /prfaas/region: what routing sees. `pd` is the first one of `pds`."""
        pds = self.watcher.pd_reports()
        return RegionNow(
            threshold_tokens=self.config.threshold_tokens,
            in_flight=self.limits.num_in_flight,
            buffered_bytes=self.limits.num_body_bytes,
            settling=len(self.background),
            links=dict(self.link_names),
            thresholds=self.scheduler.thresholds_now(),
            admission=self.admission.overview(),
            pd=next(iter(pds.values())),
            pds=pds,
            prefill=self.watcher.prefill_reports(),
        )

    async def _scheduling(self, _request: web.Request) -> object:
        """GET /prfaas/scheduling: what was learnt, and what routes rest on."""
        return scheduling_overview(self.scheduler)

    async def _plan(self, _request: web.Request) -> object:
        """GET /prfaas/plan: what the long-term loop decided last."""
        return self.long_term.overview()

    async def _links(self, _request: web.Request) -> object:
        """GET /prfaas/links: the links, and the paths they are made of."""
        if self.links is None:
            message = "This gateway was started without following its links."
            raise ApiError(404, "no_links", message)
        return self.links.overview()

    async def _gateways(self, _request: web.Request) -> object:
        """GET /prfaas/gateways: the gateways of the region, and which of them leads."""
        if self.sharing is None:
            raise ApiError(404, "not_shared", "This is the only gateway of its region.")
        return self.sharing.overview()

    async def _caches(self, _request: web.Request) -> object:
        """GET /prfaas/cache: what every node holds, and what the directory knows of it."""
        caches = self._needed_caches()
        statuses, known = await asyncio.gather(caches.statuses(), caches.directory.nodes())
        # A node may have been reported while the agents were asked.
        targets = {name: at for name, at in caches.targets.items() if name in statuses}
        return CacheOverview(node_caches(targets, statuses, known))

    async def _prefixes(self, request: web.Request) -> object:
        """GET /prfaas/cache/top?limit=N&order=hits|size|recent."""
        caches = self._needed_caches()
        limit, order = _limit(request, 20), _order(request)
        listed = await caches.prefixes(limit, order)
        errors = {str(name): reply for name, reply in listed.items() if isinstance(reply, str)}
        return TopPrefixes(hot_prefixes(listed, order, limit, self.key_names), errors)

    async def _explain_cache(self, request: web.Request) -> web.Response:
        """POST /prfaas/cache/explain: how a prompt would fare now. The body is that of a completion
        or a chat completion. An engine renders it, so it needs a key and room as these do.
        """
        services = self.services()
        async with self.intake.received(request) as exchange:
            self._needed_caches()
            try:
                judged = await judge_alone(services, exchange)
            except NotRendered as error:
                message = f"The prompt's tokens cannot be known ({error.reason.value})."
                status = 503 if error.reason is Reason.RENDER_UNAVAILABLE else 400
                raise ApiError(status, "not_rendered", message) from error
            decision, home = judged.decision, exchange.record.home
            if decision.pd != home:
                judged = judged.at(decision.pd)
            found = explanation(
                exchange.inbound.model,
                judged.shape,
                judged.cached,
                decision,
                self.key_names,
                home=home,
                linked={name for name, pd in self.scheduler.pairs if pd == decision.pd},
            )
            return _json(found)

    def _needed_caches(self) -> RegionCaches:
        if self.caches is None:
            message = "This gateway was started without a directory of what is cached."
            raise ApiError(404, "no_cache_directory", message)
        return self.caches

    async def _roles(self, request: web.Request) -> object:
        """GET /v1/pd_role."""
        return await self.role_pages.overview(request.query)

    async def _change_role(self, request: web.Request) -> web.Response:
        """POST /v1/pd_role."""
        status, role = await self.role_pages.change(await self.ordered(request), request.query)
        return _json(role, status)

    async def _instances(self, _request: web.Request) -> object:
        """GET /prfaas/instances."""
        return self.member_pages.overview()

    async def _join(self, request: web.Request) -> web.Response:
        """POST /prfaas/instances."""
        self.keys.check_adding(authorization_of(request.headers))
        return _json(await self.member_pages.join(await self.ordered(request)), 202)

    async def _leave(self, request: web.Request) -> web.Response:
        """DELETE /prfaas/instances/{name}?cluster=NAME&limit=TIME&force=1."""
        self._check_order(request)
        name = request.match_info["name"]
        return _json(await self.member_pages.leave(name, request.query), 202)

    async def ordered(self, request: web.Request) -> bytes:
        """The body of an operator's order. Raises `ApiError` for another client's."""
        self._check_order(request)
        if request.content_type != JSON_TYPE:
            raise ApiError(415, "unsupported_media_type", f"Send the body as {JSON_TYPE}.")
        self.limits.check_accepting()
        body = await self.limits.read_small(request)
        # The key may have been revoked while the body arrived.
        self.keys.check_operator(authorization_of(request.headers))
        return body

    def _check_order(self, request: web.Request) -> None:
        # An order always needs an operator's key if there are keys, not only with `protect_admin`.
        self.keys.check_operator(authorization_of(request.headers))
        if not self.keys.has_keys:
            _check_no_browser(request)

    def _protected(self, page: Page) -> Handler:
        """A handler that answers with `page` if the client may see it."""

        async def answer(request: web.Request) -> web.Response:
            self.check_operator(request)
            return _json(await page(request))

        return answer

    def _check_key(self, request: web.Request) -> None:
        self.keys.check(authorization_of(request.headers))

    def check_operator(self, request: web.Request) -> None:
        """Raises `ApiError` 401 or 403 unless the client may see pages for operators."""
        if self.config.protect_admin:
            self.keys.check_operator(authorization_of(request.headers))


def shown_links(links: Mapping[LinkPair, str]) -> dict[str, str]:
    """The names of the links from each prefill cluster."""
    shown: dict[str, str] = {}
    for (source, _), name in links.items():
        shown[source] = ", ".join(filter(None, (shown.get(source), name)))
    return {source: names for source, names in shown.items() if names}


def _check_no_browser(request: web.Request) -> None:
    """Raises `ApiError` 403 for a request that a web page made a browser send.

    An operator may look at a page of anybody's in a browser that reaches this gateway, and the page
    may have its own name lead here. So Origin (RFC 6454) is no better where it equals Host.
    """
    if "Origin" in request.headers or request.headers.get("Sec-Fetch-Site", "none") != "none":
        message = "Web pages cannot give orders here; use the `prfaas` command, or give API keys."
        raise ApiError(403, "from_a_browser", message)


def _limit(request: web.Request, default: int) -> int:
    text = request.query.get("limit", str(default))
    if not (text.isascii() and text.isdigit() and 0 < int(text) <= _MAX_LISTED):
        message = f"limit must be a number from 1 to {_MAX_LISTED}."
        raise ApiError(400, "invalid_limit", message, param="limit")
    return int(text)


def _order(request: web.Request) -> Order:
    orders: tuple[Order, ...] = get_args(Order)
    wanted = request.query.get("order", "hits")
    for order in orders:
        if order == wanted:
            return order
    message = f"order must be one of {', '.join(orders)}."
    raise ApiError(400, "invalid_order", message, param="order")


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(
        status=status, body=msgspec.json.encode(value), headers={"Content-Type": JSON_TYPE}
    )
