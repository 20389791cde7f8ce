"""Equations 1-6 by hand, and the two modes on a split distribution."""

import numpy as np
import pytest

from scheduler.planning.curves import Curve
from scheduler.planning.lengths import EmpiricalLengths
from scheduler.planning.throughput import (
    Mode,
    Split,
    cluster_egress_bytes_per_s,
    kv_bytes_per_s,
    local_mean,
    offloaded_mean,
    pd_decode_rps,
    pd_prefill_rps,
    prefill_cluster_rps,
    system_rps,
)

FOUR = EmpiricalLengths.of([10, 20, 30, 100])
SQUARE = Curve.quadratic(0, 0, 1)


def test_equations_by_hand() -> None:
    assert kv_bytes_per_s(600, 2) == 300
    assert cluster_egress_bytes_per_s(512, 8, 600, 2) == 64 * 300
    assert prefill_cluster_rps(4, 2.0, 100, 10) == 2
    assert prefill_cluster_rps(4, 2.0, 100, 200) == 0.5
    assert pd_prefill_rps(3, 1.5) == 2
    assert pd_decode_rps(5, 20, 0.025, 1024) == pytest.approx(3.90625)
    assert system_rps(1.5, 2.0, 9.0, 0.5) == 3
    assert system_rps(1.5, 2.0, 2.5, 0.5) == 2.5


def test_what_is_not_needed_never_binds() -> None:
    assert system_rps(np.inf, 2.0, 9.0, 0.0) == 2
    assert system_rps(3.0, 0.0, 9.0, 1.0) == 3
    assert system_rps(3.0, 0.0, 9.0, 0.5) == 0, "no local instance, but half of all stay"


@pytest.mark.parametrize(
    ("threshold", "share", "long", "short"),
    [(0, 1.0, 40, 0), (10, 0.75, 50, 10), (99, 0.25, 100, 20), (100, 0.0, 0, 40)],
)
def test_a_split_at_a_length_keeps_it_local(
    threshold: float, share: float, long: float, short: float
) -> None:
    split = Split.at(FOUR, threshold)
    assert split.offload_fraction[0] == pytest.approx(share)
    assert split.mean_offloaded_tokens[0] == pytest.approx(long)
    assert split.mean_local_tokens[0] == pytest.approx(short)


def test_exact_is_the_mean_and_paper_the_curve_at_the_mean() -> None:
    split = Split.at(FOUR, [20])
    assert offloaded_mean(Mode.EXACT, SQUARE, FOUR, split) == pytest.approx([(900 + 10000) / 2])
    assert offloaded_mean(Mode.PAPER, SQUARE, FOUR, split) == pytest.approx([65**2])
    assert local_mean(Mode.EXACT, SQUARE, FOUR, split) == pytest.approx([250])
    assert local_mean(Mode.PAPER, SQUARE, FOUR, split) == pytest.approx([225])


def test_the_papers_section_on_bandwidth() -> None:
    """Section 2.3: 512 GPUs, 8 to an instance, at the KV throughputs of Table 3."""
    for gbps, num_gpus, expected_gbps in (
        (59.93, 512, 3800),
        (33.35, 512, 2100),
        (2.59, 512, 170),
        (1.46, 512, 100),
        (1.46, 10_000, 1800),
    ):
        found = cluster_egress_bytes_per_s(num_gpus, 8, gbps * 1e9 / 8, 1.0) * 8 / 1e9
        if expected_gbps == 100:
            assert found < 100
        else:
            assert found == pytest.approx(expected_gbps, rel=0.03)
