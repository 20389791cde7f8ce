"""Pages that one process of a gateway answers for all of them.

The kernel chooses the process that gets a request, so its answer must not depend on which one that
is. Records are those of all processes, metrics come from the parent, and what only the leader of
the region knows is asked of the process that leads. All other pages show what every process knows.

A request of a sibling carries what its client showed, so each process checks keys for itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from aiohttp import web

from deploy.gateway.app import Gateway
from deploy.gateway.errors import JSON_TYPE, ApiError
from deploy.gateway.metrics import CONTENT_TYPE
from deploy.gateway.pages import NUM_LISTED, Handler
from deploy.gateway.processes.folder import OWN_METRICS, PROCESSES, Answer, Folder, ask
from deploy.gateway.processes.own_settings import process_name

_COUNTED: Final = ("in_flight", "buffered_bytes", "settling")
"""What of GET /prfaas/region each process counts for itself."""
_SHOWN_TO_ALL: Final = ("Authorization", "X-Api-Key")

_Wrapped = Callable[[Handler, web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Siblings:
    """The processes of a gateway, as the one of this `number` sees them. `name` is the gateway's
    (`SharedSection.name`), `num` how many there are.
    """

    folder: Folder
    number: int
    num: int
    name: str
    names_key: bytes
    """By which all processes name cache keys alike."""

    def widened(self, gateway: Gateway, routes: Iterable[web.RouteDef]) -> Iterable[web.RouteDef]:
        """The routes of this process, with answers for all processes where they would differ."""
        pages = _Pages(self, gateway)
        wrapped: Mapping[tuple[str, str], _Wrapped] = {
            ("GET", "/metrics"): pages.metrics,
            ("GET", "/prfaas/requests"): pages.records,
            ("GET", "/prfaas/requests/{id}"): pages.records,
            ("GET", "/prfaas/region"): pages.region,
            ("GET", "/prfaas/gateways"): pages.gateways,
            ("GET", "/prfaas/plan"): pages.of_leader,
            ("GET", "/v1/pd_role"): pages.of_leader,
            ("POST", "/v1/pd_role"): pages.of_leader,
        }
        for route in routes:
            wrap = wrapped.get((route.method, route.path))
            handler: Handler = route.handler if wrap is None else _with(wrap, route.handler)
            yield web.RouteDef(route.method, route.path, handler, route.kwargs)


def own_app(gateway: Gateway) -> web.Application:
    """What a process answers to its siblings and its parent: for itself alone."""

    async def metrics(_request: web.Request) -> web.Response:
        return web.Response(body=gateway.metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    app = web.Application(middlewares=[_plain_errors])
    app.add_routes([web.get(OWN_METRICS, metrics), *gateway.admin_routes()])
    return app


@web.middleware
async def _plain_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors as the process that asks passes them on."""
    try:
        return await handler(request)
    except ApiError as error:
        headers = {"Content-Type": JSON_TYPE, **error.headers}
        return web.Response(status=error.status, body=error.body(), headers=headers)


