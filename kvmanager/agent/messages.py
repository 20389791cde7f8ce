"""The messages between control plane and node agent: the structs of service `prfaas.NodeAgent`.

They do not know how they travel. Ids, tokens, fingerprints and digests are hex strings; sizes are
bytes, times are seconds. Every method is unary; errors are `transport.rpc.RpcError` codes. `grant`
is a gateway's grant for the call (`kvmanager.agent.grants`), which agents with `granting_keys` ask
for; REFUSED is what they answer else.

| method | request -> reply | errors beside UNAVAILABLE, INTERNAL, TIMEOUT |
|---|---|---|
| Reserve | Reserve -> ReserveReply | NO_ROOM, INVALID (layout unknown, bad size or lease) |
| Renew | Renew -> RenewReply | NOT_FOUND (no live transfer), INVALID |
| Cancel | Cancel -> CancelReply | INVALID; cancelling what is over or unknown is no error |
| OpenOutbox | OpenOutbox -> OpenOutboxReply | NO_ROOM, NOT_FOUND (engine), INVALID (layout, size) |
| Await | Await -> TransferReport | NOT_FOUND (unknown, or over for more than a minute) |
| Status | Status -> StatusReply | |
| WatchCache | WatchCache -> CacheFeed | INVALID (neither a cache nor embeddings here) |
| ListCache | ListCache -> ListCacheReply | INVALID (no cache here) |

The service has more methods: probes (`probe_messages`), moves of cached prefixes
(`cache.move_messages`), embeddings (`embeddings.messages`) and links (`links.messages`).
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from kvmanager.load_times import LoadTimes

SERVICE: Final = "prfaas.NodeAgent"

Runs = list[tuple[int, int]]
"""[(first block, number of blocks), ...] of the agent's arena, in logical order."""


class Reserve(msgspec.Struct, frozen=True):
    """Reserve memory for the KVCache of `num_tokens`. An empty fingerprint: the only layout here.

    `block_keys` are the joined keys of the tokens' full cache blocks, root key first
    (`kvmanager.hashing`). With them the agent leaves cached KV out of the transfer, and copies what
    has landed into its prefix cache.
    """

    num_tokens: int
    lease_s: float
    layout_fingerprint: str = ""
    token_digest: str = ""
    tenant: str = ""
    block_keys: bytes = b""
    grant: bytes = b""
    traceparent: str = ""
    """A W3C trace context header, or ""."""


class ReserveReply(msgspec.Struct, frozen=True):
    """The landing: the address for `nbytes`, and the token that admits the sender. Where it is in
    the arena is between the agent and its engines.

    The full-attention KVCache of the first `cached_tokens` need not be sent: it is here, and stays
    for as long as the landing. `landing_room_bytes` is the memory that one more landing could take
    now, as in `StatusReply`. `is_lossy`: the KVCache that is sent may lose precision on its way,
    and no cache keeps it. Windows begin at multiples of `window_step` tokens; 0: of the pages of
    the engine that loads them.
    """

    transfer_id: str
    token: str
    nbytes: int
    host: str
    port: int
    layout_fingerprint: str
    lease_s: float
    cached_tokens: int = 0
    landing_room_bytes: int | None = None
    is_lossy: bool = False
    window_step: int = 0
    draft: str = ""
    """The fingerprint of the drafter whose KVCache the landing has room for; "" for none."""


class Renew(msgspec.Struct, frozen=True):
    """Renew the leases of the transfer's live ends at this agent to `lease_s` from now."""

    transfer_id: str
    lease_s: float


class RenewReply(msgspec.Struct, frozen=True):
    lease_s: float


class Cancel(msgspec.Struct, frozen=True):
    """End the transfer at this agent. A landing that an engine owns is left to the engine."""

    transfer_id: str
    reason: str = ""


class CancelReply(msgspec.Struct, frozen=True):
    """`cancelled`: whether something was alive and has ended now. `landing_room_bytes` is the
    memory that one more landing could take now, as in `StatusReply`. `times` is what the engine
    that took the landing says of it; None: nothing yet.
    """

    cancelled: bool
    landing_room_bytes: int | None = None
    times: LoadTimes | None = None


