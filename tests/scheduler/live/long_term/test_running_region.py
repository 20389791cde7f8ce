"""The region that is planned with: what counts, what is a mean, and what is missing."""

import msgspec
import pytest
from live_plan_cases import (
    FAST,
    KV_FIXED_BYTES,
    KV_TOKEN_BYTES,
    SLOTS,
    SLOW,
    STEP_S,
    LiveRegion,
    cluster,
    instance,
    near,
    numbered,
    teach,
)

from netmon.estimate import LinkCondition
from netmon.region_link import LinkView
from scheduler.live.learning.knowledge import ModelKnowledge
from scheduler.live.long_term.conversion import Conversion, ConversionPhase, ConversionWish
from scheduler.live.long_term.running_region import (
    UNFILLED_BYTES_PER_S,
    Modelled,
    NotModelled,
    PeriodMeter,
    RegionFacts,
    model_region,
)
from scheduler.planning.lengths import EmpiricalLengths
from scheduler.planning.region_model import Traffic
from scheduler.reports import InstanceReport
from scheduler.routing.decision import HAND_OFF, ONE_ENGINE

TRAFFIC = Traffic(EmpiricalLengths.of([1000.0, 30_000.0]), 500.0, 20_000.0)


@pytest.fixture
def live() -> LiveRegion:
    live = LiveRegion()
    teach(live.knowledge, 40, now_s=live.now_s)
    return live


def modelled(
    live: LiveRegion,
    meter: PeriodMeter | None = None,
    conversion: Conversion | None = None,
    other_models: frozenset[str] = frozenset(),
) -> Modelled | NotModelled:
    if meter is None:
        meter = PeriodMeter()
        look(live, meter)
    facts = RegionFacts(
        model="tiny",
        pd=live.reported_pd(),
        prefill_clusters=live.reported_prefill(),
        knowledge=live.knowledge,
        means=meter.take(),
        thresholds=live.thresholds.base_tokens(),
        traffic=TRAFFIC,
        conversion=conversion,
        converting=frozenset({"near"} if conversion else ()),
        other_models=other_models,
    )
    return model_region(facts)


def look(live: LiveRegion, meter: PeriodMeter) -> None:
    meter.see([live.reported_pd(), *live.reported_prefill()], live.links())


def region_of(found: Modelled | NotModelled) -> Modelled:
    assert isinstance(found, Modelled), found
    return found


def reason_of(found: Modelled | NotModelled) -> str:
    assert isinstance(found, NotModelled)
    return found.reason


def division_of(found: Modelled | NotModelled) -> tuple[int, int]:
    current = region_of(found).current
    return current.num_prefill["near"], current.num_decode["near"]


def test_everything_that_was_learnt_is_in_it(live: LiveRegion) -> None:
    found = region_of(modelled(live))
    region, current = found.region, found.current
    (far,), (pd,), (link,) = region.prefill_clusters, region.pd_clusters, region.links
    assert (far.name, far.num_instances) == ("far", 4)
    assert float(far.prefill(20_000)) == pytest.approx(FAST.prefill_s(20_000), rel=0.02)
    assert (pd.name, pd.num_instances, pd.batch_size) == ("near", 8, SLOTS)
    assert float(pd.prefill(20_000)) == pytest.approx(SLOW.prefill_s(20_000), rel=0.02)
    assert pd.step_s == pytest.approx(STEP_S)
    assert (link.name, link.bytes_per_s, link.rtt_s) == ("far to near", 1.25e10, 0.02)
    assert region.kv.fixed_bytes == pytest.approx(KV_FIXED_BYTES, rel=0.01)
    size = KV_FIXED_BYTES + KV_TOKEN_BYTES * 1000
    assert float(region.kv.size(1000)) == pytest.approx(size, rel=0.01)
    assert region.traffic is TRAFFIC
    assert current.thresholds == {"far": 8000}
    assert division_of(found) == (4, 4)
    assert found.notes == ()


def test_instances_that_do_both_decode_and_it_is_said(live: LiveRegion) -> None:
    live.pd = cluster("near", *numbered("p", "prefill", 2), *numbered("b", "both", 2))
    found = modelled(live)
    assert division_of(found) == (2, 2)
    told = "near: b-0, b-1 have the role both, which is never converted and counts as decode"
    assert region_of(found).notes == (told,)
    live.pd = cluster("near", *numbered("b", "both", 1))
    assert "b-0 has the role both, which is never converted" in reason_of(modelled(live))


