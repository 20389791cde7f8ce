"""Coded DATA at a receiver: what comes back, what repeats, and what is not taken."""

from __future__ import annotations

from dataclasses import replace

import pytest
from transport_doubles import (
    MemoryRegistry,
    MemorySpace,
    NoConnections,
    greeting,
    make_spec,
)

from transport import PeerError, TransportError
from transport.codec.codecs import Codec, encode
from transport.config import TransportConfig
from transport.receiving.incoming import RAW_LENGTH
from transport.receiving.reception import Reception
from transport.wire.frames import FrameType, encode_data_header, encode_header, encode_open
from transport.wire.handshake import (
    Feature,
    Hello,
    codec_feature,
    decode_hello,
    own_features,
    takes_codec,
)
from transport.wire.receiver_session import ReceiverSession

CONFIG = TransportConfig(max_frame_bytes=4000, drop_grace_s=0)
SPEC = make_spec(1)
DATA = bytes(range(200)) * 30
LOSSLESS = [codec for codec in Codec if codec.is_lossless and codec is not Codec.RAW]


class Fixture:
    """A receiver with one open transfer on one raw connection."""

    def __init__(self, config: TransportConfig = CONFIG, num_bytes: int = len(DATA)) -> None:
        self.registry = MemoryRegistry()
        self.landed = bytearray(num_bytes)
        self.space = MemorySpace(self.landed, 256)
        self.registry.expect(SPEC, self.space)
        self.config = config
        self.reception = Reception(config, self.registry, NoConnections())
        self.session = self.connect(1)

    def connect(self, number: int) -> ReceiverSession:
        session = ReceiverSession(
            number, config=self.config, reception=self.reception, instance=b"R" * 16, now_s=0.0
        )
        opening = encode_open(
            SPEC.transfer_id,
            token=SPEC.token,
            fingerprint=SPEC.fingerprint,
            nbytes=len(self.landed),
        )
        session.feed(greeting() + opening, 0.0)
        session.outgoing()
        return session

    def feed(self, wire: bytes) -> None:
        """Arrives in pieces that meet no boundary."""
        position = 0
        while position < len(wire):
            count = self.fill(wire[position : position + 333])
            self.session.received(count, 0.0)
            position += count
            for landing in self.reception.transfers.open_ones():
                landing.check_invariants()

    def fill(self, piece: bytes) -> int:
        """As a socket does: no view of the buffer is kept."""
        target = self.session.buffers()[0]
        count = min(target.nbytes, len(piece))
        target[:count] = piece[:count]
        return count

    def verified(self) -> list[tuple[int, int]]:
        landing = self.reception.transfers.find(SPEC.transfer_id)
        assert landing is not None
        return landing.verified()

    def assert_violation(self, wire: bytes, match: str) -> None:
        """The connection ends, its claims are given back, and nothing counts."""
        with pytest.raises(PeerError, match=match) as caught:
            self.feed(wire)
        assert caught.value.code == "protocol"
        assert self.verified() == []
        assert self.session.outgoing()
        self.session.close(0.0)
        self.session = self.connect(2)
        for start in range(0, len(self.landed), 1000):
            self.feed(raw_frame(start, DATA[start : start + 1000]))
        assert self.registry.completed == [SPEC.transfer_id]
        assert self.landed == DATA[: len(self.landed)]


def coded_frame(
    codec: Codec, start: int, data: bytes, *, element_bytes: int = 2, raw_bytes: int | None = None
) -> bytes:
    payload = bytes(encode(codec, [memoryview(data)], element_bytes))
    return payload_frame(codec, start, len(data) if raw_bytes is None else raw_bytes, payload)


def payload_frame(codec: int, start: int, raw_bytes: int, payload: bytes) -> bytes:
    body = RAW_LENGTH.pack(raw_bytes) + payload
    return encode_data_header(SPEC.transfer_id, start, [body], codec=codec) + body


def raw_frame(start: int, data: bytes, *, with_sum: bool = True) -> bytes:
    return encode_data_header(SPEC.transfer_id, start, [data], with_sum=with_sum) + data


