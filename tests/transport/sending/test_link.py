"""What a link sends next, and what its timeouts do."""

from __future__ import annotations

import pytest
from transport_doubles import make_spec

from transport.config import TransportConfig
from transport.errors import LinkError, LocalError, PeerError
from transport.interfaces import TransferState
from transport.sending.link import LinkCore
from transport.sending.link_work import AbortConnection, TransferEnded, Work
from transport.sending.outgoing import OutgoingState
from transport.wire.handshake import own_hello

CONFIG = TransportConfig(
    frame_bytes=100, ack_timeout_s=10, idle_timeout_s=30, drop_grace_s=0.5, num_connections=2
)
PEER = own_hello(b"R" * 16, 1 << 20)


def make_link(*connections: int) -> LinkCore:
    link = LinkCore(CONFIG, "test:1")
    for connection in connections:
        link.connected(connection, PEER, 0.0)
    return link


def begin(link: LinkCore, number: int = 1, nbytes: int = 1000) -> OutgoingState:
    return link.add(make_spec(number), nbytes, 0.0)


def drain(link: LinkCore, connection: int, now_s: float = 0.0) -> list[Work]:
    works = []
    while (work := link.take(connection, now_s)) is not None:
        link.sent(connection, work, 0.0, whole=True)
        works.append(work)
        link.check_invariants()
    return works


def ended(link: LinkCore) -> list[OutgoingState]:
    return [effect.transfer for effect in link.pop_effects() if isinstance(effect, TransferEnded)]


def test_a_new_transfer_is_announced_at_once_and_once() -> None:
    link = make_link(1, 2)
    begin(link)
    works = drain(link, 1)
    assert [(work.opens, work.data) for work in works] == [(True, None)]
    assert drain(link, 2) == []


def test_ready_bytes_are_cut_into_frames_and_go_to_whoever_asks() -> None:
    link = make_link(1, 2)
    transfer = begin(link)
    drain(link, 1)
    link.ready(transfer, 0, 250, 0.0)
    taken = [link.take(connection, 0.0) for connection in (1, 2, 1)]
    works = [work for work in taken if work is not None]
    assert [work.data for work in works] == [(0, 100), (100, 200), (200, 250)]
    assert tuple(work.opens for work in works) == (False, True, False)


def test_small_ready_ranges_are_sent_together_when_they_touch() -> None:
    link = make_link(1)
    transfer = begin(link)
    for offset in (40, 0, 20, 60):
        link.ready(transfer, offset, offset + 20, 0.0)
    assert [work.data for work in drain(link, 1) if work.data] == [(0, 80)]


def test_transfers_take_turns() -> None:
    link = make_link(1)
    one, two = begin(link, 1), begin(link, 2)
    link.ready(one, 0, 300, 0.0)
    link.ready(two, 0, 200, 0.0)
    order = [work.transfer for work in drain(link, 1) if work.data]
    assert order == [one, two, one, two, one]


def test_the_receivers_frame_limit_is_kept() -> None:
    link = LinkCore(CONFIG, "test:1")
    link.connected(1, own_hello(b"R" * 16, 30), 0.0)
    transfer = begin(link)
    link.ready(transfer, 0, 70, 0.0)
    assert [work.data for work in drain(link, 1) if work.data] == [(0, 30), (30, 60), (60, 70)]


def test_a_lost_connection_gives_back_only_what_was_not_acknowledged() -> None:
    link = make_link(1, 2)
    transfer = begin(link)
    link.ready(transfer, 0, 400, 0.0)
    drain(link, 1)
    link.acked(1, transfer.spec.transfer_id, [(0, 100), (200, 300)], 1.0)
    link.disconnected(1, LinkError("lost", "test"))
    link.check_invariants()
    works = drain(link, 2)
    assert works[0].opens
    assert [work.data for work in works if work.data] == [(100, 200), (300, 400)]
    assert transfer.progress(1).resent_bytes == 200


