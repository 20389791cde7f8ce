"""Routing by what is cached, and the endpoints that show it, with a literal directory."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from cache_doubles import FakeDirectory
from openai_engine import fixed
from report_cases import agent_status
from typer.testing import CliRunner

from deploy.cli import app
from deploy.gateway.cache.region_caches import RegionCaches
from kvmanager.agent.messages import (
    CacheModel,
    CacheStatus,
    ListCacheReply,
    PrefixLeaf,
    StatusReply,
)
from kvmanager.directory.messages import NodeName, NodeState, ResumeRule
from kvmanager.hashing import block_keys, join_keys, root_key
from transport.rpc import RpcError

MODEL = CacheModel("ab" * 16, 64, [(0, 6400, 0)])
ROOT = root_key(bytes.fromhex(MODEL.namespace), tenant="")


class FakeCacheAgent:
    """The agent at `target`; the prefill cluster's does not answer."""

    num_open = 0

    def __init__(self, target: str) -> None:
        self.target = target
        FakeCacheAgent.num_open += 1

    async def status(self, timeout_s: float) -> StatusReply:
        self._check()
        cache = CacheStatus(
            {"arena/kv": 3 << 20, "ssd/kv": 1 << 20}, 12, 0, 4, 1000, {"arena": 250}, {}
        )
        return agent_status(free_bytes=0, cache=cache)

    async def list_cache(self, limit: int, order: str, timeout_s: float) -> ListCacheReply:
        self._check()
        prefix = PrefixLeaf("ab" * 16, 768, {"arena/kv": 1 << 20}, 5, 2.0, 0, 768, False)
        return ListCacheReply([prefix], 1)

    async def close(self) -> None:
        FakeCacheAgent.num_open -= 1

    def _check(self) -> None:
        if self.target.startswith("far"):
            raise RpcError("UNAVAILABLE", "nobody listens there")


@pytest.fixture
def directory() -> FakeDirectory:
    made = FakeDirectory()
    made.states = [NodeState("home", "d0", 12, "e", 3, 0.5, 0.1, True)]
    return made


@pytest.fixture
def caches(directory: FakeDirectory) -> RegionCaches:
    return RegionCaches(directory, FakeCacheAgent, directory.follow)


def keys_of(body: dict[str, Any]) -> list[bytes]:
    return block_keys(list(body["prompt"].encode())[:-1], 64, ROOT)


async def test_what_is_cached_at_home_keeps_a_long_prompt_there(
    open_region: Any, caches: RegionCaches, directory: FakeDirectory
) -> None:
    directory.held = {NodeName("home", "d1"): 4, NodeName("far", "far-0"): 4}
    async with open_region(num_engines=2, caches=caches, cache_model=MODEL) as region:
        body = region.long_body()
        status, headers, _ = await region.post(body)
        assert status == 200
        assert headers["x-prfaas-route"] == "local"
        assert headers["x-prfaas-reason"].startswith("below_threshold; prompt_tokens=300")
        assert "cached_tokens=256; uncached_tokens=44" in headers["x-prfaas-reason"]
        assert headers["x-prfaas-cached-tokens"] == "local=256, prefill=256, landing=256"
        assert region.pd.direct_preferences == [(), ("d1:1",)]
        assert directory.asked == [(ResumeRule(True, 0, False), keys_of(body))]
        record = await region.record()
        assert record.local_cached_tokens == 256
        async with region.session.get(region.url + "/metrics") as response:
            text = await response.text()
    assert 'prfaas_gateway_cache_query_tokens_total{model_name="tiny"} 300.0' in text
    assert (
        'prfaas_gateway_cached_tokens_total{cluster="home",model_name="tiny",side="local"} 256.0'
        in text
    )
    assert directory.is_closed


async def test_what_a_cluster_and_the_landing_have_is_neither_computed_nor_sent(
    open_region: Any, caches: RegionCaches, directory: FakeDirectory
) -> None:
    directory.held = {NodeName("home", "d0"): 1, NodeName("near", "near-0"): 3}
    async with open_region(prefill=("far", "near"), caches=caches, cache_model=MODEL) as region:
        region.pd.cached_tokens = 64
        body = region.long_body()
        status, headers, _ = await region.post(body)
        assert status == 200
        assert (headers["x-prfaas-route"], headers["x-prfaas-transfer-bytes"]) == (
            "prefill_cluster",
            str((299 - 64) * 512),
        )
        assert headers["x-prfaas-cached-tokens"] == "local=64, prefill=192, landing=64"
        ((sent_keys, nodes),) = region.pd.reserved_with
        assert sent_keys == join_keys([ROOT, *keys_of(body)])
        assert nodes == ("d0:1",)
        (job,) = region.prefill["near"].jobs
        assert job.cached_tokens == {"near-0:1": 192}
        assert job.landing.cached_tokens == 64
        record = await region.record()
        assert (record.landing_cached_tokens, record.saved_bytes) == (64, 6400)
        async with region.session.get(region.url + "/metrics") as response:
            text = await response.text()
    assert 'prfaas_gateway_transfer_saved_bytes_total{target="near"} 6400.0' in text


async def test_a_short_prompt_is_neither_rendered_nor_looked_up(
    open_region: Any, caches: RegionCaches, directory: FakeDirectory
) -> None:
    async with open_region(caches=caches, cache_model=MODEL) as region:
        _, headers, _ = await region.post({"model": "tiny", "prompt": "short"})
        assert headers["x-prfaas-route"] == "local"
        assert "x-prfaas-cached-tokens" not in headers
        assert not region.engine.bodies("/v1/completions/render")
        assert not directory.asked


