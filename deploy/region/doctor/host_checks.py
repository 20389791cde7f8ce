"""Judges what agents say of their hosts and engines. Pure.

Each function takes all hosts that answered and returns a line for each thing that it looked at.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

from deploy.region.cache_identity import SAME_KVCACHE, unlike_engines
from deploy.region.doctor.findings import Check, ok, problem, warning
from deploy.region.doctor.kernel_checks import host_kernel_checks
from deploy.region.spec.region import NodeSpec, RegionInstance, RegionSpec
from kvmanager.agent.host_messages import EngineProcess, HostFactsReply
from kvmanager.agent.messages import StatusReply
from kvmanager.config_files.fields import GIB
from kvmanager.config_files.security import is_loopback
from transport.grants import SKEW_S
from transport.versions import NoCommonVersion, Versions

NOTED_SKEW_S: Final = 5.0
"""Clocks that NTP keeps are far closer than this."""
LEAST_FILES: Final = 4096
"""A descriptor for each connection, those of data ports among them."""
FULL_SHARE: Final = 0.9
"""More of the host's memory, or of a file system in memory, leaves too little for others."""


@dataclass(frozen=True, slots=True)
class HostView:
    """A node whose agent answered. Its clock is `ahead_s` ahead of this host's, give or take
    `error_s`.
    """

    node: NodeSpec
    status: StatusReply
    facts: HostFactsReply
    ahead_s: float
    error_s: float


def engine_checks(hosts: Iterable[HostView]) -> list[Check]:
    """Whether the engines of the file are connected, and whether they share KVCache."""
    hosts, found = list(hosts), list[Check]()
    for host in hosts:
        connected = {engine.instance for engine in host.status.engines}
        encoders = {encoder.instance for encoder in host.status.encoders}
        for item in host.node.instances:
            about = f"engine {item.name}"
            if item.name in (encoders if item.encodes_only else connected):
                found.append(ok(about, f"connected to the agent of {host.node.name}"))
                continue
            what = f"it is not connected to the agent of {host.node.name}"
            found.append(problem(about, what, "look at its log: does it run, does it still load?"))
    unlike = unlike_engines(host.status for host in hosts)
    found += [problem("weights and layouts", what, SAME_KVCACHE) for what in unlike]
    models = sorted({one.model for host in hosts for one in host.status.engines if one.model})
    if models and not unlike:
        found.append(ok("weights and layouts", f"the same for all engines of {', '.join(models)}"))
    return found


def version_checks(releases: Mapping[str, str], hosts: Sequence[HostView]) -> list[Check]:
    """Whether processes are of one release. `releases`: those of fronts and gateway, by name."""
    found = []
    for first, second in combinations(hosts, 2):
        theirs, own = (Versions(*host.facts.transport_versions) for host in (second, first))
        try:
            own.common(theirs, f"agent {second.node.name}")
        except NoCommonVersion as error:
            about = f"versions of the transport at {first.node.name}"
            found.append(problem(about, str(error), "upgrade the older one"))
    agents = {f"agent {host.node.name}": host.facts.version for host in hosts}
    found.append(_release_check("versions of prfaas", agents | dict(releases)))
    engines = {
        f"engine {engine.instance}": engine.engine
        for host in hosts
        for engine in host.status.engines
        if engine.engine
    }
    if engines:
        found.append(_release_check("versions of engines", engines))
    return found


def _release_check(about: str, releases: Mapping[str, str]) -> Check:
    by_release: dict[str, list[str]] = {}
    for name, release in sorted(releases.items()):
        by_release.setdefault(release or "of an older release that does not say", []).append(name)
    if len(by_release) <= 1:
        return ok(about, f"{next(iter(by_release), 'none')} everywhere")
    what = "; ".join(f"{release}: {', '.join(names)}" for release, names in by_release.items())
    return warning(about, what, "finish the upgrade, so that all are of one release")


def clock_checks(hosts: Sequence[HostView], gateway_node: str) -> list[Check]:
    """How far apart the clocks are: grants hold by the clocks of the gateway and of agents."""
    reference = next((host for host in hosts if host.node.name == gateway_node), None)
    base_s, base_error_s = (reference.ahead_s, reference.error_s) if reference else (0.0, 0.0)
    beside = f"that of {gateway_node}" if reference else "that of this host"
    found = []
    for host in hosts:
        if host is reference:
            continue
        skew_s, error_s = host.ahead_s - base_s, host.error_s + base_error_s
        direction = "ahead of" if skew_s > 0 else "behind"
        what = f"{abs(skew_s):.3f} s {direction} {beside} (± {error_s:.3f} s)"
        about, certain_s = f"clock of {host.node.name}", abs(skew_s) - error_s
        if certain_s > SKEW_S:
            what += f"; grants hold for {SKEW_S:g} s of difference"
            found.append(problem(about, what, "keep the clocks of all hosts with NTP"))
        elif certain_s > NOTED_SKEW_S:
            found.append(warning(about, what, "keep the clocks of all hosts with NTP"))
        else:
            found.append(ok(about, what))
    return found


