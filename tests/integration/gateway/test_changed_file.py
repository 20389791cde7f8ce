"""The file of a `prfaas gateway` changes while it runs: limits and rights do, the rest is named."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from eventually import eventually
from serving_process import gateway_file, only_engine, serving

BODY = {"model": "tiny", "prompt": "x"}


class RunningGateway:
    """A `prfaas gateway` and the file that it follows."""

    def __init__(self, region: Any, folder: Path) -> None:
        self._region = region
        self.file = folder / "gateway.yaml"
        self.keys = folder / "keys"
        self.log = folder / "log"
        self.keys.write_text("acme one\nother two\nops three\n")
        self.url = ""
        self.streams: list[aiohttp.ClientResponse] = []
        """Held, because one that nobody holds is closed."""

    def write(self, **gateway: Any) -> None:
        """Replace the file in one step; `gateway` is what its section has besides a model."""
        pd, keys = only_engine(self._region.engine.url), str(self.keys)
        new = self.file.with_name("new")
        gateway_file(new, pd, gateway=gateway, api_keys_file=keys).replace(self.file)

    def replace(self, text: str) -> None:
        new = self.file.with_name("new")
        new.write_text(text)
        new.replace(self.file)

    def limit(self, **limits: int) -> None:
        self.write(scheduling={"admission": {"tenants": {"acme": limits}}})

    async def said(self, text: str, times: int = 1) -> None:
        """Wait until the log has it so often."""
        await eventually(
            lambda: asyncio.to_thread(self.log.read_text), lambda log: log.count(text) >= times
        )

    async def ask(self, key: str, path: str = "/v1/completions", **fields: Any) -> tuple[int, str]:
        """Status and text of the answer; of a stream that began, its first bytes."""
        url, headers = self.url + path, {"Authorization": f"Bearer {key}"}
        session: aiohttp.ClientSession = self._region.session
        if not path.startswith("/v1/completions"):
            async with session.get(url, headers=headers) as page:
                return page.status, await page.text()
        answer = await session.post(url, json=BODY | fields, headers=headers)
        if fields.get("stream") and answer.status == 200:
            self.streams.append(answer)
            return answer.status, (await answer.content.readany()).decode()
        return answer.status, await answer.text()


@pytest.fixture
async def gateway(region: Any, tmp_path: Path) -> AsyncIterator[RunningGateway]:
    running = RunningGateway(region, tmp_path)
    running.limit(max_requests=1)
    with running.log.open("wb") as log:
        async with serving("gateway", running.file, "--port", "0", stderr=log) as (_, ready):
            running.url = ready["url"]
            yield running
            for stream in running.streams:
                stream.close()


async def test_requests_in_flight_count_towards_limits_that_change(
    region: Any, gateway: RunningGateway
) -> None:
    region.engine.next_token.clear()
    assert (await gateway.ask("one", stream=True))[0] == 200
    status, text = await gateway.ask("one", stream=True)
    assert (status, "1 of at most 1 requests" in text) == (429, True)
    gateway.limit(max_requests=2)
    await gateway.said("changed without a restart: gateway.scheduling.admission.tenants")
    assert (await gateway.ask("one", stream=True))[0] == 200
    status, text = await gateway.ask("one", stream=True)
    assert (status, "2 of at most 2 requests" in text) == (429, True)
    gateway.limit(max_requests=1, max_tokens=10**9)
    await eventually(
        lambda: gateway.ask("one", stream=True),
        lambda answer: "2 of at most 1 requests" in answer[1],
    )
    assert (await gateway.ask("two", stream=True))[0] == 200
    region.engine.next_token.set()
    await region.until(lambda: region.engine.num_serving == 0)
    await eventually(lambda: gateway.ask("one"), lambda answer: answer[0] == 200)


async def test_a_file_that_cannot_be_used_changes_nothing(gateway: RunningGateway) -> None:
    for number, text in enumerate(("gateway: [", "", "gateway: {models: [{name: tiny}]}"), 1):
        gateway.replace(text)
        await gateway.said("settings stay as they were", times=number)
    # A tenant without a key: as at the start, somebody has mistyped a name.
    gateway.write(scheduling={"admission": {"tenants": {"acmee": {"max_requests": 1}}}})
    await gateway.said("no API key has the name 'acmee'")
    assert (await gateway.ask("one"))[0] == 200
    # It gets its key after its limits: then the file is right without a change of it.
    gateway.keys.write_text("acmee one\nother two\nops three\n")
    await gateway.said("changed without a restart: gateway.scheduling.admission.tenants")


async def test_what_needs_a_restart_is_named_and_the_rest_changes(gateway: RunningGateway) -> None:
    assert (await gateway.ask("three", "/prfaas/region"))[0] == 403
    gateway.write(
        operators=["ops"], threshold_tokens=5, timeouts={"drain_s": 7}, port=1, max_in_flight=9
    )
    await gateway.said(
        "changed, but needs a restart of the gateway: gateway.port, gateway.threshold_tokens, "
        "gateway.timeouts.drain_s"
    )
    await gateway.said(
        "changed without a restart: gateway.operators, gateway.scheduling.admission.tenants, "
        "gateway.max_in_flight"
    )
    assert (await gateway.ask("two", "/prfaas/region"))[0] == 403
    assert (await gateway.ask("three", "/prfaas/region"))[0] == 200
    gateway.write()
    # At its start, and now again.
    await gateway.said("no API key opens the pages of operators", times=2)
