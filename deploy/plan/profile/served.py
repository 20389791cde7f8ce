"""The profile of engines from requests that a region has served, as its gateway recorded them.

An engine that is measured alone is faster than the same engine at work: prompts share its steps,
and whatever else runs on its host takes its part. Here both are in the numbers, because the
requests had them. Pure; it does not know where records come from.

- Prefill. A prompt's share of an instance's time: while k prompts are prefilled at once, a second
  counts 1/k of a second for each. So the shares of an instance add up to the time that it was busy,
  and 1 / (mean share) is the rate at which it completes such prompts. Only prompts of text count,
  of which (nearly) nothing was cached.
- Decode. Seconds per output token of a stream, beside the mean number of requests that its instance
  decoded meanwhile.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from deploy.profile_file import DecodeStep, MeasuredDecode, MeasuredPrefill, PrefillPoint

if TYPE_CHECKING:
    from deploy.gateway.serving.records import RequestRecord

MIN_PROMPTS: Final = 20
"""Fewer prefills make no profile."""
MAX_POINTS: Final = 8
PROMPTS_PER_POINT: Final = 5
STREAMS_PER_STEP: Final = 5
MIN_OUTPUT_TOKENS: Final = 8
"""Shorter answers say little about the time of a token."""
MAX_CACHED_SHARE: Final = 0.05
BUSY_SHARE: Final = 0.6
"""Instances that were busy less than this say little about a full load."""

_BEFORE_PREFILL: Final = (
    "read_s",
    "render_s",
    "look_up_s",
    "move_s",
    "reserve_s",
    "queue_s",
    "open_s",
    "engine_queue_s",
)
"""The parts of a TTFT that come before `prefill_s`, in `TtftParts`."""


class Span(NamedTuple):
    """Work of one request on an instance, in seconds on the gateway's clock."""

    begin_s: float
    end_s: float
    tokens: int


class Share(NamedTuple):
    """What a span had of its instance: `busy_s` of its time. `mean_at_once` spans ran meanwhile,
    itself among them.
    """

    span: Span
    busy_s: float
    mean_at_once: float


