"""Work that has to go on to its end even if the task that began it is cancelled.

It does not know what the work acquires or undoes.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from transport.tasks import start_task

logger = logging.getLogger("prfaas.engines")

T = TypeVar("T")


class Cleanups:
    """Owns tasks that may outlive their callers; `close` waits for them."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    async def finish(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`; if the caller is cancelled meanwhile, it goes on by itself."""
        return await asyncio.shield(self._own(work))

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Let `work`, which never raises, go on by itself."""
        self._own(work)

    async def acquire(
        self, acquiring: Coroutine[Any, Any, T], undo: Callable[[T], Awaitable[None]]
    ) -> T:
        """Await `acquiring`. If the caller is cancelled meanwhile, let it end and then undo it.

        Cutting it off half-way would leave it unknown whether the other side has granted anything.
        """
        task = asyncio.create_task(acquiring)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            start_task(_undo(task, undo), "giving back what was acquired", self._tasks)
            raise

    async def close(self) -> None:
        """Wait for everything under way."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _own(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def finished(work: Coroutine[Any, Any, T]) -> T:
    """Await `work` to its end, however often the caller is cancelled meanwhile; its result.

    Raises CancelledError when the caller was cancelled, and what `work` raises.
    """
    task = asyncio.create_task(work)
    was_cancelled = False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            # Swallowed here and raised below: the work itself must not be interrupted.
            was_cancelled = True
    result = task.result()
    if was_cancelled:
        raise asyncio.CancelledError
    return result


def cancel_requested() -> bool:
    """Whether the running task itself was asked to end; for handlers of CancelledError.

    If not, something it waited for was cancelled by its owner.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _undo(task: asyncio.Task[T], undo: Callable[[T], Awaitable[None]]) -> None:
    await asyncio.wait({task})
    if task.cancelled() or task.exception() is not None:
        return
    try:
        await undo(task.result())
    except Exception:
        logger.warning("could not give back what a cancelled caller acquired", exc_info=True)
