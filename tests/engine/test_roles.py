"""Instances change between prefill and decode under load, and no request hears of it.

One PD cluster of three engines without a prefill cluster; prompts above 256 tokens are handed from
a prefill to a decode instance. Nothing is cached, so that every answer is computed in the roles of
its time. The right answers are those that the region gave before anything changed.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from bench_smoke import run_smoke
from engine_region import (
    WINDOW,
    ask_region,
    everything_is_given_back,
    model_dir,
    prompt,
    records,
    region_spec,
    running,
)

from deploy.demo.answers import Answer
from deploy.demo.reference import decided_answers
from deploy.demo.regions import pd_cluster_alone
from deploy.demo.scenario import DemoRequest
from deploy.demo.tiny_specs import MODELS
from deploy.region.launcher import RunningRegion
from deploy.region.spec import RegionInstance, RegionSpec

pytestmark = pytest.mark.asyncio

HANDED_OFF_TOKENS = (300, 700, 1200)
LENGTHS = (40, 200, *HANDED_OFF_TOKENS)
NUM_CLIENTS = 3


class Load:
    """Clients that ask the same prompts again and again; `answers` by request name."""

    def __init__(self, region: RunningRegion, asked: list[DemoRequest]) -> None:
        self.answers: dict[str, Answer] = {}
        self._region = region
        self._asked = asked
        self._rounds = count()

    async def one_round(self) -> list[str]:
        """Every prompt once, one after the other; the names they were asked by."""
        number = next(self._rounds)
        requests = [
            replace(request, name=f"{request.name} #{number}", wave=wave)
            for wave, request in enumerate(self._asked)
        ]
        self.answers |= await ask_region(self._region, WINDOW, requests)
        return [request.name for request in requests]

    @asynccontextmanager
    async def all_the_while(self) -> AsyncIterator[None]:
        is_over = asyncio.Event()

        async def keep_asking() -> None:
            while not is_over.is_set():
                await self.one_round()

        clients = [asyncio.create_task(keep_asking()) for _ in range(NUM_CLIENTS)]
        try:
            yield
            is_over.set()
            await asyncio.gather(*clients)
        finally:
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)


async def test_roles_change_under_load_and_lose_no_request(
    models_dir: Path, tmp_path: Path
) -> None:
    async with running(_spec(model_dir(models_dir, WINDOW)), tmp_path / "r") as region:
        prompts = [
            prompt(f"{length}", length, 600 + length, stream=bool(index % 2))
            for index, length in enumerate(LENGTHS)
        ]
        asked, expected = await decided_answers(
            region.gateway_url, MODELS[WINDOW], prompts, lambda *_: None
        )
        load = Load(region, asked)
        async with load.all_the_while():
            await become(region, "b1-d1", "prefill", epoch=1)
            # Now a decode instance is the only one that prefills, and the other way round.
            await become(region, "b1-p0", "decode", epoch=1)
            swapped = await load.one_round()
            refusal = await order(region, "b1-d1", "decode")
            assert refusal["error"]["code"] == "last_of_its_role", refusal
            await become(region, "b1-p0", "prefill", epoch=2)
            await become(region, "b1-d1", "decode", epoch=2)
        await load.one_round()
        for name, answer in load.answers.items():
            assert not answer.error, (name, answer.error)
            assert answer.token_ids == expected[name.partition(" #")[0]].token_ids, name
        await assert_roles_were_those_of_the_time(region, load, swapped)
        # The bench of the long-term loop and of admission, at its smallest size.
        await asyncio.to_thread(run_smoke, "region", tmp_path, "--gateway", region.gateway_url)
        await everything_is_given_back(region, nodes=("b1",))


async def become(region: RunningRegion, instance: str, role: str, *, epoch: int) -> None:
    """Order it and wait for it."""
    answer = await order(region, instance, role)
    assert (answer.get("role"), answer.get("epoch")) == (role, epoch), answer


async def order(region: RunningRegion, instance: str, role: str) -> dict[str, Any]:
    url = f"{region.gateway_url}/v1/pd_role?wait=1"
    async with aiohttp.ClientSession() as session:
        async with session.post(url, json={"instance": instance, "role": role}) as response:
            answer: dict[str, Any] = await response.json()
    return answer


async def assert_roles_were_those_of_the_time(
    region: RunningRegion, load: Load, swapped: list[str]
) -> None:
    listed = await records(region)
    for record in listed.values():
        assert (record["prefill_error"], record["num_retries"]) == ("", 0), record
    for name in swapped:
        record = listed[load.answers[name].request_id]
        if int(name.partition(" #")[0]) in HANDED_OFF_TOKENS:
            assert record["prefill_instance"] == "b1-d1", record
        assert record["decode_instance"] in ("b1-d0", "b1-p0"), record


def _spec(path: Path) -> RegionSpec:
    # Nothing but the orders of this test changes a role, one right after the other.
    scheduling = {"long_term": {"mode": "off", "dwell_s": 0}}
    spec = region_spec(path, WINDOW, prefix_caching=False, scheduling=scheduling)
    instances = (
        RegionInstance(name="b1-p0", role="prefill"),
        RegionInstance(name="b1-d0", role="decode"),
        RegionInstance(name="b1-d1", role="decode"),
    )
    return pd_cluster_alone(spec, instances)
