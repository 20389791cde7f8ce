"""A local PD cluster whose front runs in another process, reached over gRPC.

It is a `PdCluster` like the embedded one. It renews the leases of its slots from this process, so
that the slots of a gateway that died run out. It does not know instances.
"""

import asyncio
import logging
from typing import Final

from kvmanager.load_times import LoadTimes
from local_pd.errors import FrontUnreachable, NoInstance, NoLandingRoom, PdError, RoleRefused
from local_pd.gathered import GatheredCalls
from local_pd.messages import (
    AwaitLandingRequest,
    DecodeSlot,
    DirectRequest,
    DirectTarget,
    InstanceOrder,
    LandingReport,
    PlaceReply,
    PlaceRequest,
    ReleaseReply,
    ReserveRequest,
    RoleReply,
    RoleRequest,
    SlotRequest,
)
from local_pd.server import SERVICE
from prfaas.encoding.values import EncodeDone, EncodeOrder
from prfaas.engines.errors import PrefillFailed, UnknownInstance
from prfaas.engines.leases import LeaseKeeper
from prfaas.engines.members import MemberOrder
from prfaas.engines.ownership import Cleanups, cancel_requested
from prfaas.engines.prefill_rpc import (
    Empty,
    PrefillReply,
    from_reply,
    order_members,
    remote_report,
)
from prfaas.engines.timing import TimedPrefills, TimingOrder, order_timing
from prfaas.jobs import PrefillJob, PrefillResult
from prfaas.remote import JOB_TIMEOUT_S, REPORT_TIMEOUT_S
from scheduler.live.long_term.conversion import MAX_DRAIN_S, RoleChange, RoleStatus
from scheduler.reports import ClusterReport
from transport import Credentials
from transport.plain import printable_message
from transport.rpc import RpcClient, RpcError

logger = logging.getLogger("prfaas.local_pd")


CALL_TIMEOUT_S: Final = 10.0
ENCODE_TIMEOUT_S: Final = 120.0
"""Longer than any front waits for media."""
DRAIN_TIMEOUT_S: Final = MAX_DRAIN_S + 10.0
"""Longer than the caller's own limit for a drain, which must end first because its error says what
happened.
"""


