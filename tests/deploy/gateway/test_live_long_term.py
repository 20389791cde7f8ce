"""The long-term loop's shell in fake time: what it does with decisions, and what it says."""

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from eventually import eventually
from live_plan_cases import MODEL, LiveRegion, cluster, instance, near, numbered, teach
from prometheus_client import CollectorRegistry

from deploy.gateway.scheduling.config import LongTermSection
from deploy.gateway.scheduling.long_term import NUM_DECISIONS, LongTermService
from deploy.gateway.scheduling.plan_metrics import PlanMetrics
from deploy.gateway.scheduling.plan_overview import PlanDecision, PlanOverview
from netmon.region_link import LinkView
from scheduler.encoding.line import EncodeLine
from scheduler.live.feedback import AnswerDecoded
from scheduler.live.long_term.conversion import ConversionOutcome, ConversionWish
from scheduler.reports import EncodeInstanceReport, EncodeReport


class Service(LongTermService):
    """Of one model."""

    async def decide(self) -> PlanDecision:
        (decision,) = await self.step()
        return decision


Make = Callable[..., Service]


@pytest.fixture
def live() -> LiveRegion:
    """Twice as many decoders as its traffic needs."""
    live = LiveRegion()
    teach(live.knowledge, 600, now_s=live.now_s, output_tokens=128)
    return live


class Metrics:
    """Those of the service that was made last."""

    registry: CollectorRegistry
    leads = True

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"prfaas_plan_{name}", labels)


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def make(live: LiveRegion, metrics: Metrics) -> Make:
    def service(region: LiveRegion = live, **section: object) -> Service:
        registry = metrics.registry = CollectorRegistry()
        plan_metrics = PlanMetrics(registry)
        plan_metrics.watch(
            lambda: metrics.leads, lambda: [item.report for item in region.scheduler.reports()]
        )
        checked = LongTermSection.model_validate(section)
        settings = region.scheduler.live.settings
        region.scheduler.live.settings = replace(
            settings, long_term=checked.loop(), follows_plans=checked.mode == "act"
        )
        roles: Any = {"near": region.roles}
        return Service(
            checked,
            region.scheduler,
            roles,
            plan_metrics,
            wall_clock=lambda: 1e9 + region.now_s,
        )

    return service


async def test_it_sets_t_and_converts_and_sets_t_again(
    live: LiveRegion, make: Make, metrics: Metrics
) -> None:
    service = make()
    decision = await service.decide()
    assert decision.reason == "convert"
    assert live.roles.asked == [ConversionWish("near", "decode", "prefill", MODEL)]
    assert decision.done[0] == (
        "began to convert d-0 of near from decode to prefill: it is the first"
    )
    assert decision.done[1].startswith("planned threshold of far from 8000 to ")
    meanwhile = decision.thresholds["far"]
    assert live.thresholds.base_tokens() == {"far": meanwhile}
    assert decision.goal is not None
    assert decision.goal.num_prefill["near"] > 4
    assert decision.goal.num_prefill["near"] + decision.goal.num_decode["near"] == 8
    live.roles.end()
    assert live.thresholds.base_tokens() == {"far": decision.thresholds_after["far"]}
    assert decision.thresholds_after["far"] > meanwhile  # more of them prefill at home now
    assert (
        metrics.value("threshold_tokens", source="far", target="near")
        == decision.thresholds_after["far"]
    )
    wanted = decision.goal.num_prefill["near"]
    assert metrics.value("instances", model_name=MODEL, cluster="near", role="prefill") == wanted
    assert metrics.value("steps_total", model_name=MODEL, reason="convert") == 1
    assert metrics.value("gain_ratio", model_name=MODEL, cluster="near") == pytest.approx(
        decision.numbers["gain"]
    )


