"""Value types of `kvmanager.transfers.table`: landings, outboxes, engine connections, effects and
errors. The rules are in that module.

    TransferError        code: one of transport.rpc.ErrorCode
    ├── NoArenaRoom      NO_ROOM    the arena or a cap is full; later it may not be
    ├── BadRequest       INVALID    can never work
    ├── CallNotGranted   REFUSED    no gateway has signed for it
    ├── UnknownTransfer  NOT_FOUND  no such transfer, or it is over
    ├── UnknownEngine    NOT_FOUND  the engine is not connected
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, Final, Literal

from kvmanager.load_times import LoadTimes
from kvmanager.transfers.blocks import Run
from kvmanager.transfers.holds import Key, Kind
from transport.wire.ranges import IntervalSet

MAX_MARKS: Final = 16
"""Most notes of how far one transfer was at a time."""


class TransferError(Exception):
    """A request about a transfer is refused; nothing was changed."""

    code: ClassVar[Literal["NO_ROOM", "INVALID", "REFUSED", "NOT_FOUND"]]


class NoArenaRoom(TransferError):
    code = "NO_ROOM"


class BadRequest(TransferError):
    code = "INVALID"


class CallNotGranted(TransferError):
    code = "REFUSED"


class UnknownTransfer(TransferError):
    code = "NOT_FOUND"


class UnknownEngine(TransferError):
    code = "NOT_FOUND"


class State(StrEnum):
    """States of landings and outboxes; `MOVES` says which end goes through which."""

    RESERVED = "reserved"  # landing: memory is held, no sender has come
    RECEIVING = "receiving"  # landing: a sender was admitted
    LANDED = "landed"  # landing: complete, nobody owns it yet
    CLAIMED = "claimed"  # landing: complete and owned by an engine instance, no lease
    RELEASED = "released"  # landing: the owner is done with it
    OPEN = "open"  # outbox: being filled and sent
    COMPLETE = "complete"  # outbox: the receiver has verified every byte
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


MOVES: dict[State, frozenset[State]] = {
    State.RESERVED: frozenset(
        {State.RECEIVING, State.LANDED, State.FAILED, State.CANCELLED, State.EXPIRED}
    ),
    State.RECEIVING: frozenset({State.LANDED, State.FAILED, State.CANCELLED, State.EXPIRED}),
    State.LANDED: frozenset({State.CLAIMED, State.CANCELLED, State.EXPIRED}),
    State.CLAIMED: frozenset({State.RELEASED}),
    State.OPEN: frozenset({State.COMPLETE, State.FAILED, State.CANCELLED, State.EXPIRED}),
}
"""Legal moves; a state that is missing is final."""


@dataclass(frozen=True, slots=True)
class LandingSpec:
    """A requested landing. `nbytes` is the exact size of the transfer, or `nbytes_without_draft`
    is, if the sender does not have the drafter of the receiver.

    The full-attention KVCache of the first `cached_tokens` is cached here and not part of it.
    Windows begin at multiples of `window_step` tokens.
    """

    transfer_id: bytes
    token: bytes
    nbytes: int
    num_tokens: int
    fingerprint: bytes
    token_digest: bytes
    lease_s: float
    tenant: str = ""
    cached_tokens: int = 0
    window_step: int = 0
    nbytes_without_draft: int | None = None
    draft: bytes = b""
    """The fingerprint of the drafter of its layout."""
    traceparent: str = ""
    """The trace of the request that it is for, or ""."""


@dataclass(frozen=True, slots=True)
class OutboxSpec:
    """A requested outbox. `cached_tokens`, `window_step` and `draft` are as in `LandingSpec`."""

    transfer_id: bytes
    nbytes: int
    num_tokens: int
    fingerprint: bytes
    lease_s: float
    cached_tokens: int = 0
    window_step: int = 0
    draft: bytes = b""
    traceparent: str = ""
    """As in `LandingSpec`."""


@dataclass(frozen=True, slots=True)
class EnginePeer:
    """One connection of an engine. All connections of an `instance` have the same layout.

    rank: of `world_size` workers, over all pipeline stages and tensor-parallel ranks.
    """

    conn_id: int
    instance: str
    role: str
    rank: int
    world_size: int
    fingerprint: bytes

    @property
    def engine(self) -> str:
        """The configured name, which all cores of an engine with data parallelism have. Each core
        is an instance of its own, with its rank behind the name.
        """
        name, mark, rank = self.instance.rpartition("_dp")
        return name if mark and rank.isdecimal() else self.instance


@dataclass(slots=True)
class LandingRecord:
    spec: LandingSpec
    runs: list[Run]
    opened_s: float
    lease_until_s: float
    state: State = State.RESERVED
    error: str = ""
    watchers: set[int] = field(default_factory=set)
    """The connections that wait for the landing or own it: of one engine, for each of its cores."""
    ended_s: float | None = None
    """When the transfer landed, or ended without success."""
    is_filled_here: bool = False
    """An engine of this agent fills it, through an outbox that has borrowed its memory."""
    owner: str = ""
    """The engine that owns it or has owned it."""
    times: LoadTimes | None = None
    """What the engine says of its load and first step: the rank that was last."""

    @property
    def key(self) -> Key:
        return Kind.LANDING, self.spec.transfer_id


@dataclass(slots=True)
class OutboxRecord:
    spec: OutboxSpec
    runs: list[Run]
    opened_s: float
    lease_until_s: float
    attempt: int = 1
    """The number of this opening, larger than any number used on this host before."""
    state: State = State.OPEN
    error: str = ""
    attached: set[int] = field(default_factory=set)
    """The connections that have sent `Attach`."""
    ready: IntervalSet = field(default_factory=IntervalSet)
    ended_ranks: set[int] = field(default_factory=set)
    prefill_end_s: float | None = None
    marks: list[tuple[float, int, int]] = field(default_factory=list)
    """How it was filled and sent: seconds since `opened_s`, bytes filled, bytes sent."""
    prefill_s: float = 0.0
    """From the first forward pass to the last one, in the rank that took longest; 0: unknown."""
    ended_s: float | None = None
    fills_landing: bool = False
    """`runs` are those of this agent's landing of the same transfer."""

    @property
    def key(self) -> Key:
        return Kind.OUTBOX, self.spec.transfer_id

    @property
    def is_filled(self) -> bool:
        return self.ready.total == self.spec.nbytes

    @property
    def is_mark_due(self) -> bool:
        """Whether another `MAX_MARKS`th of its bytes has been filled since the last of `marks`."""
        return self.ready.total * MAX_MARKS >= self.spec.nbytes * (len(self.marks) + 1)


