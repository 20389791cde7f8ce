"""A gateway that ends, or is killed, and starts again: it predicts as the one before."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from eventually import eventually

from deploy.gateway.config import ModelConfig
from deploy.gateway.sharing.state_file import about, decoded

RUN = "import typer; from deploy.gateway.cli import gateway_command as c; typer.run(c)"
LENGTHS = (100, 900, 4000, 250, 12_000) * 3


def write(folder: Path, engine_url: str) -> Path:
    instance = {"name": "d0", "url": engine_url, "agent": "127.0.0.1:1", "model": "tiny"}
    content = {
        "gateway": {"models": [{"name": "tiny"}], "state": str(folder / "learned")},
        "pd": {"name": "home", "instances": [instance]},
        "log_dir": str(folder),
    }
    path = folder / "gateway.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@asynccontextmanager
async def running(path: Path, number: int) -> AsyncIterator[str]:
    """The URL of a gateway that gets this signal at the end."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", RUN, "--config", str(path), "--port", "0"),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        ready = json.loads(await asyncio.wait_for(process.stdout.readline(), 60))
        yield ready["url"]
        process.send_signal(number)
        await asyncio.wait_for(process.wait(), 60)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def scheduling(region: Any, url: str) -> Any:
    async with region.session.get(url + "/prfaas/scheduling") as response:
        assert response.status == 200
        return await response.json()


def learnt(page: Any) -> Any:
    """The numbers on which predictions rest."""
    (model,) = page["models"]
    return {
        "bytes_per_token": model["bytes_per_token"],
        "decode_s": model["decode_s"],
        "step_s": model["step_s"],
        "output_tokens": model["traffic"]["output_tokens"],
    } | {
        f"{place['place']} {number}": coefficients
        for place in model["places"]
        for number, coefficients in enumerate(place["coefficients"])
    }


def num_written(folder: Path) -> int:
    """The number of answers that the file knows of."""
    try:
        data = (folder / "learned").read_bytes()
    except FileNotFoundError:
        return 0
    state = decoded(data, about((ModelConfig(name="tiny"),)), 0.0).state
    return state.models["tiny"].decode.num_seen


async def ask(region: Any, url: str) -> None:
    for num_bytes in LENGTHS:
        body = {"model": "tiny", "prompt": "x" * num_bytes, "stream": True}
        body["stream_options"] = {"include_usage": True}
        async with region.session.post(url + "/v1/completions", json=body) as response:
            assert response.status == 200
            await response.read()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_a_restarted_process_goes_on(region: Any, tmp_path: Path, number: int) -> None:
    path = write(tmp_path, region.engine.url)
    async with running(path, number) as url:
        await ask(region, url)
        before = learnt(await scheduling(region, url))
        if number == signal.SIGKILL:
            await eventually(lambda: num_written(tmp_path) >= len(LENGTHS))
    async with running(path, signal.SIGTERM) as url:
        after = learnt(await scheduling(region, url))
    assert after == {name: pytest.approx(value, rel=0.05) for name, value in before.items()}


async def test_the_next_gateway_predicts_as_the_one_before(
    open_region: Any, tmp_path: Path
) -> None:
    state = tmp_path / "learned"
    async with open_region(prefill=(), state=state) as region:
        await ask(region, region.url)
        before = await scheduling(region, region.url)
    assert sum(place["num_seen"] for place in before["models"][0]["places"]) >= 3
    async with open_region(prefill=(), state=state) as region:
        after = await scheduling(region, region.url)
    expected = {name: pytest.approx(value, rel=0.05) for name, value in learnt(before).items()}
    assert learnt(after) == expected