async def test_a_quiet_night_gives_no_decode_instance_away(make: Make) -> None:
    live = LiveRegion(pd=near(3, 5))
    teach(live.knowledge, 600, now_s=live.now_s)
    by_day = (await make(live).decide()).goal
    # Small batches have short steps; those of full ones were seen by day.
    for running, step_s in ((20, 0.025), (2, 0.012)):
        live.pd = cluster(
            "near", *[msgspec.structs.replace(i, running=running) for i in near(3, 5).instances]
        )
        live.scheduler.links()  # hear the report
        for _ in range(200):
            live.scheduler.tell(AnswerDecoded(MODEL, 1025, 1024 * step_s, "near/d-0"))
    assert live.knowledge.step_s == pytest.approx(0.012, rel=0.01)
    by_night = (await make(live).decide()).goal
    assert by_day is not None
    assert by_night is not None
    assert by_night.num_prefill == by_day.num_prefill
    assert by_night.max_rps == pytest.approx(by_day.max_rps, rel=0.02)


async def test_nothing_is_converted_for_a_rate_that_nobody_asks_for(
    live: LiveRegion, make: Make
) -> None:
    busy, live.pd = live.pd, near(4, 4)
    for number in range(4):
        live.change(f"p-{number}", running=0)
    decision = await make().decide()
    assert (decision.reason, live.roles.asked) == ("not_busy", [])
    assert "time to spare" in decision.done[0] or decision.done[0].startswith("planned threshold")
    live.pd = busy
    assert (await make().decide()).reason == "convert"


async def test_wanted_instances_follow_the_load_and_not_what_there_is(
    live: LiveRegion, make: Make, metrics: Metrics
) -> None:
    service = make()

    def wanted() -> dict[str, float | None]:
        places = (("far", "prefill"), ("near", "prefill"), ("near", "decode"))
        return {
            f"{cluster} {role}": metrics.value(
                "wanted_instances", cluster=cluster, role=role, model_name=MODEL
            )
            for cluster, role in places
        }

    before = wanted()
    assert before["near prefill"] == 4
    assert before["near decode"] == 4
    decision = await service.decide()
    assert decision.goal is not None
    after = wanted()
    assert after["near decode"] == max(1, math.ceil(decision.goal.needed_decode["near"]))
    assert after["far prefill"] == max(1, math.ceil(decision.goal.needed_prefill["far"]))
    # Its traffic needs fewer decoders than there are, which the best division cannot say.
    assert sum(decision.goal.num_decode.values()) + sum(decision.goal.num_prefill.values()) == 8
    metrics.leads = False
    assert wanted() == dict.fromkeys(before)


async def test_it_goes_on_until_the_best_division_and_then_rests(
    live: LiveRegion, make: Make
) -> None:
    service = make()
    reasons = []
    for _ in range(8):
        decision = await service.decide()
        reasons.append(decision.reason)
        if live.roles.current:
            live.roles.end()
            live.roles.dwelt()
        live.now_s += 300.0
        teach(live.knowledge, 600, now_s=live.now_s, output_tokens=128, seed=len(reasons))
    assert reasons[0] == "convert"
    assert reasons[-1] in ("best_already", "small_gain")
    found = service.overview()
    assert found.decisions[0].goal is not None
    assert found.models[0].num_prefill == found.decisions[0].goal.num_prefill
    assert found.models[0].num_decode["near"] >= 1
    assert (await service.decide()).done[0].startswith("did nothing because ")


async def test_the_model_is_that_of_the_time_when_the_conversion_is_done(
    live: LiveRegion, make: Make
) -> None:
    service = make()
    await service.decide()
    live.now_s += 300.0
    decision = await service.decide()
    assert decision.reason in ("converting", "best_already", "small_gain")
    assert live.roles.asked == [ConversionWish("near", "decode", "prefill", MODEL)]
    found = service.overview()
    (plan,) = found.models
    assert (plan.num_prefill, plan.num_decode) == ({"near": 5}, {"near": 3})
    assert found.conversion == "d-0 of near from decode to prefill: draining"


async def test_a_conversion_that_fails_leaves_t_as_it_is(live: LiveRegion, make: Make) -> None:
    service = make()
    decision = await service.decide()
    live.roles.end(ConversionOutcome.TOO_SLOW)
    assert live.thresholds.base_tokens() == {"far": decision.thresholds["far"]}


async def test_a_conversion_that_failed_is_not_tried_again_soon(
    live: LiveRegion, make: Make
) -> None:
    service = make()
    await service.decide()
    live.now_s += 600.0
    live.roles.end(ConversionOutcome.TOO_SLOW)
    live.now_s += 1700.0
    decision = await service.decide()
    assert (decision.reason, len(live.roles.asked)) == ("dwelling", 1)
    live.now_s += 100.0
    assert (await service.decide()).reason == "convert"


