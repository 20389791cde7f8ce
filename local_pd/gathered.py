"""Placements and ends of short requests, gathered into few calls of a front elsewhere.

A call costs both processes about half a millisecond of CPU whatever it carries, which is as much as
all the rest that a gateway does for a short request. So while `MAX_CALLS` calls are under way,
further requests wait for the next one and share it; without load each goes at once. The end of a
request goes with the next call, or after `ENDED_S`. It does not know gRPC.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from itertools import islice
from typing import Final

from local_pd.messages import DirectRequest, DirectTarget, PlaceReply, PlaceRequest
from transport.rpc import RpcError
from transport.tasks import start_task

MAX_CALLS: Final = 2
"""Calls under way at a time: with one, a request would wait for a whole round trip of another."""
MAX_TOGETHER: Final = 64
"""Placements in one call, which the front makes without a pause."""
ENDED_S: Final = 0.02
"""How long the end of a request waits for another call, seconds."""

_Waiting = tuple[DirectRequest, "asyncio.Future[DirectTarget]"]


class GatheredCalls:
    """The calls to one front, on one event loop. `close` it."""

    def __init__(self, call: Callable[[PlaceRequest], Awaitable[PlaceReply]]) -> None:
        """`call` makes a call, and raises RpcError."""
        self._call = call
        self._waiting: deque[_Waiting] = deque()
        self._ended: list[str] = []
        self._num_calls = 0
        self._later: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def direct(self, request: DirectRequest) -> DirectTarget:
        """Place a request. Raises RpcError. When cancelled, the front does not go on counting
        it.
        """
        answer: asyncio.Future[DirectTarget] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, answer))
        self._begin()
        return await answer

    def ended(self, instance: str) -> None:
        """Say that a request which was placed there is over."""
        self._ended.append(instance)
        if self._later is None:
            self._later = asyncio.get_running_loop().call_later(ENDED_S, self._begin)

    async def close(self) -> None:
        """Say what has ended, and wait for all calls."""
        if self._ended:
            self._begin()
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self) -> None:
        if self._num_calls < MAX_CALLS:
            self._num_calls += 1
            # It takes what waits when it runs: whatever else this turn of the loop has brought.
            start_task(self._go_on(), "placements", self._tasks)

    async def _go_on(self) -> None:
        try:
            while self._waiting or self._ended:
                await self._call_once()
        finally:
            self._num_calls -= 1

    async def _call_once(self) -> None:
        together = list(islice(self._waiting, MAX_TOGETHER))
        for _ in together:
            self._waiting.popleft()
        # Who gave up before the call was made was not placed.
        together = [item for item in together if not item[1].done()]
        ended, self._ended = tuple(self._ended), []
        if self._later is not None:
            self._later.cancel()
            self._later = None
        if not together and not ended:
            return
        request = PlaceRequest(tuple(item[0] for item in together), ended)
        try:
            placed = (await self._call(request)).placed
            if len(placed) != len(together):
                raise RpcError("INTERNAL", f"{len(placed)} answers to {len(together)} placements")
        except RpcError as error:
            _fail(together, error)
            return
        except BaseException:
            _fail(together, RpcError("UNAVAILABLE", "the call was cut off"))
            raise
        for (_, answer), found in zip(together, placed, strict=True):
            if answer.done():
                if found.target is not None:
                    self.ended(found.target.instance)
            elif found.target is not None:
                answer.set_result(found.target)
            else:
                answer.set_exception(RpcError(found.code, found.message))


def _fail(together: list[_Waiting], error: RpcError) -> None:
    for _, answer in together:
        if not answer.done():
            # One for each: raising an error writes into it.
            answer.set_exception(RpcError(error.code, error.message))
