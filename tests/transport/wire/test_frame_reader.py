"""The reader between frames and within them: what it holds, where bytes go, what it lets go of."""

from __future__ import annotations

import weakref

import pytest

from transport.errors import PeerError
from transport.wire.frame_reader import FrameReader, Step
from transport.wire.frames import (
    HEADER_BYTES,
    DataFlags,
    FrameType,
    encode_data_header,
    encode_frame,
    encode_header,
    encode_ranges,
)

ID = bytes(range(16))
ACK = encode_ranges(FrameType.ACK, ID, [(0, 3)])


def established() -> FrameReader:
    reader = FrameReader(10_000)
    reader.established = True
    return reader


def fill(reader: FrameReader, data: bytes) -> list[Step]:
    """Bytes in as few steps as the buffers allow."""
    steps = []
    while data:
        target = reader.buffers()[0]
        count = min(target.nbytes, len(data))
        target[:count] = data[:count]
        data = data[count:]
        steps.append(reader.advance(count))
    return steps


def data_frame(payload: bytes, *, with_sum: bool = True) -> bytes:
    return encode_data_header(ID, 0, [payload], with_sum=with_sum) + payload


def test_where_in_a_frame_it_is() -> None:
    reader = established()
    assert (reader.at_boundary, reader.in_body) == (True, False)
    assert fill(reader, ACK[:1]) == [Step.PARTIAL]
    assert (reader.at_boundary, reader.in_body) == (False, False)
    assert fill(reader, ACK[1:48]) == [Step.HEADER]
    assert (reader.at_boundary, reader.in_body) == (False, True)
    assert fill(reader, ACK[48:50]) == [Step.PARTIAL]
    assert (reader.at_boundary, reader.in_body) == (False, True)
    assert fill(reader, ACK[50:]) == [Step.FRAME]
    assert (reader.at_boundary, reader.in_body) == (True, False)
    assert reader.control_body() == ACK[48:]


def test_a_frame_without_a_body_after_one_with_a_body_has_none() -> None:
    reader = established()
    fill(reader, ACK)
    assert fill(reader, encode_frame(FrameType.COMPLETE, ID)) == [Step.FRAME]
    assert reader.control_body() == b""


def test_bytes_continue_where_the_last_ones_ended_over_several_views() -> None:
    reader = established()
    payload = bytes(range(10))
    fill(reader, data_frame(payload)[:48])
    assert reader.buffers() == []  # nobody has said yet where the body goes
    memory = bytearray(10)
    views = [memoryview(memory)[:3], memoryview(memory)[3:4], memoryview(memory)[4:]]
    reader.place(views)
    for count, left in ((1, [2, 1, 6]), (2, [1, 6]), (3, [4]), (3, [1])):
        start = 10 - sum(view.nbytes for view in reader.buffers())
        for view in reader.buffers():
            part = payload[start : start + view.nbytes]
            view[:] = part
            start += view.nbytes
        assert reader.advance(count) is Step.PARTIAL
        assert [view.nbytes for view in reader.buffers()] == left
    assert reader.advance(1) is Step.FRAME
    reader.verify_data()
    assert bytes(memory) == payload


@pytest.mark.parametrize("num_bytes", [9, 11])
def test_views_of_another_length_than_the_body_are_refused(num_bytes: int) -> None:
    reader = established()
    fill(reader, data_frame(bytes(10))[:48])
    with pytest.raises(ValueError, match="do not have the length"):
        reader.place([memoryview(bytearray(num_bytes))])


def test_a_body_that_is_thrown_away_goes_into_the_sink_again_and_again() -> None:
    reader = established()
    sink = memoryview(bytearray(64))
    fill(reader, data_frame(bytes(150))[:48])
    reader.discard(sink)
    sizes = []
    while not reader.at_boundary:
        (target,) = reader.buffers()
        sizes.append(target.nbytes)
        reader.advance(target.nbytes)
    assert sizes == [64, 64, 22]
    assert fill(reader, ACK[:10]) == [Step.PARTIAL]
    assert fill(reader, ACK[10:]) == [Step.HEADER, Step.FRAME]
    assert reader.control_body() == ACK[48:]


def test_damage_is_told_with_the_frame_it_struck() -> None:
    reader = established()
    wire = data_frame(b"abc")
    fill(reader, wire[:48])
    reader.place([memoryview(bytearray(3))])
    fill(reader, b"abd")
    words = "DATA body of 3 bytes at offset 0 arrived damaged"
    with pytest.raises(PeerError, match=words) as caught:
        reader.verify_data()
    assert caught.value.code == "checksum"


def test_a_damaged_control_body_is_refused() -> None:
    reader = established()
    fill(reader, ACK[:-1] + b"x")
    with pytest.raises(PeerError, match="ACK body of 16 bytes") as caught:
        reader.control_body()
    assert caught.value.code == "checksum"


def test_a_checksum_without_a_body_is_refused() -> None:
    reader = established()
    fill(reader, encode_header(FrameType.COMPLETE, ID, length=0, body_sum=1))
    with pytest.raises(PeerError, match="COMPLETE body of 0 bytes"):
        reader.control_body()


def test_data_without_a_checksum_is_taken_as_it_is() -> None:
    reader = established()
    reader.data_flags = DataFlags.NO_SUM
    fill(reader, data_frame(b"abc", with_sum=False)[:48])
    memory = bytearray(3)
    reader.place([memoryview(memory)])
    fill(reader, b"xyz")
    reader.verify_data()
    assert memory == b"xyz"


def test_the_memory_of_a_body_is_let_go_of_when_it_was_read() -> None:
    reader = established()
    fill(reader, ACK[:48])
    control = weakref.ref(reader.buffers()[0])
    fill(reader, ACK[48:])
    reader.control_body()
    assert control() is None
    fill(reader, data_frame(b"abc")[:48])
    reader.place([memoryview(bytearray(3))])
    body = weakref.ref(reader.buffers()[0])
    fill(reader, b"abc")
    reader.verify_data()
    assert body() is None


@pytest.mark.parametrize("is_discarded", [False, True])
def test_a_reader_that_is_given_up_holds_no_memory(is_discarded: bool) -> None:
    reader = established()
    fill(reader, data_frame(bytes(100))[:48])
    view = memoryview(bytearray(100))
    if is_discarded:
        reader.discard(view)
    else:
        reader.place([view])
    reader.forget()
    assert reader.buffers() == []
    known = weakref.ref(view)
    del view
    assert known() is None


def test_it_has_room_for_exactly_one_header_first() -> None:
    (buffer,) = FrameReader(1).buffers()
    assert buffer.nbytes == HEADER_BYTES
