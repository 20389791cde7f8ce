"""Follows the gateway's own file: limits and rights of tenants change without a restart, and
instances of the fronts that it has inside join and leave.

What else changed there is named in a warning and waits for a restart. A file that cannot be used
changes nothing, and a warning says so.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from deploy.gateway.config import GatewayConfig
from deploy.gateway.file import GatewayFile, PdSource, PrefillSource, load_gateway_file
from deploy.gateway.reload import changed_settings, with_live
from kvmanager.config_files.followed_files import follow
from kvmanager.config_files.problems import FileError
from prfaas.engines.instance import InstanceSpec
from prfaas.engines.members import MemberChanges, member_changes
from transport.errors import LocalError

logger = logging.getLogger("prfaas.deploy.gateway")

SourceT = TypeVar("SourceT", PdSource, PrefillSource)


async def follow_own_file(
    path: Path,
    running: GatewayFile,
    use: Callable[[GatewayConfig], None],
    change_members: Callable[[str, MemberChanges], None],
    again: asyncio.Event | None = None,
) -> None:
    """Call `use` with each gateway section that the file has and that changes anything live, and
    `change_members` with what changes in a cluster's list of instances, until cancelled. `running`
    is what the gateway read there at its start. Setting `again` reads it once more.
    """

    def load() -> tuple[GatewayFile, GatewayFile, list[str]]:
        """The file, what becomes of the one that runs, and what is weak about it."""
        try:
            read = load_gateway_file(path)
            gateway = with_live(running.gateway, read.gateway)
            weak = list(weaknesses(read))
        except (FileError, ValueError, OSError) as error:
            message = f"the gateway's settings stay as they were: {error}"
            raise LocalError("gateway_file", message) from error
        return read, running.model_copy(update={"gateway": gateway}), weak

    def apply(loaded: tuple[GatewayFile, GatewayFile, list[str]]) -> None:
        nonlocal running
        read, after, weak = loaded
        for name, (before, wanted) in _instances(running, read).items():
            changes = member_changes(before, wanted)
            if changes.leaving or changes.joining:
                change_members(name, changes)
        running, after = _with_instances(running, read), _with_instances(after, read)
        made = changed_settings(running, after)
        if made:
            running = after
            use(after.gateway)
            logger.info("changed without a restart: %s", ", ".join(made))
            for weakness in weak:
                logger.warning("%s", weakness)
        if waiting := _needs_restart(after, read):
            logger.warning("changed, but needs a restart of the gateway: %s", ", ".join(waiting))

    # A tenant may get its limits before its key, which makes the file right without a change of it.
    keys = () if running.api_keys_file is None else (running.api_keys_file,)
    await follow((path, *keys), load, apply, again)


def weaknesses(file: GatewayFile) -> Iterator[str]:
    """Yield, for the log, what tenants and other users of the host may do. Looks at files."""
    config, path = file.gateway, file.api_keys_file
    if not config.operators and len({key.tenant for key in config.api_keys}) > 1:
        yield "no API key opens the pages of operators: name tenants in gateway.operators"
    if path is not None and path.stat().st_mode & 0o027:
        yield f"others may read {path}: chmod 600 it"


def _sources(file: GatewayFile) -> dict[str, PdSource | PrefillSource]:
    sources: tuple[PdSource | PrefillSource, ...] = (*file.pd, *file.prefill)
    return {source.name: source for source in sources}


def _instances(
    running: GatewayFile, read: GatewayFile
) -> dict[str, tuple[tuple[InstanceSpec, ...], tuple[InstanceSpec, ...]]]:
    """The instances before and after, of clusters whose fronts stay in the gateway."""
    before, after = _sources(running), _sources(read)
    return {
        name: (source.instances, after[name].instances)
        for name, source in before.items()
        if source.instances and name in after and after[name].instances
    }


def _with_instances(file: GatewayFile, read: GatewayFile) -> GatewayFile:
    """`file` with the instances of `read`."""
    found = _instances(file, read)

    def changed(source: SourceT) -> SourceT:
        wanted = found.get(source.name)
        return source if wanted is None else source.model_copy(update={"instances": wanted[1]})

    update = {"pd": tuple(map(changed, file.pd)), "prefill": tuple(map(changed, file.prefill))}
    return file.model_copy(update=update)


def _needs_restart(running: GatewayFile, read: GatewayFile) -> list[str]:
    changed = changed_settings(running, read)
    # Keys in a file of their own are followed there.
    is_followed = read.api_keys_file is not None and read.api_keys_file == running.api_keys_file
    return [path for path in changed if not (is_followed and path == "gateway.api_keys")]
