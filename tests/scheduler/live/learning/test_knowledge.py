"""What requests teach of one model: sizes, times, overheads, errors. No clock."""

import math

import pytest

from scheduler.live.learning.knowledge import (
    NUM_SIZES,
    KvMeter,
    Mean,
    ModelKnowledge,
)
from scheduler.live.learning.learned_profile import GUESS, MIN_SEEN
from scheduler.live.learning.place_services import FRESH_S, HALF_LIFE_S, SERVICE_KEPT_S
from scheduler.routing.decision import ONE_ENGINE
from scheduler.routing.prediction import Prediction
from scheduler.routing.service import ALONE, Load, ServiceModel


def taught(place: str = "far", per_token_s: float = 2e-4, num: int = 8) -> ModelKnowledge:
    known = ModelKnowledge()
    for number in range(1, num + 1):
        known.learn(place, number * 1000, 0, number * 1000 * per_token_s)
    return known


def test_a_mean_weighs_its_first_values_alike_and_then_forgets() -> None:
    mean = Mean(gain=0.25)
    assert mean.value is None
    for value in (1.0, 3.0, math.inf, math.nan):
        mean.observe(value)
    assert mean.value == pytest.approx(2.0)
    for _ in range(60):
        mean.observe(10.0)
    assert mean.value == pytest.approx(10.0)


def test_sizes_of_landings_make_a_line() -> None:
    meter = KvMeter()
    assert meter.profile is None
    for num_tokens in (100, 4000, 900):
        meter.observe(num_tokens, 50_000 + 512 * num_tokens)
    assert meter.profile is not None
    assert meter.profile.fixed_bytes == pytest.approx(50_000)
    assert meter.profile.token_bytes == pytest.approx(512)


def test_one_length_only_counts_as_all_per_token() -> None:
    meter = KvMeter()
    for _ in range(3):
        meter.observe(100, 51_200)
    assert meter.profile is not None
    assert (meter.profile.fixed_bytes, meter.profile.token_bytes) == (0.0, 512.0)


def test_a_line_is_never_negative() -> None:
    meter = KvMeter()
    for num_tokens, nbytes in ((100, 90_000), (1000, 100), (0, 7), (7, 0)):
        meter.observe(num_tokens, nbytes)
    assert meter.profile is not None
    assert meter.profile.token_bytes == 0
    steep = KvMeter()
    steep.observe(100, 10)
    steep.observe(1000, 1_000_000)
    assert steep.profile is not None
    assert steep.profile.fixed_bytes == 0


def test_old_sizes_are_forgotten() -> None:
    meter = KvMeter()
    for bytes_per_token in (100, 200):
        for num_tokens in range(1, NUM_SIZES + 1):
            meter.observe(num_tokens, bytes_per_token * num_tokens)
    assert meter.profile is not None
    assert meter.profile.token_bytes == pytest.approx(200)


def test_only_what_is_sent_counts_for_sizes() -> None:
    known = ModelKnowledge()
    known.reserved(1000, 600, 400 * 512)
    assert known.kv is not None
    assert known.kv.token_bytes == pytest.approx(512)


def test_a_place_that_nobody_saw_borrows_from_the_one_seen_most() -> None:
    known = taught("far")
    assert known.is_known
    assert known.prefill("near").prefill_s(5000) == pytest.approx(1.0, rel=0.02)
    for number in range(1, 5):
        known.learn("near", number * 1000, 0, number * 0.1)
    assert known.prefill("near").prefill_s(5000) == pytest.approx(0.5, rel=0.05)
    assert known.places == ["far", "near"]


def after(true_s: float, ratios: tuple[float, ...], place: str) -> ModelKnowledge:
    """`far` is known at 0.2 ms a token; at `place` prompts took so often `true_s` for each."""
    known = taught("far")
    for number, ratio in enumerate(ratios, 1):
        known.prefilled(place, 1000 * number, 0, 1000 * number * true_s * ratio, 1.0)
    return known


