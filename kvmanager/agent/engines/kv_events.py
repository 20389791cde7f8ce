"""The KV cache events of vLLM (0.32, `vllm.distributed.kv_events`) as they come over its socket.

Pure: it decodes bytes into structs and finds lost messages by their sequence numbers. It does not
know what events mean for a cache.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Final

import msgspec

EngineHash = bytes | int
"""An integer when the engine runs with VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES."""


class BlockStored(msgspec.Struct, frozen=True, tag="BlockStored"):
    """Blocks of one group that prompts can hit from now on. The fields are vLLM's."""

    block_hashes: list[EngineHash]
    parent_block_hash: EngineHash | None
    token_ids: list[int]
    block_size: int
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the event names every block of its token range."""
        return len(self.block_hashes) * self.block_size == len(self.token_ids) > 0

    @property
    def is_on_gpu(self) -> bool:
        """Whether the event is about the engine's own GPU memory and not about a slower tier."""
        return self.medium in (None, "GPU") and self.locality in (None, "LOCAL")


class BlockRemoved(msgspec.Struct, frozen=True, tag="BlockRemoved"):
    """Blocks that prompts cannot hit any more. The fields are vLLM's."""

    block_hashes: list[EngineHash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None

    @property
    def is_on_gpu(self) -> bool:
        """As of `BlockStored`."""
        return self.medium in (None, "GPU") and self.locality in (None, "LOCAL")


class AllBlocksCleared(msgspec.Struct, frozen=True, tag="AllBlocksCleared"):
    """The engine's prefix cache is empty."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, frozen=True, array_like=True):
    """The content of one message of the engine's publisher."""

    ts: float
    events: list[KVEvent]
    data_parallel_rank: int | None = None


_DECODER: Final = msgspec.msgpack.Decoder(EventBatch)


def decode_batch(payload: bytes) -> EventBatch:
    """Decode a message. Raises msgspec.DecodeError or msgspec.ValidationError."""
    return _DECODER.decode(payload)


class MessageOrder(Enum):
    """How a message follows those before it."""

    NEXT = "next"
    KNOWN = "known"
    LOST = "lost"  # messages before it are missing
    RESTARTED = "restarted"  # the numbers began again, so the engine is a new one


class EventSequence:
    """Checks the sequence numbers of one publisher: live messages, and replayed ones in between."""

    def __init__(self) -> None:
        self.expected = 0
        self._last_live = -1

    def live(self, number: int) -> MessageOrder:
        """The order of a message of the live stream. Does not count it as applied."""
        before, self._last_live = self._last_live, number
        if number <= before:
            return MessageOrder.RESTARTED
        if number < self.expected:
            return MessageOrder.KNOWN
        return MessageOrder.NEXT if number == self.expected else MessageOrder.LOST

    def applied(self, number: int) -> None:
        """Note that everything up to this message was applied."""
        self.expected = number + 1
