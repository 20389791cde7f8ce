"""Stands in for vLLM's API server as a process: all of an engine but the model.

It is started with vLLM's command line, renders prompts (a token is a byte) and answers them. An
answer says which prompt it is for, or that the wrong KVCache was loaded for it. For `make
soak-region`, the upgrade tests, and all regions whose launcher finds it with `engine_module`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from aiohttp import web
from blake3 import blake3
from openai_engine import OpenAiEngine, completion, token_ids

from kvmanager.private_files import read_secret
from kvmanager.vllm_connector.key_guard import KEY_FILE_VARIABLE
from tests.soak.stand_in_cache import AgentSide, Prompt

WRONG = "WRONG KVCACHE"

logger = logging.getLogger("prfaas.soak.engine")


def answer_to(token_ids: Sequence[int]) -> str:
    """The only right answer to this prompt."""
    return f"answer {blake3(bytes(token_ids)).hexdigest(8)}"


class StandIn(OpenAiEngine):
    """The engine, connected to its agent."""

    def __init__(self, agent: AgentSide) -> None:
        super().__init__()
        self.key = f"Bearer {read_secret(Path(os.environ[KEY_FILE_VARIABLE]))}"
        self.num_kv_blocks = 4096
        self.remembers = False
        self._agent = agent

    async def answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        ids = token_ids(body)
        prompt = Prompt(ids, body.get("cache_salt") or "")
        cached_tokens, is_right = await self._compute(prompt, body)
        if not is_right:
            logger.error("%s of %d tokens: %s", body.get("request_id"), len(ids), WRONG)
        payload = completion(request, body)
        payload["choices"][0]["text"] = answer_to(ids) if is_right else WRONG
        payload["usage"]["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
        return await self.send(request, body, payload)

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


async def serve(options: argparse.Namespace) -> None:
    connector = json.loads(options.kv_transfer_config)["kv_connector_extra_config"]
    agent = AgentSide(
        connector["agent_socket"],
        connector["instance"],
        options.served_model_name,
        caches=not options.no_enable_prefix_caching,
    )
    agent.start()
    engine = await StandIn(agent).start(options.host, options.port)
    try:
        await asyncio.Event().wait()
    finally:
        agent.close()
        await engine.stop()


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--served-model-name", required=True)
    parser.add_argument("--kv-transfer-config", required=True)
    parser.add_argument("--no-enable-prefix-caching", action="store_true")
    options, _ = parser.parse_known_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    asyncio.run(serve(options))


if __name__ == "__main__":
    main()
