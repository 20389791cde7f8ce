"""A region as systemd units: for each host its services, their files, and a target for all of them.

Pure: it takes a region and where things lie on the hosts, and returns texts.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from deploy.processes import module_argv, module_environment
from deploy.region.launch.arenas import arena_name
from deploy.region.launch.devices import divided
from deploy.region.launch.parts import Part, part_with
from deploy.region.launch.plan import PlannedProcess, Planner
from deploy.region.launch.ports import resolve_part
from deploy.region.launch.rundir import RunDirectory
from deploy.region.spec.region import NodeSpec, RegionSpec
from prfaas.engines.supervision.process import KILL_S

_TELLS_SYSTEMD: Final = ("agent", "front", "gateway")
"""Kinds of processes that say themselves when they serve, and that their event loops run."""
WATCHDOG_S: Final = 30
MAX_FILES: Final = 1 << 20
MAX_GPUS: Final = 64
_LISTENS: Final = (
    'until (: <"/dev/tcp/$0/$1") 2>/dev/null; do kill -0 "$MAINPID" || exit 1; sleep 2; done'
)
"""Waits until a port listens or the service's process has ended."""


@dataclass(frozen=True, slots=True)
class HostPaths:
    """Where things are on every host: the folder of files, the user, the interpreter."""

    config: Path
    user: str
    python: str


def rendered(region: RegionSpec, nodes: tuple[str, ...], paths: HostPaths) -> dict[str, str]:
    """The files of the host that has these nodes, by their paths below its folder: units in
    `systemd`, what the processes read in `config`.
    """
    part = part_with(region, nodes[0], nodes)
    runtime = f"prfaas/{region.name}"
    directory = RunDirectory(paths.config, Path("/run") / runtime)
    here = [node for node in region.nodes if node.name in nodes]
    # The first GPUs of the host, whichever machine writes the units. Cores are the host's to give.
    devices = divided(region, here, gpus=[str(number) for number in range(MAX_GPUS)], cores=())
    planner = Planner(resolve_part(region, part), directory, {}, devices.environment)
    processes = planner.processes()
    state = None if region.gateway.state else Path("/var/lib") / runtime
    files = {
        f"config/{path.name}": _of_units(text, state)
        for path, text in planner.files().items()
        if path != directory.region_file
    }
    for item in processes:
        # A file of its own, since `systemctl show` gives what is in a unit to every user.
        variables = [f"{name}={_in_file(value)}\n" for name, value in item.process.env.items()]
        files[f"config/{item.name}.env"] = "".join(variables)
        unit = _unit(item, region, part, paths, runtime)
        files[f"systemd/{unit_name(region, item.name)}"] = unit
    names = [item.name for item in processes]
    for node in here:
        if (arena := arena_name(region, node, paths.config)) is not None:
            name = f"arena.{node.name}"
            files[f"systemd/{unit_name(region, name)}"] = _arena_unit(node, region, arena, paths)
            names.append(name)
    wants = " ".join(unit_name(region, name) for name in names)
    files[f"systemd/{target_name(region)}"] = _ini(
        Unit={"Description": f"PrfaaS region {region.name}, {', '.join(nodes)}", "Wants": wants},
        Install={"WantedBy": "multi-user.target"},
    )
    return files


def unit_name(region: RegionSpec, process: str) -> str:
    """The name of a process's service."""
    return f"prfaas-{region.name}-{process}.service"


def target_name(region: RegionSpec) -> str:
    """The name of the unit that starts all services of a host."""
    return f"prfaas-{region.name}.target"