def test_each_model_has_the_instances_that_serve_it(live: LiveRegion) -> None:
    mine, others = near(2, 3).instances, near(4, 4).instances
    renamed = [msgspec.structs.replace(i, name=f"o{i.name}", model="other") for i in others]
    live.pd = cluster("near", *mine, *renamed)
    assert division_of(modelled(live, other_models=frozenset({"other"}))) == (2, 3)


def test_a_prefill_cluster_of_another_model_is_in_no_plan_of_this_one(live: LiveRegion) -> None:
    assert live.far is not None
    instances = [msgspec.structs.replace(i, model="other") for i in live.far.instances]
    live.far = cluster("far", *instances)
    found = region_of(modelled(live, other_models=frozenset({"other"})))
    assert (found.region.prefill_clusters, found.notes) == ((), ())


@pytest.mark.parametrize(("model", "told"), [("other", "other"), ("", "any other model")])
def test_a_prefill_cluster_of_several_models_cannot_be_planned(
    live: LiveRegion, model: str, told: str
) -> None:
    assert live.far is not None
    live.far = cluster("far", *live.far.instances, instance("x", "prefill", model=model))
    reason = reason_of(modelled(live, other_models=frozenset({"other"})))
    assert f"far serves tiny and {told}: it has one threshold and one link" in reason
    assert region_of(modelled(live)).region.prefill_clusters


def test_an_instance_that_names_no_model_counts_for_none_of_several(live: LiveRegion) -> None:
    live.pd = cluster("near", *near(2, 2).instances, instance("x", "decode", model=""))
    reason = reason_of(modelled(live, other_models=frozenset({"other"})))
    assert "near has instances that name no model" in reason
    assert division_of(modelled(live)) == (2, 3)


@pytest.mark.parametrize(
    "odd",
    [
        instance("odd", "prefill", healthy=False),
        instance("odd", "prefill", draining=True),
        instance("odd", "prefill", role_ready=False),
        instance("odd", "prefill", model="other"),
    ],
)
def test_instances_that_cannot_be_had_do_not_count(live: LiveRegion, odd: InstanceReport) -> None:
    live.pd = cluster("near", *near(2, 2).instances, odd)
    assert division_of(modelled(live)) == (2, 2)


@pytest.mark.parametrize("phase", ConversionPhase)
def test_an_instance_that_converts_counts_as_what_it_will_be(
    live: LiveRegion, phase: ConversionPhase
) -> None:
    live.change("d-0", draining=True)
    wish = ConversionWish("near", "decode", "prefill")
    found = modelled(live, conversion=Conversion("d-0", wish, 1, phase, 0.0))
    assert division_of(found) == (5, 3)
    assert region_of(found).current.converting == {"near"}


def test_what_lasts_for_seconds_changes_nothing(live: LiveRegion) -> None:
    meter, pd, far = PeriodMeter(), live.pd, live.far
    for rate in (1e9, 2e9, 3e9):
        live.link = LinkView(available_bytes_per_s=rate)
        look(live, meter)
    live.link = LinkView()
    live.pd, live.far = near(4, 3), None
    look(live, meter)
    live.pd, live.far = pd, far
    found = region_of(modelled(live, meter))
    assert division_of(found) == (4, 4)
    assert found.region.prefill_clusters[0].num_instances == 4
    assert found.region.links[0].bytes_per_s == pytest.approx(2e9)


def test_seconds_of_congestion_do_not_stand_for_a_period_with_little_to_carry(
    live: LiveRegion,
) -> None:
    meter = PeriodMeter()
    for rate, is_floor in ((1e9, False), (5e7, False), (2e7, True), (3e9, True)):
        live.link = LinkView(available_bytes_per_s=rate, is_floor=is_floor)
        look(live, meter)
    link = region_of(modelled(live, meter)).region.links[0]
    assert link.bytes_per_s == pytest.approx((1e9 + 5e7 + 1e9 + 3e9) / 4)


