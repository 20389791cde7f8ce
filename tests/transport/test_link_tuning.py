"""How many connections a link gets, and how large frames, on paths that no test can build from
sockets: what it finds, how soon, and that it then leaves it alone.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transport import TransportConfig
from transport.config import KIB, MIB
from transport.testing.modelled_link import TICK_S, ModelledLink, ModelledPath

GBIT = 1e9 / 8
CAPPED = ModelledPath(2 * GBIT, 20e-3, flow_bytes_per_s=0.3 * GBIT)
BUFFERED = ModelledPath(5 * GBIT, 20e-3, send_buffer_bytes=2.7e6)
PLAIN = ModelledPath(1 * GBIT, 40e-3)
LOSSY = ModelledPath(1 * GBIT, 40e-3, flow_bytes_per_s=0.1 * GBIT, loss=0.002)
LOOPBACK = ModelledPath(30 * GBIT, 50e-6, flow_bytes_per_s=20 * GBIT)
NARROW = ModelledPath(0.1 * GBIT, 20e-3)


@pytest.mark.parametrize(
    ("path", "widths"),
    [
        (CAPPED, {8}),
        (BUFFERED, {8}),
        (PLAIN, {1}),
        (LOSSY, {16}),
        (LOOPBACK, {2}),
        (NARROW, {1, 2, 4}),
        (ModelledPath(1 * GBIT, 150e-3, send_buffer_bytes=2.7e6), {8}),
        (ModelledPath(2 * GBIT, 20e-3, flow_bytes_per_s=0.05 * GBIT), {16}),
    ],
)
def test_it_finds_a_width_within_seconds_and_keeps_it(path: ModelledPath, widths: set[int]) -> None:
    link = ModelledLink(path)
    link.run(6.0 if path.rtt_s < 0.1 and path is not NARROW else 15.0)
    assert link.is_steady
    assert link.width in widths
    assert link.num_changes(40.0) == 0


def test_it_looks_again_and_less_and_less_often() -> None:
    link = ModelledLink(CAPPED)
    link.run(10.0)
    looks, begin = [], len(link.widths)
    for _ in range(6000):
        was_steady = link.is_steady
        link.step()
        if was_steady and not link.is_steady:
            looks.append(link.now_s)
    gaps_s = [later - earlier for earlier, later in itertools.pairwise(looks)]
    assert gaps_s == pytest.approx([121, 241], abs=5)
    assert sum(width != 8 for width in link.widths[begin:]) * TICK_S < 0.02 * 600


@settings(max_examples=25)
@given(st.sampled_from([CAPPED, BUFFERED, PLAIN, LOSSY, LOOPBACK, NARROW]), st.integers(0, 1 << 20))
def test_noise_does_not_make_it_wander(path: ModelledPath, seed: int) -> None:
    link = ModelledLink(path, noise=0.1, seed=seed)
    link.run(15.0)
    assert link.is_steady
    # A step in width that brings less than the noise may be missed.
    assert link.loss_of_rate < 0.25
    assert link.num_changes(40.0) == 0


def test_slow_start_is_not_taken_for_a_gain() -> None:
    link = ModelledLink(replace(PLAIN, rtt_s=80e-3))
    link.run(12.0)
    assert link.width == 1
    assert link.widths.count(16) * TICK_S < 2.0


@pytest.mark.parametrize(
    ("before", "after"), [(PLAIN, CAPPED), (CAPPED, PLAIN), (BUFFERED, NARROW), (PLAIN, LOSSY)]
)
def test_it_finds_the_width_again_when_the_path_changes(
    before: ModelledPath, after: ModelledPath
) -> None:
    link = ModelledLink(before)
    link.run(10.0)
    link.path = after
    link.run(15.0)
    assert link.is_steady
    assert link.loss_of_rate < 0.05


def test_another_round_trip_time_alone_makes_it_look() -> None:
    link = ModelledLink(ModelledPath(1 * GBIT, 10e-3, send_buffer_bytes=2.7e6))
    link.run(6.0)
    assert link.width == 1
    link.path = replace(link.path, rtt_s=25e-3)
    link.run(8.0)
    assert link.width == 2


def test_a_near_path_begins_with_few_connections_and_large_frames() -> None:
    link = ModelledLink(LOOPBACK)
    link.step()
    assert (link.width, link.frame_bytes) == (1, MIB)
    link.path = PLAIN
    link.forget_round_trips()
    link.run(0.2)
    assert (link.width, link.frame_bytes) == (8, 256 * KIB)


def test_a_path_between_near_and_far_stays_what_it_was() -> None:
    link = ModelledLink(replace(LOOPBACK, rtt_s=0.9e-3))
    link.run(5.0)
    for rtt_s in (1.1e-3, 0.9e-3, 1.6e-3, 0.8e-3) * 5:
        link.path = replace(link.path, rtt_s=rtt_s)
        assert link.num_changes(1.0) == 0


@pytest.mark.parametrize(
    ("rate_bytes_per_s", "slow_s", "times"),
    [
        # BBR drains its queue for 0.2 s in ten to see the round-trip time.
        (0.1 * GBIT, 0.2, 4),
        # A link that stands still says nothing about its width.
        (0.0, 10.0, 1),
    ],
)
def test_a_slow_moment_is_no_other_path(rate_bytes_per_s: float, slow_s: float, times: int) -> None:
    link = ModelledLink(CAPPED)
    link.run(10.0)
    for _ in range(times):
        link.path = replace(CAPPED, link_bytes_per_s=rate_bytes_per_s)
        assert link.num_changes(slow_s) == 0
        link.path = CAPPED
        assert link.num_changes(9.8) == 0


def test_only_backlogged_time_counts() -> None:
    link = ModelledLink(PLAIN, busy=lambda now_s: now_s % 4 < 1)
    link.run(40.0)
    assert link.is_steady
    assert link.width == 1
    assert link.measured.rate_bytes_per_s == pytest.approx(1 * GBIT, rel=0.1)


@pytest.mark.parametrize(
    ("rate_bytes_per_s", "frame_bytes"),
    [
        (0.1 * GBIT, 256 * KIB),
        (0.25 * GBIT, 256 * KIB),
        (1 * GBIT, 512 * KIB),
        (2 * GBIT, 1 * MIB),
        (10 * GBIT, 2 * MIB),
        (40 * GBIT, 2 * MIB),
    ],
)
def test_the_frame_size_follows_the_rate(rate_bytes_per_s: float, frame_bytes: int) -> None:
    path = ModelledPath(rate_bytes_per_s, 5e-3)
    for limit in (2 * MIB, MIB):
        link = ModelledLink(path, TransportConfig(max_autotuned_frame_bytes=limit))
        link.run(20.0)
        assert link.frame_bytes == min(frame_bytes, limit)


def test_send_buffers_that_limit_are_noticed() -> None:
    for path, width in ((replace(BUFFERED, link_bytes_per_s=100 * GBIT), 16), (PLAIN, 1)):
        link = ModelledLink(path)
        link.run(10.0)
        assert link.send_buffers_limit is (width == 16)
        assert link.width == width


def test_connections_that_come_and_go_do_not_disturb_a_window() -> None:
    link = ModelledLink(CAPPED)
    link.run(10.0)
    for _ in range(20):
        link.lose_oldest()
        assert link.num_changes(1.0) == 0
        assert 0.0 <= link.measured.carried.loss < 0.01
