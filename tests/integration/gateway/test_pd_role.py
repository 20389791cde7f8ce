"""`/v1/pd_role` over HTTP, on a PD cluster front with fake engines, while requests run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest
from eventually import eventually
from front_access import gateway_url, pd_cluster, running
from front_doubles import FakeAgent, FakeEngine, looked_at
from untimed_gateway import NOT_TIMED

from deploy.gateway.api_keys import ApiKey
from deploy.gateway.app import Gateway
from deploy.gateway.config import GatewayConfig, ModelConfig
from deploy.gateway.scheduling.config import LongTermSection, SchedulingConfig
from local_pd.embedded import EmbeddedPdCluster, PdClusterConfig
from prfaas.engines.health import ProbeTiming
from prfaas.engines.instances import InstancesConfig

ROLES = {"d0": "decode", "d1": "decode", "p0": "prefill"}
KEYS = {"Authorization": "Bearer secret"}


class Rig:
    """Two decode instances and a prefill instance behind a gateway."""

    def __init__(self) -> None:
        self.url = ""
        self.pd: EmbeddedPdCluster
        self.engines: dict[str, FakeEngine] = {}
        self.session: aiohttp.ClientSession

    async def ask(self) -> int:
        body = {"model": "tiny", "prompt": "x"}
        async with self.session.post(
            f"{self.url}/v1/completions", json=body, headers=KEYS
        ) as answer:
            await answer.read()
            return answer.status

    async def order(self, query: str = "", **body: Any) -> tuple[int, dict[str, Any]]:
        url = f"{self.url}/v1/pd_role{query}"
        async with self.session.post(url, json=body, headers=KEYS) as answer:
            return answer.status, await answer.json()

    async def roles(self) -> dict[str, tuple[str, int]]:
        async with self.session.get(f"{self.url}/v1/pd_role", headers=KEYS) as answer:
            listed = (await answer.json())["instances"]
        return {item["instance"]: (item["role"], item["epoch"]) for item in listed}


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    made = Rig()
    async with AsyncExitStack() as stack:
        node = await running(stack, FakeAgent(*ROLES))
        for name in ROLES:
            made.engines[name] = await running(stack, FakeEngine(node))
        specs = [made.engines[name].spec(name, ROLES[name], model="tiny") for name in ROLES]
        probing = InstancesConfig(
            probes=ProbeTiming(interval_s=0.05, start_interval_s=0.05), poll_load=True
        )
        settings = PdClusterConfig(drain_poll_interval_s=0.02, instances=probing)
        pd = made.pd = pd_cluster("home", specs, settings)
        await pd.start()
        # Several gateways shared the region before, and one of them led.
        await pd.resume("d0", leader=int(time.time() * 1000) - 60_000)
        stack.push_async_callback(pd.close)
        config = GatewayConfig(
            port=0,
            models=(ModelConfig(name="tiny"),),
            api_keys=(ApiKey(key="secret", name="ops"), ApiKey(key="other", name="acme")),
            operators=("ops",),
            report_interval_s=0.02,
            scheduling=SchedulingConfig(
                long_term=LongTermSection(dwell_s=0, mode="off"), calibration=NOT_TIMED
            ),
        )
        made.url = await gateway_url(stack, Gateway(config, [pd], {}))
        made.session = await stack.enter_async_context(aiohttp.ClientSession())
        yield made


async def test_roles_change_there_and_back_while_requests_run(rig: Rig) -> None:
    is_over = asyncio.Event()

    async def keep_asking() -> list[int]:
        statuses = []
        while not is_over.is_set():
            statuses.append(await rig.ask())
        return statuses

    clients = [asyncio.create_task(keep_asking()) for _ in range(4)]
    assert await rig.roles() == {name: (role, 0) for name, role in ROLES.items()}
    status, role = await rig.order("?wait=1", instance="d1", role="prefill", expected_epoch=0)
    assert (status, role["role"], role["epoch"], role["phase"]) == (200, "prefill", 1, "ready")
    assert (await rig.roles())["d1"] == ("prefill", 1)
    num_given = len(rig.engines["d1"].posted)
    for _ in range(20):
        assert await rig.ask() == 200
    assert len(rig.engines["d1"].posted) == num_given
    status, refusal = await rig.order(instance="d0", role="prefill")
    assert (status, refusal["error"]["code"]) == (409, "last_of_its_role")
    assert (await rig.order(instance="d1", role="decode", wait=True))[0] == 200
    assert (await rig.roles())["d1"] == ("decode", 2)
    is_over.set()
    statuses = [status for client in clients for status in await client]
    assert set(statuses) == {200}
    assert len(statuses) > 20
    async with rig.session.get(f"{rig.url}/metrics", headers=KEYS) as answer:
        text = await answer.text()
    for to in ("prefill", "decode"):
        labels = f'cluster="home",outcome="converted",to="{to}"'
        assert f"prfaas_gateway_role_changes_total{{{labels}}} 1.0" in text


async def test_orders_need_an_operators_key_and_are_answered_at_once(rig: Rig) -> None:
    url = f"{rig.url}/v1/pd_role"
    async with rig.session.get(url) as answer:
        assert answer.status == 401
    async with rig.session.post(url, json={"instance": "d1", "role": "prefill"}) as answer:
        assert answer.status == 401
    tenant = {"Authorization": "Bearer other"}
    async with rig.session.post(
        url, json={"instance": "d1", "role": "prefill"}, headers=tenant
    ) as answer:
        assert answer.status == 403
        assert (await answer.json())["error"]["code"] == "not_an_operator"
    rig.engines["d1"].first_token.clear()
    hanging = [asyncio.create_task(rig.ask()) for _ in range(2)]
    await rig.engines["d1"].wait_requests(1)
    status, role = await rig.order(instance="d1", role="prefill")
    assert (status, role["role"], role["phase"], role["ready"]) == (
        202,
        "decode",
        "draining",
        False,
    )
    await looked_at(rig.engines["d1"])
    assert (await rig.roles())["d1"] == ("decode", 0)
    rig.engines["d1"].first_token.set()
    assert await asyncio.gather(*hanging) == [200, 200]
    await eventually(rig.roles, lambda roles: roles["d1"] == ("prefill", 1))


async def test_a_front_that_follows_another_gateway_says_so(rig: Rig) -> None:
    await rig.pd.drain("d0", leader=int(time.time() * 1000) + 60_000)
    status, said = await rig.order(instance="d0", role="decode")
    assert (status, said["error"]["code"]) == (409, "not_leader")
    assert "another gateway leads" in said["error"]["message"]
