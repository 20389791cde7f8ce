"""The event gate: same bytes, whole events only, and the end mark seen wherever it is cut."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.gateway.errors import ApiError
from deploy.gateway.intake.endpoints import ENDPOINTS
from deploy.gateway.proxy import sse
from deploy.gateway.proxy.sse import ENDS_WITH_DONE, EventGate, error_event, first_data

DONE = b"data: [DONE]\n\n"


def cut(data: bytes, points: list[int]) -> list[bytes]:
    edges = [0, *sorted(point % (len(data) + 1) for point in points), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


@given(
    lines=st.lists(st.sampled_from([b'data: {"a":1}', b": ping", b"data: x\ndata: y"]), max_size=8),
    newline=st.sampled_from([b"\n\n", b"\r\n\r\n"]),
    done=st.booleans(),
    points=st.lists(st.integers(0, 200), max_size=12),
)
def test_bytes_pass_unchanged_however_they_are_cut(
    lines: list[bytes], newline: bytes, done: bool, points: list[int]
) -> None:
    stream = b"".join(line + newline for line in lines)
    if done:
        stream += b"data: [DONE]" + newline
    gate = EventGate()
    passed = [gate.feed(piece) for piece in cut(stream, points)]
    assert b"".join(passed) == stream
    assert gate.rest() == b""
    assert gate.is_done == done
    for piece in passed:
        assert not piece or piece.endswith((b"\n\n", b"\r\n\r\n"))


@given(keep=st.integers(0, len(DONE) - 1))
def test_a_cut_end_mark_is_no_end_mark(keep: int) -> None:
    gate = EventGate()
    passed = gate.feed(b'data: {"a":1}\n\n' + DONE[:keep])
    assert passed == b'data: {"a":1}\n\n'
    assert not gate.is_done
    assert gate.rest() == DONE[:keep]


@pytest.mark.parametrize(
    "stream",
    [
        b'data: {"text":"data: [DONE]"}\n\n',
        b"xdata: [DONE]\n\n",
        b"data: [DONE] \n\n",
        DONE + b'data: {"a":1}\n\n',
        b": data: [DONE]\n\n",
    ],
)
def test_what_only_looks_like_the_end_mark(stream: bytes) -> None:
    gate = EventGate()
    gate.feed(stream)
    assert not gate.is_done


@pytest.mark.parametrize("mark", [DONE, b"data:[DONE]\n\n", b"data: [DONE]\r\n\r\n"])
def test_spellings_of_the_end_mark(mark: bytes) -> None:
    gate = EventGate()
    assert gate.feed(mark) == mark
    assert gate.is_done


def test_an_event_of_many_pieces_is_held_back() -> None:
    gate = EventGate()
    assert gate.feed(b"data: 1\n\ndata: 2") == b"data: 1\n\n"
    assert gate.feed(b"34\n") == b""
    assert gate.feed(b"\ndata: 5") == b"data: 234\n\n"
    assert gate.rest() == b"data: 5"


def test_a_huge_event_is_not_held_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_PENDING_BYTES", 10)
    gate = EventGate()
    assert gate.feed(b"data: 123") == b""
    assert gate.feed(b"4567") == b"data: 1234567"


@pytest.mark.parametrize(
    ("events", "data"),
    [
        (b"", None),
        (b": keep-alive\n\n", None),
        (b": data: x\n\n", None),
        (b": k\n\ndata: x\n\n", b"x\n\n"),
        (b"data:x\n\n", b"x\n\n"),
        (b"event: e\ndata: x\n\n", b"x\n\n"),
    ],
)
def test_the_first_data_is_found_behind_comments(events: bytes, data: bytes | None) -> None:
    assert first_data(events) == data


def test_an_error_event_is_one_event() -> None:
    body = ApiError(502, "engine_lost", "gone").body()
    assert error_event(body, ENDS_WITH_DONE) == b"data: " + body + b"\n\n"


RESPONSES, MESSAGES = ENDPOINTS["responses"].stream, ENDPOINTS["messages"].stream


def test_an_error_event_is_one_of_the_api() -> None:
    error = ApiError(502, "engine_lost", "gone")
    told = error_event(error.body("anthropic"), MESSAGES)
    assert told == b"event: error\ndata: " + error.body("anthropic") + b"\n\n"
    head, _, data = error_event(error.body(), RESPONSES, 1).partition(b"data: ")
    assert head == b"event: error\n"
    assert json.loads(data) == {
        "type": "error",
        "code": "engine_lost",
        "message": "gone",
        "param": None,
        "sequence_number": 1,
    }


@pytest.mark.parametrize("cut", [1, 7, 40, 4000])
def test_a_named_event_ends_the_stream(cut: int) -> None:
    gate = EventGate(RESPONSES)
    usage = b'{"response":{"text":"' + b"x" * 9000 + b'","usage":{"input_tokens":3}}}'
    begun = b"event: response.output_text.delta\ndata: {}\n\n"
    stream = begun + b"event: response.completed\ndata: " + usage + b"\n\n"
    done, passed = [], b""
    for start in range(0, len(stream), cut):
        passed += gate.feed(stream[start : start + cut])
        done.append(gate.is_done)
    assert passed == stream
    assert done.index(True) == len(done) - 1
    assert gate.last_data() == usage


def test_text_in_an_event_does_not_end_the_stream() -> None:
    gate = EventGate(MESSAGES)
    gate.feed(b'event: content_block_delta\ndata: {"text":"event: message_stop"}\n\n')
    assert not gate.is_done


def test_what_comes_before_the_first_token_is_no_answer() -> None:
    begun = b'event: message_start\ndata: {"a":1}\n\n: ping\n\n'
    assert first_data(begun, MESSAGES) is None
    delta = b'event: content_block_delta\ndata: {"b":2}\n\n'
    assert first_data(begun + delta, MESSAGES) == b'{"b":2}\n\n'


USAGE = b'{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":7}}'


@pytest.mark.parametrize("newline", [b"\n\n", b"\r\n\r\n"])
@pytest.mark.parametrize("sizes", [[], [60], [200], [-60], [-20], [-60, -15]])
def test_the_last_event_is_kept_for_its_usage(newline: bytes, sizes: list[int]) -> None:
    events = [b'data: {"choices":[{"text":"data: x"}]}', b"data: " + USAGE, b"data: [DONE]"]
    stream = b"".join(event + newline for event in events)
    gate = EventGate()
    for piece in cut(stream, sizes):
        gate.feed(piece)
    assert gate.is_done
    assert gate.last_data() == USAGE


@pytest.mark.parametrize("stream", [b"", b": ping\n\n", DONE, b'data: {"a": "data: "}\n\n' + DONE])
def test_a_stream_without_a_last_event_has_no_usage(stream: bytes) -> None:
    gate = EventGate()
    gate.feed(stream)
    assert b"usage" not in gate.last_data()
