"""Both ends of connections without sockets: resume, refusals, cancels, drops, and broken rules."""

from __future__ import annotations

import math

import pytest
from transport_doubles import (
    MemoryNetwork,
    MemoryRegistry,
    MemorySpace,
    greeting,
    make_spec,
)

from transport.config import TransportConfig
from transport.errors import LinkError, PeerError
from transport.interfaces import ByteSpace, TransferState
from transport.sending.outgoing import OutgoingState
from transport.wire.frames import FrameType, encode_data_header, encode_frame, encode_open
from transport.wire.receiver_session import ReceiverSession

CONFIG = TransportConfig(
    frame_bytes=1000,
    max_frame_bytes=4000,
    handshake_timeout_s=5,
    idle_timeout_s=30,
    drop_grace_s=0,
    tombstone_s=60,
    max_transfers_per_connection=2,
)


class Fixture:
    """A network with connections and one expected transfer whose bytes are all ready."""

    def __init__(self, num_connections: int = 2, num_bytes: int = 10_000) -> None:
        self.registry = MemoryRegistry()
        self.network = MemoryNetwork(CONFIG, self.registry)
        self.numbers = [self.network.connect() for _ in range(num_connections)]
        self.network.run()
        self.data = bytearray(bytes(range(256)) * (num_bytes // 256 + 1))[:num_bytes]
        self.landed = bytearray(num_bytes)
        self.transfer = self.begin(1, self.data, self.landed)

    def begin(self, number: int, data: bytearray, landed: bytearray) -> OutgoingState:
        self.registry.expect(make_spec(number), MemorySpace(landed, 256))
        transfer = self.network.open(make_spec(number), MemorySpace(data, 300))
        self.network.ready(transfer, 0, len(data))
        return transfer

    @property
    def id(self) -> bytes:
        return self.transfer.spec.transfer_id


def test_everything_arrives() -> None:
    fixture = Fixture()
    fixture.network.run()
    assert fixture.landed == fixture.data
    assert fixture.registry.completed == [fixture.id]
    assert fixture.network.listener.completed == [fixture.id]
    assert fixture.registry.num_asked == 1


def test_a_connection_lost_in_mid_frame_is_resumed_on_another() -> None:
    fixture = Fixture()
    network, (one, two) = fixture.network, fixture.numbers
    network.send(one)
    network.deliver(one, 700)  # OPEN and half a DATA frame
    network.cut(one)
    network.check_invariants()
    network.run()
    assert two in network.connections
    assert fixture.landed == fixture.data
    assert fixture.transfer.progress(1).resent_bytes == 1000


def test_a_late_half_frame_loses_its_connection_not_the_bytes() -> None:
    fixture = Fixture()
    network, (one, two) = fixture.network, fixture.numbers
    network.send(one)
    network.send(one)
    network.deliver(one, 700)
    network.give_up(one)
    network.run()
    assert one not in network.connections
    assert two in network.connections
    assert fixture.landed == fixture.data
    assert any(error.message.startswith("superseded") for error in network.endings)


def test_a_whole_late_frame_changes_nothing() -> None:
    fixture = Fixture()
    network, (one, two) = fixture.network, fixture.numbers
    network.send(one)
    network.send(one)
    late = bytes(network.connections[one].to_receiver)
    network.cut(one)
    network.run()
    assert fixture.landed == fixture.data
    network.connections[two].to_receiver += late
    network.deliver(two, len(late))
    assert fixture.landed == fixture.data
    assert network.listener.completed == [fixture.id]


def test_a_damaged_frame_is_not_acknowledged_and_ends_only_its_connection() -> None:
    fixture = Fixture()
    network, (one, two) = fixture.network, fixture.numbers
    network.send(one)
    network.send(one)
    network.send(one)
    size = len(network.connections[one].to_receiver)
    network.deliver(one, size, damage=lambda data: data[:-1] + bytes([data[-1] ^ 1]))
    assert [error.code for error in network.endings] == ["checksum"]
    assert fixture.transfer.acked.total <= 1000
    network.run()
    assert list(network.connections) == [two]
    assert fixture.landed == fixture.data


def test_a_wrong_token_ends_only_that_transfer() -> None:
    fixture = Fixture()
    spec = make_spec(2)
    fixture.registry.expected[spec.transfer_id] = (b"other" * 8, b"", MemorySpace(bytearray(10)))
    bad = fixture.network.open(spec, MemorySpace(bytearray(10)))
    fixture.network.ready(bad, 0, 10)
    fixture.network.run()
    assert fixture.network.listener.failed[spec.transfer_id].code == "bad_token"
    assert fixture.landed == fixture.data
    assert len(fixture.network.connections) == 2


def test_a_size_that_is_not_the_reserved_one_is_refused() -> None:
    fixture = Fixture()
    bad = fixture.begin(2, bytearray(10), bytearray(11))
    fixture.network.run()
    error = fixture.network.listener.failed[bad.spec.transfer_id]
    assert error.code == "mismatch"
    assert "10 bytes offered, 11 bytes reserved" in error.message


def test_another_opener_needs_the_same_token() -> None:
    fixture = Fixture(num_connections=1)
    fixture.network.send(1)
    fixture.network.deliver(1, 10_000)
    session = raw_session(fixture, 99)
    session.feed(
        encode_open(fixture.id, token=b"x" * 32, fingerprint=b"", nbytes=len(fixture.data)), 0.0
    )
    assert b"bad_token" in session.outgoing()


def test_cancel_is_told_to_both_and_the_memory_is_free() -> None:
    fixture = Fixture()
    network = fixture.network
    network.send(1)
    network.send(1)
    network.deliver(1, 10_000)
    network.core.cancel(fixture.transfer, LinkError("cancelled", "test"), 0.0)  # type: ignore[arg-type]
    network.run()
    assert network.listener.failed[fixture.id].code == "cancelled"
    assert fixture.registry.failed[fixture.id].code == "cancelled"
    fixture.registry.expected.clear()
    fixture.landed.clear()  # raises BufferError if a view were left


def test_drop_stops_writing_at_once_and_tells_the_sender() -> None:
    fixture = Fixture()
    network = fixture.network
    network.send(1)
    network.send(1)
    network.send(2)
    network.deliver(1, 700)
    network.deliver(2, 10_000)
    network.reception.drop(fixture.id, "evicted", 1.0)
    before = bytes(fixture.landed)
    assert 1 not in network.connections
    network.run()
    assert fixture.landed == before
    assert network.listener.failed[fixture.id].message == "evicted"
    assert fixture.registry.failed == {}
    network.reception.drop(fixture.id, "again", 1.0)
    network.reception.drop(b"?" * 16, "unknown", 1.0)


def test_drop_while_the_registry_is_being_asked() -> None:
    fixture = Fixture()
    network = fixture.network
    accept = fixture.registry.accept

    def accept_and_drop(*arguments: object) -> ByteSpace:
        space = accept(*arguments)  # type: ignore[arg-type]
        network.reception.drop(fixture.id, "changed my mind", 1.0)
        return space

    fixture.registry.accept = accept_and_drop  # type: ignore[method-assign]
    network.run()
    assert network.listener.failed[fixture.id].code == "dropped"
    assert fixture.landed == bytes(len(fixture.landed))


def test_an_end_is_remembered_then_forgotten() -> None:
    fixture = Fixture()
    network = fixture.network
    network.run()
    landings = network.reception.transfers
    network.now_s = 59.0
    network.expire()
    assert landings.find(fixture.id) is not None
    network.now_s = 61.0
    network.expire()
    assert landings.find(fixture.id) is None
    assert network.reception.progress(fixture.id) is None


def test_a_transfer_nobody_serves_fails_at_the_receiver() -> None:
    fixture = Fixture()
    network = fixture.network
    network.send(1)
    network.deliver(1, 10_000)
    network.now_s = 100.0
    network.expire()
    assert fixture.registry.failed == {}
    network.cut(1)
    network.cut(2)
    network.now_s = 129.0
    network.reception.expire(network.now_s)
    assert fixture.registry.failed == {}
    network.now_s = 130.0
    network.reception.expire(network.now_s)
    assert fixture.registry.failed[fixture.id].code == "idle"


def test_close_fails_what_is_open() -> None:
    fixture = Fixture()
    fixture.network.send(1)
    fixture.network.deliver(1, 10_000)
    fixture.network.reception.close(1.0)
    assert fixture.registry.failed[fixture.id].code == "closed"


def test_progress_of_both_ends() -> None:
    fixture = Fixture(num_connections=1)
    network = fixture.network
    for _ in range(2):
        network.send(1)
    network.deliver(1, 10_000)
    received = network.reception.progress(fixture.id)
    assert received is not None
    assert (received.acked_bytes, received.nbytes, received.num_connections) == (2000, 10_000, 1)
    sent = fixture.transfer.progress(1)
    assert (sent.ready_bytes, sent.sent_bytes, sent.acked_bytes) == (10_000, 2000, 0)


# Broken rules, as raw bytes.


def raw_session(fixture: Fixture, connection: int = 50) -> ReceiverSession:
    session = ReceiverSession(
        connection,
        config=CONFIG,
        reception=fixture.network.reception,
        instance=b"R" * 16,
        now_s=0.0,
    )
    session.feed(greeting(), 0.0)
    session.outgoing()
    return session


def open_frame(fixture: Fixture) -> bytes:
    spec = fixture.transfer.spec
    return encode_open(
        spec.transfer_id, token=spec.token, fingerprint=spec.fingerprint, nbytes=len(fixture.data)
    )


@pytest.mark.parametrize(
    "kind", [FrameType.HELLO, FrameType.WELCOME, FrameType.ACK, FrameType.COMPLETE]
)
def test_frames_a_sender_must_not_send(kind: FrameType) -> None:
    session = raw_session(Fixture())
    with pytest.raises(PeerError) as caught:
        session.feed(encode_frame(kind), 0.0)
    assert caught.value.code == "protocol"
    assert f"unexpected {kind.name}".encode() in session.outgoing()


def test_data_beyond_the_transfer_ends_the_connection() -> None:
    fixture = Fixture()
    session = raw_session(fixture)
    session.feed(open_frame(fixture), 0.0)
    with pytest.raises(PeerError, match="up to byte 10001"):
        session.feed(encode_data_header(fixture.id, 10_000, [memoryview(b"x")]), 0.0)


def test_data_that_was_not_opened_here_is_thrown_away() -> None:
    fixture = Fixture()
    session = raw_session(fixture)
    payload = memoryview(bytes(3000))
    session.feed(encode_data_header(fixture.id, 0, [payload]) + payload, 0.0)
    assert b"not_open" in session.outgoing()
    assert fixture.landed == bytes(10_000)


def test_open_transfers_of_one_connection_are_bounded() -> None:
    fixture = Fixture()
    session = raw_session(fixture)
    for number in (1, 2, 3):
        fixture.registry.expect(make_spec(number), MemorySpace(bytearray(10_000)))
        spec = make_spec(number)
        session.feed(
            encode_open(
                spec.transfer_id, token=spec.token, fingerprint=spec.fingerprint, nbytes=10_000
            ),
            0.0,
        )
    assert b"busy" in session.outgoing()


def test_deadlines_follow_the_state() -> None:
    fixture = Fixture()
    session = ReceiverSession(
        50, config=CONFIG, reception=fixture.network.reception, instance=b"R" * 16, now_s=100.0
    )
    assert session.deadline_s == 105.0
    session.feed(greeting()[:10], 101.0)
    assert session.deadline_s == 105.0
    session.feed(greeting()[10:], 102.0)
    assert session.deadline_s == 102.0 + 2 * CONFIG.link_idle_timeout_s
    session.feed(open_frame(fixture)[:1], 103.0)
    assert session.deadline_s == 133.0
    session.feed(open_frame(fixture)[1:], 104.0)
    assert session.deadline_s == math.inf


def test_acknowledgements_are_collected_until_asked_for() -> None:
    fixture = Fixture()
    session = raw_session(fixture)
    session.feed(open_frame(fixture), 0.0)
    session.outgoing()
    payload = memoryview(bytes(fixture.data[:2000]))
    for offset in (0, 1000):
        part = payload[offset : offset + 1000]
        session.feed(encode_data_header(fixture.id, offset, [part]) + part, 0.0)
    assert session.has_answers
    assert session.outgoing() == b""
    session.flush_acks()
    assert len(session.outgoing()) == 48 + 16
    assert not session.has_answers


def data_frame(fixture: Fixture, offset: int, *, more: bool) -> bytes:
    part = memoryview(bytes(fixture.data[offset : offset + 1000]))
    return encode_data_header(fixture.id, offset, [part], more=more) + part


def test_answers_wait_for_data_that_is_announced_but_not_for_long() -> None:
    fixture = Fixture()
    session = raw_session(fixture)
    session.feed(open_frame(fixture), 0.0)
    session.outgoing()
    session.feed(data_frame(fixture, 0, more=True), 0.0)
    assert session.may_wait
    session.feed(data_frame(fixture, 1000, more=True), CONFIG.ack_delay_s / 2)
    assert session.may_wait
    session.feed(data_frame(fixture, 2000, more=True), 1.1 * CONFIG.ack_delay_s)
    assert session.acks_due
    assert not session.may_wait
    session.flush_acks()
    session.feed(data_frame(fixture, 3000, more=False), 1.2 * CONFIG.ack_delay_s)
    assert session.has_answers
    assert not session.may_wait


def test_the_end_of_a_transfer_is_told_at_once() -> None:
    fixture = Fixture()
    session = raw_session(fixture)
    session.feed(open_frame(fixture), 0.0)
    session.outgoing()
    for offset in range(0, len(fixture.data), 1000):
        assert not session.acks_due
        session.feed(data_frame(fixture, offset, more=True), 0.0)
    assert session.acks_due


def test_a_registry_that_raises_refuses_readably() -> None:
    fixture = Fixture()

    def broken(*_: object) -> ByteSpace:
        raise RuntimeError("bug")

    fixture.registry.accept = broken  # type: ignore[method-assign]
    fixture.network.run()
    assert fixture.network.listener.failed[fixture.id].code == "registry"
    assert len(fixture.network.connections) == 2


def test_many_scattered_bytes_end_the_transfer_not_the_receiver() -> None:
    config = TransportConfig(max_ranges_per_transfer=5)
    registry = MemoryRegistry()
    network = MemoryNetwork(config, registry)
    network.connect()
    network.run()
    registry.expect(make_spec(1), MemorySpace(bytearray(1000)))
    transfer = network.open(make_spec(1), MemorySpace(bytearray(1000)))
    for offset in range(0, 1000, 10):
        network.ready(transfer, offset, 1)
    network.run()
    assert network.listener.failed[transfer.spec.transfer_id].code == "fragmented"
    assert registry.failed[transfer.spec.transfer_id].code == "fragmented"
    assert transfer.state is TransferState.FAILED
