"""`prfaas doctor link` between two real agents: loopback, an emulated link, a dead end, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_process import AgentProcess
from certificates import make_authority, make_node
from eventually import wait_until
from typer.testing import CliRunner

from deploy.cli import app
from deploy.lab.emulator import RelayProcess
from kvmanager.agent.probe_messages import (
    ProbeEnd,
    ProbeEndReply,
    ProbeLanding,
    ProbeLandingReply,
    ProbeSend,
    ProbeSendReply,
    ProbeStatus,
    ProbeStatusReply,
)
from transport.rpc import RpcError

pytestmark = pytest.mark.slow

GIB = 1 << 30
RING_MIB = 32
ENDS = ("cancelled", "failed")


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[AgentProcess, AgentProcess]]:
    with (
        AgentProcess(tmp_path_factory.mktemp("a")) as sender,
        AgentProcess(tmp_path_factory.mktemp("b")) as receiver,
    ):
        yield sender, receiver


def words(sender: AgentProcess, receiver: AgentProcess, *options: str) -> list[str]:
    """What is typed behind `prfaas`."""
    return ["doctor", "link", sender.ready["control"], receiver.ready["control"], *options]


def command(sender: AgentProcess, receiver: AgentProcess, *options: str) -> list[str]:
    """The same as a process of its own, which a test may interrupt or outlive."""
    return [sys.executable, "-m", "deploy.cli", *words(sender, receiver, *options)]


def doctor(
    sender: AgentProcess, receiver: AgentProcess, *options: str
) -> tuple[int, dict[str, Any], str]:
    """(exit status, JSON, stderr)."""
    done = CliRunner().invoke(app, words(sender, receiver, "--json", *options))
    assert done.stdout, done.stderr
    return done.exit_code, json.loads(done.stdout), done.stderr


def begin(sender: AgentProcess, receiver: AgentProcess, *, lease_s: float, via: str) -> str:
    """A probe without the command; its id."""
    landing = receiver.call("ProbeLanding", ProbeLanding(8 * GIB, lease_s), ProbeLandingReply)
    host, _, port = via.rpartition(":")
    request = ProbeSend(
        transfer_id=landing.transfer_id,
        token=landing.token,
        fingerprint=landing.fingerprint,
        nbytes=8 * GIB,
        host=host,
        port=int(port),
        lease_s=lease_s,
    )
    sender.call("ProbeSend", request, ProbeSendReply)
    return landing.transfer_id


def look(
    agent: AgentProcess, transfer_id: str, role: Any = "send", lease_s: float = 0.1
) -> ProbeStatusReply:
    request = ProbeStatus(transfer_id, role, lease_s)
    return agent.call("ProbeStatus", request, ProbeStatusReply)


def anonymous_mib(agent: AgentProcess) -> float:
    """Anonymous memory that is resident, MiB."""
    assert agent.process is not None
    for line in Path(f"/proc/{agent.process.pid}/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no RssAnon")


def test_loopback(agents: tuple[AgentProcess, AgentProcess]) -> None:
    status, found, errors = doctor(*agents, "--seconds", "1", "--rate-gbps", "0.001")
    assert status == 0, (found, errors)
    assert found["healthy"] is True
    assert found["endpoint"] == agents[1].ready["data"]
    assert found["achieved_bytes_per_s"] > 10e6
    assert found["expected_bytes_per_s"] == pytest.approx(1e6 / 8)
    assert found["limiting_stage"] in (
        *("sender CPU", "receiver CPU", "send window"),
        *("receive window", "link", "receiver's memory"),
    )
    measured = found["measured"]
    assert measured["path"]["congestion"] == ["reno"]
    assert measured["path"]["rtt_s"] > 0
    assert measured["path"]["send_buffer_bytes"] > 0
    assert 0 < measured["sender"]["agent_cpus"] <= (os.cpu_count() or 1)
    assert measured["sender_kernel"]["tcp_wmem_bytes"] > 0
    assert 1 <= measured["width"] <= measured["max_connections"]


def test_an_emulated_link(agents: tuple[AgentProcess, AgentProcess]) -> None:
    sender, receiver = agents
    with RelayProcess(receiver.ready["data"], rate="100Mbit", rtt="10ms") as link:
        via = f"{link.host}:{link.port}"
        # What the relay and buffers take in at once counts less in two seconds than in one.
        options = ("--via", via, "--seconds", "2", "--rate-gbps")
        status, found, _ = doctor(sender, receiver, *options, "1")
        assert found["endpoint"] == via
        assert 9e6 < found["achieved_bytes_per_s"] < 14e6
        assert status == 1
        assert any(item["mends"] for item in found["findings"])
        # Half of what the link carries: a busy machine moves less than all of it.
        status, found, _ = doctor(sender, receiver, *options, "0.05")
        assert (status, found["healthy"]) == (0, True), found


def test_tables_and_the_cap(agents: tuple[AgentProcess, AgentProcess]) -> None:
    done = CliRunner().invoke(app, words(*agents, "--seconds", "1"))
    assert done.exit_code in (0, 1)
    for told in ("congestion control", "net.ipv4.tcp_wmem max", "achieved", "the limit is the"):
        assert told in done.stdout
    status, found, errors = doctor(*agents, "--mib", "1")
    assert (status, found["healthy"]) == (1, False)
    assert "larger --mib" in found["error"]
    assert "cannot measure" in errors


def tls_directory(folder: Path) -> Path:
    """tls.crt, tls.key and ca.crt of a node at 127.0.0.1."""
    folder.mkdir()
    uris = [f"spiffe://r/{role}/x" for role in ("agent", "operator")]
    files = make_node(folder, "tls", make_authority(folder, "ca"), uris=uris)
    files.cert.rename(folder / "tls.crt")  # the key has its name already
    files.ca.rename(folder / "ca.crt")
    return folder


def test_tls(tmp_path: Path) -> None:
    files = tls_directory(tmp_path / "tls")
    with (
        AgentProcess(tmp_path / "a", tls_dir=str(files)) as sender,
        AgentProcess(tmp_path / "b", tls_dir=str(files)) as receiver,
    ):
        options = ("--seconds", "1", "--rate-gbps", "0.001", "--tls-dir", str(files))
        status, found, _ = doctor(sender, receiver, *options)
        assert (status, found["healthy"]) == (0, True), found
        status, found, _ = doctor(sender, receiver)
        assert status == 1
        assert "--tls-dir" in found["error"]


def test_nobody_at_home(agents: tuple[AgentProcess, AgentProcess], tmp_path: Path) -> None:
    sender, receiver = agents
    with AgentProcess(tmp_path / "dead") as dead:
        dead.end(signal.SIGKILL)
        for pair in ((sender, dead), (dead, receiver)):
            status, found, errors = doctor(*pair)
            assert status == 1
            assert dead.ready["control"] in found["error"]
            assert "does not answer" in errors


def test_no_way_to_the_data_port(agents: tuple[AgentProcess, AgentProcess]) -> None:
    sender, receiver = agents
    with RelayProcess(receiver.ready["data"]) as link:
        link.cut()
        status, found, _ = doctor(sender, receiver, "--via", f"{link.host}:{link.port}")
    assert status == 1
    # The transport of agents in tests gives up before the doctor does.
    assert "unreachable" in found["error"]


def test_a_receiver_that_dies_meanwhile(
    agents: tuple[AgentProcess, AgentProcess], tmp_path: Path
) -> None:
    with AgentProcess(tmp_path / "mortal") as mortal:
        process = subprocess.Popen(
            command(agents[0], mortal, "--json"), stdout=subprocess.PIPE, text=True
        )
        wait_until(lambda: mortal.status().num_received_connections > 0)
        mortal.end(signal.SIGKILL)
        output, _ = process.communicate(timeout=30)
        assert process.returncode == 1
        assert "error" in json.loads(output)


def test_ctrl_c_ends_both_ends(agents: tuple[AgentProcess, AgentProcess]) -> None:
    sender, receiver = agents
    with RelayProcess(receiver.ready["data"], rate="50Mbit") as link:
        process = subprocess.Popen(
            command(sender, receiver, "--via", f"{link.host}:{link.port}", "--seconds", "60"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        wait_until(lambda: link.report().forward.out_bytes > 1_000_000)
        process.send_signal(signal.SIGINT)
        # Less than the probe would take.
        _, errors = process.communicate(timeout=50)
        assert process.returncode == 128 + signal.SIGINT
        assert "stopped" in errors
        wait_until(lambda: not link.report().forward.held_bytes)
        passed = link.report().forward.in_bytes
        time.sleep(0.5)
        assert link.report().forward.in_bytes - passed < 100_000


def test_a_caller_that_vanishes_leaves_no_memory(tmp_path: Path) -> None:
    # Agents of its own: probes of other tests may still be on their way out of shared ones.
    with AgentProcess(tmp_path / "a") as sender, AgentProcess(tmp_path / "b") as receiver:
        before = [anonymous_mib(agent) for agent in (sender, receiver)]
        with RelayProcess(receiver.ready["data"], rate="400Mbit") as link:
            transfer_id = begin(sender, receiver, lease_s=2.0, via=f"{link.host}:{link.port}")
            wait_until(lambda: look(sender, transfer_id).done_bytes > RING_MIB << 20)
            during_mib = anonymous_mib(sender)
            # A look would prolong the lease, so that memory shows its end.
            wait_until(lambda: anonymous_mib(sender) < (before[0] + during_mib) / 2)
            # Whichever lease ends first ends both.
            for agent, role in ((sender, "send"), (receiver, "landing")):
                wait_until(lambda a=agent, r=role: look(a, transfer_id, r).state in ENDS)
        assert during_mib - before[0] > RING_MIB / 2
        for agent, before_mib in zip((sender, receiver), before, strict=True):
            wait_until(lambda a=agent, then=before_mib: anonymous_mib(a) - then < RING_MIB / 2)
            assert agent.status().free_bytes == agent.status().arena_bytes


def test_limits_and_ends(agents: tuple[AgentProcess, AgentProcess]) -> None:
    sender, receiver = agents
    with pytest.raises(RpcError) as refused:
        receiver.call("ProbeLanding", ProbeLanding(9 * GIB, 5.0), ProbeLandingReply)
    assert refused.value.code == "INVALID"
    landings = [
        receiver.call("ProbeLanding", ProbeLanding(GIB, 5.0), ProbeLandingReply) for _ in range(2)
    ]
    with pytest.raises(RpcError) as refused:
        receiver.call("ProbeLanding", ProbeLanding(GIB, 5.0), ProbeLandingReply)
    assert refused.value.code == "NO_ROOM"
    for landing in landings:
        ended = receiver.call("ProbeEnd", ProbeEnd(landing.transfer_id), ProbeEndReply)
        assert ended.ended
    with pytest.raises(RpcError) as refused:
        look(sender, landings[0].transfer_id)
    assert refused.value.code == "NOT_FOUND"
    # What is sent to a landing that has ended is refused.
    landing = landings[0]
    request = ProbeSend(
        transfer_id=landing.transfer_id,
        token=landing.token,
        fingerprint=landing.fingerprint,
        nbytes=GIB,
        host=landing.host,
        port=landing.port,
        lease_s=5.0,
    )
    sender.call("ProbeSend", request, ProbeSendReply)
    wait_until(lambda: look(sender, landing.transfer_id).state == "failed")
    assert "no landing" in look(sender, landing.transfer_id).error
