"""Moves byte ranges between hosts over TCP: resumable, verified, acknowledged, without copying.

One transfer is one logical range of bytes [0, nbytes), whose pieces may become sendable in any
order. What the bytes mean is not known here. Start with `Sender`, `Receiver` and `interfaces`; the
wire format is in WIRE.md.
"""

from transport.config import TlsFiles, TransportConfig
from transport.endpoint import Endpoint
from transport.errors import LinkError, LocalError, PeerError, Refused, TransportError
from transport.identity import Identity, Role
from transport.interfaces import (
    ByteSpace,
    Elements,
    LandingRegistry,
    OutgoingSpec,
    Priority,
    TransferListener,
    TransferProgress,
    TransferState,
)
from transport.receiving.receiver import Receiver
from transport.region_key import Credentials, RegionKey
from transport.sending.link_state import Backlog, ConnectionState, LinkState
from transport.sending.paths import LinkPath
from transport.sending.sender import OutgoingTransfer, Sender
from transport.sending.tuning import TuningWindow

__all__ = [
    "Backlog",
    "ByteSpace",
    "ConnectionState",
    "Credentials",
    "Elements",
    "Endpoint",
    "Identity",
    "LandingRegistry",
    "LinkError",
    "LinkPath",
    "LinkState",
    "LocalError",
    "OutgoingSpec",
    "OutgoingTransfer",
    "PeerError",
    "Priority",
    "Receiver",
    "Refused",
    "RegionKey",
    "Role",
    "Sender",
    "TlsFiles",
    "TransferListener",
    "TransferProgress",
    "TransferState",
    "TransportConfig",
    "TransportError",
    "TuningWindow",
]
