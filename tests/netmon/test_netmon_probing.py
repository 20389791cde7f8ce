"""Probes: only on idle links, only when needed, never more than their share."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netmon.estimate import LinkCondition, LinkEstimate
from netmon.probing import ProbeConfig, ProbePlanner

MB = 1_000_000
UNKNOWN = LinkEstimate(sample_age_s=0.0)
KNOWN = LinkEstimate(
    available_bytes_per_s=100 * MB, age_s=60.0, full_age_s=60.0, base_rtt_s=0.005, sample_age_s=0.0
)


def due_times(
    planner: ProbePlanner,
    estimate: LinkEstimate,
    *,
    condition: LinkCondition = LinkCondition.CLEAR,
    seconds: int = 100,
    begin_s: float = 0.0,
) -> list[tuple[float, int]]:
    sizes = []
    for second in range(seconds):
        now_s = begin_s + second
        size = planner.due_bytes(estimate, condition, now_s)
        if size is not None:
            sizes.append((now_s, size))
    return sizes


def test_an_unknown_link_is_probed_once_it_was_idle() -> None:
    (at_s, size), *_ = due_times(ProbePlanner(), UNKNOWN)
    assert (at_s, size) == (2.0, ProbeConfig().first_bytes)


def test_a_path_on_which_probes_find_nothing_costs_little() -> None:
    config = ProbeConfig()
    sizes = due_times(ProbePlanner(config), UNKNOWN, seconds=2000)
    least_bytes = config.budget_bytes + 1990 * config.least_bytes_per_s
    assert sum(size for _, size in sizes) == pytest.approx(least_bytes, rel=0.01)


@pytest.mark.parametrize(
    "busy",
    [
        replace(KNOWN, achieved_bytes_per_s=50.0 * MB),
        replace(KNOWN, backlog_bytes=1),
        replace(KNOWN, is_up=False),
        replace(KNOWN, age_s=9.0),
    ],
)
def test_no_probe_while_traffic_flows_or_the_rate_is_fresh_or_nothing_stands(
    busy: LinkEstimate,
) -> None:
    assert not due_times(ProbePlanner(), busy)


def test_traffic_puts_a_probe_off() -> None:
    planner = ProbePlanner()
    due_times(planner, replace(KNOWN, backlog_bytes=1), seconds=10)
    (first, *_) = due_times(planner, KNOWN, begin_s=10.0)
    assert first[0] == 11.0


def test_a_probe_lasts_as_long_as_connections_need() -> None:
    config = ProbeConfig(most_bytes=64 * MB, budget_bytes=64 * MB)
    (_, short), *_ = due_times(ProbePlanner(config), KNOWN)
    assert short == 10 * MB  # 0.1 s
    (_, far), *_ = due_times(ProbePlanner(config), replace(KNOWN, base_rtt_s=0.05))
    assert far == 40 * MB  # 8 round trips
    (_, slow), *_ = due_times(ProbePlanner(config), replace(KNOWN, available_bytes_per_s=0.0))
    assert slow == config.least_bytes
    (_, bounded), *_ = due_times(ProbePlanner(), KNOWN)
    assert bounded == ProbeConfig().most_bytes


@pytest.mark.parametrize("doubt", ["condition", "floor"])
def test_a_doubtful_link_is_looked_at_sooner(doubt: str) -> None:
    aged = replace(KNOWN, age_s=6.0, is_floor=doubt == "floor")
    condition = LinkCondition.CONGESTED if doubt == "condition" else LinkCondition.CLEAR
    assert not due_times(ProbePlanner(), replace(aged, is_floor=False))
    assert due_times(ProbePlanner(), aged, condition=condition)


def test_probes_that_bring_no_news_keep_their_distance() -> None:
    times = [at_s for at_s, _ in due_times(ProbePlanner(), KNOWN, seconds=2000)]
    least_s = ProbeConfig().recheck_s
    assert len(times) > 2
    assert all(later - at_s >= least_s for at_s, later in pairwise(times))


@given(
    rates=st.lists(st.floats(0, 1000 * MB), min_size=1, max_size=40),
    passed_s=st.floats(0.1, 100),
    share=st.floats(1e-5, 0.01),
)
def test_probes_never_cost_more_than_their_share(
    rates: list[float], passed_s: float, share: float
) -> None:
    config, now_s, spent, earned = ProbeConfig(share=share), 0.0, 0, 0.0
    planner = ProbePlanner(config)
    for step, rate in enumerate(rates):
        now_s = step * passed_s
        earned += max(config.least_bytes_per_s, share * rate) * passed_s if step else 0.0
        estimate = replace(KNOWN, available_bytes_per_s=rate)
        spent += planner.due_bytes(estimate, LinkCondition.RISING, now_s) or 0
        assert spent <= config.budget_bytes + earned + 1


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ({"share": 0.5}, "share must be at most"),
        ({"idle_s": 0.0}, "idle_s must be above 0"),
        ({"least_bytes": 2**40}, "in order"),
    ],
)
def test_an_impossible_setting_is_refused(bad: dict[str, float], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ProbeConfig(**bad)  # type: ignore[arg-type]
