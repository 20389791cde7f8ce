"""Names, labels and units of all metrics, and the page that lists them."""

from __future__ import annotations

import re

import pytest
import write_metrics
from prometheus_client import CollectorRegistry, Gauge
from write_metrics import MetricShown

KNOWN = write_metrics.processes()
ALL = [(process, item) for process, shown in KNOWN.items() for item in shown]

THINGS = frozenset(
    [
        "admission",
        "blocks",
        "changes",
        "connections",
        "decisions",
        "embeddings",
        "events",
        "evictions",
        "failures",
        "fetches",
        "fills",
        "followed",
        "hand_offs",
        "hits",
        "instances",
        "jobs",
        "landings",
        "loads",
        "media",
        "moves",
        "observations",
        "outboxes",
        "parts",
        "peers",
        "prefills",
        "promotions",
        "queries",
        "reads",
        "rejected",
        "requests",
        "reservations",
        "retries",
        "samples",
        "senders",
        "sends",
        "slots",
        "steps",
        "stores",
        "transfers",
        "waits",
        "writes",
    ]
)
"""What may be counted by the last word of a name without a unit."""


def problems_of(item: MetricShown) -> list[str]:
    """What is wrong with a metric by the conventions of Prometheus and vLLM."""
    found = []
    if not re.fullmatch(r"(prfaas|vllm:prfaas)(_[a-z0-9]+)+", item.name):
        found.append("a name is prfaas_ and small letters")
    if (item.kind == "counter") != item.name.endswith("_total"):
        found.append("counters end in _total, and only they")
    last = item.name.removesuffix("_total")
    if not item.unit and not any(last.endswith(f"_{thing}") for thing in THINGS):
        found.append("it ends in neither a base unit nor a known thing")
    if re.search(
        r"_(ms|us|ns|milliseconds|minutes|kib|mib|gib|kb|mb|gb|percent|count|num)\b", last
    ):
        found.append("units are base units")
    for label in item.labels:
        if label in ("model", "le", "quantile", "job", "instance_name"):
            found.append(f"the label {label} is called otherwise, or taken")
        if not re.fullmatch(r"[a-z]+(_[a-z]+)*", label):
            found.append(f"the label {label} is not of small letters")
    if not item.text.endswith((".", ")")):
        found.append("the meaning is a sentence")
    return [f"{item.name}: {problem}" for problem in found]


@pytest.mark.parametrize("process", KNOWN)
def test_names_and_labels_follow_the_conventions(process: str) -> None:
    assert len(KNOWN[process]) > 5
    assert [problem for item in KNOWN[process] for problem in problems_of(item)] == []


@pytest.mark.parametrize(
    ("item", "problem"),
    [
        (MetricShown("prfaas_x_latency_ms", "gauge", (), "X."), "base unit"),
        (MetricShown("prfaas_x_bytes", "counter", (), "X."), "_total"),
        (MetricShown("prfaas_x_requests_total", "gauge", (), "X."), "_total"),
        (MetricShown("prfaas_x_load", "gauge", (), "X."), "neither a base unit"),
        (MetricShown("prfaas_x_bytes", "gauge", ("model",), "X."), "label model"),
        (MetricShown("prfaas_X_bytes", "gauge", (), "X."), "small letters"),
        (MetricShown("prfaas_x_bytes", "gauge", (), "X"), "sentence"),
    ],
)
def test_the_conventions_refuse(item: MetricShown, problem: str) -> None:
    assert any(problem in found for found in problems_of(item))


def test_no_name_has_two_meanings() -> None:
    first: dict[str, tuple[str, MetricShown]] = {}
    for process, item in ALL:
        known, known_item = first.setdefault(item.name, (process, item))
        assert item == known_item, f"{item.name} is something else in {known} than in {process}"
    # A family shows samples under more names than its own.
    taken = set(first)
    for _, item in ALL:
        if item.kind == "histogram":
            assert not taken & {f"{item.name}_{end}" for end in ("bucket", "sum", "count")}


def test_the_same_label_has_one_name_everywhere() -> None:
    labels = {label for _, item in ALL for label in item.labels}
    assert not labels & {"model", "pd", "clusters", "from", "src", "dst", "tier_name", "user"}


def test_the_page_is_up_to_date() -> None:
    assert write_metrics.PAGE.read_text() == write_metrics.page(), "run `make docs`"


def test_metrics_of_a_registry_are_found_without_samples() -> None:
    registry = CollectorRegistry()
    Gauge("prfaas_x_bytes", "X.", ["link"], registry=registry)
    (found,) = write_metrics.shown_by(registry)
    assert found == MetricShown("prfaas_x_bytes", "gauge", ("link",), "X.")
    assert found.unit == "bytes"
