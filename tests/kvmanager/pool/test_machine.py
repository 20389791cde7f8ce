"""The prefix pool under random use, against a model that only listens.

The model knows what the listener told, what the test itself pinned and fills, and the rules; from
these alone it says what every match must find and which changes must never come.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pool_cases import listed

from kvmanager.hashing import block_keys, root_key
from kvmanager.pool.eviction import POLICIES, eviction_policy
from kvmanager.pool.pool import HybridPool
from kvmanager.pool.records import Fill, Pin, PoolChange, Spill, Tier
from kvmanager.pool.shape import CacheShape, PartKind, PartShape
from kvmanager.transfers.blocks import BlockAllocator, OutOfBlocks, Run

BLOCK_BYTES = 10
NUM_BLOCKS = 24
MAX_DEPTH = 5
KV = PartShape(PartKind.KV, 10)
WIDE_KV = PartShape(PartKind.KV, 15)
SHORT = PartShape(PartKind.WINDOW, 8, window_tokens=3)
LONG = PartShape(PartKind.WINDOW, 11, window_tokens=9)
STATE = PartShape(PartKind.STATE, 25)
SHAPES = {
    "full": CacheShape(4, (KV,)),
    "full+short": CacheShape(4, (WIDE_KV, SHORT)),
    "full+long": CacheShape(4, (KV, LONG)),
    "full+state": CacheShape(4, (KV, STATE)),
    "all": CacheShape(4, (KV, SHORT, LONG, STATE)),
    "state": CacheShape(4, (STATE,)),
}
KeyPart = tuple[bytes, int]


class Model:
    """What is where, by what the pool said; every change is held to the rules."""

    def __init__(self) -> None:
        self.tiers: dict[Tier, dict[KeyPart, PoolChange]] = {tier: {} for tier in Tier}
        self.pinned: dict[int, list[KeyPart]] = {}

    def hear(self, change: PoolChange) -> None:
        at = (change.key, change.part)
        held = self.tiers[change.tier]
        if change.stored:
            assert at not in held
            base = self.base(change)
            assert base is None or self.has(base), "stored without its base"
            held[at] = change
            return
        told = held.pop(at)
        assert (told.runs, told.index, told.parent) == (change.runs, change.index, change.parent)
        if self.has(at):
            assert change.tier is Tier.SSD or not self.is_pinned(at), "a pinned part moved"
        else:
            assert not self.is_pinned(at), "a pinned part was dropped"
            above = [each for each in self.changes() if self.base(each) == at]
            assert not above, "dropped below something"

    def base(self, change: PoolChange) -> KeyPart | None:
        if not change.shape.has_kv or (change.part == 0 and change.index == 0):
            return None
        return (change.parent if change.part == 0 else change.key, 0)

    def changes(self) -> list[PoolChange]:
        return [change for held in self.tiers.values() for change in held.values()]

    def has(self, at: KeyPart, tiers: Iterable[Tier] = tuple(Tier)) -> bool:
        return any(at in self.tiers[tier] for tier in tiers)

    def is_pinned(self, at: KeyPart) -> bool:
        return any(at in held for held in self.pinned.values())

    def usable(self, shape: CacheShape, keys: list[bytes], *tiers: Tier) -> tuple[int, int]:
        present = [
            [self.has((key, part), tiers) for part in range(len(shape.parts))] for key in keys
        ]
        return shape.num_usable_blocks(present), shape.num_kv_blocks(present)


class PoolMachine(RuleBasedStateMachine):
    """Prompts of a few tokens over an alphabet of two, so that they share and part."""

    @initialize(
        policy=st.sampled_from(sorted(POLICIES)),
        max_blocks=st.sampled_from([None, 9, 16]),
        ssd_bytes=st.sampled_from([0, 60, 400]),
    )
    def begin(self, policy: str, max_blocks: int | None, ssd_bytes: int) -> None:
        self.model = Model()
        self.allocator = BlockAllocator(NUM_BLOCKS)
        self.pool = HybridPool(
            self.allocator,
            BLOCK_BYTES,
            policy=eviction_policy(policy),
            listener=self.model.hear,
            max_blocks=max_blocks,
            ssd_bytes=ssd_bytes,
        )
        self.now_s = 0.0
        self.pins: dict[int, Pin] = {}
        self.fills: dict[int, tuple[Fill, list[bytes]]] = {}
        self.written: dict[int, set[tuple[int, int]]] = {}
        self.spilling: list[Spill] = []
        self.transfers: list[list[Run]] = []
        self.lost_in_vain = False

    prompts = st.tuples(
        st.sampled_from(sorted(SHAPES)), st.lists(st.integers(0, 1), min_size=1, max_size=MAX_DEPTH)
    )

    def keys(self, prompt: tuple[str, list[int]]) -> tuple[CacheShape, bytes, list[bytes]]:
        name, path = prompt
        root = root_key(name.encode())
        tokens = [token for token in path for _ in range(4)]
        return SHAPES[name], root, block_keys(tokens, 4, root)

    def draw_parts(
        self, data: st.DataObject, shape: CacheShape, num_blocks: int
    ) -> list[tuple[int, int]]:
        every = [(i, part) for i in range(num_blocks) for part in range(len(shape.parts))]
        return data.draw(st.one_of(st.just(every), st.lists(st.sampled_from(every))))

    @rule(prompt=prompts, data=st.data())
    def pin(self, prompt: tuple[str, list[int]], data: st.DataObject) -> None:
        shape, _, keys = self.keys(prompt)
        match = self.pool.match(shape, keys)
        resumable = list(shape.resume_parts(match.num_blocks))
        parts = data.draw(st.sampled_from([resumable, self.draw_parts(data, shape, len(keys))]))
        if not all(self.model.has((keys[index], part)) for index, part in parts):
            with pytest.raises(KeyError):
                self.pool.pin(shape, keys, parts, self.now_s)
            return
        pin = self.pool.pin(shape, keys, parts, self.now_s)
        assert {(slot.index, slot.part) for slot in pin.slots} | set(pin.absent) == set(parts)
        self.pins[pin.pin_id] = pin
        self.model.pinned[pin.pin_id] = [(keys[index], part) for index, part in parts]

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        pin_id = data.draw(st.sampled_from(sorted(self.pins)))
        del self.pins[pin_id], self.model.pinned[pin_id]
        self.pool.unpin(pin_id)
        self.pool.unpin(pin_id)

    @rule(served=st.lists(prompts, min_size=1, max_size=4))
    def serve(self, served: list[tuple[str, list[int]]]) -> None:
        """What an agent does for a request, all at once."""
        for prompt in served:
            self.now_s += 1.0
            shape, root, keys = self.keys(prompt)
            match = self.pool.match(shape, keys)
            hit = self.pool.pin(shape, keys, shape.resume_parts(match.num_blocks), self.now_s)
            every = [(i, part) for i in range(len(keys)) for part in range(len(shape.parts))]
            fill = self.pool.reserve(shape, root, 0, keys, every, self.now_s)
            for slot in fill.slots:
                self.pool.commit(fill.fill_id, slot.index, slot.part, self.now_s)
            self.pool.abort(fill.fill_id)
            self.pool.unpin(hit.pin_id)

    @rule(prompt=prompts, data=st.data())
    def reserve(self, prompt: tuple[str, list[int]], data: st.DataObject) -> None:
        shape, root, keys = self.keys(prompt)
        first = data.draw(st.integers(0, len(keys) - 1))
        parts = self.draw_parts(data, shape, len(keys) - first)
        parent = keys[first - 1] if first else root
        fill = self.pool.reserve(shape, parent, first, keys[first:], parts, self.now_s)
        given = {(slot.index, slot.part) for slot in fill.slots}
        assert given <= set(parts)
        for slot in fill.slots:
            nbytes = BLOCK_BYTES * sum(run.length for run in slot.runs)
            assert nbytes - BLOCK_BYTES < shape.parts[slot.part].nbytes <= nbytes
            assert not self.model.has((keys[first + slot.index], slot.part), [Tier.ARENA])
        if given:
            self.fills[fill.fill_id] = (fill, keys[first:])
            self.written[fill.fill_id] = set()

    @precondition(lambda self: self.fills)
    @rule(data=st.data(), everything=st.booleans())
    def commit(self, data: st.DataObject, everything: bool) -> None:
        fill_id = data.draw(st.sampled_from(sorted(self.fills)))
        fill, _ = self.fills[fill_id]
        open_slots = [(s.index, s.part) for s in fill.slots]
        open_slots = [at for at in open_slots if at not in self.written[fill_id]]
        if not open_slots:
            return
        order = data.draw(st.permutations(open_slots))
        for index, part in order if everything else order[:1]:
            before = len(self.model.changes())
            kept = self.pool.commit(fill_id, index, part, self.now_s)
            assert kept or len(self.model.changes()) == before
            self.written[fill_id].add((index, part))
            with pytest.raises(KeyError):
                self.pool.commit(fill_id, index, part, self.now_s)

    @precondition(lambda self: self.fills)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        fill_id = data.draw(st.sampled_from(sorted(self.fills)))
        del self.fills[fill_id]
        before = self.model.changes()
        self.pool.abort(fill_id)
        assert self.lost_in_vain or self.model.changes() == before
        self.pool.abort(fill_id)

    @precondition(lambda self: len(self.transfers) < 3)
    @rule(num_blocks=st.integers(1, NUM_BLOCKS // 2))
    def make_room(self, num_blocks: int) -> None:
        if self.pool.make_room(num_blocks):
            self.transfers.append(self.allocator.allocate(num_blocks))
        else:
            assert self.allocator.num_free < num_blocks
            with pytest.raises(OutOfBlocks):
                self.allocator.allocate(num_blocks)

    @precondition(lambda self: self.transfers)
    @rule(data=st.data())
    def end_transfer(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.transfers) - 1))
        self.allocator.free(self.transfers.pop(index))

    @rule(data=st.data(), tier=st.sampled_from(Tier))
    def discard(self, data: st.DataObject, tier: Tier) -> None:
        held = sorted(self.model.tiers[tier])
        if held:
            key, part = data.draw(st.sampled_from(held))
            dropped = self.pool.discard(key, part, tier)
            assert dropped == ((key, part) not in self.model.tiers[tier])

    @precondition(lambda self: self.model.tiers[Tier.SSD])
    @rule(data=st.data())
    def lose_on_ssd(self, data: st.DataObject) -> None:
        held = sorted(self.model.tiers[Tier.SSD])
        lost = data.draw(st.lists(st.sampled_from(held), min_size=1, max_size=3))
        self.pool.ssd.lost(lost)
        assert not self.pool.has_lost, "there is little, so it goes at once"
        gone = not any(at in self.model.tiers[Tier.SSD] for at in lost)
        if not (self.pins or self.fills):
            assert gone
        self.lost_in_vain |= not gone

    @rule(limit=st.integers(1, 8))
    def spill(self, limit: int) -> None:
        spills = self.pool.ssd.choose(limit)
        assert len(spills) <= limit
        for change in (spill.change for spill in spills):
            assert self.model.tiers[Tier.ARENA][change.key, change.part].runs == change.runs
            assert (change.key, change.part) not in self.model.tiers[Tier.SSD]
        self.spilling += spills

    @rule()
    def spill_everything(self) -> None:
        for spill in self.pool.ssd.choose(100):
            self.pool.ssd.stored(spill)

    @precondition(lambda self: self.spilling)
    @rule(data=st.data(), is_written=st.booleans())
    def spilled(self, data: st.DataObject, is_written: bool) -> None:
        index = data.draw(st.integers(0, len(self.spilling) - 1))
        spill = self.spilling.pop(index)
        at = (spill.change.key, spill.change.part)
        before = at in self.model.tiers[Tier.SSD]
        if is_written:
            kept = self.pool.ssd.stored(spill)
            assert kept == (at in self.model.tiers[Tier.SSD] and not before)
        else:
            self.pool.ssd.not_stored(spill)

    @invariant()
    def books_agree(self) -> None:
        self.now_s += 1.0
        self.pool.check_invariants()
        self.allocator.check_invariants()
        for (key, part), change in self.model.tiers[Tier.ARENA].items():
            assert self.pool.lookup(key, part) == change.runs
        theirs = sum(run.length for runs in self.transfers for run in runs)
        assert theirs + self.pool.status().num_arena_blocks == self.allocator.num_used

    @invariant()
    def pinned_parts_stay(self) -> None:
        for pin_id, pin in self.pins.items():
            now = self.pool.pinned(pin_id)
            assert set(pin.slots) <= set(now.slots)
            assert len(pin.slots) + len(pin.absent) == len(now.slots) + len(now.absent)

    @invariant()
    def matches_are_right(self) -> None:
        for name in SHAPES:
            for path in ([0] * MAX_DEPTH, [0, 1, 0, 0], [1, 0, 1]):
                shape, _, keys = self.keys((name, path))
                match = self.pool.match(shape, keys)
                usable, kv = self.model.usable(shape, keys, *Tier)
                assert (match.num_blocks, match.kv_blocks) == (usable, kv)
                usable, kv = self.model.usable(shape, keys, Tier.ARENA)
                assert (match.arena_blocks, match.arena_kv_blocks) == (usable, kv)

    @invariant()
    def listing_is_right(self) -> None:
        prefixes, num_prefixes = listed(self.pool.prefixes("recent", 100, self.now_s))
        assert len(prefixes) == num_prefixes
        assert all(a.idle_s <= b.idle_s for a, b in pairwise(prefixes))
        present = {change.key for change in self.model.changes()}
        parents = {change.parent for change in self.model.changes()}
        assert {prefix.key for prefix in prefixes} == present - parents

    def teardown(self) -> None:
        """A second pool, told what the first holds, holds the same."""
        if not hasattr(self, "pool"):
            return
        self.model.pinned.clear()
        for fill_id in self.fills:
            self.pool.abort(fill_id)
        for pin_id in self.pins:
            self.pool.unpin(pin_id)
        for spill in self.spilling:
            self.pool.ssd.not_stored(spill)
        other = HybridPool(BlockAllocator(NUM_BLOCKS), BLOCK_BYTES, ssd_bytes=400)
        assert all(other.restore(change, 0.0) for change in self.pool.changes())
        other.check_invariants()
        assert set(other.changes()) == set(self.pool.changes()) == set(self.model.changes())
        theirs = sum(run.length for runs in self.transfers for run in runs)
        assert self.pool.make_room(NUM_BLOCKS - theirs)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
