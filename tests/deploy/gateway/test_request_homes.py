"""The home of a request: header, API key, gateway; and the model that it asks for."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from report_cases import cluster, instance

from deploy.gateway.errors import ApiError
from deploy.gateway.intake.homes import Homes
from scheduler.reports import ClusterReport


def report(name: str, *models: str) -> ClusterReport:
    instances = (instance(f"{name}-{model}", model=model, healthy=False) for model in models)
    return cluster(name, *instances, healthy=False)


def homes(reports: Mapping[str, ClusterReport | None], default: str = "") -> Homes:
    return Homes(lambda: reports, default, {"ann": "c"})


NOT_HEARD: Mapping[str, ClusterReport | None] = {"a": None, "b": None, "c": None}


def test_the_header_goes_before_the_key_and_the_key_before_the_gateway() -> None:
    assert homes(NOT_HEARD, "b").home("ann", "m", "a") == "a"
    assert homes(NOT_HEARD, "b").home("ann", "m", None) == "c"
    assert homes(NOT_HEARD, "b").home("bob", "m", None) == "b"
    assert homes(NOT_HEARD).home("", "m", None) == "a"


@pytest.mark.parametrize("wanted", ["", "d", "A", "x" * 1000])
def test_only_a_pd_cluster_is_a_home(wanted: str) -> None:
    with pytest.raises(ApiError) as caught:
        homes(NOT_HEARD).home("", "m", wanted)
    assert (caught.value.status, caught.value.code) == (400, "unknown_home")
    assert len(caught.value.message) < 300


def test_a_model_is_at_home_where_an_instance_has_it_healthy_or_not() -> None:
    reports = {"a": report("a", "big"), "b": None, "c": report("c", "big", "small")}
    assert homes(reports).home("", "big", None) == "a"
    assert homes(reports).home("", "small", None) == "c"
    assert homes(reports).home("", "small", "a") == "c"
    # Nobody knows what a cluster without a report has.
    assert homes(reports, "b").home("", "small", None) == "b"
    assert homes(reports).home("", "huge", None) == "a"
    assert homes({"a": report("a", "")}).home("", "any", None) == "a"
