"""One outgoing transfer by itself: where its bytes are, what it waits for, and how it ends."""

from __future__ import annotations

from dataclasses import replace

import pytest
from transport_doubles import make_spec

from transport.codec.codecs import Codec
from transport.errors import LinkError
from transport.interfaces import TransferProgress, TransferState
from transport.sending.outgoing import Coded, OutgoingState

OPEN, CANCELLING, COMPLETE, FAILED, CANCELLED = (
    TransferState.OPEN,
    TransferState.CANCELLING,
    TransferState.COMPLETE,
    TransferState.FAILED,
    TransferState.CANCELLED,
)
ENDS = (COMPLETE, FAILED, CANCELLED)


def transfer(nbytes: int = 100, *, digest: bool = False, is_opened: bool = True) -> OutgoingState:
    """Begun at 10 s; opened on connection 1 unless told otherwise."""
    made = OutgoingState(replace(make_spec(1), digest=digest), nbytes, 10.0)
    if is_opened:
        made.needs_open = False
        made.opened = True
        made.announced.add(1)
    return made


def turned(state: TransferState) -> OutgoingState:
    made = transfer()
    if state is not OPEN:
        made.turn(state, None, 11.0)
    return made


def test_a_new_transfer_has_sent_nothing_and_wants_to_be_opened() -> None:
    made = transfer(is_opened=False)
    assert made.progress(2) == TransferProgress(
        state=OPEN,
        nbytes=100,
        ready_bytes=0,
        sent_bytes=0,
        acked_bytes=0,
        resent_bytes=0,
        opened_s=10.0,
        first_sent_s=None,
        completed_s=None,
        num_connections=2,
        wire_bytes=0,
        codecs=(),
    )
    assert (made.needs_open, made.opened, made.has_control, made.waits) == (True, False, True, True)
    assert (made.error, made.reported, made.receiver_instance) == (None, False, None)
    assert (made.ended, made.ended_s, made.progress_s) == (False, 10.0, 10.0)
    assert (made.pinned, made.announced, made.needs_cancel) == (frozenset(), set(), False)


def test_bytes_count_once_however_often_they_are_said_to_be_ready() -> None:
    made = transfer()
    assert made.ready(0, 40, 11.0) == 40
    assert made.ready(30, 60, 12.0) == 20
    assert made.ready(0, 60, 13.0) == 0
    assert made.progress(0).ready_bytes == 60
    assert list(made.unsent) == [(0, 60)]


@pytest.mark.parametrize("state", [CANCELLING, *ENDS])
def test_nothing_more_is_ready_once_it_is_no_longer_open(state: TransferState) -> None:
    made = turned(state)
    assert made.ready(0, 40, 12.0) == 0
    assert not made.unsent
    assert made.progress(0).ready_bytes == 0


def test_what_was_taken_again_after_it_was_acknowledged_is_not_sent_again() -> None:
    made = transfer()
    made.ack([(10, 20)], 11.0)  # the receiver had it before
    assert made.ready(0, 30, 12.0) == 30
    assert list(made.unsent) == [(0, 10), (20, 30)]


def test_a_range_is_taken_by_one_connection_which_reads_until_it_was_sent() -> None:
    made = transfer()
    made.ready(0, 100, 11.0)
    assert made.take(1, 30, 12.0) == (0, 30)
    assert made.take(2, 30, 13.0) == (30, 60)
    assert made.take(1, 500, 14.0) == (60, 100)
    assert made.take(1, 30, 15.0) is None
    assert made.pinned == frozenset({1, 2})
    assert (made.is_in_flight(1), made.is_in_flight(2), made.is_in_flight(3)) == (True, True, False)
    made.sent(2, (30, 60), whole=True)
    assert made.pinned == frozenset({1})
    assert made.is_in_flight(2)
    assert made.progress(0).first_sent_s == 12.0
    made.check_invariants()


def test_bytes_that_are_sent_again_are_counted_apart() -> None:
    made = transfer()
    made.ready(0, 100, 11.0)
    made.sent(1, (0, 30), whole=True)
    made.sent(1, (20, 50), whole=True)
    found = made.progress(0)
    assert (found.sent_bytes, found.resent_bytes) == (50, 10)
    made.sent(1, (60, 90), whole=False)  # the kernel did not take all of it
    assert made.progress(0).sent_bytes == 50


def test_what_codecs_did_is_told() -> None:
    made = transfer()
    made.sent(1, (0, 30), whole=True, coded=Coded(12, Codec.ZSTD))
    made.sent(1, (30, 60), whole=True, coded=Coded(30, Codec.RAW))
    made.sent(1, (60, 90), whole=True, coded=Coded(5, Codec.LZ4))
    made.sent(1, (60, 90), whole=True)
    found = made.progress(0)
    assert (found.wire_bytes, found.codecs) == (47, ("lz4", "zstd"))


