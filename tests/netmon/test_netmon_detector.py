"""The detector: what is congestion, how soon it is seen, and that it does not flap."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from fluid_link import FluidLink
from hypothesis import given, settings
from hypothesis import strategies as st

from netmon.detector import Change, CongestionDetector, DetectorConfig
from netmon.estimate import LinkCondition, LinkEstimate
from netmon.monitor import LinkMonitor

CLEAR, RISING, CONGESTED, DOWN = LinkCondition
MB = 1_000_000
GBIT = 125 * MB
STEP_S = 0.2


def estimate(
    *,
    rate: float = 100 * MB,
    age_s: float | None = 0.0,
    sample_age_s: float | None = 0.0,
    backlog_s: float = 0.0,
    delay_s: float = 0.0,
    loss: float = 0.0,
    stalled_s: float = 0.0,
    is_up: bool = True,
) -> LinkEstimate:
    return LinkEstimate(
        available_bytes_per_s=rate,
        age_s=age_s,
        full_age_s=age_s,
        sample_age_s=sample_age_s,
        base_rtt_s=0.02,
        queueing_delay_s=delay_s,
        backlog_s=backlog_s,
        loss=loss,
        stalled_s=stalled_s,
        is_up=is_up,
    )


CALM = estimate()


class Judged:
    """A detector with a clock of its own."""

    def __init__(self, config: DetectorConfig | None = None) -> None:
        self.detector = CongestionDetector(config)
        self.now_s = 0.0
        self.changes: list[Change] = []

    def show(self, seen: LinkEstimate | Sequence[LinkEstimate], times: int = 1) -> LinkCondition:
        for one in [seen] * times if isinstance(seen, LinkEstimate) else seen:
            change = self.detector.observe(one, self.now_s)
            if change is not None:
                self.changes.append(change)
            self.now_s += STEP_S
        return self.detector.condition


@pytest.mark.parametrize(
    ("seen", "condition", "text"),
    [
        (estimate(delay_s=0.05), RISING, "50 ms queueing over 20 ms"),
        (estimate(loss=0.03), RISING, "3.0% retransmitted"),
        (estimate(loss=0.5), RISING, "50.0% retransmitted"),
        (estimate(rate=60 * MB), RISING, "carries 480 of"),
        (estimate(rate=30 * MB), CONGESTED, "carries 240 of"),
        (estimate(loss=0.03, delay_s=0.05), CONGESTED, "50 ms queueing over 20 ms, 3.0%"),
        (estimate(stalled_s=0.6), RISING, "nothing acknowledged for 0.6 s"),
        (estimate(stalled_s=1.1), CONGESTED, "nothing acknowledged for 1.1 s"),
        (estimate(stalled_s=3.1), DOWN, "none acknowledged for 3.1 s"),
        (estimate(is_up=False), DOWN, "no connection stands"),
    ],
)
def test_each_sign_is_seen_and_named(
    seen: LinkEstimate, condition: LinkCondition, text: str
) -> None:
    judged = Judged()
    assert judged.show(CALM, 5) is CLEAR
    assert judged.show(seen, 2) is condition
    assert text in judged.changes[-1].reason
    assert judged.detector.reason == judged.changes[-1].reason


def test_one_odd_sample_is_not_believed() -> None:
    judged = Judged()
    judged.show(CALM, 5)
    assert judged.show([estimate(rate=MB), CALM, estimate(loss=0.9), CALM]) is CLEAR
    assert not judged.changes


def test_a_growing_backlog_is_congestion_and_a_draining_one_is_not() -> None:
    growing = [estimate(backlog_s=0.4 * step) for step in range(12)]
    assert Judged().show(growing[:4]) is CLEAR
    assert Judged().show(growing[:5]) is RISING
    assert Judged().show(growing) is CONGESTED
    draining = [estimate(backlog_s=9 - 0.2 * step) for step in range(40)]
    assert Judged().show([CALM, *draining]) is CLEAR


def test_it_gets_better_by_one_step_at_a_time_after_dwelling_in_calm() -> None:
    judged = Judged()
    judged.show(CALM, 3)
    judged.show(estimate(rate=5 * MB), 2)
    judged.show(CALM, 80)
    assert [change.after for change in judged.changes] == [CONGESTED, RISING, CLEAR]
    congested, rising, clear = (change.at_s for change in judged.changes)
    assert rising - congested >= 5
    assert clear - rising >= 5
    assert clear - congested < 12
    assert "calm for" in judged.changes[-1].reason


def test_down_ends_in_steps_too() -> None:
    judged = Judged()
    judged.show(CALM, 3)
    assert judged.show(estimate(is_up=False)) is DOWN
    judged.show(CALM, 120)
    assert [change.after for change in judged.changes] == [DOWN, CONGESTED, RISING, CLEAR]
    assert judged.changes[-1].at_s < 30


def test_signs_just_below_their_bounds_keep_the_condition() -> None:
    judged = Judged()
    judged.show(estimate(loss=0.03), 3)
    assert judged.show(estimate(loss=0.018), 100) is RISING
    assert judged.show(estimate(loss=0.015), 30) is CLEAR


def test_a_link_that_stays_slow_is_a_slow_link_in_the_end() -> None:
    judged = Judged(DetectorConfig(reference_s=20.0))
    judged.show(CALM, 3)
    slow = estimate(rate=20 * MB)
    assert judged.show(slow, 3) is CONGESTED
    assert judged.show(slow, 400) is CLEAR
    assert judged.detector.reference_bytes_per_s == pytest.approx(20 * MB, rel=0.1)


def test_an_old_measurement_is_no_sign() -> None:
    judged = Judged()
    judged.show(CALM, 3)
    judged.show(estimate(rate=5 * MB), 3)
    assert judged.show(estimate(rate=5 * MB, age_s=11.0), 80) is CLEAR


def test_a_burst_is_no_reference() -> None:
    burst = replace(CALM, is_floor=True, achieved_bytes_per_s=2 * MB, full_age_s=None)
    judged = Judged()
    judged.show(burst, 5)
    assert judged.detector.reference_bytes_per_s == 2 * MB
    assert judged.show(estimate(rate=2 * MB), 5) is CLEAR


def test_silence_changes_nothing() -> None:
    judged = Judged()
    assert judged.show(estimate(sample_age_s=None, is_up=False), 10) is CLEAR
    judged.show(CALM, 3)
    judged.show(estimate(rate=5 * MB), 3)
    assert judged.show(estimate(sample_age_s=60.0), 200) is CONGESTED
    judged.now_s += 100
    assert judged.show(CALM) is CONGESTED  # nobody saw that it was calm
    assert judged.show(CALM, 20) is RISING


@pytest.mark.parametrize("bad", [{"dwell_s": 0.0}, {"loss": (0.5, 0.1)}, {"calm_margin": 1.5}])
def test_an_impossible_setting_is_refused_by_name(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        DetectorConfig(**bad)  # type: ignore[arg-type]


ESTIMATES = st.builds(
    estimate,
    rate=st.floats(0, 1e9),
    age_s=st.none() | st.floats(0, 30),
    sample_age_s=st.sampled_from([0.0, 0.0, 0.0, 10.0]),
    backlog_s=st.floats(0, 10),
    delay_s=st.floats(0, 1),
    loss=st.floats(0, 0.1),
    stalled_s=st.sampled_from([0.0, 0.0, 0.0, 0.7, 2.0, 4.0]),
    is_up=st.sampled_from([True] * 9 + [False]),
)
RUNS = st.lists(st.tuples(ESTIMATES, st.integers(1, 40)), max_size=30)


@settings(deadline=None)
@given(RUNS, st.floats(0.5, 8))
def test_it_never_flaps_faster_than_its_dwell_time(
    runs: list[tuple[LinkEstimate, int]], dwell_s: float
) -> None:
    judged = Judged(DetectorConfig(dwell_s=dwell_s, calm_s=0.4))
    for seen, times in runs:
        judged.show(seen, times)
    entered_s = 0.0
    for change in judged.changes:
        assert change.reason
        if change.after.severity < change.before.severity:
            assert change.after.severity == change.before.severity - 1
            assert change.at_s - entered_s >= dwell_s
        entered_s = change.at_s


# Against a link. Phases of the drop within the sampling interval are all tried.


def watched(fluid: FluidLink, monitor: LinkMonitor, seconds: float, rate: float) -> list[Change]:
    changes = []
    for _ in range(round(seconds / STEP_S)):
        fluid.offer(rate * STEP_S)
        fluid.run(STEP_S)
        change = monitor.observe(fluid.sample(), fluid.now_s)
        if change is not None:
            changes.append(change)
    return changes


@pytest.mark.parametrize("phase_s", [0.0, 0.05, 0.1, 0.15, 0.195])
@pytest.mark.parametrize("offered", [0.7, 1.5])
@pytest.mark.parametrize("rtt_s", [0.001, 0.04, 0.1])
def test_a_drop_to_a_twentieth_is_congestion_within_a_second(
    phase_s: float, offered: float, rtt_s: float
) -> None:
    fluid, monitor = FluidLink(GBIT, rtt_s, buffer_bytes=2 * MB), LinkMonitor("a>b")
    watched(fluid, monitor, 5.0, GBIT * 1.2)
    watched(fluid, monitor, 5.0, GBIT * 0.7)
    fluid.offer(offered * GBIT * STEP_S)
    fluid.run(phase_s) if phase_s else None
    fluid.bytes_per_s = 50e6 / 8
    dropped_s = fluid.now_s
    fluid.run(STEP_S - phase_s)
    changes = [monitor.observe(fluid.sample(), fluid.now_s)]
    changes += watched(fluid, monitor, 2.0, offered * GBIT)
    seen_s = next(c.at_s for c in changes if c is not None and c.after is CONGESTED)
    assert seen_s - dropped_s <= 1.0


def test_congestion_is_seen_before_transfers_are_late_and_ends_slowly() -> None:
    """Transfers of 100 MB arrive every second and are predicted at the rate of the moment."""
    fluid, monitor = FluidLink(GBIT, 0.02), LinkMonitor("a>b")
    transfers: list[tuple[float, float]] = []  # predicted end, bytes acknowledged by then
    changes, missed_s = [], math.inf
    watched(fluid, monitor, 2.0, 1.5 * GBIT)
    offered = fluid.acked_bytes + fluid.waiting_bytes
    for step in range(250):
        if step == 51:
            fluid.bytes_per_s = 50e6 / 8
        if step == 100:
            fluid.bytes_per_s, fluid.waiting_bytes = GBIT, 0.0
        if step % 5 == 0 and step < 55:
            known = monitor.estimate(fluid.now_s)
            wait_bytes = fluid.waiting_bytes + 100 * MB
            took_s = wait_bytes / known.available_bytes_per_s + 0.3
            offered += 100 * MB
            fluid.offer(100 * MB)
            transfers.append((fluid.now_s + took_s, offered))
        changes += watched(fluid, monitor, STEP_S, 0.2 * GBIT if step >= 100 else 0)
        late = [end for end, acked in transfers if end < fluid.now_s and acked > fluid.acked_bytes]
        if late and step < 100:
            missed_s = min(missed_s, fluid.now_s)
    dropped_s, restored_s = 2 + 51 * STEP_S, 2 + 100 * STEP_S
    congested_s = next(c.at_s for c in changes if c.after is CONGESTED)
    assert dropped_s < congested_s < missed_s < math.inf
    ended = [change for change in changes if change.at_s > restored_s]
    assert [change.after for change in ended] == [RISING, CLEAR]
    assert 5 < ended[-1].at_s - restored_s < 20


@pytest.mark.parametrize("rate", [0.3, 0.9, 1.0])
def test_a_busy_link_that_keeps_up_is_not_congested(rate: float) -> None:
    fluid, monitor = FluidLink(GBIT, 0.02), LinkMonitor("a>b")
    changes = watched(fluid, monitor, 60.0, rate * GBIT)
    assert all(change.after in (CLEAR, RISING) for change in changes)


def test_random_loss_at_full_rate_is_not_congestion() -> None:
    fluid, monitor = FluidLink(GBIT, 0.04, loss=0.03), LinkMonitor("a>b")
    changes = watched(fluid, monitor, 30.0, 0.9 * GBIT)
    assert [change.after for change in changes] == [RISING]


def test_an_outage_is_down_and_recovery_takes_less_than_half_a_minute() -> None:
    fluid, monitor = FluidLink(GBIT, 0.02), LinkMonitor("a>b")
    watched(fluid, monitor, 5.0, GBIT / 2)
    fluid.is_up = False
    (change,) = watched(fluid, monitor, 5.0, 0)
    assert change.after is DOWN
    assert change.at_s == pytest.approx(5.2)
    fluid.is_up = True
    back_s = fluid.now_s
    changes = watched(fluid, monitor, 40.0, GBIT / 2)
    assert changes[-1].after is CLEAR
    assert changes[-1].at_s - back_s < 30


def test_a_black_hole_is_down_too() -> None:
    fluid, monitor = FluidLink(GBIT, 0.02), LinkMonitor("a>b")
    watched(fluid, monitor, 5.0, GBIT / 2)
    fluid.bytes_per_s = 0
    changes = watched(fluid, monitor, 5.0, GBIT / 2)
    assert [change.after for change in changes] == [CONGESTED, DOWN]
    assert changes[-1].at_s - 5.0 < 3.6
