"""Streams over real sockets: bytes that are sent at once, and bytes that are waited for."""

import socket
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from transport import LinkError
from transport.sockets import MAX_WAIT_BYTES, PlainStream

KIB = 1024
PATIENCE_S = 30.0


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a TCP connection."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    with closing(near), closing(far):
        yield near, far


def read_all(stream: PlainStream, views: list[memoryview]) -> threading.Thread:
    """A thread that fills `views` in as many calls as it takes, or ends with the connection."""

    def run() -> None:
        rest = views
        while rest:
            try:
                count = stream.receive(rest, fill=True)
            except LinkError:
                return
            left = []
            for view in rest:
                if count < len(view):
                    left.append(view[count:])
                count = max(0, count - len(view))
            rest = left

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("num_bytes", [1, 100 * KIB, MAX_WAIT_BYTES, 3 * MAX_WAIT_BYTES + 1])
def test_a_far_stream_gets_all_bytes_however_they_come(
    num_bytes: int, ends: tuple[socket.socket, socket.socket]
) -> None:
    near, far = ends
    data = bytes(index % 251 for index in range(num_bytes))
    landed = memoryview(bytearray(num_bytes))
    views = [landed[: num_bytes // 3], landed[num_bytes // 3 :]]
    thread = read_all(PlainStream(far, is_near=False), [view for view in views if view])
    for start in range(0, num_bytes, 60 * KIB + 7):
        near.sendall(data[start : start + 60 * KIB + 7])
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert landed == data


def test_a_far_stream_that_waits_for_bytes_notices_the_end(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    near, far = ends
    thread = read_all(PlainStream(far, is_near=False), [memoryview(bytearray(100 * KIB))])
    near.sendall(bytes(10))
    near.shutdown(socket.SHUT_WR)
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_a_far_stream_that_waits_for_bytes_can_be_aborted(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    near, far = ends
    stream = PlainStream(far, is_near=False)
    near.sendall(bytes(10))
    thread = read_all(stream, [memoryview(bytearray(100 * KIB))])
    stream.abort()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_short_messages_are_read_after_a_long_wait(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    near, far = ends
    stream = PlainStream(far, is_near=False)
    near.sendall(bytes(200 * KIB))
    read_all(stream, [memoryview(bytearray(200 * KIB))]).join(PATIENCE_S)
    near.sendall(b"short")
    landed = bytearray(48)
    assert stream.receive([memoryview(landed)], fill=False) == 5
    assert landed[:5] == b"short"


def test_what_the_kernel_does_not_take_at_once_is_given_back_in_order(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    near, far = ends
    stream = PlainStream(near)
    data = bytes(index % 251 for index in range(32 * KIB * KIB))
    buffers = [memoryview(data)[start : start + 1_000_000] for start in range(0, len(data), 10**6)]
    rest = stream.send_some(buffers)
    num_left = sum(map(len, rest))
    assert 0 < num_left < len(data)
    assert b"".join(rest) == data[-num_left:]
    landed = memoryview(bytearray(len(data)))
    thread = read_all(PlainStream(far), [landed])
    stream.send(rest)
    thread.join(PATIENCE_S)
    assert landed == data


def test_sending_at_once_on_a_connection_that_has_ended_says_so(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    near, _ = ends
    stream = PlainStream(near)
    stream.abort()
    with pytest.raises(LinkError, match="connection lost"):
        stream.send_some([b"x"])
