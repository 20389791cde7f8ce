"""How transfers share a link: priorities, tenants, pacing, width, frames, and when digests go."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from transport_doubles import make_spec

from transport import LinkError, LocalError, PeerError, Priority, TransferState
from transport.codec.codecs import Codec
from transport.config import TransportConfig
from transport.sending.link import LinkCore
from transport.sending.link_work import AbortConnection, TransferEnded, Work
from transport.sending.outgoing import Coded, OutgoingState
from transport.wire.handshake import own_hello

CONFIG = TransportConfig(frame_bytes=100, num_connections=2, drop_grace_s=0.5)
PEER = own_hello(b"R" * 16, 1 << 20)
LOST = LinkError("lost", "test")


def make_link(*connections: int, config: TransportConfig = CONFIG) -> LinkCore:
    link = LinkCore(config, "test:1")
    for connection in connections:
        link.connected(connection, PEER, 0.0)
    return link


def begin(
    link: LinkCore,
    number: int = 1,
    nbytes: int = 100_000,
    *,
    priority: Priority = Priority.REQUEST,
    tenant: str = "",
    digest: bool = False,
    ready_bytes: int | None = None,
) -> OutgoingState:
    """A transfer whose OPEN was sent (by the first connection), with all bytes ready."""
    spec = replace(make_spec(number), priority=priority, tenant=tenant, digest=digest)
    transfer = link.add(spec, nbytes, 0.0)
    for connection in link.connections()[:1]:
        opened = send(link, connection)
        assert opened is not None
        assert opened.opens
    link.ready(transfer, 0, nbytes if ready_bytes is None else ready_bytes, 0.0)
    return transfer


def send(link: LinkCore, connection: int, now_s: float = 0.0) -> Work | None:
    """Take work and let go of it at once."""
    work = link.take(connection, now_s)
    if work is not None:
        link.sent(connection, work, 0.0, whole=True)
    link.check_invariants()
    return work


def num_bytes_sent(link: LinkCore, num_frames: int, connection: int = 1) -> Counter[OutgoingState]:
    counted: Counter[OutgoingState] = Counter()
    for _ in range(num_frames):
        work = send(link, connection)
        assert work is not None
        assert work.data is not None
        counted[work.transfer] += work.data[1] - work.data[0]
    return counted


# Shares.


def test_a_request_leaves_replication_a_thirty_second_part() -> None:
    link = make_link(1)
    copy = begin(link, 1, priority=Priority.REPLICATION)
    request = begin(link, 2)
    sent = num_bytes_sent(link, 640)
    assert sent[copy] / sent.total() == pytest.approx(1 / 32, abs=0.005)
    assert sent[request] == sent.total() - sent[copy]


def test_replication_has_the_link_to_itself_when_no_request_wants_it() -> None:
    link = make_link(1)
    copy = begin(link, 1, priority=Priority.REPLICATION)
    request = begin(link, 2, nbytes=100, ready_bytes=0)
    assert set(num_bytes_sent(link, 50)) == {copy}
    link.ready(request, 0, 100, 0.0)
    assert set(num_bytes_sent(link, 1)) == {request}
    assert set(num_bytes_sent(link, 50)) == {copy}


def test_tenants_share_whatever_number_of_transfers_they_have() -> None:
    link = make_link(1)
    many = [begin(link, number, tenant="many") for number in range(1, 6)]
    one = begin(link, 6, tenant="one")
    sent = num_bytes_sent(link, 200)
    assert sent[one] == pytest.approx(sent.total() / 2, abs=100)
    assert all(sent[transfer] == pytest.approx(2000, abs=200) for transfer in many)


def test_a_transfer_whose_bytes_become_ready_in_small_pieces_gets_no_more_than_its_share() -> None:
    link = make_link(1)
    steady = begin(link, 1)
    pieces = begin(link, 2, ready_bytes=0)
    sent: Counter[OutgoingState] = Counter()
    for number in range(400):
        if not pieces.unsent:
            offset = 100 * number
            link.ready(pieces, offset, offset + 100, 0.0)
        sent += num_bytes_sent(link, 1)
    assert sent[pieces] == pytest.approx(sent[steady], abs=200)


def test_frames_are_small_while_transfers_share_and_large_for_one_alone() -> None:
    link = make_link(1)
    link.dispatch.frame_bytes = 1000
    link.dispatch.width = 1
    first = begin(link, 1, nbytes=8000)
    assert frame_sizes(link, 2) == [(first, 1000), (first, 1000)]
    second = begin(link, 2)
    assert {size for _, size in frame_sizes(link, 50)} == {100}
    link.completed(1, second.spec.transfer_id, 0.0)
    assert frame_sizes(link, 1) == [(first, 1000)]


def test_frames_get_smaller_towards_the_end_of_what_is_ready() -> None:
    link = make_link(1)
    link.dispatch.frame_bytes = 1000
    link.dispatch.width = 2
    begin(link, 1, nbytes=4000)
    sizes = [size for _, size in frame_sizes(link, 9)]
    assert sizes[0] == 1000
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < 300
    assert all(size % 100 == 0 for size in sizes)


def frame_sizes(link: LinkCore, num_frames: int) -> list[tuple[OutgoingState, int]]:
    sizes = []
    for _ in range(num_frames):
        ((transfer, num_bytes),) = num_bytes_sent(link, 1).items()
        sizes.append((transfer, num_bytes))
    return sizes


# Pacing and budgets.


def test_a_paced_link_says_how_long_to_wait() -> None:
    link = make_link(1, 2, config=replace(CONFIG, pace_bytes_per_s=1000.0))
    assert link.dispatch.delay_s(0.0) is None
    begin(link)
    assert link.dispatch.delay_s(0.0) is None
    while send(link, 1) is not None:
        pass
    delay_s = link.dispatch.delay_s(0.0)
    assert delay_s == pytest.approx(0.09)  # a frame of 100 bytes, less 10 ms of burst
    assert link.take(2, 0.0) is None
    assert delay_s is not None
    assert send(link, 2, delay_s) is not None


def test_the_pace_holds_over_time_and_connections() -> None:
    link = make_link(1, 2, config=replace(CONFIG, pace_bytes_per_s=10_000.0))
    begin(link, nbytes=1_000_000)
    now_s, sent_bytes, connection = 0.0, 0, 1
    while now_s < 20.0:
        work = send(link, connection, now_s)
        connection = 3 - connection
        if work is not None and work.data is not None:
            sent_bytes += work.data[1] - work.data[0]
        else:
            now_s += link.dispatch.delay_s(now_s) or 0.0
    assert sent_bytes == pytest.approx(200_000, rel=0.01)


def test_control_is_not_paced() -> None:
    link = make_link(1, config=replace(CONFIG, pace_bytes_per_s=1000.0))
    paced = begin(link)
    send(link, 1)
    assert link.dispatch.delay_s(0.0) is not None
    other = link.add(make_spec(2), 100, 0.0)
    link.ready(other, 0, 100, 0.0)
    opened = send(link, 1)
    assert opened is not None
    assert (opened.transfer, opened.opens, opened.data) == (other, True, None)
    link.cancel(paced, LocalError("cancelled", "test"), 0.0)
    cancelled = send(link, 1)
    assert cancelled is not None
    assert cancelled.cancels


def test_a_tenant_over_its_budget_waits_and_others_go_on() -> None:
    link = make_link(1, config=replace(CONFIG, tenant_bytes_per_s=1000.0))
    first, second = begin(link, 1, tenant="a"), begin(link, 2, tenant="b")
    sent: Counter[OutgoingState] = Counter()
    while (work := send(link, 1)) is not None:
        assert work.data is not None
        sent[work.transfer] += 100
    assert sent == {first: 100, second: 100}
    assert link.dispatch.delay_s(0.0) == pytest.approx(0.09)
    assert {w.transfer for _ in range(2) if (w := send(link, 1, 0.1)) is not None} == {
        first,
        second,
    }


def test_many_small_transfers_do_not_pass_their_tenants_budget_by() -> None:
    link = make_link(1, config=replace(CONFIG, tenant_bytes_per_s=1000.0))
    for number in range(1, 21):
        spec = replace(make_spec(number), tenant="a")
        link.ready(link.add(spec, 100, 0.0), 0, 100, 0.0)
    sent_bytes = 0
    while (work := send(link, 1)) is not None:
        sent_bytes += work.data[1] - work.data[0] if work.data else 0
    assert sent_bytes == 100


def test_many_small_copies_do_not_pass_a_request_by() -> None:
    link = make_link(1)
    request = begin(link, 100)
    num_bytes_sent(link, 1)
    for number in range(1, 21):
        spec = replace(make_spec(number), priority=Priority.REPLICATION)
        link.ready(link.add(spec, 100, 0.0), 0, 100, 0.0)
    sent: Counter[bool] = Counter()
    while sent[True] < 20 and (work := send(link, 1)) is not None:
        sent[work.transfer is request] += bool(work.data)
    assert sent[False] <= 1


def test_a_transfer_alone_is_opened_and_sent_at_once() -> None:
    link = make_link(1)
    link.ready(link.add(make_spec(1), 100, 0.0), 0, 100, 0.0)
    work = link.take(1, 0.0)
    assert work is not None
    assert (work.opens, work.data) == (True, (0, 100))


# Width.


def test_only_the_oldest_connections_carry_data() -> None:
    link = make_link(1, 2, 3, 4)
    begin(link)
    assert [link.carries_data(number) for number in (1, 2, 3, 4)] == [True, True, False, False]
    assert [send(link, number) is not None for number in (4, 3, 2, 1)] == [False, False, True, True]
    assert link.dispatch.is_backlogged


def test_a_standby_steps_in_for_a_lost_connection() -> None:
    link = make_link(1, 2, 3)
    transfer = begin(link, nbytes=200)
    for number in (1, 2):
        assert send(link, number) is not None
    assert link.take(3, 0.0) is None
    link.disconnected(1, LOST)
    link.check_invariants()
    stepped_in = send(link, 3)
    assert stepped_in is not None
    assert (stepped_in.transfer, stepped_in.opens) == (transfer, True)
    assert stepped_in.data == (0, 100)


def test_a_standby_opens_and_cancels() -> None:
    link = make_link(1, 2, 3)
    transfer = link.add(make_spec(1), 100, 0.0)
    link.ready(transfer, 0, 100, 0.0)
    opened = send(link, 3)
    assert opened is not None
    assert (opened.opens, opened.data) == (True, None)
    link.cancel(transfer, LocalError("cancelled", "test"), 0.0)
    cancelled = send(link, 3)
    assert cancelled is not None
    assert cancelled.cancels


def test_the_width_may_change_at_any_time() -> None:
    link = make_link(1, 2, 3, 4)
    begin(link)
    link.dispatch.width = 3
    assert send(link, 3) is not None
    link.dispatch.width = 1
    assert send(link, 2) is None
    assert send(link, 3) is None
    assert send(link, 1) is not None
    link.dispatch.width = 16
    assert all(send(link, number) is not None for number in (1, 2, 3, 4))


# Digests.


def test_a_digest_goes_when_all_bytes_are_ready_and_not_before() -> None:
    link = make_link(1, 2)
    transfer = begin(link, nbytes=300, digest=True, ready_bytes=299)
    works = [send(link, 1) for _ in range(4)]
    assert not any(work.digests for work in works if work is not None)
    link.ready(transfer, 299, 300, 0.0)
    digest = send(link, 2)
    assert digest is not None
    assert (digest.digests, digest.opens, digest.data) == (True, True, None)
    assert [send(link, 2), send(link, 1)] != [None, None]  # the last byte
    assert (send(link, 1), send(link, 2)) == (None, None)


def test_a_transfer_of_no_bytes_has_a_digest_too() -> None:
    link = make_link(1)
    begin(link, nbytes=0, digest=True)
    digest = send(link, 1)
    assert digest is not None
    assert digest.digests
    assert send(link, 1) is None


@pytest.mark.parametrize("is_sent", [True, False])
def test_a_digest_is_made_again_when_its_connection_is_lost(is_sent: bool) -> None:
    link = make_link(1, 2)
    transfer = begin(link, nbytes=100, digest=True)
    digest = link.take(1, 0.0)
    assert digest is not None
    assert digest.digests
    assert transfer.pinned == {1}
    link.check_invariants()
    link.sent(1, digest, 0.0, whole=is_sent)
    link.disconnected(1, LOST)
    link.check_invariants()
    assert transfer.pinned == frozenset()
    works = [send(link, 2) for _ in range(3)]
    assert [work.digests for work in works if work is not None].count(True) == 1


def test_a_lost_connection_that_had_no_digest_does_not_repeat_it() -> None:
    link = make_link(1, 2)
    begin(link, nbytes=100, digest=True)
    assert (digest := send(link, 1)) is not None
    assert digest.digests
    link.disconnected(2, LOST)
    works = [send(link, 1) for _ in range(3)]
    assert not any(work.digests for work in works if work is not None)


def test_the_end_waits_for_who_computes_the_digest() -> None:
    link = make_link(1, 2)
    transfer = begin(link, nbytes=100, digest=True)
    digest = link.take(1, 0.0)
    assert digest is not None
    link.refused(2, transfer.spec.transfer_id, PeerError("dropped", "test"), 1.0)
    assert link.pop_effects() == []
    link.expire(1.6)
    assert [type(effect) for effect in link.pop_effects()] == [AbortConnection]
    link.sent(1, digest, 0.0, whole=False)
    (end,) = link.pop_effects()
    assert end == TransferEnded(transfer)
    link.check_invariants()


def test_a_cancel_waits_for_who_computes_the_digest_and_no_other_is_made() -> None:
    link = make_link(1, 2)
    transfer = begin(link, nbytes=100, digest=True)
    digest = link.take(1, 0.0)
    assert digest is not None
    link.cancel(transfer, LocalError("cancelled", "test"), 0.0)
    assert link.take(2, 0.0) is None
    link.sent(1, digest, 0.0, whole=False)
    cancel = send(link, 2)
    assert cancel is not None
    assert cancel.cancels
    assert send(link, 1) is None


def test_waiting_for_a_budget_is_not_a_lack_of_progress() -> None:
    config = replace(
        CONFIG, tenant_bytes_per_s=10.0, handshake_timeout_s=4, ack_timeout_s=4, idle_timeout_s=5
    )
    link = make_link(1, config=config)
    first = begin(link, 1, nbytes=1000, ready_bytes=0)
    second = begin(link, 2, nbytes=1000, ready_bytes=0)
    for transfer in (first, second):
        link.opened(1, transfer.spec.transfer_id, [], 0.0)
        link.ready(transfer, 0, 1000, 0.0)
    now_s = 0.0
    for _ in range(100):
        now_s += 1.0
        work = link.take(1, now_s)
        if work is not None and work.data is not None:
            link.sent(1, work, now_s, whole=True)
            link.acked(1, work.transfer.spec.transfer_id, [work.data], now_s)
        link.expire(now_s)
    assert (first.state, second.state) == (TransferState.OPEN, TransferState.OPEN)
    assert link.acked_bytes >= 900


def test_coded_bytes_cost_a_pace_what_they_take_on_the_wire() -> None:
    link = make_link(1, config=replace(CONFIG, pace_bytes_per_s=100.0))
    begin(link, 1, nbytes=1000)
    work = link.take(1, 0.0)
    assert work is not None
    before_s = link.dispatch.delay_s(0.0)
    link.sent(1, work, 0.0, whole=True, coded=Coded(10, Codec.ZSTD))
    after_s = link.dispatch.delay_s(0.0)
    assert before_s is not None
    assert (after_s or 0.0) < before_s
