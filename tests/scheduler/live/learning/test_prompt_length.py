"""Tokens of prompts that nobody counted: text by its bytes, media by what answers said of them."""

from __future__ import annotations

import pytest

from scheduler.live.learning.prompt_length import (
    BYTES_PER_TOKEN,
    TOKENS_PER_UNIT,
    LengthEstimator,
    Media,
    PromptContent,
)

TEXT = PromptContent(text_bytes=4000)
IMAGE = PromptContent(text_bytes=400, media={Media.IMAGE: 1})


def test_before_anything_was_counted_text_has_four_bytes_a_token() -> None:
    lengths = LengthEstimator()
    assert not lengths.is_known
    assert lengths.bytes_per_token == BYTES_PER_TOKEN
    assert lengths.num_tokens(TEXT) == 1000
    assert lengths.num_tokens(PromptContent()) == 1


def test_a_bound_is_never_exceeded() -> None:
    assert LengthEstimator().num_tokens(TEXT, at_most=900) == 900
    assert LengthEstimator().num_tokens(TEXT, at_most=1100) == 1000


def test_the_first_counted_prompt_replaces_the_guess() -> None:
    lengths = LengthEstimator()
    lengths.counted(TEXT, 1600)
    assert lengths.is_known
    assert lengths.num_tokens(PromptContent(text_bytes=250)) == 100


def test_long_prompts_weigh_more_than_the_template_of_short_ones() -> None:
    lengths = LengthEstimator()
    for _ in range(200):
        lengths.counted(PromptContent(text_bytes=40), 40)
        lengths.counted(PromptContent(text_bytes=40_000), 10_000)
    assert lengths.bytes_per_token == pytest.approx(4.0, rel=0.01)


def test_another_kind_of_text_is_followed() -> None:
    lengths = LengthEstimator()
    for _ in range(200):
        lengths.counted(PromptContent(text_bytes=4000), 1000)
    for _ in range(200):
        lengths.counted(PromptContent(text_bytes=4000), 2000)
    assert lengths.bytes_per_token == pytest.approx(2.0, rel=0.02)


@pytest.mark.parametrize("kind", Media)
def test_media_count_by_unit_until_an_answer_says_what_the_model_makes_of_them(kind: Media) -> None:
    num = 1_000_000 if kind is Media.EMBEDS else 2
    content = PromptContent(text_bytes=400, media={kind: num})
    lengths = LengthEstimator()
    assert lengths.num_tokens(content) == round(100 + num * TOKENS_PER_UNIT[kind])
    lengths.counted(content, 700)
    assert lengths.num_tokens(content) == 700
    assert lengths.num_tokens(PromptContent(text_bytes=400, media={kind: 2 * num})) == 1300
    assert lengths.num_tokens(TEXT) == 1000
    assert not lengths.is_known


def test_images_of_several_sizes_make_a_mean() -> None:
    lengths = LengthEstimator()
    for in_image in (300, 500):
        lengths.counted(IMAGE, 100 + in_image)
    assert lengths.tokens_per_unit(Media.IMAGE) == pytest.approx(400, rel=0.02)


def test_what_cannot_be_told_apart_teaches_nothing() -> None:
    lengths = LengthEstimator()
    lengths.counted(PromptContent(text_bytes=400, media={Media.IMAGE: 1, Media.AUDIO: 1}), 900)
    lengths.counted(PromptContent(num_ids=50), 50)
    lengths.counted(PromptContent(text_bytes=0), 50)
    lengths.counted(TEXT, 0)
    lengths.counted(IMAGE, 90)
    assert not lengths.is_known
    assert lengths.tokens_per_unit(Media.IMAGE) == TOKENS_PER_UNIT[Media.IMAGE]


def test_ids_count_as_they_are() -> None:
    lengths = LengthEstimator()
    lengths.counted(TEXT, 4000)
    assert lengths.num_tokens(PromptContent(text_bytes=10, num_ids=50)) == 60
