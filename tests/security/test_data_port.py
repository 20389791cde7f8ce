"""Attacks on the data plane of real agents with TLS: standing in for a receiver or a sender."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from agent_process import SMALL_LAYOUT, AgentProcess, DrivenEngine
from certificates import make_authority, make_node

from kvmanager.agent.messages import Await, TransferReport
from transport import TlsFiles

NUM_TOKENS = 1000
NBYTES = SMALL_LAYOUT.transfer_bytes(NUM_TOKENS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certs")


@pytest.fixture(scope="module")
def authority(folder: Path) -> Path:
    return make_authority(folder, "ca")


@pytest.fixture
def agents(
    request: pytest.FixtureRequest, tmp_path: Path, folder: Path, authority: Path
) -> Iterator[list[AgentProcess]]:
    """Sender and receiver, with certificates of one authority and the names that are asked for."""
    gateways = [_certificate(folder, authority, f"spiffe://{r}/gateway/g") for r in ("r", "s")]
    with ExitStack() as stack:
        made = []
        for number, uris in enumerate(request.param):
            files = _certificate(folder, authority, *uris)
            settings = {"tls_cert": files.cert, "tls_key": files.key, "tls_ca": files.ca}
            texts = {name: str(path) for name, path in settings.items()}
            agent = AgentProcess(tmp_path / str(number), **texts)
            agent.caller = gateways[uris[0].startswith("spiffe://s/")]
            made.append(stack.enter_context(agent))
        yield made


def _certificate(folder: Path, authority: Path, *uris: str) -> TlsFiles:
    name = "-".join(uris).replace("spiffe://", "").replace("/", "-")
    return make_node(folder, name, authority, uris=uris)


AGENT_A, AGENT_B = ("spiffe://r/agent/a",), ("spiffe://r/agent/b",)
OF_S = ("spiffe://s/agent/x",)


@pytest.mark.parametrize(
    ("agents", "shown"),
    [
        pytest.param((AGENT_A, AGENT_B), "", id="agents of one region"),
        pytest.param((AGENT_A, OF_S), "spiffe://s/agent/x", id="receiver of another region"),
        pytest.param((OF_S, AGENT_B), "spiffe://r/agent/b", id="sender of another region"),
    ],
    indirect=["agents"],
)
def test_kvcache_goes_to_agents_of_the_own_region_only(
    agents: list[AgentProcess], shown: str
) -> None:
    sender, receiver = agents
    content = random.Random(8).randbytes(NBYTES)
    with DrivenEngine(sender) as producer, DrivenEngine(receiver) as consumer:
        landing = receiver.reserve(NUM_TOKENS)
        producer.send(landing, sender.open_outbox(landing, NUM_TOKENS), content)
        report = sender.call("Await", Await(landing.transfer_id, 30.0), TransferReport, 60)
        if not shown:
            assert report.state == "complete", report
            assert consumer.read(landing, NBYTES) == content
            return
        assert report.state == "failed", report
        assert f"the other side shows {shown}" in report.error
        assert (report.sent_bytes, report.acked_bytes) == (0, 0)
        arena = consumer.client.arena
        assert arena is not None
        assert content[:1000] not in bytes(arena.memory)


@pytest.mark.parametrize(
    ("detour", "holder", "is_meant"),
    [
        pytest.param("", "127.0.0.1", True, id="the node that is meant"),
        pytest.param("", "10.9.9.9", False, id="another node's agent at its address"),
        pytest.param("10.9.9.9", "10.9.9.9", True, id="behind a detour"),
        pytest.param("10.9.9.9", "127.0.0.1", False, id="another node's agent behind a detour"),
    ],
)
def test_kvcache_goes_to_the_node_that_is_meant(
    tmp_path: Path, authority: Path, detour: str, holder: str, is_meant: bool
) -> None:
    """A site that can answer at another one's address has a good certificate of its own."""
    uris = [("spiffe://r/agent/a",), ("spiffe://r/agent/b",), ("spiffe://r/gateway/g",)]
    hosts = [("127.0.0.1",), (holder, "127.0.0.2"), ("127.0.0.1",)]
    sending, receiving, gateway = (
        make_node(tmp_path, f"n{number}", authority, uris=uris[number], addresses=hosts[number])
        for number in range(3)
    )
    with ExitStack() as stack:
        # Its control port is at an address of its own, which its certificate names.
        settings = {"control": "127.0.0.2:0", "listen": "127.0.0.1:0"}
        receiver = AgentProcess(tmp_path / "r", **settings, **_files(receiving))
        receiver.caller = gateway
        stack.enter_context(receiver)
        detours = {"detours": {receiver.ready["data"]: detour}} if detour else {}
        sender = AgentProcess(tmp_path / "s", **detours, **_files(sending))
        sender.caller = gateway
        stack.enter_context(sender)
        producer = stack.enter_context(DrivenEngine(sender))
        consumer = stack.enter_context(DrivenEngine(receiver))
        landing = receiver.reserve(NUM_TOKENS)
        outbox = sender.open_outbox(landing, NUM_TOKENS, lease_s=8.0)
        transfer_id = bytes.fromhex(landing.transfer_id)
        producer.write(outbox, bytes(NBYTES))
        producer.client.ready(transfer_id, outbox.attempt, [(0, NBYTES)])
        report = sender.call("Await", Await(landing.transfer_id, 30.0), TransferReport, 60)
        assert (report.state == "complete") is is_meant, report
        if not is_meant:
            assert "mismatch" in report.error
            assert "127.0.0.1" in report.error or "10.9.9.9" in report.error
        assert consumer.client.connected


def _files(files: TlsFiles) -> dict[str, str]:
    return {"tls_cert": str(files.cert), "tls_key": str(files.key), "tls_ca": str(files.ca)}
