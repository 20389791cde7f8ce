"""The receiver's end of one connection: each answer, when it is due, and how long it waits."""

from __future__ import annotations

import math

import pytest
from transport_doubles import (
    SENDER_INSTANCE,
    MemoryRegistry,
    MemorySpace,
    NoConnections,
    greeting,
    make_spec,
)

from transport import OutgoingSpec, PeerError
from transport.config import TransportConfig
from transport.receiving.reception import Reception
from transport.wire.digest import digest_of
from transport.wire.frames import (
    FrameType,
    encode_data_header,
    encode_frame,
    encode_open,
    encode_ranges,
    encode_reason,
)
from transport.wire.handshake import Feature, Hello, own_hello
from transport.wire.receiver_session import ReceiverSession
from transport.wire.sender_session import (
    Acked,
    CancelAcked,
    Completed,
    Event,
    Opened,
    SenderSession,
    TransferFailed,
    Welcomed,
)

CONFIG = TransportConfig(
    frame_bytes=1000,
    max_frame_bytes=4000,
    handshake_timeout_s=5,
    idle_timeout_s=30,
    link_idle_timeout_s=50,
    ack_batch_bytes=100_000,
    ack_delay_s=0.5,
    max_transfers_per_connection=2,
    drop_grace_s=0,
)
SPEC = make_spec(1)
DATA = bytes(range(250)) * 80  # 20,000 bytes


def plain(events: list[Event]) -> list[object]:
    """Failures as (transfer, code, message), because errors are equal to themselves only."""
    return [
        (event.transfer_id, event.error.code, event.error.message)
        if isinstance(event, TransferFailed)
        else event
        for event in events
    ]


class Fixture:
    """A connection that has been greeted at 0 s; `said` is what it answered since."""

    def __init__(self, config: TransportConfig = CONFIG) -> None:
        self.registry = MemoryRegistry()
        self.spaces: list[MemorySpace] = []
        self.reception = Reception(config, self.registry, NoConnections())
        self.session = ReceiverSession(
            7, config=config, reception=self.reception, instance=b"R" * 16, now_s=0.0
        )
        self.sender = SenderSession(config, b"S" * 16)
        self.session.feed(self.sender.hello(), 0.0)
        self.sender.feed(self.session.outgoing())

    def open(
        self, spec: OutgoingSpec = SPEC, *, nbytes: int = len(DATA), now_s: float = 0.0
    ) -> list[object]:
        space = MemorySpace(bytearray(nbytes), 256)
        self.spaces.append(space)
        self.registry.expected.setdefault(spec.transfer_id, (spec.token, spec.fingerprint, space))
        fields = {"token": spec.token, "fingerprint": spec.fingerprint, "nbytes": nbytes}
        wire = encode_open(spec.transfer_id, **fields, digest=spec.digest)  # type: ignore[arg-type]
        return self.tell(wire, now_s)

    def data(self, start: int, end: int, *, more: bool = True, now_s: float = 0.0) -> None:
        """Part of the transfer arrives; nothing is taken out of the answers."""
        part = DATA[start:end]
        wire = encode_data_header(SPEC.transfer_id, start, [part], more=more) + part
        self.session.feed(wire, now_s)

    def tell(self, wire: bytes, now_s: float = 0.0) -> list[object]:
        """A frame arrives; what is answered at once."""
        self.session.feed(wire, now_s)
        return self.answers()

    def answers(self) -> list[object]:
        return plain(self.sender.feed(self.session.outgoing()))

    def acknowledged(self) -> list[object]:
        self.session.flush_acks()
        return self.answers()


