"""The operations between two node agents: moves of prefixes and embeddings, and link probes.

It does not know why anything is moved, and never retries a call.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvmanager.agent.cache.move_messages import CacheMoveStatusReply, MoveRole
from kvmanager.agent.client import (
    CALL_S,
    LINK_CALL_S,
    LINK_PROBE_LEASE_S,
    MOVE_LEASE_S,
    AgentClient,
    CacheMoveOrder,
)
from kvmanager.agent.embeddings.messages import ReserveEmbeddings, SendEmbeddings
from kvmanager.agent.links.messages import SendLinkProbeReply
from kvmanager.hashing import join_keys
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


@dataclass(frozen=True, slots=True)
class EmbeddingOrder:
    """The embeddings to pull: the bytes of each, which `AgentClient.has_embeddings` tells, by its
    key. `grant` is a gateway's for the embeddings `granted`; without these for all of `sizes`.
    """

    sizes: Mapping[bytes, int]
    grant: bytes = b""
    granted: Sequence[bytes] = ()
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class EmbeddingsPulled:
    """What a pull has done. `num_pulled` embeddings of `nbytes` bytes came by this pull, and
    `num_missing` are not at the destination all the same: it has no room, or somebody else who was
    putting them there has given up. `seconds` is the time of the whole pull, `transfer_s` that from
    the first byte sent until the last one was verified.
    """

    num_pulled: int
    nbytes: int
    num_missing: int
    seconds: float
    transfer_s: float


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
    # The source sends what it is asked for: the destination may want less than the order, not more.
    if not set(map(tuple, landing.parts)) <= set(map(tuple, order.parts)):
        message = f"{destination.target} asks for parts of the prefix that it is not to get"
        raise RpcError("INVALID", message)
    sending = source.send_cache_move(order, landing, MOVE_LEASE_S)
    landed, sent = await _carried(source, destination, landing.transfer_id, sending)
    return CacheMoveResult(
        landing.nbytes, len(landing.parts), landed.kept_parts, sent.transfer_s, sent.rtt_s
    )


async def pull_embeddings(
    source: AgentClient, destination: AgentClient, order: EmbeddingOrder
) -> EmbeddingsPulled:
    """Have `destination` get the embeddings that it lacks from `source`, and wait until they can be
    found there. Waits for those, too, that somebody else is putting there.

    Raises RpcError: NO_ROOM at the destination for any of them, NOT_FOUND (the source has lost
    one), INVALID, REFUSED, UNAVAILABLE when the transfer failed. On every error, cancellation
    included, the transfer is ended at both agents.
    """
    began_s = time.monotonic()
    keys, sizes = list(order.sizes), list(order.sizes.values())
    grant, granted = order.grant, join_keys(order.granted)
    landing = await destination.reserve_embeddings(
        ReserveEmbeddings(join_keys(keys), sizes, MOVE_LEASE_S, grant, granted), CALL_S
    )
    told = (*landing.lacking, *landing.pending, *landing.no_room)
    if not all(0 <= index < len(keys) for index in told):
        raise RpcError(
            "INVALID", f"{destination.target} speaks of embeddings that it is not to get"
        )
    transfer_s = 0.0
    if landing.lacking:
        request = SendEmbeddings(
            transfer_id=landing.transfer_id,
            token=landing.token,
            keys=join_keys([keys[index] for index in landing.lacking]),
            nbytes=[sizes[index] for index in landing.lacking],
            host=landing.host,
            port=landing.port,
            lease_s=MOVE_LEASE_S,
            tenant=order.tenant,
            grant=grant,
            granted=granted or join_keys(keys),
        )
        sending = source.send_embeddings(request, CALL_S)
        _, sent = await _carried(source, destination, landing.transfer_id, sending)
        transfer_s = sent.transfer_s
    pending = [keys[index] for index in landing.pending]
    put = await destination.has_embeddings(pending, CALL_S, wait_s=MOVE_LEASE_S) if pending else []
    return EmbeddingsPulled(
        num_pulled=len(landing.lacking),
        nbytes=landing.nbytes,
        num_missing=len(landing.no_room) + put.count(0),
        seconds=time.monotonic() - began_s,
        transfer_s=transfer_s,
    )


async def _carried(
    source: AgentClient, destination: AgentClient, transfer_id: str, sending: Awaitable[None]
) -> tuple[CacheMoveStatusReply, CacheMoveStatusReply]:
    """Begin to send to an open landing, and return what both ends say of their end. On every error
    the transfer is ended at both agents.
    """
    try:
        await sending
        landed = await _wait_end(destination, transfer_id, "landing", source)
        return landed, await _wait_end(source, transfer_id, "send", destination)
    except BaseException as error:
        ending = asyncio.gather(
            *(_give_up(agent, transfer_id, error) for agent in (source, destination))
        )
        # Shielded: a second cancellation must not keep the agents from hearing of the end.
        await asyncio.shield(ending)
        raise


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
