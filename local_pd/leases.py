"""Renews the leases of landings for as long as this process needs them.

A landing must outlast queue and prefill, and must not outlast its gateway. So the process that
serves the client renews the lease, and a landing that it forgets, or dies with, runs out by itself.
It does not know what a landing is for.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from transport.rpc import RpcError
from transport.tasks import start_task

logger = logging.getLogger("prfaas.local_pd")

Renew = Callable[[], Awaitable[None]]

LEAST_INTERVAL_S: Final = 0.05


class LeaseKeeper:
    """One renewing task per held key. Bounded: a key is renewed for at most `max_hold_s`."""

    def __init__(self, max_hold_s: float = 1800.0) -> None:
        self._max_hold_s = max_hold_s
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def hold(self, key: str, lease_s: float, renew: Renew) -> None:
        """Call `renew` every third of `lease_s` until `drop`, or until the agent does not know the
        lease any more.
        """
        self.drop(key)
        # A third, so that one lost call does not cost the lease.
        # A front says how long a lease is, and must not make this process call without a pause.
        interval_s = max(LEAST_INTERVAL_S, lease_s / 3)
        task = start_task(self._keep(key, interval_s, renew), f"lease {key}")
        self._tasks[key] = task

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

    async def _keep(self, key: str, interval_s: float, renew: Renew) -> None:
        try:
            # Bounded, so that a slot that nobody releases does not hold memory for ever.
            for _ in range(max(1, int(self._max_hold_s / interval_s))):
                await asyncio.sleep(interval_s)
                if not await _renewed(key, renew):
                    return
        finally:
            if self._tasks.get(key) is asyncio.current_task():
                del self._tasks[key]


async def _renewed(key: str, renew: Renew) -> bool:
    """Renew once. False: there is no lease any more. A call without an answer is tried again."""
    try:
        await renew()
    except RpcError as error:
        if error.code in ("UNAVAILABLE", "TIMEOUT"):
            logger.warning("lease %s not renewed: %s", key, error)
            return True
        return False
    return True
