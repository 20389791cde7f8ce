"""What an agent sees of its host, read from /proc and /sys as they are and from made-up ones."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from kvmanager.agent.host_facts import cpu_list, host_facts, numa_nodes
from kvmanager.agent.host_messages import NumaNode


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_this_host(tmp_path: Path) -> None:
    before_s = time.time()
    facts = host_facts(tmp_path, {"a": [os.getpid()]}, congestion="bbr", granting_keys=["12"])
    assert before_s <= facts.now_s <= time.time()
    assert facts.cpus == sorted(os.sched_getaffinity(0))
    assert facts.arena_dir == str(tmp_path)
    assert facts.arena_dir_bytes > 0
    assert facts.memory_bytes > 0
    assert facts.ssd_free_bytes is None
    with_ssd = host_facts(tmp_path, {}, ssd_dir=tmp_path, congestion="", granting_keys=[])
    assert with_ssd.ssd_free_bytes
    assert facts.max_open_files > 0
    (engine,) = facts.engines
    assert (engine.instance, engine.pid, engine.cpus) == ("a", os.getpid(), facts.cpus)
    assert (facts.congestion, facts.granting_keys) == ("bbr", ["12"])


def test_memory_file_systems_are_told_from_disks() -> None:
    if not Path("/dev/shm").is_mount():
        pytest.fail("tests need /dev/shm")
    assert host_facts(Path("/dev/shm"), {}, congestion="", granting_keys=[]).is_arena_in_memory
    assert not host_facts(Path("/proc"), {}, congestion="", granting_keys=[]).is_arena_in_memory


def test_a_process_that_is_gone_has_no_facts(tmp_path: Path) -> None:
    gone = 1 << 22  # no Linux gives it
    (engine,) = host_facts(tmp_path, {"a": [gone]}, congestion="", granting_keys=[]).engines
    assert (engine.cpus, engine.gpus, engine.bound_cores) == ([], None, None)


def test_devices_are_near_numa_nodes(tmp_path: Path) -> None:
    sys, gpus = tmp_path / "sys", tmp_path / "gpus"
    for number, cpus in ((0, "0-3,8"), (1, "4-7")):
        put(sys / f"devices/system/node/node{number}/cpulist", f"{cpus}\n")
    for address, near in (("0000:17:00.0", 0), ("0000:ca:00.0", 1), ("0000:d8:00.0", -1)):
        put(gpus / address / "information", "")
        put(sys / f"bus/pci/devices/{address}/numa_node", f"{near}\n")
    put(sys / "class/net/eth0/device/numa_node", "1\n")
    put(sys / "class/net/lo/mtu", "65536\n")
    assert numa_nodes(sys, gpus) == [
        NumaNode(0, [0, 1, 2, 3, 8], [0], []),
        NumaNode(1, [4, 5, 6, 7], [1], ["eth0"]),
    ]
    assert numa_nodes(tmp_path / "none", gpus) == []


def test_lists_of_cpus() -> None:
    assert cpu_list("0-2,5") == [0, 1, 2, 5]
    assert cpu_list("") == []
