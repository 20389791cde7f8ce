"""Deaths, restarts and hostile neighbours of real agent processes, over real sockets."""

import os
import random
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from agent_process import SMALL_LAYOUT, AgentProcess, DrivenEngine, Victim
from eventually import wait_until
from typer.testing import CliRunner

from deploy.cli import app
from kvmanager.agent.engines.protocol import (
    Attach,
    EngineHello,
    FrameDecoder,
    HelloRefused,
    Ready,
    Watch,
    Welcome,
    decode_agent_message,
    encode_frame,
)
from kvmanager.agent.messages import ReserveReply
from transport.rpc import RpcError

NUM_TOKENS = 1000
NBYTES = SMALL_LAYOUT.transfer_bytes(NUM_TOKENS)


@pytest.fixture
def sender(tmp_path: Path) -> Iterator[AgentProcess]:
    with AgentProcess(tmp_path / "s") as agent:
        yield agent


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[AgentProcess]:
    with AgentProcess(tmp_path / "r") as agent:
        yield agent


@pytest.fixture
def producer(sender: AgentProcess) -> Iterator[DrivenEngine]:
    with DrivenEngine(sender) as engine:
        yield engine


@pytest.fixture
def consumer(receiver: AgentProcess) -> Iterator[DrivenEngine]:
    with DrivenEngine(receiver) as engine:
        yield engine


def begin(
    sender: AgentProcess, receiver: AgentProcess, producer: DrivenEngine, consumer: DrivenEngine
) -> tuple[ReserveReply, int]:
    """A transfer of which a part has arrived, and the attempt of its outbox."""
    landing = receiver.reserve(NUM_TOKENS)
    consumer.client.watch(bytes.fromhex(landing.transfer_id))
    outbox = sender.open_outbox(landing, NUM_TOKENS)
    producer.send(landing, outbox, bytes(1000))
    wait_until(lambda: sender.wait(landing.transfer_id, 0.0).acked_bytes == 1000)
    return landing, outbox.attempt


def transfer_works(
    sender: AgentProcess, receiver: AgentProcess, producer: DrivenEngine, consumer: DrivenEngine
) -> None:
    content = random.Random(5).randbytes(NBYTES)
    landing = receiver.reserve(NUM_TOKENS)
    transfer_id = bytes.fromhex(landing.transfer_id)
    consumer.client.watch(transfer_id)
    producer.send(landing, sender.open_outbox(landing, NUM_TOKENS), content)
    assert consumer.next() == ("landed", landing.transfer_id)
    assert consumer.read(landing, NBYTES) == content
    consumer.client.release(transfer_id)
    wait_until(lambda: receiver.status().landing_bytes == 0)


def test_sending_agent_killed(
    sender: AgentProcess, receiver: AgentProcess, producer: DrivenEngine, consumer: DrivenEngine
) -> None:
    landing, _ = begin(sender, receiver, producer, consumer)
    sender.end(signal.SIGKILL)
    assert producer.next() == ("disconnected",)
    assert not producer.client.attach(bytes.fromhex(landing.transfer_id), 1)
    event, transfer_id, _ = consumer.next()
    assert (event, transfer_id) == ("failed", landing.transfer_id)
    wait_until(lambda: receiver.status().landing_bytes == 0)

    (stale,) = sender.arenas()
    assert sender.socket.exists()
    sender.start()
    assert not stale.exists()
    event, epoch = producer.next()
    assert event == "connected"
    assert epoch
    assert len(sender.arenas()) == 1
    transfer_works(sender, receiver, producer, consumer)


def test_receiving_agent_killed(
    sender: AgentProcess, receiver: AgentProcess, producer: DrivenEngine, consumer: DrivenEngine
) -> None:
    landing, _ = begin(sender, receiver, producer, consumer)
    receiver.settings |= {"listen": receiver.ready["data"]}
    receiver.end(signal.SIGKILL)
    assert consumer.next() == ("disconnected",)
    receiver.start()
    event, transfer_id, _ = producer.next()
    assert (event, transfer_id) == ("failed", landing.transfer_id)
    assert sender.wait(landing.transfer_id).state == "failed"
    wait_until(lambda: sender.status().outbox_bytes == 0)
    assert consumer.next()[0] == "connected"
    consumer.client.watch(bytes.fromhex(landing.transfer_id))
    event, _, reason = consumer.next()
    assert event == "failed"
    assert "no such transfer" in reason
    transfer_works(sender, receiver, producer, consumer)


def test_receiving_agent_gone_for_good(
    sender: AgentProcess, receiver: AgentProcess, producer: DrivenEngine, consumer: DrivenEngine
) -> None:
    landing, attempt = begin(sender, receiver, producer, consumer)
    receiver.end(signal.SIGKILL)
    producer.client.ready(bytes.fromhex(landing.transfer_id), attempt, [(0, 5000)])
    assert producer.next(15)[0] == "failed"
    wait_until(lambda: sender.status().outbox_bytes == 0)


