"""The transfer table: each rule by example, and all of them under random events."""

import dataclasses

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvmanager.blocks import BlockAllocator
from kvmanager.custody import PROMOTION, Kind
from kvmanager.transfer_records import (
    MOVES,
    BadRequest,
    CancelOutbox,
    DropLanding,
    Effect,
    Ended,
    EnginePeer,
    ForwardReady,
    GaveUpOnEngine,
    LandingSpec,
    NoRoom,
    OutboxSpec,
    RecordPrefillEnd,
    State,
    TellFailed,
    TellLanded,
    UnknownTransfer,
)
from kvmanager.transfers import TableLimits, TransferTable

BLOCK = 10
FP = b"f" * 32
IDS = [bytes([i]) * 16 for i in range(4)]
TID = IDS[0]


def landing_spec(transfer_id: bytes = TID, nbytes: int = 25, lease_s: float = 60.0) -> LandingSpec:
    return LandingSpec(transfer_id, b"t" * 32, nbytes, 3, FP, b"d" * 32, lease_s)


def outbox_spec(transfer_id: bytes = TID, nbytes: int = 25, lease_s: float = 60.0) -> OutboxSpec:
    return OutboxSpec(transfer_id, nbytes, 3, FP, lease_s)


def peer(conn_id: int, instance: str = "a", *, tp: tuple[int, int] = (0, 1)) -> EnginePeer:
    return EnginePeer(conn_id, instance, "worker", tp[0], tp[1], FP)


@pytest.fixture
def table() -> TransferTable:
    table = TransferTable(BlockAllocator(8), BLOCK, TableLimits(drain_s=30, report_keep_s=60))
    for conn_id, instance in ((1, "a"), (2, "a"), (3, "b")):
        table.connect(peer(conn_id, instance))
    return table


def used(table: TransferTable, kind: Kind = Kind.LANDING) -> int:
    table.check_invariants()
    return table.custody.num_blocks(kind)


class TestSharedArena:
    """What shares the arena with transfers gives way to them, and hears of their end."""

    def test_room_is_made_only_where_it_lacks(self) -> None:
        allocator = BlockAllocator(8)
        cached = allocator.allocate(6)
        asked: list[int] = []

        def make_room(num_blocks: int) -> None:
            asked.append(num_blocks)
            allocator.free([cached.pop()])

        table = TransferTable(allocator, BLOCK, make_room=make_room)
        table.reserve(landing_spec(IDS[0], nbytes=20), 0)
        assert asked == []
        table.open_outbox(outbox_spec(IDS[1], nbytes=60), 0)
        assert asked == [6]

    def test_without_enough_room_nothing_is_taken(self) -> None:
        allocator = BlockAllocator(8)
        others = allocator.allocate(6)
        table = TransferTable(allocator, BLOCK, make_room=lambda _: False)
        with pytest.raises(NoRoom):
            table.reserve(landing_spec(nbytes=30), 0)
        table.custody.check_invariants([], others)
        assert allocator.num_free == 2

    def test_a_promotion_holds_the_memory_whatever_time_passes(self) -> None:
        freed: list[object] = []
        table = TransferTable(BlockAllocator(8), BLOCK, on_freed=freed.append)
        table.connect(peer(1))
        landing = table.reserve(landing_spec(), 0)
        table.watch(1, TID)
        table.landing_complete(TID, 1)
        table.custody.hold(landing.key, PROMOTION)
        table.release(1, TID, 2)
        table.landing_dropped(TID)
        table.expire(10_000)
        assert used(table) == 3
        assert freed == []
        table.custody.let_go(landing.key, PROMOTION)
        assert used(table) == 0
        assert freed == [landing.key]


