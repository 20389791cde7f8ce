"""A link as a fluid, for tests of what watches links. Knows no packet.

Bytes flow from a queue at the sender through a window into a bottleneck of one rate with a buffer
before it. The window is always what the path holds (rate x least round trip + buffer); when the
rate falls, what the path holds no longer is lost and sent again. Acknowledgements come as bytes
leave the bottleneck.
"""

from __future__ import annotations

import math

from netmon.samples import LinkSample
from netmon.tcp_info import TcpInfo

_SOCKET_BYTES = 128 * 1024  # waits in the kernel, per connection
_MSS_BYTES = 1448


class FluidLink:
    """Advance it with `run`, look at it with `sample`. Rates in bytes/s; 0 is an outage that its
    connections survive.
    """

    def __init__(
        self,
        bytes_per_s: float,
        base_rtt_s: float = 0.02,
        *,
        buffer_bytes: float = 1e6,
        num_connections: int = 4,
        loss: float = 0.0,
        step_s: float = 0.005,
    ) -> None:
        """`loss`: share of what is carried that is sent twice, at random losses."""
        self.bytes_per_s = bytes_per_s
        self.base_rtt_s = base_rtt_s
        self.buffer_bytes = buffer_bytes
        self.loss = loss
        self.is_up = True
        self.now_s = 0.0
        self.waiting_bytes = 0.0
        self.acked_bytes = 0.0
        self._num_connections = num_connections
        self._step_s = step_s
        self._in_flight_bytes = 0.0
        self._retransmitted_bytes = 0.0
        self._busy_s = 0.0
        self._rtt_s = base_rtt_s

    def offer(self, num_bytes: float) -> None:
        """Put bytes into the sender's queue."""
        self.waiting_bytes += num_bytes

    def run(self, duration_s: float) -> None:
        """Let this much time pass."""
        for _ in range(max(1, round(duration_s / self._step_s))):
            self._step(self._step_s)

    def sample(self) -> LinkSample:
        """What a sampler would read now."""
        count = self._num_connections
        notsent = min(self.waiting_bytes, _SOCKET_BYTES * count)
        connection = TcpInfo(
            rtt_s=self._rtt_s,
            min_rtt_s=self.base_rtt_s,
            unacked_segments=math.ceil(self._in_flight_bytes / count / _MSS_BYTES),
            mss_bytes=_MSS_BYTES,
            notsent_bytes=int(notsent / count),
            acked_bytes=int(self.acked_bytes / count),
            sent_bytes=int(self._sent_bytes() / count),
            retransmitted_bytes=int(self._retransmitted_bytes / count),
            busy_s=self._busy_s,
        )
        return LinkSample(
            connections=dict.fromkeys(range(count), connection) if self.is_up else {},
            queued_bytes=int(self.waiting_bytes - notsent),
            acked_bytes=int(self.acked_bytes),
            is_up=self.is_up,
        )

    def _sent_bytes(self) -> float:
        return self.acked_bytes + self._in_flight_bytes + self._retransmitted_bytes

    def _window_bytes(self) -> float:
        return self.bytes_per_s * self.base_rtt_s + self.buffer_bytes

    def _step(self, step_s: float) -> None:
        self.now_s += step_s
        if not self.is_up:
            return
        self._lose(max(0.0, self._in_flight_bytes - self._window_bytes()))
        entering = min(self.waiting_bytes, self._window_bytes() - self._in_flight_bytes)
        self.waiting_bytes -= entering
        self._in_flight_bytes += entering
        if self._in_flight_bytes <= 0:
            return
        if self.bytes_per_s > 0:
            standing = self._in_flight_bytes - self.bytes_per_s * self.base_rtt_s
            self._rtt_s = self.base_rtt_s + max(0.0, standing) / self.bytes_per_s
        carried = min(self._in_flight_bytes, self.bytes_per_s * step_s)
        self._busy_s += step_s if carried <= 0 else min(step_s, carried / self.bytes_per_s)
        self.acked_bytes += carried
        self._in_flight_bytes -= carried
        self._retransmitted_bytes += carried * self.loss

    def _lose(self, num_bytes: float) -> None:
        self._in_flight_bytes -= num_bytes
        self.waiting_bytes += num_bytes
        self._retransmitted_bytes += num_bytes
