"""Whether the packages of this project are its own files.

The project installs seven top-level packages, some under names that others use as well (PyPI has a
`scheduler` and a `deploy`). pip does not notice: the distribution that is installed last overwrites
files of the other, or the one that comes first in the search path hides the other. Every process
checks this before it imports anything else of the project, names the other distribution and says
how to mend it.

The check runs at each start, so it costs some milliseconds: it compares sizes and times, reads a
file only where these differ from the record of the installation, and looks at other distributions
only where it found something. It imports only the standard library.
"""

from __future__ import annotations

import csv
import importlib
import importlib.util
import os
import sys
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import NamedTuple

PROJECT = "prfaas"
PACKAGES = ("deploy", "kvmanager", "local_pd", "netmon", "prfaas", "scheduler", "transport")
MAX_SHOWN = 3
"""Most files that a message names."""


class Findings(NamedTuple):
    """Sentences about packages that are somebody else's, and about files that two installed."""

    problems: list[str]
    """The project cannot run; the last sentence says how to mend that."""
    warnings: list[str]
    """The project runs until somebody removes or upgrades the other distribution."""


class ForeignPackagesError(ImportError):
    """A package of this project is somebody else's. The message is `Findings.problems`."""


class _Record(NamedTuple):
    """What an installer noted about the project's files: (hash, size) by path below the root."""

    version: str
    files: dict[str, tuple[str, str]]
    written_ns: int


def main() -> None:
    """Entry point of the console script `prfaas`."""
    refuse_foreign_packages()
    # By name: `deploy` lies above this package and may only be imported after the check.
    importlib.import_module("deploy.cli").app(prog_name=PROJECT)


def refuse_foreign_packages() -> None:
    """Exit with status 2 and a message if a package of this project is somebody else's."""
    try:
        raise_if_foreign()
    except ForeignPackagesError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None


@cache
def raise_if_foreign() -> None:
    """Raises ForeignPackagesError. Prints warnings on stderr, once in a process."""
    problems, warnings = foreign_packages(Path(__file__).resolve().parents[1])
    if warnings:
        print(*warnings, file=sys.stderr, sep="\n")
    if problems:
        raise ForeignPackagesError("\n".join(problems))


def foreign_packages(root: Path) -> Findings:
    """What is wrong with the project's packages, which lie in `root`, a path without symbolic
    links.
    """
    record = _record(root)
    # A checkout, or an editable installation, records no files.
    changed, missing = _differences(root, record) if record else ([], [])
    problems, others = _hidden(root)
    if changed:
        owners = _owners(root, changed)
        # Whoever edits an installed file by hand may do so.
        if owners:
            paths = [path for path in changed if any(path in owned for owned in owners.values())]
            problems.append(
                f"{', '.join(owners)} has overwritten files of {PROJECT}: {_shown(paths)}."
            )
            others |= owners.keys()
    if missing:
        problems.append(
            f"Files of {PROJECT} are missing from {root}: {_shown(missing)}. The removal of "
            "another distribution that had installed them as well takes them away."
        )
    if problems:
        return Findings([*problems, _remedy(others, record)], [])
    return Findings([], _shared(root, record) if record else [])


def _hidden(root: Path) -> tuple[list[str], set[str]]:
    """A sentence for each package that Python does not import from `root`; whose they are."""
    problems: list[str] = []
    others: set[str] = set()
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            problems.append(f"The package {name!r} of {PROJECT} is missing from {root}.")
            continue
        found = Path(spec.origin).resolve().parent
        if found != root / name:
            owners = _owners(found.parent, [f"{name}/__init__.py"]).keys()
            whose = f" of {', '.join(owners)}" if owners else ""
            problems.append(
                f"Python imports {name!r}{whose} from {found} instead of {root / name}."
            )
            others |= owners
    return problems, others


def _remedy(others: Collection[str], record: _Record | None) -> str:
    apart = f"Install {PROJECT} into a virtual environment of its own"
    if record is None:
        return f"{apart}."
    removal = "".join(f"pip uninstall {name.split()[0]}; " for name in sorted(others))
    again = f"pip install --no-deps --force-reinstall {PROJECT}=={record.version}"
    return f"{apart}, or mend this one: {removal}{again}"


def _record(root: Path) -> _Record | None:
    found = list(root.glob(f"{PROJECT}-*.dist-info/RECORD"))
    if not found:
        return None
    path = max(found, key=lambda path: path.stat().st_mtime_ns)
    version = path.parent.name.removeprefix(f"{PROJECT}-").removesuffix(".dist-info")
    files = {
        name: (digest, size)
        for name, digest, size in csv.reader(path.read_text(encoding="utf-8").splitlines())
        if digest and name.partition("/")[0] in PACKAGES
    }
    return _Record(version, files, path.stat().st_mtime_ns)


def _differences(root: Path, record: _Record) -> tuple[list[str], list[str]]:
    """Files that are not as they were installed, and files that are gone."""
    changed, missing = [], []
    for name, (digest, size) in record.files.items():
        path = f"{root}/{name}"
        try:
            status = os.stat(path)
        except FileNotFoundError:
            missing.append(name)
            continue
        # Installers write the record last: what is not newer was not written since.
        if str(status.st_size) == size and status.st_mtime_ns <= record.written_ns:
            continue
        if not _has_digest(path, digest):
            changed.append(name)
    return changed, missing


def _has_digest(path: str, recorded: str) -> bool:
    # Imported here: few starts have a file to read.
    import base64
    import hashlib

    algorithm, _, expected = recorded.partition("=")
    with open(path, "rb") as file:
        digest = hashlib.new(algorithm, file.read()).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode() == expected


def _shared(root: Path, record: _Record) -> list[str]:
    """A sentence for each distribution whose files the project has overwritten."""
    directories = {name.rpartition("/")[0] for name in record.files}
    known = record.files.keys() | directories | {f"{package}/__pycache__" for package in PACKAGES}
    found = {f"{package}/{name}" for package in PACKAGES for name in os.listdir(root / package)}
    # The records of hundreds of distributions are read only where a stranger has left a file.
    if found <= known:
        return []
    return [
        f"{PROJECT} has overwritten files of {other}: {_shown(sorted(owned))}. Removing or "
        f"upgrading it breaks {PROJECT}, and it may not work itself. {_remedy([other], record)}"
        for other, owned in _owners(root, record.files).items()
    ]


def _owners(root: Path, names: Collection[str]) -> dict[str, set[str]]:
    """Those of the files `names` below `root` that each other distribution has installed, by its
    name and version.
    """
    # Imported here, since it takes longer than all other checks.
    from importlib.metadata import distributions

    wanted = set(names)
    owners = {}
    for other in distributions():
        if other.name == PROJECT or not other.files:
            continue
        if Path(str(other.locate_file(""))).resolve() == root:
            owned = wanted & {file.as_posix() for file in other.files}
            if owned:
                owners[f"{other.name} {other.version}"] = owned
    return dict(sorted(owners.items()))


def _shown(names: Collection[str]) -> str:
    first = ", ".join(list(names)[:MAX_SHOWN])
    return f"{first} and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else first


__all__ = [
    "PACKAGES",
    "Findings",
    "ForeignPackagesError",
    "foreign_packages",
    "main",
    "raise_if_foreign",
    "refuse_foreign_packages",
]
