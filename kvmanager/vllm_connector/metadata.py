"""What the scheduler side tells the worker side for one engine step. Plain, picklable values."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class TransferRef:
    """One transfer and where its bytes lie in the arena of that epoch.

    attempt: which opening of a producer's outbox; 0 for a landing.
    """

    transfer_id: bytes
    num_tokens: int
    arena_epoch: str
    runs: Runs
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class SendStep:
    """A producer request that this step computes.

    blocks: for each group, the engine's block ids of the first pages of `group.pages(num_tokens)`
        that exist already; for a recurrent group the block that holds the state after the step.
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
    """A consumer request whose landing is to be copied into the engine's pages.

    blocks: for each group, the block ids of the last `len(blocks[g])` pages of
        `group.pages(num_tokens)`; the pages before them are in the engine's own prefix cache.
    """

    request_id: str
    ref: TransferRef
    blocks: tuple[list[int], ...]


@dataclass(frozen=True, slots=True)
class EndedSend:
    """A producer request that is over. `failure`: why its outbox stays incomplete, else ''."""

    transfer_id: bytes
    failure: str = ""


@dataclass(slots=True)
class PrfaasMetadata(KVConnectorMetadata):
    """One step: what to send, what to load, which outboxes are over."""

    sends: list[SendStep] = field(default_factory=list)
    loads: list[LoadStep] = field(default_factory=list)
    ended: list[EndedSend] = field(default_factory=list)
