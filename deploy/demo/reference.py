"""One plain vLLM engine, without our connector: what a region's answers are compared with."""

import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp

from deploy.demo.tiny_specs import TinyModel
from kvmanager.engines.command import EngineSpec
from kvmanager.engines.supervisor import Supervisor, engine_process

START_TIMEOUT_S = 300.0


@contextlib.asynccontextmanager
async def plain_engine(
    model: TinyModel,
    path: Path,
    log_dir: Path,
    progress: Callable[[str], None] | None = None,
) -> AsyncIterator[str]:
    """Start the engine, give its URL, stop it. Raises EngineStartFailed with its last log lines."""
    log_dir.mkdir(parents=True, exist_ok=True)
    spec = EngineSpec(
        instance=f"plain-{model.name}",
        model=str(path),
        served_name=model.name,
        port=_free_port(),
        dtype=model.dtype,
        max_model_len=model.max_model_len,
        kv_space_gib=1,
        enforce_eager=True,
        args=model.engine_args,
    )

    async def is_healthy() -> bool:
        async with session.get(f"{spec.url}/health") as response:
            return response.status == 200

    async with aiohttp.ClientSession() as session:
        supervisor = Supervisor(engine_process(spec, log_dir), is_healthy)
        supervisor.start()
        try:
            await supervisor.wait_healthy(START_TIMEOUT_S, progress)
            yield spec.url
        finally:
            await supervisor.stop()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
