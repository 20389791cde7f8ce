"""The transfer table's outboxes: who fills them, and whom their memory waits for."""

import dataclasses

import pytest
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

from kvmanager.transfers.blocks import BlockAllocator
from kvmanager.transfers.holds import Kind
from kvmanager.transfers.records import (
    MAX_MARKS,
    BadRequest,
    CancelOutbox,
    DropLanding,
    ForwardReady,
    GaveUpOnEngine,
    OutcomeKnown,
    RecordPrefillEnd,
    State,
    TellFailed,
)
from kvmanager.transfers.table import TransferTable


class TestOutbox:
    def test_whole_life(self, table: TransferTable) -> None:
        outbox = table.outboxes.open(outbox_spec(), 0)
        assert table.outboxes.attach(1, TID, 1) == []
        assert table.outboxes.ranges_ready(1, TID, 1, [(0, 10), (20, 5)], 1) == [
            ForwardReady(TID, [(0, 10), (20, 5)])
        ]
        assert table.outboxes.ranges_ready(1, TID, 1, [(5, 20)], 1) == [
            ForwardReady(TID, [(10, 10)])
        ]
        assert table.outboxes.prefill_end(1, TID, 1, 2) == [RecordPrefillEnd(TID)]
        assert table.outboxes.prefill_end(1, TID, 1, 3) == []
        assert table.outboxes.ended(TID, None, 4) == [OutcomeKnown(outbox.key)]
        assert used(table, Kind.OUTBOX) == 0
        assert outbox.state is State.COMPLETE

    def test_the_slowest_rank_says_how_long_the_prefill_took(self, table: TransferTable) -> None:
        for rank, conn_id in enumerate((5, 6)):
            table.connect(peer(conn_id, "tp", tp=(rank, 2)))
        outbox = table.outboxes.open(outbox_spec(), 0)
        for conn_id, prefill_s in ((5, 1.5), (6, 1.25)):
            table.outboxes.attach(conn_id, TID, 1)
            table.outboxes.prefill_end(conn_id, TID, 1, 1, prefill_s)
        assert outbox.prefill_s == 1.5

    def test_the_end_of_a_prefill_behind_the_end_of_its_transfer_has_its_time(
        self, table: TransferTable
    ) -> None:
        outbox = table.outboxes.open(outbox_spec(), 0)
        table.outboxes.attach(1, TID, 1)
        table.outboxes.ended(TID, None, 4)
        assert table.outboxes.prefill_end(1, TID, 1, 5, 1.5) == []
        assert table.outboxes.prefill_end(3, TID, 1, 5, 9.0) == []
        assert (outbox.prefill_s, outbox.prefill_end_s) == (1.5, None)

    def test_a_mark_is_due_with_every_sixteenth(self, table: TransferTable) -> None:
        outbox = table.outboxes.open(outbox_spec(nbytes=32), 0)
        due = []
        for start in range(32):
            table.outboxes.ranges_ready(1, TID, 1, [(start, 1)], 1)
            due.append(outbox.is_mark_due)
            if due[-1]:
                outbox.marks.append((1.0, outbox.ready.total, 0))
        assert due == [False, True] * MAX_MARKS
        assert not outbox.is_mark_due

    def test_every_rank_must_end_its_prefill(self, table: TransferTable) -> None:
        table.connect(peer(5, "tp", tp=(0, 2)))
        table.connect(peer(6, "tp", tp=(1, 2)))
        table.outboxes.open(outbox_spec(), 0)
        table.outboxes.attach(5, TID, 1)
        table.outboxes.attach(6, TID, 1)
        assert table.outboxes.prefill_end(5, TID, 1, 1) == []
        assert table.outboxes.prefill_end(5, TID, 1, 1) == []
        assert table.outboxes.prefill_end(6, TID, 1, 1) == [RecordPrefillEnd(TID)]

    def test_every_pipeline_stage_must_end_its_prefill(self, table: TransferTable) -> None:
        """Two stages of two ranks: four workers, in whatever order they end."""
        workers = {5: 3, 6: 0, 7: 2, 8: 1}
        for conn_id, rank in workers.items():
            table.connect(peer(conn_id, "pp", tp=(rank, 4)))
        table.outboxes.open(outbox_spec(), 0)
        for conn_id in workers:
            table.outboxes.attach(conn_id, TID, 1)
        ended = [table.outboxes.prefill_end(conn_id, TID, 1, 1) for conn_id in workers]
        assert ended == [[], [], [], [RecordPrefillEnd(TID)]]

    @pytest.mark.parametrize("bad", [(0, 26), (25, 1), (1 << 60, 1), (-1, 2), (3, -1)])
    def test_range_outside_fails_the_transfer(
        self, table: TransferTable, bad: tuple[int, int]
    ) -> None:
        outbox = table.outboxes.open(outbox_spec(), 0)
        effects = table.outboxes.ranges_ready(1, TID, 1, [(0, 1), bad], 1)
        assert any(isinstance(effect, CancelOutbox) for effect in effects)
        assert any(isinstance(effect, TellFailed) for effect in effects)
        assert outbox.state is State.FAILED

    def test_memory_waits_for_whoever_might_be_about_to_write(self, table: TransferTable) -> None:
        table.outboxes.open(outbox_spec(), 0)
        effects = table.cancel(TID, "client gone", 1)
        told = {effect.conn_id for effect in effects if isinstance(effect, TellFailed)}
        assert told == {1, 2, 3}
        table.outboxes.ended(TID, "cancelled", 1)
        for conn_id in told:
            assert used(table, Kind.OUTBOX) == 3
            table.outboxes.release(conn_id, TID, 1)
        assert used(table, Kind.OUTBOX) == 0

    def test_two_instances_never_write_into_one_outbox(self, table: TransferTable) -> None:
        table.outboxes.open(outbox_spec(), 0)
        assert table.outboxes.attach(1, TID, 1) == table.outboxes.attach(2, TID, 1) == []
        (told,) = table.outboxes.attach(3, TID, 1)
        assert isinstance(told, TellFailed)
        assert told.conn_id == 3
        assert "another engine" in told.reason
        assert table.outboxes.ranges_ready(3, TID, 1, [(0, 5)], 1) == [told]
        assert table.holds.holders((Kind.OUTBOX, TID)) == {1, 2}

    def test_only_workers_with_its_layout_that_were_connected_may_fill_it(
        self, table: TransferTable
    ) -> None:
        table.connect(dataclasses.replace(peer(7, "a"), role="scheduler"))
        table.connect(dataclasses.replace(peer(8, "a"), fingerprint=b"g" * 32))
        table.connect(peer(9, "a"))
        table.disconnected(9, 0)
        table.outboxes.open(outbox_spec(), 0)
        table.connect(peer(10, "a"))
        assert table.holds.holders((Kind.OUTBOX, TID)) == {1, 2, 3}
        for conn_id, reason in ((7, "is older"), (8, "another KV layout"), (10, "is older")):
            (told,) = table.outboxes.attach(conn_id, TID, 1)
            assert isinstance(told, TellFailed)
            assert reason in told.reason
        assert table.outboxes.attach(1, TID, 1) == []

    def test_memory_waits_for_the_sender_and_every_engine(self, table: TransferTable) -> None:
        table.outboxes.open(outbox_spec(), 0)
        table.outboxes.attach(1, TID, 1)
        table.outboxes.attach(2, TID, 1)
        effects = table.cancel(TID, "client gone", 1)
        assert effects == [
            CancelOutbox(TID, "client gone"),
            OutcomeKnown((Kind.OUTBOX, TID)),
            TellFailed(1, TID, "client gone", 1),
            TellFailed(2, TID, "client gone", 1),
        ]
        table.outboxes.release(1, TID, 1)
        table.outboxes.ended(TID, "cancelled", 2)
        assert used(table, Kind.OUTBOX) == 3
        table.outboxes.abort(2, TID, 1, "as you wish", 3)
        assert used(table, Kind.OUTBOX) == 0
        assert table.outboxes.records[TID].error == "client gone"

    def test_engine_that_does_not_answer_is_dropped_after_the_drain_time(
        self, table: TransferTable
    ) -> None:
        table.outboxes.open(outbox_spec(), 0)
        table.outboxes.attach(1, TID, 1)
        table.cancel(TID, "x", 1)
        assert table.expire(30.9) == []
        assert table.expire(31) == [GaveUpOnEngine((Kind.OUTBOX, TID))]
        assert used(table, Kind.OUTBOX) == 3, "the sender is never dropped by time"
        table.outboxes.ended(TID, "cancelled", 101)
        assert used(table, Kind.OUTBOX) == 0

    def test_what_is_over_stays_known_for_as_long_as_its_memory_is_held(
        self, table: TransferTable
    ) -> None:
        table.outboxes.open(outbox_spec(), 0)
        table.cancel(TID, "x", 0)
        table.expire(1000)
        with pytest.raises(BadRequest, match="exists"):
            table.outboxes.open(outbox_spec(), 1000)
        table.outboxes.ended(TID, "cancelled", 1000)
        table.expire(1000)
        assert TID not in table.outboxes.records

    def test_engine_death_fails_what_is_not_filled(self, table: TransferTable) -> None:
        table.outboxes.open(outbox_spec(), 0)
        table.outboxes.open(outbox_spec(IDS[1]), 0)
        table.outboxes.ranges_ready(1, TID, 1, [(0, 24)], 1)
        table.outboxes.ranges_ready(1, IDS[1], 2, [(0, 25)], 1)
        table.outboxes.attach(2, TID, 1)
        effects = table.disconnected(1, 2)
        assert CancelOutbox(TID, "its engine is lost") in effects
        assert TellFailed(2, TID, "its engine is lost", 1) in effects
        assert table.outboxes.records[IDS[1]].state is State.OPEN
        table.process_gone(1)
        table.outboxes.release(2, TID, 1)
        table.outboxes.ended(TID, "cancelled", 3)
        table.outboxes.ended(IDS[1], None, 3)
        assert used(table, Kind.OUTBOX) == 0

    def test_its_lease_ends_whatever_happens(self, table: TransferTable) -> None:
        outbox = table.outboxes.open(outbox_spec(lease_s=10), 5)
        table.outboxes.attach(1, TID, outbox.attempt)
        assert table.expire(14.9) == []
        effects = table.expire(15)
        assert effects[0] == CancelOutbox(TID, "its lease ended")
        assert outbox.state is State.EXPIRED

    def test_empty_ranges_change_nothing(self, table: TransferTable) -> None:
        outbox = table.outboxes.open(outbox_spec(), 0)
        assert table.outboxes.ranges_ready(1, TID, 1, [(5, 0), (25, 0)], 1) == []
        assert outbox.state is State.OPEN

    def test_what_an_engine_says_behind_the_end_is_not_forwarded(
        self, table: TransferTable
    ) -> None:
        table.outboxes.open(outbox_spec(), 0)
        table.outboxes.attach(1, TID, 1)
        table.cancel(TID, "gone", 1)
        assert table.outboxes.ranges_ready(1, TID, 1, [(0, 5)], 2) == [], "it was told already"
        assert table.outboxes.prefill_end(1, TID, 1, 2) == []

    def test_late_engine_is_told(self, table: TransferTable) -> None:
        table.outboxes.open(outbox_spec(), 0)
        table.cancel(TID, "gone", 1)
        for effects in (
            table.outboxes.attach(1, TID, 1),
            table.outboxes.ranges_ready(1, TID, 1, [(0, 1)], 1),
        ):
            assert effects == [TellFailed(1, TID, "the transfer is over: cancelled (gone)", 1)]

    def test_an_engine_whose_connection_is_lost_may_write_until_the_drain_time_is_over(
        self, table: TransferTable
    ) -> None:
        table.outboxes.open(outbox_spec(lease_s=1000), 0)
        table.disconnected(1, 10)
        table.expire(39.9)
        assert table.holds.holders((Kind.OUTBOX, TID)) == {1, 2, 3}
        table.expire(40)
        assert table.holds.holders((Kind.OUTBOX, TID)) == {2, 3}

    def test_an_engine_whose_process_is_gone_is_not_waited_for_again(
        self, table: TransferTable
    ) -> None:
        table.disconnected(1, 0)
        table.process_gone(1)
        table.outboxes.open(outbox_spec(), 1)
        assert table.holds.holders((Kind.OUTBOX, TID)) == {2, 3}
        table.check_invariants()

    def test_an_engine_that_let_go_may_leave(self, table: TransferTable) -> None:
        outbox = table.outboxes.open(outbox_spec(), 0)
        table.outboxes.attach(1, TID, 1)
        table.outboxes.attach(2, TID, 1)
        table.outboxes.release(1, TID, 1)
        table.check_invariants()
        assert table.disconnected(1, 1) == []
        assert outbox.state is State.OPEN

    def test_sender_failure(self, table: TransferTable) -> None:
        outbox = table.outboxes.open(outbox_spec(), 0)
        table.outboxes.attach(1, TID, 1)
        assert table.outboxes.ended(TID, "refused", 1) == [
            OutcomeKnown(outbox.key),
            TellFailed(1, TID, "refused", 1),
            TellFailed(2, TID, "refused", 1),
        ]
        assert outbox.state is State.FAILED

    def test_both_ends_of_one_transfer_in_one_agent(self, table: TransferTable) -> None:
        table.landings.reserve(landing_spec(), 0)
        table.outboxes.open(outbox_spec(), 0)
        table.outboxes.attach(1, TID, 1)
        table.landings.watch(3, TID)
        effects = table.cancel(TID, "x", 1)
        assert {type(effect) for effect in effects} == {
            DropLanding,
            CancelOutbox,
            OutcomeKnown,
            TellFailed,
        }
        table.landings.dropped(TID)
        table.outboxes.ended(TID, "cancelled", 2)
        table.outboxes.release(1, TID, 1)
        table.outboxes.release(2, TID, 1)
        assert used(table) == used(table, Kind.OUTBOX) == 0


