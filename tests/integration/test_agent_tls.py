"""Agents that speak mutual TLS on both ports, with certificates made by `openssl`."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_process import SMALL_LAYOUT, AgentProcess, DrivenEngine
from certificates import make_authority, make_node
from eventually import wait_until

from transport.rpc import RpcError

NUM_TOKENS = 1000
NBYTES = SMALL_LAYOUT.transfer_bytes(NUM_TOKENS)


def make_files(folder: Path) -> dict[str, str]:
    """A CA of its own and a certificate for 127.0.0.1, as agent settings."""
    folder.mkdir()
    uris = [f"spiffe://r/{role}/x" for role in ("agent", "gateway")]
    files = make_node(folder, "node", make_authority(folder, "ca"), uris=uris)
    return {"tls_cert": str(files.cert), "tls_key": str(files.key), "tls_ca": str(files.ca)}


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    return make_files(tmp_path / "ours")


@pytest.fixture
def agent(tmp_path: Path, files: dict[str, str]) -> Iterator[AgentProcess]:
    with AgentProcess(tmp_path / "agent", **files) as process:
        yield process


def test_transfer_over_tls(agent: AgentProcess, files: dict[str, str], tmp_path: Path) -> None:
    content = random.Random(6).randbytes(NBYTES)
    with (
        AgentProcess(tmp_path / "sender", **files) as sender,
        DrivenEngine(sender) as producer,
        DrivenEngine(agent) as consumer,
    ):
        landing = agent.reserve(NUM_TOKENS)
        consumer.client.watch(bytes.fromhex(landing.transfer_id))
        producer.send(landing, sender.open_outbox(landing, NUM_TOKENS), content)
        assert consumer.next() == ("landed", landing.transfer_id)
        assert consumer.read(landing, NBYTES) == content


@pytest.mark.parametrize("has_tls", [False, True])
def test_strangers_reach_neither_port(agent: AgentProcess, tmp_path: Path, has_tls: bool) -> None:
    settings = make_files(tmp_path / "theirs") if has_tls else {}
    with (
        AgentProcess(tmp_path / "stranger", **settings) as stranger,
        DrivenEngine(stranger),
        DrivenEngine(agent) as consumer,
    ):
        landing = agent.reserve(NUM_TOKENS)
        consumer.client.watch(bytes.fromhex(landing.transfer_id))
        stranger.open_outbox(landing, NUM_TOKENS)
        wait_until(lambda: stranger.wait(landing.transfer_id, 0.0).state == "failed")
        assert agent.wait(landing.transfer_id, 0.0).state == "open"
        ours = stranger.ready["control"]
        stranger.ready["control"] = agent.ready["control"]
        with pytest.raises(RpcError) as caught:
            stranger.status()
        assert caught.value.code == "UNAVAILABLE"
        stranger.ready["control"] = ours


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    missing = {f"tls_{name}": str(tmp_path / name) for name in ("cert", "key", "ca")}
    agent = AgentProcess(tmp_path / "agent", **missing)
    with pytest.raises(AssertionError, match="did not start"):
        agent.start()
    agent.end()
    assert "Traceback" not in agent.log()
    assert str(tmp_path) in agent.log()
