"""What a link's connections are given to do, and what its owner must do for it. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from transport.errors import TransportError
from transport.sending.outgoing import OutgoingState
from transport.wire.ranges import Range


@dataclass(frozen=True, slots=True)
class Work:
    """What one connection sends next, in this order: OPEN, CANCEL, DIGEST, DATA."""

    transfer: OutgoingState
    opens: bool
    cancels: bool = False
    digests: bool = False
    data: Range | None = None
    more: bool = False
    """Whether this connection will very likely get more DATA next."""


@dataclass(frozen=True, slots=True)
class TransferEnded:
    """Tell the listener: nobody reads the ByteSpace of this transfer any more."""

    transfer: OutgoingState


@dataclass(frozen=True, slots=True)
class AbortConnection:
    """Close this connection now."""

    connection: int
    error: TransportError


Effect = TransferEnded | AbortConnection
