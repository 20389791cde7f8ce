"""Hostile peers on real sockets: they cost themselves their connection, others nothing."""

from __future__ import annotations

import gc
import select
import socket
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace

import psutil
import pytest
from attacks import attack_sender
from hostile import forge, own_greeting
from hypothesis import given, settings
from hypothesis import strategies as st
from transport_doubles import MemorySpace, make_spec
from transport_loopback import LoopbackPair, eventually

from transport import OutgoingSpec, TransportConfig
from transport.receiving import connection as connection_module
from transport.sockets import Buffer, PlainStream
from transport.wire.frames import FrameType, encode_header, encode_open

KIB = 1024
MIB = 1024 * KIB
CONFIG = TransportConfig(
    num_connections=2,
    autotune=False,
    handshake_timeout_s=0.5,
    ack_timeout_s=0.5,
    idle_timeout_s=0.6,
    max_connections=66,
    max_ranges_per_transfer=2000,
)


class HostilePeer:
    """A raw connection to the receiver of `pair`."""

    def __init__(self, pair: LoopbackPair, *, greets: bool = True, window_bytes: int = 0) -> None:
        self.sock = socket.socket()
        if window_bytes:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window_bytes)
        self.sock.settimeout(5)
        self.sock.connect((pair.endpoint.host, pair.endpoint.port))
        if greets:
            self.sock.sendall(own_greeting())
            self.sock.recv(1024, socket.MSG_WAITALL if window_bytes else 0)

    def open(self, spec: OutgoingSpec, nbytes: int) -> None:
        self.sock.sendall(
            encode_open(
                spec.transfer_id, token=spec.token, fingerprint=spec.fingerprint, nbytes=nbytes
            )
        )

    def answers_until(self, wanted: bytes) -> bytes:
        """Everything up to `wanted`; AssertionError when the connection ends first."""
        heard = b""
        while wanted not in heard:
            more = self.sock.recv(65536)
            assert more, f"no {wanted!r} before the end"
            heard += more
        return heard

    def is_closed(self) -> bool:
        """Whether the receiver has ended it; reads what was said before."""
        self.sock.setblocking(False)
        try:
            while self.sock.recv(65536):
                pass
        except BlockingIOError:
            return False
        except OSError:
            pass  # a reset
        return True


class Arena(LoopbackPair):
    """A well-behaved pair, and hostile peers of its receiver."""

    def __init__(self, config: TransportConfig = CONFIG) -> None:
        super().__init__(config)
        self._peers: list[HostilePeer] = []

    def attack(self, *, greets: bool = True, window_bytes: int = 0) -> HostilePeer:
        peer = HostilePeer(self, greets=greets, window_bytes=window_bytes)
        self._peers.append(peer)
        return peer

    def close(self) -> None:
        for peer in self._peers:
            peer.sock.close()
        super().close()


@pytest.fixture
def arena(request: pytest.FixtureRequest) -> Iterator[Arena]:
    with closing(Arena(getattr(request, "param", CONFIG))) as arena:
        yield arena


def rss_bytes() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def assert_transfers_work(arena: Arena, number: int) -> None:
    data = bytearray(bytes(range(256)) * 4 * KIB)
    handle, landed = arena.begin(number, data)
    handle.ready(0, len(data))
    assert arena.listener.wait(handle.transfer_id, 5) is None
    assert landed == data


@pytest.mark.parametrize(
    "arena",
    [replace(CONFIG, handshake_timeout_s=60.0, idle_timeout_s=61.0, max_connections=256)],
    ids=["patient"],
    indirect=True,
)
def test_peers_that_never_finish_their_greeting_are_cheap(arena: Arena) -> None:
    """They take every place for peers without a transfer; the connections that are there go on."""
    assert_transfers_work(arena, 1)
    before_bytes = rss_bytes()
    slow = [arena.attack(greets=False) for _ in range(64)]
    for peer in slow:
        peer.sock.sendall(own_greeting()[:40])
    eventually(lambda: arena.receiver.num_connections == 66, 30)
    assert rss_bytes() - before_bytes < 64 * 64 * KIB
    slow.append(arena.attack(greets=False))
    (turned_away,), _, _ = select.select([peer.sock for peer in slow], [], [], 30)
    assert b"busy" in turned_away.recv(1024)
    eventually(lambda: arena.receiver.num_connections == 66, 30)
    assert_transfers_work(arena, 2)


def test_peers_that_never_finish_their_greeting_lose_their_places(arena: Arena) -> None:
    assert_transfers_work(arena, 1)
    slow = [arena.attack(greets=False) for _ in range(64)]
    for peer in slow:
        peer.sock.sendall(own_greeting()[:40])
    eventually(lambda: all(peer.is_closed() for peer in slow), 30)
    assert_transfers_work(arena, 2)
    eventually(lambda: arena.receiver.num_connections == CONFIG.num_connections)


