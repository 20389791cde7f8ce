"""What the transport asks of its callers and what it tells them. Knows no frame and no socket."""

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
    """A transfer's logical bytes [0, nbytes) resolved to memory.

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
    """Told once how an outgoing transfer ended, from a transport thread. Must not block.

    When either method is called no transport thread reads the transfer's ByteSpace any more.
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
        """The transfer is over; no transport thread writes into its ByteSpace any more.

        Not called after `Receiver.drop`: whoever drops knows.
        """
        ...


class Elements(StrEnum):
    """The numbers that a transfer mostly consists of: what codecs may know about its bytes."""

    BYTES = "bytes"
    FP16 = "fp16"
    BF16 = "bf16"
    FP32 = "fp32"

    @property
    def num_bytes(self) -> int:
        return {Elements.BYTES: 1, Elements.FP32: 4}.get(self, 2)


class Priority(IntEnum):
    """What a link serves first; the later class keeps a small share, so that it never starves."""

    REQUEST = 0
    """KVCache that a request waits for."""
    REPLICATION = 1
    """Copies made ahead of need."""


@dataclass(frozen=True, slots=True)
class OutgoingSpec:
    """Who a transfer is, where it goes, and how it is treated on its way."""

    transfer_id: bytes
    token: bytes
    fingerprint: bytes
    endpoint: Endpoint
    priority: Priority = Priority.REQUEST
    tenant: str = ""
    """Whose bytes these are: links are shared fairly among tenants, budgets are counted per
    tenant.
    """
    elements: Elements = Elements.BYTES
    """What its bytes are, for codecs; whole elements from offset 0 on."""
    digest: bool = False
    """Compare a BLAKE3 digest of the whole transfer at the end, beside the frames' checksums."""

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
    """A snapshot. At a receiver `ready_bytes`, `sent_bytes` and `acked_bytes` all count verified
    bytes.

    Times are `time.monotonic()` seconds, None while it has not happened.
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
    """Codecs that its bytes went through besides raw, the lossy one included."""
