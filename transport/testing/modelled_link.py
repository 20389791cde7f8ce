"""A link on a path that is only computed. The transport chooses its width and its frame size as on
a real one. Time is virtual.

Knows no socket, no thread and no clock.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from netmon.tcp_info import TcpInfo
from transport.config import TransportConfig
from transport.sending.tuning import LinkTuner, TuningWindow

TICK_S = 0.1


@dataclass(frozen=True, slots=True)
class ModelledPath:
    """What a link's rate is made of, as a function of the number of its connections."""

    link_bytes_per_s: float
    rtt_s: float
    flow_bytes_per_s: float = math.inf
    """Most of each connection."""
    send_buffer_bytes: float = math.inf
    loss: float = 0.0

    def flow_rate(self, width: int) -> float:
        """Of each of `width` connections that run at full speed."""
        own = min(self.flow_bytes_per_s, self.send_buffer_bytes / self.rtt_s)
        return min(own, self.link_bytes_per_s / width)

    def sndbuf_limited(self, width: int) -> float:
        """The share of the time in which the send buffer is the limit."""
        return float(self.flow_rate(width) == self.send_buffer_bytes / self.rtt_s)


@dataclass(slots=True)
class _Flow:
    """One connection; it carries data from `since_s` on, and begins in slow start."""

    since_s: float
    delivered_bytes: float = 0.0
    frame_bytes: float = 0.0
    info: TcpInfo = field(default_factory=TcpInfo)


class ModelledLink:
    """A sender's link on a path that may change; every connection sends whole frames."""

    def __init__(
        self,
        path: ModelledPath,
        config: TransportConfig | None = None,
        *,
        noise: float = 0.0,
        busy: Callable[[float], bool] = lambda now_s: True,
        seed: int = 1,
    ) -> None:
        """`noise`: the share by which the rate of a tick may be off; `busy`: whether the link is
        backlogged at a time.
        """
        self.path = path
        self.now_s = 100.0
        self.widths: list[int] = []
        """At every step."""
        self._config = config or TransportConfig()
        self._tuner = LinkTuner(self._config)
        self._noise = noise
        self._busy = busy
        self._rng = random.Random(seed)
        self._numbers = itertools.count(1)
        self._flows: dict[int, _Flow] = {}  # the oldest first; those beyond the width stand by
        self._acked_bytes = 0

    @property
    def width(self) -> int:
        return self._tuner.width

    @property
    def frame_bytes(self) -> int:
        return self._tuner.frame_bytes

    @property
    def is_steady(self) -> bool:
        return not self._tuner.is_searching

    @property
    def send_buffers_limit(self) -> bool:
        return self._tuner.send_buffers_limit

    @property
    def measured(self) -> TuningWindow:
        return self._tuner.measured

    @property
    def loss_of_rate(self) -> float:
        """Share of the best rate that the present width gives away."""
        widths = range(1, self._config.max_link_connections + 1)
        rates = {width: width * self.path.flow_rate(width) for width in widths}
        return 1 - rates[self.width] / max(rates.values())

    def run(self, duration_s: float) -> None:
        for _ in range(round(duration_s / TICK_S)):
            self.step()

    def num_changes(self, duration_s: float) -> int:
        """Run for so long, and count how often the width changes."""
        begin = max(0, len(self.widths) - 1)
        self.run(duration_s)
        return sum(a != b for a, b in itertools.pairwise(self.widths[begin:]))

    def lose_oldest(self) -> None:
        """Another connection takes the place of the oldest one."""
        del self._flows[min(self._flows)]

    def forget_round_trips(self) -> None:
        """The connections are new."""
        for flow in self._flows.values():
            flow.info = TcpInfo()

    def step(self) -> None:
        self.now_s += TICK_S
        is_busy = self._busy(self.now_s)
        if is_busy:
            self._send_for_a_tick(self.width)
        self._tuner.observe(
            {number: flow.info for number, flow in self._flows.items()},
            acked_bytes=self._acked_bytes,
            is_backlogged=is_busy,
            now_s=self.now_s,
        )
        self.widths.append(self.width)

    def _send_for_a_tick(self, width: int) -> None:
        while len(self._flows) < width:
            self._flows[next(self._numbers)] = _Flow(self.now_s + 2 * self.path.rtt_s)
        flows = list(self._flows.values())
        for flow in flows[width:]:
            flow.since_s = self.now_s
        luck = 1 + self._rng.uniform(-self._noise, self._noise)
        for flow in flows[:width]:
            self._send(flow, width, luck)

    def _send(self, flow: _Flow, width: int, luck: float) -> None:
        path = self.path
        slow_start = 15_000 / path.rtt_s * 2 ** min(60, (self.now_s - flow.since_s) / path.rtt_s)
        is_started = self.now_s > flow.since_s
        rate = min(path.flow_rate(width) * luck, slow_start if is_started else 0.0)
        flow.delivered_bytes += rate * TICK_S
        while flow.delivered_bytes >= flow.frame_bytes:
            self._acked_bytes += int(flow.frame_bytes)
            flow.delivered_bytes -= flow.frame_bytes
            flow.frame_bytes = self.frame_bytes * self._rng.uniform(0.9, 1.1)
        info, sent_bytes = flow.info, int(rate * TICK_S)
        flow.info = replace(
            info,
            rtt_s=path.rtt_s,
            min_rtt_s=path.rtt_s,
            sent_bytes=info.sent_bytes + sent_bytes,
            retransmitted_bytes=info.retransmitted_bytes + round(sent_bytes * path.loss),
            busy_s=info.busy_s + TICK_S,
            sndbuf_limited_s=info.sndbuf_limited_s + TICK_S * path.sndbuf_limited(width),
        )
