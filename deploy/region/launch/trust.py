"""Finds the keys and certificates of a run, for its processes and for commands of its user.

It makes only the keys that the region's file does not name.
"""

from __future__ import annotations

from pathlib import Path

from deploy.region.launch.parts import Part
from deploy.region.launch.rundir import REGION_KEY, RegionState, RunDirectory
from deploy.region.spec.region import RegionSpec
from kvmanager.config_files.fields import tls_files
from kvmanager.config_files.problems import FileError, Problem
from kvmanager.config_files.security import GrantsSection, RegionKeySection, credentials_of
from transport import Credentials, Role
from transport.errors import LocalError
from transport.grants import load_private_key, load_public_keys, new_key_pair
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


def signs_grants(region: RegionSpec, made: Path) -> GrantsSection | None:
    """The gateway's key of grants: the region's file, or the one `made` for its run. None where the
    network is trusted.
    """
    return _grants(region, region.security.granting_key or made)


def checks_grants(region: RegionSpec, made: Path) -> GrantsSection | None:
    """The public keys with which agents check grants, as `signs_grants`."""
    return _grants(region, region.security.granting_keys or made)


def make_keys(region: RegionSpec, directory: RunDirectory, part: Part) -> None:
    """Make the keys of this run that the region does not name. FileError, OSError."""
    made = []
    key = region_key_of(region, directory.region_key, "operator")
    if key is not None and key.file == directory.region_key:
        made.append(directory.region_key)
    if region.security.engine_key is None:
        made.append(directory.engine_key)
    if part.has_gateway:
        made.append(directory.operator_key)
    for path in made:
        directory.write(path, f"{new_key()}\n".encode())
    # Other hosts do not have the private key.
    if part.has_gateway:
        make_grant_keys(region, directory)


def make_grant_keys(region: RegionSpec, directory: RunDirectory) -> None:
    """Make the key pair of grants for this run, or look at the region's own. FileError."""
    private = signs_grants(region, directory.granting_key)
    public = checks_grants(region, directory.granting_keys)
    if private is None or public is None:
        return
    if region.security.granting_key is None:
        made_private, made_public = new_key_pair()
        directory.write(private.file, made_private)
        directory.write(public.file, made_public)
        return
    try:
        key = load_private_key(private.grant_file)
        known = load_public_keys(public.grant_file)
    except LocalError as error:
        raise _unusable(region, error.code, error.message) from error
    # Else agents would refuse whatever the gateway signs, and no KVCache would ever move.
    if key.public_key() not in known:
        message = f"it does not have the public key of {private.file}"
        raise _unusable(region, "granting_keys", message)


def _grants(region: RegionSpec, file: Path) -> GrantsSection | None:
    return None if region.security.trusted_network else GrantsSection(file=file, region=region.name)


def _unusable(region: RegionSpec, setting: str, message: str) -> FileError:
    return FileError(f"region {region.name}", [Problem(("security", setting), message)])


def run_credentials(region: RegionSpec, made: Path, role: Role) -> Credentials | None:
    """The credentials of one more process of the run, in this role."""
    tls = tls_files(region.security.tls)
    return credentials_of(tls, region_key_of(region, made, role), role)


def credentials_in(state: RegionState) -> Credentials | None:
    """The credentials of a command of the user, to call processes of this run."""
    path = Path(state.region_file)
    region = RegionSpec.model_validate_json(path.read_bytes())
    return run_credentials(region, path.parent / REGION_KEY, "operator")