class RemotePdCluster:
    """Client of a `prfaas pd` front at `target` ("host:port")."""

    def __init__(
        self,
        name: str,
        target: str,
        *,
        has_prefill_instances: bool,
        credentials: Credentials | None = None,
    ) -> None:
        self._name = name
        self._has_prefill_instances = has_prefill_instances
        self._client = RpcClient(target, SERVICE, credentials)
        self._leases = LeaseKeeper()
        self._cleanups = Cleanups()
        self._gathered = GatheredCalls(self._place)
        self._closed = False

    @property
    def name(self) -> str:
        return self._name

    @property
    def has_prefill_instances(self) -> bool:
        """As reported last; as configured until the first report."""
        return self._has_prefill_instances

    async def start(self) -> None:
        """Nothing to start: the front runs elsewhere, the connection opens with the first call."""

    async def reserve(self, request: ReserveRequest) -> DecodeSlot:
        async def undo(slot: DecodeSlot) -> None:
            await self.release(slot, "the caller went away")

        # A call cut off half-way could leave a slot that nobody knows; it would hold memory until
        # its lease ends.
        call = self._client.call("Reserve", request, DecodeSlot, CALL_TIMEOUT_S)
        try:
            slot = printable_message(await self._cleanups.acquire(call, undo))
        except RpcError as error:
            raise self._explain(error) from error
        self._leases.hold(
            slot.landing.transfer_id, slot.lease_s, lambda: self._renew(_reference(slot))
        )
        return slot

    async def await_landing(self, slot: DecodeSlot, timeout_s: float) -> LandingReport:
        request = AwaitLandingRequest(
            transfer_id=slot.landing.transfer_id, instance=slot.instance, timeout_s=timeout_s
        )
        try:
            # The front itself waits for `timeout_s`, so the call's own limit has to be later.
            return await self._client.call(
                "AwaitLanding", request, LandingReport, timeout_s + CALL_TIMEOUT_S
            )
        except RpcError as error:
            logger.warning("%s: landing %s: %s", self._name, request.transfer_id, error)
            return LandingReport(state="unknown", error=str(error))
        except asyncio.CancelledError:
            # Closing the channel cancels its calls, as if this task had been cancelled.
            if cancel_requested():
                raise
            return LandingReport(state="unknown", error=str(self._shutting_down()))

    async def release(self, slot: DecodeSlot, reason: str) -> LoadTimes | None:
        self._leases.drop(slot.landing.transfer_id)
        return await self._cleanups.finish(self._release(_reference(slot, reason)))

    def request_ended(self, instance: str) -> None:
        # If the call fails, the front's next look at the engine's metrics corrects its count.
        self._gathered.ended(instance)

    async def direct(self, request: DirectRequest) -> DirectTarget:
        try:
            return await self._gathered.direct(request)
        except RpcError as error:
            raise self._explain(error) from error

    async def encode(self, order: EncodeOrder) -> EncodeDone:
        try:
            return await self._client.call("Encode", order, EncodeDone, ENCODE_TIMEOUT_S)
        except RpcError as error:
            raise self._explain(error) from error

    async def prefill_locally(self, job: PrefillJob) -> PrefillResult:
        if self._closed:
            raise self._shutting_down()
        call = self._client.call("Prefill", job, PrefillReply, JOB_TIMEOUT_S)
        return await from_reply(call, self._name)

    async def report(self) -> ClusterReport:
        report = await remote_report(self._client, self._name, REPORT_TIMEOUT_S)
        # A front that cannot be reached reports no instances; its last report still holds.
        if report.instances:
            self._has_prefill_instances = any(item.role == "prefill" for item in report.instances)
        return report

    async def drain(self, instance: str, *, leader: int = 0) -> None:
        """As `PdCluster.drain`; raises FrontUnreachable as well, also after `DRAIN_TIMEOUT_S`."""
        await self._order("Drain", InstanceOrder(instance, leader), DRAIN_TIMEOUT_S)

    async def resume(self, instance: str, *, leader: int = 0) -> None:
        """As `PdCluster.resume`; raises FrontUnreachable as well."""
        try:
            await self._order("Resume", InstanceOrder(instance, leader), CALL_TIMEOUT_S)
        except NoInstance as error:
            raise RoleRefused(error.message) from error

    async def set_role(self, instance: str, change: RoleChange, *, leader: int = 0) -> RoleStatus:
        """As `PdCluster.set_role`; raises FrontUnreachable as well: it may have been done."""
        request = RoleRequest(instance=instance, change=change, leader=leader)
        try:
            reply = await self._client.call("SetRole", request, RoleReply, CALL_TIMEOUT_S)
        except RpcError as error:
            if error.code == "NOT_FOUND":
                raise UnknownInstance(self._name, instance) from error
            if error.code in ("UNAVAILABLE", "TIMEOUT"):
                raise self._explain(error) from error
            # Any other answer would come again. A front of an older version has no roles.
            raise RoleRefused(error.message) from error
        return reply.status

    async def change_members(self, order: MemberOrder) -> None:
        """As the protocol's; raises RpcError when the front cannot be reached."""
        await order_members(self._client, self._name, order, REPORT_TIMEOUT_S)

    async def time_prefills(self, order: TimingOrder) -> TimedPrefills:
        return await order_timing(self._client, self._name, order)

    async def close(self) -> None:
        """Close the connection. Slots still held run out with their leases."""
        self._closed = True
        # Clean-ups still call the front, so the connection closes last.
        await self._leases.close()
        await self._cleanups.close()
        await self._gathered.close()
        await self._client.close()

    async def _place(self, request: PlaceRequest) -> PlaceReply:
        reply = await self._client.call("Place", request, PlaceReply, CALL_TIMEOUT_S)
        return printable_message(reply)

    async def _renew(self, request: SlotRequest) -> None:
        await self._client.call("Renew", request, Empty, CALL_TIMEOUT_S)

    async def _release(self, request: SlotRequest) -> LoadTimes | None:
        try:
            reply = await self._client.call("Release", request, ReleaseReply, CALL_TIMEOUT_S)
        except RpcError as error:
            logger.warning(
                "%s: slot %s not released, its lease will end it: %s",
                self._name,
                request.transfer_id,
                error,
            )
            return None
        return reply.times

    async def _order(self, method: str, order: InstanceOrder, timeout_s: float) -> None:
        try:
            await self._client.call(method, order, Empty, timeout_s)
        except RpcError as error:
            if error.code == "NOT_FOUND":
                raise UnknownInstance(self._name, order.name) from error
            raise self._explain(error) from error

    def _explain(self, error: RpcError) -> PdError:
        if error.code == "NO_ROOM":
            return NoLandingRoom(error.message)
        if error.code == "REFUSED":
            return NoInstance(error.message)
        return FrontUnreachable(f"front {self._name}: {error.message}")

    def _shutting_down(self) -> PrefillFailed:
        return PrefillFailed("closed", f"cluster {self._name} is shutting down")


def _reference(slot: DecodeSlot, reason: str = "") -> SlotRequest:
    return SlotRequest(transfer_id=slot.landing.transfer_id, instance=slot.instance, reason=reason)
