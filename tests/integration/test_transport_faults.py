"""Faults between a real sender and receiver in detail: what is sent again, drops, cancels, and
unusable memory. The matrix of faults is in test_transport_fault_matrix.
"""

from __future__ import annotations

import random
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace

import numpy
import pytest
from transport_doubles import MemorySpace, make_spec
from transport_loopback import LoopbackPair, eventually

from transport import LinkError, LocalError, PeerError, TransportConfig
from transport.testing.proxy import HurtfulProxy

pytestmark = pytest.mark.alone

KIB = 1024
MIB = 1024 * KIB
CONFIG = TransportConfig(
    num_connections=4,
    frame_bytes=64 * KIB,
    max_autotuned_frame_bytes=64 * KIB,  # more would not fit into what the kernel holds
    connect_timeout_s=2,
    handshake_timeout_s=1,
    ack_timeout_s=1,
    idle_timeout_s=3,
    reconnect_first_s=0.02,
    reconnect_max_s=0.2,
)


def random_bytes(num_bytes: int, seed: int = 0) -> bytearray:
    return bytearray(random.Random(seed).randbytes(num_bytes))


@pytest.fixture
def pair() -> Iterator[LoopbackPair]:
    with closing(LoopbackPair(CONFIG)) as pair:
        yield pair


@pytest.fixture
def proxy(pair: LoopbackPair) -> Iterator[HurtfulProxy]:
    with closing(HurtfulProxy(pair.endpoint)) as proxy:
        yield proxy


class Watched(MemorySpace):
    """Remembers which offsets were read."""

    def __init__(self, data: bytearray) -> None:
        super().__init__(data)
        self.offsets: list[int] = []

    def views(self, offset: int, length: int) -> list[memoryview]:
        self.offsets.append(offset)
        return super().views(offset, length)


def test_cut_connections_cost_only_what_was_not_acknowledged(
    pair: LoopbackPair, proxy: HurtfulProxy
) -> None:
    data, landed = random_bytes(8 * MIB), bytearray(8 * MIB)
    spec = make_spec(1, proxy.endpoint)
    pair.registry.expect(spec, MemorySpace(landed))
    space = Watched(data)
    handle = pair.sender.open(spec, space, pair.listener)
    handle.ready(0, 4 * MIB)
    eventually(lambda: handle.progress().acked_bytes == 4 * MIB)
    proxy.flows.clear()
    space.offsets.clear()
    handle.ready(4 * MIB, 4 * MIB)
    eventually(lambda: handle.progress().sent_bytes > 4 * MIB)
    proxy.cut()
    proxy.flows.set()
    assert pair.listener.wait(handle.transfer_id) is None
    assert landed == data
    assert handle.progress().resent_bytes > 0
    assert min(space.offsets) == 4 * MIB
    assert proxy.num_accepted > CONFIG.num_connections


def test_nobody_listening_any_more_fails_within_the_idle_timeout_and_is_named() -> None:
    config = replace(CONFIG, handshake_timeout_s=0.8, ack_timeout_s=0.8, idle_timeout_s=1)
    with closing(LoopbackPair(config)) as pair, closing(HurtfulProxy(pair.endpoint)) as proxy:
        handle, _ = pair.begin(1, random_bytes(4 * MIB), via=proxy.endpoint)
        handle.ready(0, 2 * MIB)
        eventually(lambda: handle.progress().acked_bytes == 2 * MIB)
        proxy.close()
        begin_s = time.monotonic()
        error = pair.listener.wait(handle.transfer_id)
        assert isinstance(error, LinkError)
        assert error.code == "unreachable"
        assert "cannot connect" in error.message
        assert time.monotonic() - begin_s < config.idle_timeout_s + 1


def test_nothing_is_written_after_drop(pair: LoopbackPair, proxy: HurtfulProxy) -> None:
    proxy.bytes_per_read = 1000
    handle, landed = pair.begin(1, random_bytes(8 * MIB), via=proxy.endpoint)
    other, other_landed = pair.begin(2, random_bytes(2 * MIB, 2), via=proxy.endpoint)
    handle.ready(0, 8 * MIB - 1)
    eventually(lambda: handle.progress().acked_bytes > 0)
    proxy.flows.clear()
    time.sleep(0.05)
    begin_s = time.monotonic()
    pair.receiver.drop(handle.transfer_id, "evicted")
    assert time.monotonic() - begin_s < CONFIG.drop_grace_s + 0.5
    snapshot = bytes(landed)
    proxy.bytes_per_read = 65536
    proxy.flows.set()
    error = pair.listener.wait(handle.transfer_id)
    assert isinstance(error, PeerError)
    assert (error.code, error.message) == ("dropped", "evicted")
    other.ready(0, 2 * MIB)
    assert pair.listener.wait(other.transfer_id) is None
    assert other_landed == random_bytes(2 * MIB, 2)
    assert landed == snapshot
    assert handle.transfer_id not in pair.registry.failed


