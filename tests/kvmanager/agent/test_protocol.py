"""The unix socket's frames and messages: any fragmentation, any garbage."""

import struct
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmanager.agent.engines.protocol import (
    MAX_FRAME_BYTES,
    AbortOutbox,
    AgentMessage,
    Attach,
    EmbeddingCancel,
    EmbeddingFind,
    EmbeddingFound,
    EmbeddingFree,
    EmbeddingPut,
    EmbeddingRoom,
    EmbeddingWritten,
    EncoderHello,
    EngineHello,
    EngineMessage,
    FailureNotice,
    FrameDecoder,
    HelloRefused,
    Landed,
    Loaded,
    OutboxOpened,
    PrefillEnd,
    ProtocolError,
    Ready,
    Release,
    Watch,
    Welcome,
    decode_agent_message,
    decode_engine_message,
    encode_frame,
)

TID = bytes(range(16))
FROM_ENGINE: list[EngineMessage] = [
    EngineHello("prefill-0", "worker", 12, b"layout", 1, 2),
    EngineHello("prefill-0", "scheduler", 12, b"layout", adapters={"poet": "files:1"}),
    EncoderHello("encode-0", "worker", 12),
    EmbeddingPut(bytes(16), 5 << 20),
    EmbeddingWritten(bytes(16)),
    EmbeddingCancel(bytes(16)),
    EmbeddingFind(3, bytes(16)),
    EmbeddingFree(3),
    Attach(TID, 3),
    Ready(TID, 3, [(0, 5), (1 << 40, 7)]),
    PrefillEnd(TID, 3, 1),
    PrefillEnd(TID, 3, 0, 1.5),
    Loaded(TID, 0.25, 0.5, 1.5),
    AbortOutbox(TID, 3, "preempted"),
    Watch(TID),
    Release(TID),
    Release(TID, 3),
]
FROM_AGENT: list[AgentMessage] = [
    EmbeddingRoom(bytes(16), [(3, 4)]),
    EmbeddingFound(3, 5 << 20, [(3, 4), (9, 1)]),
    Welcome("epoch", "/dev/shm/x", 1 << 30, 65536),
    HelloRefused("no"),
    Landed(TID, 70, bytes(32), [(0, 4)], 32, [[(9, 1)]], 16, bytes(16)),
    OutboxOpened(TID, 3, 70, [(0, 4)], 32, 16, bytes(16)),
    FailureNotice(TID, "link"),
]


@given(st.lists(st.sampled_from(FROM_ENGINE), max_size=8), st.data())
def test_any_fragmentation_gives_the_same_messages(
    messages: list[EngineMessage], data: st.DataObject
) -> None:
    stream = b"".join(map(encode_frame, messages))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=20)))
    decoder = FrameDecoder()
    got: list[EngineMessage] = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        got += map(decode_engine_message, decoder.feed(stream[start:end]))
    assert got == messages
    assert not decoder._buffer


@pytest.mark.parametrize("message", FROM_AGENT)
def test_agent_messages_survive(message: AgentMessage) -> None:
    (payload,) = FrameDecoder().feed(encode_frame(message))
    assert decode_agent_message(payload) == message


def is_whole_message_or_refused(
    decode: Callable[[bytes], EngineMessage | AgentMessage], payload: bytes
) -> bool:
    """What is taken for a message is one of this direction, within its bounds: a peer that is sent
    it anew understands the same. Anything but `ProtocolError` is raised.
    """
    try:
        message = decode(payload)
    except ProtocolError:
        return True
    known = FROM_ENGINE if decode is decode_engine_message else FROM_AGENT
    is_known = type(message) in {type(one) for one in known}
    return is_known and decode(encode_frame(message)[4:]) == message


@given(st.binary(max_size=200))
def test_garbage_is_refused_or_a_whole_message(payload: bytes) -> None:
    assert is_whole_message_or_refused(decode_engine_message, payload)
    assert is_whole_message_or_refused(decode_agent_message, payload)


@given(st.sampled_from(FROM_ENGINE), st.data())
def test_a_damaged_message_is_refused_or_a_whole_one(
    message: EngineMessage, data: st.DataObject
) -> None:
    payload = bytearray(encode_frame(message)[4:])
    position = data.draw(st.integers(0, len(payload) - 1))
    payload[position] = data.draw(st.integers(0, 255))
    length = data.draw(st.integers(0, len(payload)))
    assert is_whole_message_or_refused(decode_engine_message, bytes(payload[:length]))


@pytest.mark.parametrize("message", FROM_ENGINE)
def test_a_message_cut_short_is_refused(message: EngineMessage) -> None:
    payload = encode_frame(message)[4:]
    for length in range(len(payload)):
        with pytest.raises(ProtocolError):
            decode_engine_message(payload[:length])


def test_deep_nesting_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError):
        decode_engine_message(b"\x91" * 100_000)


@pytest.mark.parametrize("length", [0, MAX_FRAME_BYTES + 1, 0xFFFFFFFF])
def test_impossible_length_is_refused_before_its_bytes_come(length: int) -> None:
    with pytest.raises(ProtocolError, match="a frame of"):
        FrameDecoder().feed(struct.pack("<I", length))


def test_frame_over_the_limit_cannot_be_made() -> None:
    with pytest.raises(ProtocolError, match="at most"):
        encode_frame(EngineHello("x", "worker", 1, bytes(MAX_FRAME_BYTES)))


@pytest.mark.parametrize(
    "message",
    [
        Attach(b"short", 1),
        Attach(TID, 0),
        Ready(TID, -1, []),
        AbortOutbox(TID, 1 << 62, "x"),
        Release(TID, -1),
        Watch(bytes(17)),
        Ready(TID, 3, [(-1, 1)]),
        Ready(TID, 3, [(0, 1 << 62)]),
        Ready(TID, 3, [(0, 1)] * 8193),
        PrefillEnd(TID, 3, -1),
        PrefillEnd(TID, 3, 0, -1.0),
        Loaded(TID, float("nan"), 0.5, 1.5),
        EngineHello("x", "worker", 1, b"", pp_size=0),
        EngineHello("x", "worker", 1, b"", pp_rank=-1),
        EngineHello("", "worker", 1, b""),
        EngineHello("x" * 201, "worker", 1, b""),
        EngineHello("x", "boss", 1, b""),  # type: ignore[arg-type]
        EngineHello("x", "worker", 1, b"", tp_size=0),
        EngineHello("x", "scheduler", 1, b"", adapters={str(n): "i" for n in range(1025)}),
        EngineHello("x", "scheduler", 1, b"", adapters={"a": ""}),
        AbortOutbox(TID, 3, "x" * 5000),
    ],
)
def test_values_outside_their_bounds_are_refused(message: EngineMessage) -> None:
    with pytest.raises(ProtocolError):
        decode_engine_message(encode_frame(message)[4:])
