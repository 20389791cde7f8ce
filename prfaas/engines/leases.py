"""Renews leases at node agents for as long as this process needs what they keep.

A landing must outlast queue and prefill, and must not outlast its gateway. So the process that
serves the client renews the lease, and a landing that it forgets, or dies with, runs out by itself.
The same holds for an outbox and the front that has it filled. It does not know what a lease is for.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final

from transport.rpc import RpcError
from transport.tasks import start_task

logger = logging.getLogger("prfaas.engines")

Renew = Callable[[], Awaitable[object]]

LEAST_INTERVAL_S: Final = 0.05


async def keep_lease(what: str, lease_s: float, renew: Renew, max_hold_s: float = 1800.0) -> None:
    """Call `renew` every third of `lease_s`, as it was granted. Returns when the lease is not known
    any more, or after `max_hold_s`, so that what nobody releases does not hold memory for ever.
    """
    # A third, and no call is waited for any longer: one lost call does not cost the lease.
    # Whoever granted it must not make this process call without a pause.
    interval_s = max(LEAST_INTERVAL_S, lease_s / 3)
    next_s = time.monotonic()
    until_s = next_s + max_hold_s
    while next_s < until_s:
        next_s = max(next_s + interval_s, time.monotonic())
        await asyncio.sleep(next_s - time.monotonic())
        try:
            async with asyncio.timeout(interval_s):
                await renew()
        except RpcError as error:
            logger.warning("%s not renewed: %s", what, error)
            if error.code == "NOT_FOUND":
                return
        except TimeoutError:
            logger.warning("%s not renewed: no answer for %.3g s", what, interval_s)


class LeaseKeeper:
    """One renewing task per held key."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def hold(self, key: str, lease_s: float, renew: Renew) -> None:
        """Keep a lease until `drop`."""
        self.drop(key)
        task = self._tasks[key] = start_task(
            keep_lease(f"landing {key}", lease_s, renew), f"lease {key}"
        )
        task.add_done_callback(lambda task: self._forget(key, task))

    def _forget(self, key: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(key) is task:
            del self._tasks[key]

    def drop(self, key: str) -> None:
        """Stop renewing. Idempotent."""
        task = self._tasks.pop(key, None)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        """Stop renewing everything."""
        tasks = list(self._tasks.values())
        for key in list(self._tasks):
            self.drop(key)
        await asyncio.gather(*tasks, return_exceptions=True)
