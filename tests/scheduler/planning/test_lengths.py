"""Distributions of lengths: closed forms against sums, and empirical ones against themselves."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.planning.lengths import EmpiricalLengths, Lengths, LogNormalLengths, mean_tokens

PAPER = LogNormalLengths(9.90, 1.00, 128, 131072)


def by_sums(lengths: LogNormalLengths, upto: float) -> np.ndarray:
    """The moments by the midpoint rule on a logarithmic grid."""
    x = np.exp(np.linspace(np.log(lengths.min_tokens), np.log(lengths.max_tokens), 400_001))
    middle, width = (x[1:] + x[:-1]) / 2, np.diff(x)
    density = np.exp(-(((np.log(middle) - lengths.mu) / lengths.sigma) ** 2) / 2) / middle
    weight = density * width / (density * width).sum()
    inside = middle <= upto
    return np.array([(weight[inside] * middle[inside] ** k).sum() for k in range(3)])


@pytest.mark.parametrize("upto", [200.0, 19_400.0, 131_072.0])
def test_moments_of_a_log_normal_are_its_integrals(upto: float) -> None:
    assert PAPER.moments_to([upto])[:, 0] == pytest.approx(by_sums(PAPER, upto), rel=1e-4)


def test_the_papers_mean_is_about_27k() -> None:
    assert mean_tokens(PAPER) == pytest.approx(27_486, rel=1e-4)


def test_quantiles_undo_shares() -> None:
    shares = np.array([0.0, 0.1, 0.5, 0.9, 1.0])
    tokens = PAPER.quantile(shares)
    assert PAPER.moments_to(tokens)[0] == pytest.approx(shares, abs=1e-9)
    assert tokens[0] == pytest.approx(128)
    assert tokens[-1] == pytest.approx(131072)


@pytest.mark.parametrize(
    "lengths", [PAPER, EmpiricalLengths.of([10, 20, 20, 500]), PAPER.scaled(0.3)]
)
def test_samples_have_the_moments(lengths: Lengths) -> None:
    drawn = lengths.sample(200_000, np.random.default_rng(3))
    assert drawn.min() >= lengths.min_tokens
    assert drawn.max() <= lengths.max_tokens
    assert drawn.mean() == pytest.approx(mean_tokens(lengths), rel=0.01)


@given(
    st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 9)), min_size=1, max_size=60).filter(
        lambda pairs: any(a > 0 and b > 0 for a, b in pairs)
    ),
    st.integers(0, 6000),
)
def test_empirical_moments_are_plain_sums(pairs: list[tuple[int, int]], upto: int) -> None:
    lengths = EmpiricalLengths.of([a for a, _ in pairs], [b for _, b in pairs])
    kept = [(a, b) for a, b in pairs if a > 0 and b > 0]
    total = sum(b for _, b in kept)
    expected = [sum(b * a**k for a, b in kept if a <= upto) / total for k in range(3)]
    assert lengths.moments_to([upto])[:, 0] == pytest.approx(expected)


def test_scaling_lengths_scales_moments() -> None:
    for lengths in (PAPER, EmpiricalLengths.of([100, 300, 9000])):
        half = lengths.scaled(0.5)
        assert mean_tokens(half) == pytest.approx(mean_tokens(lengths) / 2)
        assert half.moments_to([150])[0] == pytest.approx(lengths.moments_to([300])[0])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((9.9, 0.0, 1, 10), "sigma"),
        ((9.9, 1.0, 0, 10), "minimum"),
        ((9.9, 1.0, 10, 10), "below the maximum"),
        ((9.9, 0.1, 1e6, 1e7), "put no length"),
    ],
)
def test_impossible_distributions_are_refused(arguments: tuple[float, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        LogNormalLengths(*arguments)
    with pytest.raises(ValueError, match="0 lengths"):
        EmpiricalLengths.of([0, 0])