class TestLanding:
    def test_whole_life(self, table: TransferTable) -> None:
        landing = table.reserve(landing_spec(), 0)
        assert sum(length for _, length in landing.runs) == 3
        assert table.watch(1, TID) == []
        table.landing_accepted(TID)
        assert landing.state is State.RECEIVING
        assert table.landing_complete(TID, 1) == [Ended(landing.key), TellLanded(1, TID)]
        assert table.release(1, TID, 2) == [DropLanding(TID, "released")]
        assert used(table) == 3, "the receiver has not let go yet"
        table.landing_dropped(TID)
        assert used(table) == 0
        assert table.landings[TID].state is State.RELEASED
        table.expire(61)
        assert TID not in table.landings

    def test_watched_after_it_landed(self, table: TransferTable) -> None:
        table.reserve(landing_spec(), 0)
        table.landing_complete(TID, 1)
        assert table.watch(3, TID) == [TellLanded(3, TID)]
        assert table.watch(3, TID) == [TellLanded(3, TID)]

    def test_claimed_has_no_lease_and_cancel_does_not_touch_it(self, table: TransferTable) -> None:
        table.reserve(landing_spec(), 0)
        table.watch(1, TID)
        table.landing_complete(TID, 1)
        assert table.cancel(TID, "client gone", 2) == []
        assert table.expire(1000) == []
        assert used(table) == 3
        assert table.landings[TID].state is State.CLAIMED

    def test_only_one_engine_gets_it(self, table: TransferTable) -> None:
        table.reserve(landing_spec(), 0)
        table.watch(1, TID)
        (told,) = table.watch(3, TID)
        assert isinstance(told, TellFailed)
        assert "another engine" in told.reason

    def test_release_by_another_instance_is_ignored(self, table: TransferTable) -> None:
        table.reserve(landing_spec(), 0)
        table.watch(1, TID)
        table.landing_complete(TID, 1)
        assert table.release(3, TID, 2) == []
        assert table.release(2, TID, 2) == [DropLanding(TID, "released")]

    def test_release_before_it_landed_cancels(self, table: TransferTable) -> None:
        landing = table.reserve(landing_spec(), 0)
        table.watch(1, TID)
        effects = table.release(1, TID, 1)
        assert DropLanding(TID, "given up by its engine") in effects
        assert landing.state is State.CANCELLED

    def test_lease_ends_whatever_happens(self, table: TransferTable) -> None:
        landing = table.reserve(landing_spec(lease_s=5), 0)
        table.watch(1, TID)
        table.landing_accepted(TID)
        assert table.expire(4.9) == []
        assert table.expire(5) == [
            DropLanding(TID, "its lease ended"),
            Ended(landing.key),
            TellFailed(1, TID, "its lease ended"),
        ]
        table.landing_dropped(TID)
        assert used(table) == 0

    def test_landed_but_never_claimed_expires_too(self, table: TransferTable) -> None:
        table.reserve(landing_spec(lease_s=5), 0)
        table.landing_complete(TID, 1)
        assert table.expire(5) == [DropLanding(TID, "its lease ended")]

    def test_renew(self, table: TransferTable) -> None:
        table.reserve(landing_spec(lease_s=5), 0)
        assert table.renew(TID, 7, now_s=4) == 7
        assert table.expire(10.9) == []
        assert table.expire(11) != []
        with pytest.raises(UnknownTransfer):
            table.renew(TID, 5, now_s=12)

    def test_failure_is_told_to_the_watcher(self, table: TransferTable) -> None:
        table.reserve(landing_spec(), 0)
        table.watch(1, TID)
        assert TellFailed(1, TID, "link lost") in table.landing_failed(TID, "link lost", 1)
        assert table.landing_complete(TID, 2) == [], "too late"
        (told,) = table.watch(3, TID)
        assert told == TellFailed(3, TID, "the transfer is over: failed (link lost)")

    def test_unknown_is_told_at_once(self, table: TransferTable) -> None:
        (told,) = table.watch(1, IDS[3])
        assert isinstance(told, TellFailed)

    def test_other_layout_cannot_watch(self, table: TransferTable) -> None:
        table.connect(dataclasses.replace(peer(9, "other"), fingerprint=b"g" * 32))
        table.reserve(landing_spec(), 0)
        (told,) = table.watch(9, TID)
        assert isinstance(told, TellFailed)
        assert "layout" in told.reason


