"""A region on this machine follows its file: nodes and instances are started and stopped."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dummy_region import ROOT, document, dummy_vllm, spec
from eventually import eventually

from deploy.gateway.members.pages import InstancesOverview
from deploy.region.client import asked
from deploy.region.launch.addresses import admin_url
from deploy.region.launch.launcher import RunningRegion
from deploy.region.launch.parts import whole
from deploy.region.launch.running import RegionStartFailed
from deploy.region.spec.region import RegionSpec
from kvmanager.config_files.problems import FileError, Problem

pytestmark = pytest.mark.slow
__all__ = ["dummy_vllm"]


def changed(dummy: Path, change: Callable[[dict[str, Any]], None]) -> RegionSpec:
    file = document(dummy)
    change(file)
    return RegionSpec.model_validate(file)


def add_node(file: dict[str, Any]) -> None:
    (node,) = file["clusters"][0]["nodes"]
    new = {"name": "a2", "agent": node["agent"], "instances": [{"name": "a2-prefill"}]}
    file["clusters"][0]["nodes"].append(new)


def replace_node(file: dict[str, Any]) -> None:
    add_node(file)
    del file["clusters"][0]["nodes"][0]


def remove_instance(file: dict[str, Any]) -> None:
    replace_node(file)
    del file["clusters"][1]["nodes"][0]["instances"][0]


async def phases(region: RunningRegion) -> dict[str, str]:
    url, key = admin_url(region.region), region.operator_key
    found = await asked(url, "/prfaas/instances", InstancesOverview, key=key)
    return {item.instance: item.phase for item in found.instances}


async def until_phases(region: RunningRegion, *names: str) -> None:
    await eventually(lambda: phases(region), lambda found: found == dict.fromkeys(names, "serving"))


async def until_processes(region: RunningRegion, *names: str) -> None:
    await eventually(lambda: sorted(item.name for item in region.processes) == sorted(names))


def kept_arenas(directory: Path) -> set[str]:
    return {path.name.rpartition("-")[0] for path in directory.glob("*.arena")}


async def until_arenas(directory: Path, *names: str) -> None:
    """A thread removes those of nodes that have left."""
    await eventually(lambda: kept_arenas(directory) == set(names))


async def test_a_region_follows_its_file(dummy_vllm: Path, tmp_path: Path) -> None:
    relay = "link.prefill-a-to-pd-b.b1"
    async with RunningRegion(spec(dummy_vllm), tmp_path / "run") as region:
        wanted = changed(dummy_vllm, add_node)
        changes = await region.reload(wanted, whole(wanted))
        assert (changes.made, changes.needs_restart) == (("clusters",), ())
        await until_phases(region, "a1-prefill", "a2-prefill", "b1-prefill", "b1-decode")
        pids = {process.name: process.pid for process in region.processes}

        wanted = changed(dummy_vllm, remove_instance)
        await region.reload(wanted, whole(wanted))
        await until_phases(region, "a2-prefill", "b1-decode")
        await until_processes(
            region, relay, "agent.a2", "agent.b1", "a2-prefill", "b1-decode", "gateway"
        )
        assert {p.name: p.pid for p in region.processes}.items() <= pids.items()
        await until_arenas(dummy_vllm / "arenas", "prfaas-kept-test-a2", "prfaas-kept-test-b1")


async def test_what_cannot_be_followed_changes_nothing(
    dummy_vllm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(file: dict[str, Any]) -> None:
        add_node(file)
        (instance,) = file["clusters"][0]["nodes"][1]["instances"]
        instance["env"] = {"DUMMY_FAILS": "1"}

    def receive(file: dict[str, Any]) -> None:
        (node,) = file["clusters"][1]["nodes"]
        new = {"name": "b2", "agent": node["agent"], "instances": [{"name": "b2-decode"}]}
        file["clusters"][1]["nodes"].append(new)

    def other_agent(file: dict[str, Any]) -> None:
        file["clusters"][0]["nodes"][0]["agent"] = {"arena_gib": 0.02}

    async with RunningRegion(spec(dummy_vllm), tmp_path / "run") as region:
        names = [process.name for process in region.processes]
        failing = changed(dummy_vllm, fail)
        with pytest.raises(RegionStartFailed, match="no such model: nonsense"):
            await region.reload(failing, whole(failing))
        receiving = changed(dummy_vllm, receive)
        with pytest.raises(FileError, match="b2 would receive over the emulated link"):
            await region.reload(receiving, whole(receiving))
        threads: list[threading.Thread] = []

        def missing(*_: object) -> list[Problem]:
            threads.append(threading.current_thread())
            return [Problem(("models", 0, "path"), "there is no such folder")]

        with monkeypatch.context() as patched:
            patched.setattr("deploy.region.launch.launcher.missing_models", missing)
            with pytest.raises(FileError, match="no such folder"):
                await region.reload(failing, whole(failing))
        (thread,) = threads
        assert thread is not threading.main_thread(), "folders may answer slowly"
        other = changed(dummy_vllm, other_agent)
        changes = await region.reload(other, whole(other))
        assert (changes.made, changes.needs_restart) == ((), ("clusters",))
        assert [process.name for process in region.processes] == names
        await until_phases(region, "a1-prefill", "b1-prefill", "b1-decode")


@pytest.mark.parametrize("signals", [False, True])
async def test_up_follows_its_file_and_stops_on_sigterm(
    dummy_vllm: Path, tmp_path: Path, signals: bool
) -> None:
    file, run_dir = tmp_path / "region.yaml", tmp_path / "run"
    file.write_text(json.dumps(document(dummy_vllm)))
    up = await asyncio.create_subprocess_exec(
        *(Path(os.sys.executable), "-m", "deploy.cli", "up", str(file)),
        *("--run-dir", str(run_dir), "--json"),
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    log = run_dir / "logs" / "launcher.log"
    assert up.stdout is not None
    try:
        async with asyncio.timeout(90):
            while json.loads(await up.stdout.readline()).get("event") != "ready":
                pass
        new = document(dummy_vllm)
        add_node(new)
        file.write_text(json.dumps(new))
        if signals:
            up.send_signal(signal.SIGHUP)
        await eventually(lambda: "changed without a restart: clusters" in log.read_text())
        file.write_text("clusters: [")
        up.send_signal(signal.SIGHUP)
        await eventually(lambda: "the region stays as it is" in log.read_text())
        assert up.returncode is None
        up.send_signal(signal.SIGTERM)
        async with asyncio.timeout(90):
            assert await up.wait() == 0
    finally:
        if up.returncode is None:
            up.kill()
            await up.wait()
