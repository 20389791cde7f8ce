"""Instances join and leave a region that serves: real fronts in a real gateway, fake engines."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest
from eventually import eventually
from front_access import gateway_url, pd_cluster, prefill_cluster, ready
from front_doubles import FakeAgent, FakeEngine
from openai_engine import OpenAiEngine
from untimed_gateway import UNTIMED

from deploy.gateway.app import Gateway
from deploy.gateway.cache.region_caches import RegionCaches
from deploy.gateway.config import GatewayConfig, ModelConfig
from kvmanager.agent.shared_clients import AgentClients
from kvmanager.directory.embedded import EmbeddedDirectory
from local_pd.embedded import PdClusterConfig
from prfaas.embedded import PrefillClusterConfig
from prfaas.engines.health import ProbeTiming
from prfaas.engines.instance import InstanceSpec
from prfaas.engines.instances import InstancesConfig
from prfaas.engines.prefill_run import RunnerConfig

PROBING = InstancesConfig(probes=ProbeTiming(interval_s=0.1, start_interval_s=0.05), poll_load=True)
PATH = "/prfaas/instances"


class Served:
    """A region with the decode engine `d0` and the prefill engine `p0`, and clients that ask it."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self.agents: dict[str, FakeAgent] = {}
        self.prefillers: dict[str, FakeEngine] = {}
        self.decoders: dict[str, OpenAiEngine] = {}
        self.gateway: Gateway
        self.session: aiohttp.ClientSession
        self.url = ""
        self.statuses: list[tuple[int, str]] = []

    async def agent(self, name: str) -> str:
        agent = self.agents[name] = await FakeAgent(name).start()
        self._stack.push_async_callback(agent.stop)
        return agent.target

    async def prefiller(self, name: str) -> dict[str, Any]:
        """A prefill engine whose KVCache lands, and the fields of an order to add it."""
        target = await self.agent(name)
        engine = self.prefillers[name] = FakeEngine(self.agents[name])
        engine.before_answer = self._land
        await engine.start()
        self._stack.push_async_callback(engine.stop)
        return {"name": name, "url": engine.url, "agent": target, "role": "prefill"}

    async def decoder(self, name: str) -> dict[str, Any]:
        target = await self.agent(name)
        engine = self.decoders[name] = OpenAiEngine(name)
        await engine.start()
        self._stack.push_async_callback(engine.stop)
        return {"name": name, "url": engine.url, "agent": target}

    def _land(self, body: dict[str, Any]) -> None:
        transfer_id = body["kv_transfer_params"]["prfaas"]["transfer_id"]
        for name, engine in self.decoders.items():
            if transfer_id in self.agents[name].landings:
                self.agents[name].end_landing(transfer_id, "complete")
                engine.tell(transfer_id, "landing")

    async def ask(self, length: int = 300) -> tuple[int, str]:
        body = {"model": "tiny", "prompt": "x" * length}
        async with self.session.post(self.url + "/v1/completions", json=body) as response:
            await response.read()
            return response.status, response.headers.get("x-prfaas-route", "")

    async def keep_asking(self) -> None:
        while True:
            self.statuses.append(await self.ask())
            self.statuses.append(await self.ask(20))

    async def order(self, **fields: Any) -> tuple[int, Any]:
        async with self.session.post(self.url + PATH, json=fields) as response:
            return response.status, await response.json()

    async def remove(self, name: str, **query: str) -> tuple[int, Any]:
        url = f"{self.url}{PATH}/{name}"
        async with self.session.delete(url, params=query) as response:
            return response.status, await response.json()

    async def phases(self) -> dict[str, str]:
        async with self.session.get(self.url + PATH) as response:
            listed = (await response.json())["instances"]
        return {item["instance"]: item["phase"] for item in listed}

    async def until_phases(self, **wanted: str) -> None:
        await eventually(self.phases, lambda found: found == wanted)


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with AsyncExitStack() as stack:
        made = Served(stack)
        runner = RunnerConfig(await_slice_s=0.5, cleanup_timeout_s=1.0)
        prefill = prefill_cluster(
            "far",
            [InstanceSpec.model_validate(await made.prefiller("p0"))],
            PrefillClusterConfig(instances=PROBING, runner=runner),
        )
        pd = pd_cluster(
            "home",
            [InstanceSpec.model_validate(await made.decoder("d0"))],
            PdClusterConfig(instances=PROBING, drain_poll_interval_s=0.05),
        )
        await ready(stack, prefill, pd)
        config = GatewayConfig(
            port=0,
            models=(ModelConfig(name="tiny"),),
            threshold_tokens=100,
            template_tokens=20,
            report_interval_s=0.05,
            scheduling=UNTIMED,
        )
        agents = AgentClients(None, None)
        directory = EmbeddedDirectory(agents.open)
        caches = RegionCaches(directory, agents.open, directory.follow)
        made.gateway = Gateway(config, [pd], {"far": prefill}, caches=caches)
        made.url = await gateway_url(stack, made.gateway)
        made.session = await stack.enter_async_context(aiohttp.ClientSession())
        yield made