@pytest.mark.parametrize("codec", LOSSLESS)
@pytest.mark.parametrize("element_bytes", [1, 2, 4])
def test_coded_bytes_come_back(codec: Codec, element_bytes: int) -> None:
    fixture = Fixture()
    for start in (0, 4000, 2001):  # odd offsets and lengths, and one that comes out of order
        end = {0: 2001, 2001: 4000, 4000: 6000}[start]
        fixture.feed(coded_frame(codec, start, DATA[start:end], element_bytes=element_bytes))
    assert fixture.landed == DATA
    assert fixture.registry.completed == [SPEC.transfer_id]
    fixture.space.release()


def test_coded_and_raw_frames_mix() -> None:
    fixture = Fixture()
    fixture.feed(raw_frame(0, DATA[:1000]))
    fixture.feed(coded_frame(Codec.ZSTD_PLANES, 1000, DATA[1000:5000]))
    fixture.feed(raw_frame(5000, DATA[5000:]))
    assert fixture.landed == DATA
    assert fixture.registry.completed == [SPEC.transfer_id]


def test_a_coded_frame_is_acknowledged_by_its_raw_bytes() -> None:
    fixture = Fixture()
    fixture.feed(coded_frame(Codec.LZ4, 1000, bytes(3000)))
    assert fixture.verified() == [(1000, 4000)]
    fixture.session.flush_acks()
    assert (1000).to_bytes(8, "little") + (3000).to_bytes(8, "little") in fixture.session.outgoing()


@pytest.mark.parametrize("codec", LOSSLESS)
def test_a_coded_repeat_adds_only_what_was_missing(codec: Codec) -> None:
    fixture = Fixture()
    fixture.feed(raw_frame(1000, DATA[1000:2000]))
    other = bytes(byte ^ 0xFF for byte in DATA[500:2500])
    fixture.feed(coded_frame(codec, 500, other))
    assert fixture.verified() == [(500, 2500)]
    assert fixture.landed[1000:2000] == DATA[1000:2000]
    assert fixture.landed[500:1000] == other[:500]
    assert fixture.landed[2000:2500] == other[1500:]
    progress = fixture.reception.progress(SPEC.transfer_id)
    assert progress is not None
    assert progress.resent_bytes == 1000


def test_a_coded_repeat_of_it_all_changes_nothing() -> None:
    fixture = Fixture()
    fixture.feed(coded_frame(Codec.ZSTD, 0, DATA[:2000]))
    fixture.feed(coded_frame(Codec.ZSTD, 0, bytes(2000)))
    assert fixture.landed[:2000] == DATA[:2000]
    assert fixture.verified() == [(0, 2000)]


def test_a_coded_frame_for_a_transfer_that_ended_is_thrown_away() -> None:
    fixture = Fixture()
    fixture.reception.drop(SPEC.transfer_id, "test", 0.0)
    fixture.space.release()
    fixture.feed(coded_frame(Codec.LZ4, 0, DATA[:2000]))
    assert fixture.landed == bytes(len(DATA))
    assert b"dropped" in fixture.session.outgoing()


def test_a_transfer_that_ends_while_a_coded_frame_arrives() -> None:
    fixture = Fixture()
    wire = coded_frame(Codec.LZ4, 0, DATA[:2000])
    fixture.feed(wire[:100])
    fixture.reception.drop(SPEC.transfer_id, "test", 0.0)
    fixture.space.release()  # a coded frame claims nothing before it is whole
    fixture.feed(wire[100:])
    assert fixture.landed == bytes(len(DATA))
    assert b"dropped" in fixture.session.outgoing()


def test_a_coded_frame_for_a_transfer_that_is_not_open_here() -> None:
    fixture = Fixture()
    body = RAW_LENGTH.pack(10) + b"anything"
    header = encode_data_header(make_spec(2).transfer_id, 0, [body], codec=Codec.LZ4)
    fixture.feed(header + body)
    assert b"not_open" in fixture.session.outgoing()