def test_a_greeting_is_answered_with_our_own() -> None:
    registry = MemoryRegistry()
    config = TransportConfig(max_frame_bytes=4000, checksum=False, codec="none")
    session = ReceiverSession(
        7,
        config=config,
        reception=Reception(config, registry, NoConnections()),
        instance=b"R" * 16,
        now_s=0.0,
    )
    assert (session.established, session.acks_due, session.has_answers) == (False, False, False)
    assert session.peer_instance == b""
    session.feed(greeting(), 0.0)
    assert session.established
    assert session.peer_instance == SENDER_INSTANCE
    (event,) = SenderSession(config, b"S" * 16).feed(session.outgoing())
    assert event == Welcomed(Hello(2, 2, 4000, int(Feature.NO_SUM), b"R" * 16))


def test_a_sender_of_another_version_is_refused() -> None:
    reception = Reception(CONFIG, MemoryRegistry(), NoConnections())
    session = ReceiverSession(7, config=CONFIG, reception=reception, instance=bytes(16), now_s=0.0)
    with pytest.raises(PeerError, match="the sender speaks version 3 to 4") as caught:
        session.feed(Hello(3, 4, 4000, 0, bytes(16)).encode(FrameType.HELLO), 0.0)
    assert caught.value.code == "version"
    assert not session.established


def test_a_refused_transfer_is_told_why_and_costs_nothing_else() -> None:
    fixture = Fixture()
    fixture.registry.expected[SPEC.transfer_id] = (b"x" * 32, b"", MemorySpace(bytearray()))
    (event,) = fixture.open()
    assert event == (SPEC.transfer_id, "bad_token", "wrong token for this transfer")
    assert not fixture.session.has_opened
    assert fixture.open(make_spec(2)) == [Opened(make_spec(2).transfer_id, [])]
    assert fixture.session.has_opened


def test_opening_again_tells_what_is_there() -> None:
    fixture = Fixture()
    fixture.open()
    fixture.data(0, 1000)
    fixture.data(3000, 4000)
    assert fixture.open() == [Opened(SPEC.transfer_id, [(0, 1000), (3000, 4000)])]


def test_opening_what_is_complete_is_answered_with_complete() -> None:
    assert Fixture().open(nbytes=0) == [Completed(SPEC.transfer_id)]


def test_no_more_transfers_are_open_at_once_than_allowed() -> None:
    fixture = Fixture()
    for number in (1, 2):
        (event,) = fixture.open(make_spec(number), nbytes=1000)
        assert isinstance(event, Opened)
    third = make_spec(3)
    busy = "more than 2 open transfers on one connection"
    assert fixture.open(third) == [(third.transfer_id, "busy", busy)]
    fixture.data(0, 1000)  # completes the first
    fixture.answers()
    assert fixture.open(third) == [Opened(third.transfer_id, [])]


def test_transfers_that_ended_elsewhere_make_room() -> None:
    fixture = Fixture()
    for number in (1, 2):
        fixture.open(make_spec(number))
    fixture.reception.drop(make_spec(2).transfer_id, "not needed", 0.0)
    third, fourth = make_spec(3), make_spec(4)
    assert fixture.open(third) == [Opened(third.transfer_id, [])]
    busy = "more than 2 open transfers on one connection"
    assert fixture.open(fourth) == [(fourth.transfer_id, "busy", busy)]


# ---- acknowledgements


def test_acknowledgements_wait_until_a_batch_is_full() -> None:
    config = TransportConfig(max_frame_bytes=4000, ack_batch_bytes=2000, ack_delay_s=9.0)
    fixture = Fixture(config)
    fixture.open()
    fixture.data(0, 1999)
    assert not fixture.session.acks_due
    fixture.data(1999, 2000)
    assert fixture.session.acks_due
    assert fixture.acknowledged() == [Acked(SPEC.transfer_id, [(0, 2000)])]
    fixture.data(2000, 3999)
    assert not fixture.session.acks_due


