"""Raw results of benches as they are kept in the repository, with the run that they come from.

A file of docs/results/raw is one run: when it was, with which command, on which machine, and all
that the bench kept. Several files may come from one bench, such as parts of a grid. Draws nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

FIELDS: Final = ("bench", "command", "date", "commit", "machine", "results")
MACHINE_FIELDS: Final = ("cpu", "cpus", "memory_gib", "kernel", "python")
LINE_LENGTH: Final = 160


class RawError(ValueError):
    """A file of results that is missing or is not what it should be; the text names it."""


@dataclass(frozen=True, slots=True)
class Raw:
    """One run. `results` is what the bench kept, in a shape of its own. `name`: of the file."""

    name: str
    bench: str
    command: str
    date: str
    commit: str
    machine: Mapping[str, Any]
    results: Any

    def where(self) -> str:
        """The machine, in words."""
        machine = self.machine
        return (
            f"{machine['cpus']} CPUs ({machine['cpu']}), {machine['memory_gib']} GiB, "
            f"Linux {machine['kernel']}, Python {machine['python']}"
        )


def read_all(folder: Path) -> dict[str, list[Raw]]:
    """All runs by bench, in the order of their file names; RawError."""
    found: dict[str, list[Raw]] = {}
    for file in sorted(folder.glob("*.json")):
        raw = read(file)
        found.setdefault(raw.bench, []).append(raw)
    return found


def read(file: Path) -> Raw:
    """One run; RawError."""
    kept = _json(file)
    _require(file, kept, FIELDS)
    _require(file, kept["machine"], MACHINE_FIELDS)
    if file.stem != kept["bench"] and not file.stem.startswith(f"{kept['bench']}-"):
        raise RawError(f"{file}: results of {kept['bench']} are kept as {kept['bench']}[-PART]")
    return Raw(file.stem, **{field: kept[field] for field in FIELDS})


def take(
    name: str,
    results: Path,
    kept_as: str,
    folder: Path,
    trims: Mapping[str, Callable[[Any], Any]],
) -> Path:
    """Keep results/NAME.json, which `make bench` wrote, together with the record of its run; where
    they are kept. `trims` leave out, by bench, what is large and tells nothing. RawError when a
    file is missing.
    """
    record = _json(results / f"{name}.run.json")
    _require(results / f"{name}.run.json", record, FIELDS[:-1])
    trim = trims.get(record["bench"], _whole)
    kept = {**record, "results": trim(_json(results / f"{name}.json"))}
    file = folder / f"{kept_as}.json"
    before = file.read_text(encoding="utf-8") if file.exists() else None
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(text_of(kept) + "\n", encoding="utf-8")
    try:
        read(file)
    except RawError:
        # What cannot be read again must not stay in the way of everything else.
        file.unlink() if before is None else file.write_text(before, encoding="utf-8")
        raise
    return file


def text_of(value: Any, indent: int = 0) -> str:
    """JSON in which a list or object that fits on a line has one line: differences stay short."""
    line = json.dumps(value, ensure_ascii=False)
    if len(line) + indent <= LINE_LENGTH or not isinstance(value, dict | list):
        return line
    inner = indent + 1
    if isinstance(value, dict):
        parts = [f"{json.dumps(key)}: {text_of(part, inner)}" for key, part in value.items()]
        opening, closing = "{", "}"
    else:
        parts = [text_of(part, inner) for part in value]
        opening, closing = "[", "]"
    body = f",\n{' ' * inner}".join(parts)
    return f"{opening}\n{' ' * inner}{body}\n{' ' * indent}{closing}"


def _whole(results: Any) -> Any:
    return results


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RawError(f"{file} is missing: `make bench` writes it") from None
    except ValueError as error:
        raise RawError(f"{file} is no JSON: {error}") from error


def _require(file: Path, kept: Any, fields: Iterable[str]) -> None:
    if not isinstance(kept, dict):
        raise RawError(f"{file}: an object with {', '.join(fields)} is expected")
    if lacking := [field for field in fields if field not in kept]:
        raise RawError(f"{file} lacks {', '.join(lacking)}")
