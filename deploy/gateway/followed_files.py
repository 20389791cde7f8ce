"""Follows files that a gateway was started with, so that changing them needs no restart.

Files that cannot be used, half written for example, change nothing and are logged. This file does
not know what is in them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from transport.errors import LocalError
from transport.tls import RECHECK_S, PlainFiles, Rotating

logger = logging.getLogger("prfaas.deploy.gateway")

T = TypeVar("T")


async def follow(paths: tuple[Path, ...], load: Callable[[], T], use: Callable[[T], None]) -> None:
    """Hand what `load` makes of the files to `use`, now and about a second after each change, until
    cancelled. `load` runs on a thread; it raises LocalError when the files cannot be used.
    """
    files = await _usable(paths, load)
    known: T | None = None
    while True:
        found = await asyncio.to_thread(files.current, time.monotonic())
        if found is not known:
            use(found)
            known = found
        await asyncio.sleep(RECHECK_S)


async def _usable(paths: tuple[Path, ...], load: Callable[[], T]) -> Rotating[PlainFiles, T]:
    """The files, once they can be used: they may have changed since the gateway read them."""
    said = ""
    while True:
        try:
            return await asyncio.to_thread(lambda: Rotating(PlainFiles(paths), lambda _: load()))
        except LocalError as error:
            if error.message != said:
                said = error.message
                logger.warning("%s", said)
        await asyncio.sleep(RECHECK_S)
