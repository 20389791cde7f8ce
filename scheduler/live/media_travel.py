"""What should cross the link for the media of a prompt: their pixels, or their embeddings.

Pixels do, in the client's body. The rule of `scheduler.encoding.travel` says with the numbers of
the moment whether embeddings would have been there sooner. Reads the scheduler's facts and changes
nothing; time is no part of it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from netmon.region_link import LinkView
from scheduler.encoding.travel import travels
from scheduler.live.core import LiveScheduler
from scheduler.reports import ClusterReport, EncodeReport
from scheduler.routing.decision import HAND_OFF, ONE_ENGINE, RequestShape
from scheduler.routing.media import MediaTask, MediaView, media_delay_s


class MediaTravel(msgspec.Struct, frozen=True, kw_only=True):
    """`Travel` with the bytes that it rests on."""

    what: Literal["pixels", "embedding"]
    reason: str
    pixel_bytes: int
    embedding_bytes: int
    pixels_s: float
    embedding_s: float


def media_travel(
    live: LiveScheduler, model: str, shape: RequestShape, target: str, pd: str
) -> MediaTravel | None:
    """What should travel from `pd` to the prefill cluster `target`. None for text, for a route that
    crosses no link, and where the rate or the size of embeddings is not known.
    """
    media = shape.media
    if media is None or not media.nbytes or target in (HAND_OFF, ONE_ENGINE):
        return None
    there, here = _report(live, target), _report(live, pd)
    rate, token_bytes = _rate(live, pd, target), _token_bytes(there, here)
    if not rate or token_bytes is None:
        return None
    cached = min(shape.prefill_cached_tokens.get(target, 0), shape.num_prompt_tokens)
    num_tokens = media.to_encode(target, cached)
    known = live.knowledge(model).media
    view = MediaView(model=model, stage=_stage(there), line=known.line(target))
    own = known.line(live.place(HAND_OFF, pd))
    at_home = MediaView(model=model, stage=_stage(here), line=own)
    if not num_tokens:
        return None
    embedding_bytes = round(num_tokens * token_bytes)
    found = travels(
        pixel_bytes=media.nbytes,
        embedding_bytes=embedding_bytes,
        bytes_per_s=rate,
        encode_s=media_delay_s(MediaTask(num_tokens), view, 0.0),
        # What the prefill cluster has cached need not be encoded here either.
        encode_here_s=media_delay_s(MediaTask(media.to_encode(pd, cached)), at_home, 0.0),
    )
    return MediaTravel(
        what=found.what,
        reason=found.reason.value,
        pixel_bytes=media.nbytes,
        embedding_bytes=embedding_bytes,
        pixels_s=found.pixels_s,
        embedding_s=found.embedding_s,
    )


def _report(live: LiveScheduler, cluster: str) -> ClusterReport | None:
    return live.reports[cluster].report if cluster in live.reports else None


def _stage(report: ClusterReport | None) -> EncodeReport | None:
    return None if report is None else report.encode


def _rate(live: LiveScheduler, source: str, target: str) -> float | None:
    """The rate of the link that media take; the other direction stands for it if unmeasured."""
    links: tuple[LinkView, ...] = (live.link(source, target), live.link(target, source))
    return next((rate for link in links if (rate := link.available_bytes_per_s) is not None), None)


def _token_bytes(*reports: ClusterReport | None) -> float | None:
    """The bytes of embeddings for each media token, as a stage at either end has seen them."""
    stages = [stage for report in reports if (stage := _stage(report)) is not None]
    return next((stage.token_bytes for stage in stages if stage.token_bytes), None)
