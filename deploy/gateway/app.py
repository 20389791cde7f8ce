"""The gateway as an aiohttp application: endpoints, limits, authentication, start and stop.

`Gateway` owns what lives as long as the process: the connection pool, the watcher, the records.
Does not know how clusters are made; they are given to it and stay their owner's to close.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Final

import msgspec
from aiohttp import web

from deploy.gateway.auth import KeyRing
from deploy.gateway.background import Background
from deploy.gateway.cache_pages import CachePages
from deploy.gateway.cache_upkeep import CacheUpkeep
from deploy.gateway.caches import RegionCaches
from deploy.gateway.config import GatewayConfig
from deploy.gateway.errors import JSON_TYPE, ApiError
from deploy.gateway.exchange import PATHS, Exchange, open_exchange
from deploy.gateway.inbound import Kind, kind_of, parse_request
from deploy.gateway.links import RegionLinks
from deploy.gateway.metrics import CONTENT_TYPE, GatewayMetrics
from deploy.gateway.offload import Services
from deploy.gateway.proxy.engine import EngineDoor
from deploy.gateway.records import RecordRing
from deploy.gateway.serving import Serving
from deploy.gateway.tracing import usable_request_id
from deploy.gateway.watcher import RegionWatcher
from kvmanager.engines.jobs import ClusterReport
from local_pd.cluster import PdCluster
from prfaas.cluster import PrefillCluster

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

logger = logging.getLogger("prfaas.deploy.gateway")

_INTERNAL_ERROR: Final = "The gateway failed to serve this request."
_MAX_LISTED_RECORDS: Final = 1000


class Gateway:
    """The region's entry endpoint. `start` it on the loop that serves it."""

    def __init__(
        self,
        config: GatewayConfig,
        pd: PdCluster,
        prefill_clusters: Mapping[str, PrefillCluster],
        links: Mapping[str, str] | None = None,
        caches: RegionCaches | None = None,
        *,
        region_links: RegionLinks | None = None,
    ) -> None:
        """`links` names the link to each prefill cluster, for display. `caches` are asked what is
        cached of a prompt, `region_links` what links carry; both are closed with the gateway.
        """
        self.config = config
        self.metrics = GatewayMetrics()
        self.records = RecordRing(config.num_records)
        self._pd = pd
        self._prefill_clusters = dict(prefill_clusters)
        self._links = dict(links or {})
        self._keys = KeyRing(key.get_secret_value() for key in config.api_keys)
        self._models = {model.name: model for model in config.models}
        self._caches = caches
        self._cache_pages = CachePages(caches)
        self._region_links = region_links
        self._watcher = RegionWatcher(config, pd, prefill_clusters, on_report=self._note_nodes)
        self._background = Background()
        self._upkeep: CacheUpkeep | None = None
        self.metrics.watch(lambda: self._num_in_flight, lambda: len(self._background))
        self._started_s = time.time()
        self._num_in_flight = 0
        self._num_body_bytes = 0
        self._is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._door: EngineDoor | None = None
        self._serving: Serving | None = None

    async def start(self) -> None:
        """Open the connection pool and take the first reports."""
        config = self.config
        if self._caches is not None:
            self._upkeep = CacheUpkeep(
                self._caches, self._background, self.metrics.registry, self._watcher.reports
            )
            self._upkeep.start()
        self._door = EngineDoor(config.timeouts, max_answer_bytes=config.max_answer_bytes)
        services = Services(
            pd=self._pd,
            prefill_clusters=self._prefill_clusters,
            door=self._door,
            metrics=self.metrics,
            background=self._background,
            timeouts=config.timeouts,
            caches=self._caches,
            upkeep=self._upkeep,
        )
        self._serving = Serving(services, self._watcher.view, self._watcher.cache_places)
        await self._watcher.start()

    @property
    def num_in_flight(self) -> int:
        """Requests being served right now."""
        return self._num_in_flight

    def stop_accepting(self) -> None:
        """Answer new requests with 503 from now on; those in flight go on."""
        self._is_draining = True

    async def drain(self) -> None:
        """Stop accepting, and wait for what is in flight, for at most the configured time."""
        self.stop_accepting()
        try:
            async with asyncio.timeout(self.config.timeouts.drain_s):
                await self._idle.wait()
        except TimeoutError:
            return

    async def close(self) -> None:
        """Give back what requests held, then close connections. Idempotent."""
        self.stop_accepting()
        await self._watcher.close()
        if self._upkeep is not None:
            await self._upkeep.close()
        await self._background.drain(self.config.timeouts.cluster_s)
        if self._caches is not None:
            await self._caches.close()
        if self._region_links is not None:
            await self._region_links.close()
        if self._door is not None:
            await self._door.close()

    async def complete(self, kind: Kind, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions and /v1/chat/completions. Raises `ApiError` before routing."""
        started_s = time.monotonic()
        serving = self._started()
        async with self._received(request) as body:
            exchange = self._exchange(kind, body, request, started_s)
            self.records.append(exchange.record)
            return await serving.serve(exchange, request)

    async def show_caches(self, request: web.Request) -> web.Response:
        """GET /prfaas/cache."""
        self._check_admin(request)
        return _json(await self._cache_pages.overview())

    async def list_prefixes(self, request: web.Request) -> web.Response:
        """GET /prfaas/cache/top."""
        self._check_admin(request)
        return _json(await self._cache_pages.top(request.query))

    async def show_links(self, request: web.Request) -> web.Response:
        """GET /prfaas/links."""
        self._check_admin(request)
        if self._region_links is None:
            message = "This gateway was started without following its links."
            raise ApiError(404, "no_links", message)
        return _json(self._region_links.overview())

    async def explain_cache(self, request: web.Request) -> web.Response:
        """POST /prfaas/cache/explain: a body as for a completion or a chat completion."""
        started_s = time.monotonic()
        serving = self._started()
        async with self._received(request) as body:
            exchange = self._exchange(kind_of(body), body, request, started_s)
            return _json(await self._cache_pages.explain(serving, exchange))

    async def list_models(self, request: web.Request) -> web.Response:
        """GET /v1/models."""
        self._keys.check(request.headers.get("Authorization"))
        return _json({"object": "list", "data": [self._card(name) for name in self._models]})

    async def show_model(self, request: web.Request) -> web.Response:
        """GET /v1/models/{model}."""
        self._keys.check(request.headers.get("Authorization"))
        name = request.match_info["model"]
        self._check_model(name)
        return _json(self._card(name))

    async def health(self, _request: web.Request) -> web.Response:
        """GET /health: 200 when a request could be served."""
        if self._is_draining:
            return _json({"status": "draining"}, 503)
        if not self._watcher.is_healthy():
            return _json({"status": "no healthy engine"}, 503)
        return _json({"status": "ok"})

    async def show_version(self, _request: web.Request) -> web.Response:
        """GET /version."""
        return _json({"version": _own_version()})

    async def show_metrics(self, request: web.Request) -> web.Response:
        """GET /metrics."""
        self._check_admin(request)
        return web.Response(body=self.metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    async def list_requests(self, request: web.Request) -> web.Response:
        """GET /prfaas/requests?limit=N: the latest records, newest first."""
        self._check_admin(request)
        text = request.query.get("limit", "100")
        if not (text.isascii() and text.isdigit() and 0 < int(text) <= _MAX_LISTED_RECORDS):
            message = f"limit must be a number from 1 to {_MAX_LISTED_RECORDS}."
            raise ApiError(400, "invalid_limit", message, param="limit")
        return _json({"requests": self.records.latest(int(text))})

    async def show_request(self, request: web.Request) -> web.Response:
        """GET /prfaas/requests/{id}."""
        self._check_admin(request)
        found = self.records.find(request.match_info["id"])
        if not found:
            raise ApiError(404, "unknown_request", "No record of this request (any more).")
        return _json({"requests": found})

    async def show_region(self, request: web.Request) -> web.Response:
        """GET /prfaas/region: what routing sees."""
        self._check_admin(request)
        return _json(
            {
                "threshold_tokens": self.config.threshold_tokens,
                "in_flight": self._num_in_flight,
                "settling": len(self._background),
                "links": self._links,
                "pd": self._watcher.pd_report(),
                "prefill": self._watcher.prefill_reports(),
            }
        )

    async def _note_nodes(self, report: ClusterReport) -> None:
        for follower in (self._caches, self._region_links):
            if follower is not None:
                await follower.watch(report)

    def _started(self) -> Serving:
        if self._serving is None:
            raise ApiError(503, "starting", "The gateway is starting.", retry_after_s=1)
        return self._serving

    @asynccontextmanager
    async def _received(self, request: web.Request) -> AsyncIterator[bytes]:
        """The body of an authorized request, which counts towards the limits meanwhile."""
        self._keys.check(request.headers.get("Authorization"))
        self._admit(request)
        nbytes = request.content_length or 0
        self._count(+1, nbytes)
        try:
            body = await self._read_body(request)
            self._num_body_bytes += len(body) - nbytes
            nbytes = len(body)
            yield body
        finally:
            self._count(-1, -nbytes)

    def _exchange(
        self, kind: Kind, body: bytes, request: web.Request, started_s: float
    ) -> Exchange:
        inbound = parse_request(kind, body, template_tokens=self.config.template_tokens)
        self._check_model(inbound.model)
        return open_exchange(inbound, request.headers, metrics=self.metrics, started_s=started_s)

    def _count(self, num_requests: int, nbytes: int) -> None:
        self._num_in_flight += num_requests
        self._num_body_bytes += nbytes
        if self._num_in_flight:
            self._idle.clear()
        else:
            self._idle.set()

    def _admit(self, request: web.Request) -> None:
        config, nbytes = self.config, request.content_length or 0
        if self._is_draining:
            raise ApiError(503, "shutting_down", "The gateway is shutting down.", retry_after_s=5)
        if request.content_type != JSON_TYPE:
            raise ApiError(415, "unsupported_media_type", f"Send the body as {JSON_TYPE}.")
        if nbytes > config.max_body_bytes:
            raise self._too_large()
        if self._num_in_flight >= config.max_in_flight:
            message = f"{self._num_in_flight} requests are being served, which is the limit here."
        elif self._num_body_bytes + nbytes > config.max_buffered_bytes:
            message = "The bodies of the requests being served take all the memory set apart."
        else:
            return
        raise ApiError(429, "too_many_requests", message, retry_after_s=config.retry_after_s)

    async def _read_body(self, request: web.Request) -> bytes:
        try:
            if request.content.is_eof():
                # All of it is here already: the usual case, and timers cost more than reading.
                return await request.read()
            async with asyncio.timeout(self.config.timeouts.body_s):
                return await request.read()
        except web.HTTPRequestEntityTooLarge:
            raise self._too_large() from None
        except TimeoutError:
            raise ApiError(408, "body_timeout", "The body did not arrive in time.") from None
        except (web.RequestPayloadError, ValueError) as error:
            raise ApiError(400, "unreadable_body", f"The body cannot be read: {error}") from error

    def _too_large(self) -> ApiError:
        limit = self.config.max_body_bytes
        return ApiError(413, "body_too_large", f"The body is longer than {limit} bytes.")

    def _check_model(self, name: str) -> None:
        # Like the engine: no name means the only model there is.
        if name in self._models or (not name and len(self._models) == 1):
            return
        names = ", ".join(self._models)
        message = f"The model `{name[:200]}` does not exist. Served here: {names}."
        raise ApiError(404, "model_not_found", message, param="model")

    def _check_admin(self, request: web.Request) -> None:
        if self.config.protect_admin:
            self._keys.check(request.headers.get("Authorization"))

    def _card(self, name: str) -> dict[str, object]:
        model = self._models[name]
        return {
            "id": name,
            "object": "model",
            "created": int(self._started_s),
            "owned_by": "prfaas",
            "root": model.root or name,
            "parent": None,
            "max_model_len": model.max_model_len,
            "permission": [],
        }


_GATEWAY: Final = web.AppKey("gateway", Gateway)


def create_app(gateway: Gateway) -> web.Application:
    """The application; it starts and closes `gateway`. Serve it with handler cancellation on."""
    app = web.Application(
        client_max_size=gateway.config.max_body_bytes, middlewares=[_openai_errors]
    )
    app[_GATEWAY] = gateway

    async def completion(request: web.Request) -> web.StreamResponse:
        return await gateway.complete("completion", request)

    async def chat(request: web.Request) -> web.StreamResponse:
        return await gateway.complete("chat", request)

    async def life(_app: web.Application) -> AsyncIterator[None]:
        await gateway.start()
        yield
        await gateway.close()

    app.router.add_post(PATHS["completion"], completion)
    app.router.add_post(PATHS["chat"], chat)
    app.router.add_get("/v1/models", gateway.list_models)
    app.router.add_get("/v1/models/{model:.+}", gateway.show_model)
    app.router.add_get("/health", gateway.health)
    app.router.add_get("/version", gateway.show_version)
    app.router.add_get("/metrics", gateway.show_metrics)
    app.router.add_get("/prfaas/requests", gateway.list_requests)
    app.router.add_get("/prfaas/requests/{id}", gateway.show_request)
    app.router.add_get("/prfaas/region", gateway.show_region)
    app.router.add_get("/prfaas/links", gateway.show_links)
    app.router.add_get("/prfaas/cache", gateway.show_caches)
    app.router.add_get("/prfaas/cache/top", gateway.list_prefixes)
    app.router.add_post("/prfaas/cache/explain", gateway.explain_cache)
    app.cleanup_ctx.append(life)
    return app


@web.middleware
async def _openai_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error leaves as an OpenAI error object."""
    try:
        return await handler(request)
    except ApiError as error:
        return _error_response(request, error)
    except web.HTTPException as error:
        known = ApiError(error.status, error.reason.lower().replace(" ", "_"), error.reason)
        response = _error_response(request, known)
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
        return response
    except Exception:
        logger.exception("%s %s failed", request.method, request.path)
        return _error_response(request, ApiError(500, "internal_error", _INTERNAL_ERROR))


def _error_response(request: web.Request, error: ApiError) -> web.Response:
    gateway = request.app[_GATEWAY]
    gateway.metrics.rejected(error.code)
    response = web.Response(
        status=error.status,
        body=error.body(),
        headers={"Content-Type": JSON_TYPE, **error.headers},
    )
    if request_id := usable_request_id(request.headers.get("X-Request-Id")):
        response.headers["x-request-id"] = request_id
    if not request.body_exists or request.content.at_eof():
        return response
    # The rest of the body is not waited for: say that the connection will not be kept.
    response.force_close()
    return response


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(
        status=status, body=msgspec.json.encode(value), headers={"Content-Type": JSON_TYPE}
    )


def _own_version() -> str:
    try:
        return version("prfaas")
    except PackageNotFoundError:
        return "unknown"