def test_acknowledgements_count_each_byte_once_and_end_its_flight() -> None:
    made = transfer()
    made.ready(0, 100, 11.0)
    made.take(1, 40, 12.0)
    made.take(2, 20, 12.0)
    assert made.ack([(0, 10), (35, 45), (0, 5)], 13.0) == 20
    assert (made.acked.total, made.progress_s) == (20, 13.0)
    assert (made.is_in_flight(1), made.is_in_flight(2)) == (True, True)
    assert made.ack([(10, 35), (45, 60)], 14.0) == 40
    assert (made.is_in_flight(1), made.is_in_flight(2)) == (False, False)
    assert list(made.unsent) == [(60, 100)]
    assert made.ack([(0, 60)], 15.0) == 0
    assert made.progress_s == 14.0  # nothing moved
    made.ack([(70, 80)], 16.0)
    assert list(made.unsent) == [(60, 70), (80, 100)]


def test_only_what_was_ready_can_be_acknowledged() -> None:
    made = transfer()
    made.ready(10, 20, 11.0)
    assert made.was_taken(10, 20)
    assert not made.was_taken(10, 21)


def test_what_a_lost_connection_had_under_way_is_sent_again() -> None:
    made = transfer()
    made.ready(0, 100, 11.0)
    made.take(1, 40, 12.0)
    made.take(2, 20, 12.0)
    made.ack([(10, 20)], 13.0)
    made.lost(1)
    assert list(made.unsent) == [(0, 10), (20, 40), (60, 100)]
    assert (made.is_in_flight(1), made.is_in_flight(2)) == (False, True)
    made.check_invariants()


def test_a_transfer_that_is_cancelled_sends_nothing_again() -> None:
    made = transfer()
    made.ready(0, 100, 11.0)
    made.take(1, 40, 12.0)
    made.turn(CANCELLING, None, 13.0)
    made.lost(1)
    assert not made.unsent
    assert not made.is_in_flight(1)


def test_it_is_opened_again_when_a_connection_that_opened_it_is_lost() -> None:
    made = transfer()
    made.lost(2)
    assert (made.needs_open, made.announced) == (False, {1})
    made.lost(1)
    assert (made.needs_open, made.announced, made.needs_cancel) == (True, set(), False)


@pytest.mark.parametrize(("connection", "needs_cancel"), [(1, True), (2, False)])
def test_a_cancel_is_sent_again_when_the_connection_that_opened_it_is_lost(
    connection: int, needs_cancel: bool
) -> None:
    made = turned(CANCELLING)
    made.lost(connection)
    assert made.needs_cancel is needs_cancel
    assert made.has_control is needs_cancel


# ---- what it waits for


def test_without_ready_bytes_nobody_owes_it_anything() -> None:
    made = transfer()
    assert not made.waits
    made.ready(0, 40, 20.0)
    assert (made.waits, made.progress_s) == (True, 20.0)  # from now on time counts
    made.ready(40, 50, 30.0)
    assert made.progress_s == 20.0
    made.take(1, 100, 31.0)
    assert made.waits
    made.ack([(0, 50)], 32.0)
    assert not made.waits
    made.ready(50, 100, 40.0)
    made.ack([(50, 100)], 41.0)
    assert made.waits  # all is acknowledged: COMPLETE is owed


def test_an_answer_to_its_opening_is_owed_to_it() -> None:
    made = transfer()
    made.needs_open = True
    assert made.waits
    made = transfer()
    made.opened = False
    assert made.waits


@pytest.mark.parametrize("state", [CANCELLING, *ENDS])
def test_what_is_not_open_waits_for_nothing(state: TransferState) -> None:
    made = transfer(is_opened=False)
    made.turn(state, None, 11.0)
    assert not made.waits


def test_it_is_only_queued_while_bytes_are_ready_and_none_is_under_way() -> None:
    made = transfer()
    assert not made.is_only_queued
    made.ready(0, 40, 11.0)
    assert made.is_only_queued
    made.needs_open = True
    assert not made.is_only_queued
    made.needs_open, made.opened = False, False
    assert not made.is_only_queued
    made.opened = True
    made.take(1, 10, 12.0)
    assert not made.is_only_queued
    made.ack([(0, 10)], 13.0)
    assert made.is_only_queued
    made.turn(CANCELLING, None, 14.0)
    made.unsent.add(0, 10)
    assert not made.is_only_queued


