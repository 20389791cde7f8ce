"""Each fault of a peer at each point of a transfer's life: slow memory, repeats, restarts, refusals
and other versions. As in the link's matrix: exact bytes or a clean failure in time, a usable link
afterwards, and nothing left behind.

Over TLS a receiver restarts as well, since TLS carries its farewell and begins anew, and reads
slowly, since records arrive in parts. The other faults are above TLS, or of peers that do without.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace

import pytest
from fault_settings import FAULT_CONFIG as CONFIG
from fault_settings import matrix
from transport_doubles import MemoryRegistry, greeting
from transport_loopback import FaultRig, Phase

from transport import Endpoint, LocalError, PeerError, Refused, TlsFiles
from transport.wire.frames import FrameType, encode_data_header, encode_frame, encode_open
from transport.wire.handshake import VERSION, Hello
from transport.wire.sender_session import Acked, Completed, Event, SenderSession

pytestmark = pytest.mark.alone

KIB = 1024
MIB = 1024 * KIB
PIECE_BYTES = 64 * KIB
AT_ONCE_S = 0.5 * CONFIG.idle_timeout_s


@pytest.fixture
def rig(request: pytest.FixtureRequest, node_files: TlsFiles) -> Iterator[FaultRig]:
    """Over TLS where a test's parameter says so."""
    has_tls = getattr(request, "param", False)
    with closing(FaultRig(replace(CONFIG, tls=node_files if has_tls else None))) as rig:
        yield rig


