"""What `prfaas up` would start for a whole region on this machine. Nothing is started.

It is the only place of the golden tests that knows the launcher.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from itertools import count
from pathlib import Path

from prfaas_commands import plain

from deploy.region.launch.launcher import RunningRegion
from deploy.region.launch.plan import PlannedProcess
from deploy.region.spec.loading import load_region

_ENVIRONMENT = {"PATH": "/usr/bin", "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(32)))}
_OWN = ("region.json", "wanted.json", "state.json")
"""Files of the launcher, which no process reads."""
_PORT = re.compile(r"(?<![\w.])(?:2\d{4}|3[01]\d{3}|32000)(?![\w.])")
"""Ports that the launcher chooses at random."""
_ARENA = re.compile(r"(?<=-)[0-9a-f]{12}(?=\")")
"""A digest of the directory of the run, in names of arenas."""


class PortsInOrder:
    """Stands in for the module `random` of the launcher, which chooses ports by it."""

    def Random(self) -> PortsInOrder:
        return PortsInOrder()

    def __init__(self) -> None:
        self._ports = count(20000)

    def randint(self, first: int, last: int) -> int:
        return next(self._ports)


class _Seen(Exception):
    """All processes are known."""


def launched(file: Path, variables: Mapping[str, str], root: Path) -> dict[str, str]:
    """For each process how it is started, and the files that they read, by name. `root` is where
    the region would run.
    """
    return asyncio.run(_launched(file, variables, root))


async def _launched(file: Path, variables: Mapping[str, str], root: Path) -> dict[str, str]:
    region = load_region(file, variables)
    planned: list[PlannedProcess] = []
    texts: dict[str, str] = {}

    def look(item: PlannedProcess) -> PlannedProcess:
        planned.append(item)
        gateways = [one for one in planned if one.kind == "gateway"]
        if len(gateways) < len(region.gateway_nodes):
            return item
        # Gateways come last. The run's directory is there until `start` has failed.
        texts.update(_texts(running, planned))
        raise _Seen

    running = RunningRegion(region, root, environment=_ENVIRONMENT, adapt=look)
    try:
        await running.start()
    except _Seen:
        return texts
    raise AssertionError("the region has started")


def _texts(running: RunningRegion, planned: list[PlannedProcess]) -> dict[str, str]:
    texts = {f"{item.name}.process": _process(item) for item in planned}
    directory = running.directory
    for path in sorted(directory.root.glob("*.json")):
        if path.name not in _OWN:
            texts[path.name] = path.read_text(encoding="utf-8") + "\n"
    names = {str(directory.root): "$RUN", str(directory.sockets): "$SOCKETS"}
    # The port by which a process is known has its name.
    ports = {item.address.rpartition(":")[2]: f"<{item.name}>" for item in planned}

    def named(found: re.Match[str]) -> str:
        return ports.setdefault(found[0], f"<port-{len(ports)}>")

    return {
        name: _ARENA.sub("<digest>", _PORT.sub(named, plain(text, names)))
        for name, text in texts.items()
    }


def _process(item: PlannedProcess) -> str:
    """A line for each word of its command and for each variable that it does not inherit."""
    process = item.process
    lines = [
        f"{item.kind} at {item.address}",
        f"may take {item.start_s:g} s to start and {process.term_grace_s:g} s to end",
        *process.argv,
    ]
    own = {name: text for name, text in process.env.items() if _ENVIRONMENT.get(name) != text}
    lines += [f"{name}={text}" for name, text in sorted(own.items())]
    return "\n".join([*lines, ""])
