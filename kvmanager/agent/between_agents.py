"""The operations between two node agents: cache moves and link probes.

It does not know why anything is moved, and never retries a call.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Final

from kvmanager.agent.cache.move_messages import CacheMoveStatusReply, MoveRole
from kvmanager.agent.client import (
    LINK_CALL_S,
    LINK_PROBE_LEASE_S,
    MOVE_LEASE_S,
    AgentClient,
    CacheMoveOrder,
)
from kvmanager.agent.links.messages import SendLinkProbeReply
from transport.rpc import RpcError

MOVE_POLL_S: Final = 5.0
"""Longest wait of one call for the end of a cache move. Each call renews the move's lease."""


@dataclass(frozen=True, slots=True)
class CacheMoveResult:
    """The result of a move; 0 bytes when the destination already had all parts."""

    nbytes: int
    num_parts: int
    kept_parts: int
    transfer_s: float = 0.0
    rtt_s: float = 0.0


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

    Raises RpcError: NO_ROOM, NOT_FOUND, INVALID, REFUSED as the calls of `AgentClient`, UNAVAILABLE
    when the transfer failed. On every error, cancellation included, the move is ended at both
    agents.
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
