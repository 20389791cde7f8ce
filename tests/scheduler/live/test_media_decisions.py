"""What a running scheduler knows of media: reports of the stage, links, and what was learnt."""

from __future__ import annotations

import pytest
from live_region_cases import FAST_LINK, MODEL, Region, instance, report, snapshot, teach
from msgspec.structs import replace

from deploy.gateway.scheduling.scheduler import RegionScheduler
from netmon.region_link import LinkView
from scheduler.encoding.line import EncodeLine
from scheduler.live.feedback import DirectTook, FirstToken, Prefilled
from scheduler.live.media_travel import MediaTravel, media_travel
from scheduler.live.snapshots import PendingRequest
from scheduler.reports import (
    ClusterReport,
    EncodeInstanceReport,
    EncodeReport,
    takes_text_only,
)
from scheduler.routing.decision import ONE_ENGINE, RequestShape
from scheduler.routing.media import MediaShape
from scheduler.routing.prediction import Prediction
from scheduler.routing.short_term import RouteDecision

TEXT = RequestShape(num_prompt_tokens=2000)
PICTURE = replace(TEXT, media=MediaShape(((100, 1000),), nbytes=10_000_000))
STAGE = EncodeReport(
    instances=(EncodeInstanceReport(name="e0", budget_tokens=4000, line=EncodeLine(0.0, 1e-4)),)
)


def taught(region: Region) -> RegionScheduler:
    scheduler = region.scheduler()
    for place in ("far", ONE_ENGINE):
        teach(scheduler, place, 1e-3)
    return scheduler


def teach_encoding(scheduler: RegionScheduler, place: str, token_s: float) -> None:
    for tokens in (100, 200, 400):
        took = Prefilled(
            MODEL, place, "p0", 1000, 0, 0.1, 1.0 + token_s * tokens, encoded_tokens=tokens
        )
        scheduler.tell(took)


def route(scheduler: RegionScheduler, shape: RequestShape) -> RouteDecision:
    """The route of a prompt that does not count as work ahead of the next one."""
    scheduler.links()  # hear of what has changed
    return scheduler.live.route(MODEL, PendingRequest(shape), scheduler.clock())


def test_a_view_has_the_stage_the_times_and_the_way_of_media() -> None:
    region = Region()
    region.far = report("far", instance("p0"), max_queued=8, encode=STAGE)
    scheduler = taught(region)
    teach_encoding(scheduler, ONE_ENGINE, 2e-3)
    assert snapshot(scheduler, request=PendingRequest(TEXT)).prefill_clusters[0].media is None
    seen = snapshot(scheduler, request=PendingRequest(PICTURE))
    (far,) = seen.prefill_clusters
    assert far.media is not None
    assert (far.media.model, far.media.stage, far.media.link) == (MODEL, STAGE, FAST_LINK)
    assert seen.engines is not None
    assert seen.engines.media is not None
    assert (seen.engines.media.stage, seen.engines.media.link) == (None, None)
    assert seen.engines.media.line is not None
    assert seen.engines.media.line.token_s == pytest.approx(2e-3, rel=0.05)


def test_the_link_of_the_kvcache_stands_for_one_that_was_not_measured() -> None:
    region = Region()
    region.links["home", "far"] = LinkView()
    region.links["far", "home"] = replace(FAST_LINK, backlog_bytes=1e9)
    seen = snapshot(taught(region), request=PendingRequest(PICTURE))
    media = seen.prefill_clusters[0].media
    assert media is not None
    # What waits to come back from there is not in the way.
    assert media.link == FAST_LINK


def test_a_route_compares_what_encoding_takes_at_each_side() -> None:
    region = Region()
    region.far = report("far", instance("p0"), max_queued=8, encode=STAGE)
    scheduler = taught(region)
    before = route(scheduler, TEXT)
    teach_encoding(scheduler, ONE_ENGINE, 2e-3)
    assert route(scheduler, TEXT) == before
    found = route(scheduler, PICTURE)
    assert found.local is not None
    assert found.remote is not None
    assert found.local.encode_s == pytest.approx(2.0, rel=0.05)
    # 10 MB at 1 GB/s, half a round trip, and 1,000 tokens at the stage.
    assert found.remote.encode_s == pytest.approx(0.01 + 0.01 + 0.1, rel=0.01)
    assert found.target == "far"
    at_home = replace(PICTURE.media, embedded={"home": frozenset({0})})  # type: ignore[type-var]
    found = route(scheduler, replace(PICTURE, media=at_home))
    assert found.local is not None
    assert found.local.encode_s == 0


