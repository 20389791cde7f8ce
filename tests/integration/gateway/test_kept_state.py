"""A gateway that ends, or is killed, and starts again: it predicts as the one before."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from eventually import eventually
from serving_process import gateway_file, only_engine, serving

from deploy.gateway.config import ModelConfig
from deploy.gateway.sharing.state_file import about, decoded

LENGTHS = (100, 900, 4000, 250, 12_000) * 3


@asynccontextmanager
async def running(folder: Path, engine_url: str, number: int) -> AsyncIterator[str]:
    """The URL of a gateway that gets this signal at the end."""
    state = {"state": str(folder / "learned")}
    file = gateway_file(folder / "gateway.yaml", only_engine(engine_url), gateway=state)
    async with serving("gateway", file, "--port", "0") as (process, ready):
        yield ready["url"]
        process.send_signal(number)
        await asyncio.wait_for(process.wait(), 60)


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
    async with running(tmp_path, region.engine.url, number) as url:
        await ask(region, url)
        before = learnt(await scheduling(region, url))
        if number == signal.SIGKILL:
            await eventually(lambda: num_written(tmp_path) >= len(LENGTHS))
    async with running(tmp_path, region.engine.url, signal.SIGTERM) as url:
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