class TestAbandonedLanding:
    @pytest.fixture(autouse=True)
    def claimed(self, table: TransferTable) -> None:
        table.reserve(landing_spec(), 0)
        table.watch(1, TID)
        table.landing_complete(TID, 1)

    def test_is_freed_when_every_process_of_the_instance_is_gone(
        self, table: TransferTable
    ) -> None:
        assert table.disconnected(1, 2) == [DropLanding(TID, "released")]
        table.landing_dropped(TID)
        table.process_gone(1)
        assert used(table) == 3, "another rank of the instance may still read it"
        table.disconnected(2, 3)
        assert used(table) == 3
        table.process_gone(2)
        assert used(table) == 0

    def test_is_freed_after_the_drain_time(self, table: TransferTable) -> None:
        table.disconnected(1, 2)
        table.landing_dropped(TID)
        table.expire(31.9)
        assert used(table) == 3
        table.expire(32)
        assert used(table) == 0

    def test_cannot_be_claimed_again(self, table: TransferTable) -> None:
        table.disconnected(1, 2)
        (told,) = table.watch(2, TID)
        assert isinstance(told, TellFailed)

    def test_a_lost_watch_before_landing_can_be_taken_over(self, table: TransferTable) -> None:
        table.reserve(landing_spec(IDS[1]), 0)
        table.watch(1, IDS[1])
        table.disconnected(1, 1)
        assert table.watch(2, IDS[1]) == []
        assert TellLanded(2, IDS[1]) in table.landing_complete(IDS[1], 2)