def test_acknowledgements_wait_no_longer_than_the_delay_after_the_first() -> None:
    fixture = Fixture()
    fixture.open()
    fixture.data(0, 10, now_s=10.0)
    fixture.data(10, 20, now_s=10.4)
    assert not fixture.session.acks_due
    fixture.data(20, 30, now_s=10.5)
    assert fixture.session.acks_due
    fixture.acknowledged()
    fixture.session.feed(encode_frame(FrameType.DIGEST)[:1], 99.0)
    assert not fixture.session.acks_due  # none is left
    fixture = Fixture()
    fixture.open()
    fixture.data(0, 1, now_s=10.0)
    fixture.session.feed(encode_frame(FrameType.DIGEST)[:1], 10.5)
    assert fixture.session.acks_due  # of a single byte, too
    fixture = Fixture()
    fixture.open()
    fixture.data(0, 10, now_s=10.0)
    fixture.acknowledged()
    fixture.data(10, 20, now_s=20.0)
    assert not fixture.session.acks_due
    fixture.data(20, 30, now_s=20.5)
    assert fixture.session.acks_due


def test_acknowledgements_are_due_before_they_need_a_second_frame() -> None:
    fixture = Fixture()
    fixture.open()
    for index in range(4095):
        fixture.data(2 * index, 2 * index + 1)
    assert not fixture.session.acks_due
    fixture.data(2 * 4095, 2 * 4095 + 1)
    assert fixture.session.acks_due
    (event,) = fixture.acknowledged()
    assert isinstance(event, Acked)
    assert len(event.ranges) == 4096
    for index in range(4096, 8191):
        fixture.data(2 * index, 2 * index + 1)
    assert not fixture.session.acks_due
    fixture.data(2 * 8191, 2 * 8191 + 1)
    assert fixture.session.acks_due


def test_adjacent_ranges_are_acknowledged_as_one_and_transfers_apart() -> None:
    fixture = Fixture()
    other = make_spec(2)
    fixture.open()
    fixture.open(other)
    fixture.data(0, 10)
    fixture.data(20, 30)
    fixture.data(10, 20)
    part = b"x" * 5
    fixture.session.feed(encode_data_header(other.transfer_id, 0, [part]) + part, 0.0)
    assert fixture.session.has_answers
    assert fixture.answers() == []
    assert fixture.acknowledged() == [
        Acked(SPEC.transfer_id, [(0, 30)]),
        Acked(other.transfer_id, [(0, 5)]),
    ]
    assert not fixture.session.has_answers
    assert fixture.acknowledged() == []


def test_many_answers_are_due_however_short_they_are() -> None:
    fixture = Fixture()
    for _ in range(63):
        fixture.session.feed(encode_frame(FrameType.DIGEST, bytes(16), bytes(32)), 0.0)
    assert fixture.session.has_answers
    assert not fixture.session.acks_due
    fixture.session.feed(encode_frame(FrameType.DIGEST, bytes(16), bytes(32)), 0.0)
    assert fixture.session.acks_due


@pytest.mark.parametrize(("num_ranges", "is_due"), [(4092, False), (4093, True)])
def test_long_answers_are_due_however_few_they_are(num_ranges: int, is_due: bool) -> None:
    """48 bytes of header and 16 a range: 4093 make exactly 64 KiB."""
    fixture = Fixture()
    fixture.open()
    for index in range(num_ranges):
        fixture.data(2 * index, 2 * index + 1)
    fixture.session.flush_acks()
    fixture.session.outgoing()
    fields = {"token": SPEC.token, "fingerprint": SPEC.fingerprint, "nbytes": len(DATA)}
    fixture.session.feed(encode_open(SPEC.transfer_id, **fields), 0.0)  # type: ignore[arg-type]
    assert fixture.session.acks_due is is_due


def test_answers_may_wait_only_between_frames_while_more_is_announced() -> None:
    fixture = Fixture()
    fixture.open()
    assert not fixture.session.may_wait
    fixture.data(0, 10)
    assert fixture.session.may_wait
    rest = encode_data_header(SPEC.transfer_id, 10, [DATA[10:20]], more=True)
    fixture.session.feed(rest[:20], 0.0)
    assert not fixture.session.may_wait
    fixture.session.feed(rest[20:] + DATA[10:20], 0.0)
    assert fixture.session.may_wait
    fixture.data(20, 30, more=False)
    assert not fixture.session.may_wait


