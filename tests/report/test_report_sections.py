"""What the sections make of raw results."""

from typing import Any

import pytest
import report_crossover
import report_e2e
import report_images
import report_load
import report_peers
import report_planner
import report_prediction
import report_wan
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
    transfer,
    transport,
)
from report_figures import Figure, Section, digest, number, table
from report_raw import RawError


def rows(section: Section, first: str) -> list[list[str]]:
    """Cells of the lines of its tables that begin so."""
    lines = (line.strip("| ").split(" | ") for line in section.text.splitlines() if line[:1] == "|")
    return [cells for cells in lines if cells[0].startswith(first)]


def peers(**results: Any) -> Section:
    section = report_peers.section({name: [raw(name, kept)] for name, kept in results.items()})
    assert section is not None
    return section


def test_a_grid_is_a_figure_and_a_table() -> None:
    section = report_wan.section([raw("wan", grid())])
    (figure,) = section.figures
    assert figure.name == "wan-1g-cubic"
    assert [panel.title for panel in figure.panels] == [
        "0% loss, send buffer default",
        "0.1% loss, send buffer default",
    ]
    names = [series.name for series in figure.panels[0].series]
    assert names == ["iperf3, best", "PrfaaS", "Mooncake", "NIXL, best"]
    rtts_ms, rates = zip(*figure.panels[0].series[3].points, strict=True)
    assert rtts_ms == (10.0, 40.0)
    assert rates == pytest.approx([0.25, 0.25])
    (row,) = rows(section, "1 Gbit/s, 40 ms, 0.1% loss")
    assert row[1:] == ["cubic", "default", "0.95", "0.9", "0.5", "0.25", "0.95"]


def test_a_send_buffer_without_numbers_has_no_panel() -> None:
    kept = grid()
    kept["raw"].append(transfer("ours", 0.9, "1g/40ms", wmem_mib=32))
    (figure,) = report_wan.section([raw("wan", kept)]).figures
    assert [panel.title for panel in figure.panels[2:]] == ["0% loss, send buffer 32 MiB"]


def test_parts_and_send_buffers_stand_beside_each_other() -> None:
    parts = [
        raw("wan", {"raw": [transfer("ours", 0.8), transfer("ours", 0.9)]}, "-a"),
        raw("wan", {"raw": [transfer("ours", 0.6, wmem_mib=32)]}, "-b"),
    ]
    section = report_wan.section(parts)
    found = [(row[2], row[4]) for row in rows(section, "1 Gbit/s, 10 ms")]
    assert found == [("default", "0.85"), ("32 MiB", "0.6")]
    assert section.figures == ()


def test_systems_without_numbers_are_named() -> None:
    found = {"raw": [transfer("ours", 0.8), transfer("mooncake", None)]}
    section = report_wan.section([raw("wan", found)])
    assert section.text.endswith("Not measured: iperf3, best, Mooncake, NIXL, best.")
    assert rows(section, "1 Gbit/s")[0][3:] == ["-", "0.8", "-", "-", "-"]


def test_what_the_bench_left_out_has_its_reason() -> None:
    found = {"raw": [transfer("ours", 0.8)], "missing": {"mooncake": "no libibverbs"}}
    section = report_wan.section([raw("wan", found)])
    assert section.text.endswith("Not measured: mooncake (no libibverbs).")


def test_crossover_shows_the_rates_of_its_columns() -> None:
    section = report_crossover.section([raw("crossover", crossover())])
    assert "loopback: 20.0 Gbit/s" in section.text
    (row,) = rows(section, "hybrid (case study), H200")
    assert row[1] == "32Ki"
    assert row[5:8] == ["5.24", "0.524", "0.0524"]
    needed, times = section.figures[0].panels
    assert needed.series[-1].points == ((0.0, 20.0),)
    assert [series.kind for series in times.series] == ["bare", "points", "level"]


