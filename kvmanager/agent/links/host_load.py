"""The CPU use of this process and its host, and the kernel's limits for TCP.

It reads /proc and /sys and does not judge the numbers.
"""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

import psutil

from kvmanager.agent.probe_messages import AgentLoad, KernelTcp
from transport import kernel_limits

_CAP_NET_ADMIN = 12


def agent_load(now_s: float) -> AgentLoad:
    """The counters of this moment."""
    times = psutil.cpu_times()
    # psutil counts guest time in user time already. A CPU in iowait is free to work.
    busy_s = times.user + times.nice + times.system + times.irq + times.softirq + times.steal
    return AgentLoad(
        now_s=now_s,
        cpu_s=time.process_time(),
        host_busy_s=busy_s,
        host_cpus=os.cpu_count() or 1,
        usable_cpus=usable_cpus(),
    )


def usable_cpus() -> float:
    """CPUs that this process may use: its affinity, and the CPU quota of its cgroup."""
    cpus = float(len(os.sched_getaffinity(0)))
    # In a container this is the file of its own cgroup; elsewhere it is the root cgroup's, which
    # has no quota.
    quota, _, period = _text("/sys/fs/cgroup/cpu.max").partition(" ")
    if quota.isdecimal() and period.isdecimal() and int(period):
        cpus = min(cpus, int(quota) / int(period))
    return cpus


def kernel_tcp() -> KernelTcp:
    """The limits and the memory of TCP now."""
    pressure = _text("/proc/sys/net/ipv4/tcp_mem").split()
    return KernelTcp(
        wmem_max_bytes=kernel_limits.wmem_max_bytes(),
        tcp_wmem_bytes=kernel_limits.tcp_wmem_bytes(),
        tcp_rmem_bytes=kernel_limits.tcp_rmem_bytes(),
        available_congestion=kernel_limits.available_congestion(),
        allowed_congestion=kernel_limits.allowed_congestion(),
        default_congestion=kernel_limits.default_congestion(),
        slow_start_after_idle=_text("/proc/sys/net/ipv4/tcp_slow_start_after_idle") == "1",
        tcp_memory_bytes=_tcp_pages(_text("/proc/net/sockstat")) * mmap.PAGESIZE,
        tcp_memory_pressure_bytes=int(pressure[1]) * mmap.PAGESIZE if len(pressure) == 3 else 0,
        may_exceed=_has_net_admin(_text("/proc/self/status")),
    )


def _tcp_pages(sockstat: str) -> int:
    for line in sockstat.splitlines():
        protocol, _, rest = line.partition(":")
        words = rest.split()
        if protocol == "TCP" and "mem" in words:
            return int(words[words.index("mem") + 1])
    return 0


def _has_net_admin(status: str) -> bool:
    for line in status.splitlines():
        name, _, value = line.partition(":")
        if name == "CapEff":
            return bool(int(value, 16) >> _CAP_NET_ADMIN & 1)
    return False


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
