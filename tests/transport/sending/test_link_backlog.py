"""What a link says of its queue and its trouble; connection numbers."""

from __future__ import annotations

from transport_doubles import make_spec

from transport.config import TransportConfig
from transport.errors import LinkError
from transport.interfaces import TransferState
from transport.sending.link import LinkCore
from transport.sending.link_state import Backlog
from transport.wire.handshake import own_hello

CONFIG = TransportConfig(frame_bytes=100, num_connections=2)
PEER = own_hello(b"R" * 16, 1 << 20)
LOST = LinkError("lost", "connection reset")


def make_link(*connections: int) -> LinkCore:
    link = LinkCore(CONFIG, "test:1")
    for connection in connections:
        link.connected(connection, PEER, 0.0)
    return link


def send_all(link: LinkCore, connection: int, now_s: float) -> None:
    while (work := link.take(connection, now_s)) is not None:
        link.sent(connection, work, now_s, whole=True)


def test_a_transfer_that_waits_for_its_bytes_is_no_queue() -> None:
    link = make_link(1)
    assert link.backlog(5.0) == Backlog(0, 0, None)
    link.add(make_spec(1), 1000, 0.0)
    assert link.backlog(5.0) == Backlog(0, 1, None)


def test_the_queue_is_what_is_ready_and_not_taken() -> None:
    link = make_link(1)
    one, two = (link.add(make_spec(number), 1000, 0.0) for number in (1, 2))
    link.ready(one, 0, 300, 2.0)
    link.ready(two, 0, 50, 3.0)
    assert link.backlog(5.0) == Backlog(350, 2, 3.0)
    send_all(link, 1, 5.0)
    assert link.backlog(5.0) == Backlog(0, 2, 3.0)
    link.acked(1, one.spec.transfer_id, [(0, 300)], 6.0)
    assert link.backlog(6.0) == Backlog(0, 2, 3.0)
    link.acked(1, two.spec.transfer_id, [(0, 50)], 6.0)
    assert link.backlog(6.0) == Backlog(0, 2, None)
    link.check_invariants()


def test_the_age_of_the_queue_survives_a_lost_connection_and_ends_with_a_pause() -> None:
    link = make_link(1)
    transfer = link.add(make_spec(1), 1000, 0.0)
    link.ready(transfer, 0, 300, 2.0)
    send_all(link, 1, 2.0)
    link.disconnected(1, LOST)
    assert link.backlog(5.0) == Backlog(300, 1, 3.0)
    link.connected(2, PEER, 5.0)
    send_all(link, 2, 5.0)
    link.acked(2, transfer.spec.transfer_id, [(0, 300)], 6.0)
    link.ready(transfer, 300, 400, 8.0)
    assert link.backlog(9.0) == Backlog(100, 1, 1.0)
    link.check_invariants()


def test_what_is_over_is_not_queued() -> None:
    link = make_link(1)
    transfer = link.add(make_spec(1), 1000, 0.0)
    link.ready(transfer, 0, 300, 2.0)
    link.broken(LOST, 3.0)
    assert transfer.state is TransferState.FAILED
    assert link.backlog(5.0) == Backlog(0, 0, None)


def test_trouble_is_having_lost_the_last_connection() -> None:
    link = make_link()
    assert link.trouble == ""
    link.disconnected(1, LOST)
    assert link.trouble == "connection reset"
    for number in (2, 3):
        link.connected(number, PEER, 1.0)
    link.disconnected(2, LOST)
    assert link.trouble == ""
    link.disconnected(3, LOST)
    assert link.trouble == "connection reset"