def test_media_have_a_service_model_of_their_own() -> None:
    scheduler = taught(Region())
    before = route(scheduler, TEXT)
    predicted = Prediction(prefill_s=1.0)
    for _ in range(30):
        scheduler.tell(FirstToken(MODEL, "far", predicted, 2.0, has_media=True))
    found = route(scheduler, PICTURE)
    assert found.remote is not None
    assert found.remote.overhead_s + found.remote.contention_s > 0.5
    assert route(scheduler, TEXT) == before


def test_one_engine_teaches_how_long_it_encodes() -> None:
    scheduler = taught(Region())
    before = scheduler.knowledge(MODEL).prefill(ONE_ENGINE)
    for _ in range(4):
        scheduler.tell(DirectTook(MODEL, PICTURE, 5.0, "home", 1000))
    known = scheduler.knowledge(MODEL)
    assert known.prefill(ONE_ENGINE) is before
    line = known.media.line(ONE_ENGINE)
    assert line is not None
    assert line.seconds(1000) == pytest.approx(3.0, rel=0.02)


def test_media_go_to_no_cluster_whose_engines_have_no_encoder() -> None:
    region = Region()
    region.far = report("far", instance("p0", text_only=True), max_queued=8)
    scheduler = taught(region)
    (far,) = snapshot(scheduler, request=PendingRequest(PICTURE)).prefill_clusters
    assert not far.is_healthy
    (far,) = snapshot(scheduler, request=PendingRequest(TEXT)).prefill_clusters
    assert far.is_healthy
    region.far = report("far", instance("p0", text_only=True), instance("p1"), max_queued=8)
    (far,) = snapshot(taught(region), request=PendingRequest(PICTURE)).prefill_clusters
    assert far.is_healthy


def test_a_model_takes_text_only_if_all_its_instances_say_so() -> None:
    def found(*reports: ClusterReport | None) -> bool:
        return takes_text_only(reports, MODEL)

    text = instance("d0", "decode", text_only=True)
    eye = instance("e0", "encode")
    other = instance("d1", "decode", model="other")
    assert found(report("home", text, eye, other))
    assert not found(report("home", text), report("north", instance("d2", "decode")))
    # Nobody may be refused by what is not known.
    assert not found(report("home", text), None)
    assert not found(report("home"))
    assert not found(report("home", eye))


def travelling(region: Region, shape: RequestShape = PICTURE) -> MediaTravel | None:
    scheduler = taught(region)
    teach_encoding(scheduler, "far", 1e-3)
    scheduler.links()  # hear of what has changed
    return media_travel(scheduler.live, MODEL, shape, "far", "home")


def test_pixels_travel_unless_embeddings_would_be_sooner() -> None:
    region = Region()
    sized = replace(STAGE, token_bytes=8192.0)
    region.home = report("home", instance("d0", "both", decode_slots=4), encode=sized)
    found = travelling(region)
    assert found is not None
    assert (found.pixel_bytes, found.embedding_bytes) == (10_000_000, 8_192_000)
    # There: 10 MB at 1 GB/s, and 1,000 tokens of 1 ms. Here: those of the stage, and 8.2 MB.
    assert found.pixels_s == pytest.approx(0.01 + 1.0, rel=0.05)
    assert found.embedding_s == pytest.approx(0.1 + 0.0082, rel=0.05)
    assert (found.what, found.reason) == ("embedding", "sooner")
    slow = replace(FAST_LINK, available_bytes_per_s=1e6)
    region.links = {("far", "home"): slow, ("home", "far"): LinkView()}
    small = replace(PICTURE, media=MediaShape(((100, 1000),), nbytes=200_000))
    found = travelling(region, small)
    assert found is not None
    assert (found.what, found.reason) == ("pixels", "fewer_bytes")
    assert found.pixels_s < found.embedding_s


def test_nothing_is_compared_where_a_number_is_missing() -> None:
    region = Region()
    assert travelling(region) is None  # nobody knows how large embeddings are
    sized = replace(STAGE, token_bytes=8192.0)
    region.home = report("home", instance("d0", "both", decode_slots=4), encode=sized)
    assert travelling(region, TEXT) is None
    cached = replace(PICTURE, prefill_cached_tokens={"far": 1500})
    assert travelling(region, cached) is None  # nothing has to be encoded there
    scheduler = taught(region)
    assert media_travel(scheduler.live, MODEL, PICTURE, ONE_ENGINE, "home") is None
    region.links = {("far", "home"): LinkView(), ("home", "far"): LinkView()}
    assert travelling(region) is None
