"""A link and its monitor, sampled every 0.2 s as an agent samples a busy link. No sockets."""

from __future__ import annotations

from typing import Any, NamedTuple

from fluid_link import FluidLink

from netmon.estimate import LinkCondition, LinkEstimate
from netmon.samples import LinkSample
from netmon.tcp_info import TcpInfo

MB = 1_000_000
GBIT = 125 * MB
STEP_S = 0.2
RTT_S = 0.02


class Changed(NamedTuple):
    """A change of a link's condition."""

    at_s: float
    condition: LinkCondition
    reason: str


class Watched:
    """A monitor with a clock, and the changes of condition that were seen."""

    def __init__(self, monitor: Any) -> None:
        """`monitor` is a `LinkMonitor`."""
        self.monitor = monitor
        self.now_s = 0.0
        self.changes: list[Changed] = []

    def observe(self, sample: LinkSample) -> None:
        before = self.monitor.condition
        self.monitor.observe(sample, self.now_s)
        if self.monitor.condition is not before:
            self.changes.append(Changed(self.now_s, self.monitor.condition, self.monitor.reason))

    def estimate(self) -> LinkEstimate:
        estimate: LinkEstimate = self.monitor.estimate(self.now_s)
        return estimate

    def conditions(self) -> list[LinkCondition]:
        return [change.condition for change in self.changes]


class FluidWatched(Watched):
    """Samples a fluid link."""

    def __init__(self, monitor: Any, fluid: FluidLink | None = None) -> None:
        super().__init__(monitor)
        self.fluid = fluid or FluidLink(GBIT, RTT_S)

    def run(self, seconds: float, offered_bytes_per_s: float = 0.0) -> LinkEstimate:
        """Let this much time pass; returns the last estimate."""
        for _ in range(round(seconds / STEP_S)):
            self.fluid.offer(offered_bytes_per_s * STEP_S)
            self.fluid.run(STEP_S)
            self.now_s = self.fluid.now_s
            self.observe(self.fluid.sample())
        return self.estimate()


class StepWatched(Watched):
    """Samples made by hand, of one connection: a step says what 0.2 s have brought."""

    def __init__(self, monitor: Any) -> None:
        super().__init__(monitor)
        self.info = TcpInfo(rtt_s=RTT_S, min_rtt_s=RTT_S)
        self.observe(LinkSample(connections={1: self.info}))

    def step(
        self,
        mb: float = 0.0,
        times: int = 1,
        *,
        loss: float = 0.0,
        rtt_s: float = RTT_S,
        waiting_bytes: float = 0,
        is_up: bool = True,
    ) -> LinkCondition:
        """`mb` were acknowledged, of which the share `loss` was sent again."""
        for _ in range(times):
            self.now_s = round(self.now_s + STEP_S, 6)
            num_bytes, is_busy = round(mb * MB), bool(mb or waiting_bytes)
            self.info = TcpInfo(
                rtt_s=rtt_s,
                min_rtt_s=RTT_S,
                acked_bytes=self.info.acked_bytes + num_bytes,
                sent_bytes=self.info.sent_bytes + num_bytes,
                retransmitted_bytes=self.info.retransmitted_bytes + round(loss * num_bytes),
                busy_s=self.info.busy_s + STEP_S * is_busy,
            )
            sample = LinkSample(
                connections={1: self.info} if is_up else {},
                queued_bytes=round(waiting_bytes),
                acked_bytes=self.info.acked_bytes,
                is_up=is_up,
            )
            self.observe(sample)
        condition: LinkCondition = self.monitor.condition
        return condition
