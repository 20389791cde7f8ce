"""The page is what its raw results give, and drawing does not depend on the day."""

import json
import re
import shutil
from pathlib import Path

import pytest
from report_drawing import DARK, LOOKS, Figure, Panel, Series, svg
from report_raw import RawError, take
from write_report import DOCS, filled, outdated, wanted


def test_the_page_in_the_repository_is_current() -> None:
    assert outdated(wanted()) == [], "run `make report`"


def test_a_result_of_a_bench_is_taken_with_its_run(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    shutil.copytree(DOCS / "results", docs / "results")
    shutil.copy(DOCS / "performance.md", docs)
    raw = docs / "results" / "raw"
    run = json.loads((raw / "load.json").read_text()) | {"commit": "another"}
    results = run.pop("results")
    results["rows"][0]["ttft_p50_s"] = 98.7
    (tmp_path / "load.run.json").write_text(json.dumps(run))
    (tmp_path / "load.json").write_text(json.dumps(results))
    assert take("load", tmp_path, "load", raw) == raw / "load.json"
    files = wanted(docs)
    assert [file.name for file in outdated(files)] == ["performance.md", "load.svg"]
    page = str(files[docs / "performance.md"])
    assert "| 98.7 |" in page
    assert "commit another: `make bench" in page
    with pytest.raises(RawError, match=r"kept as load\[-PART\], not as wan"):
        take("load", tmp_path, "wan", raw)
    with pytest.raises(RawError, match=r"wan\.run\.json is missing: `make bench` writes it"):
        take("wan", tmp_path, "wan", raw)
    shutil.copy(raw / "load.json", raw / "load-again.json")
    with pytest.raises(RawError, match="one of these runs: load-again, load"):
        wanted(docs)


def test_only_what_is_between_markers_changes() -> None:
    page = "by hand\n<!-- report: load -->\nold\n<!-- end of report: load -->\nby hand\n"
    new = filled(page, {"load": r"\1 new"})
    assert new == page.replace("old", "\n\\1 new\n")
    with pytest.raises(RawError, match="for load, peers; found load"):
        filled(page, {"load": "", "peers": ""})


def test_a_figure_is_drawn_alike_every_time_and_has_dark_colours() -> None:
    points = ((1.0, 2.0), (10.0, 3000.0))
    series = tuple(Series(look, look, points) for look in LOOKS)
    figure = Figure("one", "what it shows", (Panel("", "x", "y", series, "xy"),))
    drawn = svg(figure)
    assert svg(figure) == drawn
    assert "dc:date" not in drawn
    painted = set(re.findall(r"(?:fill|stroke): (#\w+)", drawn.partition("</style>")[2]))
    assert painted <= DARK.keys(), painted