def _unit(
    item: PlannedProcess, region: RegionSpec, part: Part, paths: HostPaths, runtime: str
) -> str:
    after = ["network-online.target"]
    if item.kind != "agent":
        after += [unit_name(region, f"agent.{node}") for node in part.nodes]
    argv = [paths.python, *item.process.argv[1:]]
    tells = item.kind in _TELLS_SYSTEMD
    service: dict[str, str | tuple[str, ...]] = {
        "Type": "notify" if tells else "exec",
        "ExecStart": _command(argv),
        # The second is for what only a host has: tokens of a hub, API keys in a variable.
        "EnvironmentFile": (f"{paths.config}/{item.name}.env", f"-{paths.config}/environment"),
        "User": paths.user,
        "UMask": "0077",
        # The sockets of a host's processes; one service that stops must not remove them.
        "RuntimeDirectory": runtime,
        "RuntimeDirectoryMode": "0700",
        "RuntimeDirectoryPreserve": "yes",
        "StateDirectory": runtime if item.kind == "gateway" else "",
        "StateDirectoryMode": "0700",
        "Restart": "always",
        "RestartSec": "2",
        "KillMode": "mixed",
        "TimeoutStartSec": str(math.ceil(item.start_s)),
        "TimeoutStopSec": str(math.ceil(item.process.term_grace_s + KILL_S)),
        # A connection is a descriptor; engines pin memory for a GPU's copies.
        "LimitNOFILE": str(MAX_FILES),
        "LimitMEMLOCK": "infinity",
    }
    if tells:
        service["WatchdogSec"] = str(WATCHDOG_S)
    if item.kind == "engine":
        # An engine says nothing to systemd; its server listens once the model is loaded.
        at = urlsplit(item.address)
        wait = ["/bin/bash", "-c", _LISTENS, str(at.hostname), str(at.port)]
        service["ExecStartPost"] = _command(wait)
    return _ini(
        Unit={
            "Description": f"PrfaaS {item.kind} {item.name} of region {region.name}",
            "Wants": "network-online.target",
            "After": " ".join(after),
            "PartOf": target_name(region),
        },
        Service=service,
        Install={"WantedBy": target_name(region)},
    )


def _arena_unit(node: NodeSpec, region: RegionSpec, arena: str, paths: HostPaths) -> str:
    """Removes the kept arena when the whole region is stopped here: it begins before the agent, and
    therefore ends after it.
    """
    _, *module = module_argv("deploy.region.launch.arenas", str(node.agent.arena_dir), arena)
    stop = [paths.python, *module]
    return _ini(
        Unit={
            "Description": f"PrfaaS arena of node {node.name} of region {region.name}",
            "Before": unit_name(region, f"agent.{node.name}"),
            "PartOf": target_name(region),
        },
        Service={
            "Type": "oneshot",
            "RemainAfterExit": "yes",
            "ExecStop": _command(stop),
            "Environment": _environment(module_environment({})),
            "User": paths.user,
        },
        Install={"WantedBy": target_name(region)},
    )


def _of_units(text: str, state: Path | None) -> str:
    """The file of a process without the operator's key, which only a launcher makes (operators have
    API keys here). A gateway keeps what it learns in the folder `state`: /etc may be read-only.
    """
    document = json.loads(text)
    if "operator_key_file" in document:
        del document["operator_key_file"]
        if state is not None:
            document["gateway"]["state"] = str(state / Path(document["gateway"]["state"]).name)
    return json.dumps(document, indent=1)


def _ini(**sections: Mapping[str, str | tuple[str, ...]]) -> str:
    parts = []
    for name, values in sections.items():
        listed = {k: (v,) if isinstance(v, str) else v for k, v in values.items() if v}
        lines = [f"{key}={value}" for key, found in listed.items() for value in found]
        parts.append("\n".join([f"[{name}]", *lines]))
    return "\n\n".join(parts) + "\n"


def _command(argv: Iterable[str]) -> str:
    return " ".join(_quoted(word.replace("$", "$$")) for word in argv)


def _environment(variables: Mapping[str, str]) -> str:
    return " ".join(_quoted(f"{name}={value}") for name, value in variables.items())


def _in_file(value: str) -> str:
    """As the files of EnvironmentFile (systemd.exec(5)) need it."""
    return '"' + re.sub(r'(["\\`$])', r"\\\1", value) + '"'


def _quoted(word: str) -> str:
    """As systemd.syntax(7) and the specifiers of systemd.unit(5) need it."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'
