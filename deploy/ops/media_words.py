"""What became of the images and other media of a prompt, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from deploy.gateway.serving.records import RequestRecord
from kvmanager.config_files.units import format_bytes, format_duration
from scheduler.encoding.values import EncodeReason
from scheduler.live.media_travel import MediaTravel

MEDIA: Final[dict[EncodeReason, str]] = {
    EncodeReason.ENCODED: "encoded on an instance that encodes for others",
    EncodeReason.SHARED: "encoded there once for this request and another one",
    EncodeReason.FOUND: "found encoded",
    EncodeReason.CACHED: "not needed: the KVCache of their tokens is cached",
    EncodeReason.NO_INSTANCE: "left: no healthy instance encodes for others",
    EncodeReason.QUEUE_FULL: "left: too many media waited",
    EncodeReason.WAIT_TOO_LONG: "left: the engine that prefills was expected to be sooner",
    EncodeReason.TIMEOUT: "left: not encoded in time",
    EncodeReason.REFUSED: "left: an engine would not encode it",
    EncodeReason.FAILED: "left: the instances that were tried failed",
    EncodeReason.UNNAMED: "left: its bytes are elsewhere, or it has no name",
    EncodeReason.CLOSED: "left: the front was shutting down",
}
"""What became of media. Those that are left are encoded by the engine that prefills."""


def media_facts(record: RequestRecord) -> Iterator[tuple[str, str]]:
    """Titles and texts of what there is to say of the media of a request."""
    if record.media:
        yield "media", media_words(record.media)
    if record.media_travel is not None:
        yield "media travel", travel_words(record.media_travel)


def media_words(media: Mapping[str, int]) -> str:
    """What became of media. A reason of another version stays as it is."""
    known = set(EncodeReason)
    words = {name: MEDIA[EncodeReason(name)] if name in known else name for name in media}
    return "; ".join(f"{number} {words[name]}" for name, number in media.items())


def travel_words(found: MediaTravel) -> str:
    """What crossed the link for media and what did not, with the bytes and the time of both."""
    pixels_s, embedding_s = map(format_duration, (found.pixels_s, found.embedding_s))
    text = (
        f"{format_bytes(found.pixel_bytes)} of pixels, encoded there after {pixels_s}; "
        f"embeddings: {format_bytes(found.embedding_bytes)}, there after {embedding_s}"
    )
    return text if found.what == "pixels" else f"{text}, which is sooner"
