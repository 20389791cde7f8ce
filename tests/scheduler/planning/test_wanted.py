"""Instances that a measured load asks for."""

import pytest
from paper_region import FAST, KV, LENGTHS, SLOW

from scheduler.planning.plan import best_plan
from scheduler.planning.region_model import (
    Link,
    PdClusterModel,
    PrefillClusterModel,
    Region,
    Traffic,
)
from scheduler.planning.throughput import Mode
from scheduler.planning.wanted import TARGET_LOAD, needed_instances

REGION = Region(
    (PrefillClusterModel("far", 4, FAST, 30.0),),
    (PdClusterModel("near", 8, SLOW, 20, 0.025, 10.0),),
    (Link("far", "near", 100e9 / 8, 0.02, 0.01),),
    KV,
    Traffic(LENGTHS, 1024, 27_000),
)
PLAN = best_plan(REGION, Mode.EXACT)


def test_at_its_target_load_a_part_needs_the_instances_that_it_has() -> None:
    for part in PLAN.resources(Mode.EXACT):
        if part.kind != "link":
            needed = needed_instances(PLAN, TARGET_LOAD * part.system_rps, part.kind)
            assert needed[part.name] == pytest.approx(part.capacity)


def test_twice_the_load_needs_twice_the_instances() -> None:
    for kind in ("prefill", "decode"):
        once, twice = (needed_instances(PLAN, rate_rps, kind) for rate_rps in (1.0, 2.0))
        assert once.keys() == ({"far", "near"} if kind == "prefill" else {"near"})
        assert {name: 2 * num for name, num in once.items()} == pytest.approx(dict(twice))


def test_without_requests_nothing_is_needed() -> None:
    assert set(needed_instances(PLAN, 0.0, "decode").values()) == {0.0}
