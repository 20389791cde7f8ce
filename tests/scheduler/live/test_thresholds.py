"""Thresholds of prefill clusters follow plan and link."""

import pytest

from netmon.estimate import LinkCondition
from netmon.region_link import LinkView
from scheduler.live.thresholds import Thresholds
from scheduler.routing.threshold import ThresholdConfig

CLEAR = LinkView(available_bytes_per_s=1e9)
CONGESTED = LinkView(state=LinkCondition.CONGESTED, available_bytes_per_s=1e8)


def thresholds(*names: str) -> Thresholds:
    config = ThresholdConfig(congested_factor=2.0, return_s=10.0)
    return Thresholds({"home": names or ("far",)}, 1000, config)


def test_before_a_look_the_base_holds_and_nothing_is_said() -> None:
    found = thresholds("near", "far").overview()
    assert [(item.cluster, item.tokens, item.base_tokens) for item in found] == [
        ("far", 1000, 1000),
        ("near", 1000, 1000),
    ]
    assert {item.reason for item in found} == {""}


def test_each_follows_its_own_link() -> None:
    kept = thresholds("near", "far")
    assert kept.update("far", CONGESTED, 0.0).tokens == 2000
    assert kept.update("near", CLEAR, 0.0).tokens == 1000
    far, near = kept.overview()
    assert (far.tokens, far.reason, far.numbers["factor"]) == (2000, "link_state", 2.0)
    assert (near.tokens, near.reason) == (1000, "plan")


def test_it_rises_at_once_and_returns_slowly() -> None:
    kept = thresholds()
    kept.update("far", CONGESTED, 0.0)
    values = [kept.update("far", CLEAR, at_s).tokens for at_s in (1.0, 5.0, 60.0, 120.0)]
    assert 1800 < values[0] < 2000
    assert values == sorted(values, reverse=True)
    assert values[-1] == pytest.approx(1000)


def test_a_plan_replaces_the_base_and_says_what_it_sends() -> None:
    kept = thresholds()
    kept.set_base("far", 500.0, planned_bytes_per_s=4e9)
    assert kept.base_tokens() == {"far": 500.0}
    assert kept.update("far", CLEAR, 0.0).tokens == pytest.approx(2000)
    assert kept.overview()[0].reason == "link_rate"


def test_an_unknown_cluster_is_an_error() -> None:
    with pytest.raises(KeyError):
        thresholds().set_base("nowhere", 1.0)
