"""The traffic meter: exact means, decay, changes that are seen at once, noise that is not."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paper_region import LENGTHS

from scheduler.live.learning.measured_traffic import MIN_RECENT, MeasuredTraffic, TrafficMeter
from scheduler.planning.lengths import mean_tokens


def feed(
    meter: TrafficMeter, start_s: float, end_s: float, rate_rps: float, **changes: float
) -> None:
    """Poisson arrivals with half of each prompt cached; `scale` of lengths, `output` tokens."""
    rng = np.random.default_rng((int(start_s), 3))
    num = int((end_s - start_s) * rate_rps)
    uncached = LENGTHS.sample(num, rng) * changes.get("scale", 1.0)
    for at_s, tokens in zip(np.sort(rng.uniform(start_s, end_s, num)), uncached, strict=True):
        meter.arrived(2 * int(tokens), int(tokens), float(at_s))
        meter.finished(int(changes.get("output", 1024)), float(at_s))


def known(meter: TrafficMeter, now_s: float) -> MeasuredTraffic:
    found = meter.measured(now_s)
    assert found is not None
    return found


def test_nothing_is_known_before_a_request_came_and_one_ended() -> None:
    meter = TrafficMeter()
    assert meter.measured(0) is None
    meter.arrived(100, 0, 1)
    assert meter.measured(1) is None
    meter.finished(0, 2)
    assert meter.measured(2) is None
    meter.finished(7, 3)
    assert known(meter, 3).output.mean_tokens == 7


def test_means_ratios_and_rates_are_what_came() -> None:
    meter = TrafficMeter()
    for second in range(600):
        meter.arrived(1000, 250, second)
        meter.arrived(3000, 2999, second)
        meter.finished(100, second)
        meter.finished(300, second)
    found = known(meter, 600)
    assert found.uncached.mean_tokens == pytest.approx((750 + 1) / 2, rel=0.01)
    assert mean_tokens(found.uncached.lengths) == pytest.approx(found.uncached.mean_tokens)
    assert found.input_tokens == pytest.approx(2000)
    assert found.hit_ratio == pytest.approx(1 - 375.5 / 2000, rel=0.01)
    assert found.rate_rps == pytest.approx(2, rel=0.01)
    assert found.output.mean_tokens == pytest.approx(200)
    assert found.num_requests == pytest.approx(1200, rel=0.01)
    assert found.output.relative_error == pytest.approx(0.5 / np.sqrt(1200), rel=0.02)
    assert found.traffic(output_scale=2).output_tokens == pytest.approx(400)


def test_the_distribution_comes_back_within_a_bin() -> None:
    meter = TrafficMeter()
    drawn = LENGTHS.sample(20_000, np.random.default_rng(1))
    for tokens in drawn:
        meter.arrived(int(tokens), 0, 5)
    meter.finished(1024, 5)
    lengths = known(meter, 6).uncached.lengths
    shares = np.linspace(0.05, 0.95, 10)
    assert lengths.quantile(shares) == pytest.approx(np.quantile(drawn, shares), rel=0.02)
    square = lengths.moments_to([lengths.max_tokens])[2, 0]
    assert square == pytest.approx(np.mean(drawn**2), rel=0.005)


def test_old_requests_weigh_less_and_go_at_last() -> None:
    meter = TrafficMeter()
    num = MIN_RECENT - 1  # too few for a change to be looked for
    for _ in range(num):
        meter.arrived(100, 0, 0)
        meter.finished(1, 0)
    for _ in range(num):
        meter.arrived(400, 0, 3600)
        meter.finished(1, 3600)
    assert known(meter, 3600).uncached.mean_tokens == pytest.approx((400 + 100 / 2) / 1.5)
    assert known(meter, 7140).uncached.num < 2 * num
    assert known(meter, 7200).uncached.mean_tokens == pytest.approx(400)
    assert known(meter, 10_799).uncached.mean_tokens == pytest.approx(400)
    assert meter.measured(10_800) is None


@pytest.mark.parametrize("change", [{"scale": 1.5}, {"scale": 1 / 3.0}, {"output": 341.0}])
def test_a_change_is_seen_within_a_period(change: dict[str, float]) -> None:
    meter = TrafficMeter()
    feed(meter, 0, 7200, 2)
    feed(meter, 7230, 7530, 2, **change)
    found = known(meter, 7530)
    mean = mean_tokens(LENGTHS) * change.get("scale", 1)
    assert found.uncached.mean_tokens == pytest.approx(mean, rel=0.12)
    assert found.output.mean_tokens == pytest.approx(change.get("output", 1024), rel=0.01)
    changed = found.uncached if "scale" in change else found.output
    same = found.output if "scale" in change else found.uncached
    assert changed.window_s <= 360
    assert same.window_s > 7000


def test_noise_is_no_change() -> None:
    meter = TrafficMeter()
    for hour in range(24):
        feed(meter, hour * 3600, (hour + 1) * 3600, 1)
        window_s = known(meter, (hour + 1) * 3600).uncached.window_s
        assert window_s >= min((hour + 1) * 3600, 7200) - 60


def test_time_that_goes_back_stands_still() -> None:
    meter = TrafficMeter()
    meter.arrived(100, 0, 1000)
    meter.arrived(100, 0, 10)
    meter.finished(1, 10)
    assert known(meter, 1000).uncached.num == 2


def test_impossible_values_are_refused() -> None:
    with pytest.raises(ValueError, match="200 of 100 tokens cached"):
        TrafficMeter().arrived(100, 200, 0)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 1 << 26),
            st.floats(0, 1),
            st.integers(0, 1 << 20),
            st.floats(0, 5000),
            st.sampled_from([1, MIN_RECENT]),
        ),
        max_size=40,
    )
)
def test_whatever_came_the_summary_makes_sense(
    requests: list[tuple[int, float, int, float, int]],
) -> None:
    meter = TrafficMeter()
    now_s = 0.0
    num_requests = 0
    for prompt, cached, output, wait_s, times in requests:
        now_s += wait_s
        num_requests += times
        for _ in range(times):
            meter.arrived(prompt, int(prompt * cached), now_s)
            meter.finished(output, now_s)
        found = meter.measured(now_s)
        if found is not None:
            assert 0 <= found.hit_ratio <= 1
            assert 0 < found.num_requests <= num_requests + 1e-6
            assert found.rate_rps >= 0
            assert mean_tokens(found.uncached.lengths) == pytest.approx(found.uncached.mean_tokens)
