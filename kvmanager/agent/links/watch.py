"""Samples the links of a node agent's sender, several times a second, and reports them.

This is the shell around `netmon`. It reads the sender, feeds one `LinkMonitor` for each endpoint,
gives Prometheus the reports, and answers callers that watch. It samples a link every `interval_s`
while the link has transfers, is not clear, or has just become idle, and otherwise about once a
second.

A link that is down and has no transfers would stay down for ever, because nobody sends through it.
So the sender is asked to connect again every few seconds, for at most `GIVE_UP_S`.

Use it on the agent's event loop. It does not know transfers, nor what callers do with reports.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

import msgspec
from prometheus_client import CollectorRegistry

from kvmanager.agent.links.messages import LinkFeed, WatchLinks
from kvmanager.loop.watch import aligned_delay_s
from kvmanager.transfers.records import BadRequest
from netmon.detector import DetectorConfig
from netmon.estimate import LinkCondition, PathReport
from netmon.metrics import LinkMetrics
from netmon.monitor import LinkMonitor
from netmon.samples import LinkSample
from transport import Endpoint, LinkState
from transport.tasks import start_task

logger = logging.getLogger("prfaas.kvmanager.agent")

IDLE_INTERVAL_S: Final = 1.0
RECENT_S: Final = 3.0
"""Time for which a link that has become idle is still sampled every `interval_s`."""
NEWS_S: Final = 0.5
"""Least time between two reports that have only new numbers."""
SHOW_S: Final = 1.0
"""Time between two updates of the Prometheus metrics."""
RETRY_S: Final = 3.0
GIVE_UP_S: Final = 600.0
KEEP_S: Final = 900.0
"""Time for which a link that the sender has closed is remembered."""
MAX_WATCH_S: Final = 60.0
PROBER_S: Final = 30.0
"""Time for which a caller that offered to send probes is expected to do so."""


class LinkSource(Protocol):
    """The sender; `kvmanager.agent.transfer_io.TransferIo` is one."""

    def link_activity(self) -> dict[Endpoint, bool]: ...

    def link_state(self, endpoint: Endpoint) -> LinkState | None: ...

    def warm(self, endpoint: Endpoint) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchSettings:
    """`interval_s`: time between two samples of a link with traffic. `probes`: whether to ask for
    probes of idle links.
    """

    interval_s: float = 0.2
    probes: bool = False
    detector: DetectorConfig = field(default_factory=DetectorConfig)


@dataclass(slots=True)
class _Watched:
    """The state of one endpoint. Times are the agent's clock."""

    monitor: LinkMonitor
    condition: LinkCondition = LinkCondition.CLEAR
    """The last one that was logged and reported."""
    due_s: float = -math.inf
    used_s: float = -math.inf
    """When the link last had transfers."""
    present_s: float = -math.inf
    """When the sender last had a link to this endpoint."""
    down_s: float | None = None
    warmed_s: float = -math.inf
    state: LinkState | None = None
    earlier_acked_bytes: int = 0
    """Bytes acknowledged on earlier links to this endpoint, which the sender has closed."""
    probe_bytes: int = 0


