"""Prefill times that are learnt: exact, noisy, stalling, changing, and of few lengths."""

import math
import random
import statistics
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.live.learning.learned_profile import GUESS, LearnedProfile
from scheduler.planning.curves import interpolate
from scheduler.routing.profiles import PrefillProfile

LENGTHS = (500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


def quadratic(fixed: float, linear: float, square: float) -> PrefillProfile:
    return PrefillProfile((0.0,), ((fixed, linear, square),))


TYPICAL = quadratic(0.05, 1e-4, 1e-9)
curves = st.tuples(
    st.floats(0.0, 0.5), st.floats(1e-6, 1e-3), st.sampled_from([0.0, 1e-10, 1e-9, 1e-8])
).map(lambda given: quadratic(*given))


def any_length(rng: random.Random) -> int:
    return round(math.exp(rng.uniform(math.log(LENGTHS[0]), math.log(LENGTHS[-1]))))


def teach(
    learned: LearnedProfile,
    truth: PrefillProfile,
    num: int,
    *,
    seed: int = 0,
    noise: float = 0.0,
    stalls: float = 0.0,
    length: Callable[[random.Random], int] = any_length,
) -> LearnedProfile:
    rng = random.Random(seed)
    for _ in range(num):
        tokens = length(rng)
        cached = round(tokens * rng.choice((0.0, 0.0, rng.uniform(0.0, 0.9))))
        stall = 5.0 if rng.random() < stalls else 1.0
        factor = math.exp(rng.gauss(0.0, noise)) * stall
        learned.observe(tokens, cached, truth.prefill_s(tokens, cached) * factor)
    return learned


def errors(learned: LearnedProfile, truth: PrefillProfile) -> list[float]:
    return [learned.profile.prefill_s(n) / truth.prefill_s(n) - 1 for n in LENGTHS]


def median_error(learned: LearnedProfile, truth: PrefillProfile) -> float:
    return statistics.median(map(abs, errors(learned, truth)))


def test_before_anything_was_seen() -> None:
    learned = LearnedProfile()
    assert learned.profile == GUESS
    assert (learned.num_seen, learned.is_known, learned.error) == (0, False, None)
    prior = TYPICAL.corrected(1.5)
    assert LearnedProfile(prior).profile == prior
    assert LearnedProfile(prior).is_known


def test_a_place_is_known_after_three_prefills() -> None:
    learned = LearnedProfile()
    for num in (1, 2, 3):
        assert not learned.is_known
        learned.observe(1000 * num, 0, 0.25 * num)
    assert learned.is_known
    assert learned.error is None
    learned.observe(8000, 0, 2.0)
    assert learned.error == pytest.approx(0.0, abs=0.01)


@pytest.mark.parametrize("per_token_s", [1e-4, 5e-3])
@pytest.mark.parametrize("fixed_tokens", [0, 100])
def test_a_few_prefills_are_enough_to_predict_by(per_token_s: float, fixed_tokens: int) -> None:
    truth = quadratic(fixed_tokens * per_token_s, per_token_s, 0.0)
    for num, median, nine_of_ten in ((1, 0.2, 0.5), (2, 0.15, 0.5), (3, 0.12, 0.35)):
        found = []
        for seed in range(200):
            learned = LearnedProfile()
            teach(learned, truth, num, seed=seed, noise=0.1)
            tokens = any_length(random.Random(seed + 1000))
            found.append(abs(learned.profile.prefill_s(tokens) / truth.prefill_s(tokens) - 1))
        assert statistics.median(found) < median
        assert statistics.quantiles(found, n=10)[-1] < nine_of_ten


@pytest.mark.parametrize("factors", [(50.0, 1.0), (1.0, 50.0)])
def test_of_two_prefills_the_one_that_stalled_counts_little(factors: tuple[float, float]) -> None:
    learned = LearnedProfile()
    for factor in factors:
        learned.observe(8000, 0, factor * TYPICAL.prefill_s(8000))
    assert learned.profile.prefill_s(8000) < 1.6 * TYPICAL.prefill_s(8000)


@given(curves, st.integers(0, 1000))
def test_exact_times_are_recovered(truth: PrefillProfile, seed: int) -> None:
    assert max(map(abs, errors(teach(LearnedProfile(), truth, 40, seed=seed), truth))) < 0.02


@pytest.mark.parametrize(
    "truth", [TYPICAL, quadratic(0.2, 2e-5, 5e-9), quadratic(0.5, 0.0, 0.0)], ids=str
)
def test_noise_and_stalls_do_little(truth: PrefillProfile) -> None:
    found = [
        teach(LearnedProfile(), truth, 200, seed=seed, noise=0.2, stalls=0.02) for seed in range(5)
    ]
    assert statistics.mean(median_error(learned, truth) for learned in found) < 0.05
    assert max(median_error(learned, truth) for learned in found) < 0.1
    assert statistics.median(learned.error or 0.0 for learned in found) < 0.25


@given(
    st.lists(
        st.tuples(
            st.integers(-1, 200_000),
            st.integers(-1, 200_000),
            st.floats(-1.0, 1e6) | st.sampled_from([math.inf, math.nan, 1e-6, 1e-9]),
        ),
        max_size=40,
    ),
    st.sampled_from([None, TYPICAL]),
)
def test_whatever_is_seen_time_is_positive_and_grows_with_the_prompt(
    seen: list[tuple[int, int, float]], prior: PrefillProfile | None
) -> None:
    learned = LearnedProfile(prior, memory=16)
    for tokens, cached, seconds in seen:
        learned.observe(tokens, cached, seconds)
    times = [learned.profile.prefill_s(n) for n in range(1, 200_000, 9973)]
    assert all(0 < s < math.inf for s in times)
    assert times == sorted(times)
    assert all(c >= 0 for piece in learned.profile.coefficients for c in piece)


def test_what_cannot_be_is_passed_over() -> None:
    learned = LearnedProfile()
    for tokens, cached, seconds in (
        (0, 0, 1.0), (-5, 0, 1.0), (10, 11, 1.0), (10, -1, 1.0), (10, 0, 0.0), (10, 0, -1.0),
        (10, 0, math.inf), (10, 0, math.nan), (10, 0, 1e-9), (10, 0, 1e9),
    ):  # fmt: skip
        learned.observe(tokens, cached, seconds)
    assert learned.num_seen == 0
    assert learned.profile == GUESS
    learned.observe(10, 10, 1.0)  # its last token is computed all the same
    assert learned.num_seen == 1


def test_a_few_stalls_do_not_wreck_it() -> None:
    learned = teach(LearnedProfile(), TYPICAL, 100, noise=0.05)
    for tokens in (1000, 20_000, 3000):
        learned.observe(tokens, 0, 50 * TYPICAL.prefill_s(tokens))
    assert max(map(abs, errors(learned, TYPICAL))) < 0.1


def test_a_first_prefill_that_stalls_is_soon_forgotten() -> None:
    learned = LearnedProfile()
    for factor in (50.0, 1.0, 1.0):
        learned.observe(8000, 0, factor * TYPICAL.prefill_s(8000))
    assert learned.profile.prefill_s(8000) == pytest.approx(TYPICAL.prefill_s(8000), rel=0.25)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_change_of_speed_is_followed(factor: float) -> None:
    learned = teach(LearnedProfile(), TYPICAL, 200, noise=0.1, stalls=0.02)
    changed = TYPICAL.corrected(factor)
    teach(learned, changed, 40, seed=1, noise=0.1, stalls=0.02)
    assert median_error(learned, changed) < 0.1


def test_one_length_teaches_the_level_and_leaves_the_shape_tame() -> None:
    learned = teach(LearnedProfile(), TYPICAL, 50, noise=0.1, length=lambda _: 8000)
    found = learned.profile
    assert found.prefill_s(8000) == pytest.approx(TYPICAL.prefill_s(8000), rel=0.08)
    assert 0.5 < found.prefill_s(80_000) / found.prefill_s(8000) / 10 < 2


def test_a_prior_gives_the_shape_where_nothing_was_seen() -> None:
    points = [(1000.0, 0.2), (8000.0, 1.0), (32_000.0, 5.0), (128_000.0, 40.0)]
    prior = PrefillProfile.of(interpolate(points).curve)
    pieces = tuple((1.5 * a + 0.1, 1.5 * b, 1.5 * c) for a, b, c in prior.coefficients)
    truth = PrefillProfile(prior.starts, pieces)
    one, rng = LearnedProfile(prior), random.Random(0)
    for _ in range(20):
        one.observe(8000, 0, truth.prefill_s(8000) * math.exp(rng.gauss(0.0, 0.05)))
    assert one.profile.prefill_s(100_000) == pytest.approx(truth.prefill_s(100_000), rel=0.15)
    assert one.profile.prefill_s(100_000) / one.profile.prefill_s(8000) > 15
    many = teach(LearnedProfile(prior), truth, 100, noise=0.05)
    assert max(map(abs, errors(many, truth))) < 0.06


def test_a_wrong_prior_is_overruled() -> None:
    learned = teach(LearnedProfile(quadratic(1.0, 0.0, 1e-8)), TYPICAL, 120, noise=0.05)
    assert median_error(learned, TYPICAL) < 0.05


def test_memory_is_bounded_and_must_be_some() -> None:
    learned = teach(LearnedProfile(memory=8), TYPICAL, 50)
    assert learned.num_seen == 50
    assert median_error(learned, TYPICAL) < 0.02
    with pytest.raises(ValueError, match="memory 0"):
        LearnedProfile(memory=0)