class TestOutbox:
    def test_whole_life(self, table: TransferTable) -> None:
        outbox = table.open_outbox(outbox_spec(), 0)
        assert table.attach(1, TID) == []
        assert table.ready(1, TID, [(0, 10), (20, 5)], 1) == [ForwardReady(TID, [(0, 10), (20, 5)])]
        assert table.ready(1, TID, [(5, 20)], 1) == [ForwardReady(TID, [(10, 10)])]
        assert table.prefill_end(1, TID, 0, 2) == [RecordPrefillEnd(TID)]
        assert table.prefill_end(1, TID, 0, 3) == []
        assert table.outbox_ended(TID, None, 4) == [Ended(outbox.key)]
        assert used(table, Kind.OUTBOX) == 0
        assert outbox.state is State.COMPLETE

    def test_every_rank_must_end_its_prefill(self, table: TransferTable) -> None:
        table.connect(peer(5, "tp", tp=(0, 2)))
        table.connect(peer(6, "tp", tp=(1, 2)))
        table.open_outbox(outbox_spec(), 0)
        assert table.prefill_end(5, TID, 0, 1) == []
        assert table.prefill_end(5, TID, 0, 1) == []
        assert table.prefill_end(6, TID, 1, 1) == [RecordPrefillEnd(TID)]

    @pytest.mark.parametrize("bad", [(0, 26), (25, 1), (1 << 60, 1), (-1, 2), (3, -1)])
    def test_range_outside_fails_the_transfer(
        self, table: TransferTable, bad: tuple[int, int]
    ) -> None:
        outbox = table.open_outbox(outbox_spec(), 0)
        effects = table.ready(1, TID, [(0, 1), bad], 1)
        assert any(isinstance(effect, CancelOutbox) for effect in effects)
        assert any(isinstance(effect, TellFailed) for effect in effects)
        assert outbox.state is State.FAILED

    def test_memory_waits_for_whoever_might_be_about_to_write(self, table: TransferTable) -> None:
        table.open_outbox(outbox_spec(), 0)
        effects = table.cancel(TID, "client gone", 1)
        told = {effect.conn_id for effect in effects if isinstance(effect, TellFailed)}
        assert told == {1, 2, 3}
        table.outbox_ended(TID, "cancelled", 1)
        for conn_id in told:
            assert used(table, Kind.OUTBOX) == 3
            table.release(conn_id, TID, 2)
        assert used(table, Kind.OUTBOX) == 0

    def test_two_instances_never_write_into_one_outbox(self, table: TransferTable) -> None:
        table.open_outbox(outbox_spec(), 0)
        assert table.attach(1, TID) == table.attach(2, TID) == []
        (told,) = table.attach(3, TID)
        assert isinstance(told, TellFailed)
        assert told.conn_id == 3
        assert "another engine" in told.reason
        assert table.ready(3, TID, [(0, 5)], 1) == [told]
        assert table.custody.holders((Kind.OUTBOX, TID)) == {1, 2}

    def test_workers_that_come_later_might_write_too(self, table: TransferTable) -> None:
        table.open_outbox(outbox_spec(), 0)
        table.connect(peer(7, "c"))
        table.connect(dataclasses.replace(peer(8, "c"), role="scheduler"))
        table.connect(dataclasses.replace(peer(9, "c"), fingerprint=b"g" * 32))
        assert table.custody.holders((Kind.OUTBOX, TID)) == {1, 2, 3, 7}
        table.attach(7, TID)
        assert table.custody.holders((Kind.OUTBOX, TID)) == {7}, "another instance fills it"
        table.connect(peer(10, "c"))
        table.connect(peer(11, "d"))
        assert table.custody.holders((Kind.OUTBOX, TID)) == {7, 10}

    def test_memory_waits_for_the_sender_and_every_engine(self, table: TransferTable) -> None:
        table.open_outbox(outbox_spec(), 0)
        table.attach(1, TID)
        table.attach(2, TID)
        effects = table.cancel(TID, "client gone", 1)
        assert effects == [
            CancelOutbox(TID, "client gone"),
            Ended((Kind.OUTBOX, TID)),
            TellFailed(1, TID, "client gone", 1),
            TellFailed(2, TID, "client gone", 1),
        ]
        table.release(1, TID, 2)
        table.outbox_ended(TID, "cancelled", 2)
        assert used(table, Kind.OUTBOX) == 3
        table.abort(2, TID, "as you wish", 3)
        assert used(table, Kind.OUTBOX) == 0
        assert table.outboxes[TID].error == "client gone"

    def test_engine_that_does_not_answer_is_dropped_after_the_drain_time(
        self, table: TransferTable
    ) -> None:
        table.open_outbox(outbox_spec(), 0)
        table.attach(1, TID)
        table.cancel(TID, "x", 1)
        assert table.expire(100) == [GaveUpOnEngine((Kind.OUTBOX, TID))]
        assert used(table, Kind.OUTBOX) == 3, "the sender is never dropped by time"
        table.outbox_ended(TID, "cancelled", 101)
        assert used(table, Kind.OUTBOX) == 0

    def test_engine_death_fails_what_is_not_filled(self, table: TransferTable) -> None:
        table.open_outbox(outbox_spec(), 0)
        table.open_outbox(outbox_spec(IDS[1]), 0)
        table.ready(1, TID, [(0, 24)], 1)
        table.ready(1, IDS[1], [(0, 25)], 1)
        table.attach(2, TID)
        effects = table.disconnected(1, 2)
        assert CancelOutbox(TID, "its engine is lost") in effects
        assert TellFailed(2, TID, "its engine is lost", 1) in effects
        assert table.outboxes[IDS[1]].state is State.OPEN
        table.process_gone(1)
        table.release(2, TID, 3)
        table.outbox_ended(TID, "cancelled", 3)
        table.outbox_ended(IDS[1], None, 3)
        assert used(table, Kind.OUTBOX) == 0

    def test_late_engine_is_told(self, table: TransferTable) -> None:
        table.open_outbox(outbox_spec(), 0)
        table.cancel(TID, "gone", 1)
        for effects in (table.attach(1, TID), table.ready(1, TID, [(0, 1)], 1)):
            assert effects == [TellFailed(1, TID, "the transfer is over: cancelled (gone)", 1)]

    def test_sender_failure(self, table: TransferTable) -> None:
        outbox = table.open_outbox(outbox_spec(), 0)
        table.attach(1, TID)
        assert table.outbox_ended(TID, "refused", 1) == [
            Ended(outbox.key),
            TellFailed(1, TID, "refused", 1),
            TellFailed(2, TID, "refused", 1),
        ]
        assert outbox.state is State.FAILED

    def test_both_ends_of_one_transfer_in_one_agent(self, table: TransferTable) -> None:
        table.reserve(landing_spec(), 0)
        table.open_outbox(outbox_spec(), 0)
        table.attach(1, TID)
        table.watch(3, TID)
        effects = table.cancel(TID, "x", 1)
        assert {type(effect) for effect in effects} == {
            DropLanding,
            CancelOutbox,
            Ended,
            TellFailed,
        }
        table.landing_dropped(TID)
        table.outbox_ended(TID, "cancelled", 2)
        table.release(1, TID, 2)
        table.release(2, TID, 2)
        assert used(table) == used(table, Kind.OUTBOX) == 0


