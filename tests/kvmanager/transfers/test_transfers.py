"""The transfer table: what memory it gives to whom, and all its rules under random events."""

import contextlib
import dataclasses

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from transfer_cases import (
    BLOCK,
    IDS,
    TID,
    connected_table,  # noqa: F401
    landing_spec,
    outbox_spec,
    peer,
    used,
)

from kvmanager.agent.hand_offs import ArenaHandOffs
from kvmanager.transfers.blocks import BlockAllocator
from kvmanager.transfers.holds import PROMOTION, TRANSPORT, Kind
from kvmanager.transfers.records import (
    MOVES,
    BadRequest,
    CancelOutbox,
    DropLanding,
    Effect,
    ForwardReady,
    NoArenaRoom,
    OutcomeKnown,
    State,
    TellFailed,
    TellLanded,
)
from kvmanager.transfers.shared import TableLimits
from kvmanager.transfers.table import TransferTable


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
        table.landings.reserve(landing_spec(IDS[0], nbytes=20), 0)
        assert asked == []
        table.outboxes.open(outbox_spec(IDS[1], nbytes=60), 0)
        assert asked == [6]

    def test_without_enough_room_nothing_is_taken(self) -> None:
        allocator = BlockAllocator(8)
        others = allocator.allocate(6)
        table = TransferTable(allocator, BLOCK, make_room=lambda _: False)
        with pytest.raises(NoArenaRoom):
            table.landings.reserve(landing_spec(nbytes=30), 0)
        table.holds.check_invariants([], others)
        assert allocator.num_free == 2

    def test_a_promotion_holds_the_memory_whatever_time_passes(self) -> None:
        freed: list[object] = []
        table = TransferTable(BlockAllocator(8), BLOCK, on_freed=freed.append)
        table.connect(peer(1))
        landing = table.landings.reserve(landing_spec(), 0)
        table.landings.watch(1, TID)
        table.landings.complete(TID, 1)
        table.holds.hold(landing.key, PROMOTION)
        table.landings.release(1, TID, 2)
        table.landings.dropped(TID)
        table.expire(10_000)
        assert used(table) == 3
        assert freed == []
        table.holds.release(landing.key, PROMOTION)
        assert used(table) == 0
        assert freed == [landing.key]