def test_a_coded_frame_that_is_damaged_on_its_way_counts_for_nothing() -> None:
    fixture = Fixture()
    wire = bytearray(coded_frame(Codec.ZSTD, 0, DATA[:2000]))
    wire[-5] ^= 4
    with pytest.raises(PeerError) as caught:
        fixture.feed(bytes(wire))
    assert caught.value.code == "checksum"
    assert fixture.verified() == []


# Violations.


@pytest.mark.parametrize("codec", LOSSLESS)
@pytest.mark.parametrize("payload", [b"", b"\x00", b"\x01\x01\xff\xff\xff\xff", b"\x02" * 60])
def test_a_malformed_payload_is_a_violation(codec: Codec, payload: bytes) -> None:
    wire = payload_frame(codec, 0, 1000, payload)
    fixture = Fixture()
    fixture.assert_violation(wire, "coded DATA")
    assert fixture.registry.completed == [SPEC.transfer_id]


def test_a_malformed_repeat_leaves_what_is_verified_alone() -> None:
    fixture = Fixture()
    fixture.feed(raw_frame(0, DATA[:1000]))
    with pytest.raises(PeerError, match="cannot be decoded"):
        fixture.feed(payload_frame(Codec.LZ4, 500, 1000, b"\x01" * 50))
    assert fixture.verified() == [(0, 1000)]
    assert fixture.landed[:1000] == DATA[:1000]


@pytest.mark.parametrize("num_bytes", [1, 3, 4])
def test_a_body_too_short_for_a_length_is_a_violation(num_bytes: int) -> None:
    body = b"\x01" * num_bytes
    header = encode_data_header(SPEC.transfer_id, 0, [body], codec=Codec.LZ4)
    Fixture().assert_violation(header + body, "coded DATA of 0 bytes")


@pytest.mark.parametrize("raw_bytes", [0, 4001, 0xFFFFFFFF])
def test_a_raw_length_that_no_frame_has_is_a_violation(raw_bytes: int) -> None:
    wire = coded_frame(Codec.ZSTD, 0, DATA[:2000], raw_bytes=raw_bytes)
    Fixture().assert_violation(wire, f"coded DATA of {raw_bytes} bytes")


@pytest.mark.parametrize("raw_bytes", [1999, 2001])
def test_a_raw_length_that_is_not_the_payloads_is_a_violation(raw_bytes: int) -> None:
    wire = coded_frame(Codec.LZ4, 0, DATA[:2000], raw_bytes=raw_bytes)
    Fixture().assert_violation(wire, "cannot be decoded")


def test_a_coded_frame_beyond_the_transfer_is_a_violation() -> None:
    wire = coded_frame(Codec.ZSTD, 5000, DATA[:1001])
    Fixture().assert_violation(wire, "DATA up to byte 6001 of a transfer that has 6000")


@pytest.mark.parametrize(
    ("codec_setting", "codec"),
    [("none", Codec.LZ4), ("none", Codec.ZSTD_PLANES), ("auto", Codec.FP8), ("lz4", Codec.FP8)],
)
def test_a_codec_that_was_not_agreed_on_is_a_violation(codec_setting: str, codec: Codec) -> None:
    config = TransportConfig(max_frame_bytes=4000, drop_grace_s=0, codec=codec_setting)
    Fixture(config).assert_violation(coded_frame(codec, 0, DATA[:2000]), "not agreed on")


@pytest.mark.parametrize("codec", [6, 15])
def test_an_unknown_codec_is_a_violation(codec: int) -> None:
    Fixture().assert_violation(payload_frame(codec, 0, 1000, b"x" * 50), "not agreed on")


def test_the_lossy_codec_is_taken_when_both_ask_for_it() -> None:
    config = TransportConfig(max_frame_bytes=4000, drop_grace_s=0, codec="fp8")
    fixture = Fixture(config, 2000)
    fixture.feed(coded_frame(Codec.FP8, 0, bytes(2000)))
    assert fixture.registry.completed == [SPEC.transfer_id]
    assert takes_codec(config, Codec.ZSTD)


