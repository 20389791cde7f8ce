"""Follows the files that a process was started with, so that changing them needs no restart.

Files that cannot be used, half written for example, change nothing and are logged. This file does
not know what is in them.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from transport.errors import LocalError
from transport.rotating import RECHECK_S, PlainFiles, Rotating

logger = logging.getLogger("prfaas.config_files")

T = TypeVar("T")


def hang_up() -> asyncio.Event:
    """An event that SIGHUP sets in this process, for `follow`. Call it on the event loop."""
    again = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, again.set)
    return again


async def follow(
    paths: tuple[Path, ...],
    load: Callable[[], T],
    use: Callable[[T], None],
    again: asyncio.Event | None = None,
) -> None:
    """Hand what `load` makes of the files to `use`, now and about a second after each change, until
    cancelled. `load` runs on a thread; it raises LocalError when the files cannot be used.

    Setting `again` loads the files once more, though they look unchanged.
    """
    again = again or asyncio.Event()
    files = await _usable(paths, load)
    known: T | None = None
    while True:
        found = await asyncio.to_thread(files.current, time.monotonic())
        if found is not known:
            use(found)
            known = found
        try:
            async with asyncio.timeout(RECHECK_S):
                await again.wait()
        except TimeoutError:
            continue
        again.clear()
        try:
            files = await asyncio.to_thread(_loaded, paths, load)
        except LocalError as error:
            logger.warning("%s", error.message)


async def _usable(paths: tuple[Path, ...], load: Callable[[], T]) -> Rotating[PlainFiles, T]:
    """The files, once they can be used: they may have changed since the process read them."""
    said = ""
    while True:
        try:
            return await asyncio.to_thread(_loaded, paths, load)
        except LocalError as error:
            if error.message != said:
                said = error.message
                logger.warning("%s", said)
        await asyncio.sleep(RECHECK_S)


def _loaded(paths: tuple[Path, ...], load: Callable[[], T]) -> Rotating[PlainFiles, T]:
    return Rotating(PlainFiles(paths), lambda _: load())
