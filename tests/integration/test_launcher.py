"""A region on this machine with everything real but the engines, which only answer /health."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from certificates import make_region_files
from data_port import is_welcome, tls_context
from dummy_region import ROOT, document, dummy_vllm, spec
from eventually import wait_until
from redis_server import RedisServer
from rich.console import Console
from typer.testing import CliRunner, Result

from deploy.cli import app
from deploy.region.launch import rundir
from deploy.region.launch.launcher import RunningRegion
from deploy.region.launch.rundir import RunDirectoryError, read_state
from deploy.region.launch.running import ProcessProgress, RegionStartFailed
from deploy.region.launch.status import region_status, render_status
from deploy.region.spec.region import RegionSpec
from kvmanager.agent.client import AgentClient
from kvmanager.config_files.problems import FileError
from kvmanager.private_files import write_private
from prfaas.engines.errors import EngineStartFailed
from prfaas.engines.supervision.supervisor import ProcessState
from transport.rpc import RpcError

pytestmark = pytest.mark.slow

__all__ = ["dummy_vllm"]

SLOW_DISK_S = 0.25
"""What a rename on a busy disk was seen to take."""


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture(autouse=True)
def _nothing_left(dummy_vllm: Path) -> Iterator[None]:
    """Whatever a test does, no process of it and no shared memory stays."""
    yield
    own = psutil.Process()
    wait_until(lambda: not own.children(recursive=True))
    assert not list((dummy_vllm / "arenas").iterdir())


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def fetch(url: str) -> Any:
    def read() -> Any:
        with urllib.request.urlopen(url, timeout=5.0) as response:
            return json.loads(response.read())

    return await asyncio.to_thread(read)


def open_to_others(run_dir: Path) -> list[Path]:
    """The files that other users may use. Sockets are kept from them by their directory."""
    written = [path for path in run_dir.rglob("*") if path.parent.name != "sockets"]
    return [path for path in (run_dir, *written) if path.stat().st_mode & 0o077]


async def test_a_region_starts_is_watched_and_leaves_nothing(
    dummy_vllm: Path, run_dir: Path
) -> None:
    seen: list[ProcessProgress] = []
    region = RunningRegion(spec(dummy_vllm), run_dir, on_progress=seen.append)
    async with region:
        names = [process.name for process in region.processes]
        assert names == [
            "link.prefill-a-to-pd-b.b1",
            "agent.a1",
            "agent.b1",
            "a1-prefill",
            "b1-prefill",
            "b1-decode",
            "gateway",
        ]
        assert {process.state for process in region.processes} == {ProcessState.HEALTHY}
        assert {item.name for item in seen} == set(names)
        pids = [pid for process in region.processes for pid in process.pids]
        # Three dummy engines have a child each.
        assert len(pids) == 10

        models = await fetch(f"{region.gateway_url}/v1/models")
        assert [model["id"] for model in models["data"]] == ["dummy"]
        seen_by_gateway = await fetch(f"{region.gateway_url}/prfaas/region")
        assert seen_by_gateway["links"] == {"prefill-a": "prefill-a-to-pd-b"}
        caches = await fetch(f"{region.gateway_url}/prfaas/cache")
        assert [(node["cluster"], node["node"], node["error"]) for node in caches["nodes"]] == [
            ("pd-b", "b1", ""),
            ("prefill-a", "a1", ""),
        ]
        kept = {path.name for path in (dummy_vllm / "arenas").glob("*.arena")}
        assert {name.rpartition("-")[0] for name in kept} == {
            "prfaas-kept-test-a1",
            "prfaas-kept-test-b1",
        }

        gateway_file = json.loads(region.directory.gateway_file.read_text())
        (endpoints,) = [source["endpoints"] for source in gateway_file["prefill"]]
        node = region.region.pd_clusters[0].nodes[0]
        assert list(endpoints) == [f"127.0.0.1:{node.agent.data_port}"]
        link = region.relay()
        assert link.report().rate_bytes_per_s == pytest.approx(125e6)
        assert link.cut().is_cut
        link.heal()
        with pytest.raises(KeyError, match="nowhere"):
            region.relay("nowhere")

        state = read_state(run_dir)
        assert state is not None
        assert state.phase == "running"
        assert state.launcher_lives()
        assert open_to_others(run_dir) == []

        with pytest.raises(RunDirectoryError, match="already runs"):
            await RunningRegion(spec(dummy_vllm), run_dir).start()
    assert read_state(run_dir) is None
    assert not [pid for pid in pids if lives(pid)]
    # What the gateway has learnt is for the next run.
    assert sorted(os.listdir(run_dir)) == ["gateway.learned", "logs", "prfaas.lock"]


async def test_two_gateways_on_one_machine_work_together(
    dummy_vllm: Path, run_dir: Path, tmp_path: Path
) -> None:
    with RedisServer(tmp_path) as server:
        gateway = {"port": 0, "nodes": ["a1", "b1"], "shared": {"redis": server.url}}
        async with RunningRegion(spec(dummy_vllm, gateway=gateway), run_dir) as region:
            names = [process.name for process in region.processes if process.kind == "gateway"]
            assert names == ["gateway.a1", "gateway.b1"]
            fronts = [process.name for process in region.processes if process.kind == "front"]
            assert fronts == ["front.prefill-a", "front.pd-b"]
            assert len(set(region.gateway_urls.values())) == 2

            async def seen(name: str) -> dict[str, Any]:
                page: dict[str, Any] = await fetch(f"{region.gateway_urls[name]}/prfaas/gateways")
                return page

            async def leader(among: list[str]) -> str:
                async with asyncio.timeout(120):
                    while True:
                        for name in among:
                            if (await seen(name))["leads"]:
                                return name
                        await asyncio.sleep(0.1)

            first = await leader(names)
            (other,) = set(names) - {first}
            token = (await seen(first))["token"]
            state = read_state(run_dir)
            assert state is not None
            shown = Console(width=200, file=io.StringIO())
            # As the command does, on a loop of its own: looking at processes takes time.
            status = await asyncio.to_thread(lambda: asyncio.run(region_status(state)))
            shown.print(render_status(status))
            assert isinstance(shown.file, io.StringIO)
            text = shown.file.getvalue()
            assert f"{first} has shared with others" in text
            assert "it leads" in text
            # Frozen, as a host that swaps: its lease ends, and it hears of that when it wakes.
            region.process(first).suspend()
            assert await leader([other]) == other
            assert (await seen(other))["token"] > token
            region.process(first).resume()
            assert (await seen(first))["leads"] is False
            order = {"instance": "b1-decode", "role": "prefill"}
            url = f"{region.gateway_urls[first]}/v1/pd_role"
            async with aiohttp.ClientSession() as session:
                async with session.post(url, json=order) as response:
                    assert response.status == 409
                    assert (await response.json())["error"]["code"] == "not_leader"
            # Killed: the other one is not touched, and the first comes back.
            await region.process(other).kill(restart=False)
            assert await leader([first]) == first
    left = set(os.listdir(run_dir))
    assert {f"{first}.learned", "logs"} <= left


async def test_a_gateway_of_two_processes(dummy_vllm: Path, run_dir: Path, tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        gateway = {"port": 0, "processes": 2, "shared": {"redis": server.url}}
        async with RunningRegion(spec(dummy_vllm, gateway=gateway), run_dir) as region:
            fronts = [process.name for process in region.processes if process.kind == "front"]
            assert fronts == ["front.prefill-a", "front.pd-b"]
            state = read_state(run_dir)
            assert state is not None
            serving = re.compile(r"process [01] \(pid \d+\): serving for")
            async with asyncio.timeout(60):
                text = ""
                # The region serves with the first of them.
                while len(serving.findall(text)) < 2:
                    # As the command does, on a loop of its own: looking at processes takes time.
                    status = await asyncio.to_thread(lambda: asyncio.run(region_status(state)))
                    shown = Console(width=200, file=io.StringIO())
                    shown.print(render_status(status))
                    assert isinstance(shown.file, io.StringIO)
                    text = shown.file.getvalue()
            pids = region.gateway.pids
            assert len(pids) == 3  # and their parent
        assert not [pid for pid in pids if lives(pid)]
    # What each process has learnt is for the next run.
    assert {"gateway.learned", "gateway.learned.1", "logs"} <= set(os.listdir(run_dir))


async def test_what_crosses_the_link_of_a_region_with_tls_is_encrypted(
    dummy_vllm: Path, run_dir: Path, tmp_path: Path
) -> None:
    files = make_region_files(tmp_path, "test", "127.0.0.1")
    names = {"cert": str(files.cert), "key": str(files.key), "ca": str(files.ca)}
    wanted = spec(dummy_vllm, security={"tls": names})
    async with RunningRegion(wanted, run_dir) as region:
        state = read_state(run_dir)
        assert state is not None
        status = await region_status(state)
        assert [agent.engines[0].instance for agent in status.agents.values()] == [
            "a1-prefill",
            "b1-decode",
        ]
        caches = await fetch(f"{region.gateway_url}/prfaas/cache")
        assert [(node["node"], node["error"]) for node in caches["nodes"]] == [
            ("b1", ""),
            ("a1", ""),
        ]
        # Without the region's certificates its agents say nothing on either port.
        without, ours = (tls_context(files, with_certificate=shows) for shows in (False, True))
        link = region.process("link.prefill-a-to-pd-b.b1").address
        for address in (status.agents["b1"].data_endpoint, link):
            assert not await asyncio.to_thread(is_welcome, address, None)
            assert not await asyncio.to_thread(is_welcome, address, without)
            assert await asyncio.to_thread(is_welcome, address, ours)
        stranger = AgentClient(state.agents["b1"])
        with pytest.raises(RpcError) as refused:
            await stranger.status(5.0)
        assert refused.value.code == "UNAVAILABLE"
        await stranger.close()
        assert all(agent.is_encrypted for agent in status.agents.values())
        # Hence what the sending agent gets across was encrypted.
        sent_bytes = await probed_bytes("a1", "b1", run_dir)
        assert sent_bytes > 0
        assert region.relay().report().forward.out_bytes > sent_bytes


async def probed_bytes(sender: str, receiver: str, run_dir: Path) -> int:
    """How much `prfaas doctor link` moved from one agent's memory to the other's."""
    argv = [sys.executable, "-m", "deploy.cli", "doctor", "link", sender, receiver]
    argv += ["--run-dir", str(run_dir), "--seconds", "3", "--json"]
    doctor = await asyncio.create_subprocess_exec(*argv, cwd=ROOT, stdout=subprocess.PIPE)
    found, _ = await asyncio.wait_for(doctor.communicate(), 60.0)
    return int(json.loads(found)["measured"]["nbytes"])


async def test_processes_can_be_killed_frozen_and_come_back(
    dummy_vllm: Path, run_dir: Path
) -> None:
    async with RunningRegion(spec(dummy_vllm), run_dir) as region:
        engine = region.engine("b1-decode")
        pids = engine.pids
        assert len(pids) == 2
        await engine.kill()
        assert not [pid for pid in pids if lives(pid)]
        await engine.wait_restarted(60.0)
        assert engine.num_restarts == 1
        assert not set(pids) & set(engine.pids)

        agent = region.agent("a1")
        await agent.kill(restart=False)
        assert agent.state is ProcessState.STOPPED
        assert agent.pids == []
        with pytest.raises(EngineStartFailed):
            await agent.wait_restarted(0.1)
        agent.start()
        await agent.wait_restarted(60.0)

        engine.suspend()
        frozen = psutil.Process(engine.pids[0])
        wait_until(lambda: frozen.status() == psutil.STATUS_STOPPED)
        engine.resume()
        await region.gateway.stop()
        assert region.gateway.pid is None


async def test_a_slow_disk_holds_up_no_event_loop(
    dummy_vllm: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing: set[int] = set()

    def slow_disk(path: Path, data: bytes) -> None:
        writing.add(threading.get_ident())
        time.sleep(SLOW_DISK_S)
        write_private(path, data)

    monkeypatch.setattr(rundir, "write_private", slow_disk)
    async with RunningRegion(spec(dummy_vllm), run_dir) as region:
        # Whoever waits for the region to run may then read its state.
        state = read_state(run_dir)
        assert state is not None
        assert state.phase == "running"
        assert {process.state for process in state.processes} == {ProcessState.HEALTHY}
        engine = region.engine("b1-decode")
        await engine.kill()
        await engine.wait_restarted(60.0)

        def num_restarts() -> int:
            state = read_state(run_dir)
            assert state is not None
            return next(p.num_restarts for p in state.processes if p.name == engine.name)

        await asyncio.to_thread(wait_until, lambda: num_restarts() == 1)
    assert writing
    assert threading.get_ident() not in writing
    assert read_state(run_dir) is None
    assert sorted(os.listdir(run_dir)) == ["gateway.learned", "logs", "prfaas.lock"]


async def test_a_full_disk_stops_no_region(
    dummy_vllm: Path,
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full_disk(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def fill(progress: ProcessProgress) -> None:
        monkeypatch.setattr(rundir, "write_private", full_disk)

    async with RunningRegion(spec(dummy_vllm), run_dir, on_progress=fill) as region:
        assert {process.state for process in region.processes} == {ProcessState.HEALTHY}
    assert "the state file could not be written: [Errno 28]" in caplog.text


async def test_an_engine_that_fails_to_start_is_shown_and_all_is_stopped(
    dummy_vllm: Path, run_dir: Path
) -> None:
    wrong = document(dummy_vllm)
    wrong["clusters"][1]["nodes"][0]["instances"][1]["env"] = {"DUMMY_FAILS": "1"}
    region = RunningRegion(RegionSpec.model_validate(wrong), run_dir)
    with pytest.raises(RegionStartFailed, match="no such model: nonsense"):
        await region.start()
    assert read_state(run_dir) is None
    assert "nonsense" in (run_dir / "logs" / "b1-decode.log").read_text()


async def test_taken_ports_are_reported_before_anything_starts(
    dummy_vllm: Path, run_dir: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        region = RunningRegion(spec(dummy_vllm, gateway={"port": port}), run_dir)
        with pytest.raises(FileError, match=rf"gateway.port: port {port} is in use by") as caught:
            await region.start()
    assert f"pid {os.getpid()}" in str(caught.value)
    assert read_state(run_dir) is None


async def test_a_host_elsewhere_is_refused(dummy_vllm: Path, run_dir: Path) -> None:
    wrong = document(dummy_vllm)
    wrong["clusters"][0]["nodes"][0]["host"] = "192.0.2.1"
    with pytest.raises(FileError, match=r"cannot listen on 192\.0\.2\.1"):
        await RunningRegion(RegionSpec.model_validate(wrong), run_dir).start()


async def test_cancelling_a_start_stops_everything(dummy_vllm: Path, run_dir: Path) -> None:
    engines_start = asyncio.Event()

    def on_progress(progress: ProcessProgress) -> None:
        if progress.kind == "engine":
            engines_start.set()

    region = RunningRegion(spec(dummy_vllm), run_dir, on_progress=on_progress)
    starting = asyncio.create_task(region.start())
    await asyncio.wait_for(engines_start.wait(), 20.0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert read_state(run_dir) is None


class TestCommandLine:
    """`prfaas up`, `status` and `down` as a user runs them."""

    @pytest.fixture
    def file(self, dummy_vllm: Path, tmp_path: Path) -> Path:
        path = tmp_path / "region.yaml"
        path.write_text(json.dumps(document(dummy_vllm)))
        return path

    @pytest.fixture(autouse=True)
    def _started(self) -> Iterator[None]:
        self.started: list[subprocess.Popen[str]] = []
        yield
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.communicate()

    def told(self, *words: str) -> Result:
        """A command that ends by itself, in this process."""
        return CliRunner().invoke(app, words)

    def prfaas(self, *words: str) -> subprocess.Popen[str]:
        """A command that runs until it is stopped."""
        process = subprocess.Popen(
            [sys.executable, "-m", "deploy.cli", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self.started.append(process)
        return process

    def finish(self, process: subprocess.Popen[str]) -> tuple[str, str]:
        return process.communicate(timeout=30.0)

    def ready(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdout is not None
        for line in process.stdout:
            event: dict[str, Any] = json.loads(line)
            if event["event"] == "ready":
                return event
        pytest.fail(f"it ended: {self.finish(process)[1]}")

    def test_up_status_down(self, file: Path, run_dir: Path) -> None:
        up = self.prfaas("up", str(file), "--run-dir", str(run_dir), "--json")
        ready = self.ready(up)
        assert ready["pid"] == up.pid

        shown = self.told("status", "--run-dir", str(run_dir), "--json")
        status = json.loads(shown.stdout)
        assert shown.exit_code == 0
        assert status["state"]["gateway_url"] == ready["gateway"]
        assert set(status["agents"]) == {"a1", "b1"}
        assert status["agents"]["b1"]["landing_bytes"] == 0
        assert status["links"]["link.prefill-a-to-pd-b.b1"]["rtt_s"] == 0.02
        assert "b1-decode" in self.told("status", "--run-dir", str(run_dir)).stdout

        down = self.told("down", "--run-dir", str(run_dir))
        assert (down.stdout, down.stderr) == ("region test is down\n", "")
        assert up.wait(10.0) == 0
        self.finish(up)
        nothing = self.told("status", "--run-dir", str(run_dir))
        assert "no region runs" in nothing.stderr
        assert nothing.exit_code == 1

    def test_the_user_of_a_region_with_keys_needs_none(
        self, dummy_vllm: Path, run_dir: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "keys").write_text("ops one\nacme two\n")
        gateway = {
            "port": 0,
            "admin": "127.0.0.1:0",
            "api_keys_file": str(tmp_path / "keys"),
            "operators": ["ops"],
        }
        file = tmp_path / "keyed.json"
        file.write_text(json.dumps(document(dummy_vllm, gateway=gateway)))
        up = self.prfaas("up", str(file), "--run-dir", str(run_dir), "--json")
        url = self.ready(up)["gateway"]
        at_run = ("--run-dir", str(run_dir))
        state = json.loads(self.told("status", *at_run, "--json").stdout)
        assert state["plan"] is not None
        assert state["state"]["gateway_url"] == url != state["state"]["admin_url"]
        roles = self.told("role", "ls", *at_run, "--json")
        assert {item["instance"] for item in json.loads(roles.stdout)["instances"]} == {
            "b1-prefill",
            "b1-decode",
        }
        assert {path.name for path in run_dir.glob("*.key")} >= {"operator.key", "engine.key"}
        assert not open_to_others(run_dir)
        admin = state["state"]["admin_url"]
        assert "Send an API key" in self.told("role", "ls", "--gateway", admin).stderr
        tenant = self.told("role", "ls", "--gateway", admin, "--api-key", "two")
        assert "not an operator's" in tenant.stderr
        self.told("down", *at_run)
        assert up.wait(10.0) == 0
        self.finish(up)
        assert not list(run_dir.glob("*.key"))

    def test_rights_of_tenants_change_while_a_region_runs(
        self, dummy_vllm: Path, run_dir: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "keys").write_text("ops one\nacme two\n")
        gateway: dict[str, Any] = {"port": 0, "api_keys_file": str(tmp_path / "keys")}
        file = tmp_path / "keyed.json"
        file.write_text(json.dumps(document(dummy_vllm, gateway=gateway)))
        up = self.prfaas("up", str(file), "--run-dir", str(run_dir), "--json")
        url = self.ready(up)["gateway"]
        at_run = ("--run-dir", str(run_dir))

        def listed() -> Result:
            return self.told("role", "ls", "--gateway", url, "--api-key", "two", "--json")

        assert "not an operator's" in listed().stderr
        changed = gateway | {"operators": ["acme"], "max_body_bytes": "1MiB"}
        # Another file: `up` follows its own by itself, and might have taken the change before.
        other = tmp_path / "changed.json"
        other.write_text(json.dumps(document(dummy_vllm, gateway=changed)))
        told = self.told("region", "reload", str(other), *at_run)
        assert told.stdout == "the gateway gets: gateway.operators\n"
        assert told.stderr == "changed, but needs a restart: gateway.max_body_bytes\n"
        wait_until(lambda: listed().exit_code == 0)
        log = run_dir / "logs" / "gateway.log"
        wait_until(lambda: "changed without a restart: gateway.operators" in log.read_text())
        other.write_text(json.dumps(document(dummy_vllm, gateway=changed | {"operators": ["x"]})))
        told = self.told("region", "reload", str(other), *at_run)
        assert (told.exit_code, "no API key has the name 'x'" in told.stderr) == (2, True)
        self.told("down", *at_run)
        assert up.wait(30.0) == 0
        self.finish(up)
        nothing = self.told("region", "reload", str(file), *at_run)
        assert (nothing.exit_code, "no region runs" in nothing.stderr) == (1, True)

    def test_a_killed_launcher_takes_everything_with_it(self, file: Path, run_dir: Path) -> None:
        up = self.prfaas("up", str(file), "--run-dir", str(run_dir), "--json")
        self.ready(up)
        pids = [child.pid for child in psutil.Process(up.pid).children(recursive=True)]
        assert len(pids) == 17
        up.send_signal(signal.SIGKILL)
        self.finish(up)
        wait_until(lambda: not [pid for pid in pids if lives(pid)])

        assert "dead" in self.told("status", "--run-dir", str(run_dir)).stdout
        assert "is down" in self.told("down", "--run-dir", str(run_dir)).stdout
        left = {path.name for path in run_dir.iterdir()}
        assert left <= {"logs", "prfaas.lock", "gateway.learned"}

    def test_ctrl_c_while_starting(self, file: Path, run_dir: Path) -> None:
        up = self.prfaas("up", str(file), "--run-dir", str(run_dir), "--json")
        assert up.stdout is not None
        for line in up.stdout:
            if json.loads(line)["kind"] == "engine":
                break
        up.send_signal(signal.SIGINT)
        self.finish(up)
        assert up.returncode == 130
        assert {path.name for path in run_dir.iterdir()} == {"logs", "prfaas.lock"}

    def test_a_wrong_file(self, file: Path, run_dir: Path) -> None:
        file.write_text(file.read_text().replace("links", "lnks"))
        up = self.told("up", str(file), "--run-dir", str(run_dir))
        assert up.exit_code == 2
        assert "lnks (line 1): unknown key; did you mean 'links'?" in up.stderr
