"""The wide-area bench's tables and goals, from made-up measurements."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from wan_report import (
    PAYLOAD_SHARE,
    Cell,
    Goal,
    Measured,
    Results,
    Section,
    goals,
    quantile,
    tables,
)

MIB = 1024 * 1024


def measured(
    peer: str,
    seconds: float | None,
    *,
    section: Section = "goodput",
    point: str = "5g/20ms",
    congestion: str = "bbr",
    wmem_mib: int | None = None,
) -> Measured:
    """125 MB, one Gbit, in that time."""
    cell = Cell(section, point, congestion, wmem_mib)
    return Measured(cell, peer, 0, 125_000_000, seconds)


def found(*measurements: Measured) -> dict[str, Goal]:
    return {goal.name: goal for goal in goals(Results(measurements))}


def test_limit_is_the_best_median_of_the_streams() -> None:
    runs = [measured("iperf3 x1", seconds) for seconds in (0.1, 1.0, 1.0)]
    runs += [measured("iperf3 x8", seconds) for seconds in (0.5, 0.5, 1.0)]
    results = Results(runs)
    assert results.limit_gbit_per_s(results.cells("goodput")[0]) == pytest.approx(2.0)


def test_goodput_goals_compare_with_the_limit_and_the_best_of_each_peer() -> None:
    runs = [measured("ours", 0.25), measured("iperf3 x8", 0.2), measured("mooncake", 1.0)]
    runs += [measured("nixl", 2.0), measured("nixl default", 0.5)]
    by_name = found(*runs)
    limit = by_name["5g/20ms bbr: ours / best iperf3"]
    assert limit.found == pytest.approx(4.0 / (5 * PAYLOAD_SHARE))  # a link carries no 5 Gbit/s
    assert limit.is_met is False
    assert by_name["5g/20ms bbr: ours, CPU s/GiB of both ends"].is_met is None
    assert by_name["5g/20ms bbr: ours / mooncake"].is_met
    nixl = by_name["5g/20ms bbr: ours / nixl"]
    assert nixl.found == pytest.approx(2.0)
    assert nixl.is_met is True


def test_a_failed_or_missing_peer_is_not_measured() -> None:
    by_name = found(measured("ours", 0.25), measured("mooncake", None))
    assert [goal.is_met for goal in by_name.values()] == [None, None, None, None]
    assert all("not measured" in str(goal) for goal in by_name.values())


def test_raised_send_buffers_have_no_goals() -> None:
    assert found(measured("ours", 1.0, wmem_mib=32)) == {}


def test_cap_layer_and_burst_goals() -> None:
    runs = [measured("ours", 0.5, section="cap", point="2g/20ms/cap 300m")]
    runs += [measured("ours", 0.2 + 0.001 * n, section="layer") for n in range(24)]
    runs += [measured("ours", 0.4, section="burst"), measured("ours", 0.2, section="burst_warm")]
    cap, layer, burst = goals(Results(runs))
    assert cap.found == pytest.approx(1.0)
    assert cap.is_met is True
    assert layer.found == pytest.approx(222)
    assert layer.is_met is True
    assert burst.found == pytest.approx(2.0)
    assert burst.is_met is False


def test_quantile_is_the_smallest_value_that_covers_the_share() -> None:
    assert quantile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.0
    assert quantile([1.0, 2.0, 3.0, 4.0], 0.95) == 4.0


def test_tables_name_every_cell_and_the_goals() -> None:
    runs = [measured("ours", 0.25), measured("ours", 1.0, wmem_mib=32)]
    runs += [measured("ours", 0.2, section="layer"), measured("ours", 0.4, section="burst")]
    text = tables(Results(runs))
    for part in ("5g/20ms bbr, wmem 32 MiB", "4.000", "200 / 200", "Goals", "not measured"):
        assert part in text
