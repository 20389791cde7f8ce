"""Writes docs/performance.md and its figures from the raw results of benches.

Run: make report [REPORT_ARGS="--check | --take NAME [--as NAME-PART]"]

docs/results/raw has one file for each run that stands behind the page. One gets there in two steps:
`make bench BENCH_ARGS="NAME ..."` writes bench-results/NAME.json and NAME.run.json, and
`make report REPORT_ARGS="--take NAME"` keeps them there as one file and writes the page anew.
--check says whether the page and its figures are what the raw results give, and draws nothing.

Only what is between two markers is written, `<!-- report: load -->` and
`<!-- end of report: load -->`. Everything else on the page is written by hand.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))

from report_drawing import Figure, svg
from report_peers import peers
from report_raw import Raw, RawError, read_all, take
from report_sections import SECTIONS

DOCS: Final = Path(__file__).resolve().parents[2] / "docs"
BENCH_RESULTS: Final = DOCS.parent / "bench-results"
_MARKED: Final = re.compile(
    r"^<!-- report: (?P<name>\w+) -->\n.*?^<!-- end of report: (?P=name) -->$",
    re.DOTALL | re.MULTILINE,
)


def wanted(docs: Path = DOCS) -> dict[Path, Figure | str]:
    """The figures and the page that the raw results under `docs` give, by file; RawError."""
    raws = read_all(docs / "results" / "raw")
    found = {name: build(raws[name]) for name, build in SECTIONS.items() if name in raws}
    texts = {name: f"{one.text}\n\n{_runs(raws[name])}" for name, one in found.items()}
    # Runs that have a section of their own are named there.
    others = [raw for bench in ("transport", "gateway") for raw in raws.get(bench, ())]
    texts["peers"] = f"{peers(raws)}\n\n{_runs(others)}"
    page, curves = docs / "performance.md", docs / "results" / "curves"
    figures = [one.figure for one in found.values() if one.figure is not None]
    return {page: filled(page.read_text(encoding="utf-8"), texts)} | {
        curves / f"{figure.name}.svg": figure for figure in figures
    }


def outdated(files: Mapping[Path, Figure | str]) -> list[Path]:
    """Those whose text is another one; a figure is not drawn to know."""
    texts = {file: file.read_text(encoding="utf-8") if file.exists() else "" for file in files}
    return [
        file
        for file, content in files.items()
        if (isinstance(content, str) and texts[file] != content)
        or (isinstance(content, Figure) and content.mark() not in texts[file].partition("\n")[0])
    ]


def filled(page: str, texts: Mapping[str, str]) -> str:
    """The page with these texts between their markers; RawError when one has no place there."""
    names = [match["name"] for match in _MARKED.finditer(page)]
    if sorted(names) != sorted(texts):
        raise RawError(
            "the page needs `<!-- report: NAME -->` and `<!-- end of report: NAME -->`, each on a "
            f"line of its own, for {', '.join(sorted(texts))}; found {', '.join(names)}"
        )
    return _MARKED.sub(
        lambda match: (
            f"<!-- report: {match['name']} -->\n\n{texts[match['name']]}\n\n"
            f"<!-- end of report: {match['name']} -->"
        ),
        page,
    )


def _runs(raws: Sequence[Raw]) -> str:
    return "\n".join(raw.provenance() for raw in raws)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    does = parser.add_mutually_exclusive_group()
    does.add_argument("--check", action="store_true", help="write nothing; 1 if it is outdated")
    does.add_argument("--take", metavar="NAME", help="a result of `make bench` to keep")
    parser.add_argument("--as", dest="kept_as", metavar="NAME", help="BENCH-PART; default: as is")
    arguments = parser.parse_args(argv)
    try:
        if name := arguments.take:
            kept_as = arguments.kept_as or name
            print(f"kept: {take(name, BENCH_RESULTS, kept_as, DOCS / 'results' / 'raw')}")
        files = wanted()
    except RawError as error:
        print(error, file=sys.stderr)
        return 2
    for file in (old := outdated(files)):
        if not arguments.check:
            content = files[file]
            file.write_text(content if isinstance(content, str) else svg(content), encoding="utf-8")
        print(f"{file} {'is outdated: run `make report`' if arguments.check else 'is written'}")
    return 1 if old and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
