"""The protocol between an engine and its node agent on the unix socket: messages and framing.

It does not know sockets, threads or what a message causes.

A frame is a little-endian u32 length and that many bytes of msgpack. They hold one message: a map
whose "type" names it. Unknown fields are ignored. Unknown types, and values outside their bounds,
raise `ProtocolError`; so a new type is sent only to a side that speaks the version which has it.
Every id is the 16 raw bytes of a transfer id. The same id may name a landing and an outbox of one
agent, when a prefill is handed over inside a host. An outbox may be opened again under its id for
another try. So every message about an outbox has the `attempt`, which is above 0, rises with every
opening, and is never used again, even when the agent restarts.

Rules for touching memory and giving it back:

- An engine that fills an outbox sends `Attach` before it writes the first byte. `FailureNotice` for
  the outbox tells it to stop. A worker answers `Release` (or `AbortOutbox`) once none of its copies
  into the outbox is under way, and only then are the blocks used for something else. This also
  holds for an outbox that the worker has not begun to fill: all workers that might fill it are
  told, must answer, and must not begin later. They are the workers that were connected when the
  outbox was opened. No other may fill it, so a worker must not begin an outbox with an attempt up
  to its `Welcome.last_attempt`. Ranges that were sent as `Ready` must not be written again. A
  complete transfer needs no `Release`.
- An engine that waits for a landing sends `Watch`, on one connection of each core that has a
  request for it. `Landed` makes that instance an owner: the memory is stable until one `Release`
  from any connection of the instance. Only `OutboxOpened` and `Landed` say which memory a transfer
  is: whoever sends requests to an engine names a transfer.
  `FailureNotice` ends the watch, and then the instance owns nothing.
- A closed connection loses its watches, and the outboxes that it was still filling fail. The memory
  that its process could touch is reused when the process has ended, or after a grace time.
- An engine's scheduler connection asks the prefix cache, under handles that the instance chooses
  and uses once. `CacheFind` pins the parts that it finds until `CacheFree`, or until the connection
  is closed. `CacheReserve` gives memory to fill. Either the scheduler gives it back with
  `CacheCancel` before any worker has heard of it, or every worker sends `CacheWritten`, the last
  time with `is_last`, and then does not touch the memory any more. A part is in the cache once
  every worker has written its share of it.
- A process that encodes images, or uses what others have encoded, begins with `EncoderHello`
  instead. `EmbeddingPut` gives it memory to fill until `EmbeddingWritten` or `EmbeddingCancel`.
  `EmbeddingFind` holds the memory that it finds in its place until `EmbeddingFree`. An agent of
  version 4 refuses it.
"""

from __future__ import annotations

import struct
from typing import Annotated, Final, Literal

import msgspec

from kvmanager.hashing import KEY_BYTES
from kvmanager.pool.placement import StatePlacement
from transport.versions import Versions

PROTOCOL_VERSIONS: Final = Versions(oldest=6, newest=6)
"""1: first version. 2: the prefix cache. 3: messages about an outbox have the attempt; 0.1.0.
4: `Loaded`. 5: `EncoderHello` and embeddings. 6: the agent says where transfers are in its arena.
"""
VERSION_WITH_LOADED: Final = 4
VERSION_WITH_EMBEDDINGS: Final = 5
PROTOCOL_VERSION: Final = PROTOCOL_VERSIONS.newest

MAX_FRAME_BYTES: Final = 4 << 20
MAX_RANGES_PER_READY: Final = 8192
MAX_CACHE_BLOCKS: Final = 1 << 16
MAX_CACHE_SLOTS: Final = 1 << 17
MAX_ADAPTERS: Final = 1024

_LENGTH: Final = struct.Struct("<I")
LENGTH_BYTES: Final = _LENGTH.size