class TestRoom:
    def test_arena_full(self, table: TransferTable) -> None:
        table.reserve(landing_spec(nbytes=71), 0)
        with pytest.raises(NoRoom):
            table.open_outbox(outbox_spec(nbytes=1), 0)

    def test_landing_cap_leaves_room_for_outboxes(self) -> None:
        table = TransferTable(BlockAllocator(8), BLOCK, TableLimits(landing_bytes=40))
        table.reserve(landing_spec(), 0)
        with pytest.raises(NoRoom, match="30 of 40"):
            table.reserve(landing_spec(IDS[1], nbytes=11), 0)
        table.reserve(landing_spec(IDS[1], nbytes=10), 0)
        table.open_outbox(outbox_spec(nbytes=40), 0)

    def test_tenant_cap_counts_memory_until_it_is_free(self) -> None:
        table = TransferTable(BlockAllocator(8), BLOCK, TableLimits(tenant_landing_bytes=30))
        blue = dataclasses.replace(landing_spec(), tenant="blue")
        table.reserve(blue, 0)
        table.cancel(TID, "x", 0)
        again = dataclasses.replace(blue, transfer_id=IDS[1])
        with pytest.raises(NoRoom, match="blue"):
            table.reserve(again, 0)
        table.reserve(landing_spec(IDS[2]), 0)
        table.landing_dropped(TID)
        table.reserve(again, 0)

    @pytest.mark.parametrize("lease_s", [0, -1, float("nan")])
    def test_impossible_leases(self, table: TransferTable, lease_s: float) -> None:
        with pytest.raises(BadRequest):
            table.reserve(landing_spec(lease_s=lease_s), 0)
        assert used(table) == 0

    def test_endless_lease_is_shortened(self, table: TransferTable) -> None:
        landing = table.reserve(landing_spec(lease_s=float("inf")), 0)
        assert landing.lease_until_s == 3600

    def test_same_id_twice(self, table: TransferTable) -> None:
        table.reserve(landing_spec(), 0)
        with pytest.raises(BadRequest):
            table.reserve(landing_spec(), 0)

    def test_outbox_is_opened_again_only_when_its_memory_is_back(
        self, table: TransferTable
    ) -> None:
        table.open_outbox(outbox_spec(), 0)
        table.attach(1, TID)
        with pytest.raises(BadRequest):
            table.open_outbox(outbox_spec(), 0)
        table.cancel(TID, "x", 0)
        table.outbox_ended(TID, "cancelled", 0)
        with pytest.raises(BadRequest):
            table.open_outbox(outbox_spec(), 0)
        table.release(1, TID, 0)
        table.release(2, TID, 0)
        assert table.open_outbox(outbox_spec(), 1).state is State.OPEN


ids = st.sampled_from(IDS)
conns = st.integers(0, 3)


