"""The transfer table's landings: who gets what arrived, until when, and what becomes of it."""

import dataclasses

import pytest
from transfer_cases import (
    IDS,
    TID,
    connected_table,  # noqa: F401
    landing_spec,
    peer,
    used,
)

from kvmanager.load_times import LoadTimes
from kvmanager.transfers.records import (
    DropLanding,
    OutcomeKnown,
    State,
    TellFailed,
    TellLanded,
    UnknownTransfer,
)
from kvmanager.transfers.table import TransferTable


class TestLanding:
    def test_whole_life(self, table: TransferTable) -> None:
        landing = table.landings.reserve(landing_spec(), 0)
        assert sum(length for _, length in landing.runs) == 3
        assert table.landings.watch(1, TID) == []
        table.landings.accepted(TID)
        assert landing.state is State.RECEIVING
        assert table.landings.complete(TID, 1) == [TellLanded(1, TID), OutcomeKnown(landing.key)]
        assert table.landings.release(1, TID, 2) == [DropLanding(TID, "released")]
        assert used(table) == 3, "the receiver has not let go yet"
        table.landings.dropped(TID)
        assert used(table) == 0
        assert table.landings.records[TID].state is State.RELEASED
        table.expire(60.9)
        assert TID in table.landings.records, "its report may still be asked for"
        table.expire(61)
        assert TID not in table.landings.records

    def test_its_engine_says_how_its_load_went(self, table: TransferTable) -> None:
        landing = table.landings.reserve(landing_spec(), 0)
        table.landings.watch(1, TID)
        table.landings.loaded(1, TID, LoadTimes(1.0, 1.0, 1.0))
        assert landing.times is None, "nobody owns it yet"
        table.landings.complete(TID, 1)
        table.landings.release(1, TID, 2)
        table.landings.loaded(3, TID, LoadTimes(9.0, 9.0, 9.0))
        assert landing.times is None, "another instance"
        first, last = LoadTimes(0.1, 0.2, 0.3), LoadTimes(0.1, 0.3, 0.3)
        for times in (first, last, first):
            table.landings.loaded(2, TID, times)
        assert landing.times == last, "the rank that was last counts"
        table.landings.loaded(1, IDS[1], first)  # unknown: ignored

    def test_watched_after_it_landed(self, table: TransferTable) -> None:
        table.landings.reserve(landing_spec(), 0)
        table.landings.complete(TID, 1)
        assert table.landings.watch(3, TID) == [TellLanded(3, TID)]
        assert table.landings.watch(3, TID) == [TellLanded(3, TID)]

    def test_claimed_has_no_lease_and_cancel_does_not_touch_it(self, table: TransferTable) -> None:
        table.landings.reserve(landing_spec(), 0)
        table.landings.watch(1, TID)
        table.landings.complete(TID, 1)
        assert table.cancel(TID, "client gone", 2) == []
        assert table.expire(1000) == []
        assert used(table) == 3
        assert table.landings.records[TID].state is State.CLAIMED

    def test_only_one_engine_gets_it(self, table: TransferTable) -> None:
        table.landings.reserve(landing_spec(), 0)
        table.landings.watch(1, TID)
        (told,) = table.landings.watch(3, TID)
        assert isinstance(told, TellFailed)
        assert "another engine" in told.reason

    def test_release_by_another_instance_is_ignored(self, table: TransferTable) -> None:
        table.landings.reserve(landing_spec(), 0)
        table.landings.watch(1, TID)
        table.landings.complete(TID, 1)
        assert table.landings.release(3, TID, 2) == []
        assert table.landings.release(2, TID, 2) == [DropLanding(TID, "released")]

    def test_release_of_what_another_connection_waits_for_is_ignored(
        self, table: TransferTable
    ) -> None:
        landing = table.landings.reserve(landing_spec(), 0)
        assert table.landings.release(1, TID, 1) == [], "nobody waits for it"
        table.landings.watch(1, TID)
        assert table.landings.release(2, TID, 1) == []
        assert landing.state is State.RESERVED
        assert landing.watchers == {1}

    def test_a_lost_connection_gives_up_its_own_landings_and_no_others(
        self, table: TransferTable
    ) -> None:
        theirs, ours = (
            table.landings.reserve(landing_spec(), 0),
            table.landings.reserve(landing_spec(IDS[1]), 0),
        )
        for conn_id, transfer_id in ((3, TID), (1, IDS[1])):
            table.landings.watch(conn_id, transfer_id)
            table.landings.complete(transfer_id, 1)
        assert table.disconnected(1, 2) == [DropLanding(IDS[1], "released")]
        assert (theirs.state, ours.state) == (State.CLAIMED, State.RELEASED)

    def test_release_before_it_landed_cancels(self, table: TransferTable) -> None:
        landing = table.landings.reserve(landing_spec(), 0)
        table.landings.watch(1, TID)
        effects = table.landings.release(1, TID, 1)
        assert DropLanding(TID, "given up by its engine") in effects
        assert landing.state is State.CANCELLED

    def test_lease_ends_whatever_happens(self, table: TransferTable) -> None:
        landing = table.landings.reserve(landing_spec(lease_s=5), 0)
        table.landings.watch(1, TID)
        table.landings.accepted(TID)
        assert table.expire(4.9) == []
        assert table.expire(5) == [
            DropLanding(TID, "its lease ended"),
            OutcomeKnown(landing.key),
            TellFailed(1, TID, "its lease ended"),
        ]
        table.landings.dropped(TID)
        assert used(table) == 0

    def test_landed_but_never_claimed_expires_too(self, table: TransferTable) -> None:
        table.landings.reserve(landing_spec(lease_s=5), 0)
        table.landings.complete(TID, 1)
        assert table.expire(5) == [DropLanding(TID, "its lease ended")]

    def test_renew(self, table: TransferTable) -> None:
        table.landings.reserve(landing_spec(lease_s=5), 0)
        assert table.renew(TID, 7, now_s=4) == 7
        assert table.expire(10.9) == []
        assert table.expire(11) != []
        with pytest.raises(UnknownTransfer):
            table.renew(TID, 5, now_s=12)

    def test_failure_is_told_to_the_watcher(self, table: TransferTable) -> None:
        table.landings.reserve(landing_spec(), 0)
        table.landings.watch(1, TID)
        assert TellFailed(1, TID, "link lost") in table.landings.failed(TID, "link lost", 1)
        assert table.landings.complete(TID, 2) == [], "too late"
        (told,) = table.landings.watch(3, TID)
        assert told == TellFailed(3, TID, "the transfer is over: failed (link lost)")

    def test_unknown_is_told_at_once(self, table: TransferTable) -> None:
        (told,) = table.landings.watch(1, IDS[3])
        assert isinstance(told, TellFailed)

    def test_other_layout_cannot_watch(self, table: TransferTable) -> None:
        table.connect(dataclasses.replace(peer(9, "other"), fingerprint=b"g" * 32))
        table.landings.reserve(landing_spec(), 0)
        (told,) = table.landings.watch(9, TID)
        assert isinstance(told, TellFailed)
        assert "layout" in told.reason


