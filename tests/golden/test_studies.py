"""What the scheduler decides for seeded traffic: in the studies of `prfaas simulate`, much shorter,
and in the regions of odd shape in the folder `studies`.

A golden file has, for each run, its numbers, what the long timescale said, the changes of
thresholds, and a letter for each request that stands for its route, why, and what became of it.
Numbers have three digits: so floating noise changes no file, and another decision does.
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Final
from zlib import crc32

import pytest
from golden import check
from typer.testing import CliRunner

from deploy.cli import app

DATA: Final = Path(__file__).parent / "studies"
REGIONS: Final = sorted(DATA.glob("*.yaml"))
SCALES: Final = {
    "case-study": 0.01,
    "congestion": 0.1,
    "shift": 0.01,
    "steady": 0.01,
    "overload": 0.05,
    "loss": 0.15,
    "images": 0.1,
}
"""How long each study is."""
MARKS: Final = {"shift": pytest.mark.slow}
"""Traffic shifts by periods of five minutes, 25,000 requests at the smallest scale."""
LETTERS: Final = string.ascii_letters + string.digits + "!#$%&*+-/<=>?@^_~"
PER_LINE: Final = 50
CHANGES_PER_LINE: Final = 10
USUAL: Final = ("", "home", "nothing_saved", "admitted", "done")
"""What goes without saying of a request."""


def simulated(*words: str | Path) -> dict[str, Any]:
    """What `prfaas simulate` prints as JSON. A study may miss its goals when it is short."""
    asked = ["simulate", *map(str, words), "--json", "--series", "--requests"]
    result = CliRunner().invoke(app, asked)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code in (0, 1), result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def words_of(value: Any) -> str:
    """A value in one line, numbers with three digits."""
    if isinstance(value, float):
        # What should be 0 may be the rest of a subtraction, and that of either sign.
        return f"{float(f'{round(value, 9) + 0.0:.3g}'):g}"
    if isinstance(value, str):
        return re.sub(r"(?<==)[^;]+", lambda number: words_of(float(number[0])), value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {words_of(item)}" for key, item in value.items())
    return str(value)


def lines_of(document: dict[str, Any]) -> Iterator[str]:
    """A line for each value, or for each item of a list."""
    for key, value in document.items():
        for item in value if isinstance(value, list) else [value]:
            yield f"{key}: {words_of(item)}"


def changes(series: dict[str, list[float]]) -> Iterator[str]:
    """Each threshold where it was another one than before, and from which second on."""
    for name, values in series.items():
        if not name.startswith("threshold:"):
            continue
        pairs = [
            (words_of(value), at_s) for at_s, value in zip(series["at_s"], values, strict=True)
        ]
        steps = [
            f"{words} at {at_s:.0f}"
            for (before, _), (words, at_s) in pairwise([("", 0.0), *pairs])
            if words != before
        ]
        for at in range(0, len(steps), CHANGES_PER_LINE):
            yield f"{name}: {', '.join(steps[at : at + CHANGES_PER_LINE])}"


def decided(request: dict[str, Any]) -> str:
    """The route of a request, why, and what became of it."""
    names = ("reason", "pd_reason", "move", "admission", "fate")
    said = [request[name] for name in names if request[name] not in USUAL]
    if request["fell_back"]:
        said.append("fell_back")
    return f"{request['target']} in {request['pd']}: {', '.join(said) or 'done'}"


def letters(found: Iterable[str]) -> dict[str, str]:
    """A letter for each text. It follows from the text, so that a new text leaves the others
    theirs.
    """
    taken: dict[str, str] = {}
    for text in sorted(found):
        first = crc32(text.encode()) % len(LETTERS)
        ring = LETTERS[first:] + LETTERS[:first]
        taken[text] = next(letter for letter in ring if letter not in taken.values())
    return taken


def lines_of_run(run: dict[str, Any]) -> Iterator[str]:
    """All that one run decided."""
    texts = [decided(request) for request in run.pop("requests")]
    series = run.pop("series")
    yield from lines_of(run)
    yield from changes(series)
    of = letters(set(texts))
    for text, num in sorted(Counter(texts).items()):
        yield f"{of[text]} {num:5} {text}"
    for at in range(0, len(texts), PER_LINE):
        yield f"{at:5} {''.join(of[text] for text in texts[at : at + PER_LINE])}"


def text_of(runs: dict[str, dict[str, Any]]) -> Iterator[str]:
    for title, run in runs.items():
        yield f"\n== {title}"
        yield from lines_of_run(run)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in SCALES])
def test_a_study_decides_as_before(name: str) -> None:
    found = simulated("study", name, "--scale", str(SCALES[name]))
    lines = [f"prfaas simulate study {name} --scale {SCALES[name]}"]
    for row in found["rows"]:
        lines += ["\n== row", *lines_of(row)]
    lines.append("\n== goals")
    for goal in found["goals"]:
        verdict = "met" if goal["met"] else "missed"
        lines.append(f"{verdict} {goal['name']}: {words_of(goal['found'])} ({goal['wanted']})")
    lines += text_of(found["runs"])
    check(DATA / f"{name}.txt", "\n".join(lines) + "\n")


@pytest.mark.parametrize("path", REGIONS, ids=lambda path: path.stem)
def test_a_region_decides_as_before(path: Path) -> None:
    found = simulated("run", path, "--compare")
    lines = [f"prfaas simulate {path.name} --compare", *text_of(found["policies"])]
    check(path.with_suffix(".txt"), "\n".join(lines) + "\n")


def test_no_golden_file_is_left_over() -> None:
    kept = {path.stem for path in DATA.glob("*.txt")}
    assert kept <= {*SCALES, *(path.stem for path in REGIONS)}