class TestAttempts:
    """An outbox that is opened again: what is said of the first opening concerns nobody."""

    @pytest.fixture
    def again(self, table: TransferTable) -> TransferTable:
        """The second opening is for engine b; engine a was told that the first one is over."""
        table.outboxes.open(outbox_spec(), 0)
        table.outboxes.attach(1, TID, 1)
        table.cancel(TID, "x", 0)
        table.outboxes.ended(TID, "cancelled", 0)
        table.outboxes.release(1, TID, 1)
        table.outboxes.release(2, TID, 1)
        assert table.outboxes.open(outbox_spec(), 0).attempt == 2
        return table

    def test_a_late_ready_is_not_taken_for_the_new_bytes(self, again: TransferTable) -> None:
        (told,) = again.outboxes.ranges_ready(1, TID, 1, [(0, 10)], 3)
        assert told == TellFailed(1, TID, "no such transfer at this agent", 1)
        assert again.outboxes.records[TID].ready.total == 0

    def test_a_late_attach_does_not_keep_the_new_engine_out(self, again: TransferTable) -> None:
        assert isinstance(again.outboxes.attach(1, TID, 1)[0], TellFailed)
        assert again.outboxes.attach(3, TID, 2) == []

    def test_a_late_abort_does_not_end_it(self, again: TransferTable) -> None:
        assert again.outboxes.abort(1, TID, 1, "prefill ended early", 3) == []
        assert again.outboxes.records[TID].state is State.OPEN

    def test_a_late_prefill_end_is_not_the_new_one(self, again: TransferTable) -> None:
        again.outboxes.attach(3, TID, 2)
        assert again.outboxes.prefill_end(3, TID, 1, 3) == []
        assert again.outboxes.records[TID].prefill_end_s is None

    def test_a_late_release_leaves_the_new_memory_held(self, again: TransferTable) -> None:
        again.outboxes.release(1, TID, 1)
        assert again.holds.holders((Kind.OUTBOX, TID)) == {1, 2, 3}

    def test_numbers_do_not_start_again_when_the_first_one_is_forgotten(
        self, table: TransferTable
    ) -> None:
        table.outboxes.open(outbox_spec(), 0)
        table.outboxes.attach(1, TID, 1)
        table.outboxes.ranges_ready(1, TID, 1, [(0, 25)], 0)
        table.outboxes.ended(TID, None, 0)
        table.expire(61)
        assert not table.outboxes.records
        assert table.outboxes.open(outbox_spec(), 61).attempt > 1

    def test_numbers_do_not_start_again_with_the_agent(self) -> None:
        before, after = (TransferTable(BlockAllocator(8), BLOCK) for _ in range(2))
        last = [before.outboxes.open(outbox_spec(i, nbytes=1), 5.0).attempt for i in IDS][-1]
        assert last == before.outboxes.last_attempt == 5_000_003
        assert after.outboxes.open(outbox_spec(), 5.1).attempt > last


