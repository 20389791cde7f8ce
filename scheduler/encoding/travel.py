"""Whether the pixels of media travel over a link, or their embeddings.

Pixels are what a client's request has anyway: compressed, they have a fraction of the bytes of the
embedding, and whoever prefills needs nothing else. An embedding is worth its bytes only where the
cluster beyond the link would take longer to encode than the link takes for the difference.

Pure; it knows neither queues nor what the media are.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal

_WORTH: Final = 0.8
"""An embedding travels if it is there within this share of the time that the pixels would need."""


class TravelReason(StrEnum):
    """Why pixels or an embedding travel. Values are stable: they are in JSON that tools read."""

    FEWER_BYTES = "fewer_bytes"  # the pixels have fewer bytes, and are encoded in time beyond
    NOT_SOONER = "not_sooner"  # an embedding has fewer bytes, but would hardly be there sooner
    SOONER = "sooner"  # the embedding is there sooner than pixels could be encoded


@dataclass(frozen=True, slots=True)
class Travel:
    """What travels, and how long it takes either way until the embedding is beyond the link."""

    what: Literal["pixels", "embedding"]
    reason: TravelReason
    pixels_s: float
    embedding_s: float


def travels(
    *,
    pixel_bytes: float,
    embedding_bytes: float,
    bytes_per_s: float,
    encode_s: float,
    encode_here_s: float | None = None,
) -> Travel:
    """What should cross a link of this rate: `encode_s` is how long the cluster beyond it takes to
    encode, with its queue, `encode_here_s` how long this side does: 0 for media whose embeddings
    are here, None if it is as fast.
    """
    if not bytes_per_s > 0:
        raise ValueError(f"a rate of {bytes_per_s:g} bytes/s carries nothing")
    here_s = encode_s if encode_here_s is None else encode_here_s
    pixels_s = pixel_bytes / bytes_per_s + encode_s
    embedding_s = here_s + embedding_bytes / bytes_per_s
    if embedding_s < _WORTH * pixels_s:
        return Travel("embedding", TravelReason.SOONER, pixels_s, embedding_s)
    is_smaller = pixel_bytes <= embedding_bytes
    reason = TravelReason.FEWER_BYTES if is_smaller else TravelReason.NOT_SOONER
    return Travel("pixels", reason, pixels_s, embedding_s)
