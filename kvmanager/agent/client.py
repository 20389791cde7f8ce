"""Typed client of a node agent's control port, and the operations between two agents: cache moves
and link probes.

It does not know instances, jobs or why anything is moved, and never retries a call. Every method
raises RpcError, whose codes are in `kvmanager.agent.messages`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeVar

import msgspec

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
from kvmanager.landing import ReservedLanding
from transport import TlsFiles
from transport.rpc import RpcClient, RpcError

CALL_S: Final = 5.0
"""Timeout of a call without one of its own, in addition to the time for which it waits."""
MOVE_LEASE_S: Final = 15.0
MOVE_POLL_S: Final = 5.0
"""Longest wait of one call for the end of a cache move. Each call renews the move's lease."""
LINK_CALL_S: Final = 3.0
"""As `CALL_S`, for calls about links, whose answers are soon out of date."""
LINK_PROBE_LEASE_S: Final = 5.0

ReplyT = TypeVar("ReplyT", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class CacheMoveOrder:
    """The parts of a prefix to move, and how urgently. `block_keys` begin with the root key."""

    layout_fingerprint: str
    block_keys: bytes
    parts: Sequence[tuple[int, int]]
    priority: Literal["request", "replication"] = "replication"
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class CacheMoveResult:
    """The result of a move; 0 bytes when the destination already had all parts."""

    nbytes: int
    num_parts: int
    kept_parts: int
    transfer_s: float = 0.0
    rtt_s: float = 0.0


class AgentClient:
    """Calls the agent at `target` ("host:port") over one channel."""

    def __init__(self, target: str, tls: TlsFiles | None = None) -> None:
        self.target = target
        self._rpc = RpcClient(target, SERVICE, tls)

    async def close(self) -> None:
        """Close the channel. Idempotent."""
        await self._rpc.close()

    async def status(self, timeout_s: float) -> StatusReply:
        """The agent's memory, transfers, engines with their layouts, and links."""
        return await self._call(Status(), StatusReply, timeout_s)

    # ---- transfers

    async def reserve(self, request: Reserve, timeout_s: float) -> ReserveReply:
        """Reserve memory for KVCache that is to land at the agent. NO_ROOM, INVALID."""
        return await self._call(request, ReserveReply, timeout_s)

    async def open_outbox(
        self, landing: ReservedLanding, lease_s: float, timeout_s: float, *, tenant: str = ""
    ) -> OpenOutboxReply:
        """Reserve memory that an engine fills and the agent sends to `landing` meanwhile. NO_ROOM,
        INVALID.
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
        )
        return await self._call(request, OpenOutboxReply, timeout_s)

    async def renew(self, transfer_id: str, lease_s: float, timeout_s: float) -> None:
        """Renew the lease of a transfer at the agent. NOT_FOUND: it has no live end there."""
        await self._call(Renew(transfer_id, lease_s), RenewReply, timeout_s)

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
        self, layout_fingerprint: str, block_keys: bytes, keep_blocks: int
    ) -> int:
        """Drop the parts that only this prefix needs, behind `keep_blocks`. Returns how many parts.
        INVALID.
        """
        request = DropCached(layout_fingerprint, block_keys, keep_blocks)
        return (await self._call(request, DropCachedReply)).num_parts

    async def reserve_cache_move(
        self, order: CacheMoveOrder, lease_s: float
    ) -> ReserveCacheMoveReply:
        """Reserve memory for those parts of `order` that this agent lacks. NO_ROOM, INVALID."""
        request = ReserveCacheMove(
            order.layout_fingerprint, order.block_keys, list(order.parts), lease_s
        )
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
        )
        # The source may have to read from SSD first.
        await self._call(request, SendCacheMoveReply, MOVE_LEASE_S)

    async def cache_move_status(
        self, transfer_id: str, role: MoveRole, *, lease_s: float, wait_s: float
    ) -> CacheMoveStatusReply:
        """The state of one end of a move, when it has ended or after `wait_s`. Renews its lease.
        NOT_FOUND.
        """
        request = CacheMoveStatus(transfer_id, role, lease_s, wait_s)
        return await self._call(request, CacheMoveStatusReply, wait_s + CALL_S)

    async def end_cache_move(self, transfer_id: str, reason: str) -> bool:
        """End both roles of a move at the agent. Returns whether one was alive. Idempotent."""
        return (await self._call(EndCacheMove(transfer_id, reason), EndCacheMoveReply)).ended

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
        return await self._call(request, SendLinkProbeReply, LINK_PROBE_LEASE_S + LINK_CALL_S)

    async def _call(
        self, request: msgspec.Struct, reply_type: type[ReplyT], timeout_s: float = CALL_S
    ) -> ReplyT:
        """Call the method that has the name of its request's type."""
        return await self._rpc.call(type(request).__name__, request, reply_type, timeout_s)


class AgentClients:
    """Opens clients that share one channel to each agent. The channel closes with the last one."""

    def __init__(self, tls: TlsFiles | None = None) -> None:
        self._tls = tls
        self._shared: dict[str, tuple[RpcClient, set[AgentClient]]] = {}

    def open(self, target: str) -> AgentClient:
        """A client of the agent with this control address, to be closed by the caller."""
        if target not in self._shared:
            self._shared[target] = RpcClient(target, SERVICE, self._tls), set()
        channel, users = self._shared[target]
        client = _SharingClient(target, channel, self._left)
        users.add(client)
        return client

    async def _left(self, client: AgentClient) -> None:
        channel, users = self._shared.get(client.target, (None, set()))
        users.discard(client)
        # A client that is closed twice must not close a channel that later clients have opened.
        if channel is not None and not users:
            del self._shared[client.target]
            await channel.close()


class _SharingClient(AgentClient):
    """A client whose channel others use as well."""

    def __init__(
        self, target: str, channel: RpcClient, left: Callable[[AgentClient], Awaitable[None]]
    ) -> None:
        self.target = target
        self._rpc = channel
        self._left = left

    async def close(self) -> None:
        await self._left(self)


async def probe_link(
    sender: AgentClient, receiver: AgentClient, nbytes: int, host: str, port: int
) -> SendLinkProbeReply:
    """Send one probe from agent to agent by way of `host`:`port`. Raises RpcError."""
    lease_s = LINK_PROBE_LEASE_S + LINK_CALL_S
    landing = await receiver.probe_landing(nbytes, lease_s, LINK_CALL_S)
    try:
        return await sender.send_link_probe(landing, nbytes, host, port)
    finally:
        with contextlib.suppress(RpcError):  # its lease ends it
            await receiver.probe_end(landing.transfer_id, "the probe is over", LINK_CALL_S)


async def move_cache(
    source: AgentClient, destination: AgentClient, order: CacheMoveOrder
) -> CacheMoveResult:
    """Move the parts that `destination` lacks, and wait until they are cached there.

    Raises RpcError: NO_ROOM, NOT_FOUND, INVALID as above, UNAVAILABLE when the transfer failed. On
    every error, cancellation included, the move is ended at both agents.
    """
    # The destination comes first, because only its answer tells which parts are missing there.
    landing = await destination.reserve_cache_move(order, MOVE_LEASE_S)
    if not landing.parts:
        return CacheMoveResult(0, 0, 0)
    transfer_id = landing.transfer_id
    try:
        await source.send_cache_move(order, landing, MOVE_LEASE_S)
        landed = await _wait_end(destination, transfer_id, "landing", source)
        sent = await _wait_end(source, transfer_id, "send", destination)
    except BaseException as error:
        ending = asyncio.gather(
            *(_give_up(agent, transfer_id, error) for agent in (source, destination))
        )
        # Shielded: a second cancellation must not keep the agents from hearing of the end.
        await asyncio.shield(ending)
        raise
    return CacheMoveResult(
        landing.nbytes, len(landing.parts), landed.kept_parts, sent.transfer_s, sent.rtt_s
    )


async def _wait_end(
    agent: AgentClient, transfer_id: str, role: MoveRole, other: AgentClient
) -> CacheMoveStatusReply:
    """Wait for one end of a move, and renew the lease of the other end meanwhile."""
    other_role: MoveRole = "send" if role == "landing" else "landing"
    while True:
        seen = await agent.cache_move_status(
            transfer_id, role, lease_s=MOVE_LEASE_S, wait_s=MOVE_POLL_S
        )
        if seen.state == "complete":
            return seen
        if seen.state != "open":
            raise RpcError("UNAVAILABLE", f"the {role} of a cache move {seen.state}: {seen.error}")
        behind = await other.cache_move_status(
            transfer_id, other_role, lease_s=MOVE_LEASE_S, wait_s=0
        )
        if behind.state not in ("open", "complete"):
            message = f"the {other_role} of a cache move {behind.state}: {behind.error}"
            raise RpcError("UNAVAILABLE", message)


async def _give_up(agent: AgentClient, transfer_id: str, error: BaseException) -> None:
    with contextlib.suppress(RpcError):  # its lease ends it
        await agent.end_cache_move(transfer_id, f"given up: {type(error).__name__}: {error}")
