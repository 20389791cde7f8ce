"""Probes: only of idle links, only when needed, never more than their budget pays for."""

from __future__ import annotations

from itertools import pairwise

import pytest
from fluid_link import FluidLink
from hypothesis import given, settings
from hypothesis import strategies as st
from watched_link import GBIT, MB, StepWatched

from netmon.monitor import LinkMonitor
from netmon.probing import (
    BUDGET_BYTES,
    FIRST_PROBE_BYTES,
    LEAST_BYTES_PER_S,
    MOST_PROBE_BYTES,
    RECHECK_S,
    SHARE,
)
from netmon.region_link import LinkPath, LinkView, RegionLink

Probe = tuple[float, int]
"""When it was due, and its size."""


def step_watched() -> StepWatched:
    return StepWatched(LinkMonitor("a>b"))


def probes(watched: StepWatched, seconds: float, mb: float = 0.0, **step: float) -> list[Probe]:
    """The probes that are due while each 0.2 s bring this; nobody sends them."""
    due = []
    for _ in range(round(seconds)):
        watched.step(mb, 5, **step)  # type: ignore[arg-type]
        if size := watched.monitor.due_probe_bytes(watched.now_s):
            due.append((watched.now_s, size))
    return due


def measured(mb: float = 20) -> StepWatched:
    """An idle link, of which 5 `mb` MB/s were measured."""
    watched = step_watched()
    watched.step(mb, 20, waiting_bytes=MB)
    watched.step()
    return watched


def test_an_unknown_link_is_probed_once_it_was_idle() -> None:
    assert probes(step_watched(), 5)[0] == (3.0, FIRST_PROBE_BYTES)


def test_a_path_on_which_probes_find_nothing_costs_little() -> None:
    due = probes(step_watched(), 2000)
    assert sum(size for _, size in due) == pytest.approx(
        BUDGET_BYTES + 1990 * LEAST_BYTES_PER_S, rel=0.01
    )
    assert all(after - before >= RECHECK_S for (before, _), (after, _) in pairwise(due))


def test_no_probe_while_traffic_flows_or_the_rate_is_fresh_or_nothing_stands() -> None:
    assert not probes(measured(), 30, mb=10)
    assert not probes(measured(), 30, waiting_bytes=1)
    assert not probes(measured(), 30, is_up=False)
    due = probes(measured(), 30)
    assert due[0][0] - 4.0 == pytest.approx(10.0, abs=1.2)


def test_traffic_puts_a_probe_off() -> None:
    watched = measured()
    assert not probes(watched, 20, mb=0.1)
    ended_s = watched.now_s
    (at_s, _), *_ = probes(watched, 20)
    assert 2.0 <= at_s - ended_s <= 5.0


def test_a_probe_lasts_as_long_as_connections_need_and_is_bounded() -> None:
    (_, short), *_ = probes(measured(0.5), 30)
    assert short == pytest.approx(0.16 * 2.5 * MB, abs=1)  # 8 round trips
    (_, bounded), *_ = probes(measured(100), 30)
    assert bounded == MOST_PROBE_BYTES


def test_a_doubtful_link_is_looked_at_sooner() -> None:
    def pause_s(watched: StepWatched) -> float:
        """The time between two probes, each of which finds 95 MB/s."""
        times_s = []
        for _ in range(60):
            watched.step(0, 5)
            if size := watched.monitor.due_probe_bytes(watched.now_s):
                times_s.append(watched.now_s)
                watched.monitor.observe_probe(size, size / (95 * MB), watched.now_s)
        return times_s[1] - times_s[0]

    assert pause_s(measured()) == pytest.approx(10.0)
    assert pause_s(step_watched()) == pytest.approx(RECHECK_S)  # a floor, so far


