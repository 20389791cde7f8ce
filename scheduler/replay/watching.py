"""What routing sees of a modelled link: the estimate of a real monitor, or something cheaper.

`MonitoredLink` reads the link as a sampler would, that is the counters of a sender and of one
connection that stands for all, and feeds `netmon.monitor`, also with probes. Routing gets an
estimate as old as the last sample. `DirectLink` shows the true rate, late by a fixed lag, and costs
next to nothing. `StillLink` is for links that never change. `ForeseenLink` is for a policy that
knows the schedule.

This file knows no requests and no decisions.
"""

from __future__ import annotations

from typing import Final, Protocol

from netmon.detector import DetectorConfig
from netmon.estimate import LinkCondition, LinkEstimate
from netmon.monitor import LinkMonitor
from netmon.region_link import RATE_KEPT_S, LinkView
from netmon.samples import LinkSample
from netmon.tcp_info import TcpInfo
from scheduler.replay.links import ReplayLink

SAMPLE_S: Final = 0.25
_BUFFER_S: Final = 0.05
"""The size of the bottleneck's buffer, as seconds at the link's rate at the start."""
_PROBE_EVERY_S: Final = 1.0
_LEAST_RTT_S: Final = 0.001


class WatchedLink(Protocol):
    """One link as routing sees it."""

    def sample(self, now_s: float) -> None:
        """Take a sample."""

    def view(self, now_s: float) -> LinkView:
        """The present view for routing."""


class _TrueLink:
    """Shows the model of the link itself; nothing is measured."""

    def __init__(self, link: ReplayLink, rtt_s: float) -> None:
        self._link = link
        self._rtt_s = rtt_s

    def sample(self, now_s: float) -> None:
        self._link.advance(now_s)

    def _shown(self, rate: float) -> LinkView:
        return LinkView(
            state=LinkCondition.CLEAR if rate > 0 else LinkCondition.DOWN,
            available_bytes_per_s=self._link.available(rate),
            rtt_s=self._rtt_s,
            backlog_bytes=self._link.waiting_bytes,
            inflow_bytes_per_s=self._link.expected_inflow,
        )


class DirectLink(_TrueLink):
    """Shows the true link, but with the rate of `lag_s` ago."""

    def __init__(self, link: ReplayLink, rtt_s: float, lag_s: float = SAMPLE_S) -> None:
        super().__init__(link, rtt_s)
        self._lag_s = lag_s

    def view(self, now_s: float) -> LinkView:
        link = self._link
        link.advance(now_s)
        return self._shown(link.schedule.rate_at(now_s - self._lag_s))


class StillLink:
    """Shows a link that never changes, so that there is nothing to sample."""

    def __init__(self, link: ReplayLink, rtt_s: float) -> None:
        self._link = link
        self._seen = LinkView(available_bytes_per_s=link.rate, rtt_s=rtt_s)

    def sample(self, now_s: float) -> None:
        pass

    def view(self, now_s: float) -> LinkView:
        link, seen = self._link, self._seen
        link.advance(now_s)
        rate, backlog = link.available(link.rate), link.waiting_bytes
        now = rate, backlog, link.expected_inflow
        # An equal view stays the same object, which the decider compares first.
        if (seen.available_bytes_per_s, seen.backlog_bytes, seen.inflow_bytes_per_s) != now:
            seen = self._seen = LinkView(
                available_bytes_per_s=rate,
                rtt_s=seen.rtt_s,
                backlog_bytes=backlog,
                inflow_bytes_per_s=link.expected_inflow,
            )
        return seen


class ForeseenLink(_TrueLink):
    """Shows the true link with its lowest rate within the next `horizon_s`."""

    def __init__(self, link: ReplayLink, rtt_s: float, horizon_s: float = 10.0) -> None:
        super().__init__(link, rtt_s)
        self._horizon_s = horizon_s

    def view(self, now_s: float) -> LinkView:
        link = self._link
        link.advance(now_s)
        return self._shown(link.schedule.lowest(now_s, now_s + self._horizon_s))


