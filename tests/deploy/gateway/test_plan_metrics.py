"""Wanted instances as autoscalers get them."""

from __future__ import annotations

from msgspec import structs
from prometheus_client import CollectorRegistry
from report_cases import cluster, instance

from deploy.gateway.scheduling.plan_metrics import PlanMetrics
from deploy.gateway.scheduling.plan_overview import PlanDecision
from scheduler.live.long_term.model_plan import PlanGoal
from scheduler.reports import ClusterReport


class Rig:
    def __init__(self, *reports: ClusterReport | None, models: tuple[str, ...] = ("m",)) -> None:
        self.reports = list(reports)
        self.leads = True
        self.registry = CollectorRegistry()
        self.metrics = PlanMetrics(self.registry, models)
        self.metrics.watch(lambda: self.leads, lambda: self.reports)

    def wanted(self) -> dict[tuple[str, str, str], float]:
        return {
            (s.labels["cluster"], s.labels["role"], s.labels["model_name"]): s.value
            for family in self.registry.collect()
            for s in family.samples
            if s.name == "prfaas_plan_wanted_instances"
        }

    def decide(self, pd: str, prefill: dict[str, float], decode: dict[str, float]) -> None:
        goal = PlanGoal(
            num_prefill={pd: 1},
            num_decode={pd: 1},
            thresholds={},
            max_rps=1.0,
            bottlenecks=[],
            needed_prefill=prefill,
            needed_decode=decode,
        )
        self.metrics.decided(decision(pd, goal))


def decision(pd: str, goal: PlanGoal | None) -> PlanDecision:
    return PlanDecision(model="m", at_s=0.0, age_s=0.0, reason="x", done=[], goal=goal, pd=pd)


FAR = cluster("far", instance("f0", "prefill"), instance("f1", "prefill"))
HOME = cluster("home", instance("p0", "prefill"), instance("d0", "decode"))
NOW = {("far", "prefill", "m"): 2, ("home", "prefill", "m"): 1, ("home", "decode", "m"): 1}


def test_without_a_plan_what_there_is_is_wanted_also_in_an_outage() -> None:
    rig = Rig(FAR, HOME)
    assert rig.wanted() == NOW
    sick = structs.replace(FAR.instances[0], healthy=False)
    rig.reports = [cluster("far", sick, FAR.instances[1]), HOME]
    assert rig.wanted() == NOW
    # A front that does not answer says nothing of its instances.
    rig.reports = [cluster("far", heard=False), None]
    assert rig.wanted() == NOW


def test_instances_that_leave_are_not_wanted_back() -> None:
    rig = Rig(cluster("far", FAR.instances[0], structs.replace(FAR.instances[1], leaving=True)))
    assert rig.wanted() == {("far", "prefill", "m"): 1}


def test_parts_of_a_shared_prefill_cluster_add_up_before_rounding() -> None:
    rig = Rig(FAR, HOME)
    rig.decide("home", {"far": 1.2, "home": 0.0}, {"home": 3.5})
    rig.decide("south", {"far": 1.3, "south": 0.4}, {"south": 2.0})
    assert rig.wanted() == {
        ("far", "prefill", "m"): 3,
        ("home", "prefill", "m"): 1,
        ("home", "decode", "m"): 4,
        ("south", "prefill", "m"): 1,
        ("south", "decode", "m"): 2,
    }


def test_a_plan_that_is_gone_leaves_what_there_is() -> None:
    rig = Rig(FAR, HOME)
    rig.decide("home", {"far": 7.0}, {"home": 9.0})
    assert rig.wanted()["far", "prefill", "m"] == 7
    rig.metrics.decided(decision("home", None))
    assert rig.wanted() == NOW


def test_an_instance_that_does_both_is_wanted_as_one_kind() -> None:
    rig = Rig(cluster("home", instance("b0", "both")))
    rig.decide("home", {"home": 0.6}, {"home": 1.7})
    assert rig.wanted() == {("home", "both", "m"): 3}


def test_an_instance_without_a_name_serves_the_only_model() -> None:
    nameless = cluster("far", instance("f0", "prefill", model=""))
    assert Rig(nameless).wanted() == {("far", "prefill", "m"): 1}
    assert Rig(nameless, models=("m", "n")).wanted() == {("far", "prefill", ""): 1}


def test_only_the_gateway_that_leads_says_what_is_wanted() -> None:
    rig = Rig(FAR, HOME)
    rig.decide("home", {"far": 7.0}, {"home": 9.0})
    rig.metrics.show_threshold("far", "home", 8000.0)
    rig.leads = False
    assert rig.wanted() == {}
    ends = {"source": "far", "target": "home"}
    assert rig.registry.get_sample_value("prfaas_plan_threshold_tokens", ends) is None
    rig.leads = True
    assert rig.registry.get_sample_value("prfaas_plan_threshold_tokens", ends) == 8000.0