def test_load_names_systems_and_what_is_missing() -> None:
    kept = load(load_row("nixl", 1.0, 0.6), load_row("prfaas", 1.0, 0.3))
    section = report_load.section([raw("load", kept)])
    assert "(`model tiny, tokens 500-2500`)" in section.text
    assert rows(section, "vLLM with NixlConnector")[0][1:4] == ["1", "0.6", "1.2"]
    assert rows(section, "TTFT")[0][1:] == ["at most 0.4", "met", "1", "0.3"]
    assert "Not measured: plain (no cores)." in section.text
    assert [series.name for series in section.figures[0].panels[0].series] == [
        "PrfaaS, default routing",
        "vLLM with NixlConnector",
    ]


def test_a_later_part_of_load_replaces_what_an_earlier_one_measured() -> None:
    parts = [raw("load", load(load_row("prfaas", 1.0, ttft_s))) for ttft_s in (0.5, 0.3)]
    assert [row["ttft_p50_s"] for row in report_load.rows_of(parts)] == [0.3]


def test_load_refuses_strange_systems_and_mixed_settings() -> None:
    with pytest.raises(RawError, match="load: the report knows no system dynamo"):
        report_load.section([raw("load", load(load_row("dynamo", 1.0, 0.3)))])
    other = load() | {"settings": {"model": "other"}}
    with pytest.raises(RawError, match="load, load-b were measured with other settings"):
        report_load.section([raw("load", load()), raw("load", other, "-b")])


def test_a_lone_prompt_has_its_ratio_and_parts() -> None:
    kept = e2e(
        lone("nixl", 2000, 1700.0, 1.68),
        lone("prfaas", 8000, 1220.0, 1.2),
        lone("prfaas", 2000, 1170.0, 1.15),
        lone("prfaas", 2000, 1900.0, 1.9, gbps=0.2),
    )
    section = report_e2e.section([raw("e2e", kept)])
    assert "round trip of 20 ms" in section.text
    assert [row[1:] for row in rows(section, "PrfaaS")] == [
        ["-", "0.2", "2,000", "2", "1,900", "1,000", "1.9"],
        ["met", "1", "2,000", "2", "1,170", "1,000", "1.15"],
        ["*missed*", "1", "8,000", "2", "1,220", "1,000", "1.2"],
    ]
    assert rows(section, "vLLM with NixlConnector")[0][1] == "-"
    assert rows(section, "load") == [["load", "30", "30"]]


def test_lone_prompts_over_other_links_have_no_page_together() -> None:
    raws = [raw("e2e", e2e(lone("prfaas", 2000, 1170.0, 1.15))), raw("e2e", e2e(), "-b")]
    raws[1].results["rtt_ms"] = 40.0
    with pytest.raises(RawError, match="e2e, e2e-b were measured over other links"):
        report_e2e.section(raws)


def test_predictions_leave_out_what_went_another_way() -> None:
    section = report_prediction.section([raw("prediction", prediction())])
    (panel,) = section.figures[0].panels
    assert [(series.name, series.points) for series in panel.series] == [
        ("route: local", ((1.0, 1.1),)),
        ("route: prefill", ((2.0, 2.8),)),
        ("predicted = measured", ((1.0, 1.0), (2.0, 2.0))),
    ]
    assert [row[2:] for row in rows(section, "tiny")] == [
        ["local", "met", "1", "10%", "10%"],
        ["prefill", "*missed*", "1", "40%", "40%"],
    ]


def test_a_page_says_how_paced_engines_kept_their_pace() -> None:
    verdict = {"num_passes": 650, "off_p50": 0.0003, "off_p99": 0.012, "late": 0.004, "busy": 0.6}
    (kept,) = prediction()
    section = report_prediction.section([raw("prediction", [kept | {"pace": verdict}])])
    assert "10% in the median and 30% at P90" in section.text
    assert rows(section, "tiny")[-1] == ["tiny", "650", "0.03%", "1.20%", "0.40%", "60.00%"]
    section = report_planner.section([raw("capacity", capacity() | {"pace": {"PD": verdict}})])
    assert "within 5%" in section.text
    assert rows(section, "PD")[-1][1] == "650"


