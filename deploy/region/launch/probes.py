"""Whether the processes of a region are healthy: one cheap question to each, depending on its kind.

It knows the ports and protocols of our processes, but not what to do about an answer.
"""

from __future__ import annotations

import asyncio

import aiohttp
import msgspec

from deploy.region.client import CannotAsk, asked
from deploy.region.launch.plan import PlannedProcess
from kvmanager.agent.client import AgentClient
from kvmanager.agent.messages import StatusReply
from prfaas.engines.access import EngineAccess
from prfaas.engines.client import EngineHttp
from prfaas.engines.supervision.supervisor import Probe
from scheduler.reports import ClusterReport
from transport import Credentials

_TIMEOUT_S = 5.0


class _RegionView(msgspec.Struct):
    """The part of GET /prfaas/region that is read here."""

    pd: ClusterReport | None = None
    prefill: dict[str, ClusterReport] = {}


async def region_trouble(admin_url: str, key: str) -> str | None:
    """Say what the gateway still misses; None once all its instances are usable.

    An instance whose KVCache nobody can use stays so, however long one waits: it is not missed.
    """
    try:
        view = await asked(admin_url, "/prfaas/region", _RegionView, key=key)
    except CannotAsk as error:
        return f"it does not answer: {error}"
    if view.pd is None:
        return "it has no report of the PD cluster"
    for cluster in (view.pd, *view.prefill.values()):
        for instance in cluster.instances:
            if not instance.healthy and instance.compatible:
                return f"{instance.name} is not usable: {instance.reason}"
    return None


class Prober:
    """Makes probes. `session` belongs to its owner; `close` ends the connections to agents."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        credentials: Credentials | None,
        access: EngineAccess,
    ) -> None:
        self._session = session
        self._credentials = credentials
        self._access = access
        self._agents: dict[str, AgentClient] = {}

    def probe(self, planned: PlannedProcess) -> Probe:
        """The question that tells whether this process serves."""
        if planned.kind == "relay":
            return self._relay_probe(planned)
        if planned.kind == "agent":
            return self._agent_probe(planned.address)
        if planned.kind == "engine":
            return EngineHttp(planned.address, self._session, self._access).health
        return self._gateway_probe(planned)

    async def agent_status(self, control: str) -> StatusReply:
        """What a node agent holds. Raises RpcError."""
        if control not in self._agents:
            self._agents[control] = AgentClient(control, self._credentials)
        return await self._agents[control].status(_TIMEOUT_S)

    async def close(self) -> None:
        """Close the connections to agents."""
        for agent in self._agents.values():
            await agent.close()

    def _relay_probe(self, planned: PlannedProcess) -> Probe:
        argv = list(planned.process.argv)
        socket_path = argv[argv.index("--control") + 1]

        async def probe() -> bool:
            _, writer = await asyncio.open_unix_connection(socket_path)
            writer.close()
            return True

        return probe

    def _agent_probe(self, control: str) -> Probe:
        async def probe() -> bool:
            await self.agent_status(control)
            return True

        return probe

    def _gateway_probe(self, planned: PlannedProcess) -> Probe:
        # A gateway whose engines are all down still serves. Their state is not its own health.
        url = f"{planned.address}/version"

        async def probe() -> bool:
            timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
            async with self._session.get(url, timeout=timeout) as response:
                return response.status == 200

        return probe
