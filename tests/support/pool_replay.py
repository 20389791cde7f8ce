"""What a prefix cache of a given size would have found of a request trace, and what it held for it.

Drives a real `HybridPool` and `StatePlacement`; only the engine is modelled, and only by the places
where its steps end. Knows no files, clocks or machines: requests are values, arena memory is
numbers, time is the requests' arrival times.

Requests are served one after the other, each over before the next arrives: nothing is pinned but by
the request at hand. A trace names the blocks of prompts, not those of answers, so a request's end
is its prompt's end, and a next turn resumes there and not after the answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from kvmanager.hashing import KEY_BYTES
from kvmanager.pool.placement import StatePlacement
from kvmanager.pool.pool import HybridPool
from kvmanager.pool.records import PoolChange, PrefixMatch
from kvmanager.pool.shape import CacheShape, PartKind
from kvmanager.transfers.blocks import BlockAllocator

_ROOT: Final = b"\xff" * KEY_BYTES
"""No block's: the id of a block has at most 8 bytes."""

_Needs = list[tuple[int, int]]


class ReplayRequest(Protocol):
    """One request of a trace. Equal block ids mean equal prefixes up to and including the block."""

    @property
    def arrival_s(self) -> float: ...
    @property
    def input_tokens(self) -> int: ...
    @property
    def block_ids(self) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True)
class ReplayConfig:
    """The cache that is replayed against.

    `arena_block_bytes`: parts take whole arena blocks. `chunk_tokens`: an engine computes so many
    tokens in a step, counted from where it resumes, and has its windows and states where a step
    ends; it also ends steps at the prompt's last full block and where prompts part. None: it can
    end a step at every block.
    """

    shape: CacheShape
    arena_block_bytes: int
    num_arena_blocks: int
    placement: StatePlacement = field(default_factory=StatePlacement)
    chunk_tokens: int | None = None

    def __post_init__(self) -> None:
        chunk = self.chunk_tokens
        if chunk is not None and (chunk < 1 or chunk % self.shape.block_tokens):
            raise ValueError(
                f"steps of {chunk} tokens are no whole blocks of {self.shape.block_tokens} tokens"
            )


@dataclass(slots=True)
class ReplayResult:
    """Sums over the requests of one replay; bytes are those of parts, without rounding.

    `request_hit_tokens` has, request by request, the tokens that need not be computed.
    `kv_hit_blocks` counts the leading blocks whose KV was there, resumable or not.
    """

    num_blocks: int = 0
    hit_blocks: int = 0
    kv_hit_blocks: int = 0
    request_hit_tokens: list[int] = field(default_factory=list)
    held_bytes: dict[PartKind, int] = field(default_factory=lambda: dict.fromkeys(PartKind, 0))
    """At the end."""
    stored_bytes: dict[PartKind, int] = field(default_factory=lambda: dict.fromkeys(PartKind, 0))
    """Ever written."""
    evictions: dict[PartKind, int] = field(default_factory=lambda: dict.fromkeys(PartKind, 0))
    """Parts."""

    @property
    def hit_tokens(self) -> int:
        return sum(self.request_hit_tokens)


def replay(requests: Iterable[ReplayRequest], config: ReplayConfig) -> ReplayResult:
    """Serve the requests in order from an empty cache.

    Every block id counts as a block, also that of a last block which is not full; leave those out
    where they are not to be cached.
    """
    return _Replay(config).run(requests)


class _Replay:
    def __init__(self, config: ReplayConfig) -> None:
        self._config = config
        self._shape = config.shape
        self._result = ReplayResult()
        self._pool = HybridPool(
            BlockAllocator(config.num_arena_blocks),
            config.arena_block_bytes,
            listener=self._on_change,
        )

    def run(self, requests: Iterable[ReplayRequest]) -> ReplayResult:
        for request in requests:
            self._serve(request)
        return self._result

    def _on_change(self, change: PoolChange) -> None:
        part = change.shape.parts[change.part]
        result = self._result
        if change.stored:
            result.held_bytes[part.kind] += part.nbytes
            result.stored_bytes[part.kind] += part.nbytes
        else:
            result.held_bytes[part.kind] -= part.nbytes
            result.evictions[part.kind] += 1

    def _serve(self, request: ReplayRequest) -> None:
        keys = [block.to_bytes(KEY_BYTES, "little") for block in request.block_ids]
        match = self._pool.match(self._shape, keys[: self._num_resumable(request)])
        self._count(request, match)
        needs = list(self._shape.resume_parts(match.num_blocks))
        pin = self._pool.pin(self._shape, keys, needs, request.arrival_s) if needs else None
        self._store(keys, self._wanted(match, len(keys)), request.arrival_s)
        if pin is not None:
            self._pool.unpin(pin.pin_id)

    def _num_resumable(self, request: ReplayRequest) -> int:
        """The last token is always computed: without windows and states it may be a block's last,
        with them the block that ends with it cannot be resumed after."""
        if len(self._shape.parts) == 1 and self._shape.has_kv:
            return len(request.block_ids)
        return min(len(request.block_ids), (request.input_tokens - 1) // self._shape.block_tokens)

    def _count(self, request: ReplayRequest, match: PrefixMatch) -> None:
        result = self._result
        hit_tokens = min(match.num_blocks * self._shape.block_tokens, request.input_tokens - 1)
        result.request_hit_tokens.append(max(0, hit_tokens))
        result.num_blocks += len(request.block_ids)
        result.hit_blocks += match.num_blocks
        result.kv_hit_blocks += match.kv_blocks

    def _wanted(self, match: PrefixMatch, num_blocks: int) -> _Needs:
        """The parts to store: all KV, and what the placement keeps of what the engine has."""
        shape, placement = self._shape, self._config.placement
        wanted: _Needs = []
        if shape.has_kv:
            wanted += [(index, 0) for index in range(match.kv_blocks, num_blocks)]
        parts_ways = shape.has_kv and match.num_blocks < match.kv_blocks < num_blocks
        fork = match.kv_blocks if parts_ways else None
        fork_tokens = None if fork is None else fork * shape.block_tokens
        kept = [
            end
            for end in self._step_ends(match.num_blocks, num_blocks, fork)
            if placement.wants(
                end * shape.block_tokens, is_end=end == num_blocks, branch_tokens=fork_tokens
            )
        ]
        others = {
            need for end in kept for need in shape.resume_parts(end) if not self._is_kv(need[1])
        }
        return wanted + sorted(others)

    def _step_ends(self, resumed: int, num_blocks: int, fork: int | None) -> list[int]:
        """The block boundaries, in blocks, at which the engine has windows and states."""
        chunk_tokens = self._config.chunk_tokens or self._shape.block_tokens
        chunk = chunk_tokens // self._shape.block_tokens
        ends = set(range(resumed + chunk, num_blocks, chunk))
        if resumed < num_blocks:
            ends.add(num_blocks)
        if fork is not None:
            ends.add(fork)
        return sorted(ends)

    def _is_kv(self, part: int) -> bool:
        return self._shape.parts[part].kind is PartKind.KV

    def _store(self, keys: Sequence[bytes], wanted: _Needs, now_s: float) -> None:
        if not wanted:
            return
        fill = self._pool.reserve(self._shape, _ROOT, 0, keys, wanted, now_s)
        for slot in fill.slots:
            self._pool.commit(fill.fill_id, slot.index, slot.part, now_s)
        self._pool.abort(fill.fill_id)
