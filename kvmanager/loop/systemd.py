"""Tells systemd how a process fares: that it serves, that its event loop runs, that it stops.

This is sd_notify(3): datagrams to the socket that NOTIFY_SOCKET names. Without systemd nothing
happens. A lost message never harms the process that sends it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from transport.tasks import start_task

logger = logging.getLogger("prfaas.kvmanager.loop")


def notify(state: str, environment: Mapping[str, str] = os.environ) -> None:
    """Send a state such as READY=1."""
    path = environment.get("NOTIFY_SOCKET", "")
    if not path:
        return
    # A leading @ stands for the null byte of an abstract socket.
    address = f"\0{path[1:]}" if path.startswith("@") else path
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock:
            sock.sendto(state.encode(), address)
    except OSError as error:
        logger.warning("cannot tell systemd %s: %s", state, error)


def watchdog_s(environment: Mapping[str, str] = os.environ) -> float | None:
    """How often systemd wants to hear from this process; None: it does not.

    A child inherits the variables of its parent, so WATCHDOG_PID says who is meant.
    """
    usec = environment.get("WATCHDOG_USEC", "")
    if not usec.isdigit() or environment.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    return int(usec) / 1e6


@asynccontextmanager
async def served(environment: Mapping[str, str] = os.environ) -> AsyncIterator[None]:
    """Say that this process serves, and until the end that its event loop runs."""
    notify("READY=1", environment)
    period_s = watchdog_s(environment)
    beat = None if period_s is None else start_task(_beat(period_s / 2, environment), "watchdog")
    try:
        yield
    finally:
        if beat is not None:
            beat.cancel()
            await asyncio.gather(beat, return_exceptions=True)
        # A stop may take longer than the watchdog's time.
        notify("STOPPING=1", environment)


async def _beat(period_s: float, environment: Mapping[str, str]) -> None:
    while True:
        notify("WATCHDOG=1", environment)
        await asyncio.sleep(period_s)
