"""Typed client of one node agent's cache moves, and one whole move between two agents.

It does not know why anything is moved. Every method raises RpcError.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

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
from kvmanager.agent.messages import SERVICE, Status, StatusReply
from transport import TlsFiles
from transport.rpc import RpcClient, RpcError

LEASE_S: Final = 15.0
POLL_S: Final = 5.0
"""A status call waits this long for an end; each renews the lease."""
CALL_S: Final = 5.0
"""What any call may take beyond what it waits for."""


@dataclass(frozen=True, slots=True)
class CacheMoveOrder:
    """Which parts of a prefix to move, and how urgently. `block_keys`: the root key first."""

    layout_fingerprint: str
    block_keys: bytes
    parts: Sequence[tuple[int, int]]
    priority: Literal["request", "replication"] = "replication"
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class CacheMoveResult:
    """What was moved: nothing (0 bytes) when the destination had it all. See
    `CacheMoveStatusReply`.
    """

    nbytes: int
    num_parts: int
    kept_parts: int
    transfer_s: float = 0.0
    rtt_s: float = 0.0


class CacheControl:
    """The agent at `target` ("host:port")."""

    def __init__(self, target: str, tls: TlsFiles | None = None) -> None:
        self.target = target
        self._client = RpcClient(target, SERVICE, tls)

    async def reserve(self, order: CacheMoveOrder, lease_s: float) -> ReserveCacheMoveReply:
        """Memory for what is lacking there. NO_ROOM, INVALID."""
        request = ReserveCacheMove(
            order.layout_fingerprint, order.block_keys, list(order.parts), lease_s
        )
        return await self._client.call("ReserveCacheMove", request, ReserveCacheMoveReply, CALL_S)

    async def send(
        self, order: CacheMoveOrder, landing: ReserveCacheMoveReply, lease_s: float
    ) -> None:
        """Begin to send what the landing lacks. NO_ROOM, NOT_FOUND, INVALID."""
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
        await self._client.call("SendCacheMove", request, SendCacheMoveReply, LEASE_S)

    async def move_status(
        self, transfer_id: str, role: MoveRole, *, lease_s: float, wait_s: float
    ) -> CacheMoveStatusReply:
        """One end, when it is over or after `wait_s`; prolongs it. NOT_FOUND."""
        request = CacheMoveStatus(transfer_id, role, lease_s, wait_s)
        return await self._client.call(
            "CacheMoveStatus", request, CacheMoveStatusReply, wait_s + CALL_S
        )

    async def end_move(self, transfer_id: str, reason: str) -> bool:
        """End a move's ends there; whether one was alive. Idempotent."""
        request = EndCacheMove(transfer_id, reason)
        reply = await self._client.call("EndCacheMove", request, EndCacheMoveReply, CALL_S)
        return reply.ended

    async def drop(self, layout_fingerprint: str, block_keys: bytes, keep_blocks: int) -> int:
        """Drop what only this prefix needs, behind `keep_blocks`; how many parts. INVALID."""
        request = DropCached(layout_fingerprint, block_keys, keep_blocks)
        return (await self._client.call("DropCached", request, DropCachedReply, CALL_S)).num_parts

    async def status(self, timeout_s: float) -> StatusReply:
        """Among other things which layouts its engines have."""
        return await self._client.call("Status", Status(), StatusReply, timeout_s)

    async def close(self) -> None:
        """Close the connection. Idempotent."""
        await self._client.close()


async def move_cache(
    source: CacheControl, destination: CacheControl, order: CacheMoveOrder
) -> CacheMoveResult:
    """Move what `destination` lacks, and wait until it is cached there.

    Raises RpcError: NO_ROOM, NOT_FOUND, INVALID as above, UNAVAILABLE when the transfer failed.
    Whatever happens, cancellation included, neither agent is left with a move that nobody wants.
    """
    landing = await destination.reserve(order, LEASE_S)
    if not landing.parts:
        return CacheMoveResult(0, 0, 0)
    try:
        await source.send(order, landing, LEASE_S)
        ended = await _end(destination, landing.transfer_id, "landing", source)
        sent = await _end(source, landing.transfer_id, "send", destination)
    except BaseException as error:
        ending = asyncio.gather(
            *(_give_up(agent, landing.transfer_id, error) for agent in (source, destination))
        )
        await asyncio.shield(ending)
        raise
    return CacheMoveResult(
        landing.nbytes, len(landing.parts), ended.kept_parts, sent.transfer_s, sent.rtt_s
    )


async def _end(
    agent: CacheControl, transfer_id: str, role: MoveRole, other: CacheControl
) -> CacheMoveStatusReply:
    """Wait for one end while the other is kept alive."""
    other_role: MoveRole = "send" if role == "landing" else "landing"
    while True:
        seen = await agent.move_status(transfer_id, role, lease_s=LEASE_S, wait_s=POLL_S)
        if seen.state == "complete":
            return seen
        if seen.state != "open":
            raise RpcError("UNAVAILABLE", f"the {role} of a cache move {seen.state}: {seen.error}")
        behind = await other.move_status(transfer_id, other_role, lease_s=LEASE_S, wait_s=0)
        if behind.state not in ("open", "complete"):
            message = f"the {other_role} of a cache move {behind.state}: {behind.error}"
            raise RpcError("UNAVAILABLE", message)


async def _give_up(agent: CacheControl, transfer_id: str, error: BaseException) -> None:
    with contextlib.suppress(RpcError):  # its lease ends it
        await agent.end_move(transfer_id, f"given up: {type(error).__name__}: {error}")