async def test_a_conversion_that_is_refused_is_said_and_t_is_that_of_the_present_division(
    live: LiveRegion, make: Make
) -> None:
    live.roles.refusal = "near has 1 usable decode instances; one must stay"
    decision = await make().decide()
    assert decision.done[0] == (
        f"did not convert an instance of near from decode to prefill: {live.roles.refusal}"
    )
    assert decision.done[1].startswith("planned threshold of far from 8000 to ")
    assert live.thresholds.base_tokens() == {"far": decision.thresholds["far"]}


async def test_t_for_fewer_prefill_instances_is_not_set_when_all_of_them_stay(
    live: LiveRegion, make: Make
) -> None:
    live.pd = near(6, 2)
    teach(live.knowledge, 600, now_s=live.now_s, output_tokens=8192)
    live.roles.refusal = "busy"
    decision = await make().decide()
    assert live.roles.asked == [ConversionWish("near", "prefill", "decode", MODEL)]
    assert decision.done == ["did not convert an instance of near from prefill to decode: busy"]
    assert live.thresholds.base_tokens() == {"far": 8000}


async def test_advice_changes_nothing(live: LiveRegion, make: Make) -> None:
    decision = await make(mode="advise").decide()
    assert decision.done[0] == "advice: convert an instance of near from decode to prefill"
    assert decision.done[1].startswith("advice: planned threshold of far from 8000 to ")
    assert live.roles.asked == []
    assert live.thresholds.base_tokens() == {"far": 8000}


async def test_advice_is_given_at_every_step(live: LiveRegion, make: Make) -> None:
    """Nothing was converted, so there is nothing that the next advice has to wait for."""
    service = make(mode="advise")
    decisions = [await service.decide() for _ in range(2)]
    assert [decision.reason for decision in decisions] == ["convert", "convert"]


async def test_the_router_is_told_what_the_plan_sends(live: LiveRegion, make: Make) -> None:
    live.link = LinkView(available_bytes_per_s=1e8)
    await make().decide()
    clear = live.thresholds.update("far", LinkView(available_bytes_per_s=1e8), live.now_s).tokens
    assert clear == pytest.approx(live.thresholds.base_tokens()["far"], rel=0.02)
    scarce = live.thresholds.update("far", LinkView(available_bytes_per_s=1e7), live.now_s).tokens
    assert scarce > 2 * clear


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({"min_requests": 5000}, "600 requests were measured; 5000 are needed"),
        ({"min_gain": 20.0}, "%, which is too little"),
    ],
)
async def test_it_says_why_it_did_nothing(
    make: Make, live: LiveRegion, section: dict[str, object], told: str
) -> None:
    service = make(**section)
    await service.decide()  # t alone may change
    (done,) = (await service.decide()).done
    assert done.startswith("did nothing because ")
    assert told in done
    assert live.roles.asked == []


async def test_a_conversion_that_runs_or_was_not_long_ago_is_why(
    make: Make, live: LiveRegion
) -> None:
    live.pd = near(2, 6)
    service = make()
    assert (await service.decide()).reason == "convert"
    meanwhile = live.thresholds.base_tokens()
    later = await service.decide()
    assert later.done[0].startswith("once d-0 has its new role: planned threshold of far from ")
    assert live.thresholds.base_tokens() == meanwhile
    live.roles.end()
    assert live.thresholds.base_tokens() == later.thresholds
    assert (await service.decide()).done == ["did nothing because a conversion runs already"]
    live.roles.dwelt()
    decision = await service.decide()
    assert decision.done == [
        "did nothing because the last conversion, or an attempt at one, was not long ago"
    ]


async def test_what_is_not_known_is_said(live: LiveRegion, make: Make) -> None:
    live.link = LinkView()
    service = make()
    decision = await service.decide()
    assert decision.reason == "not_known"
    assert "the rate of the link far to near is not known" in decision.done[0]
    (found,) = service.overview().models
    assert found.region is None
    assert found.unknown in decision.done[0]
    assert found.traffic is not None


