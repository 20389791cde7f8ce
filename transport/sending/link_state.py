"""A sender's state of one link, for diagnosis, metrics and schedulers. Knows no socket."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from netmon.tcp_info import TcpInfo
from transport.sending.outgoing import OutgoingState
from transport.sending.tuning import TuningWindow


@dataclass(frozen=True, slots=True)
class ConnectionState:
    """One connection. Connections that do not carry data stand by."""

    number: int
    """A number that no other connection of the same sender ever gets."""
    carries_data: bool
    info: TcpInfo
    congestion: str = ""
    """TCP_CONGESTION that its socket really has; "" once the connection has ended."""
    send_buffer_bytes: int = 0
    """SO_SNDBUF as the kernel has it now; 0 once the connection has ended."""
    is_open: bool = True
    """False: the connection has ended, and these are its last known numbers."""


@dataclass(frozen=True, slots=True)
class Backlog:
    """The bytes and transfers that a link still has to send."""

    queued_bytes: int = 0
    """Bytes before coding that are ready and not yet handed to any connection."""
    num_transfers: int = 0
    """Transfers that are not over, including those that wait to be filled."""
    oldest_queued_s: float | None = None
    """Longest time for which a transfer has had ready bytes without an acknowledgement, without a
    break; None: no transfer has any.
    """

    @classmethod
    def of(cls, transfers: Iterable[OutgoingState], now_s: float) -> Backlog:
        """The backlog of these transfers: all of a link that are not over."""
        queued_bytes, num_transfers, since_s = 0, 0, None
        for transfer in transfers:
            num_transfers += 1
            queued_bytes += transfer.unsent.total
            owed_s = transfer.owed_since_s
            if owed_s is not None and (since_s is None or owed_s < since_s):
                since_s = owed_s
        oldest_s = None if since_s is None else max(0.0, now_s - since_s)
        return cls(queued_bytes, num_transfers, oldest_s)


@dataclass(frozen=True, slots=True)
class LinkState:
    """A snapshot of the connections to one endpoint and what tuning found."""

    endpoint: str
    width: int
    """Connections that should carry data."""
    frame_bytes: int
    phase: str
    measured: TuningWindow
    """The last window in which the link was backlogged; all zero before the first."""
    codec: str
    """The codec chosen for the last chunk ("raw": none). `codec_reason` says why."""
    codec_reason: str
    acked_bytes: int
    """Bytes before coding that were acknowledged since the link began. A link that was closed
    without transfers and opened again begins at 0.
    """
    connections: list[ConnectionState] = field(default_factory=list)
    backlog: Backlog = Backlog()
    trouble: str = ""
    """Why no connection stands, after the last one was lost or could not be made; "" while one
    stands, and before one was tried.
    """