class LinkWatch:
    """Samples the links of one sender. Call `start`, or call `look` for each round."""

    def __init__(
        self,
        source: LinkSource,
        settings: WatchSettings,
        registry: CollectorRegistry,
        *,
        data_endpoint: str,
        clock_s: Callable[[], float],
    ) -> None:
        """`data_endpoint`: this agent's own receiving address."""
        self._source = source
        self._settings = settings
        self._metrics = LinkMetrics(registry)
        self._data_endpoint = data_endpoint
        self._clock_s = clock_s
        self._watched: dict[Endpoint, _Watched] = {}
        self._seq = 1
        self._news = asyncio.Event()
        self._announced_s = self._shown_s = self._asked_s = -math.inf
        self._prober_s = -math.inf
        self._looking: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to sample."""
        self._looking = start_task(self._keep_looking(), "look at links")

    async def close(self) -> None:
        """Stop sampling. Idempotent."""
        looking, self._looking = self._looking, None
        if looking is not None:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)

    async def watch(self, request: WatchLinks) -> LinkFeed:
        """All links, as soon as there is news after `request.after_seq`. Raises BadRequest."""
        if not math.isfinite(request.timeout_s) or request.timeout_s < 0:
            raise BadRequest(f"timeout_s is {request.timeout_s}; it must be finite, at least 0")
        if request.sends_probes:
            self._prober_s = self._clock_s()
        if request.after_seq == self._seq:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(request.timeout_s, MAX_WATCH_S)):
                    await self._news.wait()
        return self._feed(request, self._clock_s())

    def probed(self, endpoint: Endpoint, acked_bytes: int, duration_s: float) -> None:
        """Take in the result of a probe, as `LinkMonitor.observe_probe`."""
        watched = self._watched.get(endpoint)
        if watched is not None:
            watched.monitor.observe_probe(acked_bytes, duration_s, self._clock_s())
            self._announce()

    def look(self, now_s: float) -> None:
        """One round over all links."""
        activity = self._source.link_activity()
        for endpoint in activity.keys() - self._watched.keys():
            monitor = LinkMonitor(str(endpoint), self._settings.detector)
            self._watched[endpoint] = _Watched(monitor)
        is_news = False
        for endpoint, watched in list(self._watched.items()):
            if endpoint in activity:
                watched.present_s = now_s
            elif now_s - watched.present_s > KEEP_S:
                del self._watched[endpoint]
                continue
            is_used = activity.get(endpoint, False)
            if is_used:
                watched.used_s = now_s
                is_news |= now_s - self._announced_s >= NEWS_S
            # The last report was made while it had transfers. Without one more, it would have their
            # backlog for as long as it is idle.
            is_news |= not is_used and watched.used_s >= self._announced_s > -math.inf
            if is_used or now_s >= watched.due_s:
                is_news |= self._look_at(endpoint, watched, now_s)
                watched.due_s = self._next_look_s(watched, now_s)
            # A link in use reconnects by itself; an idle one would stay down until it is needed.
            self._reconnect(endpoint, watched, now_s, is_idle=endpoint in activity and not is_used)
        is_news |= self._ask_for_probes(now_s)
        if is_news:
            self._announced_s = now_s
            self._announce()
        if now_s - self._shown_s >= SHOW_S:
            self._shown_s = now_s
            self._metrics.show([item.monitor.report(now_s) for item in self._watched.values()])

    async def _keep_looking(self) -> None:
        while True:
            try:
                self.look(self._clock_s())
            except Exception:
                # The next round may succeed, and routing depends on the reports.
                logger.exception("a look at the links failed")
            await asyncio.sleep(aligned_delay_s(self._settings.interval_s, time.monotonic()))

    def _look_at(self, endpoint: Endpoint, watched: _Watched, now_s: float) -> bool:
        """Sample one link. Returns whether its condition has changed."""
        state, last = self._source.link_state(endpoint), watched.state
        if last is not None and (state is None or state.acked_bytes < last.acked_bytes):
            # The sender closed the link and opened a new one, whose counter began at 0.
            watched.earlier_acked_bytes += last.acked_bytes
        watched.state = state
        watched.monitor.observe(link_sample(state, watched.earlier_acked_bytes), now_s)
        before, after = watched.condition, watched.monitor.condition
        if after is not LinkCondition.DOWN:
            watched.down_s = None
        elif watched.down_s is None:
            watched.down_s = now_s
        if after is before:
            return False
        watched.condition = after
        is_bad = after.severity >= LinkCondition.CONGESTED.severity
        log = logger.warning if is_bad else logger.info
        log("link to %s: %s, was %s: %s", endpoint, after, before, watched.monitor.reason)
        return True

    def _next_look_s(self, watched: _Watched, now_s: float) -> float:
        """The time of the next sample of a link without transfers."""
        is_clear = watched.condition is LinkCondition.CLEAR
        is_recent = now_s - watched.used_s < RECENT_S or not is_clear
        interval_s = self._settings.interval_s
        # Half an interval early, because rounds are `interval_s` apart: the next round is in time.
        return now_s + (0.0 if is_recent else max(interval_s, IDLE_INTERVAL_S) - interval_s / 2)

    def _reconnect(
        self, endpoint: Endpoint, watched: _Watched, now_s: float, *, is_idle: bool
    ) -> None:
        down_s = watched.down_s
        if not is_idle or down_s is None or now_s - down_s > GIVE_UP_S:
            return
        if now_s - watched.warmed_s >= RETRY_S:
            watched.warmed_s = now_s
            self._source.warm(endpoint)

    def _ask_for_probes(self, now_s: float) -> bool:
        """Ask each link's planner for a probe. Returns whether a caller must be asked for one."""
        if not self._settings.probes or now_s - self._asked_s < 1.0:
            return False
        self._asked_s = now_s
        is_due = False
        if now_s - self._prober_s <= PROBER_S:
            for watched in self._watched.values():
                watched.probe_bytes = watched.monitor.due_probe_bytes(now_s) or watched.probe_bytes
                is_due |= watched.probe_bytes > 0
        return is_due

    def _announce(self) -> None:
        self._seq += 1
        self._news.set()
        self._news = asyncio.Event()

    def _feed(self, request: WatchLinks, now_s: float) -> LinkFeed:
        links = [self._report(item, request, now_s) for item in self._watched.values()]
        return LinkFeed(self._seq, self._data_endpoint, links)

    def _report(self, watched: _Watched, request: WatchLinks, now_s: float) -> PathReport:
        report = watched.monitor.report(now_s)
        # A caller that sends no probes must not take away the request for one.
        if request.sends_probes:
            report = msgspec.structs.replace(report, probe_bytes=watched.probe_bytes)
            watched.probe_bytes = 0  # one caller sends it
        if watched.state is None:
            return report
        backlog = watched.state.backlog
        return msgspec.structs.replace(
            report,
            num_connections=sum(item.is_open for item in watched.state.connections),
            num_transfers=backlog.num_transfers,
            oldest_queued_s=backlog.oldest_queued_s,
        )


def link_sample(state: LinkState | None, earlier_acked_bytes: int = 0) -> LinkSample:
    """The sample of a link, from the sender's `state`; None: the sender has no link now, so it is
    idle.

    `earlier_acked_bytes`: acknowledged on earlier links to the same endpoint.
    """
    if state is None:
        return LinkSample(acked_bytes=earlier_acked_bytes)
    standing = {item.number: item.info for item in state.connections if item.is_open}
    backlog = state.backlog
    return LinkSample(
        connections=standing,
        queued_bytes=backlog.queued_bytes,
        acked_bytes=earlier_acked_bytes + state.acked_bytes,
        # Without any trouble so far, the first connection may still be on its way.
        is_up=bool(standing) or not state.trouble,
    )
