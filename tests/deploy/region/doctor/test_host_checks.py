"""What is said of hosts whose agents answered: engines, versions, clocks, keys, memory, devices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from msgspec import structs
from report_cases import agent_status

from deploy.region.doctor import host_checks as checks
from deploy.region.doctor.findings import Check
from deploy.region.doctor.host_checks import HostView
from deploy.region.spec.loading import parse_region
from deploy.region.spec.region import RegionSpec
from kvmanager.agent.host_messages import EngineProcess, HostFactsReply, NumaNode
from kvmanager.agent.messages import CacheStatus, EngineStatus, StatusReply
from kvmanager.agent.probe_messages import KernelTcp

GIB = 1 << 30
MIB = 1 << 20
FILE = """
name: two
models: [{name: m, path: org/m}]
clusters:
  - {name: far, kind: prefill, nodes: [{name: a1, host: 10.0.0.1, instances: [{name: p}]}]}
  - name: home
    kind: pd
    nodes: [{name: b1, host: 10.1.0.1, instances: [{name: d}, {name: e}]}]
links: [{from: far, to: home}]
"""
KERNEL = KernelTcp(
    wmem_max_bytes=4 * MIB,
    tcp_wmem_bytes=4 * MIB,
    tcp_rmem_bytes=6 * MIB,
    available_congestion=["reno", "cubic", "bbr"],
    allowed_congestion=["reno", "bbr"],
    default_congestion="cubic",
)


def region(text: str = FILE) -> RegionSpec:
    return parse_region(f"{text}\nsecurity: {{trusted_network: true}}\n", {})


def engine(name: str, **changes: Any) -> EngineStatus:
    known = EngineStatus(name, 1, 1, "layout", "aa", model="m", weights="w", engine="vllm 1")
    return structs.replace(known, **changes)


def facts(**changes: Any) -> HostFactsReply:
    known = HostFactsReply(
        version="1.0",
        transport_versions=(2, 2),
        now_s=1000.0,
        kernel=KERNEL,
        congestion="bbr",
        max_open_files=1 << 20,
        cpus=[0, 1, 2, 3],
        memory_bytes=64 * GIB,
        arena_dir="/dev/shm",
        arena_dir_bytes=32 * GIB,
        is_arena_in_memory=True,
        granting_keys=["key"],
    )
    return structs.replace(known, **changes)


def status(*engines: EngineStatus, **changes: Any) -> StatusReply:
    return agent_status(**({"engines": list(engines), "data_endpoint": ""} | changes))


def hosts() -> tuple[HostView, HostView]:
    """The nodes a1 and b1, all right."""
    a1, b1 = region().nodes
    return (
        HostView(a1, status(engine("p")), facts(), 0.0, 0.001),
        HostView(b1, status(engine("d"), engine("e")), facts(), 0.0, 0.001),
    )


def wrong(found: list[Check]) -> list[tuple[str, str, str]]:
    return [(one.level, one.about, one.what) for one in found if one.level != "ok"]


def test_nothing_is_wrong_with_equal_hosts() -> None:
    both = hosts()
    found = [
        *checks.engine_checks(both),
        *checks.version_checks({"gateway": "1.0"}, both),
        *checks.clock_checks(both, "b1"),
        *checks.grant_checks(both, "key", ["key"]),
        *checks.exposure_checks(both),
        *checks.kernel_lines(both),
        *checks.memory_checks(both),
        *checks.placement_checks(region(), both),
    ]
    assert wrong(found) == []
    assert {one.about for one in found} >= {
        "engine p", "weights and layouts", "versions of prfaas", "versions of engines",
        "clock of a1", "keys of grants at b1", "kernel of a1", "arena of b1", "placement on b1",
    }  # fmt: skip


def test_engines_must_be_connected_and_have_equal_weights() -> None:
    a1, b1 = hosts()
    b1 = replace(b1, status=status(engine("d", weights="other", layout_fingerprint="bb")))
    gone, unlike = wrong(checks.engine_checks([a1, b1]))
    assert gone == ("problem", "engine e", "it is not connected to the agent of b1")
    assert unlike[:2] == ("problem", "weights and layouts")
    assert "other at d" in unlike[2]


def test_other_releases_are_a_warning_and_other_protocols_a_problem() -> None:
    a1, b1 = hosts()
    b1 = replace(b1, status=status(engine("d", engine="vllm 2")), facts=facts(version="1.1"))
    (release, engines) = wrong(checks.version_checks({"front far": ""}, [a1, b1]))
    assert release == (
        "warning",
        "versions of prfaas",
        "1.0: agent a1; 1.1: agent b1; of an older release that does not say: front far",
    )
    assert engines[2] == "vllm 2: engine d; vllm 1: engine p"
    b1 = replace(b1, facts=facts(transport_versions=(3, 4)))
    found = wrong(checks.version_checks({}, [a1, b1]))
    assert found[0][0] == "problem"
    assert "the agent b1 speaks version 3 to 4, this side speaks 2" in found[0][2]


def test_clocks_are_compared_with_that_of_the_gateway() -> None:
    a1, b1 = hosts()
    # Both are as wrong as this host is for them: only their difference matters.
    both = [replace(a1, ahead_s=500.0), replace(b1, ahead_s=499.0)]
    assert wrong(checks.clock_checks(both, "b1")) == []
    (late,) = checks.clock_checks([replace(a1, ahead_s=-12.0), b1], "b1")
    assert (late.level, late.what) == ("warning", "12.000 s behind that of b1 (± 0.002 s)")
    (far,) = checks.clock_checks([replace(a1, ahead_s=90.0), b1], "b1")
    assert far.level == "problem"
    assert "grants hold for 60 s" in far.what
    (unknown,) = checks.clock_checks([replace(a1, ahead_s=90.0, error_s=40.0)], "b1")
    assert (unknown.level, "of this host" in unknown.what) == ("warning", True)


def test_agents_must_know_the_key_that_signs() -> None:
    a1, b1 = hosts()
    (signs,) = wrong(checks.grant_checks([a1, b1], "new", []))[:1]
    assert signs[:2] == ("problem", "keys of grants at a1")
    assert "does not know the gateway's key new" in signs[2]
    both_keys = replace(a1, facts=facts(granting_keys=["old", "new"]))
    assert wrong(checks.grant_checks([both_keys], "new", [])) == []
    other = replace(b1, facts=facts(granting_keys=["other"]))
    (apart,) = wrong(checks.grant_checks([a1, other], "", []))
    assert apart == ("problem", "keys of grants at b1", "it knows other, others key")
    (none,) = wrong(checks.grant_checks([replace(a1, facts=facts(granting_keys=[]))], "new", []))
    assert none[0] == "warning"


def test_kernels_of_hosts_apart_need_buffers_and_the_congestion_control() -> None:
    a1, _ = hosts()
    kernel = structs.replace(
        KERNEL, tcp_rmem_bytes=MIB, allowed_congestion=["reno"], slow_start_after_idle=True
    )
    found = checks.kernel_lines([replace(a1, facts=facts(kernel=kernel, max_open_files=1024))])
    assert [one.fix for one in found] == [
        'on a1: sysctl -w net.ipv4.tcp_rmem="4096 131072 4194304"',
        'on a1: sysctl -w net.ipv4.tcp_allowed_congestion_control="reno bbr",'
        " then restart its agent",
        "on a1: sysctl -w net.ipv4.tcp_slow_start_after_idle=0 (not needed with bbr)",
        "ulimit -n 4096, or more",
    ]
    assert {one.level for one in found} == {"warning"}
    unknown = replace(a1, facts=facts(kernel=KernelTcp()))
    assert wrong(checks.kernel_lines([unknown])) == []
    near = replace(a1, node=a1.node.model_copy(update={"host": "127.0.0.1"}))
    assert wrong(checks.kernel_lines([replace(near, facts=facts(kernel=kernel))])) == []


def test_arenas_must_fit_where_they_are() -> None:
    a1, _ = hosts()
    old = replace(a1, status=status(arena_bytes=GIB // 2))
    assert "and the file says 1 GiB" in wrong(checks.memory_checks([old]))[0][2]
    disk = replace(a1, facts=facts(is_arena_in_memory=False))
    assert "KVCache goes to a disk" in wrong(checks.memory_checks([disk]))[0][2]
    tight = replace(a1, facts=facts(arena_dir_bytes=GIB, memory_bytes=GIB))
    full, large = checks.memory_checks([tight])
    assert full.fix == "mount -o remount,size=1.11G /dev/shm"
    assert large.fix.startswith("lower arena_gib")


def test_a_disk_must_have_room_for_the_copies_that_it_is_to_hold() -> None:
    a1, _ = hosts()
    agent = a1.node.agent.model_copy(update={"ssd_gib": 10.0})
    a1 = replace(
        a1,
        node=a1.node.model_copy(update={"agent": agent}),
        status=status(cache=CacheStatus(nbytes={"ssd/kv": 3 * GIB, "arena/kv": 9 * GIB})),
    )
    assert checks.ssd_checks([a1]) == [], "it has no copies on SSD, or does not say"
    roomy = replace(a1, facts=facts(ssd_free_bytes=8 * GIB))
    assert wrong(checks.ssd_checks([roomy])) == []
    (full,) = wrong(checks.ssd_checks([replace(a1, facts=facts(ssd_free_bytes=GIB))]))
    assert full == ("warning", "SSD of a1", "ssd_gib is 10 GiB: 3 GiB held, 1 GiB free")


def test_engines_of_one_host_have_gpus_and_cores_of_their_own() -> None:
    _, b1 = hosts()
    numa = [NumaNode(0, [0, 1], [0]), NumaNode(1, [2, 3], [1], ["eth0"])]

    def with_engines(*processes: EngineProcess, **more: Any) -> HostView:
        told = facts(num_gpus=2, numa=numa, engines=list(processes), **more)
        return replace(b1, facts=told)

    apart = with_engines(EngineProcess("d", 1, [0], "0"), EngineProcess("e", 2, [3], "1"))
    assert wrong(checks.placement_checks(region(), [apart])) == []
    shared = with_engines(EngineProcess("d", 1, [0], "0"), EngineProcess("e", 2, [0]))
    (one,) = wrong(checks.placement_checks(region(), [shared]))
    assert one == ("warning", "GPUs", "d and e both use the GPUs 0")
    distant = with_engines(EngineProcess("d", 1, [2], "0"), cpus=[0, 1])
    far, network = wrong(checks.placement_checks(region(), [distant]))
    assert far[2] == "d runs on other CPUs than those near its GPU 0"
    assert network[2].endswith("those near its network cards (eth0)")


def test_engines_on_cpus_that_share_cores_are_named() -> None:
    on_cpu = region(FILE.replace("path: org/m", "path: org/m, kv_space_gib: 1"))
    _, b1 = hosts()
    own = [
        EngineProcess("d", 1, [0, 1, 2, 3], None, "0,1"),
        EngineProcess("e", 2, [0, 1, 2, 3], None, "2|3"),
    ]
    apart = replace(b1, facts=facts(engines=own))
    assert wrong(checks.placement_checks(on_cpu, [apart])) == []
    free = [structs.replace(one, bound_cores="nobind") for one in own]
    (shared,) = wrong(checks.placement_checks(on_cpu, [replace(b1, facts=facts(engines=free))]))
    assert shared == ("warning", "CPU cores", "d and e share 4 CPU cores")