def test_only_the_receiver_completes_a_transfer() -> None:
    link = make_link(1)
    transfer = begin(link, nbytes=100)
    link.ready(transfer, 0, 100, 0.0)
    drain(link, 1)
    link.acked(1, transfer.spec.transfer_id, [(0, 100)], 1.0)
    assert ended(link) == []
    link.completed(1, transfer.spec.transfer_id, 2.0)
    assert ended(link) == [transfer]
    assert transfer.error is None
    assert transfer.progress(0).completed_s == 2.0
    assert not link.has_transfers


def test_a_lost_complete_is_asked_for_again() -> None:
    link = make_link(1)
    transfer = begin(link, nbytes=100)
    link.ready(transfer, 0, 100, 0.0)
    drain(link, 1)
    link.acked(1, transfer.spec.transfer_id, [(0, 100)], 1.0)
    link.disconnected(1, LinkError("lost", "test"))
    link.connected(2, PEER, 2.0)
    assert [(work.opens, work.data) for work in drain(link, 2)] == [(True, None)]


def test_the_end_is_reported_when_nobody_reads_any_more() -> None:
    link = make_link(1, 2)
    transfer = begin(link)
    link.ready(transfer, 0, 200, 0.0)
    drain(link, 2)
    link.ready(transfer, 200, 300, 0.0)
    work = link.take(1, 0.0)
    assert work is not None
    link.refused(2, transfer.spec.transfer_id, PeerError("dropped", "test"), 1.0)
    assert ended(link) == []
    link.expire(1.4)
    assert link.pop_effects() == []
    link.expire(1.6)
    aborts = link.pop_effects()
    assert [effect.connection for effect in aborts if isinstance(effect, AbortConnection)] == [1]
    link.sent(1, work, 0.0, whole=False)
    assert ended(link) == [transfer]


def test_cancel_before_anything_was_said_ends_at_once() -> None:
    link = make_link()
    transfer = begin(link)
    link.cancel(transfer, LocalError("cancelled", "test"), 0.0)
    assert ended(link) == [transfer]
    assert transfer.state is TransferState.CANCELLED


def test_cancel_waits_for_the_receiver() -> None:
    link = make_link(1)
    transfer = begin(link)
    drain(link, 1)
    link.ready(transfer, 0, 300, 0.0)
    work = link.take(1, 0.0)
    assert work is not None
    assert work.data == (0, 100)
    link.cancel(transfer, LocalError("cancelled", "test"), 1.0)
    assert link.take(1, 1.0) is None  # the first connection still reads its frame
    link.sent(1, work, 0.0, whole=True)
    (cancel,) = drain(link, 1, 1.0)
    assert cancel.cancels
    assert cancel.data is None
    assert ended(link) == []
    link.cancel_acked(1, transfer.spec.transfer_id, 2.0)
    assert ended(link) == [transfer]
    assert transfer.error is not None
    assert transfer.error.code == "cancelled"


def test_cancel_is_repeated_after_a_lost_connection_and_ends_in_time() -> None:
    link = make_link(1)
    transfer = begin(link)
    drain(link, 1)
    link.cancel(transfer, LocalError("cancelled", "test"), 1.0)
    assert [work.cancels for work in drain(link, 1)] == [True]
    link.disconnected(1, LinkError("lost", "test"))
    link.connected(2, PEER, 2.0)
    assert [(work.opens, work.cancels) for work in drain(link, 2)] == [(True, True)]
    link.expire(10.9)
    assert ended(link) == []
    link.expire(11.0)
    assert ended(link) == [transfer]


def test_complete_wins_over_a_cancel_under_way() -> None:
    link = make_link(1)
    transfer = begin(link, nbytes=100)
    link.ready(transfer, 0, 100, 0.0)
    drain(link, 1)
    link.cancel(transfer, LocalError("cancelled", "test"), 1.0)
    link.completed(1, transfer.spec.transfer_id, 1.5)
    assert ended(link) == [transfer]
    assert transfer.state is TransferState.COMPLETE
    assert transfer.error is None