class OpenOutbox(msgspec.Struct, frozen=True):
    """Reserve memory that an engine fills, and send it to the landing at `host`:`port`.

    If this agent has the landing, the engine fills that memory itself, and nothing is sent.
    """

    transfer_id: str
    token: str
    nbytes: int
    num_tokens: int
    layout_fingerprint: str
    host: str
    port: int
    lease_s: float
    tenant: str = ""
    """The owner of the KVCache: tenants share links fairly."""
    cached_tokens: int = 0
    """The landing has the full-attention pages of these tokens, which are not sent."""
    window_step: int = 0
    """As in `ReserveReply`."""
    grant: bytes = b""
    by_transport: bool = False
    """Send over a connection even to a landing at this agent, which an engine could fill itself."""
    draft: str = ""
    """The drafter whose KVCache the landing has room for. That of another one is not sent."""
    instance: str = ""
    """The engine that will fill it; "": any one with this layout."""
    traceparent: str = ""
    """As in `Reserve`."""


class OpenOutboxReply(msgspec.Struct, frozen=True):
    """`attempt` names this opening of the outbox to the engine that fills it. It is larger than
    that of any outbox that this agent, or an agent before it on this host, has opened.
    """

    lease_s: float
    attempt: int
    draft: str = ""
    """The drafter whose KVCache is a part of the outbox; "" for none."""


class Await(msgspec.Struct, frozen=True):
    """Wait at most `timeout_s` for one end of a transfer; `kind` "": the outbox if there is one."""

    transfer_id: str
    timeout_s: float
    kind: Literal["", "landing", "outbox"] = ""


class TransferReport(msgspec.Struct, frozen=True):
    """The state of one end of a transfer, or its outcome. Unknown durations are 0.

    A landing is `complete` as soon as it has landed. `sent_bytes_at_prefill_end` counts the bytes
    that the kernel had taken when the last rank's last forward pass was over.
    """

    transfer_id: str
    kind: Literal["landing", "outbox"]
    state: Literal["open", "complete", "failed", "cancelled", "expired"]
    nbytes: int
    error: str = ""
    ready_bytes: int = 0
    sent_bytes: int = 0
    acked_bytes: int = 0
    resent_bytes: int = 0
    sent_bytes_at_prefill_end: int = 0
    prefill_end_to_complete_s: float = 0.0
    opened_to_complete_s: float = 0.0
    first_sent_to_complete_s: float = 0.0
    wire_bytes: int = 0
    """Bytes of DATA bodies as sent, resends included; 0 at a landing."""
    codecs: tuple[str, ...] = ()
    """Codecs that coded some of its bytes; only "fp8" is lossy."""
    prefill_s: float = 0.0
    """From the begin of the first forward pass to the end of the last one; an outbox's."""
    progress: tuple[tuple[float, int, int], ...] = ()
    """How an outbox was filled and sent: seconds since it was opened, bytes that the engine had
    filled by then, and bytes that the kernel had taken. At most 16 of them.
    """
    hand_off: Literal["arena", "transport"] = "transport"
    """"arena": both ends are at this agent, and an engine wrote into the landing."""


class Status(msgspec.Struct, frozen=True):
    pass


class CacheModel(msgspec.Struct, frozen=True):
    """How the prompts of one model are cached, for callers that compute keys and judge hits.

    `parts` are (kind, bytes, window tokens) of `kvmanager.pool.shape.PartShape`, in order.
    """

    namespace: str
    block_tokens: int
    parts: list[tuple[int, int, int]]


class EngineStatus(msgspec.Struct, frozen=True):
    """One engine instance and its connections. `cache` None: it does not use the prefix cache.
    `kv_block_bytes` is the data of one block of the engine's own KV memory, on all ranks. Engines
    share KVCache if `layout_fingerprint` is the same; `model` is only a name, `weights` identifies
    the weights. `engine` is its program with the version. `adapters` identifies its LoRA adapters
    by name: engines share KVCache of those that are the same. `text_only`: it refuses prompts with
    images or other media.
    """

    instance: str
    num_connections: int
    tp_size: int
    layout: str
    layout_fingerprint: str
    cache: CacheModel | None = None
    kv_block_bytes: int = 0
    model: str = ""
    weights: str = ""
    engine: str = ""
    adapters: dict[str, str] = {}
    pp_size: int = 1
    text_only: bool = False


class LinkStatus(msgspec.Struct, frozen=True):
    """Open outboxes that send to one endpoint."""

    endpoint: str
    num_transfers: int
    num_connections: int
    unacked_bytes: int


class CacheStatus(msgspec.Struct, frozen=True):
    """The prefix cache of a node now. Bytes by "tier/kind", such as "arena/kv" or "ssd/state"."""

    nbytes: dict[str, int] = {}
    num_blocks: int = 0
    """Blocks with any part in any tier."""
    pinned_bytes: int = 0
    queries: int = 0
    query_tokens: int = 0
    hit_tokens: dict[str, int] = {}
    """Tokens by the tier that served them."""
    evictions: dict[str, int] = {}
    """Evicted parts by "tier/kind"."""
    arena_blocks_bytes: int = 0
    """Bytes of the arena blocks that it holds, those being filled included."""
    fills: int = 0
    """Times that engines were given memory to fill."""
    promotions: int = 0
    """Landings of which parts were kept."""
    ssd_reads: int = 0
    """In parts, as the next three."""
    ssd_writes: int = 0
    ssd_failures: int = 0
    wrong_parts: int = 0
    """Parts found damaged when an arena was taken over from the agent before."""


