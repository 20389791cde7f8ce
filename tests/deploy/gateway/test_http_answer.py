"""The parser of engines' answers: the same however bytes are cut, and strict about ends."""

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from deploy.gateway.proxy.http_answer import MAX_HEAD_BYTES, AnswerParser

OK = b"HTTP/1.1 200 OK\r\n"
SIZED = OK + b"Content-Type: application/json; charset=utf-8\r\nContent-Length: 5\r\n\r\n"
CHUNKED = OK + b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def cut(data: bytes, points: list[int]) -> list[bytes]:
    edges = [0, *sorted(point % (len(data) + 1) for point in points), len(data)]
    return [data[start:end] for start, end in pairwise(edges) if end > start]


def parsed(*pieces: bytes) -> tuple[AnswerParser, bytes]:
    parser = AnswerParser()
    return parser, b"".join(map(parser.feed, pieces))


chunks = st.lists(st.binary(min_size=1, max_size=40), max_size=6)
cuts = st.lists(st.integers(0, 600), max_size=20)


@given(
    bodies=chunks,
    extension=st.sampled_from([b"", b";a=b", b";a;b=c"]),
    trailers=st.sampled_from([b"", b"X-Sum: 1\r\n", b"A: 1\r\nB: 2\r\n"]),
    is_upper=st.booleans(),
    interim=st.sampled_from([b"", b"HTTP/1.1 100 Continue\r\n\r\n"]),
    points=cuts,
)
def test_chunks_come_out_however_the_bytes_are_cut(
    bodies: list[bytes],
    extension: bytes,
    trailers: bytes,
    is_upper: bool,
    interim: bytes,
    points: list[int],
) -> None:
    stream = interim + CHUNKED
    for body in bodies:
        size = b"%X" if is_upper else b"%x"
        stream += size % len(body) + extension + b"\r\n" + body + b"\r\n"
    stream += b"0\r\n" + trailers + b"\r\n"
    parser, got = parsed(*cut(stream, points))
    assert got == b"".join(bodies)
    assert (parser.status, parser.error, parser.is_over) == (200, "", True)
    assert parser.keeps_alive
    assert parser.content_type == "text/event-stream"


@given(bodies=chunks, points=cuts, keep=st.integers(0, 10_000))
def test_an_answer_that_is_cut_short_is_never_over(
    bodies: list[bytes], points: list[int], keep: int
) -> None:
    stream = CHUNKED + b"".join(b"%x\r\n%b\r\n" % (len(body), body) for body in bodies)
    stream += b"0\r\n\r\n"
    parser, got = parsed(*cut(stream[: keep % len(stream)], points))
    parser.closed()
    assert b"".join(bodies).startswith(got)
    assert not parser.is_over
    assert parser.error


@given(noise=st.binary(max_size=300), points=cuts)
@example(noise=b"5\r\nhello\r\n0\r\n\r\n", points=[])
def test_cuts_change_nothing_of_what_noise_means(noise: bytes, points: list[int]) -> None:
    whole, body = parsed(CHUNKED + noise)
    other, pieces = parsed(*cut(CHUNKED + noise, points))
    assert (pieces, other.is_over, other.error) == (body, whole.is_over, whole.error)


def test_a_sized_body() -> None:
    parser, body = parsed(SIZED + b"he", b"llo")
    assert (body, parser.is_over, parser.keeps_alive) == (b"hello", True, True)
    assert parser.content_type == "application/json"
    assert parser.headers["Content-Type"] == "application/json; charset=utf-8"


@pytest.mark.parametrize("stream", [SIZED + b"hello", CHUNKED + b"0\r\n\r\n"])
def test_what_follows_an_answer_spoils_its_connection(stream: bytes) -> None:
    together, body = parsed(stream + b"HTTP/1.1 200 OK")
    apart, same = parsed(stream, b"HTTP/1.1 200 OK")
    assert body == same
    for parser in (together, apart):
        assert parser.is_over
        assert not parser.keeps_alive


@pytest.mark.parametrize(
    ("head", "is_over"),
    [
        (b"HTTP/1.1 204 No Content\r\n\r\n", True),
        (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 7\r\n\r\n", True),
        (OK + b"Content-Length: 0\r\n\r\n", True),
        (OK + b"\r\n", False),
    ],
)
def test_answers_without_a_body(head: bytes, is_over: bool) -> None:
    parser, body = parsed(head)
    assert (body, parser.is_over, parser.is_framed) == (b"", is_over, is_over)


def test_a_body_that_ends_with_the_connection() -> None:
    parser, body = parsed(b"HTTP/1.0 200 OK\r\n\r\nhalf", b" of it")
    assert (body, parser.is_over, parser.is_framed) == (b"half of it", False, False)
    parser.closed()
    assert parser.is_over
    assert not parser.keeps_alive


@pytest.mark.parametrize(
    "head",
    [
        OK + b"Connection: close\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n",
    ],
)
def test_connections_that_are_not_kept(head: bytes) -> None:
    parser, _ = parsed(head)
    assert parser.is_over
    assert not parser.keeps_alive


@pytest.mark.parametrize(
    ("stream", "why"),
    [
        (b"SSH-2.0-OpenSSH\r\n\r\n", "Expected HTTP/"),
        (b"HTTP/2 200\r\n\r\n", "not HTTP/1.1"),
        (b"HTTP/1.1 20 OK\r\n\r\n", "Invalid status code"),
        (b"HTTP/1.1 101 Switching Protocols\r\n\r\n", "its status is 101"),
        (OK + b"No colon\r\n\r\n", "header"),
        (OK + b"Bad : 1\r\n\r\n", "header"),
        (OK + b"A: 1\r\n folded\r\n\r\n", "header"),
        (OK + b"A: 1\rB: 2\r\n\r\n", "header"),
        (OK + b"Content-Length: 1\r\ncontent-length: 1\r\n\r\n", "Duplicate Content-Length"),
        (OK + b"Content-Length: +1\r\n\r\n", "Content-Length"),
        (OK + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", "Transfer-Encoding"),
        (OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n", "Transfer-Encoding"),
        (b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", "Transfer-Encoding"),
        (OK + b"A: " + b"a" * MAX_HEAD_BYTES, "bytes of heads or trailers"),
        (OK + b"A: " + b"a" * MAX_HEAD_BYTES + b"\r\n\r\n", "head"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 2000, "bytes of heads or trailers"),
        (CHUNKED + b"0x5\r\nhello", "chunk size"),
        (CHUNKED + b"-1\r\n", "chunk size"),
        (CHUNKED + b"\r\n", "chunk size"),
        (CHUNKED + b"5\nhello", "chunk size"),
        (CHUNKED + b"fffffffffffffffff\r\n", "Chunk size overflow"),
        (CHUNKED + b"5" * 2000, "Chunk size overflow"),
        (CHUNKED + b"5\r\nhello!\r\n", "after chunk data"),
        (CHUNKED + b"0\r\n" + b"a: b\r\n" * 9000, "bytes of heads or trailers"),
    ],
)
def test_what_is_no_answer_is_refused(stream: bytes, why: str) -> None:
    whole, body = parsed(stream)
    single, same = parsed(*(stream[at : at + 1] for at in range(len(stream))))
    for parser in (whole, single):
        assert why in parser.error
        assert not parser.is_over
        assert not parser.keeps_alive
    assert body == same
    assert whole.feed(b"more") == b""


def test_what_came_before_a_wrong_chunk_is_handed_out() -> None:
    parser, body = parsed(CHUNKED + b"5\r\nhello\r\nzz\r\n")
    assert body == b"hello"
    assert parser.error