@pytest.mark.parametrize("per_token_s", [1e-4, 5e-3])
@pytest.mark.parametrize("num", [1, 2, 3])
def test_the_first_answers_at_one_place_are_believed_at_all(per_token_s: float, num: int) -> None:
    known = ModelKnowledge()
    for number in range(1, num + 1):
        known.prefilled("far", 1000 * number, 0, 1000 * number * per_token_s, 1.0)
    assert known.profile("far").num_seen == num
    for place in ("far", ONE_ENGINE):
        expected_s = pytest.approx(8000 * per_token_s, rel=0.02)
        assert known.prefill(place).prefill_s(8000) == expected_s


@pytest.mark.parametrize(
    ("per_token_s", "ratios", "rel"),
    [
        # Faster than what it borrows: believed at once.
        (5e-5, (1.0,), 0.02),
        # Slower: half of it at once, in logarithms, and all when it was so twice.
        (2e-3, (1.0,), 0.7),
        (2e-3, (1.0, 1.0), 0.02),
        # A stall is no slow place.
        (2e-4, (50.0, 1.0), 0.02),
        (2e-4, (1.0, 50.0), 0.02),
    ],
)
def test_a_places_own_first_prefills_set_the_level_of_what_it_borrows(
    per_token_s: float, ratios: tuple[float, ...], rel: float
) -> None:
    known = after(per_token_s, ratios, ONE_ENGINE)
    found_s = known.prefill(ONE_ENGINE).prefill_s(8000)
    assert found_s == pytest.approx(8000 * per_token_s, rel=rel)
    assert known.prefill("far").prefill_s(8000) == pytest.approx(1.6, rel=0.02)


def test_a_place_that_is_known_itself_borrows_nothing() -> None:
    known = after(2e-3, (1.0, 1.0, 1.0), ONE_ENGINE)
    assert known.prefill(ONE_ENGINE).prefill_s(8000) == pytest.approx(16.0, rel=0.02)


def test_short_prompts_say_nothing_of_long_ones() -> None:
    """Three stalls of 0.8 s at 100 to 300 tokens are no sign that 30,000 tokens take 0.8 s."""
    known = taught("far")
    for tokens in (100, 200, 300):
        known.learn(ONE_ENGINE, tokens, 0, 0.8)
    assert known.prefill(ONE_ENGINE).prefill_s(30_000) >= known.prefill("far").prefill_s(30_000)


def test_before_anything_was_seen_there_is_a_guess() -> None:
    known = ModelKnowledge()
    assert not known.is_known
    assert known.prefill(ONE_ENGINE) == GUESS
    assert (known.kv, known.decode_s, known.step_s, known.error("far")) == (None, None, None, None)
    assert known.service("far", 1.0) is ALONE


def whole_s(service: ServiceModel, prefill_s: float) -> float:
    """The TTFT of a prompt whose prefill takes `prefill_s`, where nothing else runs."""
    return prefill_s + service.overhead_s + service.contention_s(prefill_s, Load())


def test_first_tokens_teach_service_and_error() -> None:
    known = taught("far")
    for _ in range(20):
        overhead_s = whole_s(known.service("far", 1.0), 1.0) - 1.0
        known.answered("far", Prediction(prefill_s=1.0, overhead_s=overhead_s), 1.25, 1.0)
    assert whole_s(known.service("far", 1.0), 1.0) == pytest.approx(1.25, rel=0.02)
    assert known.service("near", 1.0) is ALONE
    error = known.error("far")
    assert error is not None
    assert error < 0.02
    assert known.error("near") is None


def test_an_error_of_a_borrowed_profile_says_nothing_of_service() -> None:
    known = taught("far")
    for number in range(1, MIN_SEEN + 1):
        known.learn("near", 1000, 0, 3.0)
        known.answered("near", Prediction(prefill_s=1.0), 3.0, float(number))
        assert known.service("near", float(number)) is ALONE
    assert known.error("near") is not None
    known.learn("near", 1000, 0, 3.0)
    for _ in range(3):
        known.answered("near", Prediction(prefill_s=3.0), 3.5, 4.0)
    assert whole_s(known.service("near", 4.0), 3.0) == pytest.approx(3.5, rel=0.05)


