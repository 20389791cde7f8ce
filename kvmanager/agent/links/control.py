"""The control plane's methods for links: they check requests and send probes.

A probe takes the same path as KVCache through an idle link, behind what requests wait for, and is
over within its lease. The caller has opened a landing for it at the other agent (`ProbeLanding`).
It does not know when a probe is worth its bytes; `netmon.probing` does.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec

from kvmanager.agent.grants import AgentGrants, probe_send
from kvmanager.agent.links.messages import LinkFeed, SendLinkProbe, SendLinkProbeReply, WatchLinks
from kvmanager.agent.links.probing import TENANT, RingSpace
from kvmanager.agent.links.watch import LinkWatch
from kvmanager.agent.request_values import KEY_BYTES, endpoint_of, hex_bytes, transfer_id_of
from kvmanager.agent.transfer_io import SendListener, TransferIo
from kvmanager.transfers.records import BadRequest, NoArenaRoom
from transport import Endpoint, OutgoingSpec, OutgoingTransfer, Priority

MAX_PROBE_BYTES: Final = 64 << 20
MAX_PROBES: Final = 4
"""Most probes at a time."""
MAX_LEASE_S: Final = 30.0
RING_BYTES: Final = 4 << 20


class LinkControl:
    """The handlers. They raise the errors of the transfer table. `probes`: whether this agent may
    send probes.
    """

    def __init__(
        self,
        watch: LinkWatch,
        io: TransferIo,
        grants: AgentGrants,
        clock_s: Callable[[], float],
        *,
        probes: bool,
    ) -> None:
        self._watch = watch
        self._io = io
        self._grants = grants
        self._clock_s = clock_s
        self._probes = probes
        self._num_probes = 0

    async def watch(self, request: WatchLinks) -> LinkFeed:
        return await self._watch.watch(request)

    async def probe(self, request: SendLinkProbe) -> SendLinkProbeReply:
        """Raises BadRequest, NoArenaRoom, CallNotGranted."""
        self._grants.require_for_probe(request.grant, probe_send(request))
        spec, lease_s = self._checked(request)
        self._num_probes += 1
        try:
            return await self._send(spec, request.nbytes, lease_s)
        finally:
            self._num_probes -= 1

    def _checked(self, request: SendLinkProbe) -> tuple[OutgoingSpec, float]:
        if not self._probes:
            raise BadRequest("this agent sends no probes; set link_probes in its configuration")
        if not 0 < request.nbytes <= MAX_PROBE_BYTES:
            raise BadRequest(f"a probe of {request.nbytes} bytes; at most {MAX_PROBE_BYTES}")
        if not math.isfinite(request.lease_s) or request.lease_s <= 0:
            raise BadRequest(f"a lease of {request.lease_s} s")
        endpoint = endpoint_of(request.host, request.port)
        if self._num_probes >= MAX_PROBES:
            raise NoArenaRoom(f"{MAX_PROBES} probes run here already; wait until one is over")
        spec = OutgoingSpec(
            transfer_id_of(request.transfer_id),
            hex_bytes(request.token, KEY_BYTES, "token"),
            hex_bytes(request.fingerprint, KEY_BYTES, "fingerprint"),
            endpoint,
            priority=Priority.REPLICATION,
            tenant=TENANT,
        )
        return spec, min(request.lease_s, MAX_LEASE_S)

    async def _send(self, spec: OutgoingSpec, nbytes: int, lease_s: float) -> SendLinkProbeReply:
        ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def on_end(_: bytes, error: str | None, __: float) -> None:
            if not ended.done():
                ended.set_result(error or "")

        # Random bytes, so that no codec makes the probe smaller.
        ring = RingSpace(memoryview(os.urandom(min(nbytes, RING_BYTES))), nbytes)
        try:
            sending = self._io.open_probe(spec, ring, SendListener(self._io, on_end, self._clock_s))
        except ValueError as error:
            raise BadRequest(str(error)) from error
        try:
            sending.ready(0, nbytes)
            async with asyncio.timeout(lease_s):
                trouble = await ended
        except TimeoutError:
            trouble = f"not over within {lease_s:g} s"
        finally:
            sending.cancel("the probe is over")  # does nothing if it has ended
        return self._judged(spec.endpoint, sending, trouble)

    def _judged(
        self, endpoint: Endpoint, sending: OutgoingTransfer, error: str
    ) -> SendLinkProbeReply:
        progress = sending.progress()
        if progress.first_sent_s is None:
            return SendLinkProbeReply(0, 0.0, error or "nothing was sent")
        until_s = self._clock_s() if progress.completed_s is None else progress.completed_s
        # The estimator of the link divides by it.
        duration_s = max(1e-6, until_s - progress.first_sent_s)
        self._watch.probed(endpoint, progress.acked_bytes, duration_s)
        return SendLinkProbeReply(progress.acked_bytes, duration_s, error)


def link_methods(
    watch: LinkWatch,
    io: TransferIo,
    grants: AgentGrants,
    clock_s: Callable[[], float],
    *,
    probes: bool,
) -> list[tuple[type[msgspec.Struct], type[msgspec.Struct], Callable[[Any], Awaitable[Any]]]]:
    """Request, reply and handler of each method."""
    control = LinkControl(watch, io, grants, clock_s, probes=probes)
    return [
        (WatchLinks, LinkFeed, control.watch),
        (SendLinkProbe, SendLinkProbeReply, control.probe),
    ]
