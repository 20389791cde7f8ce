"""`make setup` gets torch for CPUs from the index that has it, or says in one line what to set."""

from __future__ import annotations

import base64
import hashlib
import re
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from built_wheel import ROOT, Installed, run

SCRIPT = ROOT / "requirements" / "install_torch.py"
WORKS = (
    "class version: cuda = None\n"
    "def zeros(size): return size\n"
)  # fmt: skip
FOR_GPUS = "raise OSError('libcudart.so.13: cannot open shared object file')\n"


def torch_wheel(folder: Path, version: str, code: str) -> str:
    """A wheel of torch in a folder that serves as an index; its SHA-256."""
    folder.mkdir(exist_ok=True)
    info = f"torch-{version}.dist-info"
    files = {
        "torch.py": code,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\n"
        "Tag: py3-none-any\n",
    }
    lines = [f"{info}/RECORD,,"]
    for name, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
        lines.append(f"{name},sha256={digest.decode()},{len(text)}")
    files[f"{info}/RECORD"] = "\n".join(lines) + "\n"
    path = folder / f"torch-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return hashlib.sha256(path.read_bytes()).hexdigest()


@dataclass(frozen=True)
class Machine:
    """A machine whose pip knows an index with torch for GPUs alone, as PyPI has it."""

    environment: Installed
    directory: Path

    def pin(self, sha256: str) -> Path:
        path = self.directory / "cpu.txt"
        path.write_text(f"torch==9.0+cpu \\\n    --hash=sha256:{sha256}\nzmq==1.0\n")
        return path

    def script(self, *words: object, index: Path) -> subprocess.CompletedProcess[str]:
        return run(
            self.environment.python,
            SCRIPT,
            *words,
            PIP_CONFIG_FILE="/dev/null",
            PIP_NO_INDEX="1",
            PIP_FIND_LINKS=str(self.directory / "plain"),
            TORCH_INDEX=str(index),
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    environment = Installed(tmp_path / "environment")
    done = run(sys.executable, "-m", "venv", "--without-pip", environment.directory)
    assert done.returncode == 0, done.stderr
    # A copy of its own takes venv many seconds. To import pip would end setuptools' shim for
    # distutils in this process.
    (environment.site_packages / "pip").symlink_to(Path(sysconfig.get_path("purelib"), "pip"))
    torch_wheel(tmp_path / "plain", "9.0", FOR_GPUS)
    return Machine(environment, tmp_path)


def test_torch_for_cpus_is_taken_from_the_index_that_has_it(machine: Machine) -> None:
    index = machine.directory / "pytorch"
    pins = machine.pin(torch_wheel(index, "9.0+cpu", WORKS))
    done = machine.script("install", pins, index=index)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    done = machine.script("check", index=index)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_one_line_says_what_to_set_where_no_index_has_it(machine: Machine) -> None:
    empty = machine.directory / "empty"
    empty.mkdir()
    done = machine.script("install", machine.pin("0" * 64), index=empty)
    assert done.returncode == 1
    assert done.stderr == (
        "pip cannot install torch 9.0+cpu (No matching distribution found for torch==9.0+cpu): set "
        "TORCH_INDEX to the URL of PyTorch's index for CPUs, or a folder with its wheel\n"
    )


def test_a_torch_of_another_hash_is_not_installed(machine: Machine) -> None:
    index = machine.directory / "pytorch"
    torch_wheel(index, "9.0+cpu", WORKS)
    done = machine.script("install", machine.pin("0" * 64), index=index)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "set TORCH_INDEX to the URL" in done.stderr
    assert "THESE PACKAGES DO NOT MATCH THE HASHES" in done.stderr


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (
            FOR_GPUS,
            "torch does not work here (OSError: libcudart.so.13: cannot open shared object file)",
        ),
        (
            WORKS.replace("None", "'13.0'"),
            "torch is the build for CUDA 13.0, not the one for CPUs",
        ),
    ],
)
def test_one_line_says_what_to_set_where_torch_is_of_no_use(
    machine: Machine, code: str, why: str
) -> None:
    torch_wheel(machine.directory / "plain", "9.0", code)
    machine.environment.install(machine.directory / "plain" / "torch-9.0-py3-none-any.whl")
    done = machine.script("check", index=machine.directory)
    assert done.returncode == 1
    assert done.stderr == (
        f"{why}: remove the environment and set TORCH_INDEX to the URL of PyTorch's index "
        "for CPUs, or a folder with its wheel\n"
    )


def test_setup_installs_torch_before_all_else_and_checks_it_before_it_is_done() -> None:
    """What `make demo` and `make test` begin with, as make would run it."""
    argv = ("make", "-n", "-C", ROOT, "setup", "VENV=/nonexistent/environment")
    done = run(*argv)
    assert done.returncode == 0, done.stderr
    steps = [
        "install_torch.py install requirements/cpu.txt",
        "--require-hashes --no-compile -r requirements/cpu.txt",
        "install_torch.py check",
        "touch ",
    ]
    places = [done.stdout.index(step) for step in steps]
    assert places == sorted(places)
    for goal in ("demo", "test"):
        assert re.search(rf"^{goal}: setup$", (ROOT / "Makefile").read_text(), re.MULTILINE)