def test_a_service_model_that_was_not_seen_lately_is_forgotten() -> None:
    known = taught("far")
    for _ in range(40):
        known.answered("far", Prediction(prefill_s=1.0), 5.0, 10.0)
    assert whole_s(known.service("far", 10.0 + FRESH_S), 1.0) == pytest.approx(5.0, rel=0.05)
    half_s = 10.0 + FRESH_S + HALF_LIFE_S
    assert whole_s(known.service("far", half_s), 1.0) == pytest.approx(3.0, rel=0.05)
    late_s = 11.0 + SERVICE_KEPT_S
    assert known.service("far", late_s) is ALONE
    for _ in range(3):
        known.answered("far", Prediction(prefill_s=1.0), 1.5, late_s)
    assert whole_s(known.service("far", late_s), 1.0) == pytest.approx(1.5, rel=0.1)


def test_timed_prefills_make_a_place_known() -> None:
    known = ModelKnowledge()
    known.calibrated("far", "a", [(256, 0.3), (4096, 2.4)])
    assert known.is_known
    for num_tokens, seconds in ((256, 0.3), (4096, 2.4), (2176, 1.35)):
        assert known.prefill("far").prefill_s(num_tokens) == pytest.approx(seconds)
    known.answered("far", Prediction(prefill_s=0.3), 0.4, 1.0)
    known.answered("far", Prediction(prefill_s=0.3), 0.4, 1.0)
    known.answered("far", Prediction(prefill_s=0.3), 0.4, 1.0)
    assert known.service("far", 1.0) is not ALONE


def test_a_key_teaches_once_and_another_one_begins_anew() -> None:
    known = ModelKnowledge()
    known.calibrated("far", "a", [(1000, 1.0)])
    known.calibrated("far", "a", [(1000, 9.0)])
    assert known.prefill("far").prefill_s(1000) == pytest.approx(1.0)
    assert known.is_calibrated("far", "a")
    assert not known.is_calibrated("near", "a")
    known.calibrated("far", "b", [(1000, 3.0)])
    assert known.prefill("far").prefill_s(1000) == pytest.approx(3.0)


def test_timed_prefills_add_to_what_requests_taught() -> None:
    known = taught("far")
    before_s = known.prefill("far").prefill_s(1000)
    known.calibrated("far", "a", [(1000, before_s)])
    assert known.prefill("far").prefill_s(1000) == pytest.approx(before_s, rel=0.01)
    assert not known.profile("far").has_prior


def test_timings_without_a_time_are_no_calibration() -> None:
    known = ModelKnowledge()
    known.calibrated("far", "a", [(1000, 0.0), (0, 1.0)])
    assert not known.is_known
    assert not known.is_calibrated("far", "a")


def test_calibrations_outlive_a_restart() -> None:
    known = ModelKnowledge()
    known.calibrated("far", "a", [(256, 0.3), (4096, 2.4)])
    after = ModelKnowledge.restored(known.state(5.0), 5.0)
    assert after.is_calibrated("far", "a")
    assert after.prefill("far") == known.prefill("far")


def test_what_is_no_time_teaches_nothing() -> None:
    known = ModelKnowledge()
    known.answered("far", Prediction(queue_s=math.inf), 1.0, 1.0)
    known.answered("far", Prediction(prefill_s=1.0), 0.0, 1.0)
    assert known.places == []
    assert known.error("far") is None


def test_errors_are_the_median_of_the_latest() -> None:
    known = ModelKnowledge()
    for measured_s in (1.0, 2.0, 1.25):
        known.answered("far", Prediction(prefill_s=1.0), measured_s, 1.0)
    assert known.error("far") == pytest.approx(0.2)


def test_answers_teach_how_long_decoding_takes() -> None:
    known = ModelKnowledge()
    known.decoded(101, 2.0, now_s=1.0)
    known.decoded(1, 0.0, now_s=2.0)
    assert known.decode_s == pytest.approx(1.0)
    assert known.step_s == pytest.approx(0.02)
