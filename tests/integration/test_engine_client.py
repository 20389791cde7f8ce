"""EngineClient against an in-process agent stand-in on a real unix socket."""

import socket
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, Queue

import pytest
from eventually import wait_until

from kvmanager.agent.engines.client import EngineClient
from kvmanager.agent.engines.protocol import (
    PROTOCOL_VERSION,
    AbortOutbox,
    Attach,
    CacheCancel,
    CacheFind,
    CacheFound,
    CacheFree,
    CacheReserve,
    CacheSlots,
    CacheWritten,
    EngineHello,
    EngineMessage,
    FailureNotice,
    FrameDecoder,
    HelloRefused,
    Landed,
    PrefillEnd,
    Ready,
    Release,
    Watch,
    Welcome,
    decode_engine_message,
    encode_frame,
)
from kvmanager.arena import Arena

TID = bytes(range(16))
HELLO = EngineHello(instance="d0", role="scheduler", pid=1, layout=b"layout", tp_rank=3, tp_size=4)


class Events:
    def __init__(self) -> None:
        self.seen: Queue[tuple[object, ...]] = Queue()
        self.raising = False

    def _note(self, *what: object) -> None:
        self.seen.put(what)
        if self.raising:
            raise RuntimeError("the engine has a bug")

    def on_connected(self, welcome: Welcome, arena: Arena) -> None:
        self._note("connected", arena.epoch)

    def on_disconnected(self) -> None:
        self._note("disconnected")

    def on_agent_gone(self) -> None:
        self._note("gone")

    def on_landed(self, landed: Landed) -> None:
        self._note("landed", landed.transfer_id)

    def on_failed(self, transfer_id: bytes, reason: str, attempt: int) -> None:
        self._note("failed", transfer_id, reason)

    def on_cache_found(self, found: CacheFound) -> None:
        self._note("found", found)

    def on_cache_slots(self, slots: CacheSlots) -> None:
        self._note("slots", slots)

    def next(self, timeout_s: float = 20.0) -> tuple[object, ...]:
        return self.seen.get(timeout=timeout_s)


