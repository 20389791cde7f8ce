"""In the place of vLLM's API server: it computes nothing, but KVCache really moves.

The process speaks enough of the OpenAI API. As a producer it fills its agent's outbox, as a
consumer it waits for the landing and compares it. `install` makes the module that engines are
started as.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
from pathlib import Path
from typing import Any

from agent_process import SMALL_LAYOUT, EngineConnection
from openai_engine import OpenAiEngine

MODULE = "from standin_engine import main\n\nmain()\n"
SUPPORT = Path(__file__).parent


def install(folder: Path) -> str:
    """Make the module in `folder`; the PYTHONPATH with which engines find it."""
    package = folder / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for parent in (package, package.parent, package.parent.parent):
        (parent / "__init__.py").touch()
    (package / "api_server.py").write_text(MODULE)
    return ":".join(map(str, (folder, SUPPORT, SUPPORT.parents[1])))


def pages(num_tokens: int, nbytes: int) -> bytes:
    """What every engine computes for a prompt of so many tokens."""
    return random.Random(num_tokens).randbytes(nbytes)


class StandIn:
    """The engine, connected to its agent."""

    def __init__(self, instance: str, agent_socket: Path) -> None:
        self._agent = EngineConnection(agent_socket, instance)
        self._http = OpenAiEngine(instance)
        self._http.load = self._moved

    async def serve(self, host: str, port: int) -> None:
        """Serve until SIGTERM."""
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        self._agent.client.start(self._agent)
        await self._http.start(host, port)
        await stop.wait()
        await self._http.stop()
        self._agent.client.close()

    async def _moved(self, params: dict[str, Any]) -> str:
        return await asyncio.to_thread(
            self._send if params["role"] == "producer" else self._load, params
        )

    def _send(self, params: dict[str, Any]) -> str:
        opening = bytes.fromhex(params["transfer_id"]), params["attempt"]
        opened = self._agent.said(params["attempt"])
        nbytes = SMALL_LAYOUT.transfer_bytes(opened.num_tokens, opened.cached_tokens)
        self._agent.client.attach(*opening)
        self._agent.write(params["attempt"], pages(opened.num_tokens, nbytes))
        self._agent.client.ready(*opening, [(0, nbytes)])
        self._agent.client.prefill_end(*opening)
        return "prompt"

    def _load(self, params: dict[str, Any]) -> str:
        """Takes the landing, which must be right; else nothing is answered."""
        transfer_id = bytes.fromhex(params["transfer_id"])
        self._agent.client.watch(transfer_id)
        told = self._agent.next(60.0)
        while told[0] == "connected" or told[1] != params["transfer_id"]:
            told = self._agent.next(60.0)
        if told[0] == "failed":
            return "recomputed"
        about = self._agent.said(params["transfer_id"])
        nbytes = SMALL_LAYOUT.transfer_bytes(about.num_tokens, about.cached_tokens)
        landed = self._agent.read(params["transfer_id"], nbytes)
        self._agent.client.release(transfer_id)
        if landed != pages(about.num_tokens, nbytes):
            raise AssertionError("other KVCache landed than was sent")
        return "landing"


def main() -> None:
    """Serve as the command line of vLLM's API server says."""

    def option(name: str) -> str:
        return sys.argv[sys.argv.index(name) + 1]

    extra = json.loads(option("--kv-transfer-config"))["kv_connector_extra_config"]
    engine = StandIn(extra["instance"], Path(extra["agent_socket"]))
    asyncio.run(engine.serve(option("--host"), int(option("--port"))))
