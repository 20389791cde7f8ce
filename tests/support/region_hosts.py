"""Hosts of one region file: each has the file and its keys, and starts its own part.

A host is a folder. Its commands run on this machine as they are, unless `run_in` wraps them, for
example to put them into a network namespace.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 120.0


def prfaas(*words: str) -> list[str]:
    """The command line of a `prfaas` command."""
    return [sys.executable, "-m", "deploy.cli", *words]


def told(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        argv, check=False, capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE_S
    )


def make_keys(folder: Path, file: Path) -> None:
    """Make the keys and certificates of a region's hosts in `folder`, one folder for each."""
    made = told(prfaas("certs", "init", str(folder), str(file)))
    assert made.returncode == 0, made.stderr


@dataclass
class RegionHost:
    """A host with its copy of the region's file and its keys; `up` starts the part of its node."""

    node: str
    folder: Path
    run_in: Callable[[Sequence[str]], list[str]] = list
    launcher: subprocess.Popen[str] | None = None

    @property
    def run_dir(self) -> str:
        return str(self.folder / "run")

    def up(self) -> dict[str, Any]:
        """Start, and return what is said when the part runs."""
        self.begin()
        return self.ready()

    def begin(self) -> None:
        """Start without waiting; `ready` waits."""
        words = ["up", str(self.folder / "region.yaml"), "--node", self.node]
        with (self.folder / "stderr").open("w") as stderr:
            self.launcher = subprocess.Popen(
                self._prfaas(*words, "--run-dir", self.run_dir, "--json"),
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                cwd=ROOT,
            )

    def ready(self) -> dict[str, Any]:
        """What the launcher says when its part runs."""
        assert self.launcher is not None
        assert self.launcher.stdout is not None
        for line in self.launcher.stdout:
            event: dict[str, Any] = json.loads(line)
            if event["event"] == "ready":
                return event
        pytest.fail(f"{self.node} ended: {(self.folder / 'stderr').read_text()}")

    def tell(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a `prfaas` command for this host's run to its end."""
        return told(self._prfaas(*words, "--run-dir", self.run_dir))

    def status(self) -> dict[str, Any]:
        """What `prfaas status` says; it exits with 1 while a process does not serve."""
        shown = self.tell("status", "--json")
        assert shown.returncode in (0, 1), shown.stderr
        status: dict[str, Any] = json.loads(shown.stdout)
        return status

    def pid(self, process: str) -> int | None:
        """The process id, on this host, of a process of the part; None while it is started."""
        for item in self.status()["state"]["processes"]:
            if item["name"] == process:
                return None if item["pid"] is None else int(item["pid"])
        raise AssertionError(f"{self.node} has no process {process}")

    def down(self) -> str:
        """Stop the part, and return what is said."""
        said = self.tell("down")
        assert said.returncode == 0, said.stderr
        assert self.launcher is not None
        assert self.launcher.wait(PATIENCE_S) == 0
        self.close()
        return said.stdout

    def close(self) -> None:
        """End the launcher if it runs."""
        if self.launcher is not None:
            if self.launcher.poll() is None:
                self.launcher.kill()
            self.launcher.communicate()
            self.launcher = None

    def _prfaas(self, *words: str) -> list[str]:
        return self.run_in(prfaas(*words))
