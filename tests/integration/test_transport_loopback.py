"""The transport over real sockets on 127.0.0.1: exactness, faults, refusals, TLS, and what is left
behind.
"""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace

import pytest
from transport_doubles import MemorySpace, RecordingListener, greeting, make_spec
from transport_loopback import Census, LoopbackPair, eventually

from transport import (
    Endpoint,
    LinkError,
    LocalError,
    PeerError,
    Receiver,
    TransferState,
    TransportConfig,
)
from transport.sockets import SocketOwner
from transport.wire.frames import FrameType
from transport.wire.handshake import VERSION, Hello

KIB = 1024
MIB = 1024 * KIB
CONFIG = TransportConfig(
    num_connections=4,
    frame_bytes=64 * KIB,
    connect_timeout_s=2,
    handshake_timeout_s=2,
    ack_timeout_s=1,
    idle_timeout_s=3,
    reconnect_first_s=0.02,
    reconnect_max_s=0.2,
)


def random_bytes(num_bytes: int, seed: int = 0) -> bytearray:
    return bytearray(random.Random(seed).randbytes(num_bytes))


def transport_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("prfaas-")]


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Every test closes what it opened, and closing ends every thread."""
    yield
    eventually(lambda: not transport_threads(), 5)


@pytest.fixture
def pair() -> Iterator[LoopbackPair]:
    with closing(LoopbackPair(CONFIG)) as pair:
        yield pair


def test_bytes_arrive_exactly_whatever_the_ready_order(pair: LoopbackPair) -> None:
    data = random_bytes(5 * MIB + 12345)
    handle, landed = pair.begin(1, data)
    pieces = [(offset, min(10_000, len(data) - offset)) for offset in range(0, len(data), 10_000)]
    random.Random(1).shuffle(pieces)
    for offset, length in pieces:
        handle.ready(offset, length)
    assert pair.listener.wait(handle.transfer_id) is None
    assert landed == data
    assert pair.registry.completed == [handle.transfer_id]
    progress = handle.progress()
    assert progress.state is TransferState.COMPLETE
    assert progress.acked_bytes == progress.ready_bytes == len(data)
    assert progress.resent_bytes == 0
    received = pair.receiver.progress(handle.transfer_id)
    assert received is not None
    assert received.acked_bytes == len(data)


def test_several_transfers_at_once(pair: LoopbackPair) -> None:
    datas = {number: random_bytes(number * 300_000 + 7, number) for number in range(1, 9)}
    begun = {number: pair.begin(number, data) for number, data in datas.items()}
    for offset in range(0, 9 * 300_000, 100_000):
        for number, (handle, _) in begun.items():
            length = min(100_000, len(datas[number]) - offset)
            if length > 0:
                handle.ready(offset, length)
    for number, (handle, landed) in begun.items():
        assert pair.listener.wait(handle.transfer_id) is None
        assert landed == datas[number]


def test_empty_transfer_completes(pair: LoopbackPair) -> None:
    handle, _ = pair.begin(1, bytearray())
    assert pair.listener.wait(handle.transfer_id) is None


def test_wrong_token_fails_only_that_transfer(pair: LoopbackPair) -> None:
    good, landed = pair.begin(1, random_bytes(MIB))
    spec = replace(make_spec(2, pair.endpoint), token=b"x" * 32)
    pair.registry.expect(make_spec(2), MemorySpace(bytearray(MIB)))
    bad = pair.sender.open(spec, MemorySpace(random_bytes(MIB)), pair.listener)
    bad.ready(0, MIB)
    error = pair.listener.wait(spec.transfer_id)
    assert isinstance(error, PeerError)
    assert (error.code, error.message) == ("bad_token", "wrong token for this transfer")
    connections = good.progress().num_connections
    assert connections > 0
    good.ready(0, MIB)
    assert pair.listener.wait(good.transfer_id) is None
    assert landed == random_bytes(MIB)


@pytest.mark.parametrize(
    ("change", "code"),
    [({"fingerprint": b"y" * 32}, "fingerprint"), ({"transfer_id": b"z" * 16}, "unknown_transfer")],
)
def test_refusals_say_why(pair: LoopbackPair, change: dict[str, bytes], code: str) -> None:
    pair.registry.expect(make_spec(2), MemorySpace(bytearray(MIB)))
    spec = replace(make_spec(2, pair.endpoint), **change)
    pair.sender.open(spec, MemorySpace(bytearray(MIB)), pair.listener)
    error = pair.listener.wait(spec.transfer_id)
    assert isinstance(error, PeerError)
    assert error.code == code


@pytest.mark.alone
def test_cancel_is_acknowledged(pair: LoopbackPair) -> None:
    handle, _ = pair.begin(1, random_bytes(4 * MIB))
    handle.ready(0, 2 * MIB)
    eventually(lambda: handle.progress().acked_bytes > 0)
    begin_s = time.monotonic()
    handle.cancel("no longer wanted")
    error = pair.listener.wait(handle.transfer_id)
    assert isinstance(error, LocalError)
    assert (error.code, error.message) == ("cancelled", "no longer wanted")
    assert time.monotonic() - begin_s < CONFIG.ack_timeout_s
    told = pair.registry.wait(handle.transfer_id)
    assert isinstance(told, PeerError)
    assert (told.code, told.message) == ("cancelled", "no longer wanted")
    assert handle.progress().state is TransferState.CANCELLED


def test_black_hole_fails_after_the_idle_timeout() -> None:
    with (
        closing(socket.create_server(("127.0.0.1", 0))) as hole,
        closing(LoopbackPair(CONFIG)) as pair,
    ):
        endpoint = Endpoint("127.0.0.1", hole.getsockname()[1])
        handle, _ = pair.begin(1, random_bytes(MIB), via=endpoint)
        handle.ready(0, MIB)
        error = pair.listener.wait(handle.transfer_id)
        assert isinstance(error, LinkError)
        assert error.code == "unreachable"
        assert "no answer to HELLO" in error.message


def test_raw_peer_of_another_version_is_told_so(pair: LoopbackPair) -> None:
    address = ("127.0.0.1", pair.endpoint.port)
    with socket.create_connection(address, timeout=5) as sock:
        sock.sendall(greeting(7, 9))
        answer = b""
        while chunk := sock.recv(4096):
            answer += chunk
    assert f"the sender speaks version 7 to 9, this side speaks {VERSION}".encode() in answer


def test_nothing_is_left_after_close() -> None:
    before = Census.take()
    for number in range(3):
        with closing(LoopbackPair(CONFIG)) as pair:
            data = random_bytes(MIB)
            handle, _ = pair.begin(number, data)
            handle.ready(0, len(data))
            assert pair.listener.wait(handle.transfer_id) is None
            assert len(transport_threads()) > 2 * CONFIG.num_connections
    assert before.leaks() == []


def test_closing_waits_for_connections_that_have_given_up_their_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    close = SocketOwner.close
    leaving = threading.Event()

    def close_slowly(owner: SocketOwner) -> None:
        if threading.current_thread().name.startswith("prfaas-receive"):
            leaving.set()
            time.sleep(0.2)
        close(owner)

    monkeypatch.setattr(SocketOwner, "close", close_slowly)
    before = Census.take()
    with closing(LoopbackPair(CONFIG)) as pair:
        socket.create_connection(("127.0.0.1", pair.endpoint.port)).close()
        assert leaving.wait(5)
        assert pair.receiver.num_connections == 0
    assert before.leaks() == []


def test_a_link_that_closes_starts_no_further_connection(pair: LoopbackPair) -> None:
    pair.sender.warm(pair.endpoint)
    link = pair.sender._links[pair.endpoint]
    num_threads = len(link._threads)
    link.close()
    link._grow_to(num_threads + 4)
    assert len(link._threads) == num_threads
    assert link.join(time.monotonic() + 5)


def test_close_in_mid_transfer_tells_both_and_lets_go_of_memory() -> None:
    data = random_bytes(32 * MIB)
    source = MemorySpace(data)
    with closing(LoopbackPair(CONFIG)) as pair:
        spec = make_spec(1, pair.endpoint)
        landed = bytearray(len(data))
        pair.registry.expect(spec, MemorySpace(landed))
        handle = pair.sender.open(spec, source, pair.listener)
        handle.ready(0, len(data) - 1)  # so that it cannot complete before the close
        eventually(lambda: handle.progress().acked_bytes > 0)
        pair.sender.close()
        error = pair.listener.failed[spec.transfer_id]
        assert isinstance(error, LocalError)
        assert error.code == "closed"
        source.release()
        pair.receiver.close()
        assert pair.registry.failed[spec.transfer_id].code == "closed"
        pair.registry.expected.clear()
        landed.clear()  # raises BufferError if a view were left
        with pytest.raises(RuntimeError, match="closed"):
            pair.sender.open(make_spec(2, pair.endpoint), source, pair.listener)


def test_memory_is_free_when_the_listener_is_called(pair: LoopbackPair) -> None:
    source, target = MemorySpace(random_bytes(8 * MIB)), MemorySpace(bytearray(8 * MIB))
    spec = make_spec(1, pair.endpoint)
    errors: list[BaseException] = []

    class Releasing(RecordingListener):
        def __init__(self, space: MemorySpace) -> None:
            super().__init__()
            self.space = space

        def on_complete(self, transfer_id: bytes) -> None:
            try:
                self.space.release()
            except BufferError as error:
                errors.append(error)
            super().on_complete(transfer_id)

    listener, landing = Releasing(source), Releasing(target)
    pair.registry.expect(spec, target)
    pair.registry.on_complete = landing.on_complete  # type: ignore[method-assign]
    handle = pair.sender.open(spec, source, listener)
    handle.ready(0, 8 * MIB)
    assert listener.wait(spec.transfer_id) is None
    assert landing.completed == [spec.transfer_id]
    assert errors == []


def test_idle_links_are_closed_and_made_again() -> None:
    config = replace(CONFIG, link_idle_timeout_s=1.0)
    with closing(LoopbackPair(config)) as pair:
        pair.sender.warm(pair.endpoint)
        eventually(lambda: pair.sender.num_connections(pair.endpoint) == config.num_connections)
        eventually(lambda: pair.sender.num_connections(pair.endpoint) == 0)
        eventually(lambda: pair.receiver.num_connections == 0)
        handle, landed = pair.begin(1, bytearray(b"again"))
        handle.ready(0, 5)
        assert pair.listener.wait(handle.transfer_id) is None
        assert landed == b"again"


def transport_cpu_s() -> float:
    """CPU time of all threads of the transport so far."""
    threads = [item for item in threading.enumerate() if item.name.startswith("prfaas-")]
    return sum(
        time.clock_gettime(time.pthread_getcpuclockid(item.ident))
        for item in threads
        if item.ident is not None
    )


def test_warm_connections_sleep(pair: LoopbackPair) -> None:
    pair.sender.warm(pair.endpoint)
    eventually(lambda: pair.sender.num_connections(pair.endpoint) == CONFIG.num_connections)
    before_s = transport_cpu_s()
    time.sleep(1.0)
    assert transport_cpu_s() - before_s < 0.02


@pytest.mark.alone
def test_a_silent_stranger_is_shown_out(pair: LoopbackPair) -> None:
    address = ("127.0.0.1", pair.endpoint.port)
    with socket.create_connection(address, timeout=10) as sock:
        sock.sendall(b"P")
        begin_s = time.monotonic()
        assert sock.recv(100) == b""
        assert time.monotonic() - begin_s < CONFIG.handshake_timeout_s + 1.5


def test_an_http_client_gets_a_readable_answer(pair: LoopbackPair) -> None:
    address = ("127.0.0.1", pair.endpoint.port)
    with socket.create_connection(address, timeout=5) as sock:
        sock.sendall(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: */*\r\n\r\n")
        answer = b""
        while chunk := sock.recv(4096):
            answer += chunk
    assert b"does not speak the PrfaaS transport" in answer


def test_a_taken_port_is_a_local_error(pair: LoopbackPair) -> None:
    receiver = Receiver(pair.endpoint, CONFIG, pair.registry)
    with pytest.raises(LocalError, match="cannot listen on 127"):
        receiver.start()


@pytest.mark.alone
def test_a_receiver_of_another_version_fails_the_transfer_at_once(pair: LoopbackPair) -> None:
    def answer(listener: socket.socket) -> None:
        with suppress(OSError):  # the listener was closed
            while True:
                sock, _ = listener.accept()
                with sock:
                    sock.recv(4096)
                    sock.sendall(Hello(5, 6, MIB, 0, bytes(16)).encode(FrameType.WELCOME))
                    sock.recv(4096)

    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        server = threading.Thread(target=answer, args=(listener,))
        server.start()
        endpoint = Endpoint("127.0.0.1", listener.getsockname()[1])
        begin_s = time.monotonic()
        handle, _ = pair.begin(1, random_bytes(MIB), via=endpoint)
        error = pair.listener.wait(handle.transfer_id)
        assert isinstance(error, PeerError)
        assert error.code == "version"
        assert f"the receiver speaks version 5 to 6, this side speaks {VERSION}" in error.message
        assert time.monotonic() - begin_s < CONFIG.idle_timeout_s
        listener.shutdown(socket.SHUT_RDWR)
        server.join(10)
