"""The gateway's cheap way through a stream against a parser of everything, however it is cut.

An engine's bytes go through `AnswerParser` and `EventGate`, as in the gateway. The reference splits
the whole body into events by the rules of server-sent events and reads each.
"""

import json
import re
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from deploy.gateway.proxy.http_answer import AnswerParser
from deploy.gateway.proxy.sse import EventGate
from deploy.gateway.scheduling.feedback import Usage, usage_of

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENTS = st.sampled_from(
    [
        b'data: {"choices":[{"text":"a"}]}',
        b'data:{"choices":[{"text":"\xc3\xa9"}]}',
        b'data: {"choices":[{"text":"data: [DONE]"}]}',
        b": keep-alive",
        b'event: error\ndata: {"error":{"message":"m","code":500}}',
        b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":7}}',
        b"data: [DONE]",
        b"data: [DONE] ",
    ]
)


def cut(data: bytes, points: list[int]) -> list[bytes]:
    edges = [0, *sorted(point % (len(data) + 1) for point in points), len(data)]
    return [data[start:end] for start, end in pairwise(edges) if end > start]


def full_parser(body: bytes) -> tuple[int, bool, Usage]:
    """The events of `body`, whether the last one is the end mark, and the usage before that."""
    events = [event for event in re.split(rb"\r?\n\r?\n", body) if event]
    is_done = bool(events) and re.fullmatch(rb"data: ?\[DONE\]", events[-1]) is not None
    usage = Usage()
    if is_done and len(events) > 1:
        data = re.fullmatch(rb"data: ?(\{.*\})", events[-2])
        read = json.loads(data[1]).get("usage", {}) if data else {}
        usage = Usage(read.get("prompt_tokens", 0), read.get("completion_tokens", 0))
    return len(events), is_done, usage


@given(
    events=st.lists(EVENTS, max_size=8),
    newline=st.sampled_from([b"\n\n", b"\r\n\r\n"]),
    per_chunk=st.integers(1, 4),
    points=st.lists(st.integers(0, 2000), max_size=20),
    is_split=st.booleans(),
)
def test_any_cut_gives_what_a_full_parser_finds(
    events: list[bytes], newline: bytes, per_chunk: int, points: list[int], is_split: bool
) -> None:
    pieces = [event + newline for event in events]
    body = b"".join(pieces)
    if is_split:
        # Chunks of HTTP need not end where events do.
        chunks = cut(body, [per_chunk * 7, per_chunk * 31, per_chunk * 90])
    else:
        grouped = range(0, len(pieces), per_chunk)
        chunks = [b"".join(pieces[at : at + per_chunk]) for at in grouped]
    stream = HEAD + b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    stream += b"0\r\n\r\n"
    parser, gate, passed = AnswerParser(), EventGate(), []
    for piece in cut(stream, points):
        if data := parser.feed(piece):
            passed.append(gate.feed(data))
    assert parser.is_over
    assert not parser.error
    assert b"".join(passed) == body
    assert gate.rest() == b""
    num_events, is_done, usage = full_parser(body)
    assert gate.num_events == num_events
    assert gate.num_bytes == len(body)
    assert gate.is_done == is_done
    if is_done:
        assert usage_of(gate.last_data()) == usage