def grant_checks(
    hosts: Iterable[HostView], signing: str, known_here: Collection[str]
) -> list[Check]:
    """Whether agents take the gateway's grants. `signing` is the digest of the gateway's key, ""
    where this host does not have it; then agents must know the keys that are `known_here`, or
    else all the same ones.
    """
    found, first = [], list(known_here)
    for host in hosts:
        about, known = f"keys of grants at {host.node.name}", host.facts.granting_keys
        first = first or known
        if not known:
            fix = "give it granting_keys, so that it does not obey everybody in its region"
            found.append(warning(about, "its agent checks no grants", fix))
        elif signing and signing not in known:
            what = f"it does not know the gateway's key {signing}, but {', '.join(known)}"
            fix = "copy granting.pub of the gateway's host there; it refuses all KVCache until then"
            found.append(problem(about, what, fix))
        elif not signing and not set(known) & set(first):
            what = f"it knows {', '.join(known)}, others {', '.join(first)}"
            fix = "copy one granting.pub to all hosts, that of the gateway's granting_key"
            found.append(problem(about, what, fix))
        else:
            found.append(ok(about, ", ".join(known)))
    return found


def exposure_checks(hosts: Iterable[HostView]) -> list[Check]:
    """Rights that agents give to anybody on the network."""
    return [
        warning(f"agent {host.node.name}", exposure, "docs/security.md says how to close it")
        for host in hosts
        for exposure in host.status.exposures
    ]


def kernel_lines(hosts: Iterable[HostView]) -> list[Check]:
    """Limits of kernels and processes."""
    found = []
    for host in hosts:
        name, facts = host.node.name, host.facts
        wrong = []
        # Sockets to this very host use the kernel's defaults on purpose.
        if not is_loopback(host.node.host):
            checks = host_kernel_checks(name, facts.kernel, facts.congestion)
            wrong = [check for check in checks if check.is_wrong]
        found += [
            warning(f"kernel of {name}", f"{check.name} is {check.present}", check.fix)
            for check in wrong
        ]
        if 0 < facts.max_open_files < LEAST_FILES:
            what = f"its agent may open {facts.max_open_files} files; each connection is one"
            found.append(warning(f"kernel of {name}", what, f"ulimit -n {LEAST_FILES}, or more"))
        elif not wrong:
            found.append(ok(f"kernel of {name}", "buffers, congestion control, open files"))
    return found