def test_stopping_agents_tell_their_peers_at_once(
    sender: AgentProcess, receiver: AgentProcess, producer: DrivenEngine, consumer: DrivenEngine
) -> None:
    begin(sender, receiver, producer, consumer)
    assert sender.end(signal.SIGTERM) == 0
    event, _, reason = consumer.next(1.5)
    assert event == "failed"
    assert "stopping" in reason
    assert sender.arenas() == []
    assert not sender.socket.exists()
    sender.start()
    assert [producer.next()[0] for _ in range(3)] == ["failed", "disconnected", "connected"]

    begin(sender, receiver, producer, consumer)
    assert receiver.end(signal.SIGINT) == 0
    event, _, reason = producer.next(1.5)
    assert event == "failed"
    assert "stopping" in reason
    assert receiver.arenas() == []
    assert not receiver.socket.exists()


def test_engine_killed_while_it_fills(
    sender: AgentProcess, receiver: AgentProcess, consumer: DrivenEngine, producer: DrivenEngine
) -> None:
    landing = receiver.reserve(NUM_TOKENS)
    consumer.client.watch(bytes.fromhex(landing.transfer_id))
    victim = Victim(sender, "fill", landing)
    victim.act(sender.open_outbox(landing, NUM_TOKENS).attempt)
    wait_until(lambda: sender.wait(landing.transfer_id, 0.0).acked_bytes == 1000)
    victim.kill()
    event, _, reason = consumer.next(1.5)
    assert event == "failed"
    assert "its engine is lost" in reason
    assert sender.wait(landing.transfer_id).state == "failed"
    wait_until(lambda: sender.status().outbox_bytes == 0)
    wait_until(lambda: receiver.status().landing_bytes == 0)
    transfer_works(sender, receiver, producer, consumer)


def test_engine_killed_while_it_owns_a_landing(
    sender: AgentProcess, producer: DrivenEngine, tmp_path: Path
) -> None:
    with (
        AgentProcess(tmp_path / "slow", drain_s=600) as receiver,
        DrivenEngine(receiver) as consumer,
    ):
        landing = receiver.reserve(NUM_TOKENS)
        victim = Victim(receiver, "watch", landing)
        outbox = sender.open_outbox(landing, NUM_TOKENS)
        whole = [(0, NBYTES)]
        producer.client.ready(bytes.fromhex(landing.transfer_id), outbox.attempt, whole)
        victim.act()
        assert receiver.status().landing_bytes > 0
        victim.kill()
        wait_until(lambda: receiver.status().landing_bytes == 0, what="process exit is noticed")
        transfer_works(sender, receiver, producer, consumer)


def test_a_crash_is_told_by_whoever_ends_the_agent(tmp_path: Path) -> None:
    agent = AgentProcess(tmp_path).start()
    assert agent.process is not None
    agent.process.kill()
    agent.process.wait(10)
    with pytest.raises(AssertionError, match=r"(?s)by itself with status -9.*agent serves"):
        agent.end()


def test_second_agent_on_the_same_socket_refuses_to_start(
    sender: AgentProcess, producer: DrivenEngine
) -> None:
    second = AgentProcess(sender.directory)
    with pytest.raises(AssertionError, match="another agent serves"):
        second.start()
    assert second.process is not None
    assert second.process.wait(10) == 1
    second.end()
    assert sender.status().engines[0].instance == "engine"
    assert len(sender.arenas()) == 1


@pytest.mark.parametrize(
    ("settings", "status", "words"),
    [
        ({"listen": "0.0.0.0:0"}, 2, "trusted_network"),
        ({"listen": "0.0.0.0:0", "trusted_network": True}, 2, "advertise"),
        ({"arena_gb": 1}, 2, "arena_gb"),
        ({"transport": {"frames": 1}}, 2, "did you mean 'frame_bytes'"),
        ({"transport": {"connect_timeout_s": 0}}, 2, "connect_timeout_s must be between 0.001"),
        ({"transport": {"reconnect_max_s": 0}}, 2, "reconnect_max_s must be between 0.001"),
        ({"transport": {"keepalive_idle_s": 40_000}}, 2, "keepalive_idle_s must be between 0 and"),
        ({"transport": {"keepalive_probes": 200}}, 2, "keepalive_probes must be between 1 and 127"),
        ({"transport": {"idle_timeout_s": 5}}, 2, "set handshake_timeout_s lower"),
        ({"arena_gib": 1 << 40}, 1, "lower arena_gib"),
        ({"tls_cert": "x"}, 2, "belong together"),
        ({"control": "nonsense"}, 2, "host:port"),
    ],
)
def test_impossible_settings_name_the_fix(
    tmp_path: Path, settings: dict[str, object], status: int, words: str
) -> None:
    agent = AgentProcess(tmp_path, **settings)
    result = CliRunner().invoke(app, ["agent", "--config", str(agent.write_settings())])
    assert result.exit_code == status
    assert isinstance(result.exception, SystemExit), result.exception
    assert words in result.output
    assert agent.arenas() == []
    assert not agent.socket.exists()


