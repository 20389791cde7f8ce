"""Tasks that outlive the request that started them: they give memory back and settle records.

`Background` owns every task until it ends, so that none is lost to garbage collection and a
shutdown can wait for all of them. This file does not know what they do.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from transport.tasks import start_task

logger = logging.getLogger("prfaas.deploy.gateway")

T = TypeVar("T")


class Background:
    """Owns the background tasks of one event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Run `work` as a task that nobody awaits: a failure is logged as an error."""
        return start_task(work, name, self._tasks)

    def begin(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Run `work` as a task that the caller awaits, and handles the failure of, unless it is
        cancelled meanwhile.
        """
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    async def drain(self, timeout_s: float) -> None:
        """Wait for all tasks, new ones included; cancel what is left after `timeout_s`."""
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while self._tasks:
            left_s = deadline_s - asyncio.get_running_loop().time()
            if left_s <= 0:
                break
            await asyncio.wait(self._tasks, timeout=left_s)
        leftover = list(self._tasks)
        for task in leftover:
            task.cancel()
        await asyncio.gather(*leftover, return_exceptions=True)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.debug("%s ended with %r", task.get_name(), error)
