"""The transfer table's outboxes: who fills them, and whom their memory waits for."""

import dataclasses

import pytest
from transfer_cases import (
    IDS,
    TID,
    connected_table,  # noqa: F401
    landing_spec,
    outbox_spec,
    peer,
    used,
)

from kvmanager.custody import Kind
from kvmanager.transfer_records import (
    CancelOutbox,
    DropLanding,
    Ended,
    ForwardReady,
    GaveUpOnEngine,
    RecordPrefillEnd,
    State,
    TellFailed,
)
from kvmanager.transfers import TransferTable


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
