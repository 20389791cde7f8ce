"""Series that the gateway counts itself: histograms, tenants and adapters of any number."""

from __future__ import annotations

import importlib.util
import random
import runpy
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from deploy.gateway.metrics import GatewayMetrics
from deploy.gateway.proxy.stream import TokenPace
from deploy.gateway.series.histograms import (
    INTER_TOKEN_LATENCY_S,
    REQUEST_LATENCY_S,
    REQUEST_TOKENS,
    TIME_TO_FIRST_TOKEN_S,
    Histograms,
    Observations,
)
from deploy.gateway.series.tenants import UNNAMED, TenantSeries
from deploy.gateway.series.top_names import MAX_NAMES, OTHER, PERIOD_S, TopCounts, TopNames
from deploy.gateway.serving.records import RequestRecord

NUM_TENANTS = 10_000


def test_buckets_are_those_of_the_installed_vllm() -> None:
    # Its file alone, since importing vLLM takes seconds.
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations
    vllm = runpy.run_path(str(Path(spec.submodule_search_locations[0]) / "v1/metrics/buckets.py"))
    assert vllm["TIME_TO_FIRST_TOKEN_BUCKETS"] == TIME_TO_FIRST_TOKEN_S
    assert vllm["INTER_TOKEN_LATENCY_BUCKETS"] == INTER_TOKEN_LATENCY_S
    assert vllm["REQUEST_LATENCY_BUCKETS"] == REQUEST_LATENCY_S
    assert tuple(vllm["build_1_2_5_buckets"](10**6)) == REQUEST_TOKENS


def test_a_value_on_a_bound_counts_below_it() -> None:
    registry = CollectorRegistry()
    family = Histograms(registry, "x_seconds", "Text.", ["route"], (0.5, 1.0))
    for value in (0.5, 0.75, 1.0, 7.0):
        family.of("local").observe(value)
    found = {
        bound: registry.get_sample_value("x_seconds_bucket", {"route": "local", "le": bound})
        for bound in ("0.5", "1.0", "+Inf")
    }
    assert found == {"0.5": 1, "1.0": 3, "+Inf": 4}
    assert registry.get_sample_value("x_seconds_count", {"route": "local"}) == 4
    assert registry.get_sample_value("x_seconds_sum", {"route": "local"}) == 9.25


@pytest.mark.parametrize(("kind", "sums"), [("completion", [1.0, 3.0]), ("chat", [0.0, 2.0])])
def test_the_first_event_of_a_chat_is_no_token(kind: str, sums: list[float]) -> None:
    times = [10.0, 11.0, 13.0] if kind == "completion" else [11.0, 13.0]
    clock = iter(times)
    intervals = Observations((5.0,))
    pace = TokenPace(intervals, kind, lambda: next(clock))  # type: ignore[arg-type]
    found = []
    for _ in range(2):
        pace.piece()
        found.append(intervals.sum)
    assert found == sums


def series_of(registry: CollectorRegistry) -> list[str]:
    return [line for line in generate_latest(registry).decode().splitlines() if "tenant=" in line]


def test_ten_thousand_tenants_have_a_bounded_number_of_series() -> None:
    now_s = 0.0
    registry = CollectorRegistry(auto_describe=False)
    tenants = TenantSeries(registry, clock=lambda: now_s)
    tenants.watch(lambda: {f"tenant-{index}": 1 for index in range(NUM_TENANTS)})
    tenants.show(["limited"])
    order = random.Random(1)
    for index in range(3 * NUM_TENANTS):
        name = f"tenant-{order.randrange(NUM_TENANTS)}" if index % 10 else "busy"
        tenants.came(name)
        tenants.ended(name, prompt_tokens=10, cached_tokens=1, generation_tokens=2)
    series_of(registry)
    now_s = PERIOD_S
    # 6 metrics of the chosen, the limited and the unnamed tenants, and of all others.
    lines = series_of(registry)
    assert len(lines) <= 6 * (MAX_NAMES + 3)
    value = registry.get_sample_value
    labels = {"tenant": "busy"}
    assert value("prfaas_gateway_tenant_in_flight_requests", labels) is not None
    assert value("prfaas_gateway_tenant_in_flight_requests", {"tenant": OTHER}) > NUM_TENANTS / 2  # type: ignore[operator]
    assert value("prfaas_gateway_tenant_requests_total", {"tenant": "limited"}) == 0
    assert value("prfaas_gateway_tenant_requests_total", {"tenant": OTHER}) > NUM_TENANTS  # type: ignore[operator]
    # What it remembers does not grow with them either.
    assert len(tenants._counts.top._uses) <= 8 * MAX_NAMES
    assert len(tenants._counts._counts) <= MAX_NAMES + 3


