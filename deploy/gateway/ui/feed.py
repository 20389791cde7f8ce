"""Collects the view that browsers follow, from the same handlers that answer operators.

Several browsers share one collection. It does not know what a row means or how it is sent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec
from aiohttp import web

from deploy.gateway.errors import ApiError
from deploy.gateway.pages import Handler
from deploy.gateway.ui.view import View, view

NUM_REQUESTS: Final = 50
"""The requests that the page lists."""
SOURCES: Final[Mapping[str, tuple[str, float]]] = {
    "/prfaas/region": ("", 0.4),
    "/prfaas/links": ("", 0.4),
    "/prfaas/requests": (f"?limit={NUM_REQUESTS}", 0.4),
    "/prfaas/instances": ("", 0.4),
    "/prfaas/plan": ("", 2.0),
    # Every node agent is asked for it.
    "/prfaas/cache": ("", 5.0),
    "/prfaas/gateways": ("", 5.0),
}
"""The query and the least time between two looks, seconds, of each page."""


class Feed:
    """The latest view of a region, collected when somebody asks for it."""

    def __init__(
        self, handlers: Mapping[str, Handler], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`handlers` answer GET at the paths of `SOURCES`, for all processes of the gateway."""
        self._handlers = handlers
        self._clock = clock
        self._pages: dict[str, Any] = {}
        self._looked_s: dict[str, float] = {}
        self._view: View = {}
        self._collecting = asyncio.Lock()

    async def latest(self, request: web.Request) -> View:
        """The view, at most as old as `SOURCES` says. Whoever made `request` must have been let in:
        it may be answered with what another one's request collected.
        """
        async with self._collecting:
            now_s = self._clock()
            due = [
                path
                for path, (_, every_s) in SOURCES.items()
                if path in self._handlers and now_s - self._looked_s.get(path, -1e9) >= every_s
            ]
            if due:
                answers = await asyncio.gather(*(self._look(path, request) for path in due))
                self._pages |= dict(zip(due, answers, strict=True))
                self._looked_s |= dict.fromkeys(due, now_s)
                self._view = view(self._pages)
            return self._view

    async def _look(self, path: str, request: web.Request) -> Any:
        asked = request.clone(rel_url=path + SOURCES[path][0])
        try:
            answer = await self._handlers[path](asked)
        except ApiError:
            # This region has no such thing, or who knows of it does not answer now.
            return None
        if answer.status != 200 or not isinstance(answer, web.Response):
            return None
        assert isinstance(answer.body, bytes)
        return msgspec.json.decode(answer.body)
