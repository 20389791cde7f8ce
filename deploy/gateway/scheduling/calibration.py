"""Times a few prefills on instances of which nothing is known, while they have nothing to do.

So predictions rest on measured times from the first request on. What was timed is an observation
like any other: it is kept over restarts and shared with other gateways, and a place whose key is
known is not timed again. It delays no instance: requests may be given to one that is timed, and
wait for at most one of these prompts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Final, Protocol

from deploy.gateway.scheduling.config import CalibrationSection
from deploy.gateway.scheduling.scheduler import RegionScheduler
from prfaas.engines.errors import UnknownInstance
from prfaas.engines.timing import TimedPrefills, TimingOrder
from scheduler.live.feedback import Calibrated
from scheduler.reports import ClusterReport, InstanceReport
from scheduler.routing.decision import HAND_OFF, ONE_ENGINE
from transport.rpc import RpcError
from transport.tasks import start_task

logger = logging.getLogger("prfaas.deploy.gateway")

LENGTHS: Final = (256, 256, 4096)
"""The prompts, tokens: the first one also pays what an engine does only once."""
SETTLE_S: Final = 5.0
"""How long a gateway's start waits for the first times, seconds. Then requests may come anyway."""
AGAIN_S: Final = 30.0
"""After a try that timed nothing, an instance gets the next one no sooner, seconds."""


class Times(Protocol):
    """A cluster's front, as far as it is needed here."""

    async def time_prefills(self, order: TimingOrder) -> TimedPrefills: ...


class Calibration:
    """Calibrates the instances of all clusters, one at a time, so that they do not disturb each
    other on a shared host. On one event loop.
    """

    def __init__(
        self,
        config: CalibrationSection,
        scheduler: RegionScheduler,
        pds: Mapping[str, Times],
        prefill_clusters: Mapping[str, Times],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`pds` and `prefill_clusters` are the fronts by the names of their clusters."""
        self._config = config
        self._scheduler = scheduler
        self._fronts = {**prefill_clusters, **pds}
        self._pds = frozenset(pds)
        self._clock = clock
        self._is_started = False
        self._task: asyncio.Task[None] | None = None
        self._retry_s: dict[tuple[str, str], float] = {}
        self._reports: dict[str, ClusterReport] = {}

    def heard(self, report: ClusterReport) -> None:
        """A cluster has reported. Times what is due, unless something is timed already."""
        self._reports[report.name] = report
        if self._is_started:
            self._begin()

    def start(self) -> None:
        """Time what is due from now on. To be called when it is known what was learnt earlier, so
        that nothing is timed again.
        """
        self._is_started = self._config.mode == "on"
        if self._is_started:
            self._begin()

    async def settle(self, limit_s: float = SETTLE_S) -> None:
        """Wait until nothing is timed, for `limit_s` at most."""
        if self._task is not None:
            await asyncio.wait((self._task,), timeout=limit_s)

    async def close(self) -> None:
        """End a timing that is under way, and begin no more."""
        self._is_started = False
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _begin(self) -> None:
        if (self._task is None or self._task.done()) and next(self._due(), None) is not None:
            self._task = start_task(self._work(), "calibration")

    async def _work(self) -> None:
        while (due := next(self._due(), None)) is not None:
            cluster, item, event = due
            order = TimingOrder(instance=item.name, lengths=LENGTHS, limit_s=self._config.limit_s)
            now_s = self._clock()
            # Instances come and go under new names.
            self._retry_s = {key: at_s for key, at_s in self._retry_s.items() if at_s > now_s}
            # Set before the wait: whatever it raises, the next try is later.
            self._retry_s[cluster, item.name] = now_s + AGAIN_S
            try:
                timed = await self._fronts[cluster].time_prefills(order)
            except (RpcError, UnknownInstance, OSError) as error:
                timed = TimedPrefills(reason=str(error))
            if timed.reason:
                logger.info("%s: not all prefills were timed: %s", cluster, timed.reason)
            # The first one is a warm-up, and says nothing by itself.
            if prefills := timed.prefills[1:]:
                self._scheduler.tell(
                    Calibrated(event.model, event.place, event.key, prefills, event.pd)
                )

    def _due(self) -> Iterator[tuple[str, InstanceReport, Calibrated]]:
        """Yield each instance that may be timed now: its cluster, itself, and the event for it."""
        now_s = self._clock()
        for cluster, report in self._reports.items():
            for item in report.instances:
                if self._retry_s.get((cluster, item.name), now_s) > now_s or not _is_idle(item):
                    continue
                for model in self._scheduler.live.settings.models:
                    event = self._event(cluster, item, model)
                    if event is not None:
                        yield cluster, item, event

    def _event(self, cluster: str, item: InstanceReport, model: str) -> Calibrated | None:
        """None where the instance does not prefill for the model, or its place is known."""
        if item.role == "encode" or item.model not in ("", model):
            return None
        live = self._scheduler.live
        pd = cluster if cluster in self._pds else ""
        target = cluster if not pd else HAND_OFF if item.role == "prefill" else ONE_ENGINE
        key = f"{item.layout_fingerprint} {item.weights}"
        if live.knowledge(model).is_calibrated(live.place(target, pd), key):
            return None
        return Calibrated(model, target, key, (), pd)


def _is_idle(item: InstanceReport) -> bool:
    """Whether an instance may be given a prompt, and has none."""
    # Without a layout its node agent has not said what it is, so nothing could be remembered.
    usable = item.healthy and item.role_ready and not item.draining and item.layout_fingerprint
    return bool(usable) and not (item.running or item.num_running or item.num_waiting)
