"""The encode stage of a running region: who counts, what its times are, and why it stays."""

from __future__ import annotations

import msgspec
import pytest
from live_plan_cases import FAST, MODEL, SLOW, LiveRegion, cluster, instance, numbered, teach

from scheduler.encoding.line import EncodeLine
from scheduler.live.learning.media_window import MediaDemand, MediaWindow, MediaWindowState
from scheduler.live.long_term.conversion import Conversion, ConversionPhase, ConversionWish
from scheduler.live.long_term.encode_facts import encode_stage, has_stage, num_encoding
from scheduler.live.long_term.encode_step import EncodeStage
from scheduler.live.long_term.running_region import (
    Modelled,
    PeriodMeter,
    RegionFacts,
    model_region,
)
from scheduler.planning.lengths import EmpiricalLengths
from scheduler.planning.region_model import Traffic
from scheduler.reports import (
    ClusterReport,
    EncodeInstanceReport,
    EncodeReport,
    InstanceReport,
    Role,
)
from scheduler.routing.decision import HAND_OFF

MEDIA = MediaDemand(mean_tokens=100.0, relative_error=0.01, typical_tokens=1000.0)
ALL: tuple[Role, ...] = ("encode", "prefill", "decode")
OWN = EncodeLine(0.0, 2e-3)


def able(name: str, role: Role, **fields: object) -> InstanceReport:
    return instance(name, role, **({"roles": ALL, "encodes": role == "encode"} | fields))


def with_stage(*encoders: EncodeInstanceReport) -> ClusterReport:
    """One of two instances that encode can change; so can all others."""
    report = cluster(
        "near",
        able("e-0", "encode"),
        able("e-1", "encode", roles=("encode",)),
        *(able(f"p-{number}", "prefill") for number in range(3)),
        *(able(f"d-{number}", "decode") for number in range(2)),
    )
    return msgspec.structs.replace(report, encode=EncodeReport(instances=encoders))


def encoder(name: str, token_s: float, **fields: object) -> EncodeInstanceReport:
    line = EncodeLine(0.2, token_s)
    report = EncodeInstanceReport(name=name, model=MODEL, budget_tokens=4000, line=line)
    return msgspec.structs.replace(report, **fields)


def stage_of(report: ClusterReport, conversion: Conversion | None = None) -> EncodeStage | str:
    names = {item.name for item in report.instances}
    return encode_stage(report, MODEL, names, MEDIA, OWN, conversion)


def test_its_instances_count_by_their_role_and_what_they_can_become() -> None:
    found = stage_of(with_stage(encoder("e-0", 1e-3)))
    assert isinstance(found, EncodeStage)
    assert (found.num_encode, found.num_leaving) == (2, 1)
    assert dict(found.num_able) == {"prefill": 3, "decode": 2}
    # A full pass spreads its fixed part over 4,000 tokens.
    assert found.stage_s == pytest.approx(100 * (0.2 + 4.0) / 4000)
    assert found.own_s == pytest.approx(100 * 2e-3)
    assert found.relative_error == 0.01


def test_the_times_are_those_of_the_instance_in_the_middle() -> None:
    encoders = (encoder("a", 1e-3), encoder("b", 2e-3), encoder("c", 9.0))
    found = stage_of(with_stage(*encoders, encoder("other", 5e-4, model="other")))
    assert isinstance(found, EncodeStage)
    assert found.stage_s == pytest.approx(100 * (0.2 + 8.0) / 4000)
    # Until a pass was seen, those of an instance that prefills stand for them.
    unknown = stage_of(with_stage(encoder("a", 1e-3, line=None)))
    assert isinstance(unknown, EncodeStage)
    assert unknown.stage_s == unknown.own_s


def test_a_conversion_counts_as_done() -> None:
    wish = ConversionWish("near", "prefill", "encode", MODEL)
    running = Conversion("p-1", wish, 1, ConversionPhase.DRAINING, 0.0)
    report = with_stage(encoder("e-0", 1e-3))
    found = stage_of(report, running)
    assert isinstance(found, EncodeStage)
    assert (found.num_encode, found.num_leaving) == (3, 2)
    names = {item.name for item in report.instances}
    assert num_encoding(report, MODEL, names, running) == 3
    assert num_encoding(report, MODEL, names - {"e-0"}, None) == 1


