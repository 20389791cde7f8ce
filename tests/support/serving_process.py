"""`prfaas gateway`, `prefill` and `pd` as processes, started with a file that a test writes."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml

COMMANDS = {
    "gateway": ("deploy.gateway.cli", "gateway_command"),
    "prefill": ("prfaas.cli", "prefill_command"),
    "pd": ("local_pd.cli", "pd_command"),
}
READY_S = 90


def only_engine(url: str) -> dict[str, Any]:
    """The instances of a cluster that is one engine, whose node agent nobody needs."""
    return {"instances": [{"name": "d0", "url": url, "agent": "127.0.0.1:1", "model": "tiny"}]}


def gateway_file(path: Path, pd: Mapping[str, Any], **sections: Any) -> Path:
    """Write the file of a gateway of one model, with a PD cluster called home."""
    gateway = {"models": [{"name": "tiny"}], **sections.pop("gateway", {})}
    content = {"gateway": gateway, "pd": {"name": "home", **pd}, "log_dir": str(path.parent)}
    path.write_text(yaml.safe_dump(content | sections))
    return path


async def started(command: str, file: Path, *words: str, **how: Any) -> asyncio.subprocess.Process:
    """The process, whose output can be read; `how` is for `create_subprocess_exec`."""
    module, function = COMMANDS[command]
    code = f"import typer; from {module} import {function}; typer.run({function})"
    argv = (sys.executable, "-c", code, "--config", str(file), *words)
    return await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE, **how)


@asynccontextmanager
async def serving(
    command: str, file: Path, *words: str, **how: Any
) -> AsyncIterator[tuple[asyncio.subprocess.Process, Any]]:
    """The process once it is ready, and what it said then. It is killed if it outlives the test."""
    process = await started(command, file, *words, **how)
    try:
        assert process.stdout is not None
        async with asyncio.timeout(READY_S):
            line = await process.stdout.readline()
        yield process, json.loads(line)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()