TransferId = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Attempt = Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]
Offset = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
Reason = Annotated[str, msgspec.Meta(max_length=4096)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
Handle = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Seconds = Annotated[float, msgspec.Meta(ge=0, lt=1e9)]
Key = Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Keys = Annotated[bytes, msgspec.Meta(max_length=MAX_CACHE_BLOCKS * KEY_BYTES)]
BlockPart = tuple[Offset, Annotated[int, msgspec.Meta(ge=0, lt=256)]]
BlockParts = Annotated[list[BlockPart], msgspec.Meta(max_length=MAX_CACHE_SLOTS)]
Slot = tuple[int, int, list[tuple[int, int]]]
"""Index into the handle's `keys`, part, and the runs of arena blocks that hold it."""


class ProtocolError(Exception):
    """The other side sent something that is not a message of this protocol."""


class EngineHello(msgspec.Struct, frozen=True, tag="hello"):
    """The first message of an engine, with its identity. `layout` is `KVLayout.encode()` of all its
    pipeline stages, `engine` the program with its version.

    A worker is known by its pipeline stage `pp_rank` and its tensor-parallel rank `tp_rank`; what a
    worker says later is said for itself.

    `namespace` goes into the roots of its cache keys (`kvmanager.hashing.root_key`); empty: this
    engine does not use the prefix cache. `adapters` has the identities of its LoRA adapters by
    name (`kvmanager.vllm_connector.weights`); only its scheduler tells them. `text_only`: it has no
    encoder of images or other media.
    """

    instance: Name
    role: Literal["scheduler", "worker"]
    pid: int
    layout: Annotated[bytes, msgspec.Meta(max_length=2 << 20)]
    tp_rank: Rank = 0
    tp_size: Annotated[int, msgspec.Meta(ge=1, lt=1 << 16)] = 1
    namespace: Annotated[bytes, msgspec.Meta(max_length=64)] = b""
    version: int = PROTOCOL_VERSION
    """The newest version that the engine speaks."""
    oldest_version: int = 0
    """The oldest one. 0, as engines of 0.1.0 say: no other than `version`."""
    engine: Annotated[str, msgspec.Meta(max_length=200)] = ""
    adapters: Annotated[dict[Name, Name], msgspec.Meta(max_length=MAX_ADAPTERS)] = {}
    pp_rank: Rank = 0
    pp_size: Annotated[int, msgspec.Meta(ge=1, lt=1 << 16)] = 1
    text_only: bool = False


class EncoderHello(msgspec.Struct, frozen=True, tag="encoder_hello"):
    """The first message of a process that exchanges embeddings only. It has no KV layout: an
    instance that only encodes keeps no KVCache. Since version 5.
    """

    instance: Name
    role: Literal["scheduler", "worker"]
    pid: int
    version: int = PROTOCOL_VERSION
    oldest_version: int = VERSION_WITH_EMBEDDINGS
    engine: Annotated[str, msgspec.Meta(max_length=200)] = ""
    encoder: Annotated[str, msgspec.Meta(max_length=1024)] = ""
    """What the keys of its embeddings are made of (`kvmanager.embedding_keys`)."""


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
    """The forward pass of the last chunk is over in this worker.

    `tp_rank` is for agents of 0.1.0, which do not know by the connection which worker speaks.
    `prefill_s` is the time since this worker began its first step for the request; 0: unknown.
    """

    transfer_id: TransferId
    attempt: Attempt
    tp_rank: Rank = 0
    prefill_s: Seconds = 0.0


class AbortOutbox(msgspec.Struct, frozen=True, tag="abort"):
    """The engine gives the outbox up and no longer writes into it."""

    transfer_id: TransferId
    attempt: Attempt
    reason: Reason


class Watch(msgspec.Struct, frozen=True, tag="watch"):
    """Asks to be told how the landing ends, and to own it when it is complete."""

    transfer_id: TransferId


class Release(msgspec.Struct, frozen=True, tag="release"):
    """This engine does not write into this opening of the outbox any more; with `attempt` 0, it
    does not read the landing any more.
    """

    transfer_id: TransferId
    attempt: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)] = 0


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """The first step with the KVCache of this landing is over in this worker. The fields are those
    of `LoadTimes`. Since version 4.
    """

    transfer_id: TransferId
    wait_s: Seconds
    load_s: Seconds
    first_step_s: Seconds


