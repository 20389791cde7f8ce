"""The wheel and the source distribution have what git has, and nothing else."""

from __future__ import annotations

import subprocess
import tarfile
import zipfile
from pathlib import Path

from built_wheel import ROOT, VERSION, Installed, build, copy_of_sources

from prfaas.own_packages import PACKAGES


def files_of(wheel: Path) -> dict[str, bytes]:
    """Content by name, without the record, whose order is the file system's."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/RECORD")]
        return {name: archive.read(name) for name in names}


def test_the_wheel_has_every_file_of_the_packages_that_git_has(wheel: Path) -> None:
    argv = ["git", "-C", str(ROOT), "ls-files", "-z", "--", *PACKAGES]
    listed = subprocess.run(argv, check=True, capture_output=True, text=True).stdout
    tracked = {name for name in listed.split("\0") if (ROOT / name).is_file() and name}
    packed = files_of(wheel)
    missing = sorted(tracked - packed.keys())
    assert missing == [], "add their endings to package-data in pyproject.toml"
    changed = [name for name in tracked if packed[name] != (ROOT / name).read_bytes()]
    assert changed == []
    assert {name.partition("/")[0] for name in packed} == {*PACKAGES, f"prfaas-{VERSION}.dist-info"}
    assert {f"{name}/py.typed" for name in PACKAGES} <= packed.keys()


def test_the_source_distribution_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    source, built, out = tmp_path / "source", tmp_path / "sdist", tmp_path / "wheel"
    for directory in (source, built, out):
        directory.mkdir()
    archive = build("sdist", copy_of_sources(source), built)
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    again = build("wheel", unpacked, out)
    assert again.name == wheel.name
    assert files_of(again) == files_of(wheel)


def test_the_version_is_the_one_of_pyproject(environment: Installed, wheel: Path) -> None:
    assert wheel.name == f"prfaas-{VERSION}-py3-none-any.whl"
    for words in (["version"], ["--version"]):
        assert environment.prfaas(*words).stdout == f"{VERSION}\n"


def test_installed_commands_find_the_files_that_they_read(environment: Installed) -> None:
    for argv in (["plan", "example"], ["region", "schema"], ["up", "--help"]):
        done = environment.prfaas(*argv)
        assert (done.returncode, done.stderr) == (0, ""), argv
