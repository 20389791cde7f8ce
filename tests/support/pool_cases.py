"""A prefix pool in an arena of its own, for the tests of the pool."""

from collections.abc import Sequence

from kvmanager.pool.eviction import eviction_policy
from kvmanager.pool.listing import Listing
from kvmanager.pool.pool import HybridPool
from kvmanager.pool.records import (
    BlockPart,
    Fill,
    ListedPrefix,
    Order,
    Pin,
    PoolChange,
    PrefixMatch,
    Tier,
)
from kvmanager.pool.shape import CacheShape, PartKind, PartShape
from kvmanager.transfers.blocks import BlockAllocator

ROOT = b"r" * 16
KV = PartShape(PartKind.KV, 1)
STATE = PartShape(PartKind.STATE, 3)
FULL = CacheShape(4, (KV,))
HYBRID = CacheShape(4, (KV, STATE))


def keys_of(path: str) -> list[bytes]:
    """One key for each letter, which names the path up to it."""
    return [path[: end + 1].encode().rjust(16, b".") for end in range(len(path))]


def listed(listing: Listing) -> tuple[list[ListedPrefix], int]:
    """What a listing comes to."""
    while True:
        try:
            next(listing)
        except StopIteration as done:
            prefixes, num_prefixes = done.value
            return prefixes, num_prefixes


class Harness:
    """A pool in an arena of one-byte blocks, with a clock and an ear."""

    def __init__(
        self,
        num_blocks: int,
        policy: str = "lru",
        *,
        shape: CacheShape = FULL,
        ssd_bytes: int = 0,
        max_blocks: int | None = None,
    ) -> None:
        self.allocator = BlockAllocator(num_blocks)
        self.changes: list[PoolChange] = []
        self.shape = shape
        self.now_s = 0.0
        self.pool = HybridPool(
            self.allocator,
            1,
            policy=eviction_policy(policy),
            listener=self.changes.append,
            ssd_bytes=ssd_bytes,
            max_blocks=max_blocks,
        )

    def reserve(self, path: str, parts: Sequence[BlockPart], first_block: int = 0) -> Fill:
        self.now_s += 1
        keys = [ROOT, *keys_of(path)][first_block:]
        return self.pool.reserve(self.shape, keys[0], first_block, keys[1:], parts, self.now_s)

    def commit(self, fill: Fill, *parts: BlockPart) -> list[bool]:
        return [self.pool.commit(fill.fill_id, index, part, self.now_s) for index, part in parts]

    def store(self, path: str, *others: BlockPart) -> int:
        """KV of all blocks and `others`; how many parts got memory."""
        fill = self.reserve(path, [*((i, 0) for i in range(len(path))), *others])
        self.commit(fill, *((slot.index, slot.part) for slot in fill.slots))
        self.pool.abort(fill.fill_id)
        self.pool.check_invariants()
        return len(fill.slots)

    def pin(self, path: str, *parts: BlockPart) -> Pin:
        self.now_s += 1
        return self.pool.pin(self.shape, keys_of(path), parts, self.now_s)

    def hit(self, path: str) -> None:
        self.pool.unpin(self.pin(path, (len(path) - 1, 0)).pin_id)

    def match(self, path: str) -> PrefixMatch:
        return self.pool.match(self.shape, keys_of(path))

    def held(self, *paths: str) -> list[int]:
        return [self.match(path).kv_blocks for path in paths]

    def prefixes(self, order: Order, limit: int) -> tuple[list[ListedPrefix], int]:
        return listed(self.pool.prefixes(order, limit, self.now_s))

    def leave_arena(self, path: str) -> None:
        """The last block's KV leaves the arena."""
        assert self.pool.discard(last_key(path), 0, Tier.ARENA)
        self.pool.check_invariants()

    def lose(self, path: str) -> None:
        """The last block's KV cannot be read from SSD."""
        self.pool.ssd.lost([(last_key(path), 0)])
        self.pool.check_invariants()

    def spill(self) -> list[bytes]:
        """Copy everything worth it; the keys of what is kept."""
        return [
            spill.change.key for spill in self.pool.ssd.choose(100) if self.pool.ssd.stored(spill)
        ]


def last_key(path: str) -> bytes:
    return keys_of(path)[-1]
