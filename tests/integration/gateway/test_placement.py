"""What requests tell the keeping of cached prefixes, and what it does for those that follow."""

from typing import Any

import msgspec
import pytest
from cache_doubles import FakeDirectory, MovingAgents

from deploy.gateway.cache.cached_prompt import CachedPrompt
from deploy.gateway.cache.placement import PrefixPlacement
from deploy.gateway.cache.region_caches import RegionCaches
from deploy.gateway.scheduling.config import RoutingSection, SchedulingConfig
from kvmanager.agent.messages import CacheModel
from kvmanager.directory.messages import NodeName
from prfaas.jobs import PrefillJob, PrefillResult
from scheduler.live.feedback import CacheMoveBegun, CacheMoveOver
from scheduler.routing.decision import HAND_OFF

MODEL = CacheModel("ab" * 16, 64, [(0, 6400, 0)])
NUM_HELD = 45
NBYTES = NUM_HELD * 6400
BY_THRESHOLD = SchedulingConfig(routing=RoutingSection(policy="threshold"))


def moves(agents: MovingAgents) -> list[tuple[str, str]]:
    """Ways and priorities."""
    return [(way, order.priority) for way, order in agents.sent]


async def test_requests_teach_when_a_prefix_is_moved_to_where_they_are_computed(
    open_region: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    routed: list[CachedPrompt] = []
    monkeypatch.setattr(PrefixPlacement, "looked_up", lambda _, cached: routed.append(cached))
    agents = MovingAgents(MODEL, NBYTES, NUM_HELD)

    caches = RegionCaches(FakeDirectory({NodeName("home", "d0"): NUM_HELD}), agents.at)
    async with open_region(caches=caches, cache_model=MODEL, scheduling=BY_THRESHOLD) as region:
        slow_down(region.far, monkeypatch)

        async def served() -> PrefillJob:
            status, headers, _ = await region.post(region.long_body(prompt="x" * 3000))
            assert (status, headers["x-prfaas-route"]) == (200, "prefill_cluster")
            await region.record()
            job: PrefillJob = region.far.jobs[-1]
            return job

        for _ in range(3):  # how fast it computes is not known
            assert (await served()).cached_tokens == {}
        assert agents.sent == []
        assert (await served()).cached_tokens == {}  # now it is, but not what the link carries
        await region.until(lambda: agents.sent and len(region.gateway._background) == 0)
        assert moves(agents) == [("d0:1 -> far-0:1", "replication")]
        assert (await served()).cached_tokens == {"far-0:1": 2880}
        assert moves(agents)[1:] == [("d0:1 -> far-0:1", "request")]
        text = await metrics(region)
    for reason, num in (("prefill_rate_unknown", 3), ("link_rate_unknown", 1), ("pays", 1)):
        series = f'prfaas_gateway_cache_move_decisions_total{{reason="{reason}"}} {num}.0'
        assert series in text
    assert [len(cached.block_keys) for cached in routed] == [16 * (1 + 2999 // 64)] * 5


async def test_the_prefill_clusters_prefix_is_handed_to_the_pd_clusters_prefill_instance(
    open_region: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents = MovingAgents(MODEL, NBYTES, NUM_HELD)
    caches = RegionCaches(FakeDirectory({NodeName("far", "far-0"): NUM_HELD}), agents.at)
    async with open_region(
        caches=caches, cache_model=MODEL, scheduling=BY_THRESHOLD, threshold_tokens=200
    ) as region:
        region.pd.prefill = region.far
        known = region.gateway.scheduler.knowledge("tiny")
        for num_tokens in range(500, 4000, 500):
            known.learn(HAND_OFF, num_tokens, 0, num_tokens * 1e-3)
            known.reserved(num_tokens, 0, num_tokens * 512)
        key = region.gateway.scheduler.tell(CacheMoveBegun("far", "home"))
        region.gateway.scheduler.tell(CacheMoveOver(key, False, 10**8, 0.1))
        await region.until(lambda: len(region.gateway.scheduler.reports()[0].report.instances) == 2)
        status, headers, _ = await region.post(region.long_body(prompt="x" * 3000))
        assert (status, headers["x-prfaas-route"]) == (200, "local")
        assert "moved_tokens=2880" in headers["x-prfaas-reason"]
        record = await region.record()
        text = await metrics(region)
        (job,) = region.far.jobs
    assert moves(agents) == [("far-0:1 -> p0:1", "request")]
    assert job.cached_tokens == {"p0:1": 2880}
    assert (record.target, record.parts.move_s > 0) == (HAND_OFF, True)
    assert 'prfaas_gateway_cache_moves_total{kind="request",outcome="complete"} 1.0' in text


def slow_down(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every prefill there takes 3 s, it says."""
    submit = cluster.submit

    async def slow_submit(job: PrefillJob) -> PrefillResult:
        result: PrefillResult = await submit(job)
        return msgspec.structs.replace(result, prefill_s=3.0, service_s=3.0)

    monkeypatch.setattr(cluster, "submit", slow_submit)


async def metrics(region: Any) -> str:
    async with region.session.get(region.url + "/metrics") as response:
        text: str = await response.text()
        return text
