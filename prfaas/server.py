"""Serves a prefill cluster over gRPC, service `prfaas.PrefillCluster`.

It does not know what the cluster does with a job; it carries calls to any `PrefillCluster`.
"""

import asyncio
from collections.abc import Awaitable, Mapping
from typing import Any, Final, TypeVar

from msgspec import structs

from kvmanager.program_version import program_version
from prfaas.cluster import PrefillCluster
from prfaas.engines.errors import UnknownInstance
from prfaas.engines.members import MemberRefused, MemberRequest
from prfaas.engines.prefill_rpc import (
    Empty,
    InstanceName,
    PrefillReply,
    front_readiness,
    to_reply,
)
from prfaas.engines.timing import TimedPrefills, TimingOrder
from prfaas.jobs import PrefillJob
from scheduler.reports import ClusterReport
from transport import Credentials
from transport.rpc import Method, RpcError, RpcServer

SERVICE: Final = "prfaas.PrefillCluster"

T = TypeVar("T")


class PrefillServer(RpcServer):
    """`cluster` behind gRPC at `bind` ("host:port", port 0 picks one). Does not own the cluster."""

    def __init__(
        self, cluster: PrefillCluster, bind: str, credentials: Credentials | None = None
    ) -> None:
        self._cluster = cluster
        methods: Mapping[str, Method[Any, Any]] = {
            "Submit": Method(PrefillJob, PrefillReply, self._submit),
            "Report": Method(Empty, ClusterReport, self._report),
            "Drain": Method(InstanceName, Empty, self._drain),
            "Resume": Method(InstanceName, Empty, self._resume),
            "Members": Method(MemberRequest, Empty, self._change_members),
            "Time": Method(TimingOrder, TimedPrefills, self._time),
        }
        readiness = front_readiness(lambda: cluster.report())
        super().__init__(bind, {SERVICE: methods}, credentials, why_not_ready=readiness)

    async def _submit(self, job: PrefillJob) -> PrefillReply:
        return await to_reply(self._cluster.submit(job))

    async def _report(self, _request: Empty) -> ClusterReport:
        return structs.replace(await self._cluster.report(), version=program_version())

    async def _drain(self, request: InstanceName) -> Empty:
        try:
            await _mapped(self._cluster.drain(request.name))
        except asyncio.CancelledError:
            # The caller is gone, and nobody else would give the instance work again.
            await self._cluster.resume(request.name)
            raise
        return Empty()

    async def _resume(self, request: InstanceName) -> Empty:
        await _mapped(self._cluster.resume(request.name))
        return Empty()

    async def _change_members(self, request: MemberRequest) -> Empty:
        await _mapped(self._cluster.change_members(request.order))
        return Empty()

    async def _time(self, order: TimingOrder) -> TimedPrefills:
        return await _mapped(self._cluster.time_prefills(order))


async def _mapped(work: Awaitable[T]) -> T:
    try:
        return await work
    except UnknownInstance as error:
        raise RpcError("NOT_FOUND", str(error)) from error
    except MemberRefused as error:
        raise RpcError("REFUSED", error.message) from error