async def test_instances_join_and_leave_under_load_and_no_request_fails(served: Served) -> None:
    clients = [asyncio.create_task(served.keep_asking()) for _ in range(4)]
    new_prefiller, new_decoder = await served.prefiller("p1"), await served.decoder("d1")
    for cluster, fields in (("far", new_prefiller), ("home", new_decoder)):
        status, answer = await served.order(cluster=cluster, **fields)
        assert (status, answer["phase"]) == (202, "joining")
    await eventually(lambda: bool(served.prefillers["p1"].requests))
    await eventually(lambda: bool(served.decoders["d1"].requests))
    await served.until_phases(p0="serving", p1="serving", d0="serving", d1="serving")

    for name in ("p0", "d0"):
        status, answer = await served.remove(name)
        assert (status, answer["phase"]) == (202, "leaving")
    await served.until_phases(p1="serving", d1="serving")
    num_before = len(served.statuses)
    asked = len(served.prefillers["p0"].requests), len(served.decoders["d0"].requests)
    await eventually(lambda: len(served.statuses) > num_before + 40)
    for client in clients:
        client.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    assert {status for status, _ in served.statuses} == {200}
    assert (200, "prefill_cluster") in served.statuses[num_before:]
    assert (len(served.prefillers["p0"].requests), len(served.decoders["d0"].requests)) == asked

    # Nothing of them is left.
    gateway = served.gateway
    assert gateway.members.copied == {}
    assert not gateway.members._leaving
    assert {node.node for node in gateway._caches.targets} == {  # type: ignore[union-attr]
        served.agents["p1"].target,
        served.agents["d1"].target,
    }
    async with served.session.get(served.url + "/metrics") as page:
        text = await page.text()
    assert "p0" not in text
    assert "d0" not in text


async def test_the_plan_is_solved_again_when_an_instance_has_joined(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.gateway.scheduling.long_term.SETTLE_S", 0.1)
    known = served.gateway.scheduler.live.members
    await served.ask()  # so that the scheduler has heard of those that there are
    assert known.num_changes == 0
    num_steps = len(served.gateway.long_term._decisions)
    await served.order(cluster="far", **await served.prefiller("p1"))
    await eventually(lambda: len(served.gateway.long_term._decisions) > num_steps)
    assert known.num_changes == 1


async def test_who_may_not_join_and_who_may_not_leave(served: Served) -> None:
    async def refused(wanted: int, code: str, **fields: Any) -> str:
        status, answer = await served.order(**fields)
        assert (status, answer["error"]["code"]) == (wanted, code)
        message: str = answer["error"]["message"]
        return message

    new = await served.prefiller("p1")
    agent = served.agents["p1"]
    assert "no cluster `nowhere`" in await refused(404, "unknown_cluster", cluster="nowhere", **new)
    assert "unknown fields: engine" in await refused(
        400, "invalid_body", cluster="far", engine={"args": ["x"]}, **new
    )
    assert "file:///x" in await refused(
        400, "invalid_body", cluster="far", **new | {"url": "file:///x"}
    )
    assert "127.0.0.1:1 cannot be used" in await refused(
        409, "refused", cluster="far", **new | {"agent": "127.0.0.1:1"}
    )
    assert "no engine called p7 is connected" in await refused(
        409, "refused", cluster="far", **new | {"name": "p7"}
    )
    # Weights and layouts are compared with all clusters: KVCache goes from one to another.
    agent.fingerprint, agent.weights = "cd" * 32, "weights-2"
    said = await refused(409, "refused", cluster="far", **new)
    assert "the weights are weights-2 at p1, but weights-1 at d0" in said
    agent.weights = "weights-1"
    assert "KVCache is laid out as fake (cdcdcdcdcdcdcdcd) at p1" in await refused(
        409, "refused", cluster="far", **new
    )
    assert "an instance p0 already" in await refused(
        409, "refused", cluster="far", **new | {"name": "p0", "agent": served.agents["p0"].target}
    )

    status, answer = await served.remove("d0")
    assert status == 409
    assert "d0 is the last usable instance that decodes" in answer["error"]["message"]
    assert (await served.remove("nobody"))[0] == 404
    assert (await served.remove("p0", limit="soon"))[0] == 400
    assert (await served.remove("d0", force="1"))[0] == 202
    await served.until_phases(p0="serving")
