"""Requests stay at home or spill to another PD cluster, as events tell the live scheduler."""

import math
from typing import Any

import pytest

from netmon.region_link import LinkView
from scheduler.live.core import LiveScheduler
from scheduler.live.events import (
    AdmitAsked,
    LinkHeard,
    ReportHeard,
    RouteAsked,
    RouteEarly,
    ThresholdPlanned,
    ThresholdsAsked,
)
from scheduler.live.feedback import DirectTook, LegBegun, Prefilled
from scheduler.live.ledger import DirectPrompt
from scheduler.live.settings import LiveSettings, PdSettings
from scheduler.routing.decision import PdCached, RequestShape
from scheduler.routing.short_term import RouteDecision
from scheduler.routing.spill import PdReason, Spill
from tests.support.live_region_cases import MODEL, instance, job, report

NOW_S = 100.0


class Sites:
    """Two PD clusters, `a` and `b`, and a prefill cluster with links to both."""

    def __init__(self, spill: Spill = "overflow", **settings: Any) -> None:
        links = ("far",)
        pds = (PdSettings("a", links, spill), PdSettings("b", links, spill), PdSettings("c"))
        self.live = LiveScheduler(
            LiveSettings(
                pd_clusters=pds, threshold_tokens=1000.0, hand_off_tokens=10**6, **settings
            )
        )
        self.report("a", decode("a0"))
        self.report("b", decode("b0"))
        self.report("far", instance("p0"), max_queued=100)
        for pd, rate, rtt_s in (("a", 1e9, 0.01), ("b", 1e8, 0.05)):
            view = LinkView(available_bytes_per_s=rate, rtt_s=rtt_s)
            self.live.take(LinkHeard("far", pd, view), NOW_S)
        known = self.live.knowledge(MODEL)
        for place in ("far", "one_engine", "one_engine in b", "one_engine in c"):
            for number in range(1, 9):
                known.learn(place, number * 500, 0, number * 500 * 1e-3)
        for num_tokens in (500, 1000, 2000):
            known.reserved(num_tokens, 0, num_tokens * 512)

    def report(self, name: str, *instances: Any, **fields: Any) -> None:
        self.live.take(ReportHeard(name, report(name, *instances, **fields), NOW_S), NOW_S)

    def route(self, num_tokens: int = 500, home: str = "a", **fields: Any) -> RouteDecision:
        shape = RequestShape(num_prompt_tokens=num_tokens, **fields)
        return self.live.take(RouteAsked(MODEL, shape, home=home), NOW_S)

    def early(self, num_tokens: int = 500, home: str = "a", **fields: Any) -> RouteDecision | None:
        shape = RequestShape(
            num_prompt_tokens=num_tokens, is_exact=False, bound_tokens=num_tokens, **fields
        )
        return self.live.take(RouteEarly(MODEL, shape, home=home), NOW_S)


def decode(name: str, **fields: Any) -> Any:
    return instance(name, "both", **({"decode_slots": 4} | fields))


@pytest.mark.parametrize("home", ["a", "b"])
def test_a_request_decodes_at_its_home(home: str) -> None:
    decision = Sites().route(home=home)
    assert (decision.pd, decision.pd_reason, decision.target) == (home, "home", "one_engine")


def test_the_first_pd_cluster_is_meant_where_none_is_named() -> None:
    assert Sites().route(home="").pd == "a"


def test_each_pair_of_clusters_has_its_own_threshold_and_link() -> None:
    sites = Sites()
    sites.live.take(ThresholdPlanned("far", 4000.0, 0.0, "b"), NOW_S)
    assert sites.route(3000, "a").target == "far"
    decision = sites.route(3000, "b")
    assert (decision.target, decision.reason) == ("one_engine", "below_threshold")
    found = sites.live.take(ThresholdsAsked(), NOW_S)
    assert [(item.pd, item.cluster, item.base_tokens) for item in found] == [
        ("a", "far", 1000.0),
        ("b", "far", 4000.0),
    ]


def test_a_pd_cluster_without_a_link_prefills_itself() -> None:
    sites = Sites()
    sites.report("c", decode("c0"))
    decision = sites.route(3000, "c")
    assert (decision.pd, decision.reason) == ("c", "no_prefill_cluster")


@pytest.mark.parametrize("instances", [(), (decode("a0", model="other"),)])
def test_a_home_without_an_instance_for_the_model_spills(instances: tuple[Any, ...]) -> None:
    sites = Sites()
    sites.report("a", *instances)
    decision = sites.route()
    assert (decision.pd, decision.pd_reason) == ("b", PdReason.HOME_UNABLE)
    assert decision.numbers["home_ttft_s"] == math.inf
    early = sites.early()
    assert early is not None
    assert (early.pd, early.pd_reason) == ("b", PdReason.HOME_UNABLE)


def test_never_keeps_a_request_at_a_home_that_cannot_serve_it() -> None:
    sites = Sites("never")
    sites.report("a")
    assert (sites.route().pd, sites.route().pd_reason) == ("a", "home")


