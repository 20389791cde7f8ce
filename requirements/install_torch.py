"""Installs the build of torch for CPUs that a requirements file pins, and checks that it works.

PyPI has torch for CUDA, which is 2 GB large and does not work without CUDA's libraries. The build
for CPUs is at an index of PyTorch, which most settings of pip do not name. `make setup` runs

    python requirements/install_torch.py install requirements/cpu.txt
    python requirements/install_torch.py check

with the interpreter of the environment. The first asks the indexes that pip knows, then
`TORCH_INDEX`, the URL of an index or a folder with wheels. Both exit with status 1 and one line
that says what to set. Nothing is installed whose hash is not pinned.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

NAMED = "the URL of PyTorch's index for CPUs, or a folder with its wheel"
_PIN = re.compile(r"^torch==(\S+) \\\n(?:    --hash=\S+(?: \\)?\n?)+", re.MULTILINE)
_CHECK = "import torch; torch.zeros(1); print(torch.version.cuda or '')"


def main(words: list[str]) -> None:
    """Command line. SystemExit with a line on stderr if torch cannot be had."""
    match words:
        case ["install", path]:
            install(Path(path))
        case ["check"]:
            check()
        case _:
            raise SystemExit(__doc__)


def install(path: Path) -> None:
    """Install the torch that `path` pins. SystemExit if no index has it."""
    found = _PIN.search(path.read_text(encoding="utf-8"))
    if found is None:
        raise SystemExit(f"{path} does not pin torch with hashes")
    places: list[tuple[str, ...]] = [()]
    if index := os.environ.get("TORCH_INDEX", ""):
        is_url = "://" in index
        places.append(("--index-url", index) if is_url else ("--no-index", "--find-links", index))
    with tempfile.TemporaryDirectory() as directory:
        pin = Path(directory, "torch.txt")
        pin.write_text(found.group(0), encoding="utf-8")
        for options in places:
            done = _pip("install", "--no-deps", "--require-hashes", *options, "-r", str(pin))
            if done.returncode == 0:
                return
    lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
    why = lines[-1].removeprefix("ERROR: ") if lines else f"pip exits with {done.returncode}"
    raise SystemExit(
        f"pip cannot install torch {found.group(1)} ({why}): set TORCH_INDEX to {NAMED}"
    )


def check() -> None:
    """SystemExit if torch cannot be imported, or is a build for GPUs."""
    done = subprocess.run([sys.executable, "-c", _CHECK], capture_output=True, text=True)
    remedy = f"remove the environment and set TORCH_INDEX to {NAMED}"
    if done.returncode != 0:
        why = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise SystemExit(f"torch does not work here ({why}): {remedy}")
    if cuda := done.stdout.strip():
        raise SystemExit(f"torch is the build for CUDA {cuda}, not the one for CPUs: {remedy}")


def _pip(*words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]
    return subprocess.run(
        [*argv, "--progress-bar", "off", "--quiet"], capture_output=True, text=True
    )


if __name__ == "__main__":
    main(sys.argv[1:])