class CacheFind(msgspec.Struct, frozen=True, tag="cache_find"):
    """Asks for the cached part of the prefix with these block keys. One `CacheFound` answers. The
    slots that it names stay in place until `CacheFree`.
    """

    handle: Handle
    keys: Keys


class CacheFree(msgspec.Struct, frozen=True, tag="cache_free"):
    """The engine does not read the result of this `CacheFind` any more, or does not want it."""

    handle: Handle


class CacheReserve(msgspec.Struct, frozen=True, tag="cache_reserve"):
    """Asks for memory to fill for these (index into `keys`, part) pairs. One `CacheSlots` answers.

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
    """This worker has written its share of these slots. With `is_last` it is done with the handle,
    and will not write the slots that it has not named. `tp_rank` is for agents of 0.1.0.
    """

    handle: Handle
    parts: BlockParts
    is_last: bool = False
    tp_rank: Rank = 0


class CacheCancel(msgspec.Struct, frozen=True, tag="cache_cancel"):
    """The scheduler cancels a `CacheReserve` that no worker has heard of."""

    handle: Handle


class EmbeddingPut(msgspec.Struct, frozen=True, tag="embedding_put"):
    """Asks for memory for the encoder's output of one image. One `EmbeddingRoom` answers."""

    key: Key
    nbytes: Annotated[int, msgspec.Meta(ge=1, lt=1 << 40)]


class EmbeddingWritten(msgspec.Struct, frozen=True, tag="embedding_written"):
    """The memory for this key holds its final bytes, and this process writes there no more."""

    key: Key


class EmbeddingCancel(msgspec.Struct, frozen=True, tag="embedding_cancel"):
    """Gives memory back that this process was given for this key and has not filled."""

    key: Key


class EmbeddingFind(msgspec.Struct, frozen=True, tag="embedding_find"):
    """Asks for the encoder's output of one image. One `EmbeddingFound` answers."""

    handle: Handle
    key: Key


