"""What engines are given of the prefix cache, with the real pool behind them."""

from collections.abc import Sequence

import pytest

from kvmanager.agent.cache.request_records import CacheEffect, Fetch, LacksWorkers, Seal, Tell
from kvmanager.agent.cache.requests import CacheRequests
from kvmanager.agent.cache.wire import MAX_SLOT_BYTES, slots_on_wire
from kvmanager.agent.engines.protocol import (
    CacheCancel,
    CacheFind,
    CacheFound,
    CacheFree,
    CacheMessage,
    CacheReserve,
    CacheSlots,
    CacheWritten,
    ProtocolError,
)
from kvmanager.hashing import join_keys
from kvmanager.pool.pool import HybridPool
from kvmanager.pool.records import PoolChange, Slot, Tier
from kvmanager.pool.shape import CacheShape, PartKind, PartShape
from kvmanager.transfers.blocks import BlockAllocator, Run
from kvmanager.transfers.records import EnginePeer

BLOCK = 100
ROOT = bytes(16)
SHAPE = CacheShape(64, (PartShape(PartKind.KV, 100), PartShape(PartKind.STATE, 200)))
WINDOWS = CacheShape(
    64, (PartShape(PartKind.KV, 100), PartShape(PartKind.WINDOW, 100, window_tokens=129))
)
SCHEDULER, WORKER, WORKER_1 = 1, 2, 3
KV, STATE = 0, 1
DRAIN_S = 30.0


def keys(count: int, prompt: int = 0) -> list[bytes]:
    return [bytes([prompt, number]) + bytes(14) for number in range(1, count + 1)]


class Rig:
    """The requests, their pool, and one instance with a scheduler and `world_size` workers."""

    def __init__(
        self, num_blocks: int = 30, world_size: int = 1, *, shape: CacheShape = SHAPE, ssd: int = 0
    ) -> None:
        self.allocator = BlockAllocator(num_blocks)
        self.pool = HybridPool(self.allocator, BLOCK, ssd_bytes=ssd)
        self.ended: list[bytes] = []
        self.requests = CacheRequests(
            self.pool,
            drain_s=DRAIN_S,
            has_slow_tier=bool(ssd),
            on_end=lambda ended, _: self.ended.extend(ended),
        )
        self.shape, self.world_size = shape, world_size
        self.connect(SCHEDULER, "scheduler")
        for rank in range(world_size):
            self.connect(WORKER + rank, "worker", rank)

    def connect(self, conn_id: int, role: str, rank: int = 0, instance: str = "a") -> None:
        peer = EnginePeer(conn_id, instance, role, rank, self.world_size, bytes(32))
        self.requests.connect(peer, self.shape)

    def say(
        self, message: CacheMessage, conn_id: int = SCHEDULER, now_s: float = 0.0
    ) -> list[CacheEffect]:
        effects = self.requests.message(conn_id, message, now_s)
        self.pool.check_invariants()
        return effects

    def find(
        self, wanted: Sequence[bytes], handle: int = 1, conn_id: int = SCHEDULER
    ) -> CacheFound:
        (effect,) = self.say(CacheFind(handle, join_keys(wanted)), conn_id)
        assert isinstance(effect, Tell)
        assert isinstance(effect.message, CacheFound)
        assert (effect.conn_id, effect.message.handle) == (conn_id, handle)
        return effect.message

    def reserve(
        self,
        wanted: Sequence[bytes],
        parts: Sequence[tuple[int, int]],
        handle: int = 1,
        *,
        parent: bytes = ROOT,
        first_block: int = 0,
        replaces: bytes = b"",
    ) -> CacheSlots:
        message = CacheReserve(
            handle, parent, first_block, join_keys(wanted), list(parts), replaces
        )
        effect, *_ = self.say(message)
        assert isinstance(effect, Tell)
        assert isinstance(effect.message, CacheSlots)
        return effect.message

    def written(
        self,
        parts: Sequence[tuple[int, int]],
        handle: int = 1,
        *,
        rank: int = 0,
        is_last: bool = False,
        now_s: float = 0.0,
    ) -> list[Seal]:
        message = CacheWritten(handle, list(parts), is_last)
        effects = self.say(message, WORKER + rank, now_s)
        assert all(isinstance(effect, Seal) for effect in effects)
        return [effect for effect in effects if isinstance(effect, Seal)]

    def seal(self, effect: Seal, now_s: float = 0.0) -> None:
        parts = [(slot.index, slot.part) for slot in effect.slots]
        self.requests.sealed(effect.fill, parts, now_s)
        self.pool.check_invariants()

    def store(
        self,
        wanted: Sequence[bytes],
        parts: Sequence[tuple[int, int]],
        handle: int = 1,
        *,
        parent: bytes = ROOT,
        first_block: int = 0,
        replaces: bytes = b"",
    ) -> None:
        """Reserve, write on every rank, seal, end."""
        slots = self.reserve(
            wanted, parts, handle, parent=parent, first_block=first_block, replaces=replaces
        )
        given = [(index, part) for index, part, _ in slots.slots]
        for rank in range(self.world_size):
            for effect in self.written(given, handle, rank=rank, is_last=True):
                self.seal(effect)

    @property
    def is_idle(self) -> bool:
        held = self.requests
        return not (held._fills or held._finds or held._left_pins)


