"""The page is what its raw results give, and drawing does not depend on the day."""

import shutil
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import report_drawing
from raw_cases import crossover, grid, keep
from report_page import OF_ONE_BENCH, PEERS
from write_report import main, report

MARKERS = "\n".join(
    f"<!-- report: {name} -->\n<!-- end of report: {name} -->\n" for name in (*OF_ONE_BENCH, PEERS)
)


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    """A page without results, and one result of `make bench` beside it."""
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "performance.md").write_text(f"# By hand\n\n{MARKERS}")
    keep(tmp_path, "wan", grid())
    return folder


def write(docs: Path, *more: str) -> int:
    return main(["--docs", str(docs), "--results", str(docs.parent), *more])


def test_the_page_in_the_repository_is_current() -> None:
    assert report().outdated() == [], "run `make report`"


def test_taking_a_result_writes_page_and_figure(
    docs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert write(docs, "--take", "wan", "--as", "wan-grid") == 0
    assert (docs / "results/raw/wan-grid.json").exists()
    assert [file.name for file in (docs / "results/curves").iterdir()] == ["wan-1g-cubic.svg"]
    page = (docs / "performance.md").read_text()
    assert page.startswith("# By hand\n")
    assert "(results/curves/wan-1g-cubic.svg)" in page
    assert "without load: no raw results of this bench" in capsys.readouterr().err
    assert write(docs, "--check") == 0


def test_check_names_what_is_outdated_and_writes_nothing(
    docs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(docs, "--take", "wan")
    page, raw = docs / "performance.md", docs / "results/raw/wan.json"
    raw.write_text(raw.read_text().replace('"peer": "mooncake"', '"peer": "nixl other"'))
    unused = docs / "results/curves/old.svg"
    unused.write_text("<svg/>")
    before = page.read_text()
    capsys.readouterr()
    assert write(docs, "--check") == 1
    told = capsys.readouterr().err
    for file in (page, docs / "results/curves/wan-1g-cubic.svg", unused):
        assert f"{file} is outdated: run `make report`" in told
    assert page.read_text() == before
    assert write(docs) == 0
    assert not unused.exists()
    assert write(docs, "--check") == 0


def test_a_figure_that_is_current_is_not_drawn_again(
    docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(docs, "--take", "wan")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert write(docs, "--check") == 0
    assert write(docs) == 0
    (docs / "results/curves/wan-1g-cubic.svg").unlink()
    with pytest.raises(ImportError):
        write(docs)


def test_what_is_missing_or_wrong_is_said(docs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert write(docs, "--take", "load") == 2
    assert "load.run.json is missing: `make bench` writes it" in capsys.readouterr().err
    (docs / "performance.md").write_text("# By hand\n")
    assert write(docs) == 2
    assert "the page needs `<!-- report: NAME -->`" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--check", "--take", "wan"], ["--as", "wan-a"]])
def test_options_that_contradict_are_refused(options: list[str], docs: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        write(docs, *options)


def test_a_figure_is_drawn_alike_every_time(docs: Path, tmp_path: Path) -> None:
    keep(tmp_path, "crossover", crossover())
    write(docs, "--take", "crossover")
    curves = docs / "results/curves"
    first = (curves / "crossover.svg").read_text()
    shutil.rmtree(curves)
    write(docs)
    assert (curves / "crossover.svg").read_text() == first
    assert "dc:date" not in first
    assert "@media (prefers-color-scheme: dark)" in first


def test_every_colour_of_a_drawing_has_a_dark_one(docs: Path, tmp_path: Path) -> None:
    keep(tmp_path, "crossover", crossover())
    write(docs, "--take", "crossover")
    drawn = ElementTree.parse(docs / "results/curves/crossover.svg")
    styles = ";".join(element.get("style", "") for element in drawn.iter()).split(";")
    painted = {
        value.strip()
        for name, _, value in (style.partition(":") for style in styles)
        if name.strip() in ("fill", "stroke")
    } - {"none"}
    assert painted <= report_drawing.DARK.keys(), painted
    assert set(report_drawing.COLORS.values()) < report_drawing.DARK.keys()
