"""Chooses the codec that makes transfers over one link faster, while they run. Pure: time is an
argument. It observes how fast the link takes bytes while it has a backlog, what encoding costs and
saves, and how many cores are idle.

Model. Encoding, sending and decoding overlap, so the slowest stage sets the time of a raw byte:

    seconds per raw byte = max(1 / (ratio x link), 1 / (encode x cores here), 1 / (decode x there))

Without a codec it is 1 / link. Speeds are raw bytes per CPU second. The chooser takes up a codec
whose time is at most `enter` of the time without one, and drops it above `keep` of that time.

Three rules correct the model:

- Guard. The sender cannot observe the receiver's speed: `decode_per_encode` and `decode_cores`
  assume it. So the raw bytes really sent are compared with the last rate without a codec. A codec
  that falls short by more than `guard_loss` is dropped for a back-off that doubles each time.
- Refresh. While a codec is in use, its wire bytes give only a lower bound of the link's rate. Every
  `refresh_every_s` the link is measured for a moment without a codec.
- Sampling. `sample_share` bounds the CPU time of samples. While no codec comes near to paying, the
  interval between them doubles as well; a sample that differs from what was known starts it again.

A link that slows down under a codec looks like a codec that fails; that costs one back-off without
compression. The next refresh notices a link that has become faster.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from transport.codec.codecs import Codec

SAMPLE_BYTES = 64 * 1024
"""Raw bytes that a sample encodes: the first ones of a chunk that is about to be sent."""


@dataclass(frozen=True, slots=True)
class CodecConfig:
    """When a codec is worth its cost. Rates and bytes are per link, `cores` are this host's."""

    enter: float = 0.95
    keep: float = 0.98
    guard_loss: float = 0.03
    backoff_first_s: float = 5.0
    backoff_max_s: float = 600.0
    refresh_every_s: float = 15.0
    refresh_s: float = 0.2
    min_raw_s: float = 0.1
    min_raw_bytes: int = 8 * 1024 * 1024
    """No codec is chosen before the link was observed without one for both of these."""
    min_samples: int = 3
    sample_share: float = 0.01
    """Share of one core's time that samples may take."""
    sample_first_s: float = 0.02
    sample_max_s: float = 10.0
    """The interval between samples doubles from `sample_first_s` to `sample_max_s` while no codec
    comes near to paying.
    """
    reserve_share: float = 0.1
    """Share of all cores that is left idle."""
    encode_threads: int = 8
    """Most chunks that are encoded at a time."""
    decode_per_encode: float = 1.2
    """The receiver's decoding speed per core / this host's encoding speed per core."""
    decode_cores: float = 2.0
    """Cores that the receiver decodes on."""


@dataclass(frozen=True, slots=True)
class CodecChoice:
    """The codec to send with, and why. Unknown numbers are 0; rates are raw bytes a second."""

    codec: Codec
    reason: str
    raw_bytes_per_s: float = 0.0
    """The link's rate without a codec."""
    expected_bytes_per_s: float = 0.0
    """The link's expected rate with `codec`."""
    ratio: float = 1.0
    encode_bytes_per_s: float = 0.0
    """The encoding speed of one core."""
    cores_needed: float = 0.0
    cores_usable: float = 0.0


@dataclass(slots=True)
class _Speed:
    """What is known of one codec; means weigh recent observations more."""

    num_samples: int = 0
    wire_share: float = 1.0
    encode_s_per_byte: float = 0.0
    sampled_s: float = -math.inf
    backoff_s: float = 0.0
    barred_until_s: float = -math.inf

    def observe(self, raw_bytes: int, payload_bytes: int, encode_s: float) -> None:
        self.num_samples += 1
        # The second observation replaces the first, which also paid for making contexts and tables.
        weight = max(_SAMPLE_WEIGHT, 1 / max(1, self.num_samples - 1))
        share = min(1.0, payload_bytes / raw_bytes)
        self.wire_share += weight * (share - self.wire_share)
        self.encode_s_per_byte += weight * (encode_s / raw_bytes - self.encode_s_per_byte)