def kv(count: int, start: int = 0) -> list[tuple[int, int]]:
    return [(index, KV) for index in range(start, count)]


class TestFind:
    def test_what_is_resumable_is_pinned_until_it_is_freed(self) -> None:
        rig = Rig()
        wanted = keys(5)
        assert rig.find(wanted, 7) == CacheFound(7, 0, 0, [])
        rig.store(wanted[:4], [*kv(4), (2, STATE)])
        found = rig.find(wanted, 8)
        assert (found.num_blocks, found.kv_blocks) == (3, 4)
        assert [(index, part) for index, part, _ in found.slots] == [*kv(3), (2, STATE)]
        for index, part, runs in found.slots:
            assert tuple(map(tuple, runs)) == rig.pool.lookup(wanted[index], part)
        assert not rig.pool.make_room(30)
        rig.say(CacheFree(8))
        rig.say(CacheFree(8))
        rig.say(CacheFree(7))
        assert rig.is_idle
        assert rig.pool.make_room(30)
        assert rig.requests.use.queries == 2
        assert rig.requests.use.query_tokens == 2 * 5 * 64
        assert rig.requests.use.hit_tokens == {Tier.ARENA: 3 * 64, Tier.SSD: 0}

    def test_what_is_on_ssd_is_fetched_before_the_answer(self) -> None:
        rig = Rig(ssd=10_000)
        wanted = keys(2)
        rig.store(wanted, [*kv(2), (1, STATE)])
        for spill in rig.pool.ssd.choose(10):
            assert rig.pool.ssd.stored(spill)
        assert rig.pool.make_room(30)
        (effect,) = rig.say(CacheFind(4, join_keys(wanted)))
        assert isinstance(effect, Fetch)
        assert effect.parts == ((0, KV), (1, KV), (1, STATE))
        fill = rig.pool.reserve(SHAPE, ROOT, 0, wanted, effect.parts, 0.0)
        for slot in fill.slots:
            rig.pool.commit(fill.fill_id, slot.index, slot.part, 0.0)
        rig.pool.abort(fill.fill_id)
        (answer,) = rig.requests.fetch_ended(effect.find, 0.0)
        assert isinstance(answer, Tell)
        assert isinstance(answer.message, CacheFound)
        assert answer.message.num_blocks == 2
        assert rig.requests.fetch_ended(effect.find, 0.0) == [], "answered once"
        assert rig.requests.use.hit_tokens == {Tier.ARENA: 0, Tier.SSD: 128}

    def test_what_does_not_come_in_time_is_not_answered_with(self) -> None:
        rig = Rig(ssd=10_000)
        wanted = keys(1)
        rig.store(wanted, [*kv(1), (0, STATE)])
        for spill in rig.pool.ssd.choose(10):
            rig.pool.ssd.stored(spill)
        rig.pool.make_room(30)
        (effect,) = rig.say(CacheFind(4, join_keys(wanted)))
        assert isinstance(effect, Fetch)
        (answer,) = rig.requests.fetch_ended(effect.find, 0.0)
        assert isinstance(answer, Tell)
        assert answer.message == CacheFound(4, 0, 1, [])
        (effect,) = rig.say(CacheFind(5, join_keys(wanted)))
        assert isinstance(effect, Fetch)
        rig.say(CacheFree(5))
        assert rig.requests.fetch_ended(effect.find, 0.0) == [], "freed meanwhile"

    def test_a_lost_scheduler_leaves_what_it_pinned_to_its_workers_for_a_while(self) -> None:
        rig = Rig()
        wanted = keys(2)
        rig.store(wanted, [*kv(2), (1, STATE)])
        rig.find(wanted)
        rig.requests.connection_lost(SCHEDULER, 10.0)
        rig.requests.process_gone(SCHEDULER, 11.0)
        assert not rig.pool.make_room(30), "a worker may still read"
        rig.requests.expire(10.0 + DRAIN_S - 1)
        assert not rig.pool.make_room(30)
        rig.requests.expire(10.0 + DRAIN_S)
        assert rig.is_idle
        assert rig.pool.make_room(30)

    def test_an_instance_that_is_gone_pins_nothing(self) -> None:
        rig = Rig()
        wanted = keys(2)
        rig.store(wanted, [*kv(2), (1, STATE)])
        rig.find(wanted)
        for conn_id in (SCHEDULER, WORKER):
            rig.requests.connection_lost(conn_id, 10.0)
            assert not rig.is_idle
        for conn_id in (SCHEDULER, WORKER):
            rig.requests.process_gone(conn_id, 11.0)
        assert rig.is_idle

    def test_slots_that_no_message_holds_are_no_hit(self) -> None:
        runs = tuple(Run(2 * number, 1) for number in range(MAX_SLOT_BYTES // 16 // 2))
        assert len(slots_on_wire([Slot(0, 0, runs)] * 3)) == 1


class TestFill:
    def test_a_part_is_there_once_every_rank_wrote_it(self) -> None:
        rig = Rig(world_size=2)
        wanted = keys(3)
        slots = rig.reserve(wanted, [*kv(3), (2, STATE)])
        assert [(index, part) for index, part, _ in slots.slots] == [*kv(3), (2, STATE)]
        assert rig.written(kv(2), rank=0) == []
        (first,) = rig.written(kv(3), rank=1)
        assert [(slot.index, slot.part) for slot in first.slots] == kv(2)
        rig.seal(first)
        assert rig.pool.match(SHAPE, wanted).kv_blocks == 2
        (second,) = rig.written([(2, KV)], rank=0, is_last=True)
        assert rig.written([], rank=1, is_last=True) == []
        assert len(rig.requests._fills) == 1, "what is being sealed is not taken back"
        rig.seal(second)
        assert rig.is_idle
        assert rig.pool.match(SHAPE, wanted).kv_blocks == 3
        assert rig.pool.lookup(wanted[2], STATE) is None, "not every rank wrote it"
        assert rig.allocator.num_used == 3
        assert rig.ended == wanted
        assert rig.requests.use.fills == 1

    def test_what_is_there_or_has_no_room_is_not_given(self) -> None:
        rig = Rig(num_blocks=3)
        wanted = keys(5)
        rig.store(wanted[:2], kv(2))
        slots = rig.reserve(wanted, kv(5), 2)
        assert [(index, part) for index, part, _ in slots.slots] == [(2, KV)]
        assert rig.reserve(wanted, kv(5), 3).slots == []
        rig.written([], 2, is_last=True)
        assert rig.is_idle
        assert rig.allocator.num_used == 2

    def test_a_scheduler_takes_back_what_no_worker_heard_of(self) -> None:
        rig = Rig()
        rig.reserve(keys(2), kv(2))
        rig.say(CacheCancel(1))
        rig.say(CacheCancel(1))
        assert rig.is_idle
        assert rig.allocator.num_used == 0

    def test_nothing_is_given_while_a_rank_has_no_worker(self) -> None:
        rig = Rig(world_size=2)
        rig.requests.connection_lost(WORKER_1, 0.0)
        assert rig.reserve(keys(1), kv(1)).slots == []
        rig.connect(9, "worker", 1)
        assert rig.reserve(keys(1), kv(1), 2).slots

    def test_an_engine_without_all_workers_is_told_of_once_each_time(self) -> None:
        """Its workers may call themselves something else: then it would never store anything."""
        rig = Rig(world_size=2)
        rig.connect(5, "scheduler", instance="b")
        rig.connect(6, "worker", 1, instance="b")
        asked = [CacheReserve(n, ROOT, 0, join_keys(keys(1)), kv(1)) for n in range(5)]
        warning = LacksWorkers("b", 1, 2)
        assert warning in rig.say(asked[0], 5)
        assert warning not in rig.say(asked[1], 5)
        rig.connect(7, "worker", 0, instance="b")
        assert warning not in rig.say(asked[2], 5)
        rig.requests.connection_lost(7, 0.0)
        assert warning in rig.say(asked[3], 5)

    def test_a_killed_workers_memory_waits_for_the_end_of_its_process(self) -> None:
        rig = Rig(world_size=2)
        rig.reserve(keys(2), kv(2))
        rig.written([(0, KV)], rank=0)
        rig.requests.connection_lost(WORKER_1, 5.0)
        rig.requests.expire(6.0)
        assert rig.allocator.num_used == 2, "both workers may still write"
        rig.requests.process_gone(WORKER_1, 7.0)
        assert rig.allocator.num_used == 2, "the other one writes on"
        rig.written([(1, KV)], rank=0, is_last=True)
        assert rig.is_idle
        assert rig.allocator.num_used == 0
        rig.requests.message(WORKER, CacheWritten(1, [], False), 8.0)

    def test_a_silent_workers_memory_comes_back_after_the_drain_time(self) -> None:
        rig = Rig()
        rig.reserve(keys(2), kv(2))
        rig.requests.connection_lost(SCHEDULER, 5.0)
        rig.requests.expire(5.0 + DRAIN_S - 0.1)
        assert rig.allocator.num_used == 2
        rig.requests.expire(5.0 + DRAIN_S)
        assert rig.allocator.num_used == 0
        assert rig.written([(0, KV)], is_last=True) == [], "too late, and no fault of its own"

    def test_a_worker_goes_on_when_its_scheduler_is_lost(self) -> None:
        rig = Rig()
        wanted = keys(2)
        rig.reserve(wanted, kv(2))
        rig.requests.connection_lost(SCHEDULER, 5.0)
        (effect,) = rig.written(kv(2), is_last=True, now_s=6.0)
        rig.requests.expire(100.0)
        assert len(rig.requests._fills) == 1
        rig.seal(effect)
        rig.requests.expire(100.0)
        assert rig.is_idle
        assert rig.pool.match(SHAPE, wanted).kv_blocks == 2

    def test_what_cannot_be_sealed_is_not_kept(self) -> None:
        rig = Rig()
        rig.reserve(keys(2), kv(2))
        (effect,) = rig.written(kv(2), is_last=True)
        rig.requests.sealed(effect.fill, [], 0.0)
        assert rig.is_idle
        assert rig.allocator.num_used == 0


class TestReplaced:
    def test_a_newer_state_takes_the_place_of_the_one_before(self) -> None:
        rig = Rig()
        wanted = keys(3)
        rig.store(wanted[:2], [*kv(2), (1, STATE)])
        rig.store(
            wanted[2:], [(0, KV), (0, STATE)], 2,
            parent=wanted[1], first_block=2, replaces=wanted[1],
        )  # fmt: skip
        assert rig.pool.lookup(wanted[1], STATE) is None
        assert rig.pool.match(SHAPE, wanted).num_blocks == 3

    def test_one_that_was_hit_stays(self) -> None:
        rig = Rig()
        wanted = keys(3)
        rig.store(wanted[:2], [*kv(2), (1, STATE)])
        rig.find(wanted[:2], 5)
        rig.say(CacheFree(5))
        rig.store(
            wanted[2:], [(0, KV), (0, STATE)], 2,
            parent=wanted[1], first_block=2, replaces=wanted[1],
        )  # fmt: skip
        assert rig.pool.lookup(wanted[1], STATE) is not None

    def test_it_stays_when_the_new_one_was_not_written(self) -> None:
        rig = Rig()
        wanted = keys(3)
        rig.store(wanted[:2], [*kv(2), (1, STATE)])
        rig.store(wanted[2:], [(0, KV)], 2, parent=wanted[1], first_block=2, replaces=wanted[1])
        assert rig.pool.lookup(wanted[1], STATE) is not None

    def test_a_window_that_the_new_boundary_reaches_over_stays(self) -> None:
        rig = Rig(shape=WINDOWS)
        assert WINDOWS.reach(1) == 2
        wanted = keys(5)
        rig.store(wanted[:2], [*kv(2), (0, 1), (1, 1)])
        rig.store(
            wanted[2:3], [(0, KV), (0, 1)], 2,
            parent=wanted[1], first_block=2, replaces=wanted[1],
        )  # fmt: skip
        assert rig.pool.match(WINDOWS, wanted[:3]).num_blocks == 3
        rig.store(
            wanted[3:], [*kv(2), (0, 1), (1, 1)], 3,
            parent=wanted[2], first_block=3, replaces=wanted[2],
        )  # fmt: skip
        assert rig.pool.lookup(wanted[2], 1) is None
        assert rig.pool.match(WINDOWS, wanted).num_blocks == 5


class TestGarbage:
    @pytest.mark.parametrize(
        ("message", "words"),
        [
            (CacheFind(1, b"x"), "no sequence of 16"),
            (CacheFind(7, b""), "handle 7 is in use"),
            (CacheReserve(8, ROOT, 0, join_keys(keys(1)), []), "handle 8 is in use"),
            (CacheReserve(1, ROOT, 0, join_keys(keys(1)), [(1, 0)]), "there are 1 keys"),
            (CacheReserve(1, ROOT, 0, join_keys(keys(1)), [(0, 2)]), "2 parts"),
            (CacheReserve(1, ROOT, 0, join_keys(keys(1)), [(0, 0), (0, 0)]), "twice"),
            (CacheReserve(1, ROOT, 0, join_keys(keys(1) * 2), []), "twice"),
            (CacheReserve(1, ROOT, 65535, join_keys(keys(2)), []), "at most"),
            (CacheReserve(1, ROOT, 0, b"", [], b"xy"), "a key of 2 bytes"),
            (CacheWritten(8, []), "for a worker to say"),
        ],
    )
    def test_of_a_scheduler(self, message: CacheMessage, words: str) -> None:
        rig = Rig()
        rig.find(keys(1), 7)
        rig.reserve(keys(2), kv(2), 8)
        used = rig.allocator.num_used
        with pytest.raises(ProtocolError, match=words):
            rig.say(message)
        assert rig.allocator.num_used == used

    @pytest.mark.parametrize(
        ("message", "words"),
        [
            (CacheWritten(9, []), "no handle 9"),
            (CacheWritten(8, [(0, 1)]), "was not given"),
            (CacheWritten(8, [(5, 0)]), "was not given"),
            (CacheWritten(8, [(0, 0)]), "twice"),
            (CacheWritten(10, []), "after its last word"),
            (CacheFind(1, b""), "for a scheduler to say"),
        ],
    )
    def test_of_a_worker(self, message: CacheMessage, words: str) -> None:
        rig = Rig(world_size=2)
        for handle in (8, 10):
            rig.reserve(keys(2, handle), kv(2), handle)
        rig.written([(0, KV)], 8)
        rig.written([], 10, is_last=True)
        with pytest.raises(ProtocolError, match=words):
            rig.say(message, WORKER)

    def test_cancelling_what_a_worker_writes(self) -> None:
        rig = Rig()
        rig.reserve(keys(2), kv(2))
        rig.written([(0, KV)])
        with pytest.raises(ProtocolError, match="after a worker wrote"):
            rig.say(CacheCancel(1))

    def test_an_engine_without_a_cache_has_nothing_to_say(self) -> None:
        with pytest.raises(ProtocolError, match="uses no prefix cache"):
            Rig().say(CacheFind(1, b""), 99)

    def test_handles_of_instances_are_their_own(self) -> None:
        rig = Rig()
        rig.connect(10, "scheduler", instance="b")
        rig.connect(11, "worker", instance="b")
        rig.reserve(keys(1), kv(1), 5)
        message = CacheReserve(5, ROOT, 0, join_keys(keys(1, 1)), kv(1))
        assert rig.say(message, 10)
        rig.requests.connection_lost(11, 0.0)
        rig.requests.process_gone(11, 0.0)
        assert len(rig.requests._fills) == 1


def test_the_listener_of_the_pool_hears_of_what_engines_store() -> None:
    changes: list[PoolChange] = []
    pool = HybridPool(BlockAllocator(9), BLOCK, listener=changes.append)
    rig = CacheRequests(pool, drain_s=1.0, has_slow_tier=False)
    for conn_id, role in ((1, "scheduler"), (2, "worker")):
        rig.connect(EnginePeer(conn_id, "a", role, 0, 1, bytes(32)), SHAPE)
    rig.message(1, CacheReserve(1, ROOT, 0, join_keys(keys(1)), kv(1)), 0.0)
    (effect,) = rig.message(2, CacheWritten(1, kv(1), True), 0.0)
    assert isinstance(effect, Seal)
    rig.sealed(effect.fill, kv(1), 0.0)
    assert [(c.stored, c.key, c.parent, c.index) for c in changes] == [(True, keys(1)[0], ROOT, 0)]