async def test_instances_with_the_role_both_are_named_wherever_a_plan_is_shown(
    live: LiveRegion, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    live.pd = cluster("near", *near(4, 3).instances, instance("b", "both"))
    service = make()
    decision = await service.decide()
    note = "near: near/b has the role both, which is never converted and counts as decode"
    assert decision.notes == [note]
    region = service.overview().models[0].region
    assert region is not None
    assert region.notes == [note]
    await service.decide()
    assert caplog.text.count(note) == 1  # not at every step
    assert live.roles.asked == [ConversionWish("near", "decode", "prefill", MODEL)]
    live.pd = cluster("near", *numbered("b", "both", 2))
    decision = await service.decide()
    assert "b-0, near/b-1 have the role both, which is never converted" in decision.done[0]
    unknown = service.overview().models[0].unknown
    assert decision.done == [f"did nothing because {unknown}"]


def two_models() -> LiveRegion:
    """One with too many that decode and a prefill cluster of its own, and one without."""
    live = LiveRegion(models=(MODEL, "other"))
    others = [
        msgspec.structs.replace(item, name=f"o-{item.name}", model="other")
        for item in near(3, 5).instances
    ]
    assert live.pd is not None
    live.pd = cluster("near", *live.pd.instances, *others)
    teach(live.knowledge, 600, now_s=live.now_s, output_tokens=128)
    teach(live.scheduler.knowledge("other"), 600, now_s=live.now_s, output_tokens=128)
    return live


async def test_several_models_are_planned_apart_and_converted_one_by_one(make: Make) -> None:
    live = two_models()
    service = make(live)
    first, second = await service.step()
    assert {first.model, second.model} == {MODEL, "other"}
    assert first.numbers["gain"] >= second.numbers["gain"]
    assert [wish.model for wish in live.roles.asked] == [first.model, second.model]
    assert first.done[0].startswith("began to convert ")
    assert second.done[0].startswith("did not convert an instance of near")
    plans = {item.model: item for item in (first, second)}
    assert plans[MODEL].thresholds.keys() == {"far"}
    assert plans["other"].thresholds == {}  # no prefill cluster serves it
    counts = {plan.model: plan.num_decode["near"] for plan in service.overview().models}
    assert counts == {MODEL: 4 - (first.model == MODEL), "other": 5 - (first.model == "other")}
    live.roles.end()
    live.roles.dwelt()
    live.now_s += 300.0
    assert {item.reason for item in await service.step()} == {"convert"}


async def test_a_prefill_cluster_of_two_models_is_in_no_plan(make: Make) -> None:
    live = two_models()
    assert live.far is not None
    live.far = cluster("far", *live.far.instances, instance("x", "prefill", model="other"))
    service = make(live)
    for decision in await service.step():
        assert decision.reason == "not_known"
        assert "far serves " in decision.done[0]
        assert "which cannot be divided between plans" in decision.done[0]
    assert live.thresholds.base_tokens() == {"far": 8000}


async def test_a_region_without_traffic(make: Make) -> None:
    service = make(LiveRegion())
    found = service.overview()
    assert (found.thresholds, found.decisions, found.next_step_s) == ({"far": 8000}, [], None)
    (plan,) = found.models
    assert (plan.num_prefill, plan.num_decode) == ({"near": 4}, {"near": 4})
    assert "no request has ended yet" in (await service.decide()).done[0]


async def test_the_overview_is_json_and_keeps_the_last_decisions(
    live: LiveRegion, make: Make
) -> None:
    service = make(mode="advise")
    await service.decide()
    live.pd = None
    live.now_s += 10.0
    for _ in range(NUM_DECISIONS):
        live.now_s += 1.0
        await service.decide()
    live.now_s += 5.0
    found = msgspec.json.decode(msgspec.json.encode(service.overview()), type=PlanOverview)
    assert len(found.decisions) == NUM_DECISIONS
    assert [found.decisions[i].age_s for i in (0, 1)] == pytest.approx([5.0, 6.0])
    assert {item.reason for item in found.decisions} == {"not_known"}


async def test_the_region_is_shown_as_it_is_planned_with(live: LiveRegion, make: Make) -> None:
    service = make(mode="advise")
    await service.decide()
    region = service.overview().models[0].region
    assert region is not None
    far, pd = region.clusters
    assert (far.name, far.num_instances, far.decode_slots, far.num_seen) == ("far", 4, 0, 30)
    assert (pd.name, pd.num_instances, pd.decode_slots) == ("near", 8, 20)
    assert far.error == pytest.approx(0.0, abs=0.02)
    assert region.links[0].bytes_per_s == 1.25e10


async def test_it_runs_by_itself_and_an_error_does_not_end_it(live: LiveRegion, make: Make) -> None:
    def clock() -> float:
        live.now_s += 0.005
        return live.now_s

    live.clock = clock  # type: ignore[method-assign]
    service = make(mode="advise", period_s=0.01)

    async def decided(reason: str) -> None:
        def reasons() -> list[str]:
            return [item.reason for item in service.overview().decisions[:1]]

        await eventually(reasons, lambda last: last == [reason])

    service.start()
    await decided("convert")
    live.error = RuntimeError("no links")
    await decided("error")
    assert "no links" in service.overview().decisions[0].done[0]
    live.error = None
    await decided("convert")
    await service.close()
    await service.close()


async def test_looks_that_fail_leave_the_decisions_alone(
    live: LiveRegion, make: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.gateway.scheduling.long_term.LOOK_S", 0.001)
    service = make(mode="advise")
    num_looks = 0

    def links() -> object:
        nonlocal num_looks
        num_looks += 1
        if num_looks in (3, 4, 5, 9):
            raise RuntimeError("no links")
        return {}

    live.links = links  # type: ignore[method-assign,assignment]
    decision = await service.decide()
    service = make(mode="advise")
    service._remember(decision)
    service.start()
    await eventually(lambda: num_looks >= 12)
    await service.close()
    assert [item.reason for item in service.overview().decisions] == [decision.reason]
    assert caplog.text.count("reports and links could not be looked at") == 2  # once a failure


async def test_off_means_off(make: Make) -> None:
    service = make(mode="off")
    service.start()
    assert service.overview().next_step_s is None
    await service.close()


async def test_an_instance_goes_to_the_encode_stage_when_media_ask_for_it(
    live: LiveRegion, make: Make, metrics: Metrics
) -> None:
    roles = ("encode", "prefill", "decode")
    report = near(4, 4)
    able = [msgspec.structs.replace(item, roles=roles) for item in report.instances]
    able.append(instance("e-0", "encode", roles=roles, encodes=True))
    line = EncodeReport(
        instances=(
            EncodeInstanceReport(name="e-0", budget_tokens=8000, line=EncodeLine(0.1, 1e-3)),
        )
    )
    live.pd = msgspec.structs.replace(report, instances=tuple(able), encode=line)
    service = make()
    assert (await service.decide()).reason == "convert"
    assert live.roles.asked[-1].to_role == "prefill"  # text alone: as without a stage
    live.roles.refusal = ""
    live.roles.current = None
    live.pd = msgspec.structs.replace(report, instances=tuple(able), encode=line)
    for second in range(300):
        live.knowledge.traffic.arrived(4000, 0, live.now_s - 300.0 + second, 3000)
    live.now_s += 3600.0
    for second in range(900):
        live.knowledge.traffic.arrived(4000, 0, live.now_s - 300.0 + second / 3, 3000)
        live.knowledge.traffic.finished(128, live.now_s - 300.0 + second / 3)
    decision = await service.decide()
    assert decision.reason == "convert"
    (wish,) = live.roles.asked[1:]
    assert wish.to_role == "encode"
    assert decision.conversions == [f"near: {wish.from_role} to encode"]
    assert decision.goal is not None
    assert decision.goal.num_encode["near"] > 1
    assert (
        metrics.value("instances", model_name=MODEL, cluster="near", role="encode")
        == (decision.goal.num_encode["near"])
    )
    (model,) = service.overview().models
    assert model.traffic is not None
    assert model.traffic.media_tokens_per_s > 0
    assert model.encode is not None
    assert model.num_encode == {"near": 2}  # it counts as converted
    live.roles.end()
    assert live.pd is not None
    assert sum(item.role == "encode" for item in live.pd.instances) == 2
