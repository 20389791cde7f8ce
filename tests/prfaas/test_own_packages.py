"""The packages of the project are told from others of the same name."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from prfaas.own_packages import PACKAGES, foreign_packages

ROOT = Path(__file__).resolve().parents[2]


def run(*argv: object, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [str(word) for word in argv], capture_output=True, text=True, env=kept | environment
    )


def test_the_checkout_is_its_own() -> None:
    assert foreign_packages(ROOT) == []


def test_a_package_that_hides_ours_is_named(tmp_path: Path) -> None:
    hiding = tmp_path / "scheduler"
    hiding.mkdir()
    (hiding / "__init__.py").touch()
    code = "from prfaas.own_packages import main; main()"
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = run(sys.executable, "-P", "-c", code, PYTHONPATH=path)
    assert done.returncode == 2
    assert done.stderr == (
        f"Python imports 'scheduler' from {hiding} instead of {ROOT / 'scheduler'}.\n"
        "Install prfaas into a virtual environment without it.\n"
    )


@dataclass(frozen=True)
class Installed:
    """A virtual environment with the project's wheel in it. Its dependencies come from this one."""

    directory: Path

    def pip(self, *words: object) -> None:
        python = self.directory / "bin" / "python"
        options = ("--disable-pip-version-check", "--quiet")
        done = run(sys.executable, "-m", "pip", *options, "--python", python, *words)
        assert done.returncode == 0, done.stderr

    def prfaas(self, *words: object) -> subprocess.CompletedProcess[str]:
        return run(self.directory / "bin" / "prfaas", *words)

    @property
    def site_packages(self) -> Path:
        (found,) = self.directory.glob("lib/python*/site-packages")
        return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, since setuptools writes beside its sources."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    built = tmp_path_factory.mktemp("wheel")
    options = ("--disable-pip-version-check", "--no-deps", "--no-build-isolation", "--quiet")
    done = run(sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", built, source)
    assert done.returncode == 0, done.stderr
    (path,) = built.iterdir()
    return path


@pytest.fixture
def installed(tmp_path: Path, wheel: Path) -> Installed:
    directory = tmp_path / "environment"
    assert run(sys.executable, "-m", "venv", "--without-pip", directory).returncode == 0
    installed = Installed(directory)
    outer = sysconfig.get_path("purelib")
    (installed.site_packages / "outer.pth").write_text(f"{outer}\n")
    installed.pip("install", "--no-deps", "--no-index", "--no-compile", wheel)
    return installed


def test_the_wheel_has_all_that_commands_read(installed: Installed) -> None:
    assert installed.prfaas("version").stdout.strip()
    for argv in (["plan", "example"], ["region", "schema"], ["up", "--help"]):
        done = installed.prfaas(*argv)
        assert (done.returncode, done.stderr) == (0, ""), argv
    for name in PACKAGES:
        data = {
            path.relative_to(ROOT)
            for path in (ROOT / name).rglob("*")
            if path.is_file() and path.suffix not in (".pyc", "")
        }
        missing = [path for path in data if not (installed.site_packages / path).exists()]
        assert missing == []


def colliding_wheel(directory: Path, *files: str) -> Path:
    """A distribution `scheduler` 9.1 with these files."""
    path = directory / "scheduler-9.1-py3-none-any.whl"
    contents = {name: f"# {name} of somebody else\n" for name in files}
    contents["scheduler-9.1.dist-info/METADATA"] = (
        "Metadata-Version: 2.1\nName: scheduler\nVersion: 9.1\n"
    )
    contents["scheduler-9.1.dist-info/WHEEL"] = (
        "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    record = "scheduler-9.1.dist-info/RECORD"
    lines = [f"{record},,"]
    for name, text in contents.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
        lines.append(f"{name},sha256={digest.decode()},{len(text)}")
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in contents.items():
            archive.writestr(name, text)
        archive.writestr(record, "\n".join(lines) + "\n")
    return path


def test_a_distribution_that_overwrote_files_is_named(installed: Installed, tmp_path: Path) -> None:
    assert installed.prfaas("version").returncode == 0
    other = colliding_wheel(tmp_path, "scheduler/__init__.py", "scheduler/job.py")
    installed.pip("install", "--no-deps", "--no-index", other)
    for argv in (["version"], ["gateway", "--help"]):
        done = installed.prfaas(*argv)
        assert done.returncode == 2
        assert done.stderr == (
            "scheduler 9.1 has overwritten files of prfaas: scheduler/__init__.py.\n"
            "Install prfaas into a virtual environment without it.\n"
        )


def test_files_of_others_that_overwrite_nothing_are_left_alone(
    installed: Installed, tmp_path: Path
) -> None:
    installed.pip(
        "install", "--no-deps", "--no-index", colliding_wheel(tmp_path, "scheduler/job.py")
    )
    assert installed.prfaas("version").returncode == 0


def test_a_file_that_was_edited_by_hand_is_left_alone(installed: Installed) -> None:
    edited = installed.site_packages / "scheduler" / "__init__.py"
    edited.write_text(edited.read_text() + "# edited\n")
    assert installed.prfaas("version").returncode == 0
