"""The tuner against simulated paths: what it finds, how soon, and that it then leaves it alone."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netmon.tcp_info import TcpInfo
from transport.config import KIB, MIB, TransportConfig
from transport.sending.tuning import LinkTuner, TuningPhase

CONFIG = TransportConfig()
TICK_S = 0.1
GBIT = 1e9 / 8
NO_INFO = TcpInfo()


@dataclass(frozen=True)
class Path:
    """What a link's rate is made of, as a function of the number of its connections."""

    link_bytes_per_s: float
    rtt_s: float
    flow_bytes_per_s: float = math.inf
    send_buffer_bytes: float = math.inf
    loss: float = 0.0

    def flow_rate(self, width: int) -> float:
        """Of each of `width` connections that run at full speed."""
        own = min(self.flow_bytes_per_s, self.send_buffer_bytes / self.rtt_s)
        return min(own, self.link_bytes_per_s / width)

    def sndbuf_limited(self, width: int) -> float:
        return float(self.flow_rate(width) == self.send_buffer_bytes / self.rtt_s)


CAPPED = Path(2 * GBIT, 20e-3, flow_bytes_per_s=0.3 * GBIT)
BUFFERED = Path(5 * GBIT, 20e-3, send_buffer_bytes=2.7e6)
PLAIN = Path(1 * GBIT, 40e-3)
LOSSY = Path(1 * GBIT, 40e-3, flow_bytes_per_s=0.1 * GBIT, loss=0.002)
LOOPBACK = Path(30 * GBIT, 50e-6, flow_bytes_per_s=20 * GBIT)
NARROW = Path(0.1 * GBIT, 20e-3)
PATHS = [CAPPED, BUFFERED, PLAIN, LOSSY, LOOPBACK, NARROW]


@dataclass
class Flow:
    """One connection; it carries data from `since_s` on, and begins in slow start."""

    since_s: float
    delivered_bytes: float = 0.0
    frame_bytes: float = 0.0
    info: TcpInfo = NO_INFO


@dataclass
class SimulatedLink:
    """A sender's link on a path that may change; every connection sends whole frames."""

    path: Path
    config: TransportConfig = CONFIG
    noise: float = 0.0
    busy: Callable[[float], bool] = lambda _: True
    seed: int = 1
    now_s: float = 100.0
    acked_bytes: int = 0
    widths: list[int] = field(default_factory=list)
    """At every tick."""
    flows: dict[int, Flow] = field(default_factory=dict)
    """By connection, the oldest first; those beyond the width stand by."""

    def __post_init__(self) -> None:
        self.tuner = LinkTuner(self.config)
        self.rng = random.Random(self.seed)
        self.ids = itertools.count(1)

    def run(self, duration_s: float) -> None:
        for _ in range(round(duration_s / TICK_S)):
            self.step()

    def step(self) -> None:
        self.now_s += TICK_S
        is_busy = self.busy(self.now_s)
        width = self.tuner.width
        if is_busy:
            while len(self.flows) < width:
                self.flows[next(self.ids)] = Flow(self.now_s + 2 * self.path.rtt_s)
            flows = list(self.flows.values())
            for flow in flows[width:]:
                flow.since_s = self.now_s
            luck = 1 + self.rng.uniform(-self.noise, self.noise)
            for flow in flows[:width]:
                self.send(flow, width, luck)
        self.tuner.observe(
            {number: flow.info for number, flow in self.flows.items()},
            acked_bytes=self.acked_bytes,
            is_backlogged=is_busy,
            now_s=self.now_s,
        )
        self.widths.append(self.tuner.width)

    def send(self, flow: Flow, width: int, luck: float) -> None:
        path = self.path
        slow_start = 15_000 / path.rtt_s * 2 ** min(60, (self.now_s - flow.since_s) / path.rtt_s)
        is_started = self.now_s > flow.since_s
        rate = min(path.flow_rate(width) * luck, slow_start if is_started else 0.0)
        flow.delivered_bytes += rate * TICK_S
        while flow.delivered_bytes >= flow.frame_bytes:
            self.acked_bytes += int(flow.frame_bytes)
            flow.delivered_bytes -= flow.frame_bytes
            flow.frame_bytes = self.tuner.frame_bytes * self.rng.uniform(0.9, 1.1)
        info, sent_bytes = flow.info, int(rate * TICK_S)
        flow.info = replace(
            info,
            rtt_s=path.rtt_s,
            min_rtt_s=path.rtt_s,
            sent_bytes=info.sent_bytes + sent_bytes,
            retransmitted_bytes=info.retransmitted_bytes + round(sent_bytes * path.loss),
            busy_s=info.busy_s + TICK_S,
            sndbuf_limited_s=info.sndbuf_limited_s + TICK_S * path.sndbuf_limited(width),
        )

    @property
    def loss_of_rate(self) -> float:
        """Share of the best rate that the present width gives away."""
        widths = range(1, self.config.max_link_connections + 1)
        rates = {width: width * self.path.flow_rate(width) for width in widths}
        return 1 - rates[self.tuner.width] / max(rates.values())

    def num_changes(self) -> int:
        return sum(a != b for a, b in itertools.pairwise(self.widths))


