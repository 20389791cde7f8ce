"""What a sender knows of one link: for diagnosis, metrics and schedulers. Knows no socket."""

from __future__ import annotations

from dataclasses import dataclass, field

from transport.tcp_info import TcpInfo
from transport.tuning import Measured


@dataclass(frozen=True, slots=True)
class ConnectionState:
    """One connection; those that do not carry data stand by."""

    number: int
    carries_data: bool
    info: TcpInfo
    congestion: str = ""
    """TCP_CONGESTION that its socket really has; "" once the connection has ended."""
    send_buffer_bytes: int = 0
    """SO_SNDBUF as the kernel has it now; 0 once the connection has ended."""


@dataclass(frozen=True, slots=True)
class LinkState:
    """A snapshot of the connections to one endpoint and what tuning found."""

    endpoint: str
    width: int
    """Connections that should carry data."""
    frame_bytes: int
    phase: str
    measured: Measured
    """The last window in which the link was backlogged; all zero before the first."""
    codec: str
    """What the last chunk was to be coded with ("raw" for nothing), and why."""
    codec_reason: str
    acked_bytes: int
    """Acknowledged since the link began."""
    connections: list[ConnectionState] = field(default_factory=list)
