"""The gateway over the real fronts and real node agents; only the engines' computing is fake."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from agent_process import SMALL_LAYOUT, AgentProcess, DrivenEngine
from front_doubles import FakeEngine as PrefillEngine
from live_region_cases import snapshot
from prometheus_client import CollectorRegistry
from untimed_gateway import UNTIMED

from deploy.gateway.app import Gateway
from deploy.gateway.config import GatewayConfig, ModelConfig
from deploy.gateway.server import start_server
from kvmanager.agent.messages import Reserve, ReserveReply, StatusReply
from local_pd.embedded import EmbeddedPdCluster, PdClusterConfig
from local_pd.metrics import PdMetrics
from prfaas.embedded import EmbeddedPrefillCluster, PrefillClusterConfig
from prfaas.engines.health import ProbeTiming
from prfaas.engines.instance import InstanceSpec
from prfaas.engines.instances import InstancesConfig
from prfaas.metrics import PrefillMetrics

pytestmark = pytest.mark.slow

PROBING = InstancesConfig(probes=ProbeTiming(interval_s=0.2, start_interval_s=0.1), poll_load=True)
BODY = {"model": "tiny", "prompt": "x" * 300}


class Whole:
    """A region with everything real but the engines."""

    def __init__(self, decoder: Any) -> None:
        self.decoder = decoder
        self.prefiller = PrefillEngine()
        self.sending: AgentProcess
        self.receiving: AgentProcess
        self.producer: DrivenEngine
        self.consumer: DrivenEngine
        self.pd: EmbeddedPdCluster
        self.gateway: Gateway
        self.url = ""
        self.sent = b""
        self.loaded = b""
        self.share = 1.0

    async def agent_status(self) -> StatusReply:
        """Of the node agent where KVCache lands."""
        return await self.pd._instances.by_name["d0"].agent.status(2.0)

    async def num_refused(self) -> float:
        """How many reservations that agent has refused."""
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://{self.receiving.ready['metrics']}/metrics") as response,
        ):
            lines = (await response.text()).splitlines()
        refused = 'prfaas_agent_refused_requests_total{method="Reserve"'
        return sum(float(line.split()[-1]) for line in lines if line.startswith(refused))

    def fill(self, body: dict[str, Any]) -> None:
        """What the connector does while the prefill runs."""
        params = body["kv_transfer_params"]["prfaas"]
        opening = bytes.fromhex(params["transfer_id"]), params["attempt"]
        self.producer.client.attach(*opening)
        self.sent = os.urandom(self.nbytes)
        self.producer.write(params["runs"], self.sent)
        self.producer.client.ready(*opening, [(0, int(self.nbytes * self.share))])
        if self.share == 1.0:
            self.producer.client.prefill_end(*opening)

    async def load(self, params: dict[str, Any]) -> str:
        """What the connector does before a decode."""
        transfer_id = bytes.fromhex(params["transfer_id"])
        self.consumer.client.watch(transfer_id)
        told = await asyncio.to_thread(self.consumer.next)
        if told[0] != "landed":
            return "recomputed"
        self.loaded = self.consumer.read(params["runs"], self.nbytes)
        self.consumer.client.release(transfer_id)
        return "landing"

    @property
    def nbytes(self) -> int:
        return SMALL_LAYOUT.transfer_bytes(len(BODY["prompt"]) - 1)

    async def memory_is_back(self) -> None:
        async with asyncio.timeout(15):
            while (await self.agent_status()).landing_bytes:
                await asyncio.sleep(0.05)

    async def routing_sees(self, is_enough: Callable[[float], bool]) -> None:
        """Wait until a request would find so much room for its landing."""
        async with asyncio.timeout(10):
            while (room := snapshot(self.gateway.scheduler, "tiny").landing_room_bytes) is None or (
                not is_enough(room)
            ):
                await asyncio.sleep(0.05)

    async def record(self) -> Any:
        async with asyncio.timeout(10):
            while not (latest := self.gateway.records) or not latest[-1].is_settled:
                await asyncio.sleep(0.01)
        return latest[-1]


def spec(name: str, url: str, agent: AgentProcess, role: str) -> InstanceSpec:
    return InstanceSpec.model_validate(
        {"name": name, "url": url, "agent": agent.ready["control"], "role": role}
    )


@pytest.fixture
async def whole(tmp_path: Path, lone_engine: Any) -> AsyncIterator[Whole]:
    made = Whole(lone_engine)
    lone_engine.load = made.load
    async with AsyncExitStack() as stack:
        made.sending = stack.enter_context(AgentProcess(tmp_path / "send"))
        receiving = AgentProcess(tmp_path / "receive", metrics_port=0)
        made.receiving = stack.enter_context(receiving)
        made.producer = stack.enter_context(DrivenEngine(made.sending, "p0"))
        made.consumer = stack.enter_context(DrivenEngine(made.receiving, "d0"))
        stack.callback(made.prefiller.may_answer.set)
        await made.prefiller.start()
        stack.push_async_callback(made.prefiller.stop)
        made.prefiller.before_answer = made.fill
        prefill = EmbeddedPrefillCluster(
            "far",
            [spec("p0", made.prefiller.url, made.sending, "prefill")],
            PrefillClusterConfig(instances=PROBING),
            metrics=PrefillMetrics(CollectorRegistry()),
        )
        made.pd = EmbeddedPdCluster(
            "home",
            [spec("d0", lone_engine.url, made.receiving, "both")],
            PdClusterConfig(instances=PROBING),
            metrics=PdMetrics(CollectorRegistry()),
        )
        for front in (prefill, made.pd):
            await front.start()
            stack.push_async_callback(front.close)
            await front.wait_ready(20)
        config = GatewayConfig(
            port=0,
            models=(ModelConfig(name="tiny"),),
            threshold_tokens=100,
            report_interval_s=0.05,
            scheduling=UNTIMED,
        )
        made.gateway = Gateway(
            config, [made.pd], {"far": prefill}, {("far", "home"): "far-to-home"}
        )
        runner = await start_server(made.gateway)
        stack.push_async_callback(runner.cleanup)
        host, port = runner.addresses[0][:2]
        made.url = f"http://{host}:{port}/v1/completions"
        yield made


async def ask(whole: Whole, **fields: Any) -> tuple[int, dict[str, str], bytes]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(whole.url, json=BODY | fields) as response,
    ):
        headers = {key.lower(): value for key, value in response.headers.items()}
        return response.status, headers, await response.read()


@pytest.mark.parametrize("stream", [False, True])
async def test_kvcache_moves_and_the_numbers_are_known(whole: Whole, stream: bool) -> None:
    status, headers, answer = await ask(whole, stream=stream)
    assert status == 200
    assert answer
    assert headers["x-prfaas-route"] == "prefill_cluster"
    assert whole.loaded == whole.sent
    record = await whole.record()
    assert record.outcome == "ok"
    assert record.transfer_bytes == whole.nbytes
    assert record.prefill_instance == "p0"
    assert (record.decode_instance, record.decode_reason) == ("d0", "1 usable, least loaded first")
    assert record.landing_wait_s is not None
    assert record.landing_wait_s <= record.ttft_s
    assert {"queue_s", "prefill_s", "transfer_tail_s"} <= {
        name for name in record.parts.__struct_fields__ if getattr(record.parts, name) is not None
    }
    await whole.memory_is_back()


async def test_a_killed_sending_agent_means_recomputing(whole: Whole) -> None:
    whole.share = 0.5
    whole.prefiller.may_answer.clear()
    asking = asyncio.create_task(ask(whole))
    await whole.prefiller.wait_requests(1)
    whole.sending.end(signal.SIGKILL)
    status, headers, _ = await asyncio.wait_for(asking, 30)
    assert status == 200
    assert headers["x-prfaas-reason"].startswith("prefill_failed")
    assert whole.decoder.sources == ["prompt"]
    await whole.memory_is_back()


async def test_a_receiving_agent_killed_before_the_landing_means_recomputing(whole: Whole) -> None:
    whole.share = 0.5
    whole.prefiller.may_answer.clear()
    asking = asyncio.create_task(ask(whole))
    await whole.prefiller.wait_requests(1)
    whole.receiving.end(signal.SIGKILL)
    status, _, answer = await asyncio.wait_for(asking, 30)
    assert status == 200
    assert answer
    assert "landing" not in whole.decoder.sources
    await whole.prefiller.wait_aborts(1)


async def test_a_client_that_leaves_frees_the_landing(whole: Whole) -> None:
    whole.share = 0.5
    whole.prefiller.may_answer.clear()
    asking = asyncio.create_task(ask(whole, stream=True))
    await whole.prefiller.wait_requests(1)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await whole.prefiller.wait_aborts(1)
    await whole.memory_is_back()
    assert (await whole.record()).outcome == "client_gone"


async def test_a_killed_receiving_agent_means_local(whole: Whole) -> None:
    whole.receiving.end(signal.SIGKILL)
    status, headers, _ = await asyncio.wait_for(ask(whole), 30)
    assert status == 200
    assert headers["x-prfaas-route"] == "local"
    assert headers["x-prfaas-reason"].startswith("reserve_failed")
    assert (await whole.record()).decode_reason == "0 requests, fewest of 1"


async def test_a_full_arena_means_local_before_any_reservation_fails(whole: Whole) -> None:
    status, headers, _ = await ask(whole)
    assert (status, headers["x-prfaas-route"]) == (200, "prefill_cluster")
    await whole.memory_is_back()
    others: list[ReserveReply] = []
    agent = whole.pd._instances.by_name["d0"].agent
    while (await whole.agent_status()).landing_room_bytes >= whole.nbytes:
        others.append(await agent.reserve(Reserve(299, 60.0), 5.0))
    await whole.routing_sees(lambda room_bytes: room_bytes < whole.nbytes)
    for _ in range(3):
        status, headers, _ = await ask(whole)
        assert (status, headers["x-prfaas-route"]) == (200, "local")
        assert headers["x-prfaas-reason"].startswith("no_landing_room; ")
        assert "; landing_bytes=" in headers["x-prfaas-reason"]
    assert await whole.num_refused() == 0
    for other in others:
        await agent.cancel(other.transfer_id, "the test goes on", 5.0)
    await whole.routing_sees(lambda room_bytes: room_bytes > 2 * whole.nbytes)
    status, headers, _ = await ask(whole)
    assert (status, headers["x-prfaas-route"]) == (200, "prefill_cluster")
    await whole.memory_is_back()
