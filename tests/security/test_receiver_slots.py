"""Attacks on the places of an agent's data port: everybody may connect, without any key.

The attacker has 512 connections at a time, as many as a receiver serves, and opens each again when
it is cut, mostly from the address of the true sender.
"""

from __future__ import annotations

import random
import re
import socket
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import psutil
import pytest
from agent_process import SMALL_LAYOUT, DrivenEngine
from attacked_agents import AttackedRegion, Way
from connection_flood import ConnectionFlood
from eventually import wait_until
from hostile import own_greeting
from transport_doubles import MemorySpace, make_spec
from transport_loopback import LoopbackPair

from kvmanager.agent.messages import Await, TransferReport
from transport import Endpoint, TransportConfig
from transport.receiving.connection import NO_PLACE
from transport.receiving.receiver import REPORT_S
from transport.wire.frames import encode_open

NUM_CONNECTIONS = 512
NUM_TOKENS = 1000
NBYTES = SMALL_LAYOUT.transfer_bytes(NUM_TOKENS)
REFUSED = encode_open(b"?" * 16, token=bytes(32), fingerprint=bytes(32), nbytes=1)
SPARE = 16
"""Descriptors and threads that an agent may open for other reasons."""
# The machine may be slow: a transfer may wait longer for its next byte than users want it to.
PATIENT = {"transport": {"idle_timeout_s": 100.0}, "arena_gib": 8 / 1024}


class Agents:
    """A sender and the receiver that is attacked, with an engine each."""

    def __init__(self, folder: Path, way: Way, stack: ExitStack) -> None:
        region = AttackedRegion(folder, way)
        self.receiver, self.sender = (
            stack.enter_context(region.agent(name, grants=False, **PATIENT))
            for name in ("receiver", "sender")
        )
        self._consumer, self._producer = (
            stack.enter_context(DrivenEngine(agent)) for agent in (self.receiver, self.sender)
        )

    @property
    def address(self) -> Endpoint:
        return Endpoint.parse(self.receiver.ready["data"])

    def assert_transfer_works(self, seed: int) -> None:
        content = random.Random(seed).randbytes(NBYTES)
        landing = self.receiver.reserve(NUM_TOKENS, lease_s=200.0)
        outbox = self.sender.open_outbox(landing, NUM_TOKENS, lease_s=200.0)
        self._producer.send(landing, outbox, content)
        report = self.sender.call("Await", Await(landing.transfer_id, 100.0), TransferReport, 110)
        assert report.state == "complete", report
        assert self._consumer.read(landing, NBYTES) == content
        for agent in (self.receiver, self.sender):
            agent.cancel_all()


@pytest.fixture
def agents(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Agents]:
    with ExitStack() as stack:
        yield Agents(tmp_path, request.param, stack)


@pytest.mark.alone
@pytest.mark.parametrize(
    ("agents", "words", "repeats", "source"),
    [
        pytest.param("tls", b"", b"", "127.0.0.1", id="silent, TLS"),
        pytest.param("tls", own_greeting(), b"", "127.0.0.1", id="no TLS where it is asked for"),
        pytest.param("nothing", b"", b"", "127.0.0.1", id="silent"),
        pytest.param("nothing", own_greeting(), b"", "127.0.0.1", id="greeting"),
        pytest.param("nothing", own_greeting(), b"", "127.0.0.9", id="from another address"),
        pytest.param("nothing", own_greeting(), REFUSED, "127.0.0.1", id="refused OPENs"),
    ],
    indirect=["agents"],
)
def test_a_flood_of_connections_keeps_no_sender_out(
    agents: Agents, words: bytes, repeats: bytes, source: str
) -> None:
    flood = ConnectionFlood(
        agents.address, NUM_CONNECTIONS, words=words, repeats=repeats, source=source
    )
    with flood:
        wait_until(lambda: flood.is_up)
        # The first transfer has to make its connections now, the second one finds them.
        for seed in range(2):
            before = flood.num_opened
            agents.assert_transfer_works(seed)
            wait_until(lambda before=before: flood.num_opened > before, what="the flood goes on")


