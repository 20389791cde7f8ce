"""The sharp edges of the detector: exactly a bound, exactly the dwell time, the exact reason."""

from dataclasses import replace

import pytest

from netmon.detector import Change, CongestionDetector, DetectorConfig, Sign
from netmon.estimate import LinkCondition, LinkEstimate

CLEAR, RISING, CONGESTED, DOWN = LinkCondition
MB = 1_000_000
CALM = LinkEstimate(
    available_bytes_per_s=100 * MB,
    age_s=0.0,
    full_age_s=0.0,
    sample_age_s=0.0,
    base_rtt_s=0.25,
)
BAD = replace(CALM, loss=0.5)
WORSE = replace(CALM, loss=0.9)
SETTINGS = DetectorConfig(
    rate_drop=(0.25, 0.5),
    backlog_s=(0.5, 2.0),
    delay_ratio=(2.0, 4.0),
    loss=(0.25, 0.75),
    stalled_s=(0.5, 1.0),
    down_after_s=3.0,
    least_rtt_s=0.125,
    evidence_s=5.0,
    silent_s=3.0,
    backlog_growth=0.5,
    num_confirming=1,
    dwell_s=4.0,
    calm_s=2.0,
    calm_margin=0.5,
)


def watching(**fields: object) -> CongestionDetector:
    """Judges every sample at once, unless told otherwise."""
    return CongestionDetector(replace(SETTINGS, **fields))  # type: ignore[arg-type]


def seen(estimate: LinkEstimate, **fields: object) -> LinkCondition:
    """The condition after a calm sample and this one, a second later."""
    detector = watching(**fields)
    detector.observe(CALM, 10.0)
    detector.observe(estimate, 11.0)
    return detector.condition


def test_conditions_are_named_in_small_letters() -> None:
    assert [condition.severity for condition in LinkCondition] == [0, 1, 2, 3]
    assert [condition.value for condition in LinkCondition] == [
        "clear",
        "rising",
        "congested",
        "down",
    ]


@pytest.mark.parametrize(
    ("value", "condition"),
    [(0.99, CLEAR), (1.0, RISING), (1.99, RISING), (2.0, CONGESTED), (9.0, CONGESTED)],
)
def test_a_sign_counts_from_its_bound_on(value: float, condition: LinkCondition) -> None:
    assert Sign("loss", value, (1.0, 2.0), "").level() is condition
    assert Sign("loss", value / 2, (1.0, 2.0), "").level(0.5) is condition


@pytest.mark.parametrize(
    ("below", "rising", "congested"),
    [
        ({"loss": 0.249}, {"loss": 0.25}, {"loss": 0.75}),
        ({"queueing_delay_s": 0.499}, {"queueing_delay_s": 0.5}, {"queueing_delay_s": 1.0}),
        ({"stalled_s": 0.999}, {"stalled_s": 1.0}, {"stalled_s": 2.0}),  # 4 and 8 round trips
        (
            {"available_bytes_per_s": 75.1 * MB},
            {"available_bytes_per_s": 74.9 * MB},
            {"available_bytes_per_s": 49.9 * MB},
        ),
    ],
)
def test_each_bound_is_part_of_what_is_worse(
    below: dict[str, float], rising: dict[str, float], congested: dict[str, float]
) -> None:
    conditions = [seen(replace(CALM, **fields)) for fields in (below, rising, congested)]  # type: ignore[arg-type]
    assert conditions == [CLEAR, RISING, CONGESTED]


def test_on_a_short_link_delays_and_stalls_have_bounds_of_their_own() -> None:
    short = replace(CALM, base_rtt_s=0.01)
    assert seen(replace(short, queueing_delay_s=0.24)) is CLEAR
    assert seen(replace(short, queueing_delay_s=0.25)) is RISING  # twice the least round trip
    assert seen(replace(short, stalled_s=0.49)) is CLEAR
    assert seen(replace(short, stalled_s=0.5)) is RISING
    assert seen(replace(short, stalled_s=1.0)) is CONGESTED
    assert seen(replace(CALM, stalled_s=1.99)) is RISING  # eight round trips are 2 s


