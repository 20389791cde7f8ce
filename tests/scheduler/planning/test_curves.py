"""Curves: their means against samples, fits through points, and the points that are refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.planning.curves import Curve, CurveError, fit_quadratic, interpolate
from scheduler.planning.lengths import EmpiricalLengths, LogNormalLengths

H20_POINTS = [(1000, 0.58), (8000, 1.52), (32000, 4.94), (128000, 21.74)]


@pytest.mark.parametrize("curve", [fit_quadratic(H20_POINTS).curve, interpolate(H20_POINTS).curve])
def test_means_are_means(curve: Curve) -> None:
    drawn = LogNormalLengths(9.9, 1, 128, 131072).sample(5000, np.random.default_rng(1))
    lengths = EmpiricalLengths.of(drawn)
    assert curve.mean(lengths) == pytest.approx(curve(drawn).mean())
    upto = 20_000
    expected = np.where(drawn <= upto, curve(drawn), 0).mean()
    assert curve.sum_to(lengths, [upto])[0] == pytest.approx(expected)


def test_a_fit_finds_the_quadratic_it_was_made_from() -> None:
    truth = Curve.quadratic(0.45, 1.3e-4, 2.7e-10)
    tokens = [1000, 8000, 32000, 128000]
    fitted = fit_quadratic([(t, float(truth(t))) for t in tokens])
    assert fitted.curve.coefficients == pytest.approx(truth.coefficients, rel=1e-6)
    assert np.abs(fitted.residuals).max() < 1e-9


def test_residuals_are_relative_and_signed() -> None:
    fitted = fit_quadratic([(1000, 0.44), (8000, 0.72), (32000, 1.84), (128000, 7.40)])
    assert np.abs(fitted.residuals).max() < 0.02
    assert fitted.residuals == pytest.approx(fitted.curve(fitted.tokens) / fitted.values - 1)


@given(st.floats(1, 300_000))
def test_interpolation_meets_its_points_and_never_falls(tokens: float) -> None:
    curve = interpolate(H20_POINTS).curve
    for length, seconds in H20_POINTS:
        assert float(curve(length)) == pytest.approx(seconds)
    assert float(curve(tokens)) <= float(curve(tokens * 1.1))


def test_shapes_are_kept() -> None:
    curve = interpolate(H20_POINTS).curve
    assert curve(np.ones((2, 3))).shape == (2, 3)
    assert curve(5.0).shape == ()
    assert curve.scaled(2)(8000) == pytest.approx(3.04)


@pytest.mark.parametrize(
    ("points", "says"),
    [
        ([(1000, 1.0), (2000, 2.0)], "2 points"),
        ([(1000, 1.0), (2000, 1.5), (4000, 1.6)], r"squared .* negative"),
        ([(1000, 1.0), (2000, 1.0), (4000, 9.0)], "per token .* negative"),
        ([(1000, 1.0), (2000, 3.0), (4000, 8.0)], "fixed part .* negative"),
        ([(1000, 1.0), (1000, 2.0), (4000, 9.0)], "two points for 1000"),
        ([(1000, 0.0), (2000, 2.0), (4000, 9.0)], "above 0"),
    ],
)
def test_impossible_points_are_refused(points: list[tuple[float, float]], says: str) -> None:
    with pytest.raises(CurveError, match=says):
        fit_quadratic(points)


def test_interpolation_refuses_a_longer_prompt_that_needs_less() -> None:
    with pytest.raises(CurveError, match="2000 tokens need 1, less than the 2"):
        interpolate([(1000, 2.0), (2000, 1.0)])
    with pytest.raises(CurveError, match="at least 2"):
        interpolate([(1000, 2.0)])
