"""Where the body of one DATA frame goes and what comes of it, also when memory cannot be used."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from transport_doubles import MemoryRegistry, MemorySpace, make_spec

from transport.codec.codecs import Codec, encode
from transport.config import TransportConfig
from transport.errors import PeerError
from transport.interfaces import TransferState
from transport.receiving.incoming import RAW_LENGTH, Discarded, IncomingData, Verified
from transport.receiving.incoming_transfer import IncomingTransfer
from transport.receiving.incoming_transfers import OpenRequest
from transport.receiving.reception import Reception
from transport.wire.frame_reader import FrameReader, Step
from transport.wire.frames import FrameHeader, FrameType, encode_data_header, encode_frame

CONFIG = TransportConfig(max_frame_bytes=100_000, max_ranges_per_transfer=2, drop_grace_s=0)
SPEC = make_spec(1)
DATA = bytes(range(250)) * 800  # 200,000 bytes
Maker = Callable[[int, int], bytes]


class Told:
    """Remembers what is sent on other connections."""

    def __init__(self) -> None:
        self.frames: list[tuple[frozenset[int], bytes]] = []

    def abort(self, connections: object, error: object) -> None: ...

    def tell(self, connections: frozenset[int], frame: bytes) -> None:
        self.frames.append((connections, frame))


class BrokenSpace(MemorySpace):
    """Memory whose views cannot be had once `is_broken`."""

    is_broken = False
    is_short = False

    def views(self, offset: int, length: int) -> list[memoryview]:
        if self.is_broken:
            raise RuntimeError("unmapped")
        if self.is_short:
            return super().views(offset, length - 1)
        return super().views(offset, length)


class Fixture:
    """One connection, number 1, with one open transfer."""

    def __init__(self, nbytes: int = len(DATA)) -> None:
        self.registry = MemoryRegistry()
        self.landed = bytearray(nbytes)
        self.space = BrokenSpace(self.landed, 1 << 16)
        self.registry.expect(SPEC, self.space)
        self.told = Told()
        self.reception = Reception(CONFIG, self.registry, self.told)
        request = OpenRequest(SPEC.transfer_id, SPEC.token, SPEC.fingerprint, nbytes, False)
        self.landing: IncomingTransfer = self.reception.open(1, request, 1.0)
        self.incoming = IncomingData(1, CONFIG, self.reception)
        self.reader = FrameReader(CONFIG.max_frame_bytes)
        self.reader.established = True

    def begin(self, wire: bytes, *, is_open: bool = True, now_s: float = 2.0) -> FrameHeader:
        """The header arrives: afterwards the reader knows where the body goes."""
        self.reader.buffers()[0][:] = wire[:48]
        assert self.reader.advance(48) is Step.HEADER
        header = self.reader.header
        assert header is not None
        self.incoming.begin(self.reader, header, self.landing if is_open else None, now_s)
        return header

    def fill(self, body: bytes) -> None:
        while body:
            target = self.reader.buffers()[0]
            count = min(target.nbytes, len(body))
            target[:count] = body[:count]
            body = body[count:]
            del target
            self.reader.advance(count)

    def take(
        self, wire: bytes, *, is_open: bool = True, now_s: float = 2.0
    ) -> Verified | Discarded | None:
        header = self.begin(wire, is_open=is_open, now_s=now_s)
        self.fill(wire[48:])
        return self.incoming.finish(self.reader, header, now_s)


def raw(start: int, end: int) -> bytes:
    part = DATA[start:end]
    return encode_data_header(SPEC.transfer_id, start, [part]) + part


def coded(start: int, end: int, codec: Codec = Codec.LZ4) -> bytes:
    payload = bytes(encode(codec, [memoryview(DATA[start:end])], 2))
    body = RAW_LENGTH.pack(end - start) + payload
    return encode_data_header(SPEC.transfer_id, start, [body], codec=codec) + body


@pytest.mark.parametrize("make", [raw, coded])
def test_what_is_verified_is_told_by_its_raw_range(make: Maker) -> None:
    fixture = Fixture(nbytes=1000)
    assert fixture.take(make(0, 600)) == Verified(fixture.landing, (0, 600), False)
    assert fixture.take(make(600, 1000)) == Verified(fixture.landing, (600, 1000), True)
    assert fixture.landed == DATA[:1000]
    fixture.space.release()


def test_whoever_opened_it_while_it_was_judged_hears_that_it_is_complete() -> None:
    fixture = Fixture(nbytes=1000)
    assert fixture.take(raw(0, 1000)) == Verified(fixture.landing, (0, 1000), True)
    request = OpenRequest(SPEC.transfer_id, SPEC.token, SPEC.fingerprint, 1000)
    assert fixture.reception.open(2, request, 2.5).verified() == [(0, 1000)]
    assert fixture.landing.state is TransferState.OPEN
    assert fixture.reception.conclude(1, fixture.landing, 3.0)
    assert fixture.told.frames == [
        (frozenset({2}), encode_frame(FrameType.COMPLETE, SPEC.transfer_id))
    ]


@pytest.mark.parametrize("make", [raw, coded])
def test_a_repeat_is_verified_and_adds_what_was_missing(make: Maker) -> None:
    fixture = Fixture(nbytes=1000)
    fixture.take(make(200, 400))
    assert fixture.take(make(0, 600)) == Verified(fixture.landing, (0, 600), False)
    assert fixture.take(make(0, 600)) == Verified(fixture.landing, (0, 600), False)
    assert fixture.landing.verified() == [(0, 600)]
    assert fixture.landed[:600] == DATA[:600]
    assert fixture.landing.received_again_bytes == 800


@pytest.mark.parametrize("make", [raw, coded])
def test_the_time_of_the_first_byte_is_noted(make: Maker) -> None:
    fixture = Fixture()
    fixture.take(make(0, 10), is_open=False, now_s=3.0)
    assert fixture.reception.transfers.times(SPEC.transfer_id) == (1.0, None, None)
    fixture.take(make(0, 10), now_s=4.0)
    fixture.take(make(10, 20), now_s=5.0)
    assert fixture.reception.transfers.times(SPEC.transfer_id) == (1.0, 4.0, None)


@pytest.mark.parametrize("make", [raw, coded])
def test_data_of_a_transfer_that_is_not_open_here_is_thrown_away(make: Maker) -> None:
    fixture = Fixture()
    assert fixture.take(make(0, 100_000), is_open=False) == Discarded(None)
    assert fixture.landing.verified() == []
    assert fixture.take(make(0, 10)) == Verified(fixture.landing, (0, 10), False)


@pytest.mark.parametrize("make", [raw, coded])
@pytest.mark.parametrize("is_under_way", [False, True])
def test_data_of_a_transfer_that_has_ended_is_thrown_away(make: Maker, is_under_way: bool) -> None:
    fixture = Fixture()
    wire = make(0, 1000)
    if is_under_way:
        header = fixture.begin(wire)
        fixture.landing.end(TransferState.FAILED, "idle", "too long")
        fixture.fill(wire[48:])
        assert fixture.incoming.finish(fixture.reader, header, 3.0) == Discarded(fixture.landing)
    else:
        fixture.landing.end(TransferState.FAILED, "idle", "too long")
        assert fixture.take(wire) == Discarded(fixture.landing)
    assert fixture.landing.verified() == []


def sink_bytes(fixture: Fixture) -> int:
    """Scratch memory that the connection holds: what is thrown away goes into all of it."""
    wire = raw(0, 100_000)
    fixture.begin(wire, is_open=False)
    (sink,) = fixture.reader.buffers()
    return sink.nbytes


def test_what_is_thrown_away_needs_64_kib() -> None:
    assert sink_bytes(Fixture()) == 64 * 1024


@pytest.mark.parametrize("nbytes", [1000, 80_000])
def test_memory_for_a_repeat_of_raw_bytes_is_not_kept(nbytes: int) -> None:
    fixture = Fixture()
    fixture.take(raw(0, nbytes))
    fixture.take(raw(0, nbytes))
    assert sink_bytes(fixture) == 64 * 1024


def test_memory_for_coded_bytes_is_kept_for_the_next_ones() -> None:
    fixture = Fixture()
    noise = random.Random(1).randbytes(90_000)
    body = RAW_LENGTH.pack(90_000) + bytes(encode(Codec.LZ4, [memoryview(noise)], 2))
    wire = encode_data_header(SPEC.transfer_id, 0, [body], codec=Codec.LZ4) + body
    fixture.take(wire)
    fixture.incoming.forget()
    assert sink_bytes(fixture) == 64 * 1024
    fixture = Fixture()
    fixture.take(wire)
    assert sink_bytes(fixture) == len(body)


def test_a_coded_frame_may_hold_a_single_byte() -> None:
    fixture = Fixture()
    assert fixture.take(coded(0, 1)) == Verified(fixture.landing, (0, 1), False)


def test_a_frame_as_long_as_allowed_may_be_coded() -> None:
    fixture = Fixture()
    assert fixture.take(coded(0, 100_000)) == Verified(fixture.landing, (0, 100_000), False)


@pytest.mark.parametrize("raw_bytes", [0, 100_001])
def test_a_coded_frame_of_no_or_too_many_bytes_is_a_violation(raw_bytes: int) -> None:
    fixture = Fixture()
    body = RAW_LENGTH.pack(raw_bytes) + b"payload"
    wire = encode_data_header(SPEC.transfer_id, 0, [body], codec=Codec.LZ4) + body
    with pytest.raises(PeerError, match=f"coded DATA of {raw_bytes} bytes") as caught:
        fixture.take(wire)
    assert caught.value.code == "protocol"


@pytest.mark.parametrize("body", [b"\x01", RAW_LENGTH.pack(1)])
def test_a_coded_frame_without_a_payload_is_a_violation(body: bytes) -> None:
    fixture = Fixture()
    wire = encode_data_header(SPEC.transfer_id, 0, [body], codec=Codec.LZ4) + body
    with pytest.raises(PeerError, match="coded DATA of 0 bytes"):
        fixture.take(wire)


def test_a_payload_that_cannot_be_decoded_is_a_violation() -> None:
    fixture = Fixture()
    body = RAW_LENGTH.pack(100) + b"payload"
    wire = encode_data_header(SPEC.transfer_id, 0, [body], codec=Codec.ZSTD) + body
    with pytest.raises(PeerError, match="coded DATA cannot be decoded") as caught:
        fixture.take(wire)
    assert caught.value.code == "protocol"


def test_a_codec_that_was_not_agreed_on_is_a_violation_even_for_what_is_not_open() -> None:
    fixture = Fixture()
    wire = encode_data_header(SPEC.transfer_id, 0, [b"body"], codec=Codec.FP8)
    with pytest.raises(PeerError, match="codec 5, which was not agreed on") as caught:
        fixture.begin(wire, is_open=False)
    assert caught.value.code == "protocol"


@pytest.mark.parametrize("make", [raw, coded])
def test_data_beyond_the_transfer_is_a_violation(make: Maker) -> None:
    fixture = Fixture(nbytes=1000)
    with pytest.raises(PeerError, match="up to byte 1001") as caught:
        fixture.take(make(900, 1001))
    assert caught.value.code == "protocol"
    assert fixture.landing.state is TransferState.OPEN


@pytest.mark.parametrize("make", [raw, coded])
def test_memory_that_cannot_be_had_fails_only_the_transfer(make: Maker) -> None:
    fixture = Fixture()
    fixture.take(make(0, 10))
    fixture.space.is_broken = True
    # Raw bytes have no place from their header on; coded ones are claimed when they are whole.
    expected = Discarded(fixture.landing) if make is raw else None
    assert fixture.take(make(10, 20)) == expected
    error = fixture.registry.failed[SPEC.transfer_id]
    message = "the receiver's memory could not be used: RuntimeError"
    assert (error.code, error.message) == ("space", message)
    ((connections, _),) = fixture.told.frames
    assert connections == {1}
    fixture.space.is_broken = False
    fixture.space.release()  # raises BufferError if a view were left
    assert fixture.landing.wait_quiet(0.0) == frozenset()


@pytest.mark.parametrize("make", [raw, coded])
def test_memory_that_cannot_be_had_for_a_repeat_fails_only_the_transfer(make: Maker) -> None:
    """The repeat is read aside; only what was missing of it is copied."""
    fixture = Fixture()
    fixture.take(make(0, 10))
    wire = make(0, 20)
    header = fixture.begin(wire)
    fixture.fill(wire[48:])
    fixture.space.is_broken = True
    assert fixture.incoming.finish(fixture.reader, header, 3.0) is None
    assert fixture.registry.failed[SPEC.transfer_id].code == "space"


def test_memory_of_another_length_than_asked_for_fails_only_the_transfer() -> None:
    fixture = Fixture()
    fixture.space.is_short = True
    assert fixture.take(raw(0, 1000)) == Discarded(fixture.landing)
    error = fixture.registry.failed[SPEC.transfer_id]
    assert (error.code, error.message.rpartition(" ")[2]) == ("space", "ValueError")


@pytest.mark.parametrize("make", [raw, coded])
def test_a_range_too_many_fails_only_the_transfer(make: Maker) -> None:
    fixture = Fixture()
    fixture.take(make(0, 10))
    fixture.take(make(20, 30))
    assert fixture.take(make(40, 50)) is None
    assert fixture.registry.failed[SPEC.transfer_id].code == "fragmented"


def test_a_frame_that_arrived_damaged_ends_the_connection_and_counts_for_nothing() -> None:
    fixture = Fixture()
    wire = raw(0, 100)
    with pytest.raises(PeerError) as caught:
        fixture.take(wire[:-1] + b"\0")
    assert caught.value.code == "checksum"
    assert fixture.landing.verified() == []


def test_what_is_forgotten_in_mid_frame_leaves_no_view() -> None:
    fixture = Fixture()
    fixture.begin(raw(0, 100))
    fixture.incoming.forget()
    fixture.reader.forget()
    fixture.landing.abandon(1)
    fixture.landing.end(TransferState.FAILED, "lost", "")
    fixture.space.release()
