"""Raw results of benches as they are kept in the repository, with the run that they come from.

A file of docs/results/raw is one run: when it was, with which command, on which machine, and all
that the bench kept. Several files may come from one bench, such as parts of a grid.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

FIELDS: Final = ("bench", "command", "date", "commit", "machine", "results")
MACHINE_FIELDS: Final = ("cpu", "cpus", "memory_gib", "kernel", "python")
LINE_LENGTH: Final = 160
# Of a request's record, which has kilobytes, what tells of its prediction.
OF_A_PREDICTION: Final = "phase target num_prompt_tokens ttft_s predicted_ttft_s num_retries"


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

    def provenance(self) -> str:
        """When, where and how it was measured, as a line of the page."""
        machine = self.machine
        commit = f", commit {self.commit}" if self.commit else ""
        return (
            f"- {self.date}, {machine['cpus']} CPUs ({machine['cpu']}), {machine['memory_gib']} "
            f"GiB, Linux {machine['kernel']}, Python {machine['python']}{commit}: "
            f"`{self.command}` ([raw results](results/raw/{self.name}.json))"
        )


def read_all(folder: Path) -> dict[str, list[Raw]]:
    """All runs by bench, in the order of their file names; RawError."""
    found: dict[str, list[Raw]] = {}
    for file in sorted(folder.glob("*.json")):
        kept = _json(file, FIELDS)
        _require(file, kept["machine"], MACHINE_FIELDS)
        raw = Raw(file.stem, **{field: kept[field] for field in FIELDS})
        found.setdefault(raw.bench, []).append(raw)
    return found


def take(name: str, results: Path, kept_as: str, folder: Path) -> Path:
    """Keep results/NAME.json, which `make bench` wrote, together with the record of its run; where
    they are kept. RawError when a file is missing or the name is that of another bench.
    """
    record = _json(results / f"{name}.run.json", FIELDS[:-1])
    _require(results / f"{name}.run.json", record["machine"], MACHINE_FIELDS)
    kept: Any = json.loads((results / f"{name}.json").read_text(encoding="utf-8"))
    bench = record["bench"]
    if kept_as != bench and not kept_as.startswith(f"{bench}-"):
        raise RawError(f"results of {bench} are kept as {bench}[-PART], not as {kept_as}")
    if bench == "prediction":
        for one in kept:
            one["records"] = [
                {key: record.get(key) for key in OF_A_PREDICTION.split()}
                for record in one["records"]
            ]
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{kept_as}.json"
    file.write_text(text_of({**record, "results": kept}) + "\n", encoding="utf-8")
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


def _json(file: Path, fields: Iterable[str]) -> Any:
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RawError(f"{file} is missing: `make bench` writes it") from None
    except ValueError as error:
        raise RawError(f"{file} is no JSON: {error}") from error
    _require(file, kept, fields)
    return kept


def _require(file: Path, kept: Any, fields: Iterable[str]) -> None:
    lacking = [field for field in fields if not isinstance(kept, dict) or field not in kept]
    if lacking:
        raise RawError(f"{file} lacks {', '.join(lacking)}")
