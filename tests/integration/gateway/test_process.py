"""`prfaas gateway` as a process: it says when it is ready, drains on SIGTERM, and leaves."""

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from eventually import eventually
from typer.testing import CliRunner

from deploy.cli import app

RUN = "import typer; from deploy.gateway.cli import gateway_command as c; typer.run(c)"


async def start(path: Path, *options: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", RUN, "--config", str(path), "--port", "0", *options),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def end_of(process: asyncio.subprocess.Process) -> tuple[int | None, bytes]:
    """Exit status and standard error of a process that should end by itself."""
    try:
        _, errors = await asyncio.wait_for(process.communicate(), 60)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode, errors


def write(folder: Path, engine_url: str) -> Path:
    instance = {"name": "d0", "url": engine_url, "agent": "127.0.0.1:1", "model": "tiny"}
    content = {
        "gateway": {"models": [{"name": "tiny"}]},
        "pd": {"name": "home", "instances": [instance]},
        "prefill": [{"name": "far", "front": "127.0.0.1:1"}],
        "log_dir": str(folder),
    }
    path = folder / "gateway.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


async def until_draining(region: Any, url: str) -> None:
    async def readiness() -> Any:
        async with region.session.get(f"{url}/readyz") as response:
            return await response.text()

    await eventually(readiness, lambda text: text == "draining\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_it_serves_drains_and_leaves(region: Any, tmp_path: Path, number: int) -> None:
    process = await start(write(tmp_path, region.engine.url))
    try:
        assert process.stdout is not None
        ready = json.loads(await asyncio.wait_for(process.stdout.readline(), 20))
        assert ready["event"] == "ready"
        region.engine.first_token.clear()
        body = {"model": "tiny", "prompt": "x" * 3000, "stream": True}
        url = ready["url"] + "/v1/completions"
        asking = asyncio.create_task(region.session.post(url, json=body))
        await region.until(lambda: region.engine.num_serving == 1)
        process.send_signal(number)
        await until_draining(region, ready["url"])
        assert process.returncode is None
        region.engine.first_token.set()
        async with await asking as response:
            assert response.status == 200
            assert response.headers["x-prfaas-reason"].startswith("prefill_cluster_unhealthy")
            assert (await response.read()).endswith(b"data: [DONE]\n\n")
        assert await asyncio.wait_for(process.wait(), 15) == 0
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_a_second_signal_does_not_wait(region: Any, tmp_path: Path) -> None:
    process = await start(write(tmp_path, region.engine.url))
    try:
        assert process.stdout is not None
        ready = json.loads(await asyncio.wait_for(process.stdout.readline(), 20))
        region.engine.first_token.clear()
        url = ready["url"] + "/v1/completions"
        body = {"model": "tiny", "prompt": "x"}
        asking = asyncio.create_task(region.session.post(url, json=body))
        await region.until(lambda: region.engine.num_serving == 1)
        process.send_signal(signal.SIGTERM)
        # The kernel makes one of two signals that wait together.
        await until_draining(region, ready["url"])
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 15) == 0
        await region.until(lambda: region.engine.num_aborted == 1)
        await asyncio.gather(asking, return_exceptions=True)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def test_mistakes_end_it_with_a_message(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text("gateway: {models: []}\n")
    result = CliRunner().invoke(app, ["gateway", "--config", str(path)])
    assert result.exit_code == 2
    assert "gateway.models" in result.stderr
    assert isinstance(result.exception, SystemExit)


async def test_a_taken_port_ends_it_with_a_message(region: Any, tmp_path: Path) -> None:
    port = region.url.rpartition(":")[2]
    status, errors = await end_of(await start(write(tmp_path, region.engine.url), "--port", port))
    assert status == 1
    assert b"cannot serve on" in errors
