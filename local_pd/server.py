"""Serves a local PD cluster over gRPC, service `prfaas.PdCluster`.

It does not know how the cluster decides. Leases of slots are kept by the gateways that hold them
(`Renew`), so the cluster served here must be made with `keep_leases` off.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Mapping
from typing import Any, Final, TypeVar

from msgspec import structs

from kvmanager.program_version import program_version
from local_pd.embedded import EmbeddedPdCluster
from local_pd.errors import FrontUnreachable, NoInstance, NoLandingRoom, PdError, RoleRefused
from local_pd.messages import (
    AwaitLandingRequest,
    DecodeSlot,
    DirectRequest,
    DirectTarget,
    InstanceOrder,
    LandingReport,
    Placed,
    PlaceReply,
    PlaceRequest,
    ReleaseReply,
    ReserveRequest,
    RoleReply,
    RoleRequest,
    SlotRequest,
)
from prfaas.encoding.values import EncodeDone, EncodeOrder
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
from transport.rpc import ErrorCode, Method, RpcError, RpcServer

SERVICE: Final = "prfaas.PdCluster"

CODE_OF: Final[dict[type[PdError], ErrorCode]] = {
    NoLandingRoom: "NO_ROOM",
    NoInstance: "REFUSED",
    RoleRefused: "REFUSED",
    FrontUnreachable: "UNAVAILABLE",
}
"""How errors cross gRPC."""

T = TypeVar("T")


class PdServer(RpcServer):
    """`cluster` behind gRPC at `bind` ("host:port", port 0 picks one). Does not own the cluster."""

    def __init__(
        self, cluster: EmbeddedPdCluster, bind: str, credentials: Credentials | None = None
    ) -> None:
        self._cluster = cluster
        methods: Mapping[str, Method[Any, Any]] = {
            "Reserve": Method(ReserveRequest, DecodeSlot, self._reserve),
            "Renew": Method(SlotRequest, Empty, self._renew),
            "AwaitLanding": Method(AwaitLandingRequest, LandingReport, self._await_landing),
            "Release": Method(SlotRequest, ReleaseReply, self._release),
            "Ended": Method(InstanceName, Empty, self._request_ended),
            "Direct": Method(DirectRequest, DirectTarget, self._direct),
            "Place": Method(PlaceRequest, PlaceReply, self._place),
            "Encode": Method(EncodeOrder, EncodeDone, self._encode),
            "Prefill": Method(PrefillJob, PrefillReply, self._prefill),
            "Report": Method(Empty, ClusterReport, self._report),
            "Drain": Method(InstanceOrder, Empty, self._drain),
            "Resume": Method(InstanceOrder, Empty, self._resume),
            "SetRole": Method(RoleRequest, RoleReply, self._set_role),
            "Members": Method(MemberRequest, Empty, self._change_members),
            "Time": Method(TimingOrder, TimedPrefills, self._time),
        }
        readiness = front_readiness(lambda: cluster.report())
        super().__init__(bind, {SERVICE: methods}, credentials, why_not_ready=readiness)

    async def _reserve(self, request: ReserveRequest) -> DecodeSlot:
        return await _mapped(self._cluster.reserve(request))

    async def _renew(self, request: SlotRequest) -> Empty:
        await self._cluster.renew(request.transfer_id, request.instance)
        return Empty()

    async def _await_landing(self, request: AwaitLandingRequest) -> LandingReport:
        return await self._cluster.await_landing_of(
            request.transfer_id, request.instance, request.timeout_s
        )

    async def _release(self, request: SlotRequest) -> ReleaseReply:
        times = await self._cluster.release_landing(
            request.transfer_id, request.instance, request.reason
        )
        return ReleaseReply(times)

    async def _request_ended(self, request: InstanceName) -> Empty:
        self._cluster.request_ended(request.name)
        return Empty()

    async def _direct(self, request: DirectRequest) -> DirectTarget:
        return await _mapped(self._cluster.direct(request))

    async def _place(self, request: PlaceRequest) -> PlaceReply:
        # First what makes room.
        for name in request.ended:
            self._cluster.request_ended(name)
        return PlaceReply(tuple([await self._placed(item) for item in request.direct]))

    async def _placed(self, request: DirectRequest) -> Placed:
        try:
            return Placed(target=await self._cluster.direct(request))
        except PdError as error:
            return Placed(code=CODE_OF[type(error)], message=error.message)

    async def _encode(self, order: EncodeOrder) -> EncodeDone:
        return await self._cluster.encode(order)

    async def _prefill(self, job: PrefillJob) -> PrefillReply:
        return await to_reply(self._cluster.prefill_locally(job))

    async def _report(self, _request: Empty) -> ClusterReport:
        return structs.replace(await self._cluster.report(), version=program_version())

    async def _drain(self, request: InstanceOrder) -> Empty:
        try:
            await _mapped(self._cluster.drain(request.name, leader=request.leader))
        except asyncio.CancelledError:
            # The caller is gone, and nobody else would give the instance work again. If another
            # gateway leads meanwhile, it is that one's.
            with contextlib.suppress(RoleRefused):
                await self._cluster.resume(request.name, leader=request.leader)
            raise
        return Empty()

    async def _resume(self, request: InstanceOrder) -> Empty:
        await _mapped(self._cluster.resume(request.name, leader=request.leader))
        return Empty()

    async def _set_role(self, request: RoleRequest) -> RoleReply:
        order = self._cluster.set_role(request.instance, request.change, leader=request.leader)
        status = await _mapped(order)
        return RoleReply(status=status)

    async def _change_members(self, request: MemberRequest) -> Empty:
        await _mapped(self._cluster.change_members(request.order))
        return Empty()

    async def _time(self, order: TimingOrder) -> TimedPrefills:
        return await _mapped(self._cluster.time_prefills(order))


async def _mapped(work: Awaitable[T]) -> T:
    try:
        return await work
    except PdError as error:
        raise RpcError(CODE_OF[type(error)], error.message) from error
    except UnknownInstance as error:
        raise RpcError("NOT_FOUND", str(error)) from error
    except MemberRefused as error:
        raise RpcError("REFUSED", error.message) from error
