"""Writes the newest of many states to a file without holding up the event loop.

A disk that is busy keeps a rename(2) waiting for hundreds of milliseconds. It does not know what a
state is, nor where it goes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

from transport.tasks import start_task

logger = logging.getLogger("prfaas.kvmanager.files")

T = TypeVar("T")

_NOTHING: Final[Any] = object()


class LatestWriter(Generic[T]):
    """Hands states to `write`, on a thread and in order: one at a time, while the newest waits.

    A state that waits is left out when a newer one comes. An error of `write` costs that state only
    and is logged. All methods belong to one event loop.
    """

    def __init__(self, what: str, write: Callable[[T], None]) -> None:
        """`what` is written, in words for the log."""
        self._what = what
        self._write = write
        self._waiting: T = _NOTHING
        self._task: asyncio.Task[None] | None = None

    def put(self, state: T) -> None:
        """Have this state written. Returns at once."""
        self._waiting = state
        if not self._is_writing:
            self._task = start_task(self._write_waiting(), f"writing {self._what}")

    async def written(self) -> None:
        """Wait until the newest state is written, or could not be. Cancelling it stops no write."""
        while self._is_writing:
            assert self._task is not None
            await asyncio.wait({self._task})

    @property
    def _is_writing(self) -> bool:
        return self._task is not None and not self._task.done()

    async def _write_waiting(self) -> None:
        while self._waiting is not _NOTHING:
            state, self._waiting = self._waiting, _NOTHING
            try:
                await asyncio.to_thread(self._write, state)
            except OSError as error:
                logger.warning("%s could not be written: %s", self._what, error)
            except Exception:
                # A mistake in the state, which the next one need not have.
                logger.exception("%s could not be written", self._what)
