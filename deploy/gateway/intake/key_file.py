"""Follows the file of API keys, so that keys are given and taken away without a restart.

A file that cannot be used (half written, without a key) leaves the keys as they are and is logged.
Does not know requests.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

from deploy.gateway.config import ApiKey, load_api_keys, tenants_by_key
from transport.errors import LocalError
from transport.tls import RECHECK_S, PlainFiles, Rotating

logger = logging.getLogger("prfaas.deploy.gateway")


async def follow_keys(path: Path, replace: Callable[[tuple[ApiKey, ...]], None]) -> None:
    """Call `replace` with what the file has, now and about a second after each change, until
    cancelled.
    """
    file = await _usable(path)
    known: tuple[ApiKey, ...] | None = None
    while True:
        keys = await asyncio.to_thread(file.current, time.monotonic())
        if keys is not known:
            replace(keys)
            known = keys
        await asyncio.sleep(RECHECK_S)


async def _usable(path: Path) -> Rotating[PlainFiles, tuple[ApiKey, ...]]:
    """The file, once it can be used: it may have changed since the gateway read it."""
    said = ""
    while True:
        try:
            return await asyncio.to_thread(lambda: Rotating(PlainFiles((path,)), _load))
        except LocalError as error:
            if error.message != said:
                said = error.message
                logger.warning("%s", said)
        await asyncio.sleep(RECHECK_S)


def _load(file: PlainFiles) -> tuple[ApiKey, ...]:
    (path,) = file.paths
    # Names that settings mention may lose their last key: that must not keep it valid.
    try:
        keys = load_api_keys(path)
        tenants_by_key(keys)
    except (OSError, ValueError) as error:
        raise LocalError("api_keys", f"the API keys stay as they were: {error}") from error
    return keys
