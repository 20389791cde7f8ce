"""Writes the SHA-256 of what may be installed behind every pin, and docs/licences.md.

`make pins` runs it after a version in one of the files was changed, or a range in pyproject.toml,
from which gpu.txt and what images hold are resolved anew. uv asks the package index for the
hashes of all files of a release, for every Python and machine; pip for licences.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).parent
LICENCES: Final = HERE.parent / "docs" / "licences.md"
PINNED: Final = ("cpu", "dev", "docs", "bench", "fuzz", "pins", "build")
RESOLVED: Final = "gpu"
IMAGE: Final = ("gateway", "agent", "redis", "dns", "kubernetes")
"""The extras that the image `prfaas` has."""

_PIN: Final = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;\\]+)(.*)$", re.MULTILINE)
_SPDX: Final = re.compile(r"[A-Za-z0-9 .()+-]{1,60}")
_FROM_THEIR_FILES: Final = {
    "atheris": "Apache-2.0",
    "cuda-toolkit": "NVIDIA Proprietary Software",
    "oss-harmony": "Apache-2.0",
    "quack-kernels": "Apache-2.0",
    "setuptools": "MIT",
    "torchcodec": "BSD-3-Clause",
}
"""Licences of packages whose metadata names none, from the files beside their code."""

_HEAD: Final = """# Licences

Every package that a file in `requirements/` pins, with the licence that its own metadata names.
`make pins` writes this page. PrfaaS itself is under the Apache License 2.0; it contains none of
these packages.

"""


def pins_of(path: Path) -> dict[str, str]:
    """Version by name of every pin in a requirements file, names as pip normalises them."""
    return {_normal(name): version for name, version, _ in _PIN.findall(path.read_text())}


def main() -> None:
    """Rewrite the files."""
    for name in PINNED:
        path = HERE / f"{name}.txt"
        # Where pip finds torch for CPUs. Others need the one with CUDA.
        wheels = os.environ.get("PIP_FIND_LINKS")
        options = ("--find-links", wheels) if wheels else ()
        _write(path, _compiled("--no-deps", *options, str(path)))
    target = ("--python-version", "3.11", "--python-platform", "x86_64-unknown-linux-gnu")
    names = ("gpu", "plan", "redis", "dns", "kubernetes", "traces")
    extras = [word for name in names for word in ("--extra", name)]
    _write(
        HERE / f"{RESOLVED}.txt", _compiled(*target, *extras, str(HERE.parent / "pyproject.toml"))
    )
    # The images have the same versions as hosts without them.
    same = (*target, "--constraint", str(HERE / f"{RESOLVED}.txt"))
    project = str(HERE.parent / "pyproject.toml")
    extras = [word for name in IMAGE for word in ("--extra", name)]
    _write(HERE / "image.txt", _compiled(*same, *extras, project))
    # vLLM's image has what vLLM needs, in versions of its own.
    base = _compiled(*same, project)
    brought = {_normal(name) for name, *_ in _PIN.findall(_compiled(*same, _engine_file()))}
    added = (p for p in _pins_with_hashes(base) if _normal(p.partition("==")[0]) not in brought)
    _write(HERE / "image-vllm.txt", "".join(added))
    names_of_files = (*PINNED, RESOLVED, "image", "image-vllm")
    found = {name: pins_of(HERE / f"{name}.txt") for name in names_of_files}
    LICENCES.write_text(_page(found), encoding="utf-8")


def _engine_file() -> str:
    """A file that requires what the extra `engine` does, and nothing else."""
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
    path = Path(tempfile.mkdtemp(), "engine.in")
    path.write_text("\n".join(project["optional-dependencies"]["engine"]))
    return str(path)


def _pins_with_hashes(text: str) -> list[str]:
    """Each pin with the lines of its hashes, which are indented."""
    return re.findall(r"^\S+==.*\n(?:[ ]+--hash=.*\n)*", text, re.MULTILINE)


def _compiled(*arguments: str) -> str:
    options = ("--quiet", "--generate-hashes", "--no-header", "--no-annotate", "--upgrade")
    command = [sys.executable, "-m", "uv", "pip", "compile", *options, *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def _write(path: Path, pins: str) -> None:
    """Replace the pins; keep the comment above them, and hashes of pins that stay as they are."""
    before = path.read_text()
    comment = [line for line in before.splitlines() if line.startswith("#")]
    lacking = [match for match in _PIN.finditer(pins) if "\\" not in match.group(3)]
    for match in lacking:  # uv hashes nothing that lies in a local directory
        pin = match.group(0)
        hashes = sorted({_hash_here(pin), *_hashes_of(pin, before)})
        lines = (f"    --hash=sha256:{sha256}" for sha256 in hashes)
        pins = pins.replace(f"{pin}\n", " \\\n".join([pin, *lines]) + "\n")
    path.write_text("\n".join([*comment, pins]))


def _hash_here(pin: str) -> str:
    """SHA-256 of the file that pip would install on this machine."""
    (item,) = _report([pin])
    return str(item["download_info"]["archive_info"]["hashes"]["sha256"])


def _hashes_of(pin: str, text: str) -> list[str]:
    """SHA-256 of each file that stands behind a pin of exactly this version."""
    behind = r" \\\n((?:    --hash=\S+(?: \\)?\n?)+)"
    found = re.search(f"^{re.escape(pin)}{behind}", text, re.MULTILINE)
    return re.findall(r"sha256:([0-9a-f]{64})", found.group(1)) if found else []


def _report(requirements: Sequence[str], *options: str) -> list[dict[str, Any]]:
    """The packages that pip would install, with metadata. Nothing is installed."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory, "report.json")
        wanted = Path(directory, "wanted.txt")
        wanted.write_text("\n".join(requirements))
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--no-deps"]
        command += ["--ignore-installed", "--report", str(report), *options, "-r", str(wanted)]
        subprocess.run(command, check=True)
        return list(json.loads(report.read_text())["install"])


def _page(found: Mapping[str, Mapping[str, str]]) -> str:
    rows = {}
    for pins in found.values():
        for item in _report([f"{name}=={version}" for name, version in pins.items()]):
            rows[_normal(item["metadata"]["name"])] = _licence(item["metadata"])
    table = (
        f"| {name} | {rows[name]} | {', '.join(file for file in found if name in found[file])} |"
        for name in sorted(rows)
    )
    return _HEAD + "\n".join(["| package | licence | pinned in |", "|---|---|---|", *table]) + "\n"


def _licence(metadata: Mapping[str, Any]) -> str:
    """The SPDX expression, a short name, or the classifiers; RuntimeError where nothing says it."""
    short = metadata.get("license") or ""
    classifiers: Iterable[str] = metadata.get("classifier", ())
    names = [text.rpartition(" :: ")[2] for text in classifiers if text.startswith("License ::")]
    licence = metadata.get("license_expression") or (short if _SPDX.fullmatch(short) else "")
    licence = licence or " / ".join(names) or short.strip().partition("\n")[0].strip()
    licence = licence or _FROM_THEIR_FILES.get(_normal(metadata["name"]), "")
    if not licence:
        raise RuntimeError(f"{metadata['name']} does not say its licence: look it up, add it here")
    return licence


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    main()
