"""How the processes of a run know each other, and how commands of its user speak to them.

A region's file may name the files of keys; what it does not name is made for the run.
"""

from __future__ import annotations

from pathlib import Path

from deploy.region.launch.parts import Part
from deploy.region.launch.rundir import REGION_KEY, RegionState, RunDirectory
from deploy.region.spec.region import RegionSpec
from kvmanager.config_files.fields import tls_files
from kvmanager.config_files.security import GrantsSection, RegionKeySection, credentials_of
from kvmanager.private_files import write_private
from transport import Credentials, Role
from transport.grants import new_key_pair
from transport.region_key import new_key


def region_key_of(region: RegionSpec, made: Path, name: str) -> RegionKeySection | None:
    """The key of the process `name`: the region's file, or the one `made` for its run. None with
    TLS and where the network is trusted.
    """
    security = region.security
    if security.trusted_network or security.tls is not None:
        return None
    return RegionKeySection(file=security.region_key or made, region=region.name, name=name)


def engine_key_file(region: RegionSpec, directory: RunDirectory) -> Path:
    """The file with the key that engines demand."""
    return region.security.engine_key or directory.engine_key


def make_keys(region: RegionSpec, directory: RunDirectory, part: Part) -> None:
    """Write the keys that the region's file does not name. OSError."""
    security = region.security
    made = []
    if not (security.tls or security.region_key or security.trusted_network):
        made.append(directory.region_key)
    if security.engine_key is None:
        made.append(directory.engine_key)
    if part.has_gateway:
        made.append(directory.operator_key)
    for path in made:
        write_private(path, f"{new_key()}\n".encode())
    if security.granting_key is None and not security.trusted_network:
        private, public = new_key_pair()
        write_private(directory.granting_key, private)
        write_private(directory.granting_keys, public)


def grants_of(region: RegionSpec, file: Path) -> GrantsSection | None:
    """The key of grants in `file`, private or public; None where the network is trusted."""
    if region.security.trusted_network:
        return None
    return GrantsSection(file=file, region=region.name)


def run_credentials(region: RegionSpec, made: Path, role: Role) -> Credentials | None:
    """What one more process of the run shows to the others, where it has this role."""
    tls = tls_files(region.security.tls)
    return credentials_of(tls, region_key_of(region, made, role), role)


def credentials_in(state: RegionState) -> Credentials | None:
    """What a command of the user shows to the processes of this run."""
    path = Path(state.region_file)
    region = RegionSpec.model_validate_json(path.read_bytes())
    return run_credentials(region, path.parent / REGION_KEY, "operator")