def test_memory_that_cannot_be_had_for_a_coded_frame_fails_only_the_transfer() -> None:
    fixture = Fixture()

    def no_views(offset: int, length: int) -> list[memoryview]:
        raise OSError("gone")

    fixture.space.views = no_views  # type: ignore[method-assign]
    fixture.feed(coded_frame(Codec.LZ4, 0, DATA[:2000]))
    assert fixture.registry.failed[SPEC.transfer_id].code == "space"
    assert fixture.session.established


@pytest.mark.parametrize("codec", [Codec.RAW, Codec.LZ4])
def test_no_view_is_left_when_the_frame_that_arrived_ends_the_transfer(codec: Codec) -> None:
    fixture = Fixture(replace(CONFIG, max_ranges_per_transfer=2))
    released: list[bytes] = []

    def on_failed(transfer_id: bytes, error: TransportError) -> None:
        assert error.code == "fragmented"
        fixture.space.release()
        released.append(transfer_id)

    fixture.registry.on_failed = on_failed  # type: ignore[method-assign]
    for start in (0, 2000, 4000):
        data = DATA[start : start + 1000]
        frame = raw_frame(start, data) if codec is Codec.RAW else coded_frame(codec, start, data)
        fixture.feed(frame)
    assert released == [SPEC.transfer_id]


# Checksums that both sides leave out.


def test_data_without_a_checksum_is_a_violation_unless_agreed_on() -> None:
    Fixture().assert_violation(raw_frame(0, DATA[:1000], with_sum=False), "flags 0x80")


@pytest.mark.parametrize("codec", [Codec.RAW, Codec.LZ4])
def test_data_without_a_checksum_is_taken_when_agreed_on(codec: Codec) -> None:
    fixture = Fixture(TransportConfig(max_frame_bytes=4000, drop_grace_s=0, checksum=False))
    body = DATA[:2000]
    if codec is not Codec.RAW:
        body = RAW_LENGTH.pack(2000) + bytes(encode(codec, [memoryview(body)], 1))
    header = encode_data_header(SPEC.transfer_id, 0, [body], codec=codec, with_sum=False)
    fixture.feed(header + body)
    fixture.feed(raw_frame(2000, DATA[2000:6000]))  # and one with a checksum
    assert fixture.landed == DATA
    assert fixture.registry.completed == [SPEC.transfer_id]


def test_only_data_may_go_without_a_checksum() -> None:
    fixture = Fixture(TransportConfig(max_frame_bytes=4000, drop_grace_s=0, checksum=False))
    with pytest.raises(PeerError, match="flags 0x80"):
        fixture.feed(encode_header(FrameType.CANCEL, SPEC.transfer_id, length=0, flags=0x80))


# What the greeting says.


def test_features_say_what_is_taken() -> None:
    lossless = sum(codec_feature(codec) for codec in LOSSLESS)
    fp8 = codec_feature(Codec.FP8)
    assert own_features(TransportConfig(codec="none")) == 0
    assert own_features(TransportConfig()) == lossless
    assert own_features(TransportConfig(codec="fp8")) == lossless | fp8
    assert own_features(TransportConfig(codec="none", checksum=False)) == Feature.NO_SUM
    assert not takes_codec(TransportConfig(), 15)
    assert not takes_codec(TransportConfig(), Codec.RAW)


def test_features_of_both_ends_arrive() -> None:
    config = TransportConfig(checksum=False, codec="fp8")
    session = ReceiverSession(
        1,
        config=config,
        reception=Reception(config, MemoryRegistry(), NoConnections()),
        instance=b"R" * 16,
        now_s=0.0,
    )
    session.feed(greeting(), 0.0)
    welcome: Hello = decode_hello(session.outgoing()[48:])
    assert welcome.features == own_features(config)
    assert welcome.max_frame_bytes == config.max_frame_bytes
