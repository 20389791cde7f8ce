"""Tasks that nobody awaits: owned until they end, and heard of when they fail.

An event loop holds its tasks weakly, and tells of a failure only when a task that nobody asked is
thrown away: a loop of ours that its owner holds would be dead for ever without a word.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

logger = logging.getLogger("prfaas.transport.tasks")

T = TypeVar("T")


def start_task(
    work: Coroutine[Any, Any, T], name: str, owner: set[asyncio.Task[Any]] | None = None
) -> asyncio.Task[T]:
    """Run `work` as a task. If it fails, an error is logged at once. `owner` holds it until then;
    without one, whoever calls has to.
    """
    task = asyncio.get_running_loop().create_task(work, name=name)
    task.add_done_callback(_tell)
    if owner is not None:
        owner.add(task)
        task.add_done_callback(owner.discard)
    return task


def _tell(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("%s failed", task.get_name(), exc_info=error)
