"""`prfaas status` names engines that share no KVCache, also those of other hosts."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest
import report_cases
from answering_gateway import answering
from front_doubles import FakeAgent
from rich.console import Console

from deploy.region.launch.rundir import ProcessRecord, RegionState, RunLock
from deploy.region.launch.status import RegionStatus, region_status, render_status
from deploy.region.spec.loading import parse_region
from scheduler.reports import ClusterReport

FILE = """
models: [{name: m, path: org/m}]
clusters: [{name: home, kind: pd, nodes: [{name: b1, instances: [{name: d}]}]}]
security: {trusted_network: true}
"""


def cluster(
    name: str, instance: str, role: Any, fingerprint: str, adapters: dict[str, str] | None = None
) -> ClusterReport:
    more = {"layout_fingerprint": fingerprint, "layout": f"layout of {instance}", "weights": "w"}
    return report_cases.cluster(
        name, report_cases.instance(instance, role, adapters=adapters or {}, **more)
    )


async def seen(directory: Path, **changes: Any) -> RegionStatus:
    """The status of a run whose launcher is this process."""
    lock = RunLock(directory)
    file = directory / "region.json"
    file.write_text(parse_region(FILE, {}).model_dump_json(by_alias=True))
    settings: dict[str, Any] = {"gateway_url": "", "processes": (), "agents": {}}
    state = RegionState(
        region="region",
        phase="running",
        launcher_pid=os.getpid(),
        started_s=0.0,
        region_file=str(file),
        relays={},
        **(settings | changes),
    )
    try:
        return await region_status(state)
    finally:
        lock.release()


def printed(status: RegionStatus) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(render_status(status))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("fingerprint", ["f1", "f2", ""])
async def test_the_gateway_knows_engines_of_other_hosts(tmp_path: Path, fingerprint: str) -> None:
    home, far = cluster("home", "d", "both", "f1"), cluster("far", "p", "prefill", fingerprint)
    page = {"pds": {"home": home, "gone": None}, "prefill": {"far": far}}
    async with answering("127.0.0.1", {"/prfaas/region": page}) as port:
        status = await seen(tmp_path, gateway_url=f"http://127.0.0.1:{port}")
    if fingerprint != "f2":
        assert status.unlike == ()
        return
    sentence = (
        "KVCache of m is laid out as layout of d (f1) at d, but as layout of p (f2) at p; "
        "they share no KVCache"
    )
    assert status.unlike == (sentence,)
    assert sentence in printed(status)


async def test_adapters_of_one_name_that_differ_are_named(tmp_path: Path) -> None:
    home = cluster("home", "d", "both", "f1", {"poet": "files:1"})
    far = cluster("far", "p", "prefill", "f1", {"poet": "files:2"})
    page = {"pds": {"home": home}, "prefill": {"far": far}}
    async with answering("127.0.0.1", {"/prfaas/region": page}) as port:
        status = await seen(tmp_path, gateway_url=f"http://127.0.0.1:{port}")
    sentence = (
        "the adapter poet of m is files:1 at d, but files:2 at p; they share no KVCache of it"
    )
    assert status.unlike == (sentence,)


async def test_without_a_gateway_agents_tell(tmp_path: Path) -> None:
    agent = FakeAgent("p", "q", "d")
    agent.model, agent.fingerprints = "m", {"d": "f2"}
    await agent.start()
    process = ProcessRecord("agent.b1", "agent", "healthy", "", None, "", "/logs/agent.log", 0)
    try:
        status = await seen(tmp_path, processes=(process,), agents={"b1": agent.target})
    finally:
        await agent.stop()
    (sentence,) = status.unlike
    assert " at p, q" in sentence
    assert "(f2) at d" in sentence