class StandIn:
    """One listening socket; the test accepts, reads and writes by hand."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "agent.sock"
        self.arena = Arena.create(directory, 4, prefault=False)
        self.listener: socket.socket | None = None
        self.listen()

    def listen(self) -> None:
        self.path.unlink(missing_ok=True)
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(self.path))
        self.listener.listen()
        self.listener.settimeout(5)

    def accept(self) -> "Peer":
        assert self.listener is not None
        connection, _ = self.listener.accept()
        connection.settimeout(5)
        return Peer(connection, self.arena)

    def close(self) -> None:
        if self.listener is not None:
            self.listener.close()
        self.path.unlink(missing_ok=True)
        self.arena.close()


class Peer:
    def __init__(self, connection: socket.socket, arena: Arena) -> None:
        self.connection = connection
        self.arena = arena
        self._decoder = FrameDecoder()
        self._messages: list[EngineMessage] = []

    def read(self) -> EngineMessage:
        while not self._messages:
            data = self.connection.recv(1 << 16)
            assert data, "the client closed"
            self._messages += map(decode_engine_message, self._decoder.feed(data))
        return self._messages.pop(0)

    def welcome(self, *, version: int = PROTOCOL_VERSION) -> EngineHello:
        hello = self.read()
        assert isinstance(hello, EngineHello)
        arena = self.arena
        where = (arena.epoch, str(arena.path), arena.nbytes, arena.block_bytes)
        self.send(Welcome(*where, version=version))
        return hello

    def send(self, *messages: Welcome | HelloRefused | Landed | FailureNotice) -> None:
        self.connection.sendall(b"".join(encode_frame(message) for message in messages))

    def close(self) -> None:
        self.connection.close()


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[StandIn]:
    stand_in = StandIn(tmp_path)
    yield stand_in
    stand_in.close()


@pytest.fixture
def events() -> Events:
    return Events()


@pytest.fixture
def client(agent: StandIn, events: Events) -> Iterator[EngineClient]:
    engine = EngineClient(agent.path, HELLO)
    yield engine
    engine.close()
    assert "prfaas-engine-client" not in {thread.name for thread in threading.enumerate()}


def connect(agent: StandIn, client: EngineClient, events: Events) -> Peer:
    client.start(events)
    peer = agent.accept()
    assert peer.welcome() == HELLO
    assert events.next() == ("connected", agent.arena.epoch)
    return peer


def test_messages_arrive_in_order_and_the_arena_is_shared(
    agent: StandIn, client: EngineClient, events: Events
) -> None:
    peer = connect(agent, client, events)
    assert client.arena is not None
    client.arena.view([(2, 1)], 5).views(0, 5)[0][:] = b"hello"
    assert agent.arena.view([(2, 1)], 5).views(0, 5)[0] == b"hello"
    assert client.attach(TID, 7)
    assert client.ready(TID, 7, [(0, 10), (20, 5)])
    assert client.prefill_end(TID, 7)
    assert client.watch(TID)
    assert client.abort(TID, 7, "no")
    assert client.release(TID)
    assert client.release(TID, 7)
    assert [peer.read() for _ in range(7)] == [
        Attach(TID, 7),
        Ready(TID, 7, [(0, 10), (20, 5)]),
        PrefillEnd(TID, 7, 3),
        Watch(TID),
        AbortOutbox(TID, 7, "no"),
        Release(TID),
        Release(TID, 7),
    ]
    peer.send(Landed(TID, 1, b"", []), FailureNotice(TID, "no"))
    assert events.next() == ("landed", TID)
    assert events.next() == ("failed", TID, "no")
    peer.close()
    assert events.next() == ("disconnected",)
    assert client.arena is None
    assert not client.watch(TID)


def test_a_mapping_is_kept_while_the_agent_lives_on(
    agent: StandIn, client: EngineClient, events: Events, tmp_path: Path
) -> None:
    peer = connect(agent, client, events)
    mapped = client.arena
    peer.close()
    assert events.next() == ("disconnected",)
    peer = connect(agent, client, events)
    assert client.arena is mapped
    peer.close()
    assert events.next() == ("disconnected",)
    agent.arena.close()
    agent.arena = Arena.create(tmp_path, 4, prefault=False)
    connect(agent, client, events).close()
    assert client.arena is not mapped


def test_the_arena_of_an_agent_that_is_gone_is_let_go_once(
    agent: StandIn, client: EngineClient, events: Events
) -> None:
    peer = connect(agent, client, events)
    mapped = weakref.ref(client.arena)
    agent.listener.close()  # type: ignore[union-attr]
    agent.path.unlink()
    peer.close()
    assert events.next() == ("disconnected",)
    assert events.next() == ("gone",)
    wait_until(lambda: mapped() is None)
    agent.listen()
    peer = connect(agent, client, events)
    peer.close()
    assert events.next() == ("disconnected",)
    connect(agent, client, events).close()
    assert events.next() == ("disconnected",)


def test_events_behind_the_welcome_are_not_lost(
    agent: StandIn, client: EngineClient, events: Events
) -> None:
    client.start(events)
    peer = agent.accept()
    peer.read()
    arena = agent.arena
    welcome = Welcome(arena.epoch, str(arena.path), arena.nbytes, arena.block_bytes)
    peer.send(welcome, Landed(TID, 1, b"", []))
    assert events.next()[0] == "connected"
    assert events.next() == ("landed", TID)
    peer.close()


def test_without_an_agent_everything_answers_false_until_one_comes(
    agent: StandIn, client: EngineClient, events: Events
) -> None:
    agent.listener.close()  # type: ignore[union-attr]
    agent.path.unlink()
    client.start(events)
    assert not client.attach(TID, 7)
    assert not client.ready(TID, 7, [(0, 1)])
    with pytest.raises(Empty):
        events.next(timeout_s=0.2)
    agent.listen()
    connect(agent, client, events).close()


def test_restarted_agent_with_a_new_arena_is_found(
    agent: StandIn, client: EngineClient, events: Events
) -> None:
    first = connect(agent, client, events)
    old = client.arena
    assert old is not None
    kept = old.view([(0, 1)], 4).views(0, 4)[0]
    agent.close()
    first.close()
    assert events.next() == ("disconnected",)
    agent.arena = Arena.create(agent.path.parent, 4, prefault=False)
    agent.listen()
    peer = agent.accept()
    peer.welcome()
    assert events.next() == ("connected", agent.arena.epoch)
    assert agent.arena.epoch != old.epoch
    kept[:] = b"late"  # memory of the old epoch stays mapped while it is held, and hurts nobody
    peer.close()


@pytest.mark.parametrize(
    "frame",
    [
        encode_frame(Landed(TID, 1, b"", [])),
        encode_frame(HelloRefused("two layouts")),
        encode_frame(Welcome("x", "/nonexistent/arena", 4096, 4096)),
        b"\xff\xff\xff\xff",
        b"\x01\x00\x00\x00\xc1",
        b"",
    ],
)
def test_bad_greetings_are_retried(
    agent: StandIn, client: EngineClient, events: Events, frame: bytes
) -> None:
    client.start(events)
    bad = agent.accept()
    bad.read()
    bad.connection.sendall(frame)
    bad.close()
    peer = agent.accept()
    peer.welcome()
    assert events.next()[0] == "connected"
    peer.close()


def test_other_version_is_not_connected(
    agent: StandIn, client: EngineClient, events: Events
) -> None:
    client.start(events)
    peer = agent.accept()
    peer.welcome(version=99)
    assert peer.connection.recv(1) == b""
    peer.close()
    with pytest.raises(Empty):
        events.next(timeout_s=0.1)


def test_raising_callbacks_do_not_end_the_client(
    agent: StandIn, client: EngineClient, events: Events
) -> None:
    events.raising = True
    peer = connect(agent, client, events)
    peer.send(Landed(TID, 1, b"", []))
    assert events.next() == ("landed", TID)
    assert client.watch(TID)
    peer.close()
    assert events.next() == ("disconnected",)


def test_stuck_agent_never_blocks_the_caller(
    agent: StandIn, client: EngineClient, events: Events
) -> None:
    peer = connect(agent, client, events)
    ranges = [(i * 2, 1) for i in range(8000)]
    began_s = time.monotonic()
    while client.ready(TID, 7, ranges):
        assert time.monotonic() - began_s < 20
    assert events.next() == ("disconnected",)
    peer.close()
    again = agent.accept()
    again.welcome()
    assert events.next()[0] == "connected"
    assert client.watch(TID)
    assert again.read() == Watch(TID), "nothing of the lost connection may follow"
    again.close()


def test_slow_agent_gets_everything(agent: StandIn, client: EngineClient, events: Events) -> None:
    peer = connect(agent, client, events)
    ranges = [(i << 32, 1) for i in range(8000)]
    for _ in range(20):  # far more than a socket buffer, less than the client's bound
        assert client.ready(TID, 7, ranges)
    for _ in range(20):
        assert peer.read() == Ready(TID, 7, ranges)
    peer.close()


def test_many_ranges_are_split(agent: StandIn, client: EngineClient, events: Events) -> None:
    peer = connect(agent, client, events)
    assert client.ready(TID, 7, ((i * 2, 1) for i in range(8193)))
    parts = [peer.read(), peer.read()]
    assert [len(part.ranges) for part in parts if isinstance(part, Ready)] == [8192, 1]
    peer.close()


def test_callers_mistakes_answer_false(
    agent: StandIn, client: EngineClient, events: Events
) -> None:
    peer = connect(agent, client, events)
    assert not client.attach(b"short", 7)
    assert not client.attach(TID, 0)
    assert not client.release(TID, -1)
    assert not client.ready(TID, 7, [(-1, 5)])
    assert not client.ready(TID, 7, [("a", 5)])  # type: ignore[list-item]
    assert not client.prefill_end(None, 7)  # type: ignore[arg-type]
    assert not client.cache_find(1, [b"short key"])
    assert not client.cache_find(-1, [TID])
    assert not client.cache_reserve(1, [TID], [(0, -1)], parent=TID)
    assert not client.cache_reserve(1, [TID], [(0, 0)], parent=b"short")
    assert not client.cache_written(1, [(0, 256)])
    assert client.release(TID)
    assert peer.read() == Release(TID)
    peer.close()


def test_the_prefix_cache_is_asked_and_answers(
    agent: StandIn, client: EngineClient, events: Events
) -> None:
    peer = connect(agent, client, events)
    other = bytes(16)
    assert client.cache_find(1, [TID, other])
    assert client.cache_free(1)
    assert client.cache_reserve(2, [TID], [(0, 0), (0, 1)], parent=other, first_block=3)
    assert client.cache_written(2, [(0, 1)])
    assert client.cache_written(2, [], is_last=True)
    assert client.cache_cancel(3)
    assert [peer.read() for _ in range(6)] == [
        CacheFind(1, TID + other),
        CacheFree(1),
        CacheReserve(2, other, 3, TID, [(0, 0), (0, 1)]),
        CacheWritten(2, [(0, 1)], tp_rank=3),
        CacheWritten(2, [], True, 3),
        CacheCancel(3),
    ]
    found = CacheFound(1, 1, 2, [(0, 0, [(5, 2)])])
    peer.send(found, CacheSlots(2, []))
    assert events.next() == ("found", found)
    assert events.next() == ("slots", CacheSlots(2, []))
    peer.close()


def test_close_disconnects_and_may_be_called_from_a_callback(
    agent: StandIn, client: EngineClient, events: Events
) -> None:
    peer = connect(agent, client, events)
    events.on_landed = lambda _: client.close()  # type: ignore[method-assign]
    peer.send(Landed(TID, 1, b"", []))
    assert events.next() == ("disconnected",)
    assert peer.connection.recv(1) == b""
    peer.close()
    client.start(events)
    assert not client.connected


@pytest.mark.alone
def test_close_during_the_handshake_is_prompt(
    agent: StandIn, client: EngineClient, events: Events
) -> None:
    client.start(events)
    peer = agent.accept()
    peer.read()
    began_s = time.monotonic()
    client.close()
    assert time.monotonic() - began_s < 1
    peer.close()


def test_sends_from_many_threads_stay_whole_frames(
    agent: StandIn, client: EngineClient, events: Events
) -> None:
    peer = connect(agent, client, events)

    def work() -> None:
        for index in range(200):
            client.ready(TID, 7, [(index, 1)] * 50)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(800):
        message = peer.read()
        assert isinstance(message, Ready)
        assert len(message.ranges) == 50
    for thread in threads:
        thread.join()
    peer.close()
