"""Whether the packages of this project are its own files.

The project installs seven top-level packages, some under names that others use as well (PyPI has a
`scheduler` and a `deploy`). pip does not notice: the distribution that is installed last overwrites
files of the other, or the one that comes first in the search path hides the other. The command
`prfaas` checks this before it runs anything else, and names the other distribution.

This module imports only the standard library.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Collection
from importlib.metadata import PackageNotFoundError, distribution, distributions
from pathlib import Path

PROJECT = "prfaas"
PACKAGES = ("deploy", "kvmanager", "local_pd", "netmon", "prfaas", "scheduler", "transport")
MAX_SHOWN = 3
"""Most overwritten files that a message names."""


def main() -> None:
    """Entry point of the console script `prfaas`."""
    refuse_foreign_packages()
    # By name: `deploy` lies above this package and may only be imported after the check.
    importlib.import_module("deploy.cli").app(prog_name=PROJECT)


def refuse_foreign_packages() -> None:
    """Exit with status 2 and a message if a package of this project is somebody else's."""
    problems = foreign_packages(Path(__file__).resolve().parents[1])
    if problems:
        print(*problems, file=sys.stderr, sep="\n")
        print(f"Install {PROJECT} into a virtual environment without it.", file=sys.stderr)
        raise SystemExit(2)


def foreign_packages(root: Path) -> list[str]:
    """What is wrong with the project's packages, a sentence each.

    They lie in the directory `root`, a path without symbolic links.
    """
    problems = []
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            problems.append(f"The package {name!r} of {PROJECT} is missing from {root}.")
            continue
        found = Path(spec.origin).resolve().parent
        if found != root / name:
            owners = _owners([found / "__init__.py"])
            whose = f" of {', '.join(owners)}" if owners else ""
            problems.append(
                f"Python imports {name!r}{whose} from {found} instead of {root / name}."
            )
    overwritten = _overwritten(root)
    if overwritten:
        names = [path.relative_to(root).as_posix() for path in overwritten]
        more = f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else ""
        problems.append(
            f"{', '.join(_owners(overwritten))} has overwritten files of {PROJECT}: "
            f"{', '.join(names[:MAX_SHOWN])}{more}."
        )
    return problems


def _overwritten(root: Path) -> list[Path]:
    """Files under `root` that are not as they were installed and that others have installed too.

    A checkout, or an editable installation, records no files.
    """
    try:
        files = distribution(PROJECT).files or []
    except PackageNotFoundError:
        return []
    changed = []
    for file in files:
        path = Path(str(file.locate())).resolve()
        if file.hash is None or root not in path.parents or file.parts[0] not in PACKAGES:
            continue
        digest = hashlib.new(file.hash.mode, path.read_bytes() if path.is_file() else b"").digest()
        if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != file.hash.value:
            changed.append(path)
    # Whoever edits an installed file by hand may do so.
    return [path for path in changed if _owners([path])] if changed else []


def _owners(paths: Collection[Path]) -> list[str]:
    """Name and version of each other distribution that has installed one of these files."""
    return sorted(
        {
            f"{other.name} {other.version}"
            for other in distributions()
            if other.name != PROJECT
            for file in other.files or []
            if file.parts[0] in PACKAGES and Path(str(file.locate())).resolve() in paths
        }
    )


__all__ = ["PACKAGES", "foreign_packages", "main", "refuse_foreign_packages"]