def test_the_last_bytes_are_acknowledged_and_completed_at_once() -> None:
    fixture = Fixture()
    fixture.open(nbytes=1000)
    fixture.data(0, 600)
    fixture.data(600, 1000)
    assert fixture.session.acks_due
    assert fixture.answers() == [
        Acked(SPEC.transfer_id, [(0, 1000)]),
        Completed(SPEC.transfer_id),
    ]
    assert not fixture.session.acks_due
    assert fixture.registry.completed == [SPEC.transfer_id]


def test_a_digest_that_agrees_completes_and_one_that_does_not_fails() -> None:
    spec = OutgoingSpec(SPEC.transfer_id, SPEC.token, SPEC.fingerprint, SPEC.endpoint, digest=True)
    for is_right in (True, False):
        fixture = Fixture()
        fixture.open(spec, nbytes=1000)
        fixture.data(0, 1000)
        assert fixture.acknowledged() == [Acked(SPEC.transfer_id, [(0, 1000)])]
        digest = digest_of(MemorySpace(bytearray(DATA[:1000]))) if is_right else bytes(32)
        events = fixture.tell(encode_frame(FrameType.DIGEST, SPEC.transfer_id, digest))
        assert events == ([Completed(SPEC.transfer_id)] if is_right else [])
        assert bool(fixture.registry.completed) is is_right
        assert bool(fixture.registry.failed) is not is_right


@pytest.mark.parametrize("kind", [FrameType.DATA, FrameType.DIGEST])
def test_what_concerns_a_transfer_that_is_not_open_here_is_answered_so(kind: FrameType) -> None:
    fixture = Fixture()
    wire = encode_frame(FrameType.DIGEST, SPEC.transfer_id, bytes(32))
    if kind is FrameType.DATA:
        wire = encode_data_header(SPEC.transfer_id, 0, [b"abc"]) + b"abc"
    message = f"{kind.name} for a transfer that was not opened on this connection"
    assert fixture.tell(wire) == [(SPEC.transfer_id, "not_open", message)]


def test_data_for_a_transfer_that_ended_is_answered_with_its_end_once() -> None:
    fixture = Fixture()
    fixture.open()
    fixture.reception.drop(SPEC.transfer_id, "not needed", 0.0)
    fixture.data(0, 10)
    (event,) = fixture.answers()
    assert event == (SPEC.transfer_id, "dropped", "not needed")
    fixture.data(10, 20)
    message = "DATA for a transfer that was not opened on this connection"
    assert fixture.answers() == [(SPEC.transfer_id, "not_open", message)]


# ---- cancels


def cancel(reason: str = "preempted") -> bytes:
    return encode_reason(FrameType.CANCEL, "cancelled", reason, SPEC.transfer_id)


def test_a_cancel_ends_the_transfer_and_what_was_due_to_it() -> None:
    fixture = Fixture()
    fixture.open()
    fixture.data(0, 10)
    assert fixture.tell(cancel()) == [CancelAcked(SPEC.transfer_id)]
    error = fixture.registry.failed[SPEC.transfer_id]
    assert (error.code, error.message) == ("cancelled", "preempted")
    assert fixture.acknowledged() == []
    fixture.spaces[0].release()  # raises BufferError if a view were left


def test_a_cancel_of_what_is_not_open_here_is_confirmed() -> None:
    assert Fixture().tell(cancel()) == [CancelAcked(SPEC.transfer_id)]


def test_a_cancel_that_comes_too_late_is_told_of_the_success() -> None:
    """The digest of another connection completed it: this one still has it open."""
    fixture = Fixture()
    fixture.open(nbytes=10)
    other = ReceiverSession(
        8, config=CONFIG, reception=fixture.reception, instance=b"R" * 16, now_s=0.0
    )
    fields = {"token": SPEC.token, "fingerprint": SPEC.fingerprint, "nbytes": 10}
    other.feed(greeting() + encode_open(SPEC.transfer_id, **fields), 0.0)  # type: ignore[arg-type]
    other.feed(encode_data_header(SPEC.transfer_id, 0, [DATA[:10]]) + DATA[:10], 0.0)
    assert fixture.tell(cancel()) == [Completed(SPEC.transfer_id)]


