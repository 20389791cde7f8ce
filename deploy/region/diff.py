"""Finds the processes that a changed region file would start, stop and restart.

Both files are planned as their hosts plan them, and the processes of both plans are compared: the
command line, the environment and the file of each. It names settings, and never their values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from deploy.region.launch.parts import part_with, whole
from deploy.region.launch.plan import PlannedProcess, Planner
from deploy.region.launch.ports import resolve_part
from deploy.region.launch.rundir import RunDirectory
from deploy.region.spec.region import RegionSpec, gateway_process

_ROOT: Final = Path("/run/prfaas")
_CONFIG: Final = "--config"


@dataclass(frozen=True, slots=True)
class Change:
    """A change of one process, and the settings that differ if it restarts."""

    process: str
    kind: str
    node: str
    what: Literal["start", "stop", "restart"]
    settings: tuple[str, ...] = ()


def changes(old: RegionSpec, new: RegionSpec) -> list[Change]:
    """The changes from one region to the other; processes that stay are left out."""
    before, after = _processes(old), _processes(new)
    found = [
        Change(name, told.kind, told.node, "stop")
        for name, told in before.items()
        if name not in after
    ]
    for name, told in after.items():
        if name not in before:
            found.append(Change(name, told.kind, told.node, "start"))
        elif settings := _differing(before[name].settings, told.settings):
            found.append(Change(name, told.kind, told.node, "restart", settings))
    return found


@dataclass(frozen=True, slots=True)
class _Told:
    """A process with everything that it is told, as text by the name of the setting."""

    kind: str
    node: str
    settings: Mapping[str, str]


def _processes(region: RegionSpec) -> dict[str, _Told]:
    names = tuple(node.name for node in region.nodes)
    on_one_host = len({node.host for node in region.nodes}) == 1
    part = whole(region) if on_one_host else part_with(region, "all", names)
    planner = Planner(resolve_part(region, part), RunDirectory(_ROOT, _ROOT), {})
    files = planner.files()
    return {
        item.name: _Told(item.kind, node, {"node": node} | _settings(item, files))
        for item in planner.processes()
        for node in [_node_of(region, item)]
    }


def _node_of(region: RegionSpec, item: PlannedProcess) -> str:
    """The node on whose host the process runs."""
    if item.kind == "gateway":
        names = {gateway_process(region, node.name): node.name for node in region.gateway_nodes}
        return names[item.name]
    if item.kind == "front":
        return region.cluster(item.name.removeprefix("front.")).nodes[0].name
    if item.kind == "engine":
        return next(
            node.name for node in region.nodes if item.name in {i.name for i in node.instances}
        )
    # Names of nodes and links may have dots, but a link's own name says how many.
    prefixes = ["agent.", *(f"link.{link.name}." for link in region.links)]
    prefix = next(prefix for prefix in prefixes if item.name.startswith(prefix))
    return item.name.removeprefix(prefix)


def _settings(item: PlannedProcess, files: Mapping[Path, str]) -> dict[str, str]:
    argv = list(item.process.argv)
    settings = {f"environment {name}": text for name, text in item.process.env.items()}
    if _CONFIG in argv:
        document = json.loads(files[Path(argv[argv.index(_CONFIG) + 1])])
        return settings | _flat("", document)
    option, values = "command", list[str]()
    for word in [*argv, "--"]:
        if word.startswith("--"):
            settings[option] = " ".join([*settings.get(option, "").split(), *values])
            option, values = word, []
        else:
            values.append(word)
    return settings


def _flat(path: str, value: object) -> dict[str, str]:
    """The leaves of a document by their paths; a list is one leaf, unless its items have names."""
    if isinstance(value, dict):
        pairs = [(f"{path}.{key}" if path else key, item) for key, item in value.items()]
    elif isinstance(value, list) and all(
        isinstance(item, dict) and "name" in item for item in value
    ):
        pairs = [(f"{path}[{item['name']}]", item) for item in value]
    else:
        return {path: json.dumps(value, sort_keys=True)}
    flat: dict[str, str] = {}
    for inner, item in pairs:
        flat |= _flat(inner, item)
    return flat


def _differing(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[str, ...]:
    names = dict.fromkeys([*before, *after])
    return tuple(name for name in names if before.get(name) != after.get(name))
