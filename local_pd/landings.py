"""The landings of a local PD cluster: memory at its node agents for KVCache that is on its way.

It reserves, renews, awaits and gives back, and knows which instance each landing is for. It does
not choose instances (placement.py).
"""

import asyncio
import logging
import time

from msgspec import structs

from kvmanager.agent.messages import Reserve, ReserveReply
from kvmanager.landing import reserved_landing
from kvmanager.load_times import LoadTimes
from local_pd.messages import DecodeSlot, LandingReport, landing_report
from local_pd.slots import HeldSlots
from prfaas.engines.instance import Instance
from prfaas.engines.instances import Instances
from prfaas.engines.leases import LeaseKeeper
from prfaas.engines.ownership import Cleanups, cancel_requested
from prfaas.engines.prefill_run import RPC_TIMEOUT_S
from prfaas.jobs import PrefillJob
from transport.rpc import RpcError

logger = logging.getLogger("prfaas.local_pd")


class Landings:
    """The landings of one cluster. `slots` counts them by instance."""

    def __init__(
        self, cluster: str, instances: Instances, *, lease_s: float, keep_leases: bool
    ) -> None:
        """`keep_leases` off: another process calls `renew`."""
        self._cluster = cluster
        self._instances = instances
        self._lease_s = lease_s
        self._keep_leases = keep_leases
        self.leases = LeaseKeeper()
        self.slots = HeldSlots()
        self._cleanups = Cleanups()

    async def reserve(self, instance: Instance, wanted: Reserve, adapter: str) -> DecodeSlot:
        """A landing at the instance's node. Raises RpcError."""

        async def undo(reply: ReserveReply) -> None:
            await self._cancel(instance, reply.transfer_id, "the caller went away")

        # Engines of several models may share the node, each with a layout of its own.
        wanted = structs.replace(wanted, layout_fingerprint=instance.layout_fingerprint)
        asking = instance.agent.reserve(wanted, RPC_TIMEOUT_S)
        with self.slots.asked(instance.name):
            reply = await self._cleanups.acquire(asking, undo)
        # At once: the next request may be routed before this agent is probed again.
        self._instances.landing_room_said(instance.name, reply.landing_room_bytes)
        landing = reserved_landing(reply, wanted.num_tokens, wanted.token_digest, adapter)
        # The agent may grant less than what was asked for.
        self.slots.hold(reply.transfer_id, instance.name, reply.lease_s, time.monotonic())
        if self._keep_leases:
            self.leases.hold(
                reply.transfer_id,
                reply.lease_s,
                lambda: self.renew(reply.transfer_id, instance.name),
            )
        return DecodeSlot(
            landing=landing,
            instance=instance.name,
            engine_url=instance.spec.engine_url,
            lease_s=reply.lease_s,
        )

    async def renew(self, transfer_id: str, instance: str) -> None:
        """Prolong a landing's lease. Raises RpcError (NOT_FOUND: there is none any more)."""
        found = self._instances.by_name.get(instance)
        if found is None:
            raise RpcError("NOT_FOUND", f"{self._cluster} has no instance {instance}")
        granted_s = await found.agent.renew(transfer_id, self._lease_s, RPC_TIMEOUT_S)
        self.slots.renew(transfer_id, granted_s, time.monotonic())

    async def wait(self, transfer_id: str, instance: str, timeout_s: float) -> LandingReport:
        """Wait for the end of a landing; the report says "open" after `timeout_s`."""
        found = self._instances.by_name.get(instance)
        if found is None:
            return LandingReport(
                state="unknown", error=f"{self._cluster} has no instance {instance}"
            )
        report: LandingReport | None = None
        try:
            report = await self._wait_at(found, transfer_id, timeout_s)
        finally:
            # Also when this call was cancelled, since the caller may know of the end from elsewhere
            # and send the decode request.
            is_over = report is None or report.state != "open"
            # From here on the decode request counts at the instance instead of the slot.
            if is_over and self.slots.landing_ended(transfer_id):
                found.load.given()
        return report

    async def release(self, transfer_id: str, instance: str, reason: str) -> LoadTimes | None:
        """Give the landing back, to the end even if the caller is cancelled. Returns what the
        engine says of the load; None: nothing.
        """
        self.leases.drop(transfer_id)
        self.slots.drop(transfer_id)
        found = self._instances.by_name.get(instance)
        if found is None:
            return None
        return await self._cleanups.finish(self._cancel(found, transfer_id, reason))

    def node(self, job: PrefillJob) -> str:
        """The node of the job's landing; "" for a landing that is not of this cluster."""
        found = self._instances.by_name.get(self.slots.instance(job.landing.transfer_id) or "")
        return "" if found is None else found.spec.agent

    async def close(self) -> None:
        """Renew no more leases, and wait for landings that are being given back."""
        await self.leases.close()
        await self._cleanups.close()

    async def _wait_at(
        self, instance: Instance, transfer_id: str, timeout_s: float
    ) -> LandingReport:
        try:
            report = await instance.agent.wait(
                transfer_id, "landing", wait_s=timeout_s, timeout_s=RPC_TIMEOUT_S
            )
        except RpcError as error:
            logger.warning("%s: landing %s not awaited: %s", instance.name, transfer_id, error)
            return LandingReport(state="unknown", error=str(error))
        except asyncio.CancelledError:
            # Closing the agent's channel cancels its calls, as if this task had been cancelled.
            if cancel_requested():
                raise
            return LandingReport(state="unknown", error=f"{self._cluster} is shutting down")
        return landing_report(report)

    async def _cancel(self, instance: Instance, transfer_id: str, reason: str) -> LoadTimes | None:
        try:
            reply = await instance.agent.cancel(transfer_id, reason, RPC_TIMEOUT_S)
        except RpcError as error:
            # An agent that is gone has no landing any more; in a slow one the lease ends it.
            logger.warning("%s: landing %s not cancelled: %s", instance.name, transfer_id, error)
            return None
        self._instances.landing_room_said(instance.name, reply.landing_room_bytes)
        return reply.times
