"""Engines whose KVCache layouts differ: nothing is sent between them, and no request fails."""

from __future__ import annotations

from typing import Any

OLD, NEW = "aa" * 32, "bb" * 32


async def route_of(region: Any, headers: dict[str, str] | None = None) -> tuple[str, str]:
    """Route and reason of a long prompt, which is answered whatever happens to its KVCache."""
    status, found, _ = await region.post(region.long_body(), headers=headers)
    assert status == 200
    await region.assert_nothing_held()
    return found["x-prfaas-route"], found["x-prfaas-reason"].partition(";")[0]


async def test_arguments_change_at_one_engine_after_the_other(open_region: Any) -> None:
    async with open_region(num_engines=2) as region:
        pd, far = region.pd, region.far
        pd.layouts, far.layout = {"d0": OLD, "d1": OLD}, OLD
        await region.heard()
        assert await route_of(region) == ("prefill_cluster", "above_threshold")
        # The decoder that is left gets all KVCache.
        pd.layouts = {"d0": NEW, "d1": OLD}
        await region.heard()
        for _ in range(2):
            assert await route_of(region) == ("prefill_cluster", "above_threshold")
            assert (await region.record()).decode_instance == "d1"
        pd.layouts = {"d0": NEW, "d1": NEW}
        await region.heard()
        num_jobs = len(far.jobs)
        assert await route_of(region) == ("local", "kvcache_unusable")
        assert len(far.jobs) == num_jobs
        far.layout = NEW
        await region.heard()
        assert await route_of(region) == ("prefill_cluster", "above_threshold")


async def test_a_change_that_no_report_has_had_fails_no_request(open_region: Any) -> None:
    async with open_region(report_interval_s=20.0, report_stale_s=30.0) as region:
        region.pd.layouts, region.far.layout = {"d0": NEW}, OLD
        assert await route_of(region) == ("local", "prefill_failed")
        (job,) = region.far.jobs
        assert job.landing.layout_fingerprint == NEW
        assert region.engine.sources == ["prompt"]


async def test_one_pair_of_clusters_that_differs_leaves_the_other_alone(open_region: Any) -> None:
    async with open_region(pds=("home", "north")) as region:
        region.pds["home"].layouts, region.pds["north"].layouts = {"d0": OLD}, {"north-d0": NEW}
        region.far.layout = OLD
        await region.heard()
        north = {"x-prfaas-home": "north"}
        assert await route_of(region) == ("prefill_cluster", "above_threshold")
        assert await route_of(region, north) == ("local", "kvcache_unusable")
        region.far.layout = NEW
        await region.heard()
        assert await route_of(region) == ("local", "kvcache_unusable")
        assert await route_of(region, north) == ("prefill_cluster", "above_threshold")