class TestRoom:
    def test_arena_full(self, table: TransferTable) -> None:
        table.landings.reserve(landing_spec(nbytes=71), 0)
        with pytest.raises(NoArenaRoom):
            table.outboxes.open(outbox_spec(nbytes=1), 0)

    def test_landing_cap_leaves_room_for_outboxes(self) -> None:
        table = TransferTable(BlockAllocator(8), BLOCK, TableLimits(landing_bytes=40))
        table.landings.reserve(landing_spec(), 0)
        with pytest.raises(NoArenaRoom, match="30 of 40"):
            table.landings.reserve(landing_spec(IDS[1], nbytes=11), 0)
        table.landings.reserve(landing_spec(IDS[1], nbytes=10), 0)
        table.outboxes.open(outbox_spec(nbytes=40), 0)

    def test_room_is_what_is_free_within_the_cap(self) -> None:
        allocator = BlockAllocator(8)
        table = TransferTable(allocator, BLOCK, TableLimits(landing_bytes=45))
        rooms = [table.landings.room_blocks(allocator.num_free)]
        for number, nbytes in enumerate((1, 20)):
            table.landings.reserve(landing_spec(IDS[number], nbytes=nbytes), 0)
            rooms.append(table.landings.room_blocks(allocator.num_free))
        assert rooms == [4, 3, 1]
        assert table.landings.room_blocks(0) == 0
        uncapped = TransferTable(allocator, BLOCK)
        assert uncapped.landings.room_blocks(allocator.num_free) == 5

    def test_tenant_cap_counts_memory_until_it_is_free(self) -> None:
        table = TransferTable(BlockAllocator(8), BLOCK, TableLimits(tenant_landing_bytes=30))
        blue = dataclasses.replace(landing_spec(), tenant="blue")
        table.landings.reserve(blue, 0)
        table.cancel(TID, "x", 0)
        again = dataclasses.replace(blue, transfer_id=IDS[1])
        with pytest.raises(NoArenaRoom, match="blue"):
            table.landings.reserve(again, 0)
        table.landings.reserve(landing_spec(IDS[2]), 0)
        table.landings.dropped(TID)
        table.landings.reserve(again, 0)

    def test_tenant_cap_is_in_bytes_of_whole_blocks(self) -> None:
        blue = dataclasses.replace(landing_spec(), tenant="blue")
        again = dataclasses.replace(blue, transfer_id=IDS[1])
        for cap, fits in ((59, False), (60, True)):
            table = TransferTable(BlockAllocator(8), BLOCK, TableLimits(tenant_landing_bytes=cap))
            table.landings.reserve(blue, 0)
            with (
                contextlib.nullcontext()
                if fits
                else pytest.raises(NoArenaRoom, match="holds 30 of")
            ):
                table.landings.reserve(again, 0)

    def test_a_transfer_has_at_least_one_byte(self, table: TransferTable) -> None:
        with pytest.raises(BadRequest, match="of 0 bytes"):
            table.landings.reserve(landing_spec(nbytes=0), 0)
        with pytest.raises(BadRequest, match="of 0 bytes"):
            table.outboxes.open(outbox_spec(nbytes=0), 0)
        assert table.landings.reserve(landing_spec(nbytes=1), 0).runs

    def test_a_lease_may_be_shorter_than_a_second(self, table: TransferTable) -> None:
        assert table.landings.reserve(landing_spec(lease_s=0.5), 2).lease_until_s == 2.5

    @pytest.mark.parametrize("lease_s", [0, -1, float("nan")])
    def test_impossible_leases(self, table: TransferTable, lease_s: float) -> None:
        with pytest.raises(BadRequest):
            table.landings.reserve(landing_spec(lease_s=lease_s), 0)
        assert used(table) == 0

    def test_endless_lease_is_shortened(self, table: TransferTable) -> None:
        landing = table.landings.reserve(landing_spec(lease_s=float("inf")), 0)
        assert landing.lease_until_s == 3600

    def test_same_id_twice(self, table: TransferTable) -> None:
        table.landings.reserve(landing_spec(), 0)
        with pytest.raises(BadRequest):
            table.landings.reserve(landing_spec(), 0)

    def test_outbox_is_opened_again_only_when_its_memory_is_back(
        self, table: TransferTable
    ) -> None:
        table.outboxes.open(outbox_spec(), 0)
        table.outboxes.attach(1, TID, 1)
        with pytest.raises(BadRequest):
            table.outboxes.open(outbox_spec(), 0)
        table.cancel(TID, "x", 0)
        table.outboxes.ended(TID, "cancelled", 0)
        with pytest.raises(BadRequest):
            table.outboxes.open(outbox_spec(), 0)
        table.outboxes.release(1, TID, 1)
        table.outboxes.release(2, TID, 1)
        assert table.outboxes.open(outbox_spec(), 1).state is State.OPEN


class TestForgotten:
    """News of transfers and connections that the table does not know, or not any more."""

    def test_changes_nothing(self, table: TransferTable) -> None:
        table.landings.accepted(TID)
        table.landings.dropped(TID)
        assert table.landings.complete(TID, 1) == []
        assert table.landings.failed(TID, "link", 1) == []
        assert table.outboxes.ended(TID, None, 1) == []
        assert table.cancel(TID, "x", 1) == []
        assert table.landings.release(1, TID, 1) == []
        assert table.outboxes.abort(1, TID, 1, "x", 1) == []
        assert table.outboxes.prefill_end(1, TID, 1, 1) == []
        assert table.disconnected(99, 1) == []
        table.process_gone(99)
        table.check_invariants()


