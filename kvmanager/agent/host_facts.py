"""Reads the facts of a node agent's host: memory, clock, kernel, GPUs, NUMA nodes, engines.

They come from /proc and /sys. This file judges none of them.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import psutil

from kvmanager.agent.host_messages import EngineProcess, HostFactsReply, NumaNode
from kvmanager.agent.links.host_load import kernel_tcp
from kvmanager.program_version import program_version
from transport.wire.handshake import VERSIONS

GPU_VARIABLE: Final = "CUDA_VISIBLE_DEVICES"
CORE_VARIABLE: Final = "VLLM_CPU_OMP_THREADS_BIND"
GPUS: Final = Path("/proc/driver/nvidia/gpus")
_SYS: Final = Path("/sys")
_IN_MEMORY: Final = ("tmpfs", "ramfs", "hugetlbfs")


def host_facts(
    arena_dir: Path,
    engines: Mapping[str, Iterable[int]],
    *,
    ssd_dir: Path | None = None,
    congestion: str,
    granting_keys: list[str],
) -> HostFactsReply:
    """The facts of this moment. `engines`: the processes of each instance."""
    space = os.statvfs(arena_dir)
    return HostFactsReply(
        version=program_version(),
        transport_versions=(VERSIONS.oldest, VERSIONS.newest),
        now_s=time.time(),
        kernel=kernel_tcp(),
        congestion=congestion,
        max_open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        cpus=sorted(os.sched_getaffinity(0)),
        num_gpus=len(_gpu_addresses()),
        numa=numa_nodes(),
        memory_bytes=psutil.virtual_memory().total,
        arena_dir=str(arena_dir),
        arena_dir_bytes=space.f_blocks * space.f_frsize,
        is_arena_in_memory=_file_system(arena_dir) in _IN_MEMORY,
        ssd_free_bytes=_free_bytes(ssd_dir) if ssd_dir is not None else None,
        engines=[
            _process(instance, pid) for instance, pids in engines.items() for pid in sorted(pids)
        ],
        granting_keys=granting_keys,
    )


def numa_nodes(sys: Path = _SYS, gpus: Path = GPUS) -> list[NumaNode]:
    """The NUMA nodes of this host; none where the kernel has no NUMA."""
    folders = (sys / "devices" / "system" / "node").glob("node[0-9]*")
    numbers = sorted(int(folder.name.removeprefix("node")) for folder in folders)
    gpus_at: dict[int, list[int]] = {}
    for number, address in enumerate(_gpu_addresses(gpus)):
        near = _number(sys / "bus" / "pci" / "devices" / address / "numa_node")
        gpus_at.setdefault(near, []).append(number)
    interfaces_at: dict[int, list[str]] = {}
    for device in sorted((sys / "class" / "net").glob("*/device/numa_node")):
        interfaces_at.setdefault(_number(device), []).append(device.parent.parent.name)
    return [
        NumaNode(
            number,
            cpu_list(_text(sys / "devices" / "system" / "node" / f"node{number}" / "cpulist")),
            gpus_at.get(number, []),
            interfaces_at.get(number, []),
        )
        for number in numbers
    ]


def cpu_list(text: str) -> list[int]:
    """The numbers of a list such as 0-3,8."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdecimal():
            found += range(int(first), int(last or first) + 1)
    return found


def _gpu_addresses(gpus: Path = GPUS) -> list[str]:
    """PCI addresses, in the order in which CUDA_DEVICE_ORDER=PCI_BUS_ID counts."""
    return sorted(path.name for path in gpus.glob("*"))


def _free_bytes(folder: Path) -> int:
    space = os.statvfs(folder)
    return space.f_bavail * space.f_frsize


def _process(instance: str, pid: int) -> EngineProcess:
    try:
        cpus = sorted(os.sched_getaffinity(pid))
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it ended just now, or is another user's
        return EngineProcess(instance, pid)
    environment = dict(word.decode(errors="replace").partition("=")[::2] for word in words)
    return EngineProcess(
        instance, pid, cpus, environment.get(GPU_VARIABLE), environment.get(CORE_VARIABLE)
    )


def _file_system(path: Path) -> str:
    """The kind of file system that has `path`; "" if that is not found."""
    whole = os.path.realpath(path)
    mounts = [line.split()[1:3] for line in _text(Path("/proc/self/mounts")).splitlines()]
    holding = [
        (mount, kind)
        for mount, kind in mounts
        if whole == mount or whole.startswith(mount.rstrip("/") + "/")
    ]
    return max(holding, key=lambda found: len(found[0]), default=("", ""))[1]


def _number(path: Path) -> int:
    """-1 where the file is missing, as the kernel says for devices near no NUMA node."""
    try:
        return int(_text(path))
    except ValueError:
        return -1


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