def test_nothing_counted_is_lost_while_names_keep_their_labels() -> None:
    counts = TopCounts(1, {UNNAMED})
    for index in range(NUM_TENANTS):
        counts.top.used(f"t{index}")
        counts.add(f"t{index}", (1,))
    shown = counts.shown(0.0)
    assert sum(num for (num,) in shown.values()) == NUM_TENANTS
    assert shown[OTHER] == [NUM_TENANTS - MAX_NAMES]


def test_a_busy_name_takes_a_label_from_an_idle_one() -> None:
    top = TopNames(max_names=2)
    top.choose(0.0)
    for name in ("first", "second", "late", "late"):
        top.used(name)
    assert "late" not in top
    top.choose(PERIOD_S - 1)
    assert "late" not in top
    # Twice as much as `second` is needed, and `first` is as good.
    top.used("late")
    top.choose(PERIOD_S)
    assert sorted(top) == ["first", "late"]
    # Nobody does anything, so nobody loses a label.
    top.choose(2 * PERIOD_S)
    assert sorted(top) == ["first", "late"]


def test_a_name_that_lost_its_label_begins_again_at_zero() -> None:
    counts = TopCounts(1)
    counts.top = TopNames(max_names=1)
    counts.top.used("old")
    counts.add("old", (5,))
    counts.shown(0.0)
    for _ in range(9):
        counts.top.used("new")
        counts.add("new", (1,))
    assert counts.shown(PERIOD_S) == {"new": [0], OTHER: [9]}
    counts.top = TopNames(max_names=1)
    counts.top.used("old")
    assert counts.shown(PERIOD_S)["old"] == [0]


def test_adapters_beyond_the_bound_share_a_series() -> None:
    metrics = GatewayMetrics()
    for index in range(1000):
        record = RequestRecord(
            request_id="r", started_s=0.0, endpoint="chat", model="m", adapter=f"a{index}"
        )
        metrics.ended(record, 1)
    text = metrics.render().decode()
    assert text.count("prfaas_gateway_adapter_requests_total{") == MAX_NAMES + 1
    assert f'{{adapter="{OTHER}",model_name="m"}} 950.0' in text


def test_tokens_are_counted_by_model_and_by_tenant() -> None:
    metrics = GatewayMetrics()
    metrics.tenants.came("acme")
    for status, outcome in ((200, "ok"), (500, "engine_error"), (429, "refused")):
        record = RequestRecord(
            request_id="r",
            started_s=0.0,
            endpoint="chat",
            model="m",
            tenant="acme",
            route="local",
            status=status,
            outcome=outcome,  # type: ignore[arg-type]
            is_stream=True,
            ttft_s=1.0,
            total_s=3.0,
            output_tokens=5 if status == 200 else 0,
            local_cached_tokens=30,
        )
        metrics.ended(record, 100)
    value = metrics.registry.get_sample_value
    prefix, model, tenant = "prfaas_gateway_", {"model_name": "m"}, {"tenant": "acme"}
    assert value(prefix + "prompt_tokens_total", model) == 100
    assert value(prefix + "generation_tokens_total", model) == 5
    assert value(prefix + "tenant_requests_total", tenant) == 2
    assert value(prefix + "tenant_prompt_tokens_total", tenant) == 100
    assert value(prefix + "tenant_cached_tokens_total", tenant) == 30
    assert value(prefix + "tenant_generation_tokens_total", tenant) == 5
    by_route = {"model_name": "m", "route": "local"}
    assert value(prefix + "time_to_first_token_seconds_count", by_route) == 1
    assert value(prefix + "request_time_per_output_token_seconds_sum", by_route) == 0.5
    assert value(prefix + "e2e_request_latency_seconds_count", by_route) == 3


def test_an_answer_in_one_piece_has_no_time_to_first_token() -> None:
    metrics = GatewayMetrics()
    record = RequestRecord(request_id="r", started_s=0.0, endpoint="chat", model="m", status=200)
    record.ttft_s = record.total_s = 1.0
    metrics.ended(record, 1)
    assert b"time_to_first_token_seconds_count" not in metrics.render()
