"""The digest of a whole transfer, from both ends: agreement, disagreement, and lost connections."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from blake3 import blake3
from transport_doubles import MemoryNetwork, MemoryRegistry, MemorySpace, make_spec

from transport.config import TransportConfig
from transport.errors import PeerError
from transport.interfaces import TransferState
from transport.receiving.incoming_transfer import IncomingTransfer
from transport.wire.digest import PIECE_BYTES, digest_of
from transport.wire.frames import FrameType, encode_frame

CONFIG = TransportConfig(frame_bytes=1000, max_frame_bytes=4000, drop_grace_s=0)
ID = make_spec(1).transfer_id


class Fixture:
    """A network with one expected transfer that promises a digest; nothing is sent yet."""

    def __init__(self, num_bytes: int = 5000, num_connections: int = 2) -> None:
        self.registry = MemoryRegistry()
        self.network = MemoryNetwork(CONFIG, self.registry)
        self.numbers = [self.network.connect() for _ in range(num_connections)]
        self.network.run()
        self.data = bytearray(bytes(range(250)) * (num_bytes // 250 + 1))[:num_bytes]
        self.landed = bytearray(num_bytes)
        self.space = MemorySpace(self.landed, 256)
        spec = replace(make_spec(1), digest=True)
        self.registry.expect(spec, self.space)
        self.transfer = self.network.open(spec, MemorySpace(self.data, 300))

    def ready(self, start: int = 0, end: int | None = None) -> None:
        stop = len(self.data) if end is None else end
        self.network.ready(self.transfer, start, stop - start)

    def deliver(self, number: int) -> None:
        """What is on its way arrives; the answers do not yet."""
        self.network.deliver(number, len(self.network.connections[number].to_receiver))

    def assert_complete(self) -> None:
        assert self.landed == self.data
        assert self.registry.completed == self.network.listener.completed == [ID]
        assert not self.registry.failed
        assert not self.network.listener.failed

    def assert_failed(self) -> None:
        for end in (self.registry, self.network.listener):
            assert isinstance(end.failed[ID], PeerError)
            assert end.failed[ID].code == "digest"
            assert not end.completed


def test_the_digest_does_not_depend_on_how_the_bytes_lie() -> None:
    data = bytearray(bytes(range(251)) * 9000)
    assert len(data) > 2 * PIECE_BYTES
    expected = blake3(data).digest()
    assert digest_of(MemorySpace(data, 1000)) == expected
    assert digest_of(MemorySpace(data, 1 << 24)) == expected
    assert digest_of(MemorySpace(bytearray())) == blake3(b"").digest()


@pytest.mark.parametrize("num_bytes", [0, 1, 5000])
def test_a_digest_that_agrees_completes(num_bytes: int) -> None:
    fixture = Fixture(num_bytes)
    fixture.ready()
    fixture.network.run()
    fixture.assert_complete()
    fixture.space.release()


def test_memory_that_changed_after_it_was_sent_fails_at_both_ends_and_is_let_go_of() -> None:
    fixture = Fixture()
    fixture.ready(0, 4000)
    fixture.network.run()
    fixture.data[100] ^= 1
    fixture.ready()
    fixture.network.run()
    fixture.assert_failed()
    assert len(fixture.network.connections) == 2
    fixture.space.release()


def test_all_bytes_are_not_enough_without_the_digest() -> None:
    fixture = Fixture()
    network, (one, two) = fixture.network, fixture.numbers
    fixture.ready()
    assert network.send(one)  # the OPEN, perhaps with a frame
    assert network.send(two)  # the digest
    late = bytes(network.connections[two].to_receiver)
    network.connections[two].to_receiver.clear()
    while network.send(one):
        pass
    fixture.deliver(one)
    assert fixture.landed == fixture.data
    assert fixture.registry.completed == []
    network.connections[two].to_receiver += late
    fixture.deliver(two)
    assert fixture.registry.completed == [ID]
    network.run()
    fixture.assert_complete()


def test_the_digest_may_come_before_the_last_bytes_on_another_connection() -> None:
    fixture = Fixture()
    network, (one, two) = fixture.network, fixture.numbers
    fixture.ready()
    assert network.send(one)
    assert network.send(two)
    fixture.deliver(two)
    assert fixture.registry.completed == []
    network.run()
    fixture.assert_complete()


@pytest.mark.parametrize("arrives", [True, False])
@pytest.mark.parametrize("num_bytes", [0, 5000])
def test_a_connection_lost_right_after_the_digest(arrives: bool, num_bytes: int) -> None:
    fixture = Fixture(num_bytes)
    network, (one, two) = fixture.network, fixture.numbers
    fixture.ready()
    assert network.send(one)
    fixture.deliver(one)
    assert network.send(two)
    if arrives:
        fixture.deliver(two)
    network.cut(two)
    network.check_invariants()
    network.run()
    fixture.assert_complete()


def test_a_digest_lost_with_all_the_bytes_acknowledged_is_made_again() -> None:
    fixture = Fixture()
    network, (one, two) = fixture.network, fixture.numbers
    fixture.ready(0, 4999)
    network.run()
    fixture.ready(4999, 5000)
    assert network.send(two)  # the digest
    network.connections[two].to_receiver.clear()
    assert network.send(one)
    fixture.deliver(one)
    network.answer(one, 1000)
    assert fixture.transfer.acked.total == 5000
    network.cut(two)
    network.run()
    fixture.assert_complete()


def test_a_complete_that_was_missed_is_told_again() -> None:
    fixture = Fixture(num_connections=1)
    network, (one,) = fixture.network, fixture.numbers
    fixture.ready()
    while network.send(one):
        pass
    fixture.deliver(one)
    assert fixture.registry.completed == [ID]
    network.cut(one)
    network.connect()
    network.run()
    fixture.assert_complete()
    assert fixture.registry.num_asked == 1


def test_a_digest_for_a_transfer_that_is_not_open_here_ends_nothing() -> None:
    fixture = Fixture()
    stray = encode_frame(FrameType.DIGEST, make_spec(2).transfer_id, bytes(32))
    fixture.network.connections[1].to_receiver += stray
    fixture.ready()
    fixture.network.run()
    fixture.assert_complete()
    assert len(fixture.network.connections) == 2


@pytest.mark.parametrize("length", [0, 31])
def test_a_digest_of_another_length_is_a_violation(length: int) -> None:
    fixture = Fixture()
    short = encode_frame(FrameType.DIGEST, ID, bytes(length))
    fixture.network.connections[1].to_receiver += short
    fixture.network.run()
    assert [error.code for error in fixture.network.endings] == ["protocol"]


def make_landing(data: bytes) -> tuple[IncomingTransfer, MemorySpace]:
    space = MemorySpace(bytearray(data), 16)
    landing = IncomingTransfer(
        ID, token=b"", fingerprint=b"", space=space, max_ranges=10, wants_digest=True
    )
    return landing, space


def test_only_one_is_told_to_judge() -> None:
    landing, _ = make_landing(bytes(100))
    digest = blake3(bytes(100)).digest()
    assert not landing.expect_digest(digest)
    landing.claim(1, 0, 100)
    assert landing.commit(1, 0, 100, None)
    assert not landing.expect_digest(digest)
    assert landing.judge()
    assert not landing.expect_digest(digest)
    assert landing.state is TransferState.COMPLETE


def test_an_end_while_the_digest_is_compared_waits_for_it() -> None:
    landing, space = make_landing(bytes(100))
    reading, go_on = threading.Event(), threading.Event()
    views = space.views

    def slow_views(offset: int, length: int) -> list[memoryview]:
        reading.set()
        assert go_on.wait(10)
        return views(offset, length)

    landing.expect_digest(blake3(bytes(100)).digest())
    landing.claim(1, 0, 100)
    assert landing.commit(1, 0, 100, None)
    space.views = slow_views  # type: ignore[method-assign]
    verdicts: list[bool] = []
    judge = threading.Thread(target=lambda: verdicts.append(landing.judge()))
    judge.start()
    assert reading.wait(10)
    assert landing.end(TransferState.FAILED, "dropped", "test")
    waiter = threading.Thread(target=landing.wait_quiet, args=(None,))
    waiter.start()
    waiter.join(0.05)
    assert waiter.is_alive()
    go_on.set()
    for thread in (judge, waiter):
        thread.join(10)
        assert not thread.is_alive()
    assert verdicts == [False]
    assert landing.state is TransferState.FAILED


def test_memory_that_cannot_be_read_fails_the_transfer_and_hangs_nobody() -> None:
    fixture = Fixture()
    views = fixture.space.views

    def failing_views(offset: int, length: int) -> list[memoryview]:
        if length == len(fixture.data):  # only the digest reads all of it at once
            raise OSError("gone")
        return views(offset, length)

    fixture.space.views = failing_views  # type: ignore[method-assign]
    fixture.ready()
    fixture.network.run()
    assert fixture.registry.failed[ID].code == "space"
    assert fixture.network.listener.failed[ID].code == "space"
