"""Prompts with media teach how long encoding takes, and nothing about text."""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduling_cases import untimed

from scheduler.live.learning.knowledge import KnowledgeState, ModelKnowledge
from scheduler.live.learning.media_knowledge import MIN_ENCODED
from scheduler.live.learning.place_services import SERVICE_KEPT_S
from scheduler.routing.prediction import Prediction
from scheduler.routing.service import ALONE

S_PER_TOKEN = 1e-3


def taught(places: tuple[str, ...] = ("far",)) -> ModelKnowledge:
    known = ModelKnowledge()
    for place in places:
        for number in range(1, 9):
            known.prefilled(place, 500 * number, 0, 500 * number * S_PER_TOKEN, 0.0)
    return known


def encode(known: ModelKnowledge, place: str, media_tokens: int, seconds: float) -> None:
    """A prompt of 1,000 tokens, during whose prefill media were encoded for so long."""
    known.prefilled(place, 1000, 0, 1.0 + seconds, 1.0, encoded_tokens=media_tokens)


def test_encoding_is_what_a_prefill_takes_beyond_text() -> None:
    known = taught()
    assert known.media.line("far") is None
    for tokens in (100, 200, 400, 800):
        encode(known, "far", tokens, 0.1 + tokens * 2e-3)
    line = known.media.line("far")
    assert line is not None
    assert line.fixed_s == pytest.approx(0.1, abs=0.01)
    assert line.token_s == pytest.approx(2e-3, rel=0.05)


def test_a_stall_teaches_little() -> None:
    known = taught()
    for number in range(12):
        encode(known, "far", 100 * (number + 1), 0.2 * (number + 1))
    before = known.media.line("far")
    encode(known, "far", 600, 60.0)
    after = known.media.line("far")
    assert before is not None
    assert after is not None
    assert after.seconds(600) == pytest.approx(before.seconds(600), rel=0.1)


def test_a_place_borrows_until_it_has_encoded_enough() -> None:
    known = taught(("far", "near"))
    for _ in range(MIN_ENCODED + 1):
        encode(known, "far", 1000, 1.0)
    line = known.media.line("near")
    assert line is not None
    assert line.seconds(1000) == pytest.approx(1.0, rel=0.02)
    for _ in range(MIN_ENCODED):
        encode(known, "near", 1000, 4.0)
    line = known.media.line("near")
    assert line is not None
    assert line.seconds(1000) == pytest.approx(4.0, rel=0.02)


def test_nothing_encoded_and_impossible_times_teach_nothing() -> None:
    known = taught()
    encode(known, "far", 0, 5.0)
    known.media.encoded("far", 100, math.nan)
    assert known.media.line("far") is None
    encode(known, "far", 100, -0.5)  # sooner than text was predicted to be
    line = known.media.line("far")
    assert line is not None
    assert line.seconds(1000) == 0


def test_the_first_prompts_of_all_teach_more_than_a_guess() -> None:
    known = ModelKnowledge()
    for _ in range(4):
        known.prefilled("far", 1000, 0, 0.5, 0.0, encoded_tokens=800)
    assert known.prefill("far").prefill_s(1000) == pytest.approx(0.5, rel=0.1)


def test_how_a_place_serves_media_is_believed_for_a_while() -> None:
    known = taught()
    for number in range(30):
        known.answered("far", Prediction(prefill_s=1.0), 1.5, float(number), has_media=True)
    assert known.service("far", 29.0) == ALONE
    found = known.media.service("far", 29.0)
    assert found is not None
    assert found.overhead_s + (found.prefill - 1) == pytest.approx(0.5, rel=0.1)
    assert known.media.service("far", 30.0 + SERVICE_KEPT_S) is None
    assert known.media.places == ["far"]


def test_a_state_comes_back_as_it_was() -> None:
    known = taught()
    for tokens in (100, 200, 400):
        encode(known, "far", tokens, tokens * 1e-3)
    for number in range(9):
        known.answered("far", Prediction(prefill_s=1.0), 1.5, float(number), has_media=True)
    kept = msgspec.msgpack.encode(known.state(10.0))
    found = ModelKnowledge.restored(msgspec.msgpack.decode(kept, type=KnowledgeState), 110.0)
    assert found.media.line("far") == known.media.line("far")
    assert found.media.service("far", 111.0) == known.media.service("far", 11.0)


class Taught(NamedTuple):
    """A prefill and the first token after it; `encoded` is None for text."""

    num_tokens: int
    seconds: float
    ttft_s: float
    encoded: int | None


events = st.builds(
    Taught,
    st.integers(1, 5000),
    st.floats(0.001, 50),
    st.floats(0.001, 50),
    st.none() | st.integers(0, 3000),
)


@untimed
@given(st.lists(events, min_size=1, max_size=40))
def test_media_never_change_what_is_known_of_text(found: list[Taught]) -> None:
    """Bit by bit: the same text with and without prompts with media between."""
    with_media, text_only = taught(), taught()
    for number, item in enumerate(found):
        predicted = Prediction(prefill_s=item.num_tokens * S_PER_TOKEN)
        known = (with_media,) if item.encoded is not None else (with_media, text_only)
        for each in known:
            each.prefilled(
                "far", item.num_tokens, 0, item.seconds, number, encoded_tokens=item.encoded
            )
            has_media = item.encoded is not None
            each.answered("far", predicted, item.ttft_s, number, has_media=has_media)
    now_s = float(len(found))
    for place in ("far", "other"):
        assert with_media.prefill(place) == text_only.prefill(place)
        assert with_media.service(place, now_s) == text_only.service(place, now_s)
