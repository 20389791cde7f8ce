"""What requests tell the keeping of cached prefixes, and what it does for those that follow."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from deploy.gateway.cache.cached_prompt import CachedPrompt
from deploy.gateway.cache.placement import PrefixPlacement
from deploy.gateway.cache.region_caches import RegionCaches
from deploy.gateway.scheduling.config import RoutingSection, SchedulingConfig
from kvmanager.agent.cache.move_messages import CacheMoveStatusReply, ReserveCacheMoveReply
from kvmanager.agent.client import AgentClient, CacheMoveOrder
from kvmanager.agent.messages import CacheModel, EngineStatus
from kvmanager.directory.messages import Hit, NodeCoverage, NodeState, ResumeRule
from prfaas.jobs import PrefillJob, PrefillResult
from scheduler.live.feedback import CacheMoveBegun, CacheMoveOver
from scheduler.routing.decision import HAND_OFF

MODEL = CacheModel("ab" * 16, 64, [(0, 6400, 0)])
NUM_HELD = 45
NBYTES = NUM_HELD * 6400
BY_THRESHOLD = SchedulingConfig(routing=RoutingSection(policy="threshold"))


class OneHolder:
    """One node has nearly all of every prompt."""

    def __init__(self, cluster: str, node: str) -> None:
        self._holder = cluster, node

    async def match(self, rule: ResumeRule, keys: Sequence[bytes]) -> list[NodeCoverage]:
        hit = Hit(NUM_HELD, NUM_HELD)
        return [NodeCoverage(*self._holder, hit, hit, hit, Hit(), Hit(), 0.5)]

    async def nodes(self) -> list[NodeState]:
        return []

    async def close(self) -> None: ...


class FakeControl(AgentClient):
    """An agent that moves everything in 10 ms."""

    sent: list[tuple[str, str, str]]

    def __init__(self, target: str) -> None:
        self._at = target

    async def status(self, timeout_s: float) -> Any:
        return SimpleNamespace(engines=[EngineStatus("e", 1, 1, "layout", "f0" * 32, MODEL)])

    async def reserve_cache_move(
        self, order: CacheMoveOrder, lease_s: float
    ) -> ReserveCacheMoveReply:
        return ReserveCacheMoveReply(list(order.parts), "id", "token", NBYTES, self._at, 1)

    async def send_cache_move(
        self, order: CacheMoveOrder, landing: ReserveCacheMoveReply, lease_s: float
    ) -> None:
        self.sent.append((self._at, landing.host, order.priority))

    async def cache_move_status(
        self, transfer_id: str, role: Any, *, lease_s: float, wait_s: float
    ) -> CacheMoveStatusReply:
        return CacheMoveStatusReply("complete", "", NBYTES, NBYTES, NUM_HELD, 0.01, 0.001)

    async def end_cache_move(self, transfer_id: str, reason: str) -> bool:
        return True

    async def close(self) -> None: ...


async def test_requests_teach_when_a_prefix_is_moved_to_where_they_are_computed(
    open_region: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    routed: list[CachedPrompt] = []
    monkeypatch.setattr(PrefixPlacement, "looked_up", lambda _, cached: routed.append(cached))
    monkeypatch.setattr(FakeControl, "sent", sent := [], raising=False)

    caches = RegionCaches(OneHolder("home", "d0"), FakeControl)
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
        assert sent == []
        assert (await served()).cached_tokens == {}  # now it is, but not what the link carries
        await region.until(lambda: sent and len(region.gateway._background) == 0)
        assert sent == [("d0:1", "far-0:1", "replication")]
        assert (await served()).cached_tokens == {"far-0:1": 2880}
        assert sent[1:] == [("d0:1", "far-0:1", "request")]
        text = await metrics(region)
    for reason, num in (("prefill_rate_unknown", 3), ("link_rate_unknown", 1), ("pays", 1)):
        series = f'prfaas_gateway_cache_move_decisions_total{{reason="{reason}"}} {num}.0'
        assert series in text
    assert [len(cached.block_keys) for cached in routed] == [16 * (1 + 2999 // 64)] * 5


async def test_the_prefill_clusters_prefix_is_handed_to_the_pd_clusters_prefill_instance(
    open_region: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeControl, "sent", sent := [], raising=False)
    caches = RegionCaches(OneHolder("far", "far-0"), FakeControl)
    async with open_region(
        caches=caches, cache_model=MODEL, scheduling=BY_THRESHOLD, threshold_tokens=200
    ) as region:
        region.pd.prefill = region.far
        known = region.gateway.scheduler.knowledge("tiny")
        for num_tokens in range(500, 4000, 500):
            known.profile(HAND_OFF).observe(num_tokens, 0, num_tokens * 1e-3)
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
    assert sent == [("far-0:1", "p0:1", "request")]
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