def test_a_long_probe_replaces_what_was_measured_and_a_short_one_raises_it() -> None:
    watched = measured()
    for mb, seconds, rate in ((1, 0.1, 100), (1, 1.0, 1), (2, 0.1, 20)):
        watched.monitor.observe_probe(mb * MB, seconds, watched.now_s)
        estimate = watched.estimate()
        assert estimate.available_bytes_per_s == pytest.approx(rate * MB)
    assert (estimate.is_floor, estimate.age_s) == (True, 0)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.floats(0, 1000 * MB), min_size=1, max_size=40), st.floats(2, 100))
def test_probes_never_cost_more_than_their_budget(rates: list[float], passed_s: float) -> None:
    monitor, spent, earned = LinkMonitor("a>b"), 0, 0.0
    for step, rate in enumerate(rates):
        now_s = step * passed_s
        available = monitor.estimate(now_s).available_bytes_per_s
        earned += max(LEAST_BYTES_PER_S, SHARE * available) * passed_s if step else 0.0
        if size := monitor.due_probe_bytes(now_s):
            spent += size
            monitor.observe_probe(round(rate), 1.0, now_s)
        assert spent <= BUDGET_BYTES + earned + 1


# ---- what routing knows of an idle link


def probe_s(size: float, bytes_per_s: float, rtt_s: float) -> float:
    """How long a probe takes whose connections double what they send at each round trip."""
    took_s, window = rtt_s, 4 * 10 * 1448.0
    while size > window and window < bytes_per_s * rtt_s:
        took_s, size, window = took_s + rtt_s, size - window, 2 * window
    return took_s + size / bytes_per_s


def idle(
    gbit: float, rtt_s: float, *, begins_at: float, seconds: int
) -> tuple[list[LinkView], float]:
    """What routing sees each second of an idle link that once carried the share `begins_at` of its
    rate, and the bytes/s that probes take.
    """
    rate, num_bytes = gbit * GBIT, 0.0
    fluid = FluidLink(rate, rtt_s, step_s=1.0)
    monitor, link, views = LinkMonitor("a>b"), RegionLink("a", "b"), []
    for second in range(seconds):
        fluid.run(1.0)
        monitor.observe(fluid.sample(), fluid.now_s)
        if not second:
            monitor.observe_probe(round(2 * begins_at * rate), 2.0, fluid.now_s)
        elif size := monitor.due_probe_bytes(fluid.now_s):
            num_bytes += size
            monitor.observe_probe(size, probe_s(size, rate, rtt_s), fluid.now_s)
        link.observe([LinkPath("a/1", "b/1", monitor.report(fluid.now_s), 0.0)], fluid.now_s)
        views.append(link.now(fluid.now_s).view())
    return views, num_bytes / seconds


@pytest.mark.parametrize(("gbit", "rtt_s"), [(0.1, 0.02), (1.0, 0.002), (10.0, 0.02), (100.0, 0.1)])
def test_an_idle_link_keeps_a_rate_and_is_found_to_have_recovered(
    gbit: float, rtt_s: float
) -> None:
    views, probes_bytes_per_s = idle(gbit, rtt_s, begins_at=0.01, seconds=1500)
    assert all(view.available_bytes_per_s for view in views)
    # Probes may be too short to say so. The old rate is then a floor, which counts as fast enough.
    rates = [0.0 if view.is_floor else view.available_bytes_per_s or 0.0 for view in views]
    assert all(rate == 0 or rate > 0.5 * gbit * GBIT for rate in rates[620:])
    assert probes_bytes_per_s < 0.01 * gbit * GBIT


def test_an_idle_link_keeps_what_was_measured_and_one_that_became_slow_is_known_to_be() -> None:
    views, _ = idle(0.1, 0.02, begins_at=1.0, seconds=7200)
    assert not any(view.is_floor for view in views)
    views, _ = idle(0.1, 0.02, begins_at=10.0, seconds=180)
    assert not views[-1].is_floor
    assert views[-1].available_bytes_per_s == pytest.approx(0.1 * GBIT, rel=0.5)