def test_predictions_have_the_phases_of_the_bench() -> None:
    (kept,) = prediction()
    kept["rows"] = [row | {"phase": "60%"} for row in kept["rows"]]
    section = report_prediction.section([raw("prediction", [kept])])
    assert [row[1] for row in rows(section, "tiny")] == ["60%", "60%"]


def test_planner_and_simulator_stand_beside_what_was_measured() -> None:
    section = report_planner.section([raw("capacity", capacity())])
    assert rows(section, "")[2:] == [
        ["one PD cluster, requests/s", "engines", "decode", "*missed*", "2.2", "2", "+10%"],
        ["three engines, requests/s", "engines", "decode", "-", "2.2", "-", "-"],
        ["TTFT P50, s", "an engine beside a busy one", "-", "met", "0.3", "0.29", "+3%"],
    ]
    assert "Not measured: three engines (2 cores)." in section.text


def test_images_stand_beside_text_of_as_many_tokens() -> None:
    section = report_images.section([raw("images", images())])
    assert rows(section, "E+P+D")[-2:] == [
        ["E+P+D", "new images, a prompt at a time", "512", "600", "1", "2", "4"],
        ["E+P+D", "text of as many tokens", "512", "600", "1", "0", "4"],
    ]
    assert "engines looked for 16 embeddings at their agent, which had 8 of them" in section.text


def test_peers_win_where_their_number_is_better() -> None:
    wan = {"raw": [transfer("ours", 0.5), transfer("mooncake", 0.4), transfer("nixl", 1.0)]}
    gateway = {
        "gateway": dict.fromkeys(("requests_per_s", "stream_requests_per_s"), 100.0)
        | dict.fromkeys(("p50_ms", "cpu_ms_per_request", "cpu_us_per_event"), 1.0),
        "vllm-router": dict.fromkeys(("requests_per_s", "stream_requests_per_s"), 101.0)
        | dict.fromkeys(("p50_ms", "cpu_ms_per_request", "cpu_us_per_event"), 0.2),
    }
    kept = load(load_row("prfaas", 1.0, 0.3), load_row("nixl", 1.0, 0.2), load_row("plain", 2.0, 0))
    section = peers(wan=wan, gateway=gateway, load=kept)
    found = [(row[0], row[1], row[4]) for row in rows(section, "")[2:]]
    assert found == [
        ("gateway, latency of a lone client P50, ms", "vllm-router", "5.00"),
        ("gateway, CPU of a request, ms", "vllm-router", "5.00"),
        ("gateway, CPU of a streamed event, µs", "vllm-router", "5.00"),
        ("1g/10ms, cubic, send buffer default: Gbit/s", "NIXL, best", "2.00"),
        ("1 requests/s: TTFT P50, s", "vLLM with NixlConnector", "1.50"),
        ("1 requests/s: TTFT P99, s", "vLLM with NixlConnector", "1.50"),
    ]
    assert "6 of 11 comparisons" in section.text


def test_transport_is_compared_block_size_by_block_size() -> None:
    section = peers(transport=transport())
    assert [row[0] for row in rows(section, "loopback")] == [
        "loopback, 64 KiB acknowledged, P50: µs"
    ]
    assert "1 of 3 comparisons" in section.text


def test_without_a_peer_nothing_is_compared() -> None:
    assert report_peers.section({"wan": [raw("wan", {"raw": [transfer("ours", 0.5)]})]}) is None


def test_a_digest_changes_with_the_figure_and_with_what_draws_it() -> None:
    figure = Figure("one", "alt", (), 1)
    assert digest(figure, "code") == digest(Figure("one", "alt", (), 1), "code")
    others = {digest(figure, "other"), digest(Figure("one", "alt", (), 2), "code")}
    assert digest(figure, "code") not in others


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.0, "0"), (0.04237, "0.0424"), (1.0, "1"), (99.96, "100"), (12345.6, "12,300")],
)
def test_numbers_have_three_digits(value: float | None, text: str) -> None:
    assert number(value) == text


def test_texts_of_a_table_are_on_the_left() -> None:
    assert table(["a", "b", "c"], [["x", "y", "1"]], 2) == (
        "| a | b | c |\n| --- | --- | ---: |\n| x | y | 1 |"
    )