def test_a_stage_stays_where_no_step_is_known() -> None:
    report = with_stage(encoder("e-0", 1e-3, line=None))
    names = {item.name for item in report.instances}
    found = encode_stage(report, MODEL, names, MEDIA, None, None)
    assert found == "how long encoding takes is not known: nothing was encoded lately"
    fixed = cluster("near", able("e-0", "encode", roles=("encode",)), *numbered("d", "decode", 3))
    assert stage_of(fixed) == "no instance of it can change its role"
    beside = cluster("near", able("d-0", "decode", encodes=True), *numbered("p", "prefill", 2))
    assert stage_of(beside) == "d-0 encode beside other work"


def test_a_cluster_has_a_stage_if_an_instance_encodes_or_could() -> None:
    assert not has_stage(None, MODEL)
    assert not has_stage(cluster("near", *numbered("d", "decode", 2)), MODEL)
    assert has_stage(cluster("near", able("d", "decode")), MODEL)
    assert has_stage(cluster("near", able("d", "decode", roles=(), encodes=True)), MODEL)
    assert not has_stage(cluster("near", able("d", "decode")), "other")


def modelled(live: LiveRegion, media: MediaDemand | None) -> Modelled:
    meter = PeriodMeter()
    meter.see([live.reported_pd(), *live.reported_prefill()], live.links())
    facts = RegionFacts(
        model=MODEL,
        pd=live.reported_pd(),
        prefill_clusters=live.reported_prefill(),
        knowledge=live.knowledge,
        means=meter.take(),
        thresholds=live.thresholds.base_tokens(),
        traffic=Traffic(EmpiricalLengths.of([1000.0, 30_000.0]), 500.0, 20_000.0),
        media=media,
    )
    found = model_region(facts)
    assert isinstance(found, Modelled), found
    return found


@pytest.fixture
def live() -> LiveRegion:
    live = LiveRegion()
    teach(live.knowledge, 40, now_s=live.now_s)
    for place, token_s in ((HAND_OFF, 2e-3), ("far", 1e-3)):
        for num_tokens in (500, 1000, 2000):
            live.knowledge.media.encoded(place, num_tokens, num_tokens * token_s)
    return live


def test_prefills_take_longer_where_no_instance_encodes_for_them(live: LiveRegion) -> None:
    text, found = modelled(live, None), modelled(live, MEDIA)
    for one, other, added_s in (
        (text.region.pd_clusters[0], found.region.pd_clusters[0], 0.2),
        (text.region.prefill_clusters[0], found.region.prefill_clusters[0], 0.1),
    ):
        added = float(other.prefill(9000) - one.prefill(9000))
        assert added == pytest.approx(added_s, rel=0.01)
    assert found.encode is None
    assert float(text.region.pd_clusters[0].prefill(9000)) == pytest.approx(
        SLOW.prefill_s(9000), rel=0.02
    )
    assert FAST.prefill_s(9000) < SLOW.prefill_s(9000)


def test_a_stage_takes_its_work_out_of_prefills(live: LiveRegion) -> None:
    live.pd = with_stage(encoder("e-0", 1e-3))
    text, found = modelled(live, None), modelled(live, MEDIA)
    assert text.encode is None
    assert found.encode is not None
    assert found.encode.num_encode == 2
    one, other = text.region.pd_clusters[0], found.region.pd_clusters[0]
    assert float(other.prefill(9000)) == float(one.prefill(9000))
    assert (one.num_instances, other.num_instances) == (5, 5)


def test_a_stage_that_stays_is_noted(live: LiveRegion) -> None:
    live.pd = cluster(
        "near",
        able("e-0", "encode", roles=("encode",)),
        *numbered("p", "prefill", 2),
        *numbered("d", "decode", 2),
    )
    found = modelled(live, MEDIA)
    assert found.encode is None
    assert found.notes == ("the encode stage of near stays: no instance of it can change its role",)


def test_media_are_counted_over_the_window_of_the_prompts() -> None:
    window = MediaWindow()
    assert window.since(0.0, 10) is None
    for at_s in (0.0, 1000.0, 1010.0):
        window.add(300, at_s)
    window.add(600, 1020.0)
    found = window.since(900.0, 10)
    assert found is not None
    assert found.mean_tokens == 120
    assert found.typical_tokens == pytest.approx((300**2 * 2 + 600**2) / 1200)
    assert found.relative_error == pytest.approx((300**2 * 2 + 600**2) ** 0.5 / 1200)
    assert found.seconds(None) == 0
    everything = window.since(0.0, 10)
    assert everything is not None
    assert everything.mean_tokens == 150
    assert window.since(5000.0, 10) is None
    kept = msgspec.msgpack.encode(window.state(1030.0))
    again = MediaWindow()
    again.restore(msgspec.msgpack.decode(kept, type=MediaWindowState), 30.0)
    assert again.since(-100.0, 10) == found
