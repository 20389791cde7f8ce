"""GPUs and CPU cores of a host, divided among the engines that run there.

`divided` decides, from what it is given. The other functions look at this machine. What the file
says in `env` of a model or instance wins: such an engine is left out.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice

from deploy.region.launch.parts import Part
from deploy.region.spec.region import NodeSpec, RegionInstance, RegionSpec
from kvmanager.agent.host_facts import CORE_VARIABLE, GPU_VARIABLE, GPUS


@dataclass(frozen=True, slots=True)
class Division:
    """The variables of each engine by instance, and why some engines share devices."""

    environment: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    notes: Sequence[str] = ()
    known: frozenset[str] = frozenset()
    """The instances of this machine that were considered, with devices or without."""
    others: frozenset[str] = frozenset()
    """The GPUs of engines that other parts of the region start on this machine."""


def divided(
    region: RegionSpec, nodes: Iterable[NodeSpec], *, gpus: Sequence[str], cores: Sequence[int]
) -> Division:
    """GPUs, and equal shares of the cores, for the engines of the nodes on this machine.

    An engine with `kv_space_gib` is one on the CPU. Without enough GPUs for all engines none gets
    any. With fewer cores than workers each has one core, in turn.
    """
    engines = [item for node in nodes for item in node.instances]
    on_cpu = [item for item in engines if region.model_of(item).kv_space_gib is not None]
    on_gpu = [item for item in engines if item not in on_cpu]
    environment, notes = _gpus_of(region, on_gpu, gpus)
    more, more_notes = _cores_of(region, on_cpu, cores)
    return Division(environment | more, (*notes, *more_notes))


def divided_here(region: RegionSpec, part: Part, environment: Mapping[str, str]) -> Division:
    """The devices of this machine for the engines of the part.

    Nodes with one address share a machine, so those of other parts count too.
    """
    nodes = _on_this_machine(region, part)
    found = divided(region, nodes, gpus=gpus_here(environment), cores=cores_here())
    names = _instances_of(region, part)
    mine = {name: told for name, told in found.environment.items() if name in names}
    others = {
        gpu for name, told in found.environment.items() if name not in names for gpu in _gpus(told)
    }
    return Division(mine, found.notes, names, frozenset(others))


def divided_for(
    region: RegionSpec, part: Part, environment: Mapping[str, str], running: Division
) -> Division:
    """The devices of a changed part: engines that run keep theirs, new ones share what is left.

    Cores are not divided again: an engine that joins on the CPU is bound to none.
    """
    names = _instances_of(region, part)
    kept = {name: told for name, told in running.environment.items() if name in names}
    used = {gpu for told in kept.values() for gpu in _gpus(told)} | running.others
    for node in _on_this_machine(region, part):
        for item in node.instances:
            used |= set((_given(region, item, GPU_VARIABLE) or "").split(","))
    new = [
        node.model_copy(update={"instances": joining})
        for node in region.nodes
        if node.name in part.nodes
        and (joining := tuple(i for i in node.instances if i.name not in running.known))
    ]
    left = [gpu for gpu in gpus_here(environment) if gpu not in used]
    found = divided(region, new, gpus=left, cores=())
    return Division(kept | dict(found.environment), found.notes, names, running.others)


def gpus_here(environment: Mapping[str, str]) -> list[str]:
    """The GPUs that this process may use, as its environment names them or by number."""
    given = environment.get(GPU_VARIABLE)
    if given is not None:
        return [name for name in given.split(",") if name]
    return [str(number) for number in range(len(list(GPUS.glob("*"))))]


def cores_here() -> list[int]:
    """The CPUs that this process may run on."""
    return sorted(os.sched_getaffinity(0))


def _on_this_machine(region: RegionSpec, part: Part) -> list[NodeSpec]:
    """The nodes of the part, and those of other parts at their addresses."""
    hosts = {node.host for node in region.nodes if node.name in part.nodes}
    return [node for node in region.nodes if part.is_whole or node.host in hosts]


def _instances_of(region: RegionSpec, part: Part) -> frozenset[str]:
    nodes = (node for node in region.nodes if node.name in part.nodes)
    return frozenset(item.name for node in nodes for item in node.instances)


def _gpus(variables: Mapping[str, str]) -> list[str]:
    return variables.get(GPU_VARIABLE, "").split(",")


def _given(region: RegionSpec, instance: RegionInstance, variable: str) -> str | None:
    return (region.model_of(instance).env | instance.env).get(variable)


_Found = tuple[dict[str, dict[str, str]], list[str]]


def _gpus_of(region: RegionSpec, engines: Sequence[RegionInstance], gpus: Sequence[str]) -> _Found:
    if not gpus:
        return {}, []
    taken = {
        name
        for item in engines
        for name in (_given(region, item, GPU_VARIABLE) or "").split(",")
        if name
    }
    free = [name for name in gpus if name not in taken]
    wanting = [item for item in engines if _given(region, item, GPU_VARIABLE) is None]
    sizes = [region.num_workers_of(item) for item in wanting]
    if sum(sizes) > len(free):
        note = f"{len(wanting)} engines want {sum(sizes)} GPUs and {len(free)} are free"
        return {}, [f"{note}: none is assigned; give {GPU_VARIABLE} in env"]
    parts: dict[str, dict[str, str]] = {}
    for item, size in zip(wanting, sizes, strict=True):
        parts[item.name] = {GPU_VARIABLE: ",".join(free[:size])}
        free = free[size:]
    return parts, []


def _cores_of(
    region: RegionSpec, engines: Sequence[RegionInstance], cores: Sequence[int]
) -> _Found:
    wanting = [item for item in engines if _given(region, item, CORE_VARIABLE) is None]
    # Nobody knows here which cores an engine takes that binds itself.
    if len(wanting) < len(engines) or not wanting or not cores:
        return {}, []
    workers = sum(region.num_workers_of(item) for item in wanting)
    share = len(cores) // workers
    # Measured: also where some share a core, engines are faster than with threads on every core.
    notes = [] if share else [f"{workers} workers of engines have {len(cores)} CPU cores to share"]
    rest = cycle(cores)
    parts: dict[str, dict[str, str]] = {}
    for item in wanting:
        size = region.num_workers_of(item)
        groups = [",".join(map(str, islice(rest, max(1, share)))) for _ in range(size)]
        parts[item.name] = {CORE_VARIABLE: "|".join(groups)}
    return parts, notes
