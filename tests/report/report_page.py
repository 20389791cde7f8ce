"""The generated parts of docs/performance.md: what is between two markers, and nothing else.

    <!-- report: wan -->
    ...
    <!-- end of report: wan -->

A section without raw results is empty between its markers. Knows no file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import report_crossover
import report_e2e
import report_images
import report_load
import report_peers
import report_planner
import report_prediction
import report_rehearsal
import report_wan
from report_figures import Section
from report_raw import Raw

OF_ONE_BENCH: Final[Mapping[str, Callable[[Sequence[Raw]], Section]]] = {
    "wan": report_wan.section,
    "crossover": report_crossover.section,
    "e2e": report_e2e.section,
    "load": report_load.section,
    "prediction": report_prediction.section,
    "rehearsal": report_rehearsal.section,
    "capacity": report_planner.section,
    "images": report_images.section,
}
"""By bench, its section; in the order of the page, where markers have the same names."""
PEERS: Final = "peers"

_MARKED: Final = re.compile(
    r"^<!-- report: (?P<name>\w+) -->\n(?P<body>.*?)^<!-- end of report: (?P=name) -->$",
    re.DOTALL | re.MULTILINE,
)
_ANY_MARKER: Final = re.compile(r"^<!-- (?:end of )?report: .*-->$", re.MULTILINE)


class PageError(ValueError):
    """The page lacks markers, or has others than those of the sections."""


def sections(raws: Mapping[str, Sequence[Raw]]) -> tuple[list[Section], list[str]]:
    """Those that there are raw results for, and a line for each thing that the page lacks."""
    found, missing = [], []
    for name, build in OF_ONE_BENCH.items():
        if raws.get(name):
            section = build(raws[name])
            text = f"{section.text}\n\n{provenance(raws[name])}"
            found.append(Section(section.name, text, section.figures))
        else:
            missing.append(f"without {name}: no raw results of this bench")
    if (peers := report_peers.section(raws)) is not None:
        # Runs that have a section of their own are named there.
        others = [bench for bench in report_peers.COMPARISONS if bench not in OF_ONE_BENCH]
        runs = provenance([raw for bench in others for raw in raws.get(bench, ())])
        found.append(Section(peers.name, f"{peers.text}\n\n{runs}".rstrip()))
    else:
        missing.append(f"without {PEERS}: no raw results that compare with a peer")
    unused = raws.keys() - OF_ONE_BENCH.keys() - report_peers.COMPARISONS.keys()
    missing += [f"no section shows the raw results of {bench}" for bench in sorted(unused)]
    return found, missing


def provenance(raws: Sequence[Raw]) -> str:
    """When, where and how each run was measured."""
    lines = []
    for raw in raws:
        commit = f", commit {raw.commit}" if raw.commit else ""
        lines.append(
            f"- {raw.date}, {raw.where()}{commit}: `{raw.command}` "
            f"([raw results](results/raw/{raw.name}.json))"
        )
    return "\n".join(lines)


def filled(page: str, found: Sequence[Section]) -> str:
    """The page with these sections between their markers, and nothing between others; PageError."""
    texts = {section.name: f"\n{section.text}\n\n" for section in found}
    names = [match["name"] for match in _MARKED.finditer(page)]
    expected = [*OF_ONE_BENCH, PEERS]
    if sorted(names) != sorted(expected) or len(_ANY_MARKER.findall(page)) != 2 * len(names):
        raise PageError(
            "the page needs `<!-- report: NAME -->` and `<!-- end of report: NAME -->`, each on a "
            f"line of its own, once for each of {', '.join(expected)}; found {', '.join(names)}"
        )
    return _MARKED.sub(
        lambda match: (
            f"<!-- report: {match['name']} -->\n{texts.get(match['name'], '')}"
            f"<!-- end of report: {match['name']} -->"
        ),
        page,
    )