def test_a_peer_that_reads_no_answer_is_ended_and_was_cheap(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused OPENs need no token. What is copied again for each answer would cost CPU that all
    connections share.
    """
    monkeypatch.setattr(connection_module, "MAX_OUTBOX_BYTES", MIB)
    copied_bytes = sent_bytes = 0
    try_send = PlainStream.try_send

    def counted(stream: PlainStream, data: Buffer) -> int:
        nonlocal copied_bytes, sent_bytes
        copied_bytes += len(data) if isinstance(data, bytes) else 0
        count = try_send(stream, data)
        sent_bytes += count
        return count

    monkeypatch.setattr(PlainStream, "try_send", counted)
    peer = arena.attack(window_bytes=4096)
    refused = encode_open(b"?" * 16, token=bytes(32), fingerprint=bytes(32), nbytes=1)
    before_bytes = rss_bytes()
    with suppress(ConnectionError):
        for _ in range(2000):
            peer.sock.sendall(refused * 100)
    assert rss_bytes() - before_bytes < 8 * MIB
    assert_transfers_work(arena, 1)
    eventually(lambda: arena.receiver.num_connections == CONFIG.num_connections)
    assert copied_bytes < 200 * sent_bytes


def test_data_for_nobody_is_thrown_away_in_little_memory(arena: Arena) -> None:
    peer = arena.attack()
    body = bytes(MIB)
    frame = forge(FrameType.DATA, body, transfer_id=b"?" * 16)
    peer.sock.sendall(frame)
    peer.answers_until(b"not_open")
    before_bytes = rss_bytes()
    for _ in range(32):
        peer.sock.sendall(frame)
        peer.answers_until(b"not_open")
    assert rss_bytes() - before_bytes < 2 * MIB
    assert_transfers_work(arena, 1)


def test_scattered_bytes_end_their_transfer_only(arena: Arena) -> None:
    peer, spec, landed = arena.attack(), make_spec(7), bytearray(64 * KIB)
    arena.registry.expect(spec, MemorySpace(landed))
    peer.open(spec, len(landed))
    for offset in range(0, 2 * CONFIG.max_ranges_per_transfer + 2, 2):
        peer.sock.sendall(forge(FrameType.DATA, b"x", transfer_id=spec.transfer_id, offset=offset))
    peer.answers_until(b"fragmented")
    assert arena.registry.wait(spec.transfer_id).code == "fragmented"  # type: ignore[union-attr]
    assert_transfers_work(arena, 1)
    assert not peer.is_closed()


@pytest.mark.parametrize(
    "arena", [replace(CONFIG, idle_timeout_s=2.0)], ids=["slow_machine"], indirect=True
)
def test_a_stalled_frame_loses_its_connection_and_its_memory(arena: Arena) -> None:
    """Repeated data is read into memory of its own, and waits there for the rest of the frame."""
    peer, spec = arena.attack(), make_spec(7)
    space = MemorySpace(bytearray(4 * MIB + 1))
    arena.registry.expect(spec, space)
    peer.open(spec, space.nbytes)
    whole = forge(FrameType.DATA, bytes(4 * MIB), transfer_id=spec.transfer_id)
    peer.sock.sendall(whole)
    peer.answers_until(encode_header(FrameType.ACK, spec.transfer_id, length=16)[:8])
    peer.sock.sendall(whole[:-1])
    assert_transfers_work(arena, 1)
    assert not peer.is_closed()
    eventually(peer.is_closed)
    eventually(lambda: arena.receiver.num_connections == CONFIG.num_connections)
    assert arena.registry.wait(spec.transfer_id, 10) is not None
    arena.registry.expected.clear()
    space.release()  # BufferError while anybody holds a view


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.one_of(st.binary(max_size=60), st.binary(min_size=300, max_size=900)))
def test_a_sender_keeps_its_promises_to_a_hostile_receiver(script: bytes) -> None:
    """The same attack is driven by coverage in tests/fuzz."""
    attack_sender(script)


def test_more_transfers_than_allowed_are_refused_and_the_others_live(arena: Arena) -> None:
    peer = arena.attack()
    for number in range(100, 100 + CONFIG.max_transfers_per_connection):
        arena.registry.expect(make_spec(number), MemorySpace(bytearray(1)))
        peer.open(make_spec(number), 1)
    arena.registry.expect(make_spec(99), MemorySpace(bytearray(1)))
    peer.open(make_spec(99), 1)
    peer.answers_until(b"busy")
    assert_transfers_work(arena, 1)