class TestOthersFill:
    def test_the_abort_of_an_engine_that_came_second_does_not_end_it(
        self, table: TransferTable
    ) -> None:
        outbox = table.outboxes.open(outbox_spec(), 0)
        table.outboxes.attach(1, TID, 1)
        assert table.outboxes.abort(3, TID, 1, "its client is gone", 1) == []
        assert outbox.state is State.OPEN
        assert table.outboxes.abort(2, TID, 1, "its client is gone", 1) != []
        assert outbox.state is State.FAILED

    def test_the_prefill_end_of_an_engine_that_came_second_does_not_count(
        self, table: TransferTable
    ) -> None:
        table.outboxes.open(outbox_spec(), 0)
        table.outboxes.attach(1, TID, 1)
        assert table.outboxes.prefill_end(3, TID, 1, 1) == []
        assert table.outboxes.prefill_end(1, TID, 1, 2) == [RecordPrefillEnd(TID)]

    def test_an_engine_that_reconnected_may_still_give_it_up(self, table: TransferTable) -> None:
        outbox = table.outboxes.open(outbox_spec(), 0)
        table.disconnected(1, 1)
        table.connect(peer(4, "a"))
        assert table.outboxes.abort(4, TID, 1, "opened before this connection", 1) != []
        assert outbox.state is State.FAILED
