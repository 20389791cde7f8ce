"""A prefill cluster behind a link with an address of its own.

A landing names the address that its agent advertises. The senders of a prefill cluster may have to
connect to another address: the near end of a tunnel or of an emulated link. Only the gateway maps
one to the other, and signs for the one that is connected to; agents and fronts do not know.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from deploy.gateway.grants import granted_job
from prfaas.embedded import EmbeddedPrefillCluster
from prfaas.engines.members import MemberOrder
from prfaas.engines.timing import TimedPrefills, TimingOrder
from prfaas.jobs import PrefillJob, PrefillResult
from prfaas.remote import RemotePrefillCluster
from scheduler.reports import ClusterReport
from transport import Endpoint
from transport.grants import Granter


class LinkedPrefillCluster:
    """Passes everything to `cluster`, with landings at the addresses that its senders can reach.

    `endpoints` maps an advertised "host:port" to the one to connect to. Others stay as they are.
    """

    def __init__(
        self,
        cluster: EmbeddedPrefillCluster | RemotePrefillCluster,
        endpoints: Mapping[str, str],
        granter: Granter | None = None,
    ) -> None:
        self.cluster = cluster
        self._granter = granter
        self._endpoints = {
            Endpoint.parse(near): Endpoint.parse(far) for near, far in endpoints.items()
        }

    @property
    def name(self) -> str:
        """The cluster's name in the region."""
        return self.cluster.name

    async def start(self) -> None:
        """Start the cluster."""
        await self.cluster.start()

    async def submit(self, job: PrefillJob) -> PrefillResult:
        """Run a job as `PrefillCluster.submit` does, with a landing at the address to connect
        to.
        """
        landing = job.landing
        endpoint = self._endpoints.get(Endpoint(landing.host, landing.port))
        if endpoint is not None:
            landing = msgspec.structs.replace(landing, host=endpoint.host, port=endpoint.port)
            job = msgspec.structs.replace(job, landing=landing)
        return await self.cluster.submit(granted_job(self._granter, job))

    async def report(self) -> ClusterReport:
        """The cluster's report."""
        return await self.cluster.report()

    async def drain(self, instance: str) -> None:
        """Give an instance no new jobs, and return when it has none left."""
        await self.cluster.drain(instance)

    async def resume(self, instance: str) -> None:
        """Give an instance jobs again."""
        await self.cluster.resume(instance)

    async def change_members(self, order: MemberOrder) -> None:
        """Add an instance, or let one go."""
        await self.cluster.change_members(order)

    async def time_prefills(self, order: TimingOrder) -> TimedPrefills:
        """Time a few prompts on an instance."""
        return await self.cluster.time_prefills(order)

    async def close(self) -> None:
        """Close the cluster."""
        await self.cluster.close()