# ---- time


def test_a_connection_may_be_silent_as_long_as_something_is_open_on_it() -> None:
    fixture = Fixture()
    assert fixture.session.deadline_s == 100.0  # twice link_idle_timeout_s
    fixture.open(nbytes=1000, now_s=10.0)
    assert fixture.session.deadline_s == math.inf
    fixture.session.feed(encode_frame(FrameType.DIGEST)[:5], 20.0)
    assert fixture.session.deadline_s == 50.0  # the rest of a frame is owed
    assert fixture.session.in_frame
    assert not fixture.session.in_body


def test_a_connection_whose_transfers_have_ended_must_speak_again() -> None:
    fixture = Fixture()
    fixture.open(nbytes=1000)
    fixture.data(0, 1000, now_s=10.0)
    assert fixture.session.deadline_s == 110.0
    fixture = Fixture()
    fixture.open()
    fixture.tell(cancel(), 20.0)
    assert fixture.session.deadline_s == 120.0


def test_what_is_refused_extends_no_time() -> None:
    fixture = Fixture()
    fields = {"token": bytes(32), "fingerprint": SPEC.fingerprint, "nbytes": 1}
    refused = encode_open(SPEC.transfer_id, **fields)  # type: ignore[arg-type]
    for_nobody = encode_data_header(SPEC.transfer_id, 0, [b"x"]) + b"x"
    for now_s, wire in ((10.0, refused), (20.0, for_nobody), (30.0, cancel()), (90.0, refused)):
        fixture.session.feed(wire, now_s)
        assert fixture.session.outgoing()
        assert fixture.session.deadline_s == 100.0
    fixture.session.feed(refused[:1], 95.0)
    assert fixture.session.deadline_s == 100.0
    assert not fixture.session.has_opened
    fixture.session.feed(refused[1:], 96.0)
    fixture.session.outgoing()
    fixture.open(now_s=97.0)
    assert fixture.session.has_opened
    assert fixture.session.deadline_s == math.inf


def test_within_a_body_the_buffers_are_its_rest() -> None:
    fixture = Fixture()
    fixture.open()
    assert (fixture.session.in_frame, fixture.session.in_body) == (False, False)
    wire = encode_data_header(SPEC.transfer_id, 0, [DATA[:100]]) + DATA[:40]
    fixture.session.feed(wire, 0.0)
    assert (fixture.session.in_frame, fixture.session.in_body) == (True, True)
    assert sum(view.nbytes for view in fixture.session.buffers()) == 60


# ---- rules that are broken, and the end


def test_an_error_of_the_sender_ends_the_connection_in_its_words() -> None:
    fixture = Fixture()
    with pytest.raises(PeerError, match="the sender reports: it is over") as caught:
        fixture.session.feed(encode_reason(FrameType.ERROR, "version", "it is over"), 0.0)
    assert caught.value.code == "version"


@pytest.mark.parametrize(
    "kind", [FrameType.HELLO, FrameType.WELCOME, FrameType.ACK, FrameType.COMPLETE]
)
def test_a_broken_rule_is_told_before_the_connection_ends(kind: FrameType) -> None:
    fixture = Fixture()
    with pytest.raises(PeerError) as caught:
        fixture.session.feed(encode_frame(kind), 5.0)
    error = caught.value
    assert (error.code, error.message) == ("protocol", f"unexpected {kind.name} from a sender")
    assert fixture.session.outgoing() == encode_reason(FrameType.ERROR, error.code, error.message)
    assert fixture.session.deadline_s == 100.0


def test_data_beyond_the_transfer_ends_the_connection() -> None:
    fixture = Fixture()
    fixture.open(nbytes=1000)
    with pytest.raises(PeerError, match="up to byte 1001 of a transfer that has 1000"):
        fixture.data(900, 1001)
    assert fixture.registry.failed == {}