def test_two_signs_at_their_lower_bounds_are_congestion() -> None:
    two = replace(CALM, loss=0.25, queueing_delay_s=0.5)
    assert seen(two) is CONGESTED
    assert seen(replace(two, stalled_s=1.0)) is CONGESTED


def test_a_rate_is_judged_only_by_evidence_that_is_young_enough() -> None:
    slow = replace(CALM, available_bytes_per_s=MB)
    assert seen(replace(slow, full_age_s=5.0)) is CONGESTED
    assert seen(replace(slow, full_age_s=5.1)) is CLEAR
    assert seen(replace(slow, full_age_s=None)) is CLEAR


def test_a_link_that_never_carried_anything_has_no_rate_to_lose() -> None:
    detector = watching()
    assert detector.observe(replace(CALM, available_bytes_per_s=0.0), 1.0) is None
    assert (detector.condition, detector.reference_bytes_per_s) == (CLEAR, 0.0)


def fed(backlogs_s: list[float]) -> LinkCondition:
    detector = watching(num_growing=3)
    for at_s, backlog_s in enumerate(backlogs_s):
        detector.observe(replace(CALM, backlog_s=backlog_s), float(at_s))
    return detector.condition


def test_a_backlog_grows_when_enough_samples_in_a_row_rise_by_enough() -> None:
    assert fed([1.0, 1.1, 1.6]) is CLEAR
    assert fed([1.0, 1.1, 1.2, 1.5]) is RISING  # half more, as `backlog_growth` says
    assert fed([1.0, 1.1, 1.2, 1.49]) is CLEAR
    assert fed([1.0, 1.2, 1.2, 1.9]) is CLEAR
    assert fed([9.0, 1.0, 1.1, 1.2, 1.5]) is RISING
    assert fed([0.1, 0.2, 0.3, 0.49]) is CLEAR
    assert fed([1.0, 1.5, 1.8, 2.0]) is CONGESTED


def test_a_link_that_stalls_for_long_is_down_and_says_why() -> None:
    stalled = replace(CALM, stalled_s=2.9, backlog_bytes=777)
    assert seen(stalled) is CONGESTED
    detector = watching()
    detector.observe(CALM, 1.0)
    reason = "777 bytes wait, none acknowledged for 3.0 s"
    change = detector.observe(replace(stalled, stalled_s=3.0), 2.0)
    assert change == Change(CLEAR, DOWN, 2.0, reason)
    assert (detector.condition, detector.since_s, detector.reason) == (DOWN, 2.0, reason)


def test_what_is_said_before_anything_happened() -> None:
    detector = watching()
    assert (detector.reason, detector.since_s) == ("nothing was observed yet", None)
    assert detector.reference_bytes_per_s == 0.0
    detector.observe(CALM, 5.0)
    assert (detector.reason, detector.since_s) == ("no sign of congestion yet", 5.0)
    detector.observe(CALM, 6.0)
    assert detector.since_s == 5.0


def test_a_change_says_what_was_and_is_and_why() -> None:
    detector = watching()
    detector.observe(CALM, 1.0)
    change = detector.observe(replace(BAD, queueing_delay_s=0.5), 2.0)
    reason = "500 ms queueing over 250 ms, 50.0% retransmitted"
    assert change == Change(CLEAR, CONGESTED, 2.0, reason)
    assert (detector.condition, detector.since_s, detector.reason) == (CONGESTED, 2.0, reason)


def test_rates_and_delays_are_told_in_megabits_and_milliseconds() -> None:
    detector = watching()
    detector.observe(CALM, 1.0)
    bad = replace(CALM, available_bytes_per_s=25 * MB, queueing_delay_s=0.75)
    detector.observe(bad, 1.0)
    assert detector.reason == ("carries 200 of 800 Mbit/s, 750 ms queueing over 250 ms")