def test_a_link_is_planned_with_what_it_carried_until_something_contradicts_that(
    live: LiveRegion,
) -> None:
    meter = PeriodMeter()

    def planned(*links: LinkView) -> float:
        for live.link in links:
            look(live, meter)
        return region_of(modelled(live, meter)).region.links[0].bytes_per_s

    live.link = LinkView()
    look(live, meter)
    assert "rate of the link far to near is not known" in reason_of(modelled(live, meter))
    floor, slow = LinkView(available_bytes_per_s=1e7, is_floor=True), 5e7
    assert planned(floor) == UNFILLED_BYTES_PER_S
    assert planned(floor, LinkView(available_bytes_per_s=slow)) == slow
    down = LinkView(state=LinkCondition.DOWN, available_bytes_per_s=0.0)
    assert planned(down) == 0
    for idle in (LinkView(), floor, LinkView(state=LinkCondition.CONGESTED)):
        assert planned(idle) == slow
    assert planned(LinkView(available_bytes_per_s=6e7, is_floor=True)) == 6e7
    assert planned(LinkView(available_bytes_per_s=2e7)) == planned(LinkView()) == 2e7


def test_members_that_change_leave_the_means_of_links(live: LiveRegion) -> None:
    meter = PeriodMeter()
    for rate in (9e7, 3e7):
        live.link = LinkView(available_bytes_per_s=rate)
        live.pd = near(4, 2 + (rate == 3e7))
        meter.forget_health()
        look(live, meter)
    found = modelled(live, meter)
    assert division_of(found) == (4, 3)
    assert region_of(found).region.links[0].bytes_per_s == 6e7


def test_what_was_there_for_moments_does_not_count(live: LiveRegion) -> None:
    meter, pd = PeriodMeter(), live.pd
    live.pd = near(4, 2)
    for _ in range(3):
        look(live, meter)
    live.pd = pd
    look(live, meter)
    assert division_of(modelled(live, meter)) == (4, 2)


def test_a_prefill_cluster_that_was_away_is_left_out(live: LiveRegion) -> None:
    live.far = None
    found = region_of(modelled(live))
    assert found.region.prefill_clusters == found.region.links == ()
    assert found.current.thresholds == {}
    assert "far is left out" in found.notes[0]


def test_a_prefill_cluster_that_drains_is_left_out(live: LiveRegion) -> None:
    assert live.far is not None
    drained = tuple(msgspec.structs.replace(i, draining=True) for i in live.far.instances)
    live.far = cluster("far", *drained)
    assert region_of(modelled(live)).region.prefill_clusters == ()


def test_prefill_times_of_the_pd_cluster_may_be_those_of_whole_requests() -> None:
    live = LiveRegion()
    teach(live.knowledge, 40, now_s=live.now_s)
    known = ModelKnowledge()
    for place in ("far", ONE_ENGINE):
        for tokens in (1000, 8000, 30_000):
            known.learn(place, tokens, 0, SLOW.prefill_s(tokens))
    known.reserved(1000, 0, 10_000_000)
    known.decoded(100, 2.5, live.now_s)
    live.knowledge = known
    pd = region_of(modelled(live)).region.pd_clusters[0]
    assert float(pd.prefill(8000)) == pytest.approx(SLOW.prefill_s(8000), rel=0.05)
    assert known.profile(HAND_OFF).num_seen == 0


def test_all_that_is_missing_is_said_at_once() -> None:
    live = LiveRegion()
    live.link = LinkView()
    live.knowledge.learn("far", 1000, 0, 0.5)
    reason = reason_of(modelled(live))
    for said in (
        "prefill times of near are not known (0 of 3 prefills seen)",
        "prefill times of far are not known (1 of 3 prefills seen)",
        "the time of a decode step in near is not known",
        "the rate of the link far to near is not known",
        "the size of a prompt's KVCache is not known",
    ):
        assert said in reason


@pytest.mark.parametrize(
    "instances",
    [numbered("b", "both", 3), numbered("p", "prefill", 3), numbered("d", "decode", 3)],
)
def test_without_one_of_each_role_there_is_nothing_to_divide(
    live: LiveRegion, instances: tuple[InstanceReport, ...]
) -> None:
    live.pd = cluster("near", *instances)
    assert "nothing to divide" in reason_of(modelled(live))


def test_decode_slots_and_reports_are_needed(live: LiveRegion) -> None:
    live.pd = cluster(
        "near", *(msgspec.structs.replace(i, decode_slots=0) for i in near(2, 2).instances)
    )
    assert "decodes at a time is not known" in reason_of(modelled(live))
    live.pd = None
    assert "near has sent no report" in reason_of(modelled(live))


def test_a_link_that_was_down_is_a_link_without_a_rate(live: LiveRegion) -> None:
    live.link = LinkView(available_bytes_per_s=0.0)
    assert region_of(modelled(live)).region.links[0].bytes_per_s == 0.0
