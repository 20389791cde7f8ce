"""The estimator against a fluid link, and against samples that are late, wrong or missing."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
from fluid_link import FluidLink
from hypothesis import example, given, settings
from hypothesis import strategies as st

from netmon.estimate import MAX_BACKLOG_S, Limit, LinkEstimate
from netmon.estimator import EstimatorConfig, LinkEstimator
from netmon.samples import LinkSample, ProbeResult
from netmon.tcp_info import TcpInfo

MB = 1_000_000
GBIT = 125 * MB


def watch(
    fluid: FluidLink, estimator: LinkEstimator, seconds: float, *, offer_bytes_per_s: float = 0
) -> LinkEstimate:
    """Samples every 0.2 s; returns the last estimate."""
    for _ in range(round(seconds / 0.2)):
        fluid.offer(offer_bytes_per_s * 0.2)
        fluid.run(0.2)
        estimator.observe(fluid.sample(), fluid.now_s)
    return estimator.estimate(fluid.now_s)


def test_nothing_is_assumed_of_a_link_that_never_carried_anything() -> None:
    estimate = LinkEstimator().estimate(5.0)
    assert (estimate.available_bytes_per_s, estimate.age_s) == (0, None)
    estimate = watch(FluidLink(GBIT), LinkEstimator(), 3.0)
    assert (estimate.available_bytes_per_s, estimate.age_s) == (0, None)
    assert (estimate.limited_by, estimate.backlog_s) == (Limit.IDLE, 0)


def test_a_backlogged_link_is_measured() -> None:
    fluid, estimator = FluidLink(GBIT, 0.02, buffer_bytes=MB), LinkEstimator()
    estimate = watch(fluid, estimator, 4.0, offer_bytes_per_s=2 * GBIT)
    assert estimate.available_bytes_per_s == pytest.approx(GBIT, rel=0.02)
    assert estimate.achieved_bytes_per_s == pytest.approx(GBIT, rel=0.05)
    assert estimate.utilisation > 0.95
    assert (estimate.age_s, estimate.is_floor) == (0, False)
    assert estimate.limited_by is Limit.LINK
    assert estimate.queueing_delay_s == pytest.approx(MB / GBIT, rel=0.05)
    assert estimate.base_rtt_s == pytest.approx(0.02)
    assert estimate.backlog_s == pytest.approx(fluid.waiting_bytes / GBIT, rel=0.05)


def test_a_link_that_is_never_full_is_known_to_carry_what_it_carried() -> None:
    fluid, estimator = FluidLink(GBIT, num_connections=1), LinkEstimator()
    estimate = watch(fluid, estimator, 10.0, offer_bytes_per_s=GBIT / 4)
    assert estimate.is_floor
    assert 0.5 * GBIT < estimate.available_bytes_per_s <= GBIT
    assert estimate.utilisation < 0.5
    assert estimate.limited_by is Limit.IDLE


def test_light_traffic_disproves_an_old_low_measurement() -> None:
    fluid, estimator = FluidLink(GBIT / 50, num_connections=1), LinkEstimator()
    watch(fluid, estimator, 3.0, offer_bytes_per_s=GBIT)
    fluid.bytes_per_s, fluid.waiting_bytes = GBIT, 0.0
    estimate = watch(fluid, estimator, 3.0, offer_bytes_per_s=GBIT / 10)
    assert estimate.available_bytes_per_s > GBIT / 10
    assert estimate.is_floor
    assert estimate.full_age_s == pytest.approx(3)
    assert estimate.age_s is not None
    assert estimate.age_s < 3


def test_knowledge_of_an_idle_link_stands_and_ages() -> None:
    fluid, estimator = FluidLink(GBIT), LinkEstimator()
    watch(fluid, estimator, 2.0, offer_bytes_per_s=2 * GBIT)
    watch(fluid, estimator, 10.0)
    before = estimator.estimate(fluid.now_s)
    watch(fluid, estimator, 60.0)
    after = estimator.estimate(fluid.now_s)
    assert after.available_bytes_per_s == before.available_bytes_per_s
    assert after.age_s is not None
    assert after.age_s > 60
    assert after.achieved_bytes_per_s < 1
    assert after.queueing_delay_s == 0
    assert after.limited_by is Limit.IDLE


def test_a_fall_of_the_rate_shows_within_a_second() -> None:
    fluid, estimator = FluidLink(GBIT, 0.02), LinkEstimator()
    watch(fluid, estimator, 4.0, offer_bytes_per_s=2 * GBIT)
    fluid.bytes_per_s = GBIT / 20
    estimate = watch(fluid, estimator, 0.8, offer_bytes_per_s=GBIT)
    assert estimate.available_bytes_per_s == pytest.approx(GBIT / 20, rel=0.05)
    assert estimate.loss > 0.02
    assert estimate.queueing_delay_s > 0.1
    watch(fluid, estimator, 3.0, offer_bytes_per_s=GBIT)
    fluid.bytes_per_s = GBIT
    estimate = watch(fluid, estimator, 4.0, offer_bytes_per_s=GBIT)
    assert estimate.available_bytes_per_s == pytest.approx(GBIT, rel=0.1)


def test_an_outage_that_connections_survive_is_a_stall() -> None:
    fluid, estimator = FluidLink(GBIT, 0.02), LinkEstimator()
    watch(fluid, estimator, 2.0, offer_bytes_per_s=2 * GBIT)
    fluid.bytes_per_s = 0
    estimate = watch(fluid, estimator, 2.0, offer_bytes_per_s=GBIT)
    assert estimate.available_bytes_per_s == 0
    assert estimate.backlog_s == MAX_BACKLOG_S
    assert estimate.stalled_s >= 1.8
    fluid.bytes_per_s = GBIT
    estimate = watch(fluid, estimator, 0.4, offer_bytes_per_s=GBIT)
    assert estimate.stalled_s == 0


def test_a_link_without_connections_offers_nothing_until_it_is_back() -> None:
    fluid, estimator = FluidLink(GBIT), LinkEstimator()
    watch(fluid, estimator, 2.0, offer_bytes_per_s=2 * GBIT)
    fluid.is_up = False
    estimate = watch(fluid, estimator, 5.0)
    assert not estimate.is_up
    assert estimate.available_bytes_per_s == 0
    fluid.is_up = True
    estimate = watch(fluid, estimator, 1.0)
    assert estimate.available_bytes_per_s == pytest.approx(GBIT, rel=0.05)


def test_a_ramp_does_not_lower_what_is_known() -> None:
    """Connections that start again are slow at first, and no queue and no loss says otherwise."""
    estimator = LinkEstimator()
    fluid = FluidLink(GBIT, 0.05, buffer_bytes=MB)
    watch(fluid, estimator, 3.0, offer_bytes_per_s=2 * GBIT)
    fluid.waiting_bytes = 0
    known = watch(fluid, estimator, 3.0).available_bytes_per_s
    fluid.buffer_bytes = 0
    fluid.bytes_per_s = GBIT / 50
    estimate = watch(fluid, estimator, 0.4, offer_bytes_per_s=GBIT)
    assert estimate.available_bytes_per_s == known
    estimate = watch(fluid, estimator, 1.0, offer_bytes_per_s=GBIT)
    assert estimate.available_bytes_per_s < known / 10


def test_samples_out_of_order_and_too_close_together_are_ignored() -> None:
    fluid, estimator = FluidLink(GBIT), LinkEstimator()
    watch(fluid, estimator, 2.0, offer_bytes_per_s=2 * GBIT)
    before = estimator.estimate(fluid.now_s)
    old = replace(fluid.sample(), queued_bytes=0, acked_bytes=0, connections=())
    estimator.observe(old, fluid.now_s - 1)
    estimator.observe(old, fluid.now_s)
    estimator.observe(old, fluid.now_s + 0.001)
    assert estimator.estimate(fluid.now_s) == before
    assert estimator.totals().num_ignored_samples == 3


def test_a_long_silence_is_no_measurement() -> None:
    fluid, estimator = FluidLink(GBIT), LinkEstimator()
    watch(fluid, estimator, 2.0, offer_bytes_per_s=2 * GBIT)
    fluid.offer(1e12)
    fluid.bytes_per_s = GBIT / 2
    fluid.run(60.0)
    silent = estimator.estimate(fluid.now_s)
    assert silent.sample_age_s == pytest.approx(60)
    assert silent.achieved_bytes_per_s < 1
    estimator.observe(fluid.sample(), fluid.now_s)
    estimate = estimator.estimate(fluid.now_s)
    assert estimate.sample_age_s == 0
    assert estimate.available_bytes_per_s == pytest.approx(GBIT, rel=0.05)


def test_totals_never_fall_when_connections_are_replaced() -> None:
    fluid, estimator = FluidLink(GBIT, num_connections=1), LinkEstimator()
    watch(fluid, estimator, 2.0, offer_bytes_per_s=GBIT)
    before = estimator.totals()
    fluid = FluidLink(GBIT, num_connections=1)
    fluid.now_s = 2.0
    watch(fluid, estimator, 1.0, offer_bytes_per_s=GBIT)
    after = estimator.totals()
    assert after.sent_bytes > before.sent_bytes
    assert after.acked_bytes >= before.acked_bytes
    assert after.num_samples == 15


def test_coding_makes_the_link_faster_for_transfers() -> None:
    fluid, estimator = FluidLink(GBIT / 10), LinkEstimator()
    for _ in range(50):
        fluid.offer(GBIT)
        fluid.run(0.2)
        sample = fluid.sample()
        estimator.observe(replace(sample, acked_bytes=int(sample.acked_bytes * 1.5)), fluid.now_s)
    estimate = estimator.estimate(fluid.now_s)
    assert estimate.available_bytes_per_s == pytest.approx(GBIT / 10 * 1.5, rel=0.03)


def limited_by(field: str, connection: TcpInfo) -> TcpInfo:
    limited_s = connection.busy_s * 0.7
    if field == "rwnd_limited_s":
        return replace(connection, rwnd_limited_s=limited_s)
    return replace(connection, sndbuf_limited_s=limited_s)


@pytest.mark.parametrize(
    ("field", "limit"),
    [("rwnd_limited_s", Limit.RECEIVER_WINDOW), ("sndbuf_limited_s", Limit.SEND_BUFFER)],
)
def test_what_limits_is_told(field: str, limit: Limit) -> None:
    fluid, estimator = FluidLink(GBIT), LinkEstimator()
    for _ in range(3):
        fluid.offer(GBIT)
        fluid.run(0.2)
        sample = fluid.sample()
        limited = {n: limited_by(field, info) for n, info in sample.connections.items()}
        estimator.observe(replace(sample, connections=limited), fluid.now_s)
    assert estimator.estimate(fluid.now_s).limited_by is limit


def test_a_long_probe_replaces_and_a_short_one_raises() -> None:
    fluid, estimator = FluidLink(GBIT, 0.02), LinkEstimator()
    watch(fluid, estimator, 2.0, offer_bytes_per_s=2 * GBIT)
    estimator.observe_probe(ProbeResult(acked_bytes=MB, duration_s=0.1), 100.0)
    assert estimator.estimate(100.0).available_bytes_per_s == pytest.approx(GBIT, rel=0.05)
    estimator.observe_probe(ProbeResult(acked_bytes=MB, duration_s=1.0), 101.0)
    estimate = estimator.estimate(101.0)
    assert (estimate.available_bytes_per_s, estimate.age_s) == (MB, 0)
    estimator.observe_probe(ProbeResult(acked_bytes=2 * MB, duration_s=0.1), 102.0)
    assert estimator.estimate(102.0).available_bytes_per_s == 20 * MB


def test_a_setting_of_zero_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="rise_s must be above 0"):
        EstimatorConfig(rise_s=0)


COUNTS = st.integers(0, 2**40)
SECONDS = st.floats(0, 1e6)
CONNECTIONS = st.builds(
    TcpInfo,
    rtt_s=SECONDS,
    min_rtt_s=SECONDS,
    unacked_segments=COUNTS,
    notsent_bytes=COUNTS,
    acked_bytes=COUNTS,
    sent_bytes=COUNTS,
    retransmitted_bytes=COUNTS,
    busy_s=SECONDS,
    rwnd_limited_s=SECONDS,
    sndbuf_limited_s=SECONDS,
)
SAMPLES = st.builds(
    LinkSample,
    link=st.just("a>b"),
    connections=st.dictionaries(st.integers(0, 3), CONNECTIONS),
    queued_bytes=COUNTS,
    acked_bytes=COUNTS,
    is_up=st.booleans(),
)
STEPS = st.lists(st.tuples(st.floats(-1, 1e4) | st.just(0.2), SAMPLES), max_size=12)


@settings(deadline=None)
@given(STEPS)
def test_whatever_is_read_estimates_are_finite(steps: list[tuple[float, LinkSample]]) -> None:
    estimator, now_s = LinkEstimator(), 0.0
    for passed_s, sample in steps:
        now_s += passed_s
        estimator.observe(sample, now_s)
        estimate = estimator.estimate(now_s)
        for field in fields(estimate):
            value = getattr(estimate, field.name)
            if isinstance(value, float):
                assert math.isfinite(value), field.name
                assert value >= 0, field.name
        assert max(estimate.utilisation, estimate.loss) <= 1


@settings(deadline=None, max_examples=40)
@given(
    rate=st.floats(MB, 20 * MB),
    slower=st.floats(0.05, 0.8),
    rtt_s=st.floats(0.001, 0.05),
    offers=st.lists(st.floats(0, 8 * MB), min_size=5, max_size=40),
)
@example(rate=14e6, slower=0.5, rtt_s=0.03, offers=[3e6, 0.0, 0.0, 0.0, 0.0])
def test_a_slower_link_is_never_thought_faster(
    rate: float, slower: float, rtt_s: float, offers: list[float]
) -> None:
    links = [FluidLink(r, rtt_s, num_connections=1) for r in (rate, rate * slower)]
    estimators = [LinkEstimator(), LinkEstimator()]
    for offer in offers:
        for fluid, estimator in zip(links, estimators, strict=True):
            fluid.offer(offer)
            watch(fluid, estimator, 0.2)
        fast, slow = (e.estimate(links[0].now_s) for e in estimators)
        if fast.age_s is not None and not fast.is_floor:  # not known is not slow
            assert slow.available_bytes_per_s <= fast.available_bytes_per_s * (1 + 1e-6)
        assert slow.available_bytes_per_s <= rate * slower * (1 + 1e-3)


def test_a_fall_of_the_rate_shows_within_two_transfers_with_pauses_between_them() -> None:
    """6 MB twice a second, which the link carries in 50 ms at first."""
    link, estimator = FluidLink(125e6), LinkEstimator()
    rates: list[tuple[float, float]] = []
    for step in range(100):
        if step % 5 in (0, 2):
            link.offer(6e6)
        if step == 50:
            link.bytes_per_s, link.base_rtt_s = 12.5e6, 0.06
        link.run(0.2)
        estimator.observe(link.sample(), link.now_s)
        rates.append((link.now_s, estimator.estimate(link.now_s).available_bytes_per_s))
    before = [rate for at_s, rate in rates if 5 < at_s <= 10]
    after = [rate for at_s, rate in rates if at_s > 11]
    assert min(before) > 25e6
    assert all(rate == pytest.approx(12.5e6, rel=0.1) for rate in after)
