"""What was read of one link at one moment: sockets, interface, queue. Knows no estimate, no clock.

Counters run from the beginning of what they count; whoever reads them takes differences.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from netmon.tcp_info import TcpInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class InterfaceSample:
    """One network interface: traffic of everybody on this host, not of one link."""

    name: str
    sent_bytes: int
    bytes_per_s: float | None
    """What the hardware says that it can do; None where it says nothing (most virtual ones)."""
    is_up: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSample:
    """The sending end of one link: all connections to one place and what waits for them."""

    link: str
    connections: Mapping[int, TcpInfo] = field(default_factory=dict)
    """By a number that no other connection of the link is ever given. Empty where the system does
    not tell; then only `acked_bytes` says how fast the link is.
    """
    queued_bytes: int = 0
    """Ready to be sent and not yet handed to the kernel, before coding."""
    acked_bytes: int = 0
    """Acknowledged by the receiver since the link began, before coding."""
    is_up: bool = True
    """At least one connection stands, or the link is idle and nothing failed."""
    interface: InterfaceSample | None = None

    @property
    def notsent_bytes(self) -> int:
        return sum(connection.notsent_bytes for connection in self.connections.values())

    @property
    def backlog_bytes(self) -> int:
        """What waits at the sender, in the queue or in the kernel."""
        return self.queued_bytes + self.notsent_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """What became of bytes that were sent only to measure."""

    acked_bytes: int
    """Less than what was sent when the probe was given up."""
    duration_s: float
    """First byte sent until the last acknowledgement that counts, or until giving up."""

    def __post_init__(self) -> None:
        if self.acked_bytes < 0:
            raise ValueError(f"acked_bytes must not be negative: {self.acked_bytes}")
        if not self.duration_s > 0:
            raise ValueError(f"duration_s must be above 0: {self.duration_s}")
