"""The interfaces that callers of the transport implement, and the values that they get from it.

Knows no frame and no socket.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Protocol

from transport.endpoint import Endpoint
from transport.errors import TransportError

ID_BYTES = 16
TOKEN_BYTES = 32
FINGERPRINT_BYTES = 32


class ByteSpace(Protocol):
    """Maps a transfer's logical bytes [0, nbytes) to memory.

    Transport threads call `views` from several threads at once; it must be quick and must not
    block.
    """

    @property
    def nbytes(self) -> int: ...

    def views(self, offset: int, length: int) -> list[memoryview]:
        """The memory of [offset, offset + length) in order, as contiguous byte views.

        Writable when receiving. The transport drops every view before it reports the transfer's
        end.
        """
        ...


class TransferListener(Protocol):
    """A transport thread calls one of the methods, once, when an outgoing transfer has ended.

    Neither may block. By then no transport thread reads the transfer's ByteSpace any more.
    """

    def on_complete(self, transfer_id: bytes) -> None: ...

    def on_failed(self, transfer_id: bytes, error: TransportError) -> None: ...


class LandingRegistry(Protocol):
    """Decides which transfers a receiver takes and where their bytes go. Must not block."""

    def accept(
        self, transfer_id: bytes, token: bytes, fingerprint: bytes, nbytes: int
    ) -> ByteSpace:
        """The memory for this transfer, of exactly `nbytes`; raises `Refused` to turn it away."""
        ...

    def on_complete(self, transfer_id: bytes) -> None:
        """Every byte is in place and verified; called before the sender is told."""
        ...

    def on_failed(self, transfer_id: bytes, error: TransportError) -> None:
        """The transfer has failed; no transport thread writes into its ByteSpace any more.

        Not called after `Receiver.drop`, whose caller knows already.
        """
        ...


class Elements(StrEnum):
    """The data type of most of a transfer's bytes. It is all that codecs know of the content."""

    BYTES = "bytes"
    FP16 = "fp16"
    BF16 = "bf16"
    FP32 = "fp32"

    @property
    def num_bytes(self) -> int:
        return {Elements.BYTES: 1, Elements.FP32: 4}.get(self, 2)


class Priority(IntEnum):
    """The order in which a link serves transfers. Replication keeps a small share of a busy link,
    so that it never starves.
    """

    REQUEST = 0
    """KVCache that a request waits for."""
    REPLICATION = 1
    """Copies made ahead of need."""


@dataclass(frozen=True, slots=True)
class OutgoingSpec:
    """The identity of an outgoing transfer, its destination, and how the link treats it."""

    transfer_id: bytes
    token: bytes
    fingerprint: bytes
    endpoint: Endpoint
    priority: Priority = Priority.REQUEST
    tenant: str = ""
    """The owner of the bytes. Tenants share a link fairly, and byte budgets hold per tenant."""
    elements: Elements = Elements.BYTES
    """The data type of the bytes, for codecs. Whole elements lie from offset 0 on."""
    digest: bool = False
    """Whether a BLAKE3 digest of the whole transfer is compared at the end, in addition to the
    frames' checksums.
    """

    def __post_init__(self) -> None:
        for name, size in (
            ("transfer_id", ID_BYTES),
            ("token", TOKEN_BYTES),
            ("fingerprint", FINGERPRINT_BYTES),
        ):
            if len(getattr(self, name)) != size:
                raise ValueError(f"{name} must have {size} bytes, got {len(getattr(self, name))}")


class TransferState(StrEnum):
    """The life of a transfer, at either end."""

    OPEN = "open"
    CANCELLING = "cancelling"
    COMPLETE = "complete"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class TransferProgress:
    """A snapshot of a transfer. At a receiver, `ready_bytes`, `sent_bytes` and `acked_bytes` all
    count verified bytes.

    Times are `time.monotonic()` seconds; None: it has not happened yet.
    """

    state: TransferState
    nbytes: int
    ready_bytes: int
    sent_bytes: int
    """Handed to the kernel, each byte counted once."""
    acked_bytes: int
    resent_bytes: int
    """Handed to the kernel again (at a receiver: received again)."""
    opened_s: float
    first_sent_s: float | None
    completed_s: float | None
    num_connections: int
    """Connections that serve this transfer now."""
    wire_bytes: int = 0
    """DATA bodies as they were sent, after coding; 0 at a receiver."""
    codecs: tuple[str, ...] = ()
    """Names of the codecs that coded some of its bytes, the lossy one included."""