class EmbeddingFree(msgspec.Struct, frozen=True, tag="embedding_free"):
    """This process does not read what this `EmbeddingFind` found any more."""

    handle: Handle


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The first message of the agent, with the place of its arena. A new epoch says that the agent
    has restarted: nothing that an engine knew about the arena holds any more.

    `placement` says which window tails and states are worth keeping; None: the agent has no prefix
    cache, or none for this engine. `last_attempt`: outboxes up to it were opened before this
    connection, which may not fill them and is not told how they end. `grace_s`: when the agent
    loses the connection that owns a landing or cached blocks, it keeps their bytes for this long.
    `is_lossy`: KVCache that lands here may lose precision on its way.
    """

    arena_epoch: str
    arena_path: str
    arena_bytes: int
    block_bytes: int
    placement: StatePlacement | None = None
    last_attempt: int = 0
    grace_s: float = 0.0
    version: int = PROTOCOL_VERSION
    """The newest version that both sides speak, which is used from now on."""
    is_lossy: bool = False


class HelloRefused(msgspec.Struct, frozen=True, tag="refused"):
    """The agent closes the connection and says why."""

    reason: str


class OutboxOpened(msgspec.Struct, frozen=True, tag="outbox_opened"):
    """An outbox for the KVCache of `num_tokens` tokens is at `runs` of the arena. Every connection
    with its layout is told before anybody can ask an engine to fill it. The full-attention KVCache
    of the first `cached_tokens` is not part of it, `window_step` and `draft` are as in `Landed`.
    """

    transfer_id: TransferId
    attempt: Attempt
    num_tokens: int
    runs: list[tuple[int, int]]
    cached_tokens: int = 0
    window_step: int = 0
    draft: bytes = b""


class Landed(msgspec.Struct, frozen=True, tag="landed"):
    """Every byte of the landing is in place and verified; this connection owns it now.

    It holds the KVCache of the `num_tokens` tokens with this digest, at `runs` of the arena. The
    full-attention KVCache of the first `cached_tokens` is not part of it: `cached_runs` are the
    places of the KV part of their blocks. Windows begin at multiples of `window_step` tokens;
    `draft` is the fingerprint of the drafter whose KVCache is at its end, empty for none.
    """

    transfer_id: TransferId
    num_tokens: int
    token_digest: bytes
    runs: list[tuple[int, int]]
    cached_tokens: int = 0
    cached_runs: list[list[tuple[int, int]]] = []
    window_step: int = 0
    draft: bytes = b""


class FailureNotice(msgspec.Struct, frozen=True, tag="failed"):
    """The watched landing failed, or an outbox that this engine fills or might fill.

    `attempt` is the opening of the outbox; 0 for a landing. When an engine dies before its first
    byte, the same outbox may be opened again for another engine.
    """

    transfer_id: TransferId
    reason: str
    attempt: int = 0


class CacheFound(msgspec.Struct, frozen=True, tag="cache_found"):
    """The prompt can resume after `num_blocks` leading blocks from `slots`, which are pinned: the
    parts of `CacheShape.resume_parts(num_blocks)`. The KV of `kv_blocks` leading blocks is here; if
    the prompt has more blocks, it is there that other prompts part from it.
    """

    handle: int
    num_blocks: int
    kv_blocks: int
    slots: list[Slot]


class CacheSlots(msgspec.Struct, frozen=True, tag="cache_slots"):
    """The memory to fill. Parts that it does not name are cached already, or have no room. Without
    any slots the handle is over.
    """

    handle: int
    slots: list[Slot]


class EmbeddingRoom(msgspec.Struct, frozen=True, tag="embedding_room"):
    """The runs of arena blocks to fill. Empty: the agent has this embedding, or no room."""

    key: bytes
    runs: list[tuple[int, int]]


class EmbeddingFound(msgspec.Struct, frozen=True, tag="embedding_found"):
    """The embedding and its place. Without runs the agent does not have it, and nothing is held."""

    handle: int
    nbytes: int
    runs: list[tuple[int, int]]


TransferMessage = Attach | Ready | PrefillEnd | AbortOutbox | Watch | Release | Loaded
CacheMessage = CacheFind | CacheFree | CacheReserve | CacheWritten | CacheCancel
EmbeddingMessage = EmbeddingPut | EmbeddingWritten | EmbeddingCancel | EmbeddingFind | EmbeddingFree
Hello = EngineHello | EncoderHello
EngineMessage = Hello | TransferMessage | CacheMessage | EmbeddingMessage
AgentMessage = (
    Welcome
    | HelloRefused
    | OutboxOpened
    | Landed
    | FailureNotice
    | CacheFound
    | CacheSlots
    | EmbeddingRoom
    | EmbeddingFound
)

_encoder = msgspec.msgpack.Encoder()
_engine_decoder: msgspec.msgpack.Decoder[EngineMessage] = msgspec.msgpack.Decoder(EngineMessage)
_agent_decoder: msgspec.msgpack.Decoder[AgentMessage] = msgspec.msgpack.Decoder(AgentMessage)


def agreed_version(hello: Hello) -> int:
    """The version to speak with this engine. Raises NoCommonVersion."""
    theirs = Versions(hello.oldest_version or hello.version, hello.version)
    return PROTOCOL_VERSIONS.common(theirs, "engine")


def encode_frame(message: EngineMessage | AgentMessage) -> bytes:
    """Encode a message as one frame. Raises ProtocolError when it exceeds MAX_FRAME_BYTES."""
    payload = _encoder.encode(message)
    if len(payload) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a message of {len(payload)} bytes: at most {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(payload)) + payload


def decode_engine_message(payload: bytes) -> EngineMessage:
    """Decode a message of an engine. Raises ProtocolError."""
    try:
        return _engine_decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"bad message from an engine: {error}") from error


def decode_agent_message(payload: bytes) -> AgentMessage:
    """Decode a message of an agent. Raises ProtocolError."""
    try:
        return _agent_decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"bad message from the agent: {error}") from error


class FrameDecoder:
    """Cuts a byte stream into payloads. It checks a length before it waits for the bytes."""

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