def test_drop_in_full_flow_keeps_the_connections(pair: LoopbackPair) -> None:
    handle, landed = pair.begin(1, random_bytes(64 * MIB))
    eventually(lambda: pair.sender.num_connections(pair.endpoint) == CONFIG.num_connections)
    handle.ready(0, 64 * MIB - 1)  # so that it cannot complete before the drop
    eventually(lambda: handle.progress().acked_bytes > 0)
    pair.receiver.drop(handle.transfer_id, "evicted")
    snapshot = bytes(landed)
    error = pair.listener.wait(handle.transfer_id)
    assert isinstance(error, PeerError)
    assert error.code == "dropped"
    assert pair.sender.num_connections(pair.endpoint) == CONFIG.num_connections
    assert landed == snapshot


def test_cancel_without_a_receiver_ends_in_time(pair: LoopbackPair, proxy: HurtfulProxy) -> None:
    handle, _ = pair.begin(1, random_bytes(4 * MIB), via=proxy.endpoint)
    handle.ready(0, 1 * MIB)
    eventually(lambda: handle.progress().acked_bytes == 1 * MIB)
    proxy.flows.clear()
    handle.cancel("stop")
    error = pair.listener.wait(handle.transfer_id, CONFIG.ack_timeout_s + 2)
    assert error is not None
    assert error.code == "cancelled"


class Unusable(MemorySpace):
    """Memory that can be described but not used."""

    def views(self, offset: int, length: int) -> list[memoryview]:
        raise OSError("gone")


def test_memory_that_cannot_be_read_fails_both_ends(pair: LoopbackPair) -> None:
    spec = make_spec(1, pair.endpoint)
    pair.registry.expect(spec, MemorySpace(bytearray(MIB)))
    handle = pair.sender.open(spec, Unusable(bytearray(MIB)), pair.listener)
    handle.ready(0, MIB)
    error = pair.listener.wait(spec.transfer_id)
    assert isinstance(error, LocalError)
    assert error.code == "space"
    assert "gone" in error.message


def test_memory_that_cannot_be_written_fails_both_ends(pair: LoopbackPair) -> None:
    spec = make_spec(1, pair.endpoint)
    pair.registry.expect(spec, Unusable(bytearray(MIB)))
    handle = pair.sender.open(spec, MemorySpace(bytearray(MIB)), pair.listener)
    handle.ready(0, MIB)
    for recorder in (pair.listener, pair.registry):
        error = recorder.wait(spec.transfer_id)
        assert isinstance(error, PeerError)
        assert error.code == "space"


def test_too_many_connections_are_refused_but_the_rest_works() -> None:
    limited = replace(CONFIG, max_connections=2)
    with closing(LoopbackPair(CONFIG, receiver_config=limited)) as pair:
        data = random_bytes(4 * MIB)
        handle, landed = pair.begin(1, data)
        handle.ready(0, len(data))
        assert pair.listener.wait(handle.transfer_id) is None
        assert landed == data
        assert pair.receiver.num_connections <= 2


class Remembering(MemorySpace):
    """Says when a view that it gave, and each part of one, is in use no more."""

    def __init__(self, data: bytearray) -> None:
        super().__init__(data)
        self.on_release: Callable[[], None] = lambda: None

    def views(self, offset: int, length: int) -> list[memoryview]:
        owner = numpy.frombuffer(self.data, numpy.uint8, length, offset)
        weakref.finalize(owner, lambda: self.on_release()).atexit = False
        return [memoryview(owner)]


def test_a_lane_that_fails_lets_go_of_memory_before_another_thread_can_tell_the_end(
    pair: LoopbackPair, proxy: HurtfulProxy
) -> None:
    space, spec = Remembering(random_bytes(64 * MIB)), make_spec(1, proxy.endpoint)
    too_late: list[bool] = []

    def release_slowly() -> None:
        time.sleep(0.3)  # in which the watchdog tells all ends that are due
        too_late.append(bool(pair.listener.failed))

    pair.registry.expect(spec, MemorySpace(bytearray(space.nbytes)))
    pair.sender.warm(proxy.endpoint)
    eventually(lambda: pair.sender.num_connections(proxy.endpoint) == CONFIG.num_connections)
    proxy.stall()
    pair.sender.open(spec, space, pair.listener).ready(0, space.nbytes)
    time.sleep(0.2)  # until every lane waits in the kernel
    space.on_release = release_slowly
    pair.sender.close()
    assert pair.listener.failed[spec.transfer_id].code == "closed"
    assert too_late == [False] * CONFIG.num_connections
