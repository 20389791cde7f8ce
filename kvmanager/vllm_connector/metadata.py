"""The scheduler side's orders to the worker side for one engine step. Plain, picklable values."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from kvmanager.agent.engines.protocol import Landed, OutboxOpened

Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class TransferRef:
    """One transfer, and the place of its bytes in the arena of that epoch.

    attempt: the opening of a producer's outbox; 0 for a landing.
    cached_tokens: the transfer leaves out the full-attention pages of this many leading tokens.
    window_step: windows begin at multiples of it, as the receiver needs them.
    draft: the drafter whose layers are at the end of the transfer, in hex; "" for none.
    """

    transfer_id: bytes
    num_tokens: int
    arena_epoch: str
    runs: Runs
    attempt: int = 0
    cached_tokens: int = 0
    window_step: int = 0
    draft: str = ""

    @classmethod
    def of(cls, said: OutboxOpened | Landed, arena_epoch: str) -> "TransferRef":
        """The transfer that the agent with this arena has described."""
        return cls(
            said.transfer_id,
            said.num_tokens,
            arena_epoch,
            tuple(said.runs),
            said.attempt if isinstance(said, OutboxOpened) else 0,
            said.cached_tokens,
            said.window_step,
            said.draft.hex(),
        )

    @property
    def opening(self) -> tuple[bytes, int]:
        """Which outbox, and which opening of it."""
        return self.transfer_id, self.attempt


@dataclass(frozen=True, slots=True)
class PartPages:
    """One part of one cached block: its place in the arena, and the engine's pages of it.

    index: the block's name in messages to the agent.
    blocks: for each group of the part, the block ids of the last `len(blocks[g])` pages that the
        group has in the block; the pages before them are not copied.
    """

    index: int
    part: int
    runs: Runs
    blocks: tuple[list[int], ...]


@dataclass(frozen=True, slots=True)
class CachedParts:
    """Parts of the agent's prefix cache that are to be read or filled.

    asked_s: the agent gave them to this engine at or after this time (CLOCK_MONOTONIC, which all
        processes of a host share). A worker with a younger connection must not touch them, because
        the agent may have taken them back when the older connection broke.
    """

    arena_epoch: str
    asked_s: float
    parts: tuple[PartPages, ...]


@dataclass(frozen=True, slots=True)
class StoreStep:
    """Parts to copy into the prefix cache once the step's forward pass is over.

    is_last: nothing more will be written under this handle.
    """

    handle: int
    cached: CachedParts
    is_last: bool


@dataclass(frozen=True, slots=True)
class SendStep:
    """A producer request that this step computes.

    blocks: for each group, the engine's block ids of the first of the transfer's pages
        (`KVGroup.pages`) that exist already; for a recurrent group the block that holds the state
        after the step.
    computed_tokens: tokens whose KVCache exists once the step's forward pass is over.
    """

    ref: TransferRef
    blocks: tuple[list[int], ...]
    computed_tokens: int

    @property
    def is_last(self) -> bool:
        return self.computed_tokens >= self.ref.num_tokens


@dataclass(frozen=True, slots=True)
class LoadStep:
    """A request whose KVCache must be copied into the engine's pages from a landing, from the
    prefix cache, or from both. Without either, its source was lost and the load counts as failed.

    blocks: for each group, the block ids of the last `len(blocks[g])` of the transfer's pages
        (`KVGroup.pages`); the pages before them are in the engine's own prefix cache.
    """

    request_id: str
    ref: TransferRef | None = None
    blocks: tuple[list[int], ...] = ()
    cached: CachedParts | None = None


@dataclass(frozen=True, slots=True)
class FirstStep:
    """The step is the first one of a request whose landing was to be loaded.

    arrived_s: when the request came to the scheduler (CLOCK_MONOTONIC, which all processes of a
        host share).
    """

    request_id: str
    transfer_id: bytes
    arena_epoch: str
    arrived_s: float


@dataclass(frozen=True, slots=True)
class EndedSend:
    """A producer request that is over. `failure`: why its outbox stays incomplete, else ''."""

    transfer_id: bytes
    attempt: int
    failure: str = ""

    @property
    def opening(self) -> tuple[bytes, int]:
        """Which outbox, and which opening of it."""
        return self.transfer_id, self.attempt


@dataclass(slots=True)
class PrfaasMetadata(KVConnectorMetadata):
    """One step: what to send, load and store, which outboxes are over, and who begins.

    kept_s: for each request that is being loaded, the latest time at which the agent was known to
        keep its source for this engine (CLOCK_MONOTONIC, which all processes of a host share);
        -inf: it must not be used.
    is_idle: the step computes nothing.
    """

    sends: list[SendStep] = field(default_factory=list)
    loads: list[LoadStep] = field(default_factory=list)
    ended: list[EndedSend] = field(default_factory=list)
    stores: list[StoreStep] = field(default_factory=list)
    first_steps: list[FirstStep] = field(default_factory=list)
    kept_s: dict[str, float] = field(default_factory=dict)
    is_idle: bool = False