def memory_checks(hosts: Iterable[HostView]) -> list[Check]:
    """Arenas, and the file systems and memory that they are in."""
    found = []
    for host in hosts:
        facts, has = host.facts, host.status.arena_bytes
        about, where = f"arena of {host.node.name}", facts.arena_dir
        block = host.status.block_bytes
        wanted = max(1, int(host.node.agent.arena_gib * GIB) // block) * block
        size = f"{_gib(has)} in {where} of {_gib(facts.arena_dir_bytes)}"
        if has != wanted:
            what = f"it has {_gib(has)}, and the file says {_gib(wanted)}"
            found.append(warning(about, what, "start the agent and its engines anew"))
        if not facts.is_arena_in_memory:
            what = f"{size}, which is no file system in memory: KVCache goes to a disk"
            found.append(warning(about, what, "set arena_dir to /dev/shm, or mount tmpfs there"))
        elif has > FULL_SHARE * facts.arena_dir_bytes:
            fix = f"mount -o remount,size={_gib(int(has / FULL_SHARE), '')}G {where}"
            found.append(warning(about, f"{size}: hardly anything else fits", fix))
        if facts.memory_bytes and has > FULL_SHARE * facts.memory_bytes:
            what = f"it is {_gib(has)} of the host's {_gib(facts.memory_bytes)} of memory"
            found.append(warning(about, what, "lower arena_gib: engines need memory, too"))
        if not found or found[-1].about != about:
            found.append(ok(about, size))
    return found


def ssd_checks(hosts: Iterable[HostView]) -> list[Check]:
    """Whether the disks have room for as many copies as `ssd_gib` allows."""
    found = []
    for host in hosts:
        free_bytes, ssd_gib = host.facts.ssd_free_bytes, host.node.agent.ssd_gib
        if free_bytes is None or ssd_gib is None:
            continue
        about, cache = f"SSD of {host.node.name}", host.status.cache
        held = {} if cache is None else cache.nbytes
        held_bytes = sum(size for name, size in held.items() if name.startswith("ssd/"))
        what = f"ssd_gib is {ssd_gib:.3g} GiB: {_gib(held_bytes)} held, {_gib(free_bytes)} free"
        if held_bytes + free_bytes < ssd_gib * GIB:
            fix = "lower ssd_gib, or free room: a full disk keeps fewer copies, and fails writes"
            found.append(warning(about, what, fix))
        else:
            found.append(ok(about, what))
    return found


def placement_checks(region: RegionSpec, hosts: Sequence[HostView]) -> list[Check]:
    """GPUs, cores and NUMA nodes of engines and agents."""
    found = []
    # Agents at one address are on one host, whose devices their engines share.
    by_host: dict[str, list[HostView]] = {}
    for host in hosts:
        by_host.setdefault(host.node.host, []).append(host)
    for same in by_host.values():
        troubles = [*_shared_devices(region, same)]
        for host in same:
            troubles += [*_distant_devices(host), *_distant_network(host)]
        found += troubles
        if not troubles:
            facts = same[0].facts
            names = ", ".join(host.node.name for host in same)
            devices = f"{facts.num_gpus} GPUs, {max(1, len(facts.numa))} NUMA nodes"
            found.append(ok(f"placement on {names}", devices))
    return found


def _shared_devices(region: RegionSpec, same: Sequence[HostView]) -> Iterable[Check]:
    """Devices that two engines of one host share."""
    engines = {
        item.name: (item, [one for one in host.facts.engines if one.instance == item.name])
        for host in same
        for item in host.node.instances
    }
    gpus: dict[str, set[str]] = {}
    cores: dict[str, set[int]] = {}
    for name, (item, processes) in engines.items():
        if not processes:
            continue
        if _is_on_cpu(region, item):
            cores[name] = _cores_of(processes)
        elif same[0].facts.num_gpus:
            gpus[name] = _gpus_of(processes, same[0].facts.num_gpus)
    for first, second in combinations(gpus, 2):
        if shared := gpus[first] & gpus[second]:
            what = f"{first} and {second} both use the GPUs {', '.join(sorted(shared))}"
            yield warning("GPUs", what, "remove CUDA_VISIBLE_DEVICES from env: `up` divides them")
    for first, second in combinations(cores, 2):
        if shared_cores := cores[first] & cores[second]:
            what = f"{first} and {second} share {len(shared_cores)} CPU cores"
            fix = "remove VLLM_CPU_OMP_THREADS_BIND from env: `up` divides them; or fewer engines"
            yield warning("CPU cores", what, fix)


def _distant_devices(host: HostView) -> Iterable[Check]:
    """Engines whose GPUs are near other CPUs than those that they run on."""
    facts = host.facts
    for process in facts.engines:
        for number in _gpu_numbers(process):
            near = [numa for numa in facts.numa if number in numa.gpus]
            if near and process.cpus and not set(process.cpus) & set(near[0].cpus):
                what = f"{process.instance} runs on other CPUs than those near its GPU {number}"
                fix = f"let it run on CPUs of NUMA node {near[0].number} (numactl --cpunodebind)"
                yield warning(f"NUMA of {host.node.name}", what, fix)


def _distant_network(host: HostView) -> Iterable[Check]:
    """An agent that runs on other CPUs than those near any network card."""
    facts = host.facts
    near = [numa for numa in facts.numa if numa.interfaces]
    cpus = {cpu for numa in near for cpu in numa.cpus}
    if cpus and facts.cpus and not cpus & set(facts.cpus):
        cards = ", ".join(name for numa in near for name in numa.interfaces)
        what = f"its agent runs on other CPUs than those near its network cards ({cards})"
        fix = f"let it run on CPUs of NUMA node {near[0].number} (numactl --cpunodebind)"
        yield warning(f"NUMA of {host.node.name}", what, fix)


def _is_on_cpu(region: RegionSpec, item: RegionInstance) -> bool:
    return region.model_of(item).kv_space_gib is not None


def _gpus_of(processes: Iterable[EngineProcess], num_gpus: int) -> set[str]:
    found: set[str] = set()
    for process in processes:
        named = process.gpus
        found |= set(map(str, range(num_gpus))) if named is None else set(named.split(","))
    return found - {""}


def _gpu_numbers(process: EngineProcess) -> list[int]:
    return [int(name) for name in (process.gpus or "").split(",") if name.isdecimal()]


def _cores_of(processes: Iterable[EngineProcess]) -> set[int]:
    """The cores that the file or `prfaas up` gave it, else those that it may use."""
    found: set[int] = set()
    for process in processes:
        words = (process.bound_cores or "").replace("|", ",").split(",")
        bound = {int(word) for word in words if word.isdecimal()}
        found |= bound or set(process.cpus)
    return found


def _gib(nbytes: int, unit: str = " GiB") -> str:
    return f"{nbytes / GIB:.3g}{unit}"
