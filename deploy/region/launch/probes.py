"""Whether the processes of a region are healthy: one cheap question to each, depending on its kind.

It knows the ports and protocols of our processes, but not what to do about an answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager, suppress

import aiohttp
import msgspec

from deploy.gateway.members.pages import InstancesOverview
from deploy.region.client import CannotAsk, asked
from deploy.region.launch.addresses import admin_url, front_address
from deploy.region.launch.parts import Part, fronts_apart
from deploy.region.launch.plan import PlannedProcess
from deploy.region.spec.region import ClusterSpec, RegionSpec
from kvmanager.agent.client import AgentClient
from kvmanager.agent.messages import StatusReply
from local_pd import server as pd_front
from prfaas import server as prefill_front
from prfaas.engines.access import EngineAccess
from prfaas.engines.client import EngineHttp
from prfaas.engines.prefill_rpc import Empty
from prfaas.engines.supervision.supervisor import Probe
from scheduler.reports import ClusterReport
from transport import Credentials
from transport.rpc import RpcClient, RpcError

_TIMEOUT_S = 5.0


class _RegionView(msgspec.Struct):
    """The part of GET /prfaas/region that is read here."""

    pds: dict[str, ClusterReport | None] = {}
    prefill: dict[str, ClusterReport | None] = {}


async def region_trouble(admin_url: str, key: str, names: Collection[str]) -> str | None:
    """Say what the gateway still misses; None once the instances of these `names` are usable.

    An instance whose KVCache nobody can use stays so, however long one waits: it is not missed.
    """
    try:
        reports = await cluster_reports(admin_url, key)
    except CannotAsk as error:
        return f"it does not answer: {error}"
    seen = {item.name: item for report in reports for item in report.instances}
    for name in names:
        if name not in seen:
            return f"it has no report of {name}"
        if not seen[name].healthy and seen[name].compatible:
            return f"{name} is not usable: {seen[name].reason}"
    return None


async def cluster_reports(admin_url: str, key: str) -> list[ClusterReport]:
    """The clusters as the gateway sees them, without those of which it has no report. CannotAsk."""
    view = await asked(admin_url, "/prfaas/region", _RegionView, key=key)
    return [report for report in (view.pds | view.prefill).values() if report is not None]


@asynccontextmanager
async def members_view(
    region: RegionSpec,
    part: Part,
    admin_key: Callable[[], str],
    credentials: Credentials | None,
) -> AsyncIterator[Callable[[], Awaitable[set[str]]]]:
    """Asks whoever can be asked from here which instances the fronts still know. One of a front
    that cannot be asked counts as known.
    """
    apart = {cluster.name for cluster in fronts_apart(region)}
    clusters = [c for c in region.clusters if not {n.name for n in c.nodes}.isdisjoint(part.nodes)]
    services = {"prefill": prefill_front.SERVICE, "pd": pd_front.SERVICE}
    clients = {
        cluster.name: RpcClient(front_address(cluster), services[cluster.kind], credentials)
        for cluster in clusters
        if cluster.name in apart and not part.is_whole
    }

    async def of_front(cluster: ClusterSpec) -> set[str]:
        if (client := clients.get(cluster.name)) is not None:
            with suppress(RpcError):
                report = await client.call("Report", Empty(), ClusterReport, _TIMEOUT_S)
                return {item.name for item in report.instances}
        return {item.name for item in cluster.instances}

    async def known() -> set[str]:
        if part.has_gateway:
            with suppress(CannotAsk):
                key, url = admin_key(), admin_url(region, part.gateways[0])
                found = await asked(url, "/prfaas/instances", InstancesOverview, key=key)
                return {item.instance for item in found.instances}
        return set().union(*[await of_front(cluster) for cluster in clusters])

    try:
        yield known
    finally:
        for client in clients.values():
            await client.close()


class Prober:
    """Makes probes. `session` belongs to its owner; `close` ends the others."""

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
        self._fronts: list[RpcClient] = []

    def probe(self, planned: PlannedProcess) -> Probe:
        """The question that tells whether this process serves."""
        if planned.kind == "relay":
            return self._relay_probe(planned)
        if planned.kind == "agent":
            return self._agent_probe(planned.address)
        if planned.kind == "engine":
            return EngineHttp(planned.address, self._session, self._access).health
        if planned.kind == "front":
            return self._front_probe(planned)
        return self._gateway_probe(planned)

    async def agent_status(self, control: str) -> StatusReply:
        """What a node agent holds. Raises RpcError."""
        if control not in self._agents:
            self._agents[control] = AgentClient(control, self._credentials)
        return await self._agents[control].status(_TIMEOUT_S)

    async def close(self) -> None:
        """Close the connections to agents and fronts."""
        for agent in self._agents.values():
            await agent.close()
        for front in self._fronts:
            await front.close()

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

    def _front_probe(self, planned: PlannedProcess) -> Probe:
        service = prefill_front.SERVICE if "prefill" in planned.process.argv else pd_front.SERVICE
        client = RpcClient(planned.address, service, self._credentials)
        self._fronts.append(client)

        async def probe() -> bool:
            # A front whose engines are all down still serves, as a gateway does.
            await client.call("Report", Empty(), ClusterReport, _TIMEOUT_S)
            return True

        return probe

    def _gateway_probe(self, planned: PlannedProcess) -> Probe:
        # A gateway whose engines are all down still serves. Their state is not its own health.
        url = f"{planned.address}/livez"

        async def probe() -> bool:
            timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
            async with self._session.get(url, timeout=timeout) as response:
                return response.status == 200

        return probe
