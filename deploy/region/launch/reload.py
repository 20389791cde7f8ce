"""Hands limits and rights of tenants in a region's file to the region that runs.

Its gateway follows the file in the run directory that `prfaas up` wrote; this writes the file anew.
It does not know other settings, which need a restart, and starts nothing.
"""

from __future__ import annotations

from pathlib import Path

from deploy.gateway.api_keys import load_api_keys
from deploy.gateway.config import with_api_keys
from deploy.gateway.reload import Changes, changed_settings, with_live
from deploy.region.launch.parts import Part, whole
from deploy.region.launch.ports import ResolvedRegion
from deploy.region.launch.process_files import gateway_file, gateway_text, region_text
from deploy.region.launch.rundir import RunDirectory
from deploy.region.spec.region import RegionSpec, gateway_process
from kvmanager.config_files.problems import FileError, Problem
from kvmanager.private_files import write_private


def reload_region(root: Path, wanted: RegionSpec, part: Part | None = None) -> Changes:
    """Give the gateway of the run in `root` what changes live of `wanted`. Without a `part`, all of
    the region runs there.

    Raises FileError for settings that the gateway would not take, OSError.
    """
    root = root.resolve()
    directory = RunDirectory(root, root / "sockets")
    before = _read(directory.wanted_file)
    after = _with_live(before, wanted)
    running = _with_live(_read(directory.region_file), wanted)
    resolved = ResolvedRegion(running, relays=(), part=part or whole(running))
    files = {
        directory.gateway_file_of(gateway_process(running, node)): gateway_file(
            resolved, directory, node
        )
        for node in resolved.part.gateways
    }
    file = next(iter(files.values()))
    if file.api_keys_file is not None:
        try:
            with_api_keys(file.gateway, load_api_keys(file.api_keys_file))
        except (OSError, ValueError) as error:
            raise FileError(f"region {wanted.name}", [Problem((), str(error))]) from error
    # As it was written, which is how `before` was read.
    wanted = RegionSpec.model_validate_json(region_text(wanted))
    changes = Changes(changed_settings(before, after), changed_settings(after, wanted))
    if changes.made:
        write_private(directory.wanted_file, region_text(after).encode())
        write_private(directory.region_file, region_text(resolved.region).encode())
        for path, own in files.items():
            write_private(path, gateway_text(own).encode())
    return changes


def _read(path: Path) -> RegionSpec:
    return RegionSpec.model_validate_json(path.read_bytes())


def _with_live(region: RegionSpec, wanted: RegionSpec) -> RegionSpec:
    return region.model_copy(update={"gateway": with_live(region.gateway, wanted.gateway)})