def test_a_connection_that_is_gone_serves_no_transfer_and_holds_no_memory() -> None:
    fixture = Fixture()
    fixture.open()
    landing = fixture.reception.transfers.find(SPEC.transfer_id)
    assert landing is not None
    assert fixture.reception.transfers.attached(landing) == {7}
    fixture.session.feed(encode_data_header(SPEC.transfer_id, 0, [DATA[:100]]) + DATA[:40], 0.0)
    fixture.session.close(1.0)
    assert fixture.reception.transfers.attached(landing) == frozenset()
    assert fixture.session.buffers() == []
    fixture.reception.drop(SPEC.transfer_id, "not needed", 2.0)
    fixture.spaces[0].release()


# ---- what a sender makes of it


def greeted() -> SenderSession:
    session = SenderSession(CONFIG, b"S" * 16)
    session.feed(own_hello(b"R" * 16, 4000).encode(FrameType.WELCOME))
    return session


def test_a_sender_says_what_it_takes() -> None:
    config = TransportConfig(max_frame_bytes=4000, checksum=False, codec="none")
    wire = SenderSession(config, b"S" * 16).hello()
    assert wire == Hello(2, 2, 4000, 1, b"S" * 16).encode(FrameType.HELLO)


def test_a_sender_is_established_by_the_welcome() -> None:
    session = SenderSession(CONFIG, b"S" * 16)
    welcome = own_hello(b"R" * 16, 4000).encode(FrameType.WELCOME)
    assert session.feed(welcome[:60]) == []
    assert not session.established
    assert session.feed(welcome[60:]) == [Welcomed(own_hello(b"R" * 16, 4000))]
    assert session.established


def test_a_sender_hears_every_answer_however_it_is_cut() -> None:
    wire = encode_ranges(FrameType.OPENED, b"o" * 16, [])
    wire += encode_ranges(FrameType.ACK, b"a" * 16, [(0, 5), (7, 8)])
    wire += encode_frame(FrameType.COMPLETE, b"c" * 16)
    wire += encode_reason(FrameType.FAIL, "idle", "too long", b"f" * 16)
    wire += encode_frame(FrameType.CANCELLED, b"x" * 16)
    expected = [
        Opened(b"o" * 16, []),
        Acked(b"a" * 16, [(0, 5), (7, 8)]),
        Completed(b"c" * 16),
        (b"f" * 16, "idle", "too long"),
        CancelAcked(b"x" * 16),
    ]
    assert plain(greeted().feed(wire)) == expected
    session = greeted()
    events = [event for byte in wire for event in session.feed(bytes([byte]))]
    assert plain(events) == expected


def test_an_error_of_the_receiver_ends_the_connection_in_its_words() -> None:
    with pytest.raises(PeerError) as caught:
        greeted().feed(encode_reason(FrameType.ERROR, "protocol", "too many"))
    assert (caught.value.code, caught.value.message) == ("protocol", "too many")


def test_a_receiver_of_another_version_is_named() -> None:
    other = Hello(3, 4, 4000, 0, b"R" * 16)
    with pytest.raises(PeerError, match="the receiver speaks version 3 to 4"):
        SenderSession(CONFIG, b"S" * 16).feed(other.encode(FrameType.WELCOME))


@pytest.mark.parametrize("kind", [FrameType.HELLO, FrameType.CANCEL, FrameType.WELCOME])
def test_frames_a_receiver_must_not_send(kind: FrameType) -> None:
    with pytest.raises(PeerError, match=f"unexpected {kind.name} from a receiver") as caught:
        greeted().feed(encode_frame(kind))
    assert caught.value.code == "protocol"


def test_a_receiver_sends_no_data() -> None:
    with pytest.raises(PeerError, match="DATA of 1 bytes"):
        greeted().feed(encode_data_header(SPEC.transfer_id, 0, [b"x"]))