def test_a_home_that_would_refuse_spills() -> None:
    sites = Sites()
    sites.report("a", decode("a0", running=4))
    decision = sites.route()
    assert (decision.pd, decision.pd_reason) == ("b", PdReason.HOME_REFUSES)
    for pd, admitted in (("a", False), ("b", True)):
        asked = AdmitAsked(1, "", MODEL, 500, decision.predicted, pd=pd)
        assert sites.live.take(asked, NOW_S).verdict.admitted == admitted


def test_a_request_stays_where_every_cluster_would_refuse_it() -> None:
    sites = Sites()
    for name in "ab":
        sites.report(name, decode(f"{name}0", running=4))
    assert sites.route().pd == "a"


def test_a_queue_at_home_makes_others_sooner() -> None:
    sites = Sites(refuses_load=False)
    sites.report("c", decode("c0"))
    sites.live.ledger.direct_begun(DirectPrompt("c0", 20_000, 20_000, NOW_S))
    decision = sites.route(home="c")
    assert (decision.pd, decision.pd_reason) == ("a", PdReason.SOONER)
    assert decision.numbers["home_ttft_s"] > 15


def test_one_whole_request_spills_like_others() -> None:
    sites = Sites()
    sites.report("a")
    decision = sites.route(num_choices=0)
    assert (decision.route, decision.pd) == ("direct", "b")


def test_a_pd_cluster_that_failed_the_request_is_passed_over() -> None:
    sites = Sites()
    shape = RequestShape(num_prompt_tokens=500)
    asked = RouteAsked(MODEL, shape, 0, frozenset({"a"}), "a")
    assert sites.live.take(asked, NOW_S).pd == "b"
    asked = RouteAsked(MODEL, shape, 0, frozenset({"a", "b"}), "a")
    assert sites.live.take(asked, NOW_S).pd == "a"


def test_a_prompt_that_may_move_from_the_other_cluster_is_counted_first() -> None:
    sites = Sites()
    sites.live.take(ThresholdPlanned("far", 9000.0, 0.0, "a"), NOW_S)
    sites.report("a")
    assert sites.early(3000) is None
    assert sites.early(900) is not None


def test_each_pd_cluster_counts_what_it_has_cached() -> None:
    sites = Sites(refuses_load=False)
    cached = {"b": PdCached(local_tokens=900, landing_tokens=900)}
    fields: dict[str, Any] = {"local_cached_tokens": 300, "cached_in_pds": cached}
    assert sites.route(950, **fields).numbers["local_uncached_tokens"] == 650
    sites.report("a")
    assert sites.route(950, **fields).numbers["local_uncached_tokens"] == 50


def test_what_goes_to_one_pd_cluster_is_no_load_of_another() -> None:
    sites = Sites()
    leg = LegBegun("t", MODEL, "far", 2000, 2000, 0, 10**6, 5.0, 0, "b0", "b")
    sites.live.take(leg, NOW_S)
    landing = {pd: sites.live.decode_side(MODEL, NOW_S, pd).landing_s for pd in "ab"}
    assert landing == {"a": (), "b": (5.0,)}
    # The prefill cluster has this work ahead, whoever asks.
    for pd in "ab":
        (far,) = sites.live.snapshot(MODEL, NOW_S, pd=pd).prefill_clusters
        assert sum(far.ahead_s) == pytest.approx(2.0, rel=0.1)


def test_a_report_of_a_prefill_cluster_counts_for_all_homes() -> None:
    sites = Sites()
    jobs = tuple(job(str(number), 10_000, pd="b") for number in range(5))
    sites.report("far", instance("p0"), max_queued=100, jobs=jobs)
    for pd in "ab":
        (far,) = sites.live.snapshot(MODEL, NOW_S, pd=pd).prefill_clusters
        assert sum(far.ahead_s) == pytest.approx(50.0, rel=0.1)


def test_pd_clusters_learn_apart() -> None:
    sites = Sites()
    known = sites.live.knowledge(MODEL)
    before = known.profile("one_engine").num_seen
    shape = RequestShape(num_prompt_tokens=100)
    sites.live.take(DirectTook(MODEL, shape, 9.0, "b"), NOW_S)
    sites.live.take(Prefilled(MODEL, "hand_off", "b1", 100, 0, 0.0, 9.0, "b"), NOW_S)
    assert known.profile("one_engine").num_seen == before
    assert known.profile("hand_off in b").num_seen == 1
    sites.live.take(Prefilled(MODEL, "far", "p0", 100, 0, 0.0, 9.0, "b"), NOW_S)
    assert known.profile("far").num_seen == before + 1


def test_round_trips_are_those_of_links() -> None:
    sites = Sites()
    nearest = sites.live.distances.nearest(sites.live, "a", NOW_S)
    assert list(nearest) == ["c", "b"]
    assert nearest == {"c": 0, "b": pytest.approx(0.06)}
    later_s = NOW_S + 60
    sites.live.take(LinkHeard("a", "b", LinkView(rtt_s=0.03)), later_s)
    assert sites.live.distances.nearest(sites.live, "a", later_s)["b"] == 0.03


def test_names_of_pd_clusters_differ() -> None:
    for pds in ((), (PdSettings("a"), PdSettings("a"))):
        with pytest.raises(ValueError, match="names must differ"):
            LiveSettings(pd_clusters=pds, threshold_tokens=1.0, hand_off_tokens=1)
    with pytest.raises(KeyError):
        Sites().route(home="nowhere")
