"""The chooser in simulated transfers: what it picks, and that it never costs more than 3%."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from transport.codec.choice import SAMPLE_BYTES, CodecChoice, CodecChooser, CodecConfig
from transport.codec.codecs import Codec

MIB = 1024 * 1024
GIB = 1024 * MIB
GBIT = 1e9 / 8
CHUNK_BYTES = 256 * 1024
STEP_S = 0.02
PLANES, LZ4 = Codec.ZSTD_PLANES, Codec.LZ4


@dataclass
class Link:
    """A sender, a link and a receiver whose stages overlap, stepped in simulated time."""

    rate_gbits: float
    ratios: dict[Codec, float] = field(default_factory=lambda: {PLANES: 1.45, LZ4: 1.0})
    encode_bytes_per_s: dict[Codec, float] = field(
        default_factory=lambda: {PLANES: 0.6e9, LZ4: 4e9}
    )
    decode_bytes_per_s: float = 3e9
    idle_share: float = 0.9
    num_cores: int = 2
    noise: float = 0.0
    """By how much each step's rate is off at most, either way."""
    config: CodecConfig = field(default_factory=CodecConfig)
    now_s: float = 100.0
    sample_s: float = 0.0
    num_samples: int = 0
    own_cores: float = 0.0
    choices: list[tuple[float, CodecChoice]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(1)
        self.chooser = CodecChooser(list(self.ratios), self.config, self.now_s)

    def send(self, num_bytes: float, each_step: Callable[[float], None] | None = None) -> float:
        """Seconds that the transfer took, samples counted as if nothing went on meanwhile."""
        begin_s, left = self.now_s, num_bytes
        while left > 0:
            left -= self.step()
            if each_step is not None:
                each_step(num_bytes - left)
        return self.now_s - begin_s

    def step(self) -> float:
        """Raw bytes sent in one step."""
        stall_s = self.sample()
        idle = max(0.0, self.idle_share - self.own_cores / self.num_cores)
        self.chooser.observe_cpu(idle, self.num_cores, now_s=self.now_s)
        choice = self.chooser.choose(self.now_s)
        self.choices.append((self.now_s, choice))
        rate = self.raw_rate(choice.codec) * self.random.uniform(1 - self.noise, 1 + self.noise)
        raw_bytes = int(rate * STEP_S)
        self.now_s += STEP_S + stall_s
        if choice.codec is not Codec.RAW:
            self.encode(choice.codec, raw_bytes)
        wire_bytes = int(raw_bytes / self.ratios.get(choice.codec, 1.0))
        self.chooser.observe_sent(
            choice.codec, raw_bytes, wire_bytes, STEP_S + stall_s, now_s=self.now_s
        )
        return raw_bytes

    def sample(self) -> float:
        """CPU seconds of a sample, if one is wanted."""
        codec = self.chooser.wants_sample(self.now_s)
        if codec is None:
            return 0.0
        encode_s = SAMPLE_BYTES / self.encode_bytes_per_s[codec]
        payload_bytes = int(SAMPLE_BYTES / self.ratios[codec])
        self.chooser.observe_sample(codec, SAMPLE_BYTES, payload_bytes, encode_s, now_s=self.now_s)
        self.sample_s += encode_s
        self.num_samples += 1
        return encode_s

    def encode(self, codec: Codec, raw_bytes: int) -> None:
        encode_s = raw_bytes / self.encode_bytes_per_s[codec]
        self.own_cores = encode_s / STEP_S
        num_chunks = max(1, raw_bytes // CHUNK_BYTES)
        for _ in range(num_chunks):
            share = raw_bytes // num_chunks
            self.chooser.observe_encoded(
                codec, share, int(share / self.ratios[codec]), encode_s / num_chunks
            )

    def raw_rate(self, codec: Codec) -> float:
        link = self.rate_gbits * GBIT
        if codec is Codec.RAW:
            self.own_cores = 0.0
            return link
        return min(
            link * self.ratios[codec],
            self.encode_bytes_per_s[codec] * self.idle_share * self.num_cores,
            self.decode_bytes_per_s,
        )

    def raw_s(self, num_bytes: float) -> float:
        return num_bytes / (self.rate_gbits * GBIT)

    def share_of(self, codec: Codec) -> float:
        return sum(choice.codec is codec for _, choice in self.choices) / len(self.choices)


@pytest.mark.parametrize("rate_gbits", [0.2, 1.0, 3.0, 10.0])
@pytest.mark.parametrize("ratio", [1.0, 1.03, 1.45])
@pytest.mark.parametrize("idle_share", [0.0, 0.15, 0.5, 0.9])
@pytest.mark.parametrize("decode_bytes_per_s", [0.2e9, 3e9])
def test_never_slower_than_raw_by_more_than_3_percent(
    rate_gbits: float, ratio: float, idle_share: float, decode_bytes_per_s: float
) -> None:
    link = Link(
        rate_gbits,
        ratios={PLANES: ratio, LZ4: 1.0},
        idle_share=idle_share,
        decode_bytes_per_s=decode_bytes_per_s,
    )
    assert link.send(2 * GIB) <= 1.03 * link.raw_s(2 * GIB) + STEP_S
    assert link.sample_s <= 0.01 * (link.now_s - 100) + SAMPLE_BYTES / 0.6e9


@pytest.mark.parametrize(
    ("rate_gbits", "cores", "least_gain"),
    [(0.2, 2, 1.4), (1.0, 2, 1.38), (3.0, 2, 1.3), (1.0, 8, 1.38)],
)
def test_gains_what_the_data_gives_on_slow_links(
    rate_gbits: float, cores: int, least_gain: float
) -> None:
    link = Link(rate_gbits, num_cores=cores)
    assert link.raw_s(4 * GIB) / link.send(4 * GIB) >= least_gain
    last = link.choices[-1][1]
    assert last.codec is PLANES
    assert last.ratio == pytest.approx(1.45, rel=0.01)
    assert last.encode_bytes_per_s == pytest.approx(0.6e9, rel=0.01)
    assert last.cores_needed <= last.cores_usable


@pytest.mark.parametrize("rate_gbits", [0.2, 1.0, 3.0])
def test_a_noisy_link_changes_little(rate_gbits: float) -> None:
    compressible = Link(rate_gbits, noise=0.3)
    assert compressible.raw_s(4 * GIB) / compressible.send(4 * GIB) >= 1.3
    random = Link(rate_gbits, noise=0.3, ratios={PLANES: 1.0})
    assert random.send(2 * GIB) <= 1.03 * random.raw_s(2 * GIB)


def test_nothing_is_chosen_on_a_fast_link_and_sampling_becomes_rare() -> None:
    link = Link(10.0)
    link.send(2 * GIB)
    assert link.share_of(Codec.RAW) == 1.0
    link.num_samples = 0
    link.send(60 * 10 * GBIT)
    assert link.num_samples <= 20
    assert "would not pay" in link.choices[-1][1].reason


@pytest.mark.parametrize("idle_share", [0.0, 0.1])
def test_a_busy_cpu_gets_no_codec(idle_share: float) -> None:
    link = Link(1.0, idle_share=idle_share)
    link.send(GIB)
    assert link.share_of(Codec.RAW) == 1.0
    assert link.choices[-1][1].reason == "no idle CPU"
    assert link.sample_s == 0.0


def test_little_idle_cpu_is_enough_for_a_slow_link_only() -> None:
    slow, fast = Link(0.2, idle_share=0.3), Link(3.0, idle_share=0.3)
    slow.send(GIB)
    fast.send(2 * GIB)
    assert slow.choices[-1][1].codec is PLANES
    assert fast.choices[-1][1].codec is Codec.RAW


def test_a_cpu_that_becomes_busy_gives_the_codec_up() -> None:
    link = Link(1.0)
    link.send(2 * GIB)
    assert link.choices[-1][1].codec is PLANES
    link.idle_share = 0.05
    link.send(2 * GIB)
    assert link.choices[-1][1].codec is Codec.RAW


def test_data_that_stops_compressing_is_found_at_once_and_found_again() -> None:
    link = Link(1.0)
    link.send(GIB)
    assert link.choices[-1][1].codec is PLANES
    link.ratios[PLANES] = 1.0
    begin_s = link.now_s
    took_s = link.send(2 * GIB)
    assert took_s <= 1.03 * link.raw_s(2 * GIB)
    coded_s = sum(choice.codec is PLANES for at_s, choice in link.choices if at_s > begin_s)
    assert coded_s * STEP_S < 1.0
    link.ratios[PLANES] = 1.45
    assert link.raw_s(4 * GIB) / link.send(4 * GIB) > 1.2
    assert link.choices[-1][1].codec is PLANES


def test_a_receiver_slower_than_assumed_costs_one_window_a_back_off() -> None:
    link = Link(1.0, ratios={PLANES: 1.45}, decode_bytes_per_s=0.08e9)
    took_s = link.send(20 * GIB)
    assert took_s <= 1.03 * link.raw_s(20 * GIB)
    starts = [
        at_s
        for (at_s, choice), (_, before) in zip(link.choices[1:], link.choices, strict=False)
        if choice.codec is PLANES and before.codec is Codec.RAW
    ]
    pauses_s = [after - before for before, after in itertools.pairwise(starts)]
    assert len(pauses_s) >= 3
    assert all(b > 1.7 * a for a, b in itertools.pairwise(pauses_s))
    assert any("slower than raw lately" in choice.reason for _, choice in link.choices)


def test_a_link_that_becomes_faster_is_found_at_the_refresh() -> None:
    link = Link(1.0)
    link.send(GIB)
    link.rate_gbits = 20.0
    link.send(40 * 0.6e9)
    assert link.choices[-1][1].codec is Codec.RAW
    assert link.choices[-1][1].raw_bytes_per_s == pytest.approx(20 * GBIT, rel=0.05)


def test_padding_is_worth_lz4_even_on_a_fast_link() -> None:
    link = Link(
        8.0,
        ratios={PLANES: 1.9, LZ4: 1.5},
        encode_bytes_per_s={PLANES: 0.6e9, LZ4: 8e9},
        decode_bytes_per_s=9e9,
    )
    assert link.raw_s(20 * GIB) / link.send(20 * GIB) > 1.4
    assert link.choices[-1][1].codec is LZ4


def test_no_choice_before_enough_is_known() -> None:
    chooser = CodecChooser([PLANES], CodecConfig(), 0.0)
    assert chooser.wants_sample(0.0) is None
    assert "rate is not known" in chooser.choose(0.0).reason
    chooser.observe_sent(Codec.RAW, 20 * MIB, 20 * MIB, 0.2, now_s=0.2)
    assert "idle CPU is not known" in chooser.choose(0.2).reason
    chooser.observe_cpu(1.0, 2, now_s=0.2)
    for number in range(CodecConfig().min_samples):
        at_s = 0.3 + number
        assert "too few samples" in chooser.choose(at_s).reason
        assert chooser.wants_sample(at_s) is PLANES
        assert chooser.wants_sample(at_s) is None
        chooser.observe_sample(PLANES, SAMPLE_BYTES, SAMPLE_BYTES // 2, 1e-4, now_s=at_s)
        assert chooser.wants_sample(at_s + 0.0099) is None
    assert chooser.choose(5.0).codec is PLANES


def test_the_first_sample_does_not_count_for_speed() -> None:
    chooser = CodecChooser([PLANES], CodecConfig(), 0.0)
    chooser.observe_sent(Codec.RAW, 20 * MIB, 20 * MIB, 0.2, now_s=0.2)
    chooser.observe_cpu(1.0, 2, now_s=0.2)
    for encode_s in (0.5, 1e-4, 1e-4):
        chooser.observe_sample(PLANES, SAMPLE_BYTES, SAMPLE_BYTES // 2, encode_s, now_s=1.0)
    assert chooser.choose(60.0).encode_bytes_per_s == pytest.approx(SAMPLE_BYTES / 1e-4)


def test_without_candidates_it_is_raw() -> None:
    chooser = CodecChooser([Codec.RAW], CodecConfig(), 0.0)
    assert chooser.wants_sample(1.0) is None
    assert chooser.choose(1.0).reason == "no codec allowed"