class TooFewRequests(ValueError):
    """The requests make no profile; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class ServedProfile:
    """Numbers of a profile, and by instance the share of the time in which it prefilled."""

    prefill: MeasuredPrefill
    decode: MeasuredDecode | None
    busy: Mapping[str, float]
    num_prompts: int
    notes: tuple[str, ...]


def served_profile(
    records: Iterable[RequestRecord], model: str = "", instances: Collection[str] = ()
) -> ServedProfile:
    """The profile of the requests for `model` ("": all) on these `instances` (none: all). Raises
    `TooFewRequests`.
    """
    known = [
        record
        for record in records
        if record.outcome == "ok" and (not model or record.model == model)
    ]
    names = sorted({record.model for record in known})
    if len(names) > 1:
        raise TooFewRequests(f"requests of {', '.join(names)}: choose one with --model")
    prefills = _chosen(prefill_spans(known), instances)
    shares = {name: found for name, spans in prefills.items() if (found := shares_of(spans))}
    prompts = [share for found in shares.values() for share in found]
    if len(prompts) < MIN_PROMPTS:
        raise TooFewRequests(
            f"{len(prompts)} prefills that are told apart from decoding, of {len(known)} requests; "
            f"{MIN_PROMPTS} are needed, with another text each: prompts that one engine served "
            "whole, or that were cached, tell nothing about a prefill"
        )
    busy = {name: _busy_share(found) for name, found in shares.items()}
    decoded = _chosen(decode_spans(known), instances)
    streams = [share for spans in decoded.values() for share in shares_of(spans)]
    prefill = MeasuredPrefill(clock="engine", points=prefill_points(prompts))
    notes = tuple(_notes(busy))
    return ServedProfile(prefill, decode_steps(streams), busy, len(prompts), notes)


def prefill_spans(records: Iterable[RequestRecord]) -> dict[str, list[Span]]:
    """By instance its prefills of prompts that were not cached there."""
    found = defaultdict(list)
    for record in records:
        num_tokens, parts = record.num_prompt_tokens, record.parts
        if not record.prefill_instance or not num_tokens or parts.prefill_s is None:
            continue
        if (record.cached_tokens or 0) > MAX_CACHED_SHARE * num_tokens:
            continue
        if record.num_prefill_attempts > 1:
            continue  # the parts do not say when the last attempt began
        if _encodes_media(record):
            continue
        before_s = sum(getattr(parts, name) or 0.0 for name in _BEFORE_PREFILL)
        begin_s = record.started_s + before_s
        found[record.prefill_instance].append(
            Span(begin_s, begin_s + parts.prefill_s, num_tokens - (record.cached_tokens or 0))
        )
    return found


def _encodes_media(record: RequestRecord) -> bool:
    """Whether the prefill may have encoded media, as far as the record says."""
    predicted = any(side.get("encode_s") for side in record.predictions.values())
    return predicted or bool(record.media) or record.media_travel is not None


def decode_spans(records: Iterable[RequestRecord]) -> dict[str, list[Span]]:
    """By instance its streams, from their first token to their last. `tokens`: those after the
    first one.
    """
    found = defaultdict(list)
    for record in records:
        if record.is_stream and record.ttft_s is not None and record.total_s is not None:
            begin_s, end_s = record.started_s + record.ttft_s, record.started_s + record.total_s
            if record.decode_instance and end_s > begin_s:
                span = Span(begin_s, end_s, record.output_tokens - 1)
                found[record.decode_instance].append(span)
    return found


def shares_of(spans: Iterable[Span]) -> list[Share]:
    """What each span had of the time of the instance that all of them ran on. Spans without a
    length are left out.
    """
    spans = [span for span in spans if span.end_s > span.begin_s]
    changes = sorted(
        [(span.begin_s, 1, number) for number, span in enumerate(spans)]
        + [(span.end_s, -1, number) for number, span in enumerate(spans)]
    )
    busy_s, at_once = [0.0] * len(spans), [0.0] * len(spans)
    running: set[int] = set()
    before_s = 0.0
    for at_s, change, number in changes:
        for one in running:
            busy_s[one] += (at_s - before_s) / len(running)
            at_once[one] += (at_s - before_s) * len(running)
        before_s = at_s
        if change > 0:
            running.add(number)
        else:
            running.remove(number)
    return [
        Share(span, busy, load / (span.end_s - span.begin_s))
        for span, busy, load in zip(spans, busy_s, at_once, strict=True)
    ]


def prefill_points(shares: Sequence[Share]) -> tuple[PrefillPoint, ...]:
    """Means of groups of prompts of like length, each of the same number. Means and not medians:
    it is their sum that an instance has to do.
    """
    ordered = sorted(shares, key=lambda share: share.span.tokens)
    num_points = max(1, min(MAX_POINTS, len(ordered) // PROMPTS_PER_POINT))
    points: dict[int, PrefillPoint] = {}
    for number in range(num_points):
        begin = number * len(ordered) // num_points
        group = ordered[begin : (number + 1) * len(ordered) // num_points]
        seconds = [share.busy_s for share in group]
        tokens = round(statistics.mean(share.span.tokens for share in group))
        # Prompts of one length fill several groups, of which the last one stands for all.
        points[tokens] = PrefillPoint(
            tokens=tokens,
            seconds=_rounded(statistics.mean(seconds)),
            spread_seconds=_rounded(max(seconds) - min(seconds)),
            samples=len(group),
        )
    return tuple(points.values())


def decode_steps(shares: Sequence[Share]) -> MeasuredDecode | None:
    """The mean time of a token at each number of streams, as far as enough of them ran."""
    groups = defaultdict(list)
    for share in shares:
        if share.span.tokens >= MIN_OUTPUT_TOKENS:
            step_s = (share.span.end_s - share.span.begin_s) / share.span.tokens
            groups[max(1, round(share.mean_at_once))].append(step_s)
    steps = tuple(
        DecodeStep(
            batch_size=num_streams,
            step_seconds=_rounded(statistics.mean(found)),
            spread_seconds=_rounded(max(found) - min(found)),
            samples=len(found),
        )
        for num_streams, found in sorted(groups.items())
        if len(found) >= STREAMS_PER_STEP
    )
    return MeasuredDecode(steps=steps) if steps else None


def _chosen(found: Mapping[str, list[Span]], instances: Collection[str]) -> dict[str, list[Span]]:
    return {name: spans for name, spans in found.items() if not instances or name in instances}


def _busy_share(shares: Sequence[Share]) -> float:
    """Of the time from the first span's begin to the last one's end."""
    begin_s = min(share.span.begin_s for share in shares)
    end_s = max(share.span.end_s for share in shares)
    return sum(share.busy_s for share in shares) / (end_s - begin_s)


def _notes(busy: Mapping[str, float]) -> Iterable[str]:
    for name, share in sorted(busy.items()):
        if share < BUSY_SHARE:
            yield (
                f"{name} prefilled {share:.0%} of the time: under a full load it may be slower "
                "than this profile says"
            )


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.6g}")
