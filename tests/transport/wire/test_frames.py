"""Frames through the incremental reader: fragmentation, limits, hostile and damaged bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport import PeerError
from transport.wire.frame_reader import FrameReader, Step
from transport.wire.frames import (
    HEADER_BYTES,
    MAX_CONTROL_BYTES,
    FrameType,
    decode_open,
    decode_ranges,
    decode_reason,
    encode_data_header,
    encode_frame,
    encode_header,
    encode_open,
    encode_ranges,
    encode_reason,
)

ID = bytes(range(16))
MAX_DATA = 1000


def established(max_data_bytes: int = MAX_DATA) -> FrameReader:
    reader = FrameReader(max_data_bytes)
    reader.established = True
    return reader


def data_frame(offset: int, payload: bytes) -> bytes:
    return encode_data_header(ID, offset, [memoryview(payload)]) + payload


def read_all(reader: FrameReader, data: bytes, cuts: list[int]) -> list[tuple[FrameType, bytes]]:
    """Every frame of `data`, which arrives in pieces that end at `cuts`."""
    frames: list[tuple[FrameType, bytes]] = []
    memory = bytearray()
    edges = sorted({cut % (len(data) + 1) for cut in cuts} | {len(data)})
    position = 0
    for edge in edges:
        while position < edge:
            target = reader.buffers()[0]
            count = min(target.nbytes, edge - position)
            target[:count] = data[position : position + count]
            position += count
            step, header = reader.advance(count), reader.header
            if step is Step.PARTIAL:
                continue
            assert header is not None
            if header.kind is not FrameType.DATA:
                if step is Step.FRAME:
                    frames.append((header.kind, reader.control_body()))
            elif step is Step.HEADER:
                memory = bytearray(header.length)
                half = header.length // 2
                views = [memoryview(memory)[:half], memoryview(memory)[half:]]
                reader.place([view for view in views if view.nbytes])
            else:
                reader.verify_data()
                frames.append((header.kind, bytes(memory)))
    assert reader.at_boundary
    return frames


payloads = st.binary(min_size=1, max_size=MAX_DATA)


@given(st.lists(payloads, max_size=6), st.lists(st.integers(0, 10_000), max_size=30))
def test_any_fragmentation_gives_the_same_frames(bodies: list[bytes], cuts: list[int]) -> None:
    wire = b""
    expected = []
    for number, body in enumerate(bodies):
        wire += data_frame(number * MAX_DATA, body)
        wire += encode_ranges(FrameType.ACK, ID, [(0, number + 1)])
        wire += encode_frame(FrameType.COMPLETE, ID)
        expected += [
            (FrameType.DATA, body),
            (FrameType.ACK, encode_ranges(FrameType.ACK, ID, [(0, number + 1)])[HEADER_BYTES:]),
            (FrameType.COMPLETE, b""),
        ]
    assert read_all(established(), wire, cuts) == expected


@given(payloads, st.data())
def test_any_single_flipped_bit_is_noticed(body: bytes, data: st.DataObject) -> None:
    wire = bytearray(data_frame(7, body))
    bit = data.draw(st.integers(0, len(wire) * 8 - 1))
    wire[bit // 8] ^= 1 << bit % 8
    with pytest.raises(PeerError) as caught:
        read_all(established(), bytes(wire), [])
    assert caught.value.code == "checksum"


@given(st.binary(min_size=HEADER_BYTES, max_size=400))
def test_garbage_is_refused_before_anything_is_stored(garbage: bytes) -> None:
    reader = FrameReader(MAX_DATA)
    reader.buffers()[0][:] = garbage[:HEADER_BYTES]
    with pytest.raises(PeerError) as caught:
        reader.advance(HEADER_BYTES)
    assert caught.value.code == "not_prfaas"


def header_of(kind: int, *, length: int, offset: int = 0) -> bytes:
    return encode_header(kind, ID, length=length, offset=offset)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "header",
    [
        header_of(FrameType.DATA, length=MAX_DATA + 1),
        header_of(FrameType.DATA, length=0),
        header_of(FrameType.DATA, length=0xFFFFFFFF),
        header_of(FrameType.DATA, length=10, offset=1 << 63),
        header_of(FrameType.ACK, length=MAX_CONTROL_BYTES + 1),
        header_of(FrameType.OPEN, length=77),
        header_of(FrameType.COMPLETE, length=1),
        header_of(FrameType.ERROR, length=5000),
        header_of(FrameType.ACK, length=16, offset=1),
        header_of(99, length=0),
        header_of(0, length=0),
    ],
)
def test_a_header_over_a_limit_is_refused_at_once(header: bytes) -> None:
    reader = established()
    reader.buffers()[0][:] = header
    with pytest.raises(PeerError) as caught:
        reader.advance(HEADER_BYTES)
    assert caught.value.code == "protocol"


@pytest.mark.parametrize("kind", [FrameType.OPEN, FrameType.DATA, FrameType.ACK, FrameType.CANCEL])
def test_only_a_greeting_is_allowed_first(kind: FrameType) -> None:
    reader = FrameReader(MAX_DATA)
    reader.buffers()[0][:] = header_of(kind, length=32)
    with pytest.raises(PeerError, match="before the handshake"):
        reader.advance(HEADER_BYTES)


def test_a_long_greeting_is_refused() -> None:
    reader = FrameReader(MAX_DATA)
    reader.buffers()[0][:] = header_of(FrameType.HELLO, length=257)
    with pytest.raises(PeerError):
        reader.advance(HEADER_BYTES)


def test_a_body_is_read_into_the_views_it_was_given() -> None:
    reader = established()
    body = bytes(range(100))
    wire = data_frame(0, body)
    reader.buffers()[0][:] = wire[:HEADER_BYTES]
    assert reader.advance(HEADER_BYTES) is Step.HEADER
    memory = bytearray(100)
    views = [memoryview(memory)[:30], memoryview(memory)[30:]]
    reader.place(views)
    assert reader.buffers() == views
    memory[:50] = body[:50]
    assert reader.advance(50) is Step.PARTIAL
    assert [view.nbytes for view in reader.buffers()] == [50]
    memory[50:] = body[50:]
    assert reader.advance(50) is Step.FRAME
    reader.verify_data()
    views.clear()
    memory.clear()  # raises BufferError if a view were left


def test_a_discarded_body_needs_only_the_sink() -> None:
    reader = established(10_000)
    wire = data_frame(0, bytes(1000))
    reader.buffers()[0][:] = wire[:HEADER_BYTES]
    reader.advance(HEADER_BYTES)
    sink = memoryview(bytearray(64))
    reader.discard(sink)
    taken = 0
    while not reader.at_boundary:
        count = sum(view.nbytes for view in reader.buffers())
        assert count <= 64
        taken += count
        reader.advance(count)
    assert taken == 1000


def test_open_and_reasons_round_trip() -> None:
    frame = encode_open(ID, token=b"t" * 32, fingerprint=b"f" * 32, nbytes=12)
    assert decode_open(frame[HEADER_BYTES:]) == (b"t" * 32, b"f" * 32, 12, False)
    frame = encode_reason(FrameType.FAIL, "no_room", "größer\nthan life", ID)
    assert decode_reason(frame[HEADER_BYTES:]) == ("no_room", "größer?than life")


@given(st.lists(st.tuples(st.integers(0, 1 << 40), st.integers(1, 1 << 20)), max_size=5000))
def test_long_range_lists_are_split(pairs: list[tuple[int, int]]) -> None:
    ranges = [(start, start + length) for start, length in pairs]
    wire = encode_ranges(FrameType.ACK, ID, ranges)
    seen: list[tuple[int, int]] = []
    for _, body in read_all(established(), wire, []):
        seen += decode_ranges(body)
    assert seen == ranges


@pytest.mark.parametrize("body", [b"x" * 15, bytes(16), b"\xff" * 16])
def test_malformed_ranges_are_refused(body: bytes) -> None:
    with pytest.raises(PeerError):
        decode_ranges(body)


@pytest.mark.parametrize("body", [b"", b"\x05abc", b"\xff" + b"a" * 300])
def test_malformed_reasons_are_refused(body: bytes) -> None:
    with pytest.raises(PeerError):
        decode_reason(body)
