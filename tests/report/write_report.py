"""Writes docs/performance.md and its figures from the raw results of benches.

Run: make report [REPORT_ARGS="--check | --take NAME [--as NAME-PART] [--results FOLDER]"]

docs/results/raw has one file for each run that stands behind the page. One gets there in two steps:
`make bench BENCH_ARGS="NAME ..."` writes bench-results/NAME.json and NAME.run.json, and
`make report REPORT_ARGS="--take NAME"` keeps them there as one file and writes the page anew.
--check says whether the page and its figures are what the raw results give, and draws nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))

import report_drawing
import report_prediction
from report_figures import Figure, digest
from report_page import PageError, filled, sections
from report_raw import RawError, read_all, take

DOCS: Final = Path(__file__).resolve().parents[2] / "docs"
TRIMS: Final = {"prediction": report_prediction.trimmed}
BENCH_RESULTS: Final = DOCS.parent / "bench-results"


@dataclass(frozen=True, slots=True)
class Report:
    """The page and the figures that it should have, with what is missing on it."""

    docs: Path
    page: str
    figures: dict[Path, Figure]
    missing: list[str] = field(default_factory=list)

    @property
    def page_file(self) -> Path:
        return self.docs / "performance.md"

    def outdated(self) -> list[Path]:
        """Files that are not what the raw results give, and figures that no section shows."""
        found = [file for file, figure in self.figures.items() if not _is_current(file, figure)]
        if self.page_file.read_text(encoding="utf-8") != self.page:
            found.append(self.page_file)
        return [*found, *self.unused()]

    def unused(self) -> list[Path]:
        return sorted(set(_curves(self.docs).glob("*.svg")) - self.figures.keys())

    def write(self) -> None:
        """What is outdated; ImportError where that is a figure and matplotlib is missing."""
        _curves(self.docs).mkdir(parents=True, exist_ok=True)
        for file, figure in self.figures.items():
            if not _is_current(file, figure):
                file.write_text(report_drawing.svg(figure, _mark(figure)), encoding="utf-8")
        for file in self.unused():
            file.unlink()
        self.page_file.write_text(self.page, encoding="utf-8")


def report(docs: Path = DOCS) -> Report:
    """Of the raw results that lie under `docs`; RawError, PageError."""
    found, missing = sections(read_all(docs / "results" / "raw"))
    page = filled((docs / "performance.md").read_text(encoding="utf-8"), found)
    figures = {
        _curves(docs) / f"{figure.name}.svg": figure
        for section in found
        for figure in section.figures
    }
    return Report(docs, page, figures, missing)


def _curves(docs: Path) -> Path:
    return docs / "results" / "curves"


def _mark(figure: Figure) -> str:
    """What a drawn file says of itself: the same figure, drawn by the same code, has the same."""
    return f"figure {digest(figure, Path(report_drawing.__file__).read_text(encoding='utf-8'))}"


def _is_current(file: Path, figure: Figure) -> bool:
    return file.exists() and _mark(figure) in file.read_text(encoding="utf-8").partition("\n")[0]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if it is outdated")
    parser.add_argument("--take", metavar="NAME", help="a result of `make bench` to keep")
    parser.add_argument("--as", dest="kept_as", metavar="NAME", help="BENCH-PART; default: as is")
    parser.add_argument("--results", type=Path, default=BENCH_RESULTS, help="where --take looks")
    parser.add_argument("--docs", type=Path, default=DOCS, help="where the page is")
    arguments = parser.parse_args(argv)
    if arguments.check and arguments.take:
        parser.error("--check writes nothing, so it cannot take a result")
    if arguments.kept_as and not arguments.take:
        parser.error("--as names what --take keeps")
    try:
        if name := arguments.take:
            folder = arguments.docs / "results" / "raw"
            print(
                f"kept: {take(name, arguments.results, arguments.kept_as or name, folder, TRIMS)}"
            )
        made = report(arguments.docs)
    except (RawError, PageError) as error:
        print(error, file=sys.stderr)
        return 2
    for line in made.missing:
        print(line, file=sys.stderr)
    if arguments.check:
        outdated = made.outdated()
        for file in outdated:
            print(f"{file} is outdated: run `make report`", file=sys.stderr)
        return 1 if outdated else 0
    made.write()
    print(f"written: {made.page_file}, {len(made.figures)} figures")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
