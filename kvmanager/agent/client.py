"""Typed client of a node agent's control port.

It does not know instances, jobs or why anything is moved, and never retries a call. Every method
raises RpcError, whose codes are in `kvmanager.agent.messages`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeVar

import msgspec
from msgspec import structs

from kvmanager.agent.cache.move_messages import (
    CacheMoveStatus,
    CacheMoveStatusReply,
    DropCached,
    DropCachedReply,
    EndCacheMove,
    EndCacheMoveReply,
    MoveRole,
    ReserveCacheMove,
    ReserveCacheMoveReply,
    SendCacheMove,
    SendCacheMoveReply,
)
from kvmanager.agent.embeddings.messages import (
    HasEmbeddings,
    HasEmbeddingsReply,
    ReserveEmbeddings,
    ReserveEmbeddingsReply,
    SendEmbeddings,
    SendEmbeddingsReply,
)
from kvmanager.agent.grants import move_landing, move_send, probe_send
from kvmanager.agent.host_messages import HostFacts, HostFactsReply
from kvmanager.agent.links.messages import LinkFeed, SendLinkProbe, SendLinkProbeReply, WatchLinks
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
    Renew,
    RenewReply,
    Reserve,
    ReserveReply,
    Status,
    StatusReply,
    TransferReport,
    WatchCache,
)
from kvmanager.agent.probe_messages import (
    ProbeEnd,
    ProbeEndReply,
    ProbeLanding,
    ProbeLandingReply,
    ProbeRole,
    ProbeSend,
    ProbeSendReply,
    ProbeStatus,
    ProbeStatusReply,
)
from kvmanager.hashing import join_keys
from kvmanager.landing import ReservedLanding
from transport import Credentials
from transport.grants import Granter
from transport.plain import printable_message
from transport.rpc import RpcClient, RpcError

CALL_S: Final = 5.0
"""Timeout of a call without one of its own, in addition to the time for which it waits."""
MOVE_LEASE_S: Final = 15.0
LINK_CALL_S: Final = 3.0
"""As `CALL_S`, for calls about links, whose answers are soon out of date."""
LINK_PROBE_LEASE_S: Final = 5.0

ReplyT = TypeVar("ReplyT", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class CacheMoveOrder:
    """The parts of a prefix to move, and how urgently. `block_keys` begin with the root key and are
    of the cache `namespace`; "": any of the layout's.
    """

    layout_fingerprint: str
    block_keys: bytes
    parts: Sequence[tuple[int, int]]
    priority: Literal["request", "replication"] = "replication"
    tenant: str = ""
    namespace: str = ""


class AgentClient:
    """Calls the agent at `target` ("host:port") over one channel.

    A gateway's `granter` signs for moves of cached prefixes and probes of links. Grants for other
    calls come from their callers.
    """

    def __init__(
        self, target: str, credentials: Credentials | None = None, granter: Granter | None = None
    ) -> None:
        self.target = target
        self._rpc = RpcClient(target, SERVICE, credentials)
        self._granter = granter
        self._receives_at = ""

    async def close(self) -> None:
        """Close the channel. Idempotent."""
        await self._rpc.close()

    async def status(self, timeout_s: float) -> StatusReply:
        """The agent's memory, transfers, engines with their layouts, and links."""
        return printable_message(await self._call(Status(), StatusReply, timeout_s))

    # ---- transfers

    async def reserve(self, request: Reserve, timeout_s: float) -> ReserveReply:
        """Reserve memory for KVCache that is to land at the agent. NO_ROOM, INVALID."""
        return await self._call(request, ReserveReply, timeout_s)

    async def open_outbox(
        self,
        landing: ReservedLanding,
        lease_s: float,
        timeout_s: float,
        *,
        tenant: str = "",
        grant: bytes = b"",
        by_transport: bool = False,
        instance: str = "",
        traceparent: str = "",
    ) -> OpenOutboxReply:
        """Reserve memory that an engine fills and the agent sends to `landing` meanwhile. If the
        agent has the landing, the engine fills that itself, unless `by_transport`. `instance`: the
        engine, any one if it is not named. NO_ROOM, NOT_FOUND (it is not connected), INVALID.
        """
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
            window_step=landing.window_step,
            grant=grant,
            by_transport=by_transport,
            draft=landing.draft,
            instance=instance,
            traceparent=traceparent,
        )
        return await self._call(request, OpenOutboxReply, timeout_s)

    async def renew(self, transfer_id: str, lease_s: float, timeout_s: float) -> float:
        """Renew the lease of a transfer at the agent. Returns the lease that it grants. NOT_FOUND:
        it has no live end there.
        """
        return (await self._call(Renew(transfer_id, lease_s), RenewReply, timeout_s)).lease_s

    async def cancel(self, transfer_id: str, reason: str, timeout_s: float) -> CancelReply:
        """End a transfer at the agent. Idempotent."""
        return await self._call(Cancel(transfer_id, reason), CancelReply, timeout_s)

    async def wait(
        self,
        transfer_id: str,
        kind: Literal["landing", "outbox"],
        *,
        wait_s: float,
        timeout_s: float,
    ) -> TransferReport:
        """The state of one end of a transfer, when it has ended or after `wait_s`. NOT_FOUND.

        A landing is "complete" as soon as it has landed. The call may take `timeout_s` longer than
        `wait_s`.
        """
        return await self._call(
            Await(transfer_id, wait_s, kind), TransferReport, wait_s + timeout_s
        )

    # ---- the prefix cache

    async def watch_cache(self, epoch: str, after_seq: int, timeout_s: float) -> CacheFeed:
        """The changes of the prefix cache after this event. Waits at most `timeout_s` for one.
        INVALID: the agent has no cache.
        """
        request = WatchCache(epoch, after_seq, timeout_s)
        return await self._call(request, CacheFeed, timeout_s + CALL_S)

    async def list_cache(
        self, limit: int, order: Literal["hits", "size", "recent"], timeout_s: float
    ) -> ListCacheReply:
        """The first `limit` cached prefixes that nothing continues. INVALID: the agent has no
        cache.
        """
        return await self._call(ListCache(limit, order), ListCacheReply, timeout_s)

    async def drop_cached(
        self, layout_fingerprint: str, block_keys: bytes, keep_blocks: int, namespace: str = ""
    ) -> int:
        """Drop the parts that only this prefix needs, behind `keep_blocks`. Returns how many parts.
        INVALID.
        """
        request = DropCached(layout_fingerprint, block_keys, keep_blocks, namespace)
        return (await self._call(request, DropCachedReply)).num_parts

    async def reserve_cache_move(
        self, order: CacheMoveOrder, lease_s: float
    ) -> ReserveCacheMoveReply:
        """Reserve memory for those parts of `order` that this agent lacks. NO_ROOM, INVALID."""
        request = ReserveCacheMove(
            order.layout_fingerprint,
            order.block_keys,
            list(order.parts),
            lease_s,
            namespace=order.namespace,
        )
        if self._granter is not None:
            grant = self._granter.grant(move_landing(request, await self._own_endpoint()))
            request = structs.replace(request, grant=grant)
        return await self._call(request, ReserveCacheMoveReply)

    async def send_cache_move(
        self, order: CacheMoveOrder, landing: ReserveCacheMoveReply, lease_s: float
    ) -> None:
        """Begin to send the parts that the landing lacks. NO_ROOM, NOT_FOUND, INVALID."""
        request = SendCacheMove(
            transfer_id=landing.transfer_id,
            token=landing.token,
            nbytes=landing.nbytes,
            host=landing.host,
            port=landing.port,
            lease_s=lease_s,
            layout_fingerprint=order.layout_fingerprint,
            block_keys=order.block_keys,
            parts=landing.parts,
            priority=order.priority,
            tenant=order.tenant,
            namespace=order.namespace,
        )
        if self._granter is not None:
            grant = self._granter.grant(move_send(request, await self._own_endpoint()))
            request = structs.replace(request, grant=grant)
        # The source may have to read from SSD first.
        await self._call(request, SendCacheMoveReply, MOVE_LEASE_S)

    async def cache_move_status(
        self, transfer_id: str, role: MoveRole, *, lease_s: float, wait_s: float
    ) -> CacheMoveStatusReply:
        """The state of one end of a move of any content, when it has ended or after `wait_s`.
        Renews its lease. NOT_FOUND.
        """
        request = CacheMoveStatus(transfer_id, role, lease_s, wait_s)
        return await self._call(request, CacheMoveStatusReply, wait_s + CALL_S)

    async def end_cache_move(self, transfer_id: str, reason: str) -> bool:
        """End both roles of a move at the agent. Returns whether one was alive. Idempotent."""
        return (await self._call(EndCacheMove(transfer_id, reason), EndCacheMoveReply)).ended

    # ---- embeddings

    async def has_embeddings(
        self, keys: Sequence[bytes], timeout_s: float, *, wait_s: float = 0.0
    ) -> list[int]:
        """The bytes of each of these embeddings at the agent, 0 for one that it does not have; they
        count as used now. Waits at most `wait_s` for those that are being put there. `keys`:
        `kvmanager.embedding_keys`. INVALID: the agent keeps none.
        """
        request = HasEmbeddings(join_keys(keys), wait_s)
        return (await self._call(request, HasEmbeddingsReply, wait_s + timeout_s)).nbytes

    async def reserve_embeddings(
        self, request: ReserveEmbeddings, timeout_s: float
    ) -> ReserveEmbeddingsReply:
        """Reserve memory for those embeddings that this agent lacks. NO_ROOM, INVALID."""
        return await self._call(request, ReserveEmbeddingsReply, timeout_s)

    async def send_embeddings(self, request: SendEmbeddings, timeout_s: float) -> None:
        """Begin to send embeddings to a landing. NO_ROOM, NOT_FOUND, INVALID."""
        await self._call(request, SendEmbeddingsReply, timeout_s)

    # ---- probes of the doctor

    async def probe_landing(
        self, nbytes: int, lease_s: float, timeout_s: float
    ) -> ProbeLandingReply:
        """A landing for one probe, which takes no arena memory. NO_ROOM, INVALID."""
        return await self._call(ProbeLanding(nbytes, lease_s), ProbeLandingReply, timeout_s)

    async def probe_send(self, request: ProbeSend, timeout_s: float) -> None:
        """Begin to send a probe to a landing. NO_ROOM, INVALID, NOT_FOUND (ended already)."""
        await self._call(request, ProbeSendReply, timeout_s)

    async def probe_status(
        self, transfer_id: str, role: ProbeRole, lease_s: float, timeout_s: float
    ) -> ProbeStatusReply:
        """The state of one end of a probe. Renews its lease. NOT_FOUND."""
        request = ProbeStatus(transfer_id, role, lease_s)
        return await self._call(request, ProbeStatusReply, timeout_s)

    async def probe_end(self, transfer_id: str, reason: str, timeout_s: float) -> None:
        """End both roles of a probe at this agent. Idempotent."""
        await self._call(ProbeEnd(transfer_id, reason), ProbeEndReply, timeout_s)

    async def host_facts(self, timeout_s: float = CALL_S) -> HostFactsReply:
        """Ask what the agent sees of its host. INVALID from an agent of an older release."""
        return await self._call(HostFacts(), HostFactsReply, timeout_s)

    # ---- links

    async def watch_links(self, request: WatchLinks) -> LinkFeed:
        """All links of the agent, when there is news. INVALID."""
        return await self._call(request, LinkFeed, request.timeout_s + LINK_CALL_S)

    async def send_link_probe(
        self, landing: ProbeLandingReply, nbytes: int, host: str, port: int
    ) -> SendLinkProbeReply:
        """Send a probe to `landing` by way of `host`:`port`, and return its result. NO_ROOM,
        INVALID.
        """
        request = SendLinkProbe(
            transfer_id=landing.transfer_id,
            token=landing.token,
            fingerprint=landing.fingerprint,
            nbytes=nbytes,
            host=host,
            port=port,
            lease_s=LINK_PROBE_LEASE_S,
        )
        if self._granter is not None:
            grant = self._granter.grant(probe_send(request))
            request = structs.replace(request, grant=grant)
        return await self._call(request, SendLinkProbeReply, LINK_PROBE_LEASE_S + LINK_CALL_S)

    async def _call(
        self, request: msgspec.Struct, reply_type: type[ReplyT], timeout_s: float = CALL_S
    ) -> ReplyT:
        """Call the method that has the name of its request's type."""
        try:
            return await self._rpc.call(type(request).__name__, request, reply_type, timeout_s)
        except RpcError as error:
            if error.code == "REFUSED":
                self._receives_at = ""  # another agent may have this address now
            raise

    async def _own_endpoint(self) -> str:
        """The address at which the agent receives, which is its name in grants."""
        if not self._receives_at:
            self._receives_at = (await self.status(CALL_S)).data_endpoint
        return self._receives_at