class TestInvariants:
    """They are what the random test relies on: each must notice that it is broken."""

    def test_a_live_transfer_without_memory(self, table: TransferTable) -> None:
        landing = table.landings.reserve(landing_spec(), 0)
        table.holds.end_transfer(landing.key, 0)
        table.holds.release(landing.key, TRANSPORT)
        with pytest.raises(AssertionError, match="lost its blocks"):
            table.check_invariants()

    def test_more_landings_than_their_cap(self, table: TransferTable) -> None:
        table.landings.reserve(landing_spec(), 0)
        table.books.limits = TableLimits(landing_bytes=30)
        table.check_invariants()
        table.books.limits = TableLimits(landing_bytes=29)
        with pytest.raises(AssertionError):
            table.check_invariants()


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
        self.hand_offs = ArenaHandOffs(self, lambda: self.now_s)
        self.ended: set[tuple[Kind, bytes]] = set()

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case DropLanding(transfer_id, reason):
                    self.hand_offs.landing_over(transfer_id, reason)
                    self.to_drop.append(transfer_id)
                case CancelOutbox(transfer_id, reason) if transfer_id in self.hand_offs:
                    self.hand_offs.cancel(transfer_id, reason)
                case CancelOutbox(transfer_id):
                    assert transfer_id in self.sending, "cancel of what the sender does not have"
                case ForwardReady(transfer_id, ranges) if transfer_id in self.hand_offs:
                    self.hand_offs.ranges_ready(transfer_id, ranges)
                case ForwardReady(transfer_id, ranges):
                    assert transfer_id in self.sending
                    assert all(o >= 0 and n > 0 and o + n <= 25 for o, n in ranges)
                case TellLanded(conn_id) | TellFailed(conn_id):
                    assert conn_id in self.connected, "tells a connection that is lost"
                case OutcomeKnown(key):
                    assert key not in self.ended, "ended twice"
                    self.ended.add(key)

    # What a hand-off inside the agent says of both ends.

    def landing_accepted(self, transfer_id: bytes) -> None:
        self.table.landings.accepted(transfer_id)

    def landing_complete(self, transfer_id: bytes) -> None:
        self.perform(self.table.landings.complete(transfer_id, self.now_s))
        landing = self.table.landings.records[transfer_id]
        assert landing.state in (State.LANDED, State.CLAIMED)
        assert self.table.outboxes.records[transfer_id].is_filled

    def landing_failed(self, transfer_id: bytes, reason: str) -> None:
        self.perform(self.table.landings.failed(transfer_id, reason, self.now_s))

    def landing_dropped(self, transfer_id: bytes) -> None:
        raise AssertionError("only the receiver drops landings")

    def outbox_ended(self, transfer_id: bytes, error: str | None) -> None:
        self.perform(self.table.outboxes.ended(transfer_id, error, self.now_s))

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
        if transfer_id not in self.table.landings.records:
            self.ended.discard((Kind.LANDING, transfer_id))
        try:
            self.table.landings.reserve(landing_spec(transfer_id, lease_s=lease_s), self.now_s)
        except (NoArenaRoom, BadRequest):
            return

    @rule(transfer_id=ids, lease_s=st.sampled_from([1.0, 5.0, 100.0]))
    def open_outbox(self, transfer_id: bytes, lease_s: float) -> None:
        try:
            self.table.outboxes.open(outbox_spec(transfer_id, lease_s=lease_s), self.now_s)
        except (NoArenaRoom, BadRequest):
            return
        self.ended.discard((Kind.OUTBOX, transfer_id))
        assert transfer_id not in self.sending
        self.hand_offs.forget(transfer_id)
        self.sending.add(transfer_id)

    @rule(transfer_id=ids, lease_s=st.sampled_from([1.0, 5.0, 100.0]))
    def hand_off(self, transfer_id: bytes, lease_s: float) -> None:
        """Open an outbox on the landing's memory, as far as no sender was admitted to it."""
        landing = self.table.landings.records.get(transfer_id)
        if landing is None or landing.state is not State.RESERVED:
            return
        num_free = self.table.holds.num_blocks(Kind.OUTBOX)
        try:
            spec = outbox_spec(transfer_id, lease_s=lease_s)
            outbox = self.table.outboxes.open(spec, self.now_s, landing)
        except BadRequest:
            return
        assert self.table.holds.num_blocks(Kind.OUTBOX) == num_free, "it has no memory of its own"
        assert outbox.runs == landing.runs
        self.ended.discard((Kind.OUTBOX, transfer_id))
        self.hand_offs.begin(outbox)

    @rule(transfer_id=ids)
    def cancel(self, transfer_id: bytes) -> None:
        self.perform(self.table.cancel(transfer_id, "x", self.now_s))

    @rule(transfer_id=ids)
    def accepted(self, transfer_id: bytes) -> None:
        self.table.landings.accepted(transfer_id)

    @rule(transfer_id=ids)
    def landed(self, transfer_id: bytes) -> None:
        outbox = self.table.outboxes.records.get(transfer_id)
        if outbox is not None and outbox.fills_landing and outbox.state is State.OPEN:
            return  # its engine was let in as the sender, so nobody else can be
        self.perform(self.table.landings.complete(transfer_id, self.now_s))

    @rule(transfer_id=ids)
    def receiver_failed(self, transfer_id: bytes) -> None:
        self.perform(self.table.landings.failed(transfer_id, "link", self.now_s))

    @rule()
    def drop(self) -> None:
        if self.to_drop:
            self.table.landings.dropped(self.to_drop.pop(0))

    @rule(transfer_id=ids, error=st.sampled_from([None, "link"]))
    def sender_ended(self, transfer_id: bytes, error: str | None) -> None:
        if transfer_id in self.sending:
            self.sending.remove(transfer_id)
            self.perform(self.table.outboxes.ended(transfer_id, error, self.now_s))

    @rule(
        transfer_id=ids,
        number=conns,
        what=st.sampled_from("arpxowl"),
        part=st.integers(0, 26),
        age=st.integers(0, 1),
    )
    def engine_says(self, transfer_id: bytes, number: int, what: str, part: int, age: int) -> None:
        conn_id = self.pick(number)
        if conn_id is None:
            return
        outbox = self.table.outboxes.records.get(transfer_id)
        attempt = (outbox.attempt if outbox is not None else 1) - age
        before = repr(outbox)
        landings, outboxes = self.table.landings, self.table.outboxes
        match what:
            case "a":
                effects = outboxes.attach(conn_id, transfer_id, attempt)
            case "r":
                ranges = [(0, part)]
                effects = outboxes.ranges_ready(conn_id, transfer_id, attempt, ranges, self.now_s)
            case "p":
                effects = outboxes.prefill_end(conn_id, transfer_id, attempt, self.now_s)
            case "x":
                effects = outboxes.abort(conn_id, transfer_id, attempt, "bug", self.now_s)
            case "w":
                effects = landings.watch(conn_id, transfer_id)
            case "o":
                outboxes.release(conn_id, transfer_id, attempt)
                effects = []
            case _:
                effects = landings.release(conn_id, transfer_id, self.now_s)
        assert repr(outbox) == before or not age, (
            "what is said of an earlier attempt changes nothing"
        )
        self.perform(effects)

    @rule(step_s=st.sampled_from([0.5, 3.0, 10.0]))
    def time_passes(self, step_s: float) -> None:
        self.now_s += step_s
        self.perform(self.table.expire(self.now_s))
        for table in (self.table.landings.records, self.table.outboxes.records):
            for end in table.values():
                alive = end.state in MOVES and end.state is not State.CLAIMED
                assert not alive or end.lease_until_s > self.now_s

    @rule(transfer_id=ids, number=conns)
    def engine_fills(self, transfer_id: bytes, number: int) -> None:
        """All that is left, by a worker that may fill it."""
        conn_id = self.pick(number)
        outbox = self.table.outboxes.records.get(transfer_id)
        if conn_id is not None and outbox is not None:
            outboxes = self.table.outboxes
            self.perform(
                outboxes.ranges_ready(conn_id, transfer_id, outbox.attempt, [(0, 25)], self.now_s)
            )

    @invariant()
    def rules_hold(self) -> None:
        self.table.check_invariants()
        for transfer_id, outbox in self.table.outboxes.records.items():
            landing = self.table.landings.records.get(transfer_id)
            if outbox.fills_landing and outbox.state is State.OPEN:
                assert landing is not None
                assert landing.state is State.RECEIVING, "one end outlives the other"
            # An engine that may still write keeps the blocks from everybody else.
            if outbox.fills_landing and self.table.holds.holders(outbox.key):
                assert (Kind.LANDING, transfer_id) in self.table.holds

    def teardown(self) -> None:
        """When everybody has done their duty and gone, every block is back."""
        for conn_id in list(self.connected):
            self.connected.remove(conn_id)
            self.perform(self.table.disconnected(conn_id, self.now_s))
            self.table.process_gone(conn_id)
        self.now_s += 200
        self.perform(self.table.expire(self.now_s))
        while self.to_drop:
            self.table.landings.dropped(self.to_drop.pop())
        for transfer_id in self.sending:
            self.perform(self.table.outboxes.ended(transfer_id, "closed", self.now_s))
        self.table.expire(self.now_s + 100)
        self.table.check_invariants()
        assert self.table.holds.num_blocks(Kind.LANDING) == 0
        assert self.table.holds.num_blocks(Kind.OUTBOX) == 0
        assert not self.table.landings.records
        assert not self.table.outboxes.records


TestTable = TableMachine.TestCase
TestTable.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
