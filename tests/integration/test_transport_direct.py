"""Small pieces that `ready` sends by itself, on a connection whose own thread sleeps."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest
from transport_doubles import MemorySpace, RecordingListener, make_spec
from transport_loopback import LoopbackPair, eventually

from transport import OutgoingTransfer, TransportConfig, TransportError
from transport.testing.proxy import HurtfulProxy

KIB = 1024
CONFIG = TransportConfig(
    num_connections=2, autotune=False, reconnect_first_s=0.02, reconnect_max_s=0.1
)


class WatchedSpace(MemorySpace):
    """Knows which threads have read it. Raises while it is `broken`."""

    def __init__(self, data: bytearray) -> None:
        super().__init__(data)
        self.readers: list[threading.Thread] = []
        self.broken = False

    def views(self, offset: int, length: int) -> list[memoryview]:
        self.readers.append(threading.current_thread())
        if self.broken:
            raise RuntimeError("this memory is gone")
        return super().views(offset, length)


class WatchedListener(RecordingListener):
    """Knows which threads have told it."""

    def __init__(self) -> None:
        super().__init__()
        self.tellers: list[threading.Thread] = []

    def on_complete(self, transfer_id: bytes) -> None:
        self.tellers.append(threading.current_thread())
        super().on_complete(transfer_id)

    def on_failed(self, transfer_id: bytes, error: TransportError) -> None:
        self.tellers.append(threading.current_thread())
        super().on_failed(transfer_id, error)


@pytest.fixture
def pair() -> Iterator[LoopbackPair]:
    with closing(LoopbackPair(CONFIG)) as pair:
        pair.listener = WatchedListener()
        yield pair


def begin(
    pair: LoopbackPair, number: int, nbytes: int
) -> tuple[OutgoingTransfer, WatchedSpace, bytearray]:
    """A transfer that the receiver has accepted, on connections that have nothing to do."""
    spec = make_spec(number, pair.endpoint)
    space, landed = WatchedSpace(bytearray(b"%d" % number * nbytes)[:nbytes]), bytearray(nbytes)
    pair.registry.expect(spec, MemorySpace(landed))
    handle = pair.sender.open(spec, space, pair.listener)
    handle.ready(0, 1)
    assert handle.wait_acked(1, 20)
    link = pair.sender._links[pair.endpoint]
    eventually(lambda: len(link._waiting._next) == CONFIG.num_connections, 20)
    space.readers.clear()
    return handle, space, landed


def test_a_small_piece_is_sent_by_the_caller(pair: LoopbackPair) -> None:
    handle, space, landed = begin(pair, 1, 65 * KIB)
    handle.ready(1, 64 * KIB)
    assert space.readers == [threading.current_thread()]
    assert handle.wait_acked(1 + 64 * KIB, 20)
    handle.ready_ranges([(65 * KIB - 1, 1), (64 * KIB, KIB - 1)])
    assert pair.listener.wait(handle.transfer_id) is None
    assert landed == space.data
    assert len(space.readers) == 2  # ranges that touch are read and sent as one


def test_listeners_are_told_by_other_threads(pair: LoopbackPair) -> None:
    handle, space, _ = begin(pair, 1, KIB)
    space.broken = True
    handle.ready(1, KIB - 1)
    assert pair.listener.wait(handle.transfer_id) is not None
    assert isinstance(pair.listener, WatchedListener)
    assert threading.current_thread() not in pair.listener.tellers


def test_memory_that_cannot_be_read_costs_its_transfer_only(pair: LoopbackPair) -> None:
    handle, space, _ = begin(pair, 1, KIB)
    other, _, landed = begin(pair, 2, KIB)
    space.broken = True
    handle.ready(1, KIB - 1)
    error = pair.listener.wait(handle.transfer_id)
    assert error is not None
    assert error.code == "space"
    other.ready(1, KIB - 1)
    assert pair.listener.wait(other.transfer_id) is None
    assert landed == b"2" * KIB


def test_a_large_piece_is_sent_by_the_lanes(pair: LoopbackPair) -> None:
    handle, space, landed = begin(pair, 1, 65 * KIB + 1)
    handle.ready(1, 65 * KIB)
    assert pair.listener.wait(handle.transfer_id) is None
    assert threading.current_thread() not in space.readers
    assert landed == space.data


def test_the_caller_does_not_compute_a_digest(pair: LoopbackPair) -> None:
    spec = replace(make_spec(1, pair.endpoint), digest=True)
    space = WatchedSpace(bytearray(KIB))
    pair.registry.expect(spec, MemorySpace(bytearray(KIB)))
    handle = pair.sender.open(spec, space, pair.listener)
    handle.ready(0, KIB)
    assert pair.listener.wait(handle.transfer_id) is None
    assert threading.current_thread() not in space.readers


def test_what_a_full_connection_does_not_take_is_sent_by_its_lane() -> None:
    with closing(LoopbackPair(CONFIG)) as pair, closing(HurtfulProxy(pair.endpoint)) as proxy:
        spec = make_spec(1, proxy.endpoint)
        nbytes = 512 * 64 * KIB
        space, landed = WatchedSpace(bytearray(b"abcd" * (nbytes // 4))), bytearray(nbytes)
        pair.registry.expect(spec, MemorySpace(landed))
        handle = pair.sender.open(spec, space, pair.listener)
        handle.ready(0, 1)
        assert handle.wait_acked(1, 20)
        proxy.stall()
        for start in range(0, nbytes, 64 * KIB):  # more than the kernel takes, and none blocks
            handle.ready(start, 64 * KIB)
        proxy.resume()
        assert pair.listener.wait(handle.transfer_id) is None
        assert landed == space.data


def test_a_connection_that_is_lost_under_the_caller_is_made_again() -> None:
    with closing(LoopbackPair(CONFIG)) as pair, closing(HurtfulProxy(pair.endpoint)) as proxy:
        spec = make_spec(1, proxy.endpoint)
        space, landed = WatchedSpace(bytearray(b"abcd" * 64 * KIB)), bytearray(256 * KIB)
        pair.registry.expect(spec, MemorySpace(landed))
        handle = pair.sender.open(spec, space, pair.listener)
        for start in range(0, 256 * KIB, KIB):
            if start % (32 * KIB) == 0:
                proxy.reset()
            handle.ready(start, KIB)
        assert pair.listener.wait(handle.transfer_id) is None
        assert landed == space.data
