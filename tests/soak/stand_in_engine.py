"""Stands in for vLLM's API server in `make soak-region`: all of an engine but the model.

It is started with vLLM's command line, renders prompts (a token is a byte) and answers them. An
answer says which prompt it is for, or that the wrong KVCache was loaded for it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aiohttp import web
from blake3 import blake3

from kvmanager.private_files import read_secret
from kvmanager.vllm_connector.key_guard import KEY_FILE_VARIABLE
from tests.soak.stand_in_cache import AgentSide, Prompt

WRONG = "WRONG KVCACHE"
NUM_EVENTS = 4

logger = logging.getLogger("prfaas.soak.engine")


def answer_to(token_ids: Sequence[int]) -> str:
    """The only right answer to this prompt."""
    return f"answer {blake3(bytes(token_ids)).hexdigest(8)}"


class Server:
    """The HTTP side: as much of vLLM's OpenAI server as gateway and fronts ask for."""

    def __init__(self, model: str, agent: AgentSide) -> None:
        self._model = model
        self._agent = agent
        self._key = f"Bearer {read_secret(Path(os.environ[KEY_FILE_VARIABLE]))}"
        self._num_running = 0

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 26, middlewares=[self._guard])
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/completions/render", self._render)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.headers.get("Authorization") != self._key:
            raise web.HTTPUnauthorized
        response: web.StreamResponse = await handler(request)
        return response

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def _metrics(self, _request: web.Request) -> web.Response:
        return web.Response(
            text=f'vllm:num_requests_running{{engine="0"}} {float(self._num_running)}\n'
            'vllm:num_requests_waiting{engine="0"} 0.0\n'
            f'vllm:kv_cache_usage_perc{{engine="0"}} {min(1.0, self._num_running / 64)}\n'
            'vllm:cache_config_info{engine="0",num_gpu_blocks="4096"} 1.0\n'
        )

    async def _render(self, request: web.Request) -> web.Response:
        prompt = (await request.json())["prompt"]
        return web.json_response([{"token_ids": list(prompt.encode()), "features": None}])

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self._num_running += 1
        try:
            return await self._answer(request, body)
        finally:
            self._num_running -= 1

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        given = body["prompt"]
        token_ids = given if isinstance(given, list) else list(given.encode())
        prompt = Prompt(token_ids, body.get("cache_salt") or "")
        cached_tokens, is_right = await self._compute(prompt, body)
        usage = {
            "prompt_tokens": len(token_ids),
            "completion_tokens": NUM_EVENTS,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        }
        text = answer_to(token_ids) if is_right else WRONG
        if not is_right:
            logger.error("%s of %d tokens: %s", body.get("request_id"), len(token_ids), WRONG)
        if not body.get("stream"):
            return web.json_response(self._chunk(text) | {"usage": usage})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        step = -(-len(text) // NUM_EVENTS)
        for start in range(0, len(text), step):
            chunk = self._chunk(text[start : start + step])
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            await asyncio.sleep(0)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _compute(self, prompt: Prompt, body: dict[str, Any]) -> tuple[int, bool]:
        params = (body.get("kv_transfer_params") or {}).get("prfaas")
        if params is not None and params["role"] == "consumer":
            landed = await self._agent.load(prompt, params)
            if landed is not None:
                return len(prompt.token_ids) - 1, landed
        cached_tokens, is_right = await self._agent.prefix(prompt)
        if params is not None and params["role"] == "producer":
            await self._agent.fill(prompt, params)
        return cached_tokens, is_right

    def _chunk(self, text: str) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": None}
        return {
            "id": "cmpl-soak",
            "object": "text_completion",
            "created": 1,
            "model": self._model,
            "choices": [choice],
        }


async def serve(options: argparse.Namespace) -> None:
    connector = json.loads(options.kv_transfer_config)["kv_connector_extra_config"]
    agent = AgentSide(connector["agent_socket"], connector["instance"])
    agent.start()
    server = Server(options.served_model_name, agent)
    runner = web.AppRunner(server.app(), handler_cancellation=True, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, options.host, options.port).start()
    try:
        await asyncio.Event().wait()
    finally:
        agent.close()
        await runner.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--served-model-name", required=True)
    parser.add_argument("--kv-transfer-config", required=True)
    options, _ = parser.parse_known_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    asyncio.run(serve(options))


if __name__ == "__main__":
    main()