def test_a_backlog_is_told_in_seconds() -> None:
    detector = watching(num_growing=1)
    detector.observe(CALM, 1.0)
    detector.observe(replace(CALM, backlog_s=1.234), 2.0)
    assert detector.reason == "backlog of 1.23 s grows"


def test_the_reason_keeps_up_with_the_numbers_while_the_signs_show() -> None:
    detector = watching()
    detector.observe(BAD, 1.0)
    assert detector.observe(replace(CALM, loss=0.3), 2.0) is None
    assert detector.reason == "30.0% retransmitted"
    detector.observe(CALM, 3.0)
    assert detector.reason == "30.0% retransmitted"  # still rising, for what was seen last


def test_a_calm_link_keeps_saying_how_it_became_calm() -> None:
    detector = watching()
    for at_s, estimate in [(0.0, BAD), (1.0, CALM), (4.0, CALM), (5.0, CALM)]:
        detector.observe(estimate, at_s)
    assert (detector.condition, detector.reason) == (CLEAR, "calm for 3.0 s")


def test_it_takes_as_many_samples_in_a_row_as_are_asked_for() -> None:
    detector = watching(num_confirming=3)
    for at_s, estimate in enumerate([BAD, BAD, CALM, BAD, BAD]):
        assert detector.observe(estimate, float(at_s)) is None
    change = detector.observe(BAD, 5.0)
    assert change is not None
    assert change.after is RISING


def test_the_mildest_of_the_confirming_samples_counts() -> None:
    detector = watching(num_confirming=2)
    for at_s, estimate in enumerate([BAD, WORSE]):
        detector.observe(estimate, float(at_s))
    assert detector.condition is RISING
    detector.observe(WORSE, 2.0)
    assert detector.condition is CONGESTED


def eased_at(calm_times_s: list[float], config: dict[str, float]) -> list[float]:
    """When a link that was congested at 0 s gets better, if it is seen calm at these times."""
    detector = watching(**config)
    detector.observe(WORSE, 0.0)
    changes = [detector.observe(CALM, at_s) for at_s in calm_times_s]
    return [change.at_s for change in changes if change is not None]


def test_it_gets_better_after_exactly_the_dwell_time_and_exactly_the_calm_time() -> None:
    assert eased_at([1.0, 3.9, 4.0], {"dwell_s": 4.0, "calm_s": 2.0}) == [4.0]
    assert eased_at([1.0, 2.9, 3.0], {"dwell_s": 1.0, "calm_s": 2.0}) == [3.0]
    assert eased_at([1.0, 3.0, 4.0, 5.0, 6.0], {"dwell_s": 1.0, "calm_s": 2.0}) == [3.0, 6.0]


def test_calm_begins_anew_after_every_sign() -> None:
    detector = watching(dwell_s=1.0)
    detector.observe(WORSE, 0.0)
    detector.observe(CALM, 1.0)
    detector.observe(WORSE, 2.0)
    detector.observe(CALM, 2.5)
    assert detector.observe(CALM, 4.0) is None
    assert detector.observe(CALM, 4.5) == Change(CONGESTED, RISING, 4.5, "calm for 2.0 s")


def test_calm_begins_anew_when_the_connections_fail_again() -> None:
    detector = watching(dwell_s=1.0)
    down = replace(CALM, is_up=False)
    detector.observe(down, 0.0)
    detector.observe(CALM, 1.0)
    assert detector.observe(down, 2.0) is None
    assert detector.observe(CALM, 3.5) is None
    assert detector.observe(CALM, 5.5) == Change(DOWN, CONGESTED, 5.5, "calm for 2.0 s")


def test_signs_at_their_margin_are_not_calm_and_below_it_they_are() -> None:
    at_margin = replace(CALM, loss=0.125)  # half of 0.25
    below = replace(CALM, loss=0.124)
    for estimate, expected in ((at_margin, None), (below, CLEAR)):
        detector = watching(silent_s=99.0)
        detector.observe(BAD, 0.0)
        detector.observe(estimate, 1.0)
        change = detector.observe(estimate, 9.0)
        assert (change and change.after) is expected


