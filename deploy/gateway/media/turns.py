"""Gives fetches their turns, within bounds on all, on those of a tenant, and on those from a host.

Whoever waits for its own bound holds up nobody else. This file does not know what is fetched.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from deploy.gateway.media.config import MediaSection


@dataclass(slots=True)
class Turn:
    """A fetch of `who` from `host`. It ends when all that hold it have let go."""

    who: str
    host: str
    num_holders: int = 0


class Turns:
    """The fetches that run now, and those that wait, the longest waiting first."""

    def __init__(self, config: MediaSection) -> None:
        self._config = config
        self._running: Counter[tuple[str, str]] = Counter()
        self._waiting: list[tuple[Turn, asyncio.Future[None]]] = []

    @property
    def num_running(self) -> int:
        """Fetches that run now."""
        return self._running["all", ""]

    @asynccontextmanager
    async def turn(self, who: str, host: str) -> AsyncIterator[Turn]:
        """Wait for a turn, and have it until the context ends and nobody else holds it."""
        turn = Turn(who, host)
        if not self._begin(turn):
            begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((turn, begun))
            try:
                await begun
            except asyncio.CancelledError:
                if begun.done() and not begun.cancelled():
                    self.let_go(turn)
                else:
                    self._waiting.remove((turn, begun))
                raise
        try:
            yield turn
        finally:
            self.let_go(turn)

    def hold(self, turn: Turn) -> None:
        """Keep `turn` from ending for something that outlasts its context."""
        turn.num_holders += 1

    def let_go(self, turn: Turn) -> None:
        """The opposite of `hold`, and of the begin of the turn."""
        turn.num_holders -= 1
        if turn.num_holders:
            return
        for key in _keys(turn):
            self._running[key] -= 1
            if not self._running[key]:
                del self._running[key]
        self._go_on()

    def _begin(self, turn: Turn) -> bool:
        """Begin `turn` if the bounds let it."""
        config = self._config
        bounds = (config.max_fetches, config.max_tenant_fetches, config.max_host_fetches)
        keys = _keys(turn)
        if any(self._running[key] >= most for key, most in zip(keys, bounds, strict=True)):
            return False
        self._running.update(keys)
        turn.num_holders = 1
        return True

    def _go_on(self) -> None:
        still: list[tuple[Turn, asyncio.Future[None]]] = []
        for turn, begun in self._waiting:
            # A future that was cancelled is taken out by its own task.
            if not begun.done() and self._begin(turn):
                begun.set_result(None)
            else:
                still.append((turn, begun))
        self._waiting = still


def _keys(turn: Turn) -> tuple[tuple[str, str], ...]:
    return ("all", ""), ("who", turn.who), ("host", turn.host)
