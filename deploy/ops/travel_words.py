"""What crossed a link for the media of a request, in words."""

from __future__ import annotations

from kvmanager.config_files.units import format_bytes, format_duration
from scheduler.live.media_travel import MediaTravel


def travel_words(found: MediaTravel) -> str:
    """What travelled and what did not, with the bytes and the time of both."""
    pixels_s, embedding_s = map(format_duration, (found.pixels_s, found.embedding_s))
    text = (
        f"{format_bytes(found.pixel_bytes)} of pixels, encoded there after {pixels_s}; "
        f"embeddings: {format_bytes(found.embedding_bytes)}, there after {embedding_s}"
    )
    return text if found.what == "pixels" else f"{text}, which is sooner"
