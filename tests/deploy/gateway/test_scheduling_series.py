"""What operators see of scheduling: series at a scrape, and GET /prfaas/scheduling."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from live_region_cases import MODEL, Region, teach
from prometheus_client import CollectorRegistry

from deploy.gateway.metrics import GatewayMetrics
from deploy.gateway.scheduling.collector import SchedulingCollector
from deploy.gateway.scheduling.overview import scheduling_overview
from netmon.estimate import LinkCondition
from netmon.region_link import LinkNow, LinkView
from scheduler.routing.decision import RequestShape
from scheduler.routing.prediction import Prediction

WAN = LinkNow(
    source="far",
    target="home",
    condition="rising",
    available_bytes_per_s=5e6,
    rtt_s=0.02,
    backlog_bytes=7,
    age_s=0.5,
)
UNUSED = LinkNow(source="home", target="far")


def series(region: Region, links: list[LinkNow] | None = None, scheduler: Any = None) -> Any:
    """Looks a sample up by its name without the prefix."""
    registry = CollectorRegistry()
    found = None if links is None else lambda: links
    registry.register(SchedulingCollector(scheduler or region.scheduler(), found))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value("prfaas_gateway_" + name, labels)

    return value


def test_thresholds_are_as_of_the_scrape() -> None:
    region = Region()
    value = series(region)
    assert value("threshold_tokens", source="far", target="home") == 1000
    region.links["far", "home"] = LinkView(state=LinkCondition.CONGESTED)
    assert value("threshold_tokens", source="far", target="home") == 1500
    assert value("threshold_base_tokens", source="far", target="home") == 1000


def test_what_is_learnt_is_shown_once_there_is_something() -> None:
    region = Region()
    scheduler = region.scheduler()
    value = series(region, scheduler=scheduler)
    labels = {"model_name": MODEL, "place": "far"}
    assert value("learned_prefills", **labels) is None
    teach(scheduler, "far", 1e-3)
    assert value("learned_prefills", **labels) == 8
    assert value("ttft_prediction_median_error_ratio", **labels) is None
    for _ in range(3):
        scheduler.knowledge(MODEL).answered("far", Prediction(prefill_s=1.0), 1.25, region.now_s)
    assert value("ttft_prediction_median_error_ratio", **labels) == pytest.approx(0.2)
    service = scheduler.knowledge(MODEL).service("far", region.now_s)
    assert service.overhead_s > 0
    assert value("ttft_overhead_seconds", **labels) == service.overhead_s
    assert value("ttft_decode_seconds", **labels) == service.decode_s
    assert value("ttft_busy_seconds", **labels) == service.busy_s


def test_links_are_shown_with_what_is_known_of_them() -> None:
    value = series(Region(), [WAN, UNUSED])
    ends = {"source": "far", "target": "home"}
    assert value("link_available_bytes_per_second", **ends) == 5e6
    assert value("link_rtt_seconds", **ends) == 0.02
    assert value("link_backlog_bytes", **ends) == 7
    assert value("link_age_seconds", **ends) == 0.5
    conditions = {c: value("link_condition", condition=c, **ends) for c in LinkCondition}
    assert conditions == {"clear": 0, "rising": 1, "congested": 0, "down": 0}
    back = {"source": "home", "target": "far"}
    for name in ("available_bytes_per_second", "rtt_seconds", "age_seconds"):
        assert value("link_" + name, **back) is None
    assert value("link_condition", condition="clear", **back) == 1


def test_a_gateway_that_follows_no_links_has_no_series_of_any() -> None:
    assert series(Region())("link_backlog_bytes", source="far", target="home") is None


def test_errors_of_predictions_are_counted_by_route() -> None:
    metrics = GatewayMetrics()
    metrics.predicted("m", "local", 1.2, 1.0)
    metrics.predicted("m", "local", 1.0, 0.0)
    metrics.predicted("m", "local", float("inf"), 1.0)
    name, labels = (
        "prfaas_gateway_ttft_prediction_error_ratio",
        {"model_name": "m", "route": "local"},
    )
    assert metrics.registry.get_sample_value(name + "_count", labels) == 1
    assert metrics.registry.get_sample_value(name + "_sum", labels) == pytest.approx(0.2)


def test_the_overview_says_what_routes_rest_on() -> None:
    region = Region()
    scheduler = region.scheduler()
    teach(scheduler, "far", 1e-3)
    known = scheduler.knowledge(MODEL)
    for _ in range(3):
        known.answered("far", Prediction(prefill_s=1.0), 1.25, region.now_s)
    known.traffic.arrived(1000, 250, region.now_s)
    known.decoded(11, 2.0, region.now_s)
    scheduler.route(MODEL, RequestShape(num_prompt_tokens=4000))
    found = json.loads(msgspec.json.encode(scheduling_overview(scheduler)))
    (model,) = found["models"]
    far = next(place for place in model["places"] if place["place"] == "far")
    assert (far["num_seen"], far["is_known"]) == (8, True)
    assert far["starts"] == [0.0]
    assert far["coefficients"][0][1] == pytest.approx(1e-3, rel=0.01)
    assert far["service"] == list(known.service("far", region.now_s))
    assert (far["calibrated"], far["ttft_error"]) == (False, pytest.approx(0.2))
    assert model["kv"]["token_bytes"] == pytest.approx(512)
    assert (model["decode_s"], model["step_s"]) == (2.0, pytest.approx(0.2))
    assert model["traffic"]["hit_ratio"] == 0.25
    assert model["traffic"]["output_tokens"] == pytest.approx(11)
    assert [item["cluster"] for item in found["thresholds"]] == ["far"]
    ends = [(item["source"], item["target"]) for item in found["links"]]
    assert ends == [("far", "home"), ("home", "far")]
    assert found["links"][0]["view"]["available_bytes_per_s"] == 1e9


def test_nothing_learnt_is_nothing_shown() -> None:
    found = scheduling_overview(Region().scheduler())
    assert found.models == []