async def test_tenants_have_keys_of_their_own(
    open_region: Any, caches: RegionCaches, directory: FakeDirectory
) -> None:
    async with open_region(caches=caches, cache_model=MODEL) as region:
        await region.post(region.long_body())
        await region.post(region.long_body(cache_salt="alice"))
    first, second = (set(keys) for _, keys in directory.asked)
    assert len(first) == len(second) == 4
    assert not first & second


async def test_without_a_cache_at_the_engines_requests_go_on(
    open_region: Any, caches: RegionCaches, directory: FakeDirectory
) -> None:
    async with open_region(caches=caches) as region:
        status, headers, _ = await region.post(region.long_body())
        assert (status, headers["x-prfaas-route"]) == (200, "prefill_cluster")
        assert "x-prfaas-cached-tokens" not in headers
        assert region.pd.reserved_with == [(b"", ())]
        assert not directory.asked
        body = region.long_body()
        status, _, answer = await region.post(body, "/prfaas/cache/explain")
        assert status == 200
        assert "no engine" in json.loads(answer)["note"]


async def test_a_gateway_without_a_directory_says_so(region: Any) -> None:
    for path in ("/prfaas/cache", "/prfaas/cache/top"):
        async with region.session.get(region.url + path) as response:
            assert response.status == 404
            assert (await response.json())["error"]["code"] == "no_cache_directory"
    status, _, _ = await region.post(region.long_body(), "/prfaas/cache/explain")
    assert status == 404


async def test_the_nodes_of_all_reports_are_followed(
    open_region: Any, caches: RegionCaches, directory: FakeDirectory
) -> None:
    async with open_region(caches=caches, cache_model=MODEL):
        assert directory.followed == {
            NodeName("home", "d0"): "d0:1",
            NodeName("far", "far-0"): "far-0:1",
        }


async def test_the_endpoints_show_nodes_and_prefixes(
    open_region: Any, caches: RegionCaches
) -> None:
    async with open_region(caches=caches, cache_model=MODEL) as region:
        async with region.session.get(region.url + "/prfaas/cache") as response:
            far, home = (await response.json())["nodes"]
        assert far["error"] == "nobody listens there"
        assert (home["node"], home["hit_share"], home["directory"]["num_blocks"]) == (
            "d0",
            0.25,
            12,
        )
        async with region.session.get(region.url + "/prfaas/cache/top?limit=3") as response:
            top = await response.json()
        assert top["prefixes"][0]["nodes"] == ["home/d0"]
        assert top["errors"] == {"far/far-0": "nobody listens there"}
        for query in ("limit=0", "limit=x", "order=best"):
            async with region.session.get(region.url + f"/prfaas/cache/top?{query}") as response:
                assert response.status == 400
    assert FakeCacheAgent.num_open == 0


@pytest.mark.parametrize("kind", ["completion", "chat"])
async def test_an_explanation_serves_nothing(
    open_region: Any, caches: RegionCaches, directory: FakeDirectory, kind: str
) -> None:
    directory.held = {NodeName("far", "far-0"): 2}
    async with open_region(caches=caches, cache_model=MODEL) as region:
        body = region.long_body()
        if kind == "chat":
            body = {"model": "tiny", "messages": [{"role": "user", "content": "x" * 298}]}
        status, _, answer = await region.post(body, "/prfaas/cache/explain")
        told = json.loads(answer)
        assert status == 200, told
        assert (told["num_prompt_tokens"], told["num_blocks"]) == (300, 4)
        assert (told["route"], told["target"]) == ("prefill_cluster", "far")
        assert told["routes"][1]["computed_tokens"] == 300 - 128
        assert not region.pd.reserved_with
        assert not region.gateway.records


@pytest.mark.parametrize(("engine_status", "expected"), [(400, 400), (500, 503)])
async def test_what_cannot_be_rendered_cannot_be_explained(
    open_region: Any, caches: RegionCaches, engine_status: int, expected: int
) -> None:
    async with open_region(caches=caches, cache_model=MODEL) as region:
        region.engine.render_reply = fixed("", engine_status)
        status, _, answer = await region.post(region.long_body(), "/prfaas/cache/explain")
        assert status == expected
        assert json.loads(answer)["error"]["code"] == "not_rendered"


async def test_the_command_line_shows_all_three(
    open_region: Any, caches: RegionCaches, directory: FakeDirectory, tmp_path: Path
) -> None:
    directory.held = {NodeName("home", "d0"): 2}
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("x" * 300)

    async def run(*words: str) -> tuple[int, str]:
        result = await asyncio.to_thread(
            CliRunner().invoke, app, ["cache", *words], env={"COLUMNS": "100"}
        )
        return result.exit_code, result.output

    async with open_region(caches=caches, cache_model=MODEL) as region:
        code, text = await run("ls", "--gateway", region.url)
        assert code == 0, text
        assert "…" not in text
        assert "3.0 MiB" in text
        assert "25%" in text
        assert "far/far-0 at far-0:1: nobody listens there" in text
        code, text = await run("top", "--gateway", region.url, "--order", "size")
        assert code == 0, text
        assert "…" not in text
        assert region.gateway.pages.key_names.name(b"\xab" * 16)[:12] in text
        assert "abababababab" not in text, "the key itself is not shown"
        assert "home/d0" in text
        code, text = await run("explain", str(prompt), "--gateway", region.url)
        assert code == 0, text
        assert "300 tokens, 4 full blocks of 64" in text
        assert "now: prefill_cluster far: above_threshold" in text
        assert "…" not in text
        code, text = await run("explain", str(prompt), "--chat", "--json", "--gateway", region.url)
        assert json.loads(text)["num_prompt_tokens"] == 302
        code, text = await run("explain", str(prompt), "--model", "no", "--gateway", region.url)
        assert code == 1
        assert "404" in text
