"""Pixels travel over links, unless the numbers say otherwise."""

import pytest

from scheduler.encoding.travel import TravelReason, travels

IMAGE = {"pixel_bytes": 2e5, "embedding_bytes": 4e6}


def test_pixels_travel_where_they_have_fewer_bytes() -> None:
    found = travels(**IMAGE, bytes_per_s=1e8, encode_s=0.01)
    assert (found.what, found.reason) == ("pixels", TravelReason.FEWER_BYTES)
    assert found.pixels_s == pytest.approx(0.012)
    assert found.embedding_s == pytest.approx(0.05)


def test_an_embedding_travels_where_the_other_side_encodes_slowly() -> None:
    found = travels(**IMAGE, bytes_per_s=1e8, encode_s=0.2, encode_here_s=0.01)
    assert (found.what, found.reason) == ("embedding", TravelReason.SOONER)


def test_an_embedding_that_is_here_needs_no_encoding() -> None:
    assert travels(**IMAGE, bytes_per_s=1e8, encode_s=0.2, encode_here_s=0.0).what == "embedding"


def test_a_little_sooner_is_not_enough() -> None:
    large = {"pixel_bytes": 1e6, "embedding_bytes": 9e5}
    found = travels(**large, bytes_per_s=1e8, encode_s=0.1)
    assert (found.what, found.reason) == ("pixels", TravelReason.NOT_SOONER)


def test_a_link_that_carries_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="carries nothing"):
        travels(**IMAGE, bytes_per_s=0, encode_s=0.1)
