"""A sample of one link at one moment: sockets and queue. Knows no estimate and no clock.

Counters run from the beginning of a connection or a link; readers take differences.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from netmon.tcp_info import TcpInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSample:
    """The sending end of one link: all connections to one endpoint, and the bytes that wait."""

    link: str
    connections: Mapping[int, TcpInfo] = field(default_factory=dict)
    """Keyed by a number that no other connection of the link ever gets. Empty where the system has
    no TCP_INFO; then only `acked_bytes` says how fast the link is.
    """
    queued_bytes: int = 0
    """Bytes before coding that are ready to be sent and not yet handed to the kernel."""
    acked_bytes: int = 0
    """Bytes before coding that the receiver has acknowledged since the link began."""
    is_up: bool = True
    """Whether at least one connection stands, or the link is idle and nothing has failed."""

    @property
    def notsent_bytes(self) -> int:
        return sum(connection.notsent_bytes for connection in self.connections.values())

    @property
    def backlog_bytes(self) -> int:
        """Bytes that wait at the sender, in its queue or in the kernel."""
        return self.queued_bytes + self.notsent_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """The result of a probe: bytes that were sent only to measure the link."""

    acked_bytes: int
    """Less than the bytes sent if the probe was given up."""
    duration_s: float
    """Time from the first byte sent to the last acknowledgement that counts, or to giving up."""

    def __post_init__(self) -> None:
        if self.acked_bytes < 0:
            raise ValueError(f"acked_bytes must not be negative: {self.acked_bytes}")
        if not self.duration_s > 0:
            raise ValueError(f"duration_s must be above 0: {self.duration_s}")
