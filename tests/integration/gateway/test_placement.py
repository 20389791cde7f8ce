"""What requests tell the keeping of cached prefixes, and what it does for those that follow."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from deploy.gateway.cache.cached_prompt import CachedPrompt
from deploy.gateway.cache.placement import PrefixPlacement
from deploy.gateway.cache.region_caches import RegionCaches
from kvmanager.agent.cache.move_messages import CacheMoveStatusReply, ReserveCacheMoveReply
from kvmanager.agent.client import AgentClient, CacheMoveOrder
from kvmanager.agent.messages import CacheModel, EngineStatus
from kvmanager.directory.messages import Hit, NodeCoverage, NodeState, ResumeRule
from prfaas.jobs import PrefillJob, PrefillResult

MODEL = CacheModel("ab" * 16, 64, [(0, 6400, 0)])
NUM_HELD = 45
NBYTES = NUM_HELD * 6400


class HomeDirectory:
    """The PD cluster's node has nearly all of every prompt, too little to keep it there."""

    async def match(self, rule: ResumeRule, keys: Sequence[bytes]) -> list[NodeCoverage]:
        hit = Hit(NUM_HELD, NUM_HELD)
        return [NodeCoverage("home", "d0", hit, hit, hit, Hit(), Hit(), 0.5)]

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

    caches = RegionCaches(HomeDirectory(), FakeControl)
    async with open_region(caches=caches, cache_model=MODEL) as region:
        submit = region.far.submit

        async def slow_submit(job: PrefillJob) -> PrefillResult:
            return msgspec.structs.replace(await submit(job), prefill_s=3.0)

        monkeypatch.setattr(region.far, "submit", slow_submit)

        async def served() -> PrefillJob:
            status, headers, _ = await region.post(region.long_body(prompt="x" * 3000))
            assert (status, headers["x-prfaas-route"]) == (200, "prefill_cluster")
            await region.record()
            job: PrefillJob = region.far.jobs[-1]
            return job

        assert (await served()).cached_tokens == {}  # how fast it computes is not known
        assert sent == []
        assert (await served()).cached_tokens == {}  # now it is, but not what the link carries
        await region.until(lambda: sent and len(region.gateway._background) == 0)
        assert sent == [("d0:1", "far-0:1", "replication")]
        assert (await served()).cached_tokens == {"far-0:1": 2880}
        assert sent[1:] == [("d0:1", "far-0:1", "request")]
        async with region.session.get(region.url + "/metrics") as response:
            text = await response.text()
    for reason in ("prefill_rate_unknown", "link_rate_unknown", "pays"):
        assert f'prfaas_gateway_cache_move_decisions_total{{reason="{reason}"}} 1.0' in text
    assert [len(cached.block_keys) for cached in routed] == [16 * (1 + 2999 // 64)] * 3