class TestAbandonedLanding:
    @pytest.fixture(autouse=True)
    def claimed(self, table: TransferTable) -> None:
        table.landings.reserve(landing_spec(), 0)
        table.landings.watch(1, TID)
        table.landings.complete(TID, 1)

    def test_is_freed_when_every_process_of_the_instance_is_gone(
        self, table: TransferTable
    ) -> None:
        assert table.disconnected(1, 2) == [DropLanding(TID, "released")]
        table.landings.dropped(TID)
        table.process_gone(1)
        assert used(table) == 3, "another rank of the instance may still read it"
        table.disconnected(2, 3)
        assert used(table) == 3
        table.process_gone(2)
        assert used(table) == 0

    def test_is_freed_after_the_drain_time(self, table: TransferTable) -> None:
        table.disconnected(1, 2)
        table.landings.dropped(TID)
        table.expire(31.9)
        assert used(table) == 3
        table.expire(32)
        assert used(table) == 0

    def test_cannot_be_claimed_again(self, table: TransferTable) -> None:
        table.disconnected(1, 2)
        (told,) = table.landings.watch(2, TID)
        assert isinstance(told, TellFailed)

    def test_a_lost_watch_before_landing_can_be_taken_over(self, table: TransferTable) -> None:
        table.landings.reserve(landing_spec(IDS[1]), 0)
        table.landings.watch(1, IDS[1])
        table.disconnected(1, 1)
        assert table.landings.watch(2, IDS[1]) == []
        assert TellLanded(2, IDS[1]) in table.landings.complete(IDS[1], 2)
