"""From raw samples to the profile: medians, spreads, and what makes them doubtful.

Every sample counts, and none is dropped as an outlier. What makes a number doubtful becomes a note
in the profile. Pure; it does not know where samples come from. Times are seconds on any one clock.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from deploy.profile_file import (
    DecodeStep,
    EncodePoint,
    EngineProfile,
    KvCacheSize,
    MeasuredDecode,
    MeasuredEncode,
    MeasuredPrefill,
    PrefillPoint,
    Provenance,
)

MIN_STEPS = 8
"""A step is timed over at least this many tokens, all with all streams decoding.

A busy client reads tokens in bursts. Between two tokens it would see either nothing or a multiple
of the step; over eight tokens the burst hardly matters.
"""

_WIDE_SPREAD = 0.25
_CLOCKS_DIFFER = 0.25
_FASTER_WHEN_FULLER = 0.10


@dataclass(frozen=True, slots=True)
class PrefillSample:
    """One prefill of `tokens`: the time until the client had its answer, and by the engine's
    metrics.
    """

    tokens: int
    client_s: float
    engine_s: float | None = None


@dataclass(frozen=True, slots=True)
class EncodeSample:
    """A chat with images, and a prompt of as many tokens of text, each prefilled alone."""

    num_images: int
    image_tokens: int
    chat: PrefillSample
    text: PrefillSample

    @property
    def seconds(self) -> float:
        """What the images took beyond their tokens, by the engine's clock if it has one. By the
        client's clock it includes what the engine does with pixels before it encodes.
        """
        if self.chat.engine_s is not None and self.text.engine_s is not None:
            return self.chat.engine_s - self.text.engine_s
        return self.chat.client_s - self.text.client_s


@dataclass(frozen=True, slots=True)
class TokenTimes:
    """A stream. At `at_s[i]` it had `num_tokens[i]` tokens. Both ascend and are not empty."""

    at_s: tuple[float, ...]
    num_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DecodeSample:
    """Streams that decoded together.

    `engine_mean_s` is the engine's mean time between tokens over the whole run, with its start.
    """

    streams: tuple[TokenTimes, ...]
    engine_mean_s: float | None = None

    @property
    def batch_size(self) -> int:
        return len(self.streams)

    @property
    def client_mean_s(self) -> float | None:
        """Like `engine_mean_s`, but by the arrival of tokens at the client."""
        taken_s = sum(stream.at_s[-1] - stream.at_s[0] for stream in self.streams)
        gaps = sum(stream.num_tokens[-1] - stream.num_tokens[0] for stream in self.streams)
        return taken_s / gaps if gaps else None


@dataclass(slots=True)
class Measured:
    """The whole samples measured so far. The measuring shell appends to it."""

    prefill: list[PrefillSample] = field(default_factory=list)
    decode: list[DecodeSample] = field(default_factory=list)
    encode: list[EncodeSample] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class DecodeSetup:
    """The lengths that each decoding stream was asked for."""

    context_tokens: int
    output_tokens: int


def build_profile(
    measured: Measured,
    setup: DecodeSetup,
    provenance: Provenance,
    kv_cache: KvCacheSize | None = None,
) -> EngineProfile:
    """The profile of all samples. Notes from the measurement and on the numbers join the
    provenance's.

    Raises ValueError without any prefill sample.
    """
    if not measured.prefill:
        raise ValueError("no prefill was measured")
    prefill = prefill_profile(measured.prefill)
    steps = [step for sample in measured.decode if (step := decode_step(sample)) is not None]
    decode = None
    if steps:
        decode = MeasuredDecode(
            context_tokens=setup.context_tokens,
            output_tokens=setup.output_tokens,
            steps=tuple(steps),
        )
    encode = encode_profile(measured.encode)
    notes = (
        *provenance.notes,
        *measured.notes,
        *doubts(prefill, decode),
        *_encode_doubts(measured.encode, encode),
        *_slow_clients(measured.decode),
    )
    return EngineProfile(
        prefill=prefill,
        decode=decode,
        encode=encode,
        kv_cache=kv_cache,
        provenance=provenance.model_copy(update={"notes": notes}),
    )


def prefill_profile(samples: Sequence[PrefillSample]) -> MeasuredPrefill:
    """A point for each length. The engine's clock is used if it timed every sample.

    The engine times from the first scheduling to the first token, for which a prefill keeps the
    instance busy. The client's time also has HTTP, checks and queueing; nothing is subtracted from
    it.
    """
    # Times of two clocks differ by the overhead of HTTP, so a curve must not mix them.
    by_engine = all(sample.engine_s is not None for sample in samples)
    by_length: dict[int, list[PrefillSample]] = {}
    for sample in samples:
        by_length.setdefault(sample.tokens, []).append(sample)
    points = []
    for tokens, group in sorted(by_length.items()):
        client_s = [sample.client_s for sample in group]
        engine_s = [sample.engine_s for sample in group if sample.engine_s is not None]
        timed_s = engine_s if by_engine else client_s
        points.append(
            PrefillPoint(
                tokens=tokens,
                seconds=_rounded(statistics.median(timed_s)),
                spread_seconds=_rounded(max(timed_s) - min(timed_s)),
                client_seconds=_rounded(statistics.median(client_s)),
                samples=len(group),
            )
        )
    return MeasuredPrefill(clock="engine" if by_engine else "client", points=tuple(points))


def encode_profile(samples: Sequence[EncodeSample]) -> MeasuredEncode | None:
    """A point for each number of images whose median is above 0; None without any."""
    points = []
    for num_images, group in _by_images(samples):
        seconds = [sample.seconds for sample in group]
        median_s = _rounded(statistics.median(seconds))
        if median_s > 0:
            points.append(
                EncodePoint(
                    tokens=group[0].image_tokens,
                    seconds=median_s,
                    images=num_images,
                    spread_seconds=_rounded(max(seconds) - min(seconds)),
                    samples=len(group),
                )
            )
    return MeasuredEncode(points=tuple(points)) if points else None


def _images(num: int) -> str:
    return f"{num} image{'s' if num != 1 else ''}"


def _by_images(samples: Sequence[EncodeSample]) -> list[tuple[int, list[EncodeSample]]]:
    groups: dict[int, list[EncodeSample]] = {}
    for sample in samples:
        groups.setdefault(sample.num_images, []).append(sample)
    return sorted(groups.items())


def _encode_doubts(samples: Sequence[EncodeSample], encode: MeasuredEncode | None) -> Iterator[str]:
    points = encode.points if encode else ()
    kept = {point.images for point in points}
    for num_images, _ in _by_images(samples):
        if num_images not in kept:
            yield (
                f"a chat with {_images(num_images)} took no longer than its tokens: "
                "what encoding takes is less than the noise; measure larger images"
            )
    for point in points:
        if (point.spread_seconds or 0) > _WIDE_SPREAD * point.seconds:
            yield (
                f"encoding of {_images(point.images or 0)}: samples "
                f"{point.spread_seconds:.3g} s apart around {point.seconds:.3g} s; "
                "measure with more --repeats"
            )


def decode_step(sample: DecodeSample) -> DecodeStep | None:
    """The median time per token while all streams decoded; None if that time was too short.

    All streams decode from the last stream's first token to the first stream's last token. The time
    is taken over every span of `MIN_STEPS` tokens. With speculative decoding it is the time of a
    token, not of a step of the engine.
    """
    spans = list(_spans(sample.streams))
    # Fewer spans than streams: some stream had too few tokens with all the others.
    if len(spans) < sample.batch_size:
        return None
    # Deciles and not extremes: a single pause of the client must not decide.
    deciles = statistics.quantiles(spans, n=10, method="inclusive") if len(spans) > 1 else spans
    return DecodeStep(
        batch_size=sample.batch_size,
        step_seconds=_rounded(statistics.median(spans)),
        spread_seconds=_rounded(max(deciles[-1] - deciles[0], 0.0)),
        samples=len(spans),
    )


def doubts(prefill: MeasuredPrefill, decode: MeasuredDecode | None) -> list[str]:
    """What a reader of the numbers should know before trusting them."""
    return [*_prefill_doubts(prefill.points), *_decode_doubts(decode.steps if decode else ())]


def _prefill_doubts(points: Sequence[PrefillPoint]) -> Iterator[str]:
    for before, after in itertools.pairwise(points):
        if after.seconds < before.seconds:
            yield (
                f"prefill of {after.tokens} tokens took {after.seconds:.3g} s, less than the "
                f"{before.seconds:.3g} s of {before.tokens}: measure again with more --repeats, "
                "or leave one of the two lengths out"
            )
    for point in points:
        if (point.spread_seconds or 0) > _WIDE_SPREAD * point.seconds:
            yield (
                f"prefill of {point.tokens} tokens: samples {point.spread_seconds:.3g} s apart "
                f"around {point.seconds:.3g} s; does anything else use the machine?"
            )


def _decode_doubts(steps: Sequence[DecodeStep]) -> Iterator[str]:
    for before, after in itertools.pairwise(steps):
        if after.step_seconds < (1 - _FASTER_WHEN_FULLER) * before.step_seconds:
            yield (
                f"a decode step of {after.batch_size} streams took {after.step_seconds:.3g} s, "
                f"less than the {before.step_seconds:.3g} s of {before.batch_size}: measure again"
            )


def _slow_clients(samples: Sequence[DecodeSample]) -> Iterator[str]:
    for sample in samples:
        engine_s, client_s = sample.engine_mean_s, sample.client_mean_s
        if engine_s and client_s and abs(client_s - engine_s) > _CLOCKS_DIFFER * engine_s:
            yield (
                f"batch of {sample.batch_size}: tokens arrived every {client_s:.3g} s on average, "
                f"the engine made one every {engine_s:.3g} s; is the client or the network slow?"
            )


def _spans(streams: Sequence[TokenTimes]) -> Iterator[float]:
    """Seconds per token over spans of `MIN_STEPS` tokens, from every token that allows one."""
    start_s = max(stream.at_s[0] for stream in streams)
    end_s = min(stream.at_s[-1] for stream in streams)
    for stream in streams:
        arrivals = [
            (at_s, num)
            for at_s, num in zip(stream.at_s, stream.num_tokens, strict=True)
            if start_s <= at_s <= end_s
        ]
        last = 0
        for first_s, first_num in arrivals:
            # Counted in tokens and not in arrivals: several tokens may arrive at once.
            while last < len(arrivals) and arrivals[last][1] - first_num < MIN_STEPS:
                last += 1
            if last == len(arrivals):
                break
            last_s, last_num = arrivals[last]
            yield (last_s - first_s) / (last_num - first_num)


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.6g}")