@pytest.mark.alone
def test_a_flood_of_connections_is_bounded_counted_and_logged_in_one_line(tmp_path: Path) -> None:
    region = AttackedRegion(tmp_path, "nothing")
    with region.agent("receiver", grants=False, metrics_port=0) as agent:
        assert agent.process is not None
        process, began_s = psutil.Process(agent.process.pid), time.monotonic()
        most_fds = process.num_fds() + NUM_CONNECTIONS + SPARE
        most_threads = process.num_threads() + NUM_CONNECTIONS + SPARE
        with ConnectionFlood(Endpoint.parse(agent.ready["data"]), NUM_CONNECTIONS) as flood:
            while agent.status().num_turned_away < 2 * NUM_CONNECTIONS:
                assert process.num_fds() <= most_fds
                assert process.num_threads() <= most_threads
                assert agent.status().num_received_connections <= NUM_CONNECTIONS
                assert time.monotonic() - began_s < 100
            assert flood.is_up
        said = "too many connections: turned away"
        wait_until(lambda: said in agent.log())
        num_lines = agent.log().count(said)
        assert 1 <= num_lines <= 1 + (time.monotonic() - began_s) / REPORT_S
        assert NO_PLACE not in agent.log()  # no line for each connection
        with urllib.request.urlopen(f"http://{agent.ready['metrics']}/metrics") as page:
            metrics = page.read().decode()
        counted = re.search(r"^prfaas_agent_turned_away_connections_total (\S+)", metrics, re.M)
        assert counted is not None
        assert float(counted[1]) >= 2 * NUM_CONNECTIONS
        wait_until(lambda: agent.status().num_received_connections == 0, what="none is left")


def test_refused_opens_keep_no_connection_alive() -> None:
    """Each of them is answered, and at its time the connection ends all the same."""
    config = TransportConfig(link_idle_timeout_s=0.5)
    with closing(LoopbackPair(config)) as pair:
        address = (pair.endpoint.host, pair.endpoint.port)
        with socket.create_connection(address, 60) as sock:
            sock.sendall(own_greeting() + REFUSED)
            num_refused, deadline_s = 0, time.monotonic() + 60
            with suppress(ConnectionError):
                while heard := sock.recv(65536):
                    num_refused += heard.count(b"unknown_transfer")
                    assert time.monotonic() < deadline_s, "it lives on"
                    sock.sendall(REFUSED)
            assert num_refused
        wait_until(lambda: pair.receiver.num_connections == 0)


class KnownAttacker:
    """Somebody who was let in once: one accepted transfer, and as many connections as there are."""

    def __init__(self, pair: LoopbackPair, number: int) -> None:
        self.spec = make_spec(number, pair.endpoint)
        pair.registry.expect(self.spec, MemorySpace(bytearray(NBYTES)))
        self.sockets: list[socket.socket] = []
        self._address = (pair.endpoint.host, pair.endpoint.port)

    def connect(self, *, opens: bool) -> None:
        """From an address that is not the honest sender's."""
        sock = socket.create_connection(self._address, 10, source_address=("127.0.0.9", 0))
        self.sockets.append(sock)
        fields = {"token": self.spec.token, "fingerprint": self.spec.fingerprint}
        opening = encode_open(self.spec.transfer_id, nbytes=NBYTES, **fields)  # type: ignore[arg-type]
        sock.sendall(own_greeting() + opening * opens)
        assert sock.recv(4096)

    def close(self) -> None:
        for sock in self.sockets:
            sock.close()


@pytest.mark.parametrize("opens", [False, True], ids=["idle", "each with the transfer open"])
def test_an_accepted_transfer_does_not_buy_all_places(opens: bool) -> None:
    config = TransportConfig(num_connections=2, max_link_connections=2, max_connections=16)
    with closing(LoopbackPair(config)) as pair, closing(KnownAttacker(pair, 99)) as attacker:
        attacker.connect(opens=True)
        wait_until(lambda: pair.registry.num_asked > 0)
        for _ in range(15):
            attacker.connect(opens=opens)
        wait_until(lambda: pair.receiver.num_connections == 16)
        if not opens:
            pair.receiver.drop(attacker.spec.transfer_id, "not wanted any more")
        transfer, landed = pair.begin(1, bytearray(b"x" * 1000))
        transfer.ready(0, 1000)
        assert pair.listener.wait(transfer.transfer_id) is None
        assert landed == b"x" * 1000


def test_a_silent_connection_ends_though_its_transfer_ended_elsewhere() -> None:
    config = TransportConfig(link_idle_timeout_s=0.5)
    with closing(LoopbackPair(config)) as pair, closing(KnownAttacker(pair, 1)) as peer:
        peer.connect(opens=True)
        pair.receiver.drop(peer.spec.transfer_id, "not wanted any more")
        (sock,) = peer.sockets
        while sock.recv(4096):
            pass
        wait_until(lambda: pair.receiver.num_connections == 0)
