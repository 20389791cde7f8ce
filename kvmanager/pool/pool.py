"""The hybrid prefix pool of one agent: which parts are cached, used, and being written.

Many prompts share one arena. Each prompt is a chain of blocks, and each block has a few parts (KV,
windows, state: `kvmanager.pool.shape`). Besides its place on SSD, each part has one of four states
in the arena:

    absent -> filling -> written -> present -> absent
                 \\-> doomed (freed when its writer is done)

`reserve` makes parts filling: they have memory that nobody may read yet. `commit` says that the
bytes are complete. A part whose base is present then becomes present. A part whose base is still
being filled waits as written, and becomes present with the base. The base of a KV part is the KV of
the block before; the base of a window or state is the KV of its own block. In a shape without KV no
part has a base.

Rules.

1. Chains have no holes: a part is present, in any tier, only while its base is. So eviction goes
   from leaf to root, and with a block's KV its windows and state go.
2. A part that is pinned or being filled stays, and so does every base below it.
3. When the filling of a base fails, the parts that wait for it fail too. Written ones are freed.
   Parts that are still being filled are doomed: they keep their memory until their own commit or
   abort, because somebody may be writing there.
4. A use is one call of `pin` or `reserve`. It touches the KV of the whole prefix, and the windows
   and states that it names. All of these then have the same age, but eviction takes the end of the
   prompt before its beginning. A base is hardly older than a part that builds on it: a `reserve`
   that goes on behind a long prefix touches all of it only now and then (`_touch`).
5. `reserve` evicts as much as it needs, except blocks of the prefix that it extends. When room is
   short, it gives memory for the beginning of the request. So with `lru` and full attention alone
   the pool holds exactly the most recently used blocks.
6. A use is not a hit: only `pin` counts hits.

Nothing here waits, locks, or touches memory or files. It may not know engines, messages, how bytes
are copied, or what keys are made of. `kvmanager.pool.parts` has the records of parts.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Final

from kvmanager.pool import audit, listing, purge
from kvmanager.pool.eviction import EvictionPolicy, Lru
from kvmanager.pool.fills import Fills
from kvmanager.pool.nodes import Geometry, Node, Part, continuation, presence
from kvmanager.pool.parts import PartBooks
from kvmanager.pool.records import (
    BlockPart,
    Fill,
    Listener,
    Order,
    Pin,
    PoolChange,
    PoolStatus,
    PrefixMatch,
    Slot,
    Tier,
)
from kvmanager.pool.shape import CacheShape
from kvmanager.pool.spills import Spills
from kvmanager.transfers.blocks import BlockAllocator, Run

# A step runs on the agent's event loop, where other work may wait for milliseconds only.
MAX_EVICTED_PER_STEP: Final = 128
"""Most arena blocks that one step of making room frees."""


class HybridPool:
    """The pool of one arena, which several shapes may share. Single-threaded."""

    def __init__(
        self,
        allocator: BlockAllocator,
        block_bytes: int,
        *,
        policy: EvictionPolicy | None = None,
        listener: Listener | None = None,
        max_blocks: int | None = None,
        ssd_bytes: int = 0,
    ) -> None:
        """`max_blocks`: most arena blocks of the pool; None: all that others do not use."""
        self._books = PartBooks(
            allocator,
            block_bytes,
            policy=policy or Lru(),
            listener=listener,
            max_blocks=allocator.num_blocks if max_blocks is None else max_blocks,
            ssd_bytes=ssd_bytes,
        )
        self._ids = itertools.count(1)
        self._num_uses = 0
        self._pins: dict[int, tuple[tuple[BlockPart, Part], ...]] = {}
        self._fills = Fills(self._books)
        self.ssd = Spills(self._books, self._ids)
        """Its copies on SSD."""

    # ---- reading

    def match(self, shape: CacheShape, keys: Sequence[bytes]) -> PrefixMatch:
        """How much of the prompt with these block keys is cached. This counts as no use."""
        geometry = self._books.geometry(shape)
        present, in_arena = presence(self._books.nodes, geometry, keys)
        num_usable = geometry.num_usable_blocks(present)
        if present == in_arena:
            return PrefixMatch(num_usable, len(present), num_usable, len(present))
        if geometry.has_kv:
            in_arena = list(itertools.takewhile(lambda mask: mask & 1, in_arena))
        arena_usable = geometry.num_usable_blocks(in_arena)
        return PrefixMatch(num_usable, len(present), arena_usable, len(in_arena))

    def pin(
        self, shape: CacheShape, keys: Sequence[bytes], parts: Iterable[BlockPart], now_s: float
    ) -> Pin:
        """Keep `parts` in their present tiers. It counts as a hit on them and on their prefix.

        Raises KeyError and pins nothing if one of them is in no tier; ValueError for a part that
        the shape does not have.
        """
        wanted = _checked(shape, keys, parts)
        found = [(at, self._books.part(keys[at[0]], at[1])) for at in wanted]
        held = tuple((at, part) for at, part in found if part is not None and part.is_present)
        if len(held) < len(wanted):
            raise KeyError(f"{len(wanted) - len(held)} of {len(wanted)} parts are not here")
        self._num_uses += 1
        num_blocks = max((index for index, _ in wanted), default=-1) + 1
        # Before the parts below get the number of this use: a base is never older than its part
        # (rule 4).
        self._hit(keys[:num_blocks], now_s)
        for _, part in held:
            part.last_used = self._num_uses
            part.num_hits += not part.is_kv
            self._books.pin(part)
            self._books.wants_spill(part)
        pin_id = next(self._ids)
        self._pins[pin_id] = held
        return self.pinned(pin_id)

    def pinned(self, pin_id: int) -> Pin:
        """The pin with its present slots. Raises KeyError for an unknown pin."""
        held = self._pins[pin_id]
        slots = tuple(Slot(*at, part.runs) for at, part in held if part.runs)
        return Pin(pin_id, slots, tuple(at for at, part in held if not part.runs))

    def unpin(self, pin_id: int) -> None:
        """End the pin. A second call does nothing."""
        for _, part in self._pins.pop(pin_id, ()):
            self._books.unpin(part)
        self.drop_lost()

    def lookup(self, key: bytes, part: int) -> tuple[Run, ...] | None:
        """The part's arena blocks; None if it is not in the arena."""
        found = self._books.part(key, part)
        return found.runs or None if found is not None else None

    def is_present(self, key: bytes, part: int) -> bool:
        """Whether the part is in any tier."""
        found = self._books.part(key, part)
        return found is not None and found.is_present

    def is_filling(self, key: bytes, part: int) -> bool:
        """Whether the part is being written into the arena, or waits as written for its base."""
        found = self._books.part(key, part)
        return found is not None and found.filling is not None

    def num_hits(self, key: bytes, part: int) -> int:
        """The number of pins that have hit the part; 0 for an unknown part."""
        found = self._books.part(key, part)
        return found.num_hits if found is not None else 0

    # ---- writing

    def reserve(
        self,
        shape: CacheShape,
        parent: bytes,
        first_block: int,
        keys: Sequence[bytes],
        parts: Iterable[BlockPart],
        now_s: float,
    ) -> Fill:
        """Give arena memory for those `parts` that are neither in the arena nor being filled.

        `keys` follow each other in one prompt. The first is block `first_block`, and `parent` is
        the key before it (the root key for block 0). Parts without a base are left out, and parts
        for which eviction makes no room. Parts on SSD can be asked for like others. A fill with
        slots lives until `abort`. Raises ValueError for a part that the shape does not have.
        """
        geometry = self._books.geometry(shape)
        wanted = _checked(shape, keys, parts)
        self._num_uses += 1
        nodes = continuation(self._books.nodes, geometry, parent, first_block, keys)
        # Before evicting: what this use touches has the guarded number and stays (rule 5).
        self._touch(nodes, parent, now_s)
        plan = self._fitting(geometry, self._missing(geometry, nodes, wanted))
        if not plan:
            return Fill(next(self._ids), ())
        runs = self._books.allocate([geometry.num_blocks[number] for _, number in plan])
        parts_to_fill: dict[BlockPart, Part] = {}
        for index, number in plan:
            before = keys[index - 1] if index else parent
            node = self._books.node(geometry, keys[index], before, first_block + index)
            node.touch(self._num_uses, now_s)
            part = node.parts[number] or self._books.add(node, number, self._num_uses)
            parts_to_fill[index, number] = part
        fill_id = next(self._ids)
        self._fills.start(fill_id, parts_to_fill, runs)
        slots = (Slot(*at, piece) for at, piece in zip(plan, runs, strict=True))
        return Fill(fill_id, tuple(slots))

    def commit(self, fill_id: int, index: int, part: int, now_s: float) -> bool:
        """Say that the part's bytes are complete and not written any more.

        True: it is present, or will be when its base is. False: the filling of its base has failed,
        and its memory is free again. Raises KeyError for a part without an open slot in this fill.
        """
        return self._fills.commit(fill_id, (index, part), now_s)

    def abort(self, fill_id: int) -> None:
        """End the fill. Parts that are not committed are freed, so nobody may write them any more.

        Committed parts stay. A second call does nothing.
        """
        self._fills.abort(fill_id)
        self.drop_lost()

    # ---- letting go

    def keep_arena(self) -> None:
        """Evict nothing from the arena any more, since a process that the pool does not know may be
        reading it. Free memory can still be filled.
        """
        self._books.keeps_arena = True

    def release_arena(self) -> None:
        """End `keep_arena`."""
        self._books.keeps_arena = False
        self._books.to_purge += self._books.purge_later
        self._books.purge_later.clear()

    def discard(self, key: bytes, part: int, tier: Tier) -> bool:
        """Drop the copy if nobody uses it and nothing builds on it. Returns whether it was dropped.

        With the last copy of a block's KV its windows and state go.
        """
        found = self._books.part(key, part)
        if found is None or not self._books.may_leave(found, tier):
            return False
        self._books.leave(found, tier)
        return True

    @property
    def num_evictable_blocks(self) -> int:
        """Most arena blocks that `make_room` could free."""
        if self._books.keeps_arena:
            return 0
        return self._books.num_blocks - self._books.pinned_blocks - self._fills.num_blocks

    def make_room(self, num_blocks: int) -> bool:
        """Evict until the allocator has `num_blocks` free. False: that is impossible.

        If that is clear from the start, nothing is evicted.
        """
        books = self._books
        if books.allocator.num_free + self.num_evictable_blocks < num_blocks:
            return False
        return books.evict_until(lambda: books.allocator.num_free >= num_blocks)

    def evict_for(self, num_blocks: int) -> bool:
        """Do one step of `make_room`, of a few milliseconds. Returns whether another may help."""
        books = self._books
        enough = min(num_blocks, books.allocator.num_free + MAX_EVICTED_PER_STEP)
        return self.make_room(enough) and enough < num_blocks

    def drop_lost(self) -> None:
        """Drop lost parts for a few milliseconds. `has_lost` says whether more are left."""
        purge.drop_condemned(self._books)

    @property
    def has_lost(self) -> bool:
        """Whether `drop_lost` has anything to do."""
        return bool(self._books.to_purge)

    # ---- starting and telling

    def restore(self, change: PoolChange, now_s: float) -> bool:
        """Enter a part of a former pool. It counts as used before all others.

        Bases must come first, and SSD before the arena. The blocks are taken from the allocator.
        The listener is called. False: the part does not fit (no base, no room, other blocks).
        """
        books = self._books
        geometry = books.geometry(change.shape)
        nodes = continuation(books.nodes, geometry, change.parent, change.index, [change.key])
        if not nodes or not change.stored or not 0 <= change.part < len(geometry.num_blocks):
            return False
        existing = books.part(change.key, change.part)
        if existing is not None and (existing.filling is not None or existing.is_in(change.tier)):
            return False
        if not self._restores_on_base(geometry, change) or not books.claim(geometry, change):
            return False
        node = books.node(geometry, change.key, change.parent, change.index)
        node.last_used_s = now_s
        books.arrive(existing or books.add(node, change.part, use=0), change.tier, change.runs)
        return True

    def changes(self) -> list[PoolChange]:
        """All present copies as if just stored, in an order that `restore` accepts."""
        return listing.changes(self._books.nodes.values())

    def status(self) -> PoolStatus:
        """Sizes and counts now."""
        books = self._books
        return PoolStatus(
            nbytes=dict(books.nbytes),
            evictions=dict(books.evictions),
            num_blocks=books.num_present,
            num_arena_blocks=books.num_blocks,
            pinned_bytes=books.pinned_bytes,
        )

    def prefixes(self, order: Order, limit: int, now_s: float) -> listing.Listing:
        """The first `limit` prefixes, most hit, longest or most recently used first, and how many
        there are in all.

        Goes through all blocks, and so in steps (`listing.prefixes`).
        """
        return listing.prefixes(self._books.nodes, order, limit, now_s)

    def check_invariants(self) -> None:
        """Raise AssertionError when the records are inconsistent; for tests."""
        audit.check_parts(self._books)
        audit.check_uses(self._books, self._pins, self._fills)

    # ---- within

    def _touch(self, nodes: Sequence[Node | None], parent: bytes, now_s: float) -> None:
        for node in nodes:
            if node is not None:
                node.touch(self._num_uses, now_s)
        before = self._books.nodes.get(parent) if nodes else None
        if before is None:
            return
        # `reserve` is called for each block of an answer, and the prefix may have thousands. So it
        # may lag behind (rule 4), by less than what the pool forgets in that time.
        before.touch(self._num_uses, now_s)
        if before.prefix_used >= self._num_uses - self._books.num_present // 64:
            return
        each: Node | None = before
        while each is not None:
            each.touch(self._num_uses, now_s)
            each.prefix_used = self._num_uses
            each = each.up

    def _hit(self, keys: Sequence[bytes], now_s: float) -> None:
        for key in keys:
            node = self._books.nodes.get(key)
            if node is not None:
                node.touch(self._num_uses, now_s)
                if node.kv is not None:
                    node.kv.num_hits += 1
                    self._books.wants_spill(node.kv)

    def _missing(
        self, geometry: Geometry, nodes: Sequence[Node | None], wanted: Sequence[BlockPart]
    ) -> list[BlockPart]:
        """The parts of `wanted` that memory can be given for, bases first."""
        # A part whose base is neither here nor asked for would leave a hole in its chain (rule 1).
        missing: dict[BlockPart, None] = {}
        for index, number in wanted:
            if index >= len(nodes):
                break
            node = nodes[index]
            part = node.parts[number] if node is not None else None
            if part is not None:
                part.last_used = self._num_uses
                if part.runs or part.filling is not None:
                    continue
            base = index - (number == 0)
            has_base = part is not None or not geometry.has_kv or base < 0
            has_base = has_base or nodes[base] is not None or (base, 0) in missing
            if has_base and geometry.num_blocks[number] <= self._books.max_blocks:
                missing[index, number] = None
        return list(missing)

    def _fitting(self, geometry: Geometry, plan: list[BlockPart]) -> list[BlockPart]:
        """The beginning of the plan that has room, after evicting what may go for it."""
        books = self._books
        ends = list(itertools.accumulate(geometry.num_blocks[number] for _, number in plan))
        if ends:
            books.evict_until(lambda: books.room() >= ends[-1], self._num_uses)
        return plan[: bisect_right(ends, books.room())]

    def _restores_on_base(self, geometry: Geometry, change: PoolChange) -> bool:
        if not geometry.has_kv or (change.part == 0 and change.index == 0):
            return True
        base = self._books.part(change.parent if change.part == 0 else change.key, 0)
        if base is None:
            return False
        return base.on_ssd if change.tier is Tier.SSD else base.is_present


def _checked(
    shape: CacheShape, keys: Sequence[bytes], parts: Iterable[BlockPart]
) -> list[BlockPart]:
    """The parts in order, each once. Raises ValueError for an impossible one."""
    wanted = sorted(set(parts))
    for index, part in wanted:
        if not (0 <= index < len(keys) and 0 <= part < len(shape.parts)):
            raise ValueError(
                f"part {part} of block {index}: there are {len(keys)} blocks "
                f"of {len(shape.parts)} parts"
            )
    return wanted