@dataclass(frozen=True, slots=True)
class _Pages:
    siblings: Siblings
    gateway: Gateway

    async def metrics(self, _handler: Handler, request: web.Request) -> web.StreamResponse:
        """The metrics of all processes."""
        self.gateway.pages.check_operator(request)
        try:
            answer = await ask(self.siblings.folder.parent, OWN_METRICS, timeout_s=10.0)
        except (OSError, TimeoutError) as error:
            message = f"The parent of the gateway's processes does not answer: {error}"
            raise ApiError(503, "metrics_unavailable", message) from error
        return web.Response(body=answer.body, headers={"Content-Type": CONTENT_TYPE})

    async def records(self, handler: Handler, request: web.Request) -> web.StreamResponse:
        """The records of all processes, newest first."""
        missing: ApiError | None = None
        found: list[Any] = []
        try:
            found += _decoded(await handler(request))["requests"]
        except ApiError as error:
            if error.status != 404:
                raise
            missing = error
        answers = await self._ask_others(request)
        for answer in answers.values():
            if answer is not None and answer.status == 200:
                found += msgspec.json.decode(answer.body)["requests"]
        if missing is not None and not found:
            silent = [str(number) for number, answer in answers.items() if answer is None]
            if silent:
                message = f"Process {', '.join(silent)} of this gateway does not answer, and the"
                message += " others have no record of this request."
                raise ApiError(503, "process_silent", message, retry_after_s=1) from missing
            raise missing
        found.sort(key=lambda record: record["started_s"], reverse=True)
        if "id" not in request.match_info:
            del found[int(request.query.get("limit", NUM_LISTED)) :]
        return _json({"requests": found})

    async def region(self, handler: Handler, request: web.Request) -> web.StreamResponse:
        """What routing sees, with what all processes have in flight."""
        own = _decoded(await handler(request))
        for answer in (await self._ask_others(request)).values():
            if answer is not None and answer.status == 200:
                theirs = msgspec.json.decode(answer.body)
                for name in _COUNTED:
                    own[name] += theirs[name]
        return _json(own)

    async def gateways(self, handler: Handler, request: web.Request) -> web.StreamResponse:
        """How this process works together with others, and how all of this gateway are."""
        own = _decoded(await handler(request))
        try:
            answer = await ask(self.siblings.folder.parent, PROCESSES)
        except (OSError, TimeoutError):
            return _json(own)  # the parent ends: nobody starts processes again
        return _json(own | {"processes": msgspec.json.decode(answer.body)})

    async def of_leader(self, handler: Handler, request: web.Request) -> web.StreamResponse:
        """The answer of the process that leads the region, if it is one of this gateway's."""
        number = self._leading()
        if number is None:
            return await handler(request)
        headers, body = _shown(request), None
        if request.method == "POST":
            # Checked here, too: a body of anybody's size must not be read for them.
            body = await self.gateway.pages.ordered(request)
            headers["Content-Type"] = JSON_TYPE
        at, path = self.siblings.folder.process(number), request.raw_path
        try:
            timeout_s = self.gateway.config.timeouts.cluster_s + 1.0
            answer = await ask(
                at, path, method=request.method, headers=headers, body=body, timeout_s=timeout_s
            )
        except (OSError, TimeoutError) as error:
            message = f"Process {number} of this gateway, which leads the region, does not answer."
            raise ApiError(503, "process_silent", message, retry_after_s=1) from error
        return web.Response(
            status=answer.status, body=answer.body, headers={"Content-Type": answer.content_type}
        )

    def _leading(self) -> int | None:
        """The number of the sibling that leads; None: this process does, or nobody here."""
        leadership, siblings = self.gateway.leadership, self.siblings
        if leadership.leads(self.gateway.scheduler.clock()):
            return None
        names = [process_name(siblings.name, number) for number in range(siblings.num)]
        if leadership.leader not in names:
            return None
        number = names.index(leadership.leader)
        return None if number == siblings.number else number

    async def _ask_others(self, request: web.Request) -> dict[int, Answer | None]:
        """The siblings' answers to the same request; None for one that does not answer."""
        headers, path, folder = _shown(request), request.raw_path, self.siblings.folder

        async def answer(number: int) -> Answer | None:
            try:
                return await ask(folder.process(number), path, headers=headers)
            except (OSError, TimeoutError):
                return None

        numbers = [number for number in range(self.siblings.num) if number != self.siblings.number]
        answers = await asyncio.gather(*map(answer, numbers))
        return dict(zip(numbers, answers, strict=True))


def _with(wrap: _Wrapped, handler: Handler) -> Handler:
    async def answer(request: web.Request) -> web.StreamResponse:
        return await wrap(handler, request)

    return answer


def _shown(request: web.Request) -> dict[str, str]:
    """What the client shows to be let in."""
    return {name: request.headers[name] for name in _SHOWN_TO_ALL if name in request.headers}


def _decoded(response: web.StreamResponse) -> Any:
    assert isinstance(response, web.Response)
    assert isinstance(response.body, bytes)
    return msgspec.json.decode(response.body)


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), headers={"Content-Type": JSON_TYPE})
