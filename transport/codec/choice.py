"""Which codec makes transfers over one link faster, decided while they run. Pure: time is given.

What goes in: how fast the link took bytes while it had a backlog (`observe_sent`), what encoding
cost and saved (`observe_encoded`, of samples and of chunks really sent), how many cores are idle
(`observe_cpu`). What comes out: `choose` with numbers and a reason, and `wants_sample`.

Model. Encoding, sending and decoding overlap, so the slowest stage sets the time of a raw byte:

    seconds per raw byte = max(1 / (ratio x link), 1 / (encode x cores here), 1 / (decode x there))

against 1 / link without a codec; speeds are raw bytes per CPU second. A codec is taken up when that
time is at most `enter` of raw's and kept until it is more than `keep`.

Rules that hold where the model does not:

- Guard. The speed of the receiver cannot be observed here: `decode_per_encode` and `decode_cores`
  assume it. Raw bytes really sent are compared with the last rate without a codec, and a codec
  that falls more than `guard_loss` short is dropped for a back-off that doubles each time.
- Refresh. Under a codec the rate of the raw link is seen only from below. Every `refresh_every_s`
  a moment without one measures it again.
- Sampling. A sample that took c CPU seconds allows the next no sooner than 100 c later, which keeps
  sampling at 1% of a core; while no codec comes near to paying, the interval doubles as well, and
  a sample that differs from what was known starts it again.

A link that slows down under a codec looks like a codec that fails; that costs one back-off without
compression. A link that speeds up is found at the next refresh. Knows no socket, thread or clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from transport.codec.codecs import Codec

SAMPLE_BYTES = 64 * 1024
"""Raw bytes that a sample encodes, the first of a chunk about to be sent."""


@dataclass(frozen=True, slots=True)
class CodecConfig:
    """When a codec is worth it. Rates and bytes are per link, `cores` of this host."""

    enter: float = 0.95
    keep: float = 0.98
    guard_loss: float = 0.03
    backoff_first_s: float = 5.0
    backoff_max_s: float = 600.0
    refresh_every_s: float = 15.0
    refresh_s: float = 0.2
    min_raw_s: float = 0.1
    min_raw_bytes: int = 8 * 1024 * 1024
    """How long and how much the raw link must have been seen before any choice."""
    min_samples: int = 3
    sample_share: float = 0.01
    """Share of one core's time that samples may take."""
    sample_first_s: float = 0.02
    sample_max_s: float = 10.0
    """Interval between samples: doubles up to the latter while no codec comes near to paying."""
    reserve_share: float = 0.1
    """Share of all cores that is left idle."""
    encode_threads: int = 8
    """Most chunks that are encoded at a time."""
    decode_per_encode: float = 1.2
    """Decoding speed of one core there to encoding speed of one core here."""
    decode_cores: float = 2.0
    """Cores that the receiver decodes on."""


@dataclass(frozen=True, slots=True)
class CodecChoice:
    """What to send with, and why. Numbers are 0 where not known; rates are raw bytes a second."""

    codec: Codec
    reason: str
    raw_bytes_per_s: float = 0.0
    """The link's rate without a codec."""
    expected_bytes_per_s: float = 0.0
    """With `codec`."""
    ratio: float = 1.0
    encode_bytes_per_s: float = 0.0
    """What one core encodes."""
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
        # The second replaces the first, which also made contexts and tables.
        weight = max(_SAMPLE_WEIGHT, 1 / max(1, self.num_samples - 1))
        share = min(1.0, payload_bytes / raw_bytes)
        self.wire_share += weight * (share - self.wire_share)
        self.encode_s_per_byte += weight * (encode_s / raw_bytes - self.encode_s_per_byte)


@dataclass(slots=True)
class _Window:
    """Raw bytes sent since a moment, to compare with raw's rate."""

    elapsed_s: float = 0.0
    raw_bytes: int = 0

    def add(self, raw_bytes: int, elapsed_s: float) -> None:
        self.elapsed_s += elapsed_s
        self.raw_bytes += raw_bytes


# A window is long enough that single chunks in flight do not decide.
_WINDOW_S = 0.1
_WINDOW_BYTES = 16 * 1024 * 1024
_SAMPLE_WEIGHT = 0.2
_SURPRISE = 0.1
_SAMPLE_LOST_S = 1.0
_NEAR = 1.02
_RATE_MEMORY_S = 1.0
_CPU_MEMORY_S = 2.0


class CodecChooser:
    """Chooses the codec of one link. Not thread-safe. Name FP8 in `candidates` only where loss is
    allowed; RAW needs no naming.
    """

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
        """`idle_share` (0 to 1) of the `num_cores` that this process may use was idle since the
        last call.
        """
        elapsed_s = now_s - self._cpu_s
        if elapsed_s <= 0:
            return
        # What encoding takes now is not free, but it is there for encoding.
        cores = min(num_cores, idle_share * num_cores + self._encode_s / elapsed_s)
        weight = 1.0 if self._idle_cores is None else 1 - math.exp(-elapsed_s / _CPU_MEMORY_S)
        self._idle_cores = (self._idle_cores or 0.0) * (1 - weight) + weight * cores
        self._num_cores = num_cores
        self._cpu_s = now_s
        self._encode_s = 0.0

    # --- answers

    def wants_sample(self, now_s: float) -> Codec | None:
        """The codec of which a sample should be taken now, or None.

        Encode SAMPLE_BYTES of a chunk with it and report with `observe_sample`; what was encoded
        need not be sent. To be asked for each chunk; one sample is wanted at a time.
        """
        if now_s < self._next_sample_s or not self._speeds:
            return None
        # Chunks really sent say all about the codec in use.
        others = [codec for codec in self._speeds if codec is not self._current]
        if not others or self._usable_cores() <= 0:
            return None
        self._next_sample_s = now_s + _SAMPLE_LOST_S
        return min(others, key=lambda codec: self._speeds[codec].sampled_s)

    def choose(self, now_s: float) -> CodecChoice:
        """What the next chunk is to be sent with. To be asked for each chunk."""
        if self._refreshing is not None:
            return self._refresh(now_s)
        if self._current is not Codec.RAW:
            kept = self._keep(now_s)
            if kept is not None:
                return kept
        return self._enter(now_s)

    def _interval_after(self, surprise: float) -> float:
        """Until the next sample, when the last one's share of bytes was `surprise` off."""
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
        # With nothing to send there is nothing to see: it ends anyway.
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
        # One that served well for long starts again from the first back-off.
        doubled_s = 0.0 if lasted_s > 4 * speed.backoff_s else 2 * speed.backoff_s
        speed.backoff_s = min(config.backoff_max_s, max(config.backoff_first_s, doubled_s))
        speed.barred_until_s = now_s + speed.backoff_s
        self._switch(Codec.RAW, now_s)

    def _keep(self, now_s: float) -> CodecChoice | None:
        """The codec in use again, raw for a refresh, or None when it is given up."""
        codec = self._current
        expected = self._expected(codec)
        if expected * self._config.keep < self._raw_rate:
            self._switch(Codec.RAW, now_s)
            return None
        best = max(self._ready(now_s), key=self._expected, default=codec)
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
        """Whether some codec would at least gain a little."""
        return any(self._expected(codec) >= _NEAR * self._raw_rate for codec in self._speeds)

    def _usable_cores(self) -> float:
        idle_cores = self._idle_cores or 0.0
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
