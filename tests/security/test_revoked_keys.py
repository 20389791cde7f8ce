"""A key that is taken away opens nothing any more, and ends what it had opened."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from eventually import eventually

from deploy.gateway.api_keys import load_api_keys

STREAM = {"model": "tiny", "prompt": "x", "stream": True}


def write(path: Path, text: str | None) -> None:
    """None: no file."""
    if text is None:
        path.unlink()
    else:
        path.write_text(text)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.write_text("acme one\nmallory two\nmallory three\n")
    return file


@pytest.fixture
def opened(open_region: Any, path: Path) -> Any:
    """Opens a region with the keys of the file, which it follows."""
    return lambda: open_region(api_keys=load_api_keys(path), owned={"keys_file": path})


def using(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def status_of(region: Any, key: str) -> int:
    body = {"model": "tiny", "prompt": "x"}
    return int((await region.post(body, headers=using(key)))[0])


async def until_status(region: Any, key: str, status: int) -> None:
    async def is_so() -> bool:
        # A request that is under way when its key is taken away is cut off.
        with suppress(aiohttp.ClientError):
            return await status_of(region, key) == status
        return False

    await eventually(is_so)


async def test_streams_of_a_revoked_key_end_and_others_go_on(opened: Any, path: Path) -> None:
    async with opened() as region:
        region.engine.next_token.clear()
        url = region.url + "/v1/completions"
        streams = {}
        for key in ("one", "two", "three"):
            streams[key] = await region.session.post(url, json=STREAM, headers=using(key))
            assert streams[key].status == 200
            assert await streams[key].content.readany()
        write(path, "acme one\nmallory three\n")
        with pytest.raises(aiohttp.ClientError):
            await asyncio.wait_for(streams["two"].read(), 30)
        await region.until(lambda: region.engine.num_aborted == 1)
        assert await status_of(region, "two") == 401
        region.engine.next_token.set()
        for key in ("one", "three"):
            assert (await streams[key].read()).endswith(b"data: [DONE]\n\n")


async def test_what_waits_for_its_engine_with_a_revoked_key_ends(opened: Any, path: Path) -> None:
    async with opened() as region:
        region.engine.first_token.clear()
        asking = asyncio.create_task(status_of(region, "two"))
        await region.until(lambda: region.engine.num_serving == 1)
        write(path, "acme one\n")
        with pytest.raises(aiohttp.ClientError):
            await asyncio.wait_for(asking, 30)
        await region.until(lambda: region.engine.num_serving == 0)
        await region.until(lambda: region.gateway.num_in_flight == 0)


async def test_a_new_key_is_taken_without_a_restart(opened: Any, path: Path) -> None:
    async with opened() as region:
        assert await status_of(region, "four") == 401
        write(path, "acme one\nnew four\n")
        await until_status(region, "four", 200)


async def test_a_key_that_changes_hands_serves_its_new_tenant_only(opened: Any, path: Path) -> None:
    async with opened() as region:
        region.engine.next_token.clear()
        url = region.url + "/v1/completions"
        stream = await region.session.post(url, json=STREAM, headers=using("two"))
        assert await stream.content.readany()
        write(path, "acme one\nacme two\n")
        with pytest.raises(aiohttp.ClientError):
            await asyncio.wait_for(stream.read(), 30)
        region.engine.next_token.set()
        assert await status_of(region, "two") == 200
        assert region.gateway.records[-1].tenant == "acme"


@pytest.mark.parametrize("text", ["", "# none\n", "a b c d\n", "acme one\nother one\n", None])
async def test_a_file_that_cannot_be_used_opens_nothing(
    opened: Any, path: Path, text: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened() as region:
        write(path, text)
        await eventually(lambda: "the API keys stay as they were" in caplog.text)
        headers = {"Authorization": "Bearer"}
        body = {"model": "tiny", "prompt": "x"}
        assert (await region.post(body))[0] == 401
        assert (await region.post(body, headers=headers))[0] == 401
        assert await status_of(region, "one") == 200
        write(path, "acme two\n")
        await until_status(region, "one", 401)
