"""Typed client of one node agent's control port, for cluster fronts.

It does not know instances or jobs and never retries. Every method raises RpcError.
"""

from typing import Final, Literal

from kvmanager.agent.messages import (
    SERVICE,
    Await,
    CacheFeed,
    Cancel,
    CancelReply,
    ListCache,
    ListCacheReply,
    OpenOutbox,
    OpenOutboxReply,
    ProbeEnd,
    ProbeEndReply,
    ProbeLanding,
    ProbeLandingReply,
    ProbeRole,
    ProbeSend,
    ProbeSendReply,
    ProbeStatus,
    ProbeStatusReply,
    Renew,
    RenewReply,
    Reserve,
    ReserveReply,
    Status,
    StatusReply,
    TransferReport,
    WatchCache,
)
from kvmanager.landing import Landing
from transport import TlsFiles
from transport.rpc import RpcClient

_ANSWER_S: Final = 5.0
"""What a call that waits for something may take beyond that wait."""


class AgentControl:
    """The agent at `target` ("host:port")."""

    def __init__(self, target: str, tls: TlsFiles | None = None) -> None:
        self.target = target
        self._client = RpcClient(target, SERVICE, tls)

    async def reserve(
        self,
        num_tokens: int,
        token_digest: str,
        lease_s: float,
        *,
        timeout_s: float,
        block_keys: bytes = b"",
    ) -> ReserveReply:
        """Memory for the KVCache of `num_tokens` of the only layout there. NO_ROOM, INVALID.

        `block_keys`: see `Reserve`.
        """
        request = Reserve(
            num_tokens=num_tokens,
            lease_s=lease_s,
            token_digest=token_digest,
            block_keys=block_keys,
        )
        return await self._client.call("Reserve", request, ReserveReply, timeout_s)

    async def open_outbox(
        self, landing: Landing, lease_s: float, timeout_s: float, *, tenant: str = ""
    ) -> OpenOutboxReply:
        """Memory for an engine to fill, sent to `landing` as it fills. NO_ROOM, INVALID."""
        request = OpenOutbox(
            transfer_id=landing.transfer_id,
            token=landing.token,
            nbytes=landing.nbytes,
            num_tokens=landing.num_tokens,
            layout_fingerprint=landing.layout_fingerprint,
            host=landing.host,
            port=landing.port,
            lease_s=lease_s,
            tenant=tenant,
            cached_tokens=landing.cached_tokens,
        )
        return await self._client.call("OpenOutbox", request, OpenOutboxReply, timeout_s)

    async def renew(self, transfer_id: str, lease_s: float, timeout_s: float) -> None:
        """Prolong what the agent holds of a transfer. NOT_FOUND: nothing live."""
        await self._client.call("Renew", Renew(transfer_id, lease_s), RenewReply, timeout_s)

    async def cancel(self, transfer_id: str, reason: str, timeout_s: float) -> None:
        """End what the agent holds of a transfer. Idempotent."""
        await self._client.call("Cancel", Cancel(transfer_id, reason), CancelReply, timeout_s)

    async def wait_outbox(
        self, transfer_id: str, wait_s: float, timeout_s: float
    ) -> TransferReport:
        """How an outbox is doing: its end, or its state after `wait_s`. NOT_FOUND.

        `timeout_s` is what the call may take beyond `wait_s`.
        """
        request = Await(transfer_id, wait_s, "outbox")
        return await self._client.call("Await", request, TransferReport, wait_s + timeout_s)

    async def wait_landing(
        self, transfer_id: str, wait_s: float, timeout_s: float
    ) -> TransferReport:
        """`wait_outbox` for a landing; "complete" from the moment it has landed. NOT_FOUND."""
        request = Await(transfer_id, wait_s, "landing")
        return await self._client.call("Await", request, TransferReport, wait_s + timeout_s)

    async def status(self, timeout_s: float) -> StatusReply:
        """Memory, transfers, engines, links."""
        return await self._client.call("Status", Status(), StatusReply, timeout_s)

    async def probe_landing(
        self, nbytes: int, lease_s: float, timeout_s: float
    ) -> ProbeLandingReply:
        """A landing for one probe, which takes no arena memory. NO_ROOM, INVALID."""
        request = ProbeLanding(nbytes, lease_s)
        return await self._client.call("ProbeLanding", request, ProbeLandingReply, timeout_s)

    async def probe_send(self, request: ProbeSend, timeout_s: float) -> None:
        """Begin to send a probe to a landing. NO_ROOM, INVALID, NOT_FOUND (ended already)."""
        await self._client.call("ProbeSend", request, ProbeSendReply, timeout_s)

    async def probe_status(
        self, transfer_id: str, role: ProbeRole, lease_s: float, timeout_s: float
    ) -> ProbeStatusReply:
        """How one end of a probe is doing; prolongs it. NOT_FOUND."""
        request = ProbeStatus(transfer_id, role, lease_s)
        return await self._client.call("ProbeStatus", request, ProbeStatusReply, timeout_s)

    async def probe_end(self, transfer_id: str, reason: str, timeout_s: float) -> None:
        """End a probe's ends at this agent. Idempotent."""
        await self._client.call("ProbeEnd", ProbeEnd(transfer_id, reason), ProbeEndReply, timeout_s)

    async def watch_cache(self, epoch: str, after_seq: int, timeout_s: float) -> CacheFeed:
        """What changed in the prefix cache after this event, as soon as anything has, at most
        `timeout_s` later. INVALID: no cache there.
        """
        request = WatchCache(epoch, after_seq, timeout_s)
        return await self._client.call("WatchCache", request, CacheFeed, timeout_s + _ANSWER_S)

    async def list_cache(
        self, limit: int, order: Literal["hits", "size", "recent"], timeout_s: float
    ) -> ListCacheReply:
        """The first `limit` of its longest cached prefixes. INVALID: no cache there."""
        request = ListCache(limit, order)
        return await self._client.call("ListCache", request, ListCacheReply, timeout_s)

    async def close(self) -> None:
        """Close the connection. Idempotent."""
        await self._client.close()