def each_phase(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("phase", Phase, ids=lambda phase: f"{name}-{phase}")


def go_on(rig: FaultRig) -> None:
    rig.go_on()
    rig.proxy.resume()


# A slow receiver.


def slow_memory(rig: FaultRig) -> None:
    rig.landing.pause_s = 0.02


def stuck_memory(rig: FaultRig) -> None:
    """The sender gives the connection up while the receiver still sits on its frame."""
    rig.landing.once_s = 1.5 * CONFIG.ack_timeout_s


def slow_reader(rig: FaultRig) -> None:
    rig.proxy.bytes_per_read = 2000
    rig.proxy.delay_s = lambda connection, is_forward: 0.05


@matrix(plain=[slow_memory, stuck_memory, slow_reader], tls=[slow_reader])
def test_a_slow_receiver_gets_every_byte(
    rig: FaultRig, strike: Callable[[FaultRig], None], phase: Phase
) -> None:
    rig.bring_to(phase)
    strike(rig)
    go_on(rig)
    assert rig.outcome(CONFIG.idle_timeout_s + 1) is None
    rig.proxy.heal()
    rig.check_usable()
    rig.check_left_nothing()


# Repeats.


class RawSender:
    """A connection of a sender's peer that says what the test wants."""

    def __init__(self, endpoint: Endpoint, hello: bytes | None = None) -> None:
        self.sock = socket.create_connection((endpoint.host, endpoint.port), timeout=5)
        self._session = SenderSession(CONFIG, b"D" * 16)
        self.sock.sendall(hello or self._session.hello())
        self.next_events()

    def close(self) -> None:
        self.sock.close()

    def next_events(self) -> list[Event]:
        events: list[Event] = []
        while not events:
            data = self.sock.recv(65536)
            assert data, "the receiver hung up"
            events = self._session.feed(data)
        return events

    def send_twice(self, rig: FaultRig, offset: int, payload: bytes) -> list[Event]:
        """OPEN and DATA, twice over; returns all answers."""
        spec = rig.spec
        frames = encode_open(
            spec.transfer_id,
            token=spec.token,
            fingerprint=spec.fingerprint,
            nbytes=len(rig.data),
        )
        frames += encode_data_header(spec.transfer_id, offset, [memoryview(payload)]) + payload
        events: list[Event] = []
        for _ in range(2):
            self.sock.sendall(frames)
            seen = len(events)
            while not any(isinstance(event, Acked | Completed) for event in events[seen:]):
                events += self.next_events()
        return events


@each_phase("duplicate")
def test_a_repeat_never_overwrites_what_is_in_place(rig: FaultRig, phase: Phase) -> None:
    rig.bring_to(phase)
    right = bytes(rig.data[:PIECE_BYTES])
    wrong = bytes(byte ^ 0xFF for byte in right)
    with closing(RawSender(rig.pair.endpoint)) as peer:
        events = peer.send_twice(rig, 0, right if phase is Phase.BEFORE else wrong)
        is_complete = any(isinstance(event, Completed) for event in events)
        assert is_complete is (phase is Phase.LAST_ACK)
        if phase is Phase.DURING:  # a part that is also on its way from the sender
            peer.send_twice(rig, len(rig.data) // 2, bytes(rig.data[len(rig.data) // 2 :][:1000]))
        if phase is Phase.LAST_FRAME:
            events = peer.send_twice(rig, len(rig.data) - 1, bytes(rig.data[-1:]))
            assert any(isinstance(event, Completed) for event in events)
        go_on(rig)
        assert rig.outcome(AT_ONCE_S) is None
    rig.check_usable()
    rig.check_left_nothing()


# Restarts.


@pytest.mark.parametrize("rig", [False, True], ids=["plain", "tls"], indirect=True)
@each_phase("restart")
def test_a_receiver_that_restarts_ends_what_it_had_begun(rig: FaultRig, phase: Phase) -> None:
    rig.bring_to(phase)
    rig.proxy.stall()
    rig.restart_receiver()
    rig.proxy.reset()  # with the farewell in it
    go_on(rig)
    error = rig.outcome(AT_ONCE_S)
    if phase is Phase.BEFORE:
        assert error is None
    else:
        assert isinstance(error, PeerError)
        assert error.code == "receiver_restarted"
    if phase in (Phase.DURING, Phase.LAST_FRAME):
        told = rig.pair.registry.wait(rig.transfer_id, 0)
        assert isinstance(told, LocalError)
        assert told.code == "closed"
    rig.check_usable()
    rig.check_left_nothing()


# Refusals.


class FullArena:
    """Makes a registry refuse what it does not hold yet, until `make_room`."""

    def __init__(self, registry: MemoryRegistry) -> None:
        self._registry = registry
        registry.accept = self._refuse  # type: ignore[method-assign]

    def _refuse(self, *_: object) -> None:
        raise Refused("no_room", "the arena is full")

    def make_room(self) -> None:
        del self._registry.accept


@each_phase("arena_full")
def test_a_full_arena_refuses_only_what_is_new(rig: FaultRig, phase: Phase) -> None:
    rig.bring_to(phase)
    arena = FullArena(rig.pair.registry)
    late, late_landed = rig.pair.begin(7, bytearray(b"late"), via=rig.spec.endpoint)
    go_on(rig)
    error = rig.outcome(AT_ONCE_S)
    refused = [rig.pair.listener.wait(late.transfer_id, AT_ONCE_S)]
    if phase is Phase.BEFORE:
        refused.append(error)
    else:
        assert error is None
    for refusal in refused:
        assert isinstance(refusal, PeerError)
        assert (refusal.code, refusal.message) == ("no_room", "the arena is full")
    arena.make_room()
    again, late_landed = rig.pair.begin(7, bytearray(b"late"), via=rig.spec.endpoint)
    again.ready(0, 4)
    rig.pair.listener.failed.clear()
    assert rig.pair.listener.wait(again.transfer_id, AT_ONCE_S) is None
    assert late_landed == b"late"
    rig.check_usable()
    rig.check_left_nothing()


# Versions.


class RawReceiver:
    """Answers every HELLO with `welcome`, every further frame with what `answer` makes of it."""

    def __init__(self, welcome: bytes, answer: Callable[[bytes], bytes] = lambda data: b"") -> None:
        self._welcome = welcome
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = Endpoint("127.0.0.1", self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with suppress(OSError):  # the listener was closed, or the sender hung up
            while True:
                sock, _ = self._listener.accept()
                with sock, suppress(OSError):
                    sock.settimeout(0.3)
                    sock.recv(4096)
                    sock.sendall(self._welcome)
                    while data := sock.recv(4096):
                        sock.sendall(self._answer(data))

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        self._listener.close()


def hello_of(versions: tuple[int, int], *, features: int = 0, tail: bytes = b"") -> Hello:
    return _HelloWithTail(*versions, MIB, features, b"N" * 16, tail=tail)


class _HelloWithTail(Hello):
    """What a later release may send: the fields of now and more behind them."""

    def __init__(self, *fields: object, tail: bytes) -> None:
        super().__init__(*fields)  # type: ignore[arg-type]
        object.__setattr__(self, "tail", tail)

    def encode(self, kind: FrameType) -> bytes:
        body = super().encode(kind)[48:]
        return encode_frame(kind, body=body + self.tail)  # type: ignore[attr-defined]


LATER_ONLY = hello_of((VERSION + 1, VERSION + 2))
LATER_TOO = hello_of((VERSION, VERSION + 2), features=1 << 63, tail=b"later")


@each_phase("receiver_of_another_version")
def test_a_receiver_of_another_version_fails_the_transfer_at_once(
    rig: FaultRig, phase: Phase
) -> None:
    rig.bring_to(phase)
    with closing(RawReceiver(LATER_ONLY.encode(FrameType.WELCOME))) as later:
        rig.proxy.target = later.endpoint
        rig.proxy.reset()
        go_on(rig)
        error = rig.outcome(AT_ONCE_S)
        assert isinstance(error, PeerError)
        assert error.code == "version"
        assert f"version {VERSION + 1} to {VERSION + 2}" in error.message
        rig.proxy.target = rig.pair.endpoint
    rig.check_usable()
    rig.check_left_nothing()


@each_phase("strangers")
def test_strangers_are_told_why_and_disturb_nobody(rig: FaultRig, phase: Phase) -> None:
    rig.bring_to(phase)
    address = (rig.pair.endpoint.host, rig.pair.endpoint.port)
    for words, answer in (
        (greeting(VERSION + 1, VERSION + 2), b"version mismatch"),
        (b"GET / HTTP/1.1\r\nHost: x\r\nAccept: */*\r\nUser-Agent: test\r\n\r\n", b"not speak"),
    ):
        with socket.create_connection(address, timeout=5) as sock:
            sock.sendall(words)
            said = b""
            while chunk := sock.recv(4096):
                said += chunk
        assert answer in said
    go_on(rig)
    assert rig.outcome(AT_ONCE_S) is None
    rig.check_usable()
    rig.check_left_nothing()


def test_a_sender_that_speaks_later_versions_too_is_welcome(rig: FaultRig) -> None:
    hello = LATER_TOO.encode(FrameType.HELLO)
    with closing(RawSender(rig.pair.endpoint, hello)) as peer:
        peer.send_twice(rig, 0, bytes(rig.data[:PIECE_BYTES]))
    go_on(rig)
    assert rig.outcome(AT_ONCE_S) is None
    rig.check_left_nothing()


def test_a_receiver_that_speaks_later_versions_too_is_used(rig: FaultRig) -> None:
    spec = replace(rig.spec, transfer_id=b"e" * 16)
    complete = encode_frame(FrameType.COMPLETE, spec.transfer_id)
    welcome = LATER_TOO.encode(FrameType.WELCOME)
    with closing(RawReceiver(welcome, lambda data: complete if data else b"")) as later:
        rig.proxy.target = later.endpoint
        rig.pair.sender.open(spec, rig.source, rig.pair.listener).ready(0, 1)
        assert rig.pair.listener.wait(spec.transfer_id, AT_ONCE_S) is None
        rig.source.release()
    rig.check_left_nothing()
