"""Wheels and source distributions of a copy of the project, and environments with one of them.

Nothing is downloaded: what builds is in this environment, and the dependencies of what is installed
come from here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from dataclasses import dataclass
from pathlib import Path

from prfaas.own_packages import PACKAGES

ROOT = Path(__file__).resolve().parents[2]
VERSION = str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


def run(*argv: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command without the search path of this checkout."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [str(word) for word in argv], capture_output=True, text=True, env=kept | environment
    )


def copy_of_sources(directory: Path) -> Path:
    """The files that a distribution is built from; setuptools writes beside them."""
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, directory)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, directory / name, ignore=shutil.ignore_patterns("__pycache__"))
    return directory


def build(kind: str, source: Path, out: Path) -> Path:
    """The `kind` of distribution, wheel or sdist, of the project in `source`."""
    code = (
        "import os, sys; from setuptools import build_meta; os.chdir(sys.argv[1]);"
        f"build_meta.build_{kind}(sys.argv[2])"
    )
    done = run(sys.executable, "-W", "ignore", "-c", code, source, out)
    assert done.returncode == 0, done.stderr
    (path,) = out.iterdir()
    return path


@dataclass(frozen=True)
class Installed:
    """A virtual environment. Packages that it lacks come from the environment of the tests."""

    directory: Path

    @classmethod
    def make(cls, directory: Path) -> Installed:
        """An environment without the project, even where the one of the tests has a copy."""
        done = run(sys.executable, "-m", "venv", "--without-pip", directory)
        assert done.returncode == 0, done.stderr
        installed = cls(directory)
        outer = sysconfig.get_path("purelib")
        (installed.site_packages / "outer.pth").write_text(f"{outer}\n")
        return installed

    def pip(self, *words: object) -> None:
        """Run pip on the environment, without the settings that pip has on this machine: they may
        constrain versions.
        """
        options = ("--disable-pip-version-check", "--quiet", "--python", self.python)
        done = run(sys.executable, "-m", "pip", *options, *words, PIP_CONFIG_FILE=os.devnull)
        assert done.returncode == 0, done.stderr

    def install(self, *wheels: Path) -> None:
        """Install one wheel after another, without dependencies."""
        for wheel in wheels:
            self.pip("install", "--no-deps", "--no-index", "--no-compile", wheel)

    def prfaas(self, *words: object) -> subprocess.CompletedProcess[str]:
        """Run the installed command."""
        return run(self.directory / "bin" / "prfaas", *words)

    @property
    def python(self) -> Path:
        """The interpreter of the environment."""
        return self.directory / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        """Where packages are installed."""
        (found,) = self.directory.glob("lib/python*/site-packages")
        return found
