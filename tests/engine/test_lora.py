"""LoRA adapters through a region of real engines: tokens, cache keys, and what is refused.

Requests come one after the other: on the CPU, vLLM computes a request without an adapter with the
adapter of another one in the same step.
"""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from engine_region import everything_is_given_back, prompt, running, settled_record_at
from handoff import Handoff
from part_gateway import PartGateways, part_gateways
from tiny_llama import TINY_LLAMA, build_adapter

from deploy.lab.demo.answers import Answer, ask
from deploy.lab.demo.regions import demo_region
from deploy.lab.demo.scenario import DemoRequest, text
from deploy.lab.demo.tiny_models import build_model
from kvmanager.vllm_connector.weights import adapter_identity
from prfaas.engines.prefill_run import AttemptFailed

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.kinds]

MODEL = TINY_LLAMA.name
ADAPTERS = {"poet": 1, "lawyer": 2}
NAMES = (MODEL, *ADAPTERS)
# All models get the same prompts: keys without the adapter would find one's KVCache for another.
SHARED = text(700, seed=5)
REQUESTS = (
    prompt("first", 900, 1, prefix=SHARED),
    prompt("second", 800, 2, prefix=SHARED, stream=True),
    replace(prompt("chat", 800, 3, prefix=SHARED), endpoint="/v1/chat/completions"),
)


@dataclass(frozen=True, slots=True)
class Served:
    """A region, and the directories of the adapters."""

    gateways: PartGateways
    url: str
    paths: dict[str, str]

    async def ask(self, name: str, request: DemoRequest) -> tuple[Answer, dict[str, Any]]:
        """The answer of a model or adapter, which is right, and the gateway's record of it."""
        answer = await ask(self.gateways.session, self.url, name, request)
        assert not answer.error, (name, answer.error)
        # The decode engine computes all of it, with this adapter.
        assert answer.token_ids == await self.gateways.alone("b1-decode", request, name), name
        return answer, await settled_record_at(self.url, answer.request_id)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(
    models_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Served]:
    path = build_model(TINY_LLAMA, models_dir)
    paths = {
        name: str(build_adapter(models_dir / f"adapter-{name}", seed))
        for name, seed in ADAPTERS.items()
    }
    spec = demo_region(TINY_LLAMA, path, threshold_tokens=100, local_prefill=False)
    model = spec.models[0].model_copy(update={"adapters": paths})
    spec = spec.model_copy(update={"models": (model,)})
    folder = tmp_path_factory.mktemp("r")
    async with (
        running(spec, folder / "region") as region,
        part_gateways(region, MODEL, folder) as gateways,
    ):
        yield Served(gateways, region.gateway_url, paths)


@pytest.mark.shows(
    kind="full attention", dtype="float32", prefill="TP 1", decode="TP 1", more="LoRA adapters"
)
async def test_tokens_equal_those_of_one_engine_with_the_adapter(served: Served) -> None:
    told: dict[str, list[list[int]]] = {name: [] for name in NAMES}
    for name in NAMES:
        for index, request in enumerate(REQUESTS):
            answer, record = await served.ask(name, request)
            told[name].append(answer.token_ids)
            assert record["model"] == MODEL
            assert record.get("adapter", "") == ("" if name == MODEL else name)
            assert record.get("prefill_error", "") == "", record
            # Its first one not where another model's was cached.
            if index == 0:
                assert record["route"] == "prefill_cluster", record
                assert record["transfer_bytes"] > 0
                assert record["cached_tokens"] == 0, "of another model or adapter"
                assert record["local_cached_tokens"] == 0
                assert not any(record["prefill_cached_tokens"].values())
    assert len({repr(tokens) for tokens in told.values()}) == len(NAMES), "the adapters do nothing"
    await everything_is_given_back(served.gateways.region)


async def test_an_adapters_prompt_finds_its_own_cache(served: Served) -> None:
    for name in NAMES:
        _, record = await served.ask(name, REQUESTS[0])
        assert record["local_cached_tokens"] > 0, record


async def test_adapters_are_listed_and_others_do_not_exist(served: Served) -> None:
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{served.url}/v1/models") as response:
            cards = {card["id"]: card for card in (await response.json())["data"]}
        assert {name: card["parent"] for name, card in cards.items()} == {
            MODEL: None,
            "poet": MODEL,
            "lawyer": MODEL,
        }
        assert cards["poet"]["root"] == served.paths["poet"]
        body: dict[str, Any] = {"model": "stranger", "prompt": "x"}
        async with session.post(f"{served.url}/v1/completions", json=body) as response:
            error = json.loads(await response.read())["error"]
            assert (response.status, error["code"]) == (404, "model_not_found")


async def test_kvcache_of_another_adapter_is_not_sent(served: Served) -> None:
    token_ids = list(text(400, seed=9).encode())
    own, other = (adapter_identity(served.paths[name]) for name in ("poet", "lawyer"))
    async with aiohttp.ClientSession() as session:
        handoff = Handoff(served.gateways.region, MODEL, session)
        landed = await handoff.land("a1-prefill", "a1", token_ids, adapter="poet", identity=own)
        plain = await handoff.land("a1-prefill", "a1", token_ids)
        assert landed.data != plain.data
        with pytest.raises(AttemptFailed, match=f"adapter {other}, here it is the adapter {own}"):
            await handoff.land("a1-prefill", "a1", token_ids, adapter="poet", identity=other)
        for one in (landed, plain):
            await handoff.drop(one)
        await handoff.close()
    await everything_is_given_back(served.gateways.region)
