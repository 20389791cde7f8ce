"""A PD cluster front over loopback, with fake engines and agents."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import msgspec
from front_access import pd_cluster, running, started_pd
from front_doubles import FakeAgent, FakeEngine, prefill_job

from kvmanager.agent.messages import Reserve
from local_pd.cluster import PdCluster
from local_pd.embedded import EmbeddedPdCluster, PdClusterConfig
from local_pd.messages import DecodeSlot, ReserveRequest
from prfaas.engines.health import ProbeTiming
from prfaas.engines.instances import InstancesConfig
from prfaas.engines.prefill_run import RunnerConfig
from prfaas.jobs import PrefillJob

ROLES = {"d0": "decode", "d1": "decode", "p0": "prefill"}

CONFIG = PdClusterConfig(
    lease_s=10.0,
    drain_poll_interval_s=0.02,
    instances=InstancesConfig(
        probes=ProbeTiming(interval_s=0.05, start_interval_s=0.05), poll_load=True
    ),
    runner=RunnerConfig(await_slice_s=0.5, cleanup_timeout_s=1.0, stall_timeout_s=0.5),
)


class PdRig:
    """Two decode instances on two nodes, a prefill instance on the first, and the front."""

    def __init__(self) -> None:
        self.nodes: list[FakeAgent] = []
        self.engines: dict[str, FakeEngine] = {}
        self.embedded: EmbeddedPdCluster
        self.front: PdCluster

    @property
    def num_landings(self) -> int:
        return sum(len(node.landings) for node in self.nodes)

    def landing(self, slot: DecodeSlot) -> Reserve:
        """The reservation that was asked of the node that has it."""
        held = {name: wanted for node in self.nodes for name, wanted in node.landings.items()}
        return held[slot.landing.transfer_id]

    def job_for(self, slot: DecodeSlot) -> PrefillJob:
        job = prefill_job(1, num_tokens=slot.landing.num_tokens)
        return msgspec.structs.replace(job, landing=slot.landing)

    async def reserve(self, **fields: Any) -> DecodeSlot:
        digest = prefill_job(1).landing.token_digest
        return await self.front.reserve(
            ReserveRequest(num_tokens=8, token_digest=digest, request_id="r1", **fields)
        )

    async def awaited(self, slot: DecodeSlot, timeout_s: float = 20.0) -> tuple[str, str]:
        """How a landing ended, and why."""
        report = await self.front.await_landing(slot, timeout_s)
        return report.state, report.error


@asynccontextmanager
async def make_rig(kind: str, config: PdClusterConfig = CONFIG) -> AsyncIterator[PdRig]:
    rig = PdRig()
    async with AsyncExitStack() as stack:
        rig.nodes = [await running(stack, FakeAgent(*names)) for names in (("d0", "p0"), ("d1",))]
        specs = []
        for name, role in ROLES.items():
            agent = rig.nodes[1] if name == "d1" else rig.nodes[0]
            engine = rig.engines[name] = await running(stack, FakeEngine(agent))
            specs.append(engine.spec(name, role))
        config = replace(config, keep_leases=kind == "embedded")
        rig.embedded = pd_cluster("west", specs, config)
        rig.front = await started_pd(stack, kind, rig.embedded)
        yield rig
        for engine in rig.engines.values():
            engine.first_token.set()
