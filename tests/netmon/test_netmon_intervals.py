"""Differences between samples: connections that come, go and start again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from netmon.intervals import between
from netmon.samples import LinkSample, ProbeResult
from netmon.tcp_info import TcpInfo

MB = 1_000_000


def connection(acked_bytes: int = 0, busy_s: float = 0.0) -> TcpInfo:
    return TcpInfo(
        rtt_s=0.03, min_rtt_s=0.02, acked_bytes=acked_bytes, sent_bytes=acked_bytes, busy_s=busy_s
    )


def link(*connections: TcpInfo, acked_bytes: int = 0) -> LinkSample:
    """A link of connections with the numbers 1, 2, 3 ..."""
    return LinkSample(
        link="a>b", connections=dict(enumerate(connections, start=1)), acked_bytes=acked_bytes
    )


def test_differences_are_sums_over_connections() -> None:
    before = link(connection(10 * MB, 3.0), connection(5 * MB, 2.0), acked_bytes=9 * MB)
    after = link(connection(12 * MB, 3.2), connection(6 * MB, 2.1), acked_bytes=11 * MB)
    interval = between(before, after, 0.2)
    assert (interval.carried.acked_bytes, interval.payload_bytes) == (3 * MB, 2 * MB)
    assert interval.bytes_per_s == pytest.approx(15 * MB)
    assert interval.busy_s == pytest.approx(0.2)
    assert interval.carried.busy_s == pytest.approx(0.3)
    assert not interval.is_partial


def test_a_connection_that_began_in_the_interval_counts_from_zero() -> None:
    interval = between(link(), link(connection(2 * MB, 0.1)), 0.2)
    assert interval.carried.acked_bytes == 2 * MB
    assert not interval.is_partial


def test_a_connection_older_than_our_knowledge_counts_from_the_next_sample_on() -> None:
    interval = between(link(), link(connection(900 * MB, 80.0)), 0.2)
    assert interval.carried.acked_bytes == 0
    assert interval.is_partial


def test_counters_that_ran_backwards_begin_anew() -> None:
    before, after = link(connection(9 * MB, 5.0)), link(connection(MB, 0.1))
    interval = between(before, after, 0.2)
    assert interval.carried.acked_bytes == MB
    assert interval.is_partial


def test_a_connection_that_ended_with_bytes_on_their_way_makes_it_partial() -> None:
    ended = replace(connection(MB, 1.0), unacked_segments=1)
    assert between(link(ended), link(), 0.2).is_partial
    assert not between(link(connection(MB, 1.0)), link(), 0.2).is_partial


def test_a_floor_is_taken_over_busy_time_only() -> None:
    interval = between(link(connection()), link(connection(MB, 0.09)), 1.0)
    assert interval.floor_bytes_per_s == pytest.approx(10 * MB)


def test_connections_may_have_been_busy_one_after_the_other() -> None:
    before = link(connection(), connection())
    after = link(connection(MB, 0.09), connection(MB, 0.09))
    assert between(before, after, 1.0).floor_bytes_per_s == pytest.approx(10 * MB)


def test_a_burst_is_no_floor() -> None:
    burst = connection(MB, 0.001)
    assert between(link(connection()), link(burst), 1.0).floor_bytes_per_s == 20 * MB


def test_acknowledgements_after_a_loss_prove_nothing() -> None:
    after = replace(connection(MB, 0.09), retransmitted_bytes=1448)
    assert between(link(connection()), link(after), 1.0).floor_bytes_per_s == 0


def test_without_connections_the_links_own_count_is_used() -> None:
    interval = between(link(acked_bytes=MB), link(acked_bytes=3 * MB), 0.5)
    assert interval.carried.acked_bytes == interval.payload_bytes == 2 * MB
    assert interval.floor_bytes_per_s == pytest.approx(4 * MB)
    assert interval.busy_s == 0.5
    assert between(link(acked_bytes=MB), link(acked_bytes=0), 0.5).is_partial


def test_round_trips_are_weighted_by_what_they_brought() -> None:
    slow = replace(connection(3 * MB, 0.1), rtt_s=0.07)
    interval = between(link(), link(connection(MB, 0.1), slow), 0.2)
    assert interval.carried.rtt_s == pytest.approx(0.06)
    assert between(link(slow), link(slow), 0.2).carried.rtt_s == 0


@pytest.mark.parametrize(("acked_bytes", "duration_s"), [(-1, 1.0), (1, 0.0)])
def test_a_probe_result_must_be_possible(acked_bytes: int, duration_s: float) -> None:
    with pytest.raises(ValueError, match="must"):
        ProbeResult(acked_bytes=acked_bytes, duration_s=duration_s)