def test_silence_closes_the_connection_then_fails_the_transfer() -> None:
    link = make_link(1)
    transfer = begin(link)
    link.ready(transfer, 0, 100, 0.0)
    drain(link, 1)
    link.expire(9.9)
    assert link.pop_effects() == []
    link.expire(10.0)
    (abort,) = link.pop_effects()
    assert isinstance(abort, AbortConnection)
    assert abort.error.code == "ack_timeout"
    link.disconnected(1, abort.error)
    link.expire(29.9)
    assert ended(link) == []
    link.expire(30.0)
    assert ended(link) == [transfer]
    assert transfer.error is not None
    assert transfer.error.code == "unreachable"
    assert "no acknowledgement for 10 s" in transfer.error.message


def test_a_moving_kernel_queue_is_a_sign_of_life() -> None:
    link = make_link(1)
    transfer = begin(link)
    link.ready(transfer, 0, 100, 0.0)
    drain(link, 1)
    for now_s in range(1, 29):
        link.kernel_queue(1, 1000 - now_s, float(now_s))
        link.expire(float(now_s))
    assert link.pop_effects() == []


def test_waiting_for_bytes_to_become_ready_does_not_age() -> None:
    link = make_link(1)
    transfer = begin(link)
    drain(link, 1)
    link.opened(1, transfer.spec.transfer_id, [], 0.1)
    for now_s in (20.0, 40.0, 400.0):
        link.expire(now_s)
    assert link.pop_effects() == []
    link.ready(transfer, 0, 100, 410.0)
    link.expire(439.0)
    assert link.pop_effects() == []
    link.expire(440.0)
    assert ended(link) == [transfer]


def test_a_receiver_that_restarted_has_lost_what_it_had() -> None:
    link = make_link(1)
    begun, fresh = begin(link, 1), begin(link, 2)
    link.ready(begun, 0, 100, 0.0)
    drain(link, 1)
    link.opened(1, begun.spec.transfer_id, [], 0.1)
    link.disconnected(1, LinkError("lost", "test"))
    link.connected(2, own_hello(b"Q" * 16, 1 << 20), 1.0)
    assert ended(link) == [begun]
    assert begun.error is not None
    assert begun.error.code == "receiver_restarted"
    assert fresh.state is TransferState.OPEN


def test_what_the_receiver_already_has_is_not_sent() -> None:
    link = make_link(1)
    transfer = begin(link)
    drain(link, 1)
    link.opened(1, transfer.spec.transfer_id, [(0, 150)], 0.1)
    link.ready(transfer, 0, 200, 0.2)
    assert [work.data for work in drain(link, 1)] == [(150, 200)]


def test_lies_of_the_receiver_are_violations() -> None:
    link = make_link(1)
    transfer = begin(link)
    link.ready(transfer, 0, 100, 0.0)
    drain(link, 1)
    with pytest.raises(PeerError, match="never sent"):
        link.acked(1, transfer.spec.transfer_id, [(50, 150)], 1.0)
    with pytest.raises(PeerError, match="beyond"):
        link.opened(1, transfer.spec.transfer_id, [(0, 1001)], 1.0)


def test_answers_about_unknown_transfers_are_ignored() -> None:
    link = make_link(1)
    link.acked(1, b"?" * 16, [(0, 1)], 0.0)
    link.completed(1, b"?" * 16, 0.0)
    link.refused(1, b"?" * 16, PeerError("dropped", ""), 0.0)
    link.cancel_acked(1, b"?" * 16, 0.0)
    assert link.pop_effects() == []


def test_an_id_in_use_is_refused() -> None:
    link = make_link()
    begin(link)
    with pytest.raises(ValueError, match="already open"):
        begin(link)


def test_an_illegal_turn_changes_nothing() -> None:
    transfer = begin(make_link())
    transfer.turn(TransferState.FAILED, LinkError("idle", "test"), 1.0)
    with pytest.raises(ValueError, match="cannot go from failed to complete"):
        transfer.turn(TransferState.COMPLETE, None, 2.0)
    assert transfer.state is TransferState.FAILED
    assert transfer.progress(0).completed_s == 1.0
