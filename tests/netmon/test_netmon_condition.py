"""The condition of a link: what is congestion, how soon it is seen, and that it does not flap."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from fluid_link import FluidLink
from hypothesis import given, settings
from hypothesis import strategies as st
from watched_link import GBIT, MB, STEP_S, FluidWatched, StepWatched

from netmon.detector import DetectorConfig
from netmon.estimate import LinkCondition
from netmon.monitor import LinkMonitor

CLEAR, RISING, CONGESTED, DOWN = LinkCondition


def fluid_watched(fluid: FluidLink | None = None) -> FluidWatched:
    return FluidWatched(LinkMonitor("a>b"), fluid)


def step_watched(config: DetectorConfig | None = None) -> StepWatched:
    return StepWatched(LinkMonitor("a>b", config))


def busy() -> StepWatched:
    """A link that carries 800 Mbit/s, 20 MB in each step, and could carry no more."""
    watched = step_watched()
    assert watched.step(20, 10, waiting_bytes=MB) is CLEAR
    return watched


def test_what_is_said_before_anything_happened() -> None:
    report = LinkMonitor("a>b").report(7.0)
    assert (report.condition, report.condition_s) == (CLEAR, 0)
    assert report.reason == "nothing was observed yet"
    assert report.estimate.sample_age_s is None
    watched = step_watched()
    watched.step()
    assert watched.monitor.report(1.0).reason == "no sign of congestion yet"
    assert watched.monitor.report(1.0).condition_s == 1.0


def test_conditions_are_named_in_small_letters_from_good_to_bad() -> None:
    assert [*LinkCondition] == ["clear", "rising", "congested", "down"]
    assert [condition.severity for condition in LinkCondition] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("mb", "bad", "condition", "text"),
    [
        (20, {"rtt_s": 0.059}, CLEAR, ""),
        (20, {"rtt_s": 0.07}, RISING, "50 ms queueing over 20 ms"),
        (20, {"loss": 0.019}, CLEAR, ""),
        (20, {"loss": 0.03}, RISING, "3.0% retransmitted"),
        (20, {"loss": 0.5}, RISING, "50.0% retransmitted"),
        (20, {"loss": 0.03, "rtt_s": 0.07}, CONGESTED, "50 ms queueing over 20 ms, 3.0% retra"),
        (14, {}, CLEAR, ""),
        (12, {}, RISING, "carries 480 of"),
        (6, {}, CONGESTED, "carries 240 of"),
    ],
)
def test_each_sign_is_seen_and_named(
    mb: float, bad: dict[str, float], condition: LinkCondition, text: str
) -> None:
    watched = busy()
    assert watched.step(mb, 20, waiting_bytes=MB, **bad) is condition  # type: ignore[arg-type]
    assert text in watched.monitor.reason
    assert bool(watched.changes) is (condition is not CLEAR)


def test_a_stall_gets_worse_until_the_link_is_down() -> None:
    watched = step_watched()
    watched.step(0, 25, waiting_bytes=777)
    assert watched.conditions() == [RISING, CONGESTED, DOWN]
    assert [change.at_s for change in watched.changes] == pytest.approx([0.8, 1.2, 3.0])
    assert watched.changes[0].reason == "nothing acknowledged for 0.8 s"
    assert watched.monitor.reason == "777 bytes wait, none acknowledged for 5.0 s"


def test_a_link_without_connections_is_down_at_once() -> None:
    watched = busy()
    assert watched.step(is_up=False) is DOWN
    assert watched.changes[-1].reason == "no connection stands"


def test_a_growing_backlog_is_congestion_and_a_draining_one_is_not() -> None:
    growing, draining = busy(), busy()
    conditions = [growing.step(20, waiting_bytes=step * 30 * MB) for step in range(1, 12)]
    assert (conditions[0], conditions[-1]) == (CLEAR, CONGESTED)
    assert growing.conditions() == [RISING, CONGESTED]
    assert "s grows" in growing.monitor.reason
    for step in range(40):
        assert draining.step(20, waiting_bytes=(900 - 20 * step) * MB) is CLEAR
    # A backlog that stays is no sign either.
    assert draining.step(20, 20, waiting_bytes=100 * MB) is CLEAR


def test_one_odd_sample_is_not_believed() -> None:
    watched = busy()
    for _ in range(3):
        watched.step(1, waiting_bytes=MB)
        watched.step(20, 5, waiting_bytes=MB)
        watched.step(20, loss=0.03, waiting_bytes=MB)
        watched.step(20, 5, waiting_bytes=MB)
    assert not watched.changes


def test_it_gets_better_by_one_step_at_a_time_after_dwelling_in_calm() -> None:
    watched = busy()
    watched.step(is_up=False)
    watched.step(20, 200, waiting_bytes=MB)
    assert watched.conditions() == [DOWN, CONGESTED, RISING, CLEAR]
    times_s = [change.at_s for change in watched.changes]
    assert all(after - before == pytest.approx(5.0, abs=0.3) for before, after in pairwise(times_s))
    assert watched.changes[-1].reason.startswith("calm for ")
    num_changes = watched.monitor.report(watched.now_s).num_changes
    assert num_changes == {CLEAR: 1, RISING: 1, CONGESTED: 1, DOWN: 1}


def test_a_sign_just_below_its_bound_keeps_the_condition_and_every_sign_begins_calm_anew() -> None:
    watched = busy()
    watched.step(20, 10, loss=0.03, waiting_bytes=MB)
    assert watched.step(20, 100, loss=0.018, waiting_bytes=MB) is RISING
    assert "3.0%" not in watched.monitor.reason  # the reason follows the numbers
    for _ in range(5):
        assert watched.step(20, 12, loss=0.01, waiting_bytes=MB) is RISING  # 2.4 s
        watched.step(20, 4, loss=0.025, waiting_bytes=MB)
    assert watched.step(20, 30, loss=0.01, waiting_bytes=MB) is CLEAR


def test_nobody_knows_whether_it_was_calm_in_a_silence() -> None:
    watched = busy()
    watched.step(6, 5, waiting_bytes=MB)
    watched.now_s += 100
    assert watched.step(20, 14, waiting_bytes=MB) is CONGESTED
    assert watched.step(20, 5, waiting_bytes=MB) is RISING


def test_a_link_that_stays_slow_is_a_slow_link_in_the_end() -> None:
    watched = step_watched(DetectorConfig(reference_s=20.0))
    watched.step(20, 10, waiting_bytes=MB)
    assert watched.step(4, 5, waiting_bytes=MB) is CONGESTED
    assert watched.step(4, 400, waiting_bytes=MB) is CLEAR
    reference = watched.monitor.report(watched.now_s).reference_bytes_per_s
    assert reference == pytest.approx(20 * MB, rel=0.1)


def test_an_old_measurement_is_no_sign_and_a_burst_no_reference() -> None:
    watched = busy()
    watched.step(4, 5, waiting_bytes=MB)
    assert watched.monitor.condition is CONGESTED
    assert watched.step(0, 100) is CLEAR
    burst = step_watched()
    burst.step(4)
    report = burst.monitor.report(burst.now_s)
    assert report.estimate.is_floor
    assert report.reference_bytes_per_s < report.estimate.available_bytes_per_s / 3


@pytest.mark.parametrize("bad", [{"dwell_s": 0.0}, {"loss": (0.5, 0.1)}, {"calm_margin": 1.5}])
def test_an_impossible_setting_is_refused_by_name(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        DetectorConfig(**bad)  # type: ignore[arg-type]


PHASES = st.tuples(
    st.sampled_from([0.0, 0.0, 1.0, 6.0, 20.0]),  # MB in a step
    st.sampled_from([0.0, 0.0, 0.03]),  # loss
    st.sampled_from([0.02, 0.02, 0.2]),  # round trip
    st.sampled_from([0, 0, MB, 500 * MB]),  # waiting
    st.sampled_from([True] * 9 + [False]),
    st.integers(1, 40),
)


@settings(deadline=None)
@given(st.lists(PHASES, max_size=20), st.floats(0.5, 8))
def test_it_never_flaps_faster_than_its_dwell_time(
    phases: list[tuple[float, float, float, int, bool, int]], dwell_s: float
) -> None:
    watched = step_watched(DetectorConfig(dwell_s=dwell_s, calm_s=0.4))
    for mb, loss, rtt_s, waiting, is_up, times in phases:
        watched.step(mb, times, loss=loss, rtt_s=rtt_s, waiting_bytes=waiting, is_up=is_up)
    began_s, before = 0.0, CLEAR
    for at_s, condition, reason in watched.changes:
        assert reason
        if condition.severity < before.severity:
            assert condition.severity == before.severity - 1
            assert at_s - began_s >= dwell_s - 1e-6
        began_s, before = at_s, condition


# ---- Against a link. Phases of the drop within the sampling interval are all tried.


@pytest.mark.parametrize("phase_s", [0.0, 0.05, 0.1, 0.15, 0.195])
@pytest.mark.parametrize("offered", [0.7, 1.5])
@pytest.mark.parametrize("rtt_s", [0.001, 0.04, 0.1])
def test_a_drop_to_a_twentieth_is_congestion_within_a_second(
    phase_s: float, offered: float, rtt_s: float
) -> None:
    watched = fluid_watched(FluidLink(GBIT, rtt_s, buffer_bytes=2 * MB))
    watched.run(5.0, GBIT * 1.2)
    watched.run(5.0, GBIT * 0.7)
    fluid, num_before = watched.fluid, len(watched.changes)
    fluid.offer(offered * GBIT * STEP_S)
    fluid.run(phase_s) if phase_s else None
    fluid.bytes_per_s, dropped_s = 50e6 / 8, fluid.now_s
    fluid.run(STEP_S - phase_s)
    watched.now_s = fluid.now_s
    watched.observe(fluid.sample())
    watched.run(2.0, offered * GBIT)
    changes = watched.changes[num_before:]
    assert next(each.at_s for each in changes if each.condition is CONGESTED) - dropped_s <= 1.0


def test_congestion_is_seen_before_transfers_are_late_and_ends_slowly() -> None:
    """Transfers of 100 MB arrive every second and are predicted at the rate of the moment."""
    watched = fluid_watched()
    fluid = watched.fluid
    transfers: list[tuple[float, float]] = []  # predicted end, bytes acknowledged by then
    missed_s = math.inf
    watched.run(2.0, 1.5 * GBIT)
    offered = fluid.acked_bytes + fluid.waiting_bytes
    for step in range(250):
        if step == 51:
            fluid.bytes_per_s = 50e6 / 8
        if step == 100:
            fluid.bytes_per_s, fluid.waiting_bytes = GBIT, 0.0
        if step % 5 == 0 and step < 55:
            waiting = fluid.waiting_bytes + 100 * MB
            took_s = waiting / watched.estimate().available_bytes_per_s + 0.3
            offered += 100 * MB
            fluid.offer(100 * MB)
            transfers.append((fluid.now_s + took_s, offered))
        watched.run(STEP_S, 0.2 * GBIT if step >= 100 else 0)
        late = [end for end, acked in transfers if end < fluid.now_s and acked > fluid.acked_bytes]
        if late and step < 100:
            missed_s = min(missed_s, fluid.now_s)
    dropped_s, restored_s = 2 + 51 * STEP_S, 2 + 100 * STEP_S
    congested_s = next(each.at_s for each in watched.changes if each.condition is CONGESTED)
    assert dropped_s < congested_s < missed_s < math.inf
    ended = [change for change in watched.changes if change.at_s > restored_s]
    assert [change.condition for change in ended] == [RISING, CLEAR]
    assert 5 < ended[-1].at_s - restored_s < 20


@pytest.mark.parametrize(("rate", "loss"), [(0.3, 0.0), (0.9, 0.0), (1.0, 0.0), (0.9, 0.03)])
def test_a_busy_link_that_keeps_up_is_not_congested(rate: float, loss: float) -> None:
    watched = fluid_watched(FluidLink(GBIT, 0.04, loss=loss))
    watched.run(60.0, rate * GBIT)
    assert set(watched.conditions()) <= {CLEAR, RISING}


def test_an_outage_is_down_and_recovery_takes_less_than_half_a_minute() -> None:
    watched = fluid_watched()
    watched.run(5.0, GBIT / 2)
    watched.fluid.is_up = False
    watched.run(5.0)
    assert [change[:2] for change in watched.changes] == [(pytest.approx(5.2), DOWN)]
    watched.fluid.is_up = True
    watched.run(30.0, GBIT / 2)
    assert watched.monitor.condition is CLEAR


def test_a_black_hole_is_down_too() -> None:
    watched = fluid_watched()
    watched.run(5.0, GBIT / 2)
    watched.fluid.bytes_per_s = 0
    watched.run(5.0, GBIT / 2)
    assert watched.conditions()[-2:] == [CONGESTED, DOWN]
    assert watched.changes[-1].at_s - 5.0 < 3.6