class TableMachine(RuleBasedStateMachine):
    """Any order of events; the shell's duties (drop, end, process exit) are done late or never."""

    def __init__(self) -> None:
        super().__init__()
        limits = TableLimits(landing_bytes=60, drain_s=5, report_keep_s=8, max_lease_s=20)
        self.table = TransferTable(BlockAllocator(9), BLOCK, limits)
        self.now_s = 0.0
        self.next_conn = 0
        self.connected: list[int] = []
        self.lost: list[int] = []
        self.to_drop: list[bytes] = []
        self.sending: set[bytes] = set()
        self.ended: set[tuple[Kind, bytes]] = set()

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case DropLanding(transfer_id):
                    self.to_drop.append(transfer_id)
                case CancelOutbox(transfer_id):
                    assert transfer_id in self.sending, "cancel of what the sender does not have"
                case ForwardReady(transfer_id, ranges):
                    assert transfer_id in self.sending
                    assert all(o >= 0 and n > 0 and o + n <= 25 for o, n in ranges)
                case TellLanded(conn_id) | TellFailed(conn_id):
                    assert conn_id in self.connected, "tells a connection that is lost"
                case Ended(key):
                    assert key not in self.ended, "ended twice"
                    self.ended.add(key)

    def pick(self, number: int) -> int | None:
        return self.connected[number % len(self.connected)] if self.connected else None

    @rule(instance=st.sampled_from("ab"))
    def connect(self, instance: str) -> None:
        self.table.connect(peer(self.next_conn, instance))
        self.connected.append(self.next_conn)
        self.next_conn += 1

    @rule(number=conns)
    def disconnect(self, number: int) -> None:
        conn_id = self.pick(number)
        if conn_id is not None:
            self.connected.remove(conn_id)
            self.lost.append(conn_id)
            self.perform(self.table.disconnected(conn_id, self.now_s))

    @rule()
    def process_gone(self) -> None:
        if self.lost:
            self.table.process_gone(self.lost.pop())

    @rule(transfer_id=ids, lease_s=st.sampled_from([1.0, 5.0, 100.0]))
    def reserve(self, transfer_id: bytes, lease_s: float) -> None:
        if transfer_id not in self.table.landings:
            self.ended.discard((Kind.LANDING, transfer_id))
        try:
            self.table.reserve(landing_spec(transfer_id, lease_s=lease_s), self.now_s)
        except (NoRoom, BadRequest):
            return

    @rule(transfer_id=ids, lease_s=st.sampled_from([1.0, 5.0, 100.0]))
    def open_outbox(self, transfer_id: bytes, lease_s: float) -> None:
        try:
            self.table.open_outbox(outbox_spec(transfer_id, lease_s=lease_s), self.now_s)
        except (NoRoom, BadRequest):
            return
        self.ended.discard((Kind.OUTBOX, transfer_id))
        assert transfer_id not in self.sending
        self.sending.add(transfer_id)

    @rule(transfer_id=ids)
    def cancel(self, transfer_id: bytes) -> None:
        self.perform(self.table.cancel(transfer_id, "x", self.now_s))

    @rule(transfer_id=ids)
    def accepted(self, transfer_id: bytes) -> None:
        self.table.landing_accepted(transfer_id)

    @rule(transfer_id=ids)
    def landed(self, transfer_id: bytes) -> None:
        self.perform(self.table.landing_complete(transfer_id, self.now_s))

    @rule(transfer_id=ids)
    def receiver_failed(self, transfer_id: bytes) -> None:
        self.perform(self.table.landing_failed(transfer_id, "link", self.now_s))

    @rule()
    def drop(self) -> None:
        if self.to_drop:
            self.table.landing_dropped(self.to_drop.pop(0))

    @rule(transfer_id=ids, error=st.sampled_from([None, "link"]))
    def sender_ended(self, transfer_id: bytes, error: str | None) -> None:
        if transfer_id in self.sending:
            self.sending.remove(transfer_id)
            self.perform(self.table.outbox_ended(transfer_id, error, self.now_s))

    @rule(transfer_id=ids, number=conns, what=st.sampled_from("arpxwl"), part=st.integers(0, 26))
    def engine_says(self, transfer_id: bytes, number: int, what: str, part: int) -> None:
        conn_id = self.pick(number)
        if conn_id is None:
            return
        match what:
            case "a":
                effects = self.table.attach(conn_id, transfer_id)
            case "r":
                effects = self.table.ready(conn_id, transfer_id, [(0, part)], self.now_s)
            case "p":
                effects = self.table.prefill_end(conn_id, transfer_id, 0, self.now_s)
            case "x":
                effects = self.table.abort(conn_id, transfer_id, "bug", self.now_s)
            case "w":
                effects = self.table.watch(conn_id, transfer_id)
            case _:
                effects = self.table.release(conn_id, transfer_id, self.now_s)
        self.perform(effects)

    @rule(step_s=st.sampled_from([0.5, 3.0, 10.0]))
    def time_passes(self, step_s: float) -> None:
        self.now_s += step_s
        self.perform(self.table.expire(self.now_s))
        for table in (self.table.landings, self.table.outboxes):
            for end in table.values():
                alive = end.state in MOVES and end.state is not State.CLAIMED
                assert not alive or end.lease_until_s > self.now_s

    @invariant()
    def rules_hold(self) -> None:
        self.table.check_invariants()

    def teardown(self) -> None:
        """When everybody has done their duty and gone, every block is back."""
        for conn_id in list(self.connected):
            self.connected.remove(conn_id)
            self.perform(self.table.disconnected(conn_id, self.now_s))
            self.table.process_gone(conn_id)
        self.now_s += 200
        self.perform(self.table.expire(self.now_s))
        while self.to_drop:
            self.table.landing_dropped(self.to_drop.pop())
        for transfer_id in self.sending:
            self.perform(self.table.outbox_ended(transfer_id, "closed", self.now_s))
        self.table.expire(self.now_s + 100)
        self.table.check_invariants()
        assert self.table.custody.num_blocks(Kind.LANDING) == 0
        assert self.table.custody.num_blocks(Kind.OUTBOX) == 0
        assert not self.table.landings
        assert not self.table.outboxes


TestTable = TableMachine.TestCase
TestTable.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
