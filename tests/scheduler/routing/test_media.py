"""What the media of a prompt cost at a place: by the encode stage, by the instance, over a link."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from scheduling_cases import (
    CONFIG,
    IDLE_DECODE,
    clusters,
    decode_views,
    far,
    links,
    near,
    prompt,
    region,
    seconds,
    untimed,
)

from netmon.estimate import LinkCondition
from netmon.region_link import LinkView
from scheduler.encoding.line import EncodeLine
from scheduler.reports import EncodeInstanceReport, EncodeReport
from scheduler.routing.candidates import local_candidate, remote_candidate
from scheduler.routing.decision import Reason
from scheduler.routing.media import MediaShape, MediaTask, MediaView, arrival_s, media_delay_s
from scheduler.routing.prediction import Prediction, PrefillTask, predict
from scheduler.routing.short_term import route
from scheduler.routing.views import ClusterView, DecodeView

LINE = EncodeLine(0.1, 1e-3)
PICTURES = MediaShape(((10, 1000), (2000, 500)), nbytes=400_000)


def stage(*busy_s: float, waiting_tokens: int = 0, line: EncodeLine | None = LINE) -> EncodeReport:
    instances = tuple(
        EncodeInstanceReport(name=f"e{number}", budget_tokens=4000, busy_s=each_s, line=line)
        for number, each_s in enumerate(busy_s)
    )
    return EncodeReport(waiting_tokens=waiting_tokens, instances=instances)


def test_only_media_without_embeddings_beyond_the_cached_part_are_encoded() -> None:
    assert PICTURES.num_tokens == 1500
    assert PICTURES.to_encode("pd", 0) == 1500
    # The first one ends at 1,010; one that is partly cached is encoded whole.
    assert PICTURES.to_encode("pd", 1009) == 1500
    assert PICTURES.to_encode("pd", 1010) == 500
    assert PICTURES.to_encode("pd", 2500) == 0
    known = replace(PICTURES, embedded={"pd": frozenset({1})})
    assert known.task("pd", 0) == MediaTask(1000, 400_000)
    assert known.to_encode("far", 0) == 1500


def test_an_instance_that_prefills_begins_to_encode_when_its_turn_has_come() -> None:
    task, view = MediaTask(1000), MediaView(line=LINE)
    assert media_delay_s(task, view, 0.0) == media_delay_s(task, view, 9.0) == pytest.approx(1.1)
    assert media_delay_s(task, MediaView(), 0.0) == 0  # nobody has measured it
    assert media_delay_s(MediaTask(0), view, 0.0) == 0


def test_a_stage_encodes_while_the_prompt_waits() -> None:
    task = MediaTask(1000)
    idle = MediaView(stage=stage(0.0), line=LINE)
    assert media_delay_s(task, idle, 0.0) == pytest.approx(1.1)
    assert media_delay_s(task, idle, 1.0) == pytest.approx(0.1)
    assert media_delay_s(task, idle, 5.0) == 0
    busy = MediaView(stage=stage(0.5), line=LINE)
    assert media_delay_s(task, busy, 1.0) == pytest.approx(0.6)


def test_a_stage_that_is_too_busy_leaves_it_to_the_instance_that_prefills() -> None:
    task = MediaTask(1000)
    full = MediaView(stage=stage(60.0, waiting_tokens=9000), line=LINE)
    assert media_delay_s(task, full, 0.0) == pytest.approx(1.1)
    # Where nobody knows how long that one takes, the stage's times stand for it.
    assert media_delay_s(task, replace(full, line=None), 0.0) == pytest.approx(1.1)
    # No instance is usable, or none has told its times.
    for none in (stage(), stage(0.0, line=None)):
        assert media_delay_s(task, MediaView(stage=none, line=LINE), 0.0) == pytest.approx(1.1)


def test_media_come_over_the_link_first() -> None:
    link = LinkView(available_bytes_per_s=1e6, rtt_s=0.2)
    task = MediaTask(0, 500_000)
    assert arrival_s(link, 500_000) == pytest.approx(0.6)
    assert media_delay_s(task, MediaView(link=link), 0.0) == pytest.approx(0.6)
    assert media_delay_s(task, MediaView(link=link), 0.5) == pytest.approx(0.1)
    # The stage begins when they are there.
    at_stage = MediaView(link=link, stage=stage(0.0))
    assert media_delay_s(MediaTask(1000, 500_000), at_stage, 0.0) == pytest.approx(0.6 + 1.1)
    assert arrival_s(LinkView(rtt_s=0.2), 1e9) == pytest.approx(0.1)  # nobody has measured it
    floor = LinkView(available_bytes_per_s=10.0, is_floor=True)
    assert arrival_s(floor, 1e9) == 0
    assert arrival_s(replace(floor, state=LinkCondition.CONGESTED), 100) == pytest.approx(10)
    assert arrival_s(LinkView(available_bytes_per_s=0.0), 1) == math.inf


def test_a_place_that_media_cannot_reach_is_infinitely_late() -> None:
    dead = MediaView(link=LinkView(available_bytes_per_s=0.0))
    task = PrefillTask(3000, media=MediaTask(1000, 400_000))
    found = predict(task, far(media=dead), IDLE_DECODE)
    assert found.ttft_s == found.landed_s == math.inf


def test_encoding_is_a_part_before_the_prefill() -> None:
    task = PrefillTask(3000, media=MediaTask(1000))
    text = predict(task, near(), IDLE_DECODE)  # no media in the view: as for text
    found = predict(task, near(media=MediaView(line=LINE)), IDLE_DECODE)
    assert found.encode_s == pytest.approx(1.1)
    assert found.ttft_s == pytest.approx(text.ttft_s + 1.1)
    assert found.landed_s == pytest.approx(text.landed_s + 1.1)
    assert found.prefill_end_s == pytest.approx(text.prefill_end_s + 1.1)
    assert sum(found.parts().values()) == pytest.approx(found.ttft_s)
    assert "encode_s" not in text.parts()


def test_a_prompt_with_images_goes_where_its_first_token_is_least() -> None:
    """Above the threshold, but the home has the embeddings and the prefill cluster is slow."""
    slow = MediaView(line=EncodeLine(0.0, 0.02))
    pictures = MediaShape(((10, 1000), (2000, 500)), embedded={"pd": frozenset({0, 1})})
    here = near(media=slow)
    seen = region(far(media=slow), local=here)
    text = prompt(12_000)
    assert route(text, seen, CONFIG, 0.0).route == "prefill_cluster"
    found = route(replace(text, media=pictures), seen, CONFIG, 0.0)
    assert found.reason is Reason.LOCAL_SOONER
    assert found.local is not None
    assert found.remote is not None
    assert (found.local.encode_s, found.remote.encode_s) == (0, pytest.approx(30.0))


def test_a_moved_prefix_saves_the_encoding_of_its_media() -> None:
    view = MediaView(line=EncodeLine(0.0, 0.02))
    seen = region(far(media=view), local=near(media=view))
    request = prompt(12_000, media=PICTURES, prefill_cached_tokens={"far": 11_000})
    found = local_candidate(request, seen, CONFIG)
    assert found.move.pays
    assert found.prediction.encode_s == 0
    there = remote_candidate(request, seen.prefill_clusters[0], seen, CONFIG)
    assert there.prediction.encode_s == 0


shapes = st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 2000)), min_size=1, max_size=4)
lines = st.builds(EncodeLine, st.floats(0, 5), st.floats(0, 0.1))
stages = st.builds(
    lambda busy, waiting, line: stage(*busy, waiting_tokens=waiting, line=line),
    st.lists(seconds, max_size=3),
    st.integers(0, 50_000),
    st.none() | lines,
)
views = st.builds(
    MediaView, stage=st.none() | stages, line=st.none() | lines, link=st.none() | links
)


@untimed
@given(clusters("x", is_far=True), decode_views(), views, st.integers(0, 6000))
def test_text_is_predicted_as_if_there_were_no_media(
    cluster: ClusterView, decode: DecodeView, view: MediaView, num_tokens: int
) -> None:
    task = PrefillTask(num_tokens, token_bytes=1e6)
    before = predict(task, cluster, decode)
    assert predict(task, replace(cluster, media=view), decode) == before
    assert before.encode_s == 0


@untimed
@given(shapes, st.integers(0, 8000), st.integers(0, 8000))
def test_more_cache_never_leaves_more_to_encode(
    spans: list[tuple[int, int]], one: int, other: int
) -> None:
    media = MediaShape(tuple(spans))
    fewer, more = sorted((one, other))
    assert media.num_tokens >= media.to_encode("x", fewer) >= media.to_encode("x", more) >= 0


@untimed
@given(views, st.integers(0, 5000), st.integers(0, 5000), seconds, st.floats(0, 1e7))
def test_more_media_never_make_a_place_sooner(
    view: MediaView, one: int, other: int, begin_s: float, nbytes: float
) -> None:
    fewer, more = sorted((one, other))
    less_s = media_delay_s(MediaTask(fewer, int(nbytes)), view, begin_s)
    # A stage that is too late for more media leaves them to an instance that was measured as
    # faster. Then it is not the number of media that makes it sooner.
    if view.stage is None:
        assert media_delay_s(MediaTask(more, int(nbytes)), view, begin_s) >= less_s
    assert less_s >= 0


def test_a_prediction_that_was_written_before_there_were_media_is_read() -> None:
    written = msgspec.msgpack.encode(Prediction(1.0, 2.0, 3.0)[:-1])
    assert msgspec.msgpack.decode(written, type=Prediction) == Prediction(1.0, 2.0, 3.0)