class RawEngine:
    """Bytes on the unix socket, by hand."""

    def __init__(self, agent: AgentProcess) -> None:
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.settimeout(10)
        self.connection.connect(str(agent.socket))

    def __enter__(self) -> "RawEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def refusal(self, data: bytes) -> str:
        """Send, and read until the agent closes; why it did."""
        self.connection.sendall(data)
        decoder, messages = FrameDecoder(), []
        while received := self.connection.recv(1 << 16):
            messages += map(decode_agent_message, decoder.feed(received))
        assert isinstance(messages[-1], HelloRefused)
        return messages[-1].reason


def hello(instance: str = "raw", **changes: object) -> EngineHello:
    message = EngineHello(instance, "worker", os.getpid(), SMALL_LAYOUT.encode())
    return msgspec.structs.replace(message, **changes)


TID = bytes(16)
OTHER_LAYOUT = msgspec.structs.replace(SMALL_LAYOUT, weights="files:1").encode()


HOSTILE = [
    (b"GET / HTTP/1.1\r\n\r\n", "a frame of"),
    (b"\x00\x00\x00\x00", "a frame of 0"),
    (b"\xff\xff\xff\x7f", "a frame of"),
    (b"\x01\x00\x00\x00\xc1", "bad message"),
    (encode_frame(Welcome("x", "x", 1, 1)), "bad message"),
    (encode_frame(Attach(TID, 1)), "before Hello"),
    (encode_frame(hello()) + encode_frame(hello()), "Hello twice"),
    (encode_frame(hello(version=8)), "the engine speaks version 8, this side speaks 6;"),
    (encode_frame(hello(version=8, oldest_version=7)), "version 7 to 8, this side speaks 6"),
    (encode_frame(hello(version=2, oldest_version=1)), "speaks version 1 to 2, this side speaks 6"),
    (encode_frame(hello(layout=b"")), "layout"),
    (encode_frame(hello(tp_size=2)), "ranks"),
    (encode_frame(hello(tp_rank=1)), "tp_rank 1"),
    (encode_frame(hello(pp_rank=3, pp_size=3)), "pp_rank 3 of pp_size 3"),
    (encode_frame(hello("engine", pp_size=65535)), "65535"),
    (encode_frame(hello("engine", layout=OTHER_LAYOUT)), "instance engine is connected"),
    (encode_frame(hello()) + encode_frame(Ready(b"short", 1, [])), "bad message"),
    (encode_frame(hello()) + encode_frame(Ready(TID, 1, [(-1, 2)])), "bad message"),
    (encode_frame(hello()) + encode_frame(Ready(TID, 1, [(0, 1)] * 9000)), "bad message"),
]


@pytest.mark.parametrize(("data", "words"), HOSTILE, ids=[words for _, words in HOSTILE])
def test_hostile_frames_cost_only_their_connection(
    one_agent: AgentProcess, data: bytes, words: str
) -> None:
    with DrivenEngine(one_agent) as engine, RawEngine(one_agent) as raw:
        assert words in raw.refusal(data)
        engine.client.watch(TID)
        assert engine.next()[0] == "failed", "the other engine is served as before"
    wait_until(lambda: not one_agent.status().engines)


@pytest.fixture(scope="module")
def one_agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentProcess]:
    with AgentProcess(tmp_path_factory.mktemp("one")) as agent:
        yield agent


@pytest.mark.parametrize("versions", [(6, 0), (6, 6), (6, 2), (9, 1)])
def test_an_engine_is_served_in_a_version_that_both_speak(
    one_agent: AgentProcess, versions: tuple[int, int]
) -> None:
    newest, oldest = versions
    with RawEngine(one_agent) as raw:
        raw.connection.sendall(encode_frame(hello(version=newest, oldest_version=oldest)))
        decoder = FrameDecoder()
        while not (payloads := decoder.feed(raw.connection.recv(1 << 16))):
            pass
        welcome = decode_agent_message(payloads[0])
        assert isinstance(welcome, Welcome)
        assert welcome.version == 6


def test_engine_that_does_not_read_is_cut_off(one_agent: AgentProcess) -> None:
    with RawEngine(one_agent) as raw, DrivenEngine(one_agent) as engine:
        raw.connection.sendall(encode_frame(hello()))
        frame = encode_frame(Watch(TID)) * 1000

        def flood() -> None:
            try:
                while True:
                    raw.connection.sendall(frame)
            except OSError:
                return

        thread = threading.Thread(target=flood)
        thread.start()
        thread.join(30)
        assert not thread.is_alive(), "the agent must close it"
        engine.client.watch(TID)
        assert engine.next()[0] == "failed"


def test_silent_connection_is_closed(one_agent: AgentProcess) -> None:
    with RawEngine(one_agent) as raw:
        assert "no Hello" in raw.refusal(b"")


def test_reserve_without_engines_says_so(one_agent: AgentProcess) -> None:
    wait_until(lambda: not one_agent.status().engines)
    with pytest.raises(RpcError, match="0 KV layouts"):
        one_agent.reserve(NUM_TOKENS)