@dataclass(slots=True)
class _Window:
    """Raw bytes sent over a period, to compare with the rate without a codec."""

    elapsed_s: float = 0.0
    raw_bytes: int = 0

    def add(self, raw_bytes: int, elapsed_s: float) -> None:
        self.elapsed_s += elapsed_s
        self.raw_bytes += raw_bytes


# The guard's window is so long that single chunks in flight do not decide.
_WINDOW_S = 0.1
_WINDOW_BYTES = 16 * 1024 * 1024
_SAMPLE_WEIGHT = 0.2
# A sample whose share of bytes is off by this much shows that the content has changed.
_SURPRISE = 0.1
# A sample that was asked for and never reported (its thread ended) delays the next by this long.
_SAMPLE_LOST_S = 1.0
# A codec within 2% of paying is sampled often, so that a small change is noticed soon.
_NEAR = 1.02
_RATE_MEMORY_S = 1.0
_CPU_MEMORY_S = 2.0


class CodecChooser:
    """One link's codec. Not thread-safe. Name FP8 only where loss is allowed; RAW is implied."""

    def __init__(self, candidates: Sequence[Codec], config: CodecConfig, now_s: float) -> None:
        self._config = config
        self._speeds: dict[Codec, _Speed] = {
            codec: _Speed() for codec in candidates if codec is not Codec.RAW
        }
        self._current = Codec.RAW
        self._since_s = now_s
        self._window = _Window()
        self._raw_rate = 0.0
        self._raw_seen = _Window()
        self._refreshing: Codec | None = None
        self._refreshed_s = now_s
        self._refresh_seen = _Window()
        self._idle_cores: float | None = None
        self._num_cores = 1
        self._cpu_s = now_s
        self._encode_s = 0.0
        self._next_sample_s = now_s
        self._sample_interval_s = config.sample_first_s

    # --- observations

    def observe_sent(
        self, codec: Codec, raw_bytes: int, wire_bytes: int, elapsed_s: float, *, now_s: float
    ) -> None:
        """During the last `elapsed_s` the link always had something to send, and took `wire_bytes`
        that carry `raw_bytes`, (mostly) coded with `codec`.
        """
        if elapsed_s <= 0:
            return
        if codec is Codec.RAW:
            self._observe_raw(raw_bytes, elapsed_s)
            return
        # What the wire carries under a codec, the link carries without one. Short observations
        # also see queues drain, so they count little.
        above = max(0.0, wire_bytes / elapsed_s - self._raw_rate)
        self._raw_rate += above * (1 - math.exp(-elapsed_s / _RATE_MEMORY_S))
        if codec is self._current and self._refreshing is None:
            self._window.add(raw_bytes, elapsed_s)
            self._guard(now_s)

    def observe_encoded(
        self, codec: Codec, raw_bytes: int, payload_bytes: int, encode_s: float
    ) -> None:
        """A chunk to be sent was encoded, in `encode_s` CPU seconds of the thread that did it."""
        if codec in self._speeds:
            self._speeds[codec].observe(raw_bytes, payload_bytes, encode_s)
            self._encode_s += encode_s

    def observe_sample(
        self, codec: Codec, raw_bytes: int, payload_bytes: int, encode_s: float, *, now_s: float
    ) -> None:
        """What `wants_sample` asked for was done."""
        known = self._speeds[codec].wire_share
        self.observe_encoded(codec, raw_bytes, payload_bytes, encode_s)
        self._speeds[codec].sampled_s = now_s
        self._sample_interval_s = self._interval_after(abs(payload_bytes / raw_bytes - known))
        wait_s = max(self._sample_interval_s, encode_s / self._config.sample_share)
        self._next_sample_s = now_s + wait_s

    def observe_cpu(self, idle_share: float, num_cores: int, *, now_s: float) -> None:
        """Since the last call, `idle_share` (0 to 1) of this process's `num_cores` was idle."""
        elapsed_s = now_s - self._cpu_s
        if elapsed_s <= 0:
            return
        # Cores that encode now are not idle, but they are available for encoding.
        cores = min(num_cores, idle_share * num_cores + self._encode_s / elapsed_s)
        weight = 1.0 if self._idle_cores is None else 1 - math.exp(-elapsed_s / _CPU_MEMORY_S)
        self._idle_cores = (self._idle_cores or 0.0) * (1 - weight) + weight * cores
        self._num_cores = num_cores
        self._cpu_s = now_s
        self._encode_s = 0.0

    # --- answers

    def wants_sample(self, now_s: float) -> Codec | None:
        """The codec to take a sample with now, or None. Ask for each chunk.

        Encode SAMPLE_BYTES of the chunk with it and report with `observe_sample`; the encoded bytes
        need not be sent. One sample is wanted at a time.
        """
        if now_s < self._next_sample_s or not self._speeds:
            return None
        # The chunks that are sent already measure the codec in use.
        others = [codec for codec in self._speeds if codec is not self._current]
        if not others or self._usable_cores() <= 0:
            return None
        self._next_sample_s = now_s + _SAMPLE_LOST_S
        return min(others, key=lambda codec: self._speeds[codec].sampled_s)

    def choose(self, now_s: float) -> CodecChoice:
        """The codec for the next chunk. Ask for each chunk."""
        if self._refreshing is not None:
            return self._refresh(now_s)
        if self._current is not Codec.RAW:
            kept = self._keep(now_s)
            if kept is not None:
                return kept
        return self._enter(now_s)

    def _interval_after(self, surprise: float) -> float:
        """Seconds until the next sample. `surprise`: the last sample's error in wire share."""
        config = self._config
        is_learning = any(speed.num_samples < config.min_samples for speed in self._speeds.values())
        if surprise > _SURPRISE or is_learning:
            return config.sample_first_s
        worthwhile = self._current is not Codec.RAW or self._comes_near()
        longest = min(1.0, config.sample_max_s) if worthwhile else config.sample_max_s
        return min(longest, 2 * self._sample_interval_s)

    # --- the rate without a codec

    def _observe_raw(self, raw_bytes: int, elapsed_s: float) -> None:
        seen = self._raw_seen
        seen.add(raw_bytes, elapsed_s)
        if self._refreshing is not None:
            self._refresh_seen.add(raw_bytes, elapsed_s)
        # A plain mean at first, then an exponential one.
        weight = max(1 - math.exp(-elapsed_s / _RATE_MEMORY_S), elapsed_s / seen.elapsed_s)
        self._raw_rate += weight * (raw_bytes / elapsed_s - self._raw_rate)

    def _refresh(self, now_s: float) -> CodecChoice:
        codec = self._refreshing
        assert codec is not None
        seen = self._refresh_seen
        enough = seen.elapsed_s >= self._config.refresh_s / 2
        # A link with nothing to send measures nothing, so the refresh ends after four times its
        # length in any case.
        if now_s - self._refreshed_s < self._config.refresh_s or (
            not enough and now_s - self._refreshed_s < 4 * self._config.refresh_s
        ):
            return self._raw(f"measuring the link without {codec.name}")
        if enough:
            self._raw_rate = seen.raw_bytes / seen.elapsed_s
        self._refreshing = None
        self._refreshed_s = now_s
        self._window = _Window()
        return self.choose(now_s)

    # --- decisions

    def _guard(self, now_s: float) -> None:
        window, config = self._window, self._config
        if window.elapsed_s < _WINDOW_S or window.raw_bytes < _WINDOW_BYTES:
            return
        self._window = _Window()
        if window.raw_bytes / window.elapsed_s >= (1 - config.guard_loss) * self._raw_rate:
            return
        speed = self._speeds[self._current]
        lasted_s = now_s - self._since_s
        # A codec that served well for long starts again with the first back-off.
        doubled_s = 0.0 if lasted_s > 4 * speed.backoff_s else 2 * speed.backoff_s
        speed.backoff_s = min(config.backoff_max_s, max(config.backoff_first_s, doubled_s))
        speed.barred_until_s = now_s + speed.backoff_s
        self._switch(Codec.RAW, now_s)

    def _keep(self, now_s: float) -> CodecChoice | None:
        """The codec in use again, RAW for a refresh, or None when the codec in use is dropped."""
        codec = self._current
        expected = self._expected(codec)
        if expected * self._config.keep < self._raw_rate:
            self._switch(Codec.RAW, now_s)
            return None
        best = max(self._ready(now_s), key=self._expected, default=codec)
        # The same margin as for taking up a codec, so that two similar ones do not take turns.
        if self._expected(best) * self._config.enter > expected:
            self._switch(best, now_s)
            return self._choice(best, f"faster than {codec.name}")
        if now_s - self._refreshed_s >= self._config.refresh_every_s:
            self._refreshing = codec
            self._refreshed_s = now_s
            self._refresh_seen = _Window()
            return self._raw(f"measuring the link without {codec.name}")
        return self._choice(codec, "still pays")

    def _enter(self, now_s: float) -> CodecChoice:
        if not self._speeds:
            return self._raw("no codec allowed")
        if not self._raw_known:
            return self._raw("the link's rate is not known yet")
        if self._idle_cores is None:
            return self._raw("idle CPU is not known yet")
        if self._usable_cores() <= 0:
            return self._raw("no idle CPU")
        ready = self._ready(now_s)
        if not ready:
            barred = any(speed.barred_until_s > now_s for speed in self._speeds.values())
            return self._raw("was slower than raw lately" if barred else "too few samples yet")
        best = max(ready, key=self._expected)
        if self._expected(best) * self._config.enter < self._raw_rate:
            return self._raw(f"{best.name}, the best, would not pay: {self._limit(best)}")
        self._switch(best, now_s)
        return self._choice(best, f"pays, {self._limit(best)}")

    def _switch(self, codec: Codec, now_s: float) -> None:
        self._current = codec
        self._since_s = now_s
        self._refreshed_s = now_s
        self._window = _Window()
        self._sample_interval_s = self._config.sample_first_s

    # --- the model

    @property
    def _raw_known(self) -> bool:
        seen, config = self._raw_seen, self._config
        return seen.elapsed_s >= config.min_raw_s and seen.raw_bytes >= config.min_raw_bytes

    def _ready(self, now_s: float) -> list[Codec]:
        return [
            codec
            for codec, speed in self._speeds.items()
            if speed.num_samples >= self._config.min_samples and speed.barred_until_s <= now_s
        ]

    def _comes_near(self) -> bool:
        """Whether some codec would gain at least a little."""
        return any(self._expected(codec) >= _NEAR * self._raw_rate for codec in self._speeds)

    def _usable_cores(self) -> float:
        idle_cores = self._idle_cores or 0.0
        # Engines and the agent's event loop share the host, so some idle time is left to them.
        free = idle_cores - self._config.reserve_share * self._num_cores
        return max(0.0, min(free, self._config.encode_threads))

    def _stages(self, codec: Codec) -> dict[str, float]:
        """Raw bytes a second of each stage."""
        speed, config = self._speeds[codec], self._config
        encode = 1 / max(speed.encode_s_per_byte, 1e-15)
        decode = encode * config.decode_per_encode
        return {
            "limited by the link": self._raw_rate / max(speed.wire_share, 1e-9),
            "limited by encoding": encode * self._usable_cores(),
            "limited by decoding (assumed)": decode * config.decode_cores,
        }

    def _expected(self, codec: Codec) -> float:
        return min(self._stages(codec).values())

    def _limit(self, codec: Codec) -> str:
        stages = self._stages(codec)
        return min(stages, key=stages.__getitem__)

    def _choice(self, codec: Codec, reason: str) -> CodecChoice:
        speed = self._speeds[codec]
        expected = self._expected(codec)
        return CodecChoice(
            codec,
            reason,
            raw_bytes_per_s=self._raw_rate,
            expected_bytes_per_s=expected,
            ratio=1 / max(speed.wire_share, 1e-9),
            encode_bytes_per_s=1 / max(speed.encode_s_per_byte, 1e-15),
            cores_needed=expected * speed.encode_s_per_byte,
            cores_usable=self._usable_cores(),
        )

    def _raw(self, reason: str) -> CodecChoice:
        return CodecChoice(
            Codec.RAW,
            reason,
            raw_bytes_per_s=self._raw_rate,
            expected_bytes_per_s=self._raw_rate,
            cores_usable=self._usable_cores(),
        )