@pytest.mark.parametrize(
    ("path", "widths"),
    [
        (CAPPED, {8}),
        (BUFFERED, {8}),
        (PLAIN, {1}),
        (LOSSY, {16}),
        (LOOPBACK, {2}),
        (NARROW, {1, 2, 4}),
        (Path(1 * GBIT, 150e-3, send_buffer_bytes=2.7e6), {8}),
        (Path(2 * GBIT, 20e-3, flow_bytes_per_s=0.05 * GBIT), {16}),
    ],
)
def test_it_finds_a_width_within_seconds_and_keeps_it(path: Path, widths: set[int]) -> None:
    link = SimulatedLink(path)
    link.run(6.0 if path.rtt_s < 0.1 and path is not NARROW else 15.0)
    assert link.tuner.phase is TuningPhase.HOLD
    assert link.tuner.width in widths
    link.widths.clear()
    link.run(40.0)
    assert link.num_changes() == 0


def test_it_looks_again_and_less_and_less_often() -> None:
    link = SimulatedLink(CAPPED)
    link.run(10.0)
    looks = []
    for _ in range(6000):
        before = link.tuner.phase
        link.step()
        if before is TuningPhase.HOLD and link.tuner.phase is not TuningPhase.HOLD:
            looks.append(link.now_s)
    gaps_s = [later - earlier for earlier, later in itertools.pairwise(looks)]
    assert gaps_s == pytest.approx([121, 241], abs=5)
    assert sum(width != 8 for width in link.widths) * TICK_S < 0.02 * 600


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(PATHS), st.integers(0, 1 << 20))
def test_noise_does_not_make_it_wander(path: Path, seed: int) -> None:
    link = SimulatedLink(path, noise=0.1, seed=seed)
    link.run(15.0)
    assert link.tuner.phase is TuningPhase.HOLD
    # A step in width that brings less than the noise may be missed.
    assert link.loss_of_rate < 0.25
    link.widths.clear()
    link.run(40.0)
    assert link.num_changes() == 0


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(PATHS), st.integers(1, 24), st.integers(1, 24), st.integers(0, 99))
def test_the_limit_on_connections_is_kept(path: Path, start: int, most: int, seed: int) -> None:
    config = TransportConfig(num_connections=start, max_link_connections=most)
    link = SimulatedLink(path, config, noise=0.3, seed=seed)
    link.run(20.0)
    assert max(link.widths) <= max(start, most)
    assert min(link.widths) >= 1


def test_slow_start_is_not_taken_for_a_gain() -> None:
    link = SimulatedLink(replace(PLAIN, rtt_s=80e-3))
    link.run(12.0)
    assert link.tuner.width == 1
    assert link.widths.count(16) * TICK_S < 2.0


@pytest.mark.parametrize(
    ("before", "after"), [(PLAIN, CAPPED), (CAPPED, PLAIN), (BUFFERED, NARROW), (PLAIN, LOSSY)]
)
def test_it_finds_the_width_again_when_the_path_changes(before: Path, after: Path) -> None:
    link = SimulatedLink(before)
    link.run(10.0)
    link.path = after
    link.run(15.0)
    assert link.tuner.phase is TuningPhase.HOLD
    assert link.loss_of_rate < 0.05


def test_another_round_trip_time_alone_makes_it_look() -> None:
    link = SimulatedLink(Path(1 * GBIT, 10e-3, send_buffer_bytes=2.7e6))
    link.run(6.0)
    assert link.tuner.width == 1
    link.path = replace(link.path, rtt_s=25e-3)
    link.run(8.0)
    assert link.tuner.width == 2