def test_a_step_down_names_the_signs_that_are_left() -> None:
    detector = watching()
    detector.observe(WORSE, 0.0)
    left = replace(CALM, loss=0.2)  # above the margin: no calm for RISING, but for CONGESTED
    detector.observe(left, 1.0)
    change = detector.observe(left, 4.0)
    assert change == Change(CONGESTED, RISING, 4.0, "calm for 3.0 s; 20.0% retransmitted")


@pytest.mark.parametrize(("silence_s", "condition"), [(3.0, RISING), (3.1, CONGESTED)])
def test_nobody_knows_whether_it_was_calm_in_a_long_silence(
    silence_s: float, condition: LinkCondition
) -> None:
    detector = watching()
    detector.observe(WORSE, 0.0)
    detector.observe(CALM, 1.0)
    detector.observe(CALM, 1.0 + silence_s)
    assert detector.condition is condition


def test_every_sample_ends_a_silence() -> None:
    detector = watching()
    detector.observe(WORSE, 0.0)
    for at_s in (1.0, 2.0, 3.0):
        detector.observe(CALM, at_s)
    assert detector.observe(CALM, 4.0) is not None


@pytest.mark.parametrize(("age_s", "condition"), [(3.0, CONGESTED), (3.1, CLEAR), (None, CLEAR)])
def test_an_estimate_that_rests_on_old_samples_is_not_judged(
    age_s: float | None, condition: LinkCondition
) -> None:
    assert seen(replace(WORSE, sample_age_s=age_s)) is condition


def test_an_estimate_that_is_not_judged_ends_the_calm() -> None:
    detector = watching(dwell_s=1.0)
    detector.observe(WORSE, 0.0)
    detector.observe(CALM, 1.0)
    assert detector.observe(replace(CALM, sample_age_s=9.0), 2.0) is None
    detector.observe(CALM, 2.5)
    assert detector.observe(CALM, 4.0) is None
    assert detector.observe(CALM, 4.5) is not None


def test_the_reference_sinks_to_a_lower_rate_by_its_time_constant() -> None:
    detector = watching(reference_s=10.0)
    detector.observe(CALM, 5.0)
    assert detector.reference_bytes_per_s == 100 * MB
    slow = replace(CALM, available_bytes_per_s=60.0 * MB)
    detector.observe(slow, 15.0)
    assert detector.reference_bytes_per_s == pytest.approx((60 + 40 / 2.718281828) * MB)
    detector.observe(slow, 25.0)
    assert detector.reference_bytes_per_s == pytest.approx((60 + 40 / 2.718281828**2) * MB)
    old = replace(slow, full_age_s=6.0)
    detector.observe(old, 1e6)
    assert detector.reference_bytes_per_s == pytest.approx((60 + 40 / 2.718281828**2) * MB)


def test_a_link_that_is_down_keeps_its_reference() -> None:
    detector = watching(reference_s=10.0)
    detector.observe(CALM, 0.0)
    detector.observe(replace(CALM, available_bytes_per_s=0.0, is_up=False), 100.0)
    assert detector.reference_bytes_per_s == 100 * MB


def test_a_floor_counts_as_far_as_it_lasts() -> None:
    detector = watching()
    burst = replace(CALM, is_floor=True, achieved_bytes_per_s=30.0 * MB)
    detector.observe(burst, 0.0)
    assert detector.reference_bytes_per_s == 30 * MB
    detector.observe(replace(burst, achieved_bytes_per_s=200.0 * MB), 1.0)
    assert detector.reference_bytes_per_s == 100 * MB


@pytest.mark.parametrize(
    "fields", [{"dwell_s": 0.0}, {"dwell_s": -1.0}, {"loss": (0.0, 0.1)}, {"calm_margin": 1.01}]
)
def test_a_setting_just_outside_its_range_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        watching(**fields)


def test_settings_may_lie_on_the_ends_of_their_ranges() -> None:
    assert seen(BAD, loss=(0.5, 0.5), calm_margin=1.0) is CONGESTED