class MonitoredLink:
    """A sampler of the modelled link, and the monitor that it feeds."""

    def __init__(
        self, name: str, link: ReplayLink, rtt_s: float, config: DetectorConfig | None = None
    ) -> None:
        self._link = link
        self._rtt_s = max(_LEAST_RTT_S, rtt_s)
        self._monitor = LinkMonitor(name, config)
        self._buffer_bytes = _BUFFER_S * link.schedule.base_bytes_per_s
        self._sampled_s = 0.0
        self._acked_bytes = 0.0
        self._resent_bytes = 0.0
        self._busy_s = 0.0
        self._waiting_bytes = 0.0
        self._rate = link.schedule.base_bytes_per_s
        self._asked_s = 0.0
        self._estimate: LinkEstimate | None = None
        self.condition = LinkCondition.CLEAR

    def sample(self, now_s: float) -> None:
        self._count(now_s)
        self._monitor.observe(self._read(), now_s)
        self._waiting_bytes = self._link.waiting_bytes
        if now_s - self._asked_s >= _PROBE_EVERY_S:
            self._asked_s = now_s
            self._probe(now_s)
        report = self._monitor.report(now_s)
        self._estimate, self.condition = report.estimate, report.condition

    def view(self, now_s: float) -> LinkView:
        estimate, inflow = self._estimate, self._link.expected_inflow
        # Before the first measurement the rate is unknown.
        if estimate is None or estimate.age_s is None:
            return LinkView(rtt_s=self._rtt_s, inflow_bytes_per_s=inflow)
        self._link.advance(now_s)
        rate = estimate.available_bytes_per_s
        # As a gateway sees it (`netmon.region_link`): a link that has been idle may be faster.
        is_old = self.condition is LinkCondition.CLEAR and estimate.age_s > RATE_KEPT_S
        return LinkView(
            state=self.condition,
            available_bytes_per_s=None if rate is None else self._link.available(rate),
            rtt_s=estimate.base_rtt_s,
            # As old as the sample, which is what `age_s` says.
            backlog_bytes=self._waiting_bytes,
            inflow_bytes_per_s=inflow,
            age_s=now_s - self._sampled_s,
            is_floor=rate is not None and (estimate.is_floor or is_old),
        )

    def _count(self, now_s: float) -> None:
        """Advance the counters from the last sample."""
        link, passed_s = self._link, now_s - self._sampled_s
        link.advance(now_s)
        carried = link.sent_bytes - self._acked_bytes
        rate, loss = link.rate, link.schedule.loss_at(now_s)
        self._acked_bytes = link.sent_bytes
        # At a loss rate p, each delivered byte is sent 1 / (1 - p) times on average.
        self._resent_bytes += carried * loss / (1 - loss)
        if rate < self._rate:
            # The slower path has room for fewer bytes. The rest is lost and sent again, once.
            held = min(link.backlog_bytes, self._window(self._rate))
            self._resent_bytes += max(0.0, held - self._window(rate))
        self._rate = rate
        if link.backlog_bytes > 0:
            self._busy_s += passed_s
        elif carried > 0:
            self._busy_s += min(passed_s, carried / rate if rate > 0 else passed_s)
        self._sampled_s = now_s

    def _window(self, rate: float) -> float:
        """Bytes that the path has room for: in flight, and in the bottleneck's buffer."""
        return rate * self._rtt_s + self._buffer_bytes

    def _read(self) -> LinkSample:
        link, rate = self._link, self._rate
        in_flight = min(link.backlog_bytes, self._window(rate))
        # Bytes beyond rate * RTT stand in the buffer, and add their time to the RTT.
        standing = max(0.0, in_flight - rate * self._rtt_s)
        rtt_s = self._rtt_s + (standing / rate if rate > 0 else 0.0)
        connection = TcpInfo(
            rtt_s=rtt_s,
            min_rtt_s=self._rtt_s,
            acked_bytes=int(self._acked_bytes),
            sent_bytes=int(self._acked_bytes + in_flight + self._resent_bytes),
            retransmitted_bytes=int(self._resent_bytes),
            busy_s=self._busy_s,
        )
        return LinkSample(
            connections={0: connection},
            queued_bytes=int(link.backlog_bytes - in_flight),
            acked_bytes=int(self._acked_bytes),
        )

    def _probe(self, now_s: float) -> None:
        """Probe an idle link. The probe takes no virtual time, as it is only a few megabytes."""
        size = self._monitor.due_probe_bytes(now_s)
        if size and self._rate > 0:
            self._monitor.observe_probe(size, size / self._rate + self._rtt_s, now_s)