class EmbeddingStatus(msgspec.Struct, frozen=True):
    """The encoder's outputs of images at a node. `held_bytes` counts whole blocks."""

    num_embeddings: int = 0
    held_bytes: int = 0
    cap_bytes: int = 0
    num_queries: int = 0
    num_hits: int = 0


class EncoderStatus(msgspec.Struct, frozen=True):
    """One engine instance that saves or loads embeddings, and its connections for that. `encoder`
    is what the keys of its embeddings are made of (`kvmanager.embedding_keys`): instances with the
    same one share embeddings. "": an engine of an older release has not said it.
    """

    instance: str
    num_connections: int
    encoder: str = ""
    engine: str = ""


class StatusReply(msgspec.Struct, frozen=True):
    """`landing_bytes` and `outbox_bytes` count whole blocks, until they are free again.

    `free_bytes` are free for transfers, including what the prefix cache would give up for them. One
    more landing may take `landing_room_bytes` of them; None from an older agent. `exposures` tells
    people what somebody on the network may do there. `is_encrypted`: KVCache leaves and enters over
    mutual TLS only.
    """

    arena_bytes: int
    block_bytes: int
    free_bytes: int
    landing_bytes: int
    landing_cap_bytes: int
    outbox_bytes: int
    num_landings: dict[str, int]
    num_outboxes: dict[str, int]
    engines: list[EngineStatus]
    links: list[LinkStatus]
    num_received_connections: int
    uptime_s: float
    pid: int
    data_endpoint: str
    cache: CacheStatus | None = None
    landing_room_bytes: int | None = None
    exposures: list[str] = []
    is_encrypted: bool = False
    num_turned_away: int = 0
    """Data connections that were closed or refused because there were too many."""
    embeddings: EmbeddingStatus | None = None
    encoders: list[EncoderStatus] = []

    def encoder_of(self, instance: str) -> str:
        """The encoder of this engine instance; "" if it has none or has not said it."""
        return next((one.encoder for one in self.encoders if one.instance == instance), "")


class WatchCache(msgspec.Struct, frozen=True):
    """Ask for the changes of this node's prefix cache and of its embeddings after event `after_seq`
    of `epoch`. The answer comes at once if there are any, otherwise after at most `timeout_s`.
    Epoch "" asks for everything.
    """

    epoch: str
    after_seq: int
    timeout_s: float


class CacheFeed(msgspec.Struct, frozen=True):
    """Blocks, and all that this node holds of each now. A later entry of a block replaces the
    earlier one. `embeddings` has the first 8 bytes of the key of each embedding that is here now;
    one that is not here any more is among `keys`, with flags 0.

    `keys` are the first 8 bytes of each block's key. `flags` are a little-endian u16 for each: bit
    3 * tier + kind, with tiers arena 0, ssd 1, engine 2 and the kinds of `PartKind` (WINDOW: all
    windows); 0: nothing any more. A feed with `is_snapshot` begins a list of everything that the
    node holds. With `more` another feed continues it, which must be asked for with this feed's
    epoch and seq. `age_s` is the age of the oldest of these changes.
    """

    epoch: str
    seq: int
    keys: bytes
    flags: bytes
    is_snapshot: bool = False
    more: bool = False
    age_s: float = 0.0
    embeddings: bytes = b""


class ListCache(msgspec.Struct, frozen=True):
    """The longest prefixes (leaves) in this node's cache, by "hits", "size" or "recent"."""

    limit: int = 50
    order: Literal["hits", "size", "recent"] = "recent"


class PrefixLeaf(msgspec.Struct, frozen=True):
    """One prefix that nothing longer continues. `key` is the key of its last block, in hex.
    `nbytes` by "tier/kind" count all its blocks, shared ones included. `branch_tokens` is the
    length at which it parts from others, 0 if it does not.
    """

    key: str
    num_tokens: int
    nbytes: dict[str, int]
    hits: int
    idle_s: float
    branch_tokens: int
    resumable_tokens: int
    pinned: bool


class ListCacheReply(msgspec.Struct, frozen=True):
    prefixes: list[PrefixLeaf]
    num_prefixes: int