def test_the_age_of_its_queue_counts_from_when_it_last_had_nothing_to_send() -> None:
    made = transfer()
    made.ready(0, 40, 11.0)
    made.ready(40, 50, 12.0)
    assert made.owed_since_s == 11.0
    made.take(1, 100, 13.0)
    assert made.owed_since_s == 11.0
    made.ack([(0, 30)], 14.0)
    assert made.owed_since_s == 11.0
    made.ack([(30, 50)], 15.0)
    assert made.owed_since_s is None
    made.ready(0, 50, 16.0)  # known already
    assert made.owed_since_s is None
    made.ready(50, 60, 17.0)
    assert made.owed_since_s == 17.0
    made.turn(CANCELLING, None, 18.0)
    assert made.owed_since_s is None


# ---- the digest


def test_the_digest_is_told_once_all_bytes_are_final() -> None:
    made = transfer(digest=True)
    assert (made.needs_digest, made.has_control) == (False, False)
    made.ready(0, 99, 11.0)
    assert not made.needs_digest
    made.ready(99, 100, 12.0)
    assert (made.needs_digest, made.has_control) == (True, True)
    made.begin_digest(1)
    assert (made.needs_digest, made.pinned) == (False, frozenset({1}))
    made.end_digest(1, whole=True)
    assert (made.needs_digest, made.pinned) == (False, frozenset())
    made.lost(2)
    assert not made.needs_digest
    made.lost(1)
    assert made.needs_digest


def test_a_transfer_without_a_digest_needs_none() -> None:
    made = transfer()
    made.ready(0, 100, 11.0)
    assert not made.needs_digest


def test_a_digest_that_the_kernel_did_not_take_is_made_again() -> None:
    made = transfer(digest=True)
    made.ready(0, 100, 11.0)
    made.begin_digest(1)
    made.end_digest(1, whole=False)
    assert made.needs_digest
    made.begin_digest(2)
    made.end_digest(1, whole=False)  # the earlier one's end says nothing of this one
    assert not made.needs_digest
    assert made.pinned == frozenset({2})


def test_a_transfer_that_is_cancelled_needs_no_digest() -> None:
    made = transfer(digest=True)
    made.ready(0, 100, 11.0)
    made.turn(CANCELLING, None, 12.0)
    assert not made.needs_digest


# ---- ends


@pytest.mark.parametrize("before", TransferState)
@pytest.mark.parametrize("after", TransferState)
def test_states_follow_the_table(before: TransferState, after: TransferState) -> None:
    made = turned(before)
    allowed = {OPEN: {CANCELLING, *ENDS}, CANCELLING: set(ENDS)}.get(before, set())
    if after in allowed:
        made.turn(after, None, 12.0)
        assert made.state is after
    else:
        with pytest.raises(ValueError, match=f"cannot go from {before} to {after}"):
            made.turn(after, None, 12.0)
        assert made.state is before


@pytest.mark.parametrize("state", ENDS)
def test_an_end_has_a_time_and_its_error(state: TransferState) -> None:
    made = transfer()
    made.ready(0, 100, 11.0)
    error = LinkError("idle", "nothing moved")
    made.turn(CANCELLING, None, 12.0)
    assert (made.ended, made.ended_s, made.progress(0).completed_s) == (False, 10.0, None)
    made.turn(state, error, 13.0)
    assert (made.ended, made.ended_s, made.error) == (True, 13.0, error)
    found = made.progress(0)
    assert (found.state, found.completed_s) == (state, 13.0)
    assert not made.unsent


def test_only_an_end_that_is_to_come_has_a_cancel_to_send() -> None:
    made = turned(CANCELLING)
    assert not made.has_control
    made.needs_cancel = True
    assert made.has_control
    made.turn(CANCELLED, None, 12.0)
    assert not made.has_control


# ---- the invariants notice what must not be


def broken(made: OutgoingState, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        made.check_invariants()


def test_the_invariants_notice_bytes_that_are_lost_or_in_two_places() -> None:
    made = transfer()
    made.ready(0, 50, 11.0)
    made.take(1, 10, 12.0)
    made.check_invariants()
    made.unsent.add(5, 10)
    broken(made, "a byte is in two places")
    made.unsent.remove(0, 20)
    broken(made, "a byte is lost")


def test_the_invariants_notice_what_is_sent_before_it_is_ready() -> None:
    made = transfer()
    made.ready(0, 50, 11.0)
    made.unsent.add(60, 70)
    broken(made, "sending what is not ready")


def test_the_invariants_notice_a_wrong_age_of_the_queue() -> None:
    made = transfer()
    made.owed_since_s = 11.0
    broken(made, "the age of the queue is wrong")
    made.ready(0, 50, 11.0)
    made.check_invariants()
    made.owed_since_s = None
    broken(made, "the age of the queue is wrong")


def test_of_a_transfer_that_is_not_open_only_what_is_sent_must_have_been_ready() -> None:
    made = transfer()
    made.ready(0, 50, 11.0)
    made.turn(CANCELLING, None, 12.0)
    made.check_invariants()
