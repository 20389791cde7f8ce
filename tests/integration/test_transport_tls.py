"""Mutual TLS over real sockets, with certificates made for the test."""

from __future__ import annotations

import random
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from certificates import make_authority, make_node
from transport_doubles import MemoryRegistry, MemorySpace, make_spec
from transport_loopback import LOOPBACK, LoopbackPair

from transport import (
    Endpoint,
    LinkError,
    LocalError,
    PeerError,
    Receiver,
    Sender,
    TlsFiles,
    TransportConfig,
    TransportError,
)
from transport.testing.proxy import HurtfulProxy
from transport.tls import TlsStream, client_context, server_context, tls_handshake, wrap_tls

MIB = 1024 * 1024
CONFIG = TransportConfig(
    num_connections=3,
    connect_timeout_s=2,
    handshake_timeout_s=2,
    ack_timeout_s=2,
    idle_timeout_s=4,
    reconnect_first_s=0.02,
    reconnect_max_s=0.2,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def node(folder: Path) -> TlsFiles:
    return make_node(folder, "node", make_authority(folder, "ca"))


@pytest.fixture(scope="module")
def stranger(folder: Path, node: TlsFiles) -> TlsFiles:
    """Certified by another CA, but trusting ours."""
    return make_node(folder, "stranger", make_authority(folder, "other-ca"), trusts=node.ca)


def connection(endpoint: Endpoint) -> socket.socket:
    sock = socket.create_connection((endpoint.host, endpoint.port), 5)
    sock.settimeout(5)
    return sock


def outcome(pair: LoopbackPair) -> TransportError | None:
    data = bytearray(random.Random(0).randbytes(3 * MIB + 5))
    handle, landed = pair.begin(1, data)
    handle.ready(0, len(data))
    error = pair.listener.wait(handle.transfer_id)
    assert (landed == data) is (error is None)
    return error


def test_exact_bytes_under_mutual_tls(node: TlsFiles) -> None:
    with closing(LoopbackPair(replace(CONFIG, tls=node))) as pair:
        assert outcome(pair) is None


def test_cut_connections_are_resumed_under_tls(node: TlsFiles) -> None:
    with (
        closing(LoopbackPair(replace(CONFIG, tls=node))) as pair,
        closing(HurtfulProxy(pair.endpoint)) as proxy,
    ):
        data = bytearray(random.Random(0).randbytes(16 * MIB))
        handle, landed = pair.begin(1, data, via=proxy.endpoint)
        handle.ready(0, 4 * MIB)
        while handle.progress().acked_bytes == 0:
            assert not pair.listener.failed
        handle.ready(4 * MIB, 12 * MIB)
        proxy.cut()
        assert pair.listener.wait(handle.transfer_id) is None
        assert landed == data


@pytest.mark.parametrize("piece_bytes", [16 * MIB, 64 * 1024])
def test_a_connection_is_renewed_before_its_key_wears_out(
    piece_bytes: int, node: TlsFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when it carries nothing but small pieces, which callers send themselves."""
    monkeypatch.setattr("transport.sending.lane.MAX_TLS_BYTES", MIB)
    with (
        closing(LoopbackPair(replace(CONFIG, tls=node))) as pair,
        closing(HurtfulProxy(pair.endpoint)) as proxy,
    ):
        data = bytearray(random.Random(0).randbytes(16 * MIB))
        handle, landed = pair.begin(1, data, via=proxy.endpoint)
        for start in range(0, len(data), piece_bytes):
            handle.ready(start, piece_bytes)
            if piece_bytes < len(data):
                assert handle.wait_acked(start + piece_bytes, 20)
        assert pair.listener.wait(handle.transfer_id) is None
        assert landed == data
        assert proxy.num_accepted > CONFIG.num_connections


def test_cancel_and_drop_work_under_tls(node: TlsFiles) -> None:
    with closing(LoopbackPair(replace(CONFIG, tls=node))) as pair:
        one, _ = pair.begin(1, bytearray(MIB))
        two, _ = pair.begin(2, bytearray(MIB))
        for handle in (one, two):
            handle.ready(0, 1000)
            while handle.progress().acked_bytes < 1000:
                assert not pair.listener.failed
        one.cancel("not wanted")
        pair.receiver.drop(two.transfer_id, "not wanted either")
        errors = [pair.listener.wait(handle.transfer_id) for handle in (one, two)]
        assert [error.code for error in errors if error] == ["cancelled", "dropped"]


def assert_fails_fast(pair: LoopbackPair, *codes: str) -> None:
    error = outcome(pair)
    assert isinstance(error, PeerError), error
    assert error.code in codes
    assert "TLS" in error.message


def test_receiver_turns_a_strangers_certificate_away(node: TlsFiles, stranger: TlsFiles) -> None:
    pair = LoopbackPair(replace(CONFIG, tls=stranger), receiver_config=replace(CONFIG, tls=node))
    with closing(pair):
        assert_fails_fast(pair, "tls")


def test_sender_turns_a_strangers_certificate_away(node: TlsFiles, stranger: TlsFiles) -> None:
    pair = LoopbackPair(replace(CONFIG, tls=node), receiver_config=replace(CONFIG, tls=stranger))
    with closing(pair):
        assert_fails_fast(pair, "tls")


def test_tls_sender_and_plain_receiver(node: TlsFiles) -> None:
    pair = LoopbackPair(replace(CONFIG, tls=node), receiver_config=CONFIG)
    with closing(pair):
        assert_fails_fast(pair, "tls")


def test_plain_sender_and_tls_receiver(node: TlsFiles) -> None:
    pair = LoopbackPair(CONFIG, receiver_config=replace(CONFIG, tls=node))
    with closing(pair):
        error = outcome(pair)
        assert error is not None
        assert error.code == "unreachable"
        assert "does it expect TLS?" in error.message


@pytest.mark.parametrize(("name", "matches"), [("node", True), ("elsewhere", False)])
def test_the_receivers_name_is_checked_when_asked(node: TlsFiles, name: str, matches: bool) -> None:
    named = replace(CONFIG, tls=replace(node, server_name=name))
    with closing(LoopbackPair(named, receiver_config=replace(CONFIG, tls=node))) as pair:
        error = outcome(pair)
        assert (error is None) is matches
        if error is not None:
            assert "mismatch" in str(error)


@pytest.mark.parametrize("uri", ["spiffe://r/gateway/x", "spiffe://elsewhere/agent/x"])
def test_another_role_or_region_is_refused_by_both_ends(
    folder: Path, node: TlsFiles, uri: str
) -> None:
    """Certificates of one authority; each end of the data plane must be an agent of the region."""
    other = make_node(folder, "other", node.ca, uris=(uri,))
    for sender, receiver in ((node, other), (other, node)):
        pair = LoopbackPair(
            replace(CONFIG, tls=sender), receiver_config=replace(CONFIG, tls=receiver)
        )
        with closing(pair):
            error = outcome(pair)
            assert isinstance(error, PeerError), error
            assert error.code == "tls"
            assert "the data connection needs role agent of region" in error.message
            assert pair.registry.num_asked == 0


def test_a_receiver_refuses_a_sender_that_does_not_look(folder: Path, node: TlsFiles) -> None:
    """The refusal says what was shown, to whoever listens."""
    other = make_node(folder, "deaf", node.ca, uris=("spiffe://r/gateway/x",))
    registry = MemoryRegistry()
    with closing(Receiver(LOOPBACK, replace(CONFIG, tls=node), registry)) as receiver:
        receiver.start()
        with (
            connection(receiver.endpoint) as sock,
            client_context(other).wrap_socket(sock, server_hostname="127.0.0.1") as wrapped,
        ):
            said = b""
            while piece := wrapped.recv(4096):
                said += piece
    assert b"the other side shows spiffe://r/gateway/x" in said
    assert registry.num_asked == 0


@pytest.mark.parametrize("uris", [(), ("spiffe://r/agent/a", "spiffe://s/agent/a")])
def test_a_certificate_must_name_its_holder_in_one_region(
    folder: Path, node: TlsFiles, uris: tuple[str, ...]
) -> None:
    unnamed = make_node(folder, "unnamed", node.ca, uris=uris)
    with pytest.raises(LocalError, match=r"unnamed\.pem .*spiffe://REGION/ROLE/NAME"):
        Sender(replace(CONFIG, tls=unnamed))


def test_unusable_files_are_named(node: TlsFiles) -> None:
    with pytest.raises(LocalError, match=r"missing\.pem"):
        Sender(replace(CONFIG, tls=replace(node, cert=Path("missing.pem"))))


def test_an_expired_certificate_is_named_on_both_sides(
    folder: Path, node: TlsFiles, caplog: pytest.LogCaptureFixture
) -> None:
    old = make_node(folder, "expired", node.ca, num_days=-1)
    ours, expired = replace(CONFIG, tls=node), replace(CONFIG, tls=old)
    with closing(LoopbackPair(expired, receiver_config=ours)) as pair:
        error = outcome(pair)
        assert isinstance(error, PeerError)
        assert error.message == "TLS failed: the peer reports: certificate expired"
    assert "certificate has expired" in caplog.text
    with closing(LoopbackPair(ours, receiver_config=expired)) as pair:
        assert "certificate has expired" in str(outcome(pair))


def test_a_sender_without_certificate_is_refused(node: TlsFiles) -> None:
    registry = MemoryRegistry()
    with closing(Receiver(LOOPBACK, replace(CONFIG, tls=node), registry)) as receiver:
        receiver.start()
        context = ssl.create_default_context(cafile=node.ca)
        context.check_hostname = False
        with (
            connection(receiver.endpoint) as sock,
            context.wrap_socket(sock) as wrapped,
            pytest.raises(ssl.SSLError, match=r"(?i)certificate.required"),
        ):
            assert wrapped.recv(1)
    assert registry.num_asked == 0


def test_a_wrong_token_is_refused(node: TlsFiles) -> None:
    with closing(LoopbackPair(replace(CONFIG, tls=node))) as pair:
        spec, landed = make_spec(1, pair.endpoint), bytearray(1000)
        pair.registry.expect(spec, MemorySpace(landed))
        forged = replace(spec, token=bytes(32))
        handle = pair.sender.open(forged, MemorySpace(bytearray(b"x" * 1000)), pair.listener)
        handle.ready(0, 1000)
        error = pair.listener.wait(spec.transfer_id)
        assert isinstance(error, PeerError)
        assert error.code == "bad_token"
        assert landed == bytes(1000)


def test_a_recorded_connection_played_again_writes_nothing() -> None:
    """What an observer of a plain connection can do: its bytes open no transfer a second time."""
    recorded = bytearray()

    def record(data: bytes, is_forward: bool) -> bytes:
        if is_forward:
            recorded.extend(data)
        return data

    config = replace(CONFIG, num_connections=1)
    with closing(LoopbackPair(config)) as pair, closing(HurtfulProxy(pair.endpoint)) as proxy:
        proxy.damage = record
        data = bytearray(random.Random(0).randbytes(MIB))
        handle, landed = pair.begin(1, data, via=proxy.endpoint)
        handle.ready(0, len(data))
        assert pair.listener.wait(handle.transfer_id) is None
        assert landed == data
        assert len(recorded) > MIB
        landed[:] = bytes(MIB)  # the memory has another owner now
        with connection(pair.endpoint) as sock:
            sock.sendall(recorded)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(65536):  # until the receiver has read all of it and hung up
                pass
        assert landed == bytes(MIB)
        assert pair.registry.num_asked == 1
        assert pair.registry.completed == [handle.transfer_id]
        assert not pair.registry.failed


def connected_streams(files: TlsFiles) -> tuple[TlsStream, TlsStream]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = connection(Endpoint("127.0.0.1", listener.getsockname()[1]))
        far, _ = listener.accept()
    accepted: list[TlsStream] = []
    wrapped = wrap_tls(server_context(files), far, is_server=True)
    thread = threading.Thread(target=lambda: accepted.append(tls_handshake(wrapped, 5)))
    thread.start()
    stream = tls_handshake(wrap_tls(client_context(files), near, server_name="127.0.0.1"), 5)
    thread.join()
    return stream, accepted[0]


@pytest.mark.parametrize("is_far", [False, True])
def test_many_small_buffers_arrive_in_order(is_far: bool, node: TlsFiles) -> None:
    """The stream joins small buffers; a frame of many views must not be reordered by that."""
    sizes = [1, 40_000, 3, 0, 16_384, 32_768, 32_769, 70_000, 5]
    buffers = [bytes([number]) * size for number, size in enumerate(sizes)]
    near, far = connected_streams(node)
    far._is_far = is_far
    received = bytearray(sum(sizes))
    views = [memoryview(received)[:100_000], memoryview(received)[100_000:]]
    thread = threading.Thread(target=lambda: far.receive(views, fill=True))
    thread.start()
    near.send(buffers)
    thread.join(5)
    assert received == b"".join(buffers)
    for stream in (near, far):
        stream.close()


def test_what_is_not_taken_at_once_can_be_sent_afterwards(node: TlsFiles) -> None:
    near, far = connected_streams(node)
    data = bytes(index % 251 for index in range(16 * MIB))
    rest = near.send_some([data[:MIB], b"a little", data[MIB:]])
    assert rest
    received = bytearray(len(data) + 8)
    thread = threading.Thread(target=lambda: far.receive([memoryview(received)], fill=True))
    thread.start()
    near.send(rest)
    thread.join(20)
    assert received == data[:MIB] + b"a little" + data[MIB:]
    for stream in (near, far):
        stream.close()


def test_what_came_before_the_end_is_received_first(node: TlsFiles) -> None:
    near, far = connected_streams(node)
    near.send([b"farewell"])
    near.close()
    memory = memoryview(bytearray(100))
    assert far.receive([memory], fill=False) == 8
    for _ in range(2):
        with pytest.raises(LinkError, match=r"lost|closed"):
            far.receive([memory], fill=False)
        with pytest.raises(LinkError):
            far.try_receive([memory])
    far.close()


def test_abort_ends_waiting_threads(node: TlsFiles) -> None:
    near, far = connected_streams(node)
    endings: list[Exception] = []

    def ended(wait: Callable[[], object]) -> threading.Thread:
        def run() -> None:
            with pytest.raises(LinkError) as caught:
                wait()
            endings.append(caught.value)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    memory = memoryview(bytearray(100))
    threads = [
        ended(lambda: near.receive([memory], fill=True)),
        ended(lambda: near.send([bytes(64 * MIB)])),  # far more than fits
    ]
    while not near.unsent_bytes():
        time.sleep(0.01)
    near.abort()
    for thread in threads:
        thread.join(5)
    assert len(endings) == 2
    for stream in (near, far):
        stream.close()
