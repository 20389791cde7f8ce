"""`prfaas gateway` as a process: it says when it is ready, drains on SIGTERM, and leaves."""

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest
from eventually import eventually
from serving_process import gateway_file, only_engine, serving, started
from typer.testing import CliRunner

from deploy.cli import app


def write(folder: Path, engine_url: str) -> Path:
    prefill = [{"name": "far", "front": "127.0.0.1:1"}]
    return gateway_file(folder / "gateway.yaml", only_engine(engine_url), prefill=prefill)


async def until_draining(region: Any, url: str) -> None:
    async def readiness() -> Any:
        async with region.session.get(f"{url}/readyz") as response:
            return await response.text()

    await eventually(readiness, lambda text: text == "draining\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_it_serves_drains_and_leaves(region: Any, tmp_path: Path, number: int) -> None:
    file = write(tmp_path, region.engine.url)
    async with serving("gateway", file, "--port", "0") as (process, ready):
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


async def test_a_second_signal_does_not_wait(region: Any, tmp_path: Path) -> None:
    file = write(tmp_path, region.engine.url)
    async with serving("gateway", file, "--port", "0") as (process, ready):
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


def test_mistakes_end_it_with_a_message(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text("gateway: {models: []}\n")
    result = CliRunner().invoke(app, ["gateway", "--config", str(path)])
    assert result.exit_code == 2
    assert "gateway.models" in result.stderr
    assert isinstance(result.exception, SystemExit)


async def test_a_taken_port_ends_it_with_a_message(region: Any, tmp_path: Path) -> None:
    port = region.url.rpartition(":")[2]
    file = write(tmp_path, region.engine.url)
    process = await started("gateway", file, "--port", port, stderr=asyncio.subprocess.PIPE)
    _, errors = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 1
    assert b"cannot serve on" in errors
