"""What is generated stands between markers; what people wrote around it stays."""

import pytest
from raw_cases import (
    capacity,
    crossover,
    e2e,
    grid,
    images,
    load,
    load_row,
    lone,
    prediction,
    raw,
    rehearsal,
    transport,
)
from report_figures import Section
from report_page import OF_ONE_BENCH, PEERS, PageError, filled, sections

NAMES = (*OF_ONE_BENCH, PEERS)


def marked(name: str, body: str = "") -> str:
    return f"<!-- report: {name} -->\n{body}<!-- end of report: {name} -->\n"


PAGE = "# Title\n\n" + "\nby hand\n\n".join(map(marked, NAMES)) + "\nthe end\n"


def test_only_what_is_between_markers_changes() -> None:
    page = filled(PAGE, [Section("wan", "## Long links")])
    assert page == PAGE.replace(marked("wan"), marked("wan", "\n## Long links\n\n"))


def test_a_page_is_filled_again() -> None:
    once = filled(PAGE, [Section("wan", "one"), Section("load", r"\1 two")])
    assert filled(once, [Section("wan", "one"), Section("load", r"\1 two")]) == once
    assert filled(once, []) == PAGE


@pytest.mark.parametrize(
    "page",
    [
        PAGE.replace(marked("load"), ""),
        PAGE + marked("wan"),
        PAGE.replace("<!-- end of report: wan -->", ""),
        PAGE + marked("unknown"),
    ],
)
def test_a_page_without_the_right_markers_is_refused(page: str) -> None:
    with pytest.raises(PageError, match=r"once for each of wan, .*, images, peers"):
        filled(page, [])


def test_what_has_no_raw_results_is_named_and_left_out() -> None:
    found, missing = sections({"crossover": [raw("crossover", crossover())]})
    assert [section.name for section in found] == ["crossover"]
    assert [line.partition(":")[0] for line in missing] == [
        "without wan",
        "without e2e",
        "without load",
        "without prediction",
        "without rehearsal",
        "without capacity",
        "without images",
        "without peers",
    ]


def test_results_that_no_section_shows_are_named() -> None:
    _, missing = sections({"codecs": [raw("codecs", {})]})
    assert missing[-1] == "no section shows the raw results of codecs"


def test_every_section_says_where_its_numbers_come_from() -> None:
    raws = {
        "wan": [raw("wan", grid(), "-a"), raw("wan", {"raw": []}, "-b")],
        "crossover": [raw("crossover", crossover())],
        "e2e": [raw("e2e", e2e(lone("prfaas", 2000, 1120.0, 1.1)))],
        "load": [raw("load", load(load_row("prfaas", 1.0, 0.3)))],
        "prediction": [raw("prediction", prediction())],
        "rehearsal": [raw("rehearsal", rehearsal())],
        "capacity": [raw("capacity", capacity())],
        "images": [raw("images", images())],
    }
    found, missing = sections(raws)
    assert missing == []
    assert [section.name for section in found] == list(NAMES)
    text = found[0].text
    for name in ("wan-a", "wan-b"):
        assert f"([raw results](results/raw/{name}.json))" in text
    assert "- 2026-11-23, 2 CPUs (A CPU), 23.5 GiB" in text
    assert "commit 0123456789ab: `make bench`" in text
    assert "raw results]" not in found[-1].text, "wan and load are named where they are shown"


def test_comparisons_of_benches_without_a_section_say_where_they_come_from() -> None:
    found, _ = sections({"wan": [raw("wan", grid())], "transport": [raw("transport", transport())]})
    assert found[-1].text.count("raw results]") == 1
    assert "(results/raw/transport.json)" in found[-1].text
