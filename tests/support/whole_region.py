"""A gateway, its fronts and node agents, all of them real; only the engines' computing is fake."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from agent_process import SMALL_LAYOUT, AgentProcess, DrivenEngine
from eventually import eventually
from front_access import gateway_url, pd_cluster, prefill_cluster, ready, running
from front_doubles import FakeEngine as PrefillEngine
from live_region_cases import snapshot
from untimed_gateway import UNTIMED

from deploy.gateway.app import Gateway
from deploy.gateway.config import GatewayConfig, ModelConfig
from deploy.gateway.intake.traced import RequestTraces
from kvmanager.agent.messages import StatusReply
from kvmanager.config_files.traces import TracesSection, open_tracer
from kvmanager.load_times import LoadTimes
from local_pd.embedded import EmbeddedPdCluster, PdClusterConfig
from prfaas.embedded import PrefillClusterConfig
from prfaas.engines.health import ProbeTiming
from prfaas.engines.instance import InstanceSpec
from prfaas.engines.instances import InstancesConfig

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
        self.sent = os.urandom(self.nbytes)
        self.producer.fill(body["kv_transfer_params"]["prfaas"], self.sent, self.share)

    async def load(self, params: dict[str, Any]) -> str:
        """What the connector does before a decode."""
        transfer_id = bytes.fromhex(params["transfer_id"])
        asked_s = time.monotonic()
        self.consumer.client.watch(transfer_id)
        told = await asyncio.to_thread(self.consumer.next)
        if told[0] != "landed":
            return "recomputed"
        began_s = time.monotonic()
        self.loaded = self.consumer.read(params["transfer_id"], self.nbytes)
        loaded_s = time.monotonic()
        times = LoadTimes(began_s - asked_s, loaded_s - began_s, time.monotonic() - loaded_s)
        self.consumer.client.loaded(transfer_id, times)
        self.consumer.client.release(transfer_id)
        return "landing"

    @property
    def nbytes(self) -> int:
        return SMALL_LAYOUT.transfer_bytes(len(BODY["prompt"]) - 1)

    async def memory_is_back(self) -> None:
        await eventually(self.agent_status, lambda status: not status.landing_bytes)

    async def routing_sees(self, is_enough: Callable[[float], bool]) -> None:
        """Wait until a request would find so much room for its landing."""
        await eventually(
            lambda: snapshot(self.gateway.scheduler, "tiny").landing_room_bytes,
            lambda room: room is not None and is_enough(room),
        )

    async def record(self) -> Any:
        records = self.gateway.records
        await eventually(lambda: records and records[-1].is_settled)
        return records[-1]


def spec(name: str, url: str, agent: AgentProcess, role: str) -> InstanceSpec:
    return InstanceSpec.model_validate(
        {"name": name, "url": url, "agent": agent.ready["control"], "role": role}
    )


@asynccontextmanager
async def whole_region(
    folder: Path, engine: Any, receiver: str | None = None
) -> AsyncIterator[Whole]:
    """The region, with files in `folder`. Every process sends its spans to `receiver`, an URL."""
    made = Whole(engine)
    engine.load = made.load
    traces = None if receiver is None else TracesSection(endpoint=receiver)
    told = {} if traces is None else {"traces": traces.model_dump()}
    tracers = [open_tracer(traces, f"prfaas-{name}", name) for name in ("gateway", "prefill", "pd")]
    async with AsyncExitStack() as stack:
        for tracer in tracers:
            if tracer is not None:
                stack.callback(tracer.close)
        made.sending = stack.enter_context(AgentProcess(folder / "send", **told))
        receiving = AgentProcess(folder / "receive", metrics_port=0, **told)
        made.receiving = stack.enter_context(receiving)
        made.producer = stack.enter_context(DrivenEngine(made.sending, "p0"))
        made.consumer = stack.enter_context(DrivenEngine(made.receiving, "d0"))
        stack.callback(made.prefiller.first_token.set)
        await running(stack, made.prefiller)
        made.prefiller.before_answer = made.fill
        specs = [spec("p0", made.prefiller.url, made.sending, "prefill")]
        settings = PrefillClusterConfig(instances=PROBING)
        prefill = prefill_cluster("far", specs, settings, tracer=tracers[1])
        specs = [spec("d0", engine.url, made.receiving, "both")]
        made.pd = pd_cluster("home", specs, PdClusterConfig(instances=PROBING), tracer=tracers[2])
        await ready(stack, prefill, made.pd)
        config = GatewayConfig(
            port=0,
            models=(ModelConfig(name="tiny"),),
            threshold_tokens=100,
            report_interval_s=0.05,
            scheduling=UNTIMED,
        )
        made.gateway = Gateway(
            config,
            [made.pd],
            {"far": prefill},
            {("far", "home"): "far-to-home"},
            traces=RequestTraces(tracers[0]),
        )
        made.url = await gateway_url(stack, made.gateway) + "/v1/completions"
        yield made


async def ask(whole: Whole, **fields: Any) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the region's answer to `BODY`. `headers` in `fields` are sent."""
    sent = fields.pop("headers", {})
    async with (
        aiohttp.ClientSession() as session,
        session.post(whole.url, json=BODY | fields, headers=sent) as response,
    ):
        headers = {key.lower(): value for key, value in response.headers.items()}
        return response.status, headers, await response.read()