@dataclass(frozen=True, slots=True)
class DropLanding:
    """Make the receiver forget the landing; `landings.dropped` must follow."""

    transfer_id: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class CancelOutbox:
    """Make the sender stop; `outboxes.ended` must follow when it has."""

    transfer_id: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class ForwardReady:
    """These (offset, length) ranges may be sent."""

    transfer_id: bytes
    ranges: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class RecordPrefillEnd:
    """Every rank's prefill is over: note how much was sent by now."""

    transfer_id: bytes


@dataclass(frozen=True, slots=True)
class TellLanded:
    conn_id: int
    transfer_id: bytes


@dataclass(frozen=True, slots=True)
class TellFailed:
    conn_id: int
    transfer_id: bytes
    reason: str
    attempt: int = 0
    """The opening of an outbox; 0 for a landing, whose id is used once."""


@dataclass(frozen=True, slots=True)
class OutcomeKnown:
    """The outcome of this end is known, so its report can be given to those who wait for it."""

    key: Key


@dataclass(frozen=True, slots=True)
class GaveUpOnEngine:
    """An engine did not release the memory within the drain time, which is a fault of it."""

    key: Key


Effect = (
    DropLanding
    | CancelOutbox
    | ForwardReady
    | RecordPrefillEnd
    | TellLanded
    | TellFailed
    | OutcomeKnown
    | GaveUpOnEngine
)
