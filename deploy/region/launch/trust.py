"""Finds the keys and certificates of a run, for its processes and for commands of its user.

It makes none of them.
"""

from __future__ import annotations

from pathlib import Path

from deploy.region.launch.rundir import REGION_KEY, RegionState
from deploy.region.spec.region import RegionSpec
from kvmanager.config_files.fields import tls_files
from kvmanager.config_files.security import GrantsSection, RegionKeySection, credentials_of
from transport import Credentials, Role


def region_key_of(region: RegionSpec, made: Path, name: str) -> RegionKeySection | None:
    """The key of the process `name`: the region's file, or the one `made` for its run. None with
    TLS and where the network is trusted.
    """
    security = region.security
    if security.trusted_network or security.tls is not None:
        return None
    return RegionKeySection(file=security.region_key or made, region=region.name, name=name)


def grants_of(region: RegionSpec, file: Path) -> GrantsSection | None:
    """The key of grants in `file`, private or public; None where the network is trusted."""
    if region.security.trusted_network:
        return None
    return GrantsSection(file=file, region=region.name)


def run_credentials(region: RegionSpec, made: Path, role: Role) -> Credentials | None:
    """The credentials of one more process of the run, in this role."""
    tls = tls_files(region.security.tls)
    return credentials_of(tls, region_key_of(region, made, role), role)


def credentials_in(state: RegionState) -> Credentials | None:
    """The credentials of a command of the user, to call processes of this run."""
    path = Path(state.region_file)
    region = RegionSpec.model_validate_json(path.read_bytes())
    return run_credentials(region, path.parent / REGION_KEY, "operator")
