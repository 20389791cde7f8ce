"""The work of a link's connections, and the effects that its owner must perform. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from transport.errors import TransportError
from transport.sending.outgoing import OutgoingState
from transport.wire.ranges import Range


# Not frozen, because a frozen one takes three times as long to make, and every frame needs one.
@dataclass(slots=True)
class Work:
    """The next frames of one connection, in this order: OPEN, CANCEL, DIGEST, DATA."""

    transfer: OutgoingState
    opens: bool
    cancels: bool = False
    digests: bool = False
    data: Range | None = None
    more: bool = False
    """Whether this connection will probably get more DATA next."""


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
