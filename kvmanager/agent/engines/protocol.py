"""What an engine and its node agent say over the unix socket: messages and framing.

It does not know sockets, threads or what a message causes.

A frame is a little-endian u32 length and that many bytes of msgpack: one message, a map whose
"type" names it. Unknown fields are ignored, unknown types and values outside their bounds are a
`ProtocolError`. Every id is the 16 raw bytes of a transfer id; the same id may name a landing and
an outbox of one agent, when a prefill is handed over inside a host. An outbox may be opened again
under its id, for another try: whatever is said of an outbox names the `attempt`, which is above 0,
rises with every opening, and does not come again when the agent restarts.

Who may touch memory, and how it comes back:

- An engine that fills an outbox says `Attach` before it writes the first byte. `FailureNotice` for
  it means stop; a worker answers `Release` (or `AbortOutbox`) once no copy into the outbox is under
  way, and only then are the blocks used for something else. That holds for an outbox that it has
  not begun to fill as well: all workers that might are told, must answer, and must not begin later.
  They are the workers that were connected when it was opened; no other may fill it, so a worker
  must not begin an outbox with an attempt up to its `Welcome.last_attempt`.
  What was said to be `Ready` must not be written again; a transfer that completes needs no
  `Release`.
- An engine that waits for a landing says `Watch`, on one connection. `Landed` makes its instance
  the owner: the memory is stable until one `Release` from any connection of the instance.
  `FailureNotice` ends the watch; nothing is owned then.
- A closed connection forgets its watches and fails the outboxes it was still filling. Memory it
  could touch is reused when its process is gone, or after a grace time.
- The prefix cache is asked by an engine's scheduler connection, under handles that the instance
  chooses, each once. `CacheFind` pins what it finds until `CacheFree`, or until the connection is
  closed. `CacheReserve` gives memory to fill: either the scheduler takes it back with `CacheCancel`
  before any worker has heard of it, or every rank's worker says `CacheWritten`, the last time with
  `is_last`, and then does not touch it any more. A part is in the cache once every rank wrote it.
"""

from __future__ import annotations

import struct
from typing import Annotated, Final, Literal

import msgspec

from kvmanager.hashing import KEY_BYTES
from kvmanager.pool.placement import StatePlacement

PROTOCOL_VERSION: Final = 3
"""1: first version. 2: the prefix cache. 3: what is said of an outbox names the attempt."""

MAX_FRAME_BYTES: Final = 4 << 20
MAX_RANGES_PER_READY: Final = 8192
MAX_CACHE_BLOCKS: Final = 1 << 16
MAX_CACHE_SLOTS: Final = 1 << 17

_LENGTH: Final = struct.Struct("<I")
LENGTH_BYTES: Final = _LENGTH.size

TransferId = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Attempt = Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]
Offset = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
Reason = Annotated[str, msgspec.Meta(max_length=4096)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
Handle = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Key = Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Keys = Annotated[bytes, msgspec.Meta(max_length=MAX_CACHE_BLOCKS * KEY_BYTES)]
BlockPart = tuple[Offset, Annotated[int, msgspec.Meta(ge=0, lt=256)]]
BlockParts = Annotated[list[BlockPart], msgspec.Meta(max_length=MAX_CACHE_SLOTS)]
Slot = tuple[int, int, list[tuple[int, int]]]
"""Index into the handle's `keys`, part, and the runs of arena blocks that hold it."""


class ProtocolError(Exception):
    """The other side sent something that is not a message of this protocol."""


class EngineHello(msgspec.Struct, frozen=True, tag="hello"):
    """First message of an engine: who it is. `layout` is `KVLayout.encode()`.

    `namespace` is what the roots of its cache keys are made of (`kvmanager.hashing.root_key`);
    empty: this engine does not use the prefix cache.
    """

    instance: Name
    role: Literal["scheduler", "worker"]
    pid: int
    layout: Annotated[bytes, msgspec.Meta(max_length=2 << 20)]
    tp_rank: Rank = 0
    tp_size: Annotated[int, msgspec.Meta(ge=1, lt=1 << 16)] = 1
    namespace: Annotated[bytes, msgspec.Meta(max_length=64)] = b""
    version: int = PROTOCOL_VERSION


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    """This engine will fill this outbox; its death fails the transfer."""

    transfer_id: TransferId
    attempt: Attempt


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """These (offset, length) ranges of the outbox hold their final bytes."""

    transfer_id: TransferId
    attempt: Attempt
    ranges: Annotated[list[tuple[Offset, Offset]], msgspec.Meta(max_length=MAX_RANGES_PER_READY)]


class PrefillEnd(msgspec.Struct, frozen=True, tag="prefill_end"):
    """The forward pass of the last chunk is over on this rank."""

    transfer_id: TransferId
    attempt: Attempt
    tp_rank: Rank = 0


class AbortOutbox(msgspec.Struct, frozen=True, tag="abort"):
    """The engine gives the outbox up and no longer writes into it."""

    transfer_id: TransferId
    attempt: Attempt
    reason: Reason


class Watch(msgspec.Struct, frozen=True, tag="watch"):
    """Tell this engine how the landing ends, and let it own what landed."""

    transfer_id: TransferId


class Release(msgspec.Struct, frozen=True, tag="release"):
    """This engine does not write into this opening of the outbox any more; with `attempt` 0, it
    does not read the landing any more.
    """

    transfer_id: TransferId
    attempt: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)] = 0


class CacheFind(msgspec.Struct, frozen=True, tag="cache_find"):
    """What is cached of the prefix with these block keys? One `CacheFound` answers; what it names
    stays where it is until `CacheFree`.
    """

    handle: Handle
    keys: Keys


