"""The PD cluster computes a prompt with the prefill cluster's cache: real fronts and agents."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
from agent_process import AgentProcess
from caching_engine import ROOT, B, CachingEngine
from eventually import eventually
from front_access import gateway_url, pd_cluster, prefill_cluster, ready
from untimed_gateway import UNTIMED
from whole_region import spec

from deploy.gateway.app import Gateway
from deploy.gateway.cache.region_caches import RegionCaches
from deploy.gateway.config import GatewayConfig, ModelConfig
from kvmanager.agent.client import AgentClient
from kvmanager.directory.embedded import EmbeddedDirectory
from kvmanager.hashing import block_keys
from local_pd.embedded import PdClusterConfig
from prfaas.embedded import PrefillClusterConfig
from prfaas.engines.health import ProbeTiming
from prfaas.engines.instances import InstancesConfig
from scheduler.live.feedback import CacheMoveBegun, CacheMoveOver
from scheduler.routing.decision import ONE_ENGINE

PROBING = InstancesConfig(probes=ProbeTiming(interval_s=0.2, start_interval_s=0.1), poll_load=True)
PROMPT = "x" * 300
NUM_BLOCKS = 299 // B
KEYS = block_keys(list(PROMPT.encode())[: NUM_BLOCKS * B], B, ROOT)


def teach(gateway: Gateway) -> None:
    """As earlier requests would: 10 ms a token, and what KVCache takes."""
    known = gateway.scheduler.knowledge("tiny")
    for num_tokens in range(100, 1000, 100):
        known.learn(ONE_ENGINE, num_tokens, 0, num_tokens * 0.01)
        known.reserved(num_tokens, 0, num_tokens * 512)
    key = gateway.scheduler.tell(CacheMoveBegun("far", "home"))
    gateway.scheduler.tell(CacheMoveOver(key, False, 10**8, 0.1, 0.001))


async def test_the_pd_cluster_computes_with_the_prefill_clusters_cache(
    tmp_path: Path, lone_engine: Any
) -> None:
    """300 tokens, of which far has 288 cached: with them 12 are left, fewer than t."""
    async with AsyncExitStack() as stack:
        there = stack.enter_context(AgentProcess(tmp_path / "far", block_bytes=4096))
        here = stack.enter_context(AgentProcess(tmp_path / "home", block_bytes=4096))
        sender = stack.enter_context(CachingEngine(there, "p0"))
        receiver = stack.enter_context(CachingEngine(here, "d0"))
        await asyncio.to_thread(sender.store, KEYS)
        # No prefill is to reach the engine at far, so any that answers its probes will do.
        specs = [spec("p0", lone_engine.url, there, "prefill")]
        prefill = prefill_cluster("far", specs, PrefillClusterConfig(instances=PROBING))
        specs = [spec("d0", lone_engine.url, here, "both")]
        pd = pd_cluster("home", specs, PdClusterConfig(instances=PROBING))
        await ready(stack, prefill, pd)
        directory = EmbeddedDirectory(AgentClient)
        gateway = Gateway(
            GatewayConfig(
                port=0,
                models=(ModelConfig(name="tiny"),),
                threshold_tokens=100,
                report_interval_s=0.05,
                scheduling=UNTIMED,
            ),
            [pd],
            {"far": prefill},
            caches=RegionCaches(directory, AgentClient, directory.follow),
        )
        url = await gateway_url(stack, gateway) + "/v1/completions"
        session = await stack.enter_async_context(aiohttp.ClientSession())
        await eventually(lambda: len(directory.core.holders(KEYS[-1])) == 1)
        teach(gateway)

        async def ask() -> Any:
            body = {"model": "tiny", "prompt": PROMPT}
            async with session.post(url, json=body) as response:
                assert response.status == 200
                await response.read()
            await eventually(lambda: gateway.records[-1].is_settled)
            return gateway.records[-1]

        record = await ask()
        assert (record.route, record.target) == ("local", ONE_ENGINE)
        assert record.numbers["moved_tokens"] == NUM_BLOCKS * B
        assert record.numbers["uncached_tokens"] == 300 - NUM_BLOCKS * B
        assert record.cache_move.startswith("288 tokens more in far")
        assert record.cache_move.endswith(": pays")
        assert record.parts.move_s > 0
        assert lone_engine.sources == ["prompt"]
        await asyncio.to_thread(receiver.check, KEYS, NUM_BLOCKS)
        # What came is cached here: the next prompt needs no move.
        await eventually(lambda: len(directory.core.holders(KEYS[-1])) == 2)
        again = await ask()
        assert (again.target, again.cache_move) == (ONE_ENGINE, "")
        assert again.local_cached_tokens == NUM_BLOCKS * B
    assert "Traceback" not in there.log() + here.log()
