"""Keys of grants: a pair made for the run, or the region's own, which must fit together."""

from __future__ import annotations

from pathlib import Path

import pytest
from granting import grant_files

from deploy.region.launch.rundir import RunDirectory
from deploy.region.launch.trust import checks_grants, make_grant_keys, signs_grants
from deploy.region.spec.loading import load_region
from deploy.region.spec.region import RegionSpec
from kvmanager.config_files.problems import FileError
from transport.grants import load_private_key, load_public_keys

EXAMPLE = Path(__file__).parents[3] / "deploy" / "region" / "examples" / "demo.yaml"


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    root = tmp_path / "run"
    root.mkdir()
    return RunDirectory(root, root / "sockets")


def region(folder: Path, security: str = "") -> RegionSpec:
    path = folder / "region.yaml"
    path.write_text(f"{EXAMPLE.read_text()}{security}\n")
    return load_region(path, {"MODEL": "/models/tiny"})


OWN = "security: {granting_key: granting.key, granting_keys: granting.pub}"


def is_pair(wanted: RegionSpec, directory: RunDirectory) -> bool:
    private = signs_grants(wanted, directory.granting_key)
    public = checks_grants(wanted, directory.granting_keys)
    assert private is not None
    assert public is not None
    key = load_private_key(private.grant_file)
    return key.public_key() in load_public_keys(public.grant_file)


def test_a_run_makes_a_pair(tmp_path: Path, directory: RunDirectory) -> None:
    wanted = region(tmp_path)
    make_grant_keys(wanted, directory)
    assert is_pair(wanted, directory)
    assert directory.granting_key.stat().st_mode & 0o777 == 0o600


def test_the_pair_of_a_region_is_used_and_left_alone(
    tmp_path: Path, directory: RunDirectory
) -> None:
    private, public = grant_files(tmp_path)
    # The key of before stays until no grant that it signed is under way.
    old, _ = grant_files(tmp_path, "old")
    texts = (tmp_path / "old.pub").read_bytes() + public.path.read_bytes()
    public.path.write_bytes(texts)
    wanted = region(tmp_path, OWN)
    make_grant_keys(wanted, directory)
    assert list(directory.root.iterdir()) == []
    assert public.path.read_bytes() == texts
    signs, checks = signs_grants(wanted, Path("made")), checks_grants(wanted, Path("made"))
    assert signs is not None
    assert checks is not None
    assert (signs.file, checks.file) == (private.path, public.path)
    old.path.replace(private.path)
    make_grant_keys(wanted, directory)


def test_keys_that_do_not_fit_start_nothing(tmp_path: Path, directory: RunDirectory) -> None:
    grant_files(tmp_path)
    _, other = grant_files(tmp_path, "other")
    wanted = region(tmp_path, OWN)
    (tmp_path / "granting.pub").write_bytes(other.path.read_bytes())
    with pytest.raises(FileError, match=r"security\.granting_keys: it does not have the public"):
        make_grant_keys(wanted, directory)
    (tmp_path / "granting.pub").unlink()
    with pytest.raises(FileError, match=r"security\.granting_keys: cannot use .* No such file"):
        make_grant_keys(wanted, directory)
    (tmp_path / "granting.key").chmod(0o644)
    with pytest.raises(FileError, match=r"security\.granting_key: cannot use .* mode 0644"):
        make_grant_keys(wanted, directory)


def test_a_trusted_network_needs_no_grants(tmp_path: Path, directory: RunDirectory) -> None:
    wanted = region(tmp_path, "security: {trusted_network: true}")
    make_grant_keys(wanted, directory)
    assert list(directory.root.iterdir()) == []
    assert signs_grants(wanted, directory.granting_key) is None