class CacheFree(msgspec.Struct, frozen=True, tag="cache_free"):
    """What this `CacheFind` found is not read any more, or not wanted."""

    handle: Handle


class CacheReserve(msgspec.Struct, frozen=True, tag="cache_reserve"):
    """Memory to fill for these (index into `keys`, part) pairs. One `CacheSlots` answers.

    `keys` follow each other in one prefix; the first is block `first_block`, `parent` the key
    before it (the root key for block 0). `replaces`: the key of a block whose windows and state
    this request stored before and that may make room when the new ones are written; empty: none.
    """

    handle: Handle
    parent: Key
    first_block: Annotated[int, msgspec.Meta(ge=0, lt=MAX_CACHE_BLOCKS)]
    keys: Keys
    parts: BlockParts
    replaces: Annotated[bytes, msgspec.Meta(max_length=KEY_BYTES)] = b""


class CacheWritten(msgspec.Struct, frozen=True, tag="cache_written"):
    """This rank has written its share of these slots. With `is_last` it is done with the handle:
    what it did not name will not be written.
    """

    handle: Handle
    tp_rank: Rank
    parts: BlockParts
    is_last: bool = False


class CacheCancel(msgspec.Struct, frozen=True, tag="cache_cancel"):
    """The scheduler takes a `CacheReserve` back that no worker has heard of."""

    handle: Handle


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """First message of the agent: where its arena is. A new epoch is a new life of the agent: of
    what an engine knew about the arena nothing holds any more.

    `placement` says which window tails and states are worth keeping; None: the agent has no prefix
    cache, or none for this engine. `last_attempt`: outboxes up to it were opened before this
    connection, which may not fill them and does not hear how they end. `grace_s`: when the agent
    loses the connection that owns a landing or cached blocks, it keeps their bytes for so long.
    """

    arena_epoch: str
    arena_path: str
    arena_bytes: int
    block_bytes: int
    placement: StatePlacement | None = None
    last_attempt: int = 0
    grace_s: float = 0.0
    version: int = PROTOCOL_VERSION


class HelloRefused(msgspec.Struct, frozen=True, tag="refused"):
    """The agent closes the connection and says why."""

    reason: str


class Landed(msgspec.Struct, frozen=True, tag="landed"):
    """Every byte of the landing is in place and verified; this connection owns it now."""

    transfer_id: TransferId


class FailureNotice(msgspec.Struct, frozen=True, tag="failed"):
    """The watched landing, or an outbox that this engine fills or might fill, came to nothing.

    `attempt`: which opening of the outbox; 0 for a landing. Where an engine dies before its first
    byte, the same outbox may be opened again for another engine.
    """

    transfer_id: TransferId
    reason: str
    attempt: int = 0


class CacheFound(msgspec.Struct, frozen=True, tag="cache_found"):
    """`num_blocks` leading blocks can be resumed from `slots`, which are pinned: those that
    `CacheShape.resume_parts(num_blocks)` names. `kv_blocks` leading blocks have their KV here:
    where that is less than the prompt has, other prompts part from this one there.
    """

    handle: int
    num_blocks: int
    kv_blocks: int
    slots: list[Slot]


class CacheSlots(msgspec.Struct, frozen=True, tag="cache_slots"):
    """Memory to fill. What was asked for and is not named is there already, or has no room. With no
    slots at all the handle is over.
    """

    handle: int
    slots: list[Slot]


TransferMessage = Attach | Ready | PrefillEnd | AbortOutbox | Watch | Release
CacheMessage = CacheFind | CacheFree | CacheReserve | CacheWritten | CacheCancel
EngineMessage = EngineHello | TransferMessage | CacheMessage
AgentMessage = Welcome | HelloRefused | Landed | FailureNotice | CacheFound | CacheSlots

_encoder = msgspec.msgpack.Encoder()
_engine_decoder: msgspec.msgpack.Decoder[EngineMessage] = msgspec.msgpack.Decoder(EngineMessage)
_agent_decoder: msgspec.msgpack.Decoder[AgentMessage] = msgspec.msgpack.Decoder(AgentMessage)


def encode_frame(message: EngineMessage | AgentMessage) -> bytes:
    """The message as one frame; raises ProtocolError when it is over MAX_FRAME_BYTES."""
    payload = _encoder.encode(message)
    if len(payload) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a message of {len(payload)} bytes: at most {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(payload)) + payload


def decode_engine_message(payload: bytes) -> EngineMessage:
    """What an engine said; raises ProtocolError."""
    try:
        return _engine_decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"bad message from an engine: {error}") from error


def decode_agent_message(payload: bytes) -> AgentMessage:
    """What an agent said; raises ProtocolError."""
    try:
        return _agent_decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"bad message from the agent: {error}") from error


class FrameDecoder:
    """Cuts a byte stream into payloads; a length is checked before its bytes are waited for."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads completed by `data`; raises ProtocolError for an impossible length.

        After an error the stream has no frame boundary any more and must be closed.
        """
        buffer = self._buffer
        buffer += data
        payloads = []
        start = 0
        while len(buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, start)
            if not 0 < length <= MAX_FRAME_BYTES:
                raise ProtocolError(f"a frame of {length} bytes: 1 to {MAX_FRAME_BYTES}")
            end = start + _LENGTH.size + length
            if len(buffer) < end:
                break
            payloads.append(bytes(buffer[start + _LENGTH.size : end]))
            start = end
        del buffer[:start]
        return payloads