def test_a_near_path_begins_with_few_connections_and_large_frames() -> None:
    link = SimulatedLink(LOOPBACK)
    link.step()
    assert (link.tuner.width, link.tuner.frame_bytes) == (1, MIB)
    link.path = PLAIN
    for flow in link.flows.values():
        flow.info = NO_INFO
    link.run(0.2)
    assert (link.tuner.width, link.tuner.frame_bytes) == (8, CONFIG.frame_bytes)


def test_a_path_between_near_and_far_stays_what_it_was() -> None:
    link = SimulatedLink(replace(LOOPBACK, rtt_s=0.9e-3))
    link.run(5.0)
    link.widths.clear()
    for rtt_s in (1.1e-3, 0.9e-3, 1.6e-3, 0.8e-3) * 5:
        link.path = replace(link.path, rtt_s=rtt_s)
        link.run(1.0)
    assert link.num_changes() == 0


def test_a_slow_moment_is_no_other_path() -> None:
    """BBR drains its queue for 0.2 s in ten to see the round-trip time."""
    link = SimulatedLink(CAPPED)
    link.run(10.0)
    link.widths.clear()
    for _ in range(4):
        link.path = replace(CAPPED, link_bytes_per_s=0.1 * GBIT)
        link.run(0.2)
        link.path = CAPPED
        link.run(9.8)
    assert link.num_changes() == 0


def test_a_link_that_stands_still_keeps_its_width() -> None:
    link = SimulatedLink(CAPPED)
    link.run(10.0)
    link.widths.clear()
    link.path = replace(CAPPED, link_bytes_per_s=0.0)
    link.run(10.0)
    link.path = CAPPED
    link.run(10.0)
    assert link.num_changes() == 0


def test_only_backlogged_time_counts() -> None:
    idle = SimulatedLink(PLAIN, busy=lambda _: False)
    idle.flows[1] = Flow(0.0, info=replace(NO_INFO, rtt_s=40e-3, min_rtt_s=40e-3))
    idle.run(300.0)
    assert set(idle.widths) == {8}
    assert idle.tuner.measured.rate_bytes_per_s == 0.0
    bursts = SimulatedLink(PLAIN, busy=lambda now_s: now_s % 4 < 1)
    bursts.run(40.0)
    assert bursts.tuner.phase is TuningPhase.HOLD
    assert bursts.tuner.width == 1
    assert bursts.tuner.measured.rate_bytes_per_s == pytest.approx(1 * GBIT, rel=0.1)


def test_without_autotune_nothing_changes() -> None:
    config = TransportConfig(autotune=False, num_connections=5)
    link = SimulatedLink(LOOPBACK, config)
    link.run(20.0)
    assert set(link.widths) == {5}
    assert link.tuner.frame_bytes == config.frame_bytes
    assert link.tuner.measured.rate_bytes_per_s == 0.0


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
    link = SimulatedLink(Path(rate_bytes_per_s, 5e-3))
    link.run(20.0)
    assert link.tuner.frame_bytes == frame_bytes
    limited = SimulatedLink(
        Path(rate_bytes_per_s, 5e-3), replace(CONFIG, max_autotuned_frame_bytes=MIB)
    )
    limited.run(20.0)
    assert limited.tuner.frame_bytes == min(frame_bytes, MIB)


def test_send_buffers_that_limit_are_noticed() -> None:
    link = SimulatedLink(replace(BUFFERED, link_bytes_per_s=100 * GBIT))
    link.run(10.0)
    assert link.tuner.send_buffers_limit
    assert link.tuner.width == 16
    plain = SimulatedLink(PLAIN)
    plain.run(10.0)
    assert not plain.tuner.send_buffers_limit


def test_nothing_is_known_before_the_first_round_trip() -> None:
    tuner = LinkTuner(CONFIG)
    infos: dict[int, TcpInfo] = {}
    for tick in range(100):
        tuner.observe(infos, acked_bytes=0, is_backlogged=True, now_s=tick * TICK_S)
        infos = {1: NO_INFO} if tick > 50 else {}
    assert (tuner.width, tuner.phase) == (8, TuningPhase.UP)


def test_connections_that_come_and_go_do_not_disturb_a_window() -> None:
    link = SimulatedLink(CAPPED)
    link.run(10.0)
    link.widths.clear()
    for _ in range(20):
        del link.flows[min(link.flows)]
        link.run(1.0)
        assert 0.0 <= link.tuner.measured.carried.loss < 0.01
    assert link.num_changes() == 0
