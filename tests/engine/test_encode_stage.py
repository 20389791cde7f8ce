"""An engine that only encodes images beside one that prefills and decodes, on one agent."""

import asyncio
import json
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from agent_process import AgentProcess
from tiny_vision import IMAGE_ARGS, TINY_VISION, image_url, vision_environment

from deploy.lab.demo.reference import plain_engine
from deploy.lab.demo.tiny_models import build_model
from kvmanager.agent.messages import SERVICE, EmbeddingStatus, Status, StatusReply
from transport.rpc import RpcClient

NUM_TOKENS = 12


def ec_args(agent: AgentProcess, role: str, instance: str) -> tuple[str, ...]:
    config = {
        "ec_connector": "PrfaasECConnector",
        "ec_connector_module_path": "kvmanager.vllm_connector.encode",
        "ec_role": role,
        "ec_connector_extra_config": {"agent_socket": str(agent.socket), "instance": instance},
    }
    return "--ec-transfer-config", json.dumps(config)


def kv_args(agent: AgentProcess, instance: str) -> tuple[str, ...]:
    config = {
        "kv_connector": "PrfaasConnector",
        "kv_connector_module_path": "kvmanager.vllm_connector.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"agent_socket": str(agent.socket), "instance": instance},
    }
    return "--kv-transfer-config", json.dumps(config)


class Client:
    """Asks engines about images, which are told by their seeds."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def ask(self, url: str, seeds: Sequence[int], max_tokens: int = NUM_TOKENS) -> str:
        images = [{"type": "image_url", "image_url": {"url": image_url(seed)}} for seed in seeds]
        content: list[dict[str, Any]] = [*images, {"type": "text", "text": "what is it?"}]
        body = {
            "model": TINY_VISION.name,
            "max_tokens": max_tokens,
            "temperature": 0,
            "messages": [{"role": "user", "content": content}],
        }
        async with self._session.post(f"{url}/v1/chat/completions", json=body) as response:
            answer = await response.json()
        assert response.status == 200, answer
        return str(answer["choices"][0]["message"]["content"])

    async def forget(self, url: str) -> None:
        """Let the engine forget its KVCache and its embeddings."""
        for cache in ("prefix", "encoder"):
            async with self._session.post(f"{url}/reset_{cache}_cache") as response:
                assert response.status == 200, await response.text()


async def embeddings(agent: AgentProcess) -> EmbeddingStatus:
    client = RpcClient(agent.ready["control"], SERVICE)
    try:
        found = (await client.call("Status", Status(), StatusReply, 5.0)).embeddings
    finally:
        await client.close()
    assert found is not None
    return found


def kill(url: str) -> None:
    """End the engine at `url` at once, with all of its processes."""
    port = int(url.rpartition(":")[2])
    sockets = psutil.net_connections("tcp")
    listeners = {one.pid for one in sockets if one.laddr and one.laddr.port == port}
    for pid in filter(None, listeners):
        server = psutil.Process(pid)
        for process in (*server.children(recursive=True), server):
            process.kill()


@pytest.mark.shows(
    kind="full attention with gated delta net",
    dtype="bfloat16",
    prefill="TP 1",
    decode="TP 1",
    more="images encoded by an engine of its own on the same host",
)
async def test_answers_with_an_encode_stage_are_those_of_one_engine(
    tmp_path: Path, models_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (vision_environment() | {"VLLM_SERVER_DEV_MODE": "1"}).items():
        monkeypatch.setenv(name, value)
    path = await asyncio.to_thread(build_model, TINY_VISION, models_dir)
    questions = [(1,), (2,), (1, 2), (2, 1), (3, 3)]
    with AgentProcess(tmp_path, cache_gib=0) as agent:
        args = (*TINY_VISION.engine_args, *IMAGE_ARGS)
        encode = replace(
            TINY_VISION,
            engine_args=(*args, *ec_args(agent, "ec_producer", "e"), "--no-enable-prefix-caching"),
        )
        prefill_decode = replace(
            TINY_VISION,
            engine_args=(*args, *ec_args(agent, "ec_consumer", "pd"), *kv_args(agent, "pd")),
        )
        async with AsyncExitStack() as stack:
            client = Client(await stack.enter_async_context(aiohttp.ClientSession()))
            encoder_url, url = await asyncio.gather(
                stack.enter_async_context(plain_engine(encode, path, tmp_path / "e")),
                stack.enter_async_context(plain_engine(prefill_decode, path, tmp_path / "pd")),
            )
            # Nobody has put anything, so the engine encodes all images itself.
            alone = [await client.ask(url, seeds) for seeds in questions]
            assert len(set(alone)) == len(alone)
            before = await embeddings(agent)
            assert before.num_embeddings == before.num_hits == 0 < before.num_queries

            await client.forget(url)
            for seeds in ((1, 2), (3,)):
                await client.ask(encoder_url, seeds, max_tokens=1)
            assert (await embeddings(agent)).num_embeddings == 3
            assert [await client.ask(url, seeds) for seeds in questions] == alone
            loaded = await embeddings(agent)
            assert loaded.num_hits == loaded.num_queries - before.num_queries > 0

            # Eight at a time, of which some share an image.
            await client.forget(url)
            mixed = [questions[number % len(questions)] for number in range(8)]
            answers = await asyncio.gather(*(client.ask(url, seeds) for seeds in mixed))
            assert answers == [alone[questions.index(seeds)] for seeds in mixed]

            # Without the encoder, and later without the agent, no answer is lost.
            await client.forget(url)
            kill(encoder_url)
            assert [await client.ask(url, seeds) for seeds in questions] == alone
            fresh = await client.ask(url, (4,))
            await client.forget(url)
            agent.end()
            assert await client.ask(url, (4,)) == fresh
            assert await client.ask(url, questions[0]) == alone[0]
