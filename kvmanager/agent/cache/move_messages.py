"""Messages that move cached prefixes between node agents: structs of service `prfaas.NodeAgent`.

They do not know how they travel. `block_keys` are joined keys (`kvmanager.hashing`): the root key,
then the keys of a prefix's blocks from block 0 on. `parts` are (block index, part number) pairs of
the layout's `CacheShape`. `namespace` is that of the keys: engines of one layout may divide it into
other blocks, and "", as older gateways send it, means any of them. Ids, tokens and fingerprints are
hex strings. `grant` is a gateway's grant for the call (`kvmanager.agent.grants`); agents with
`granting_keys` answer REFUSED without it.

| method | request -> reply | errors beside UNAVAILABLE, INTERNAL, TIMEOUT |
|---|---|---|
| ReserveCacheMove | ReserveCacheMove -> ReserveCacheMoveReply | NO_ROOM, INVALID |
| SendCacheMove | SendCacheMove -> SendCacheMoveReply | NO_ROOM, NOT_FOUND (not cached), INVALID |
| CacheMoveStatus | CacheMoveStatus -> CacheMoveStatusReply | NOT_FOUND (unknown), INVALID |
| EndCacheMove | EndCacheMove -> EndCacheMoveReply | INVALID; ending what is over is no error |
| DropCached | DropCached -> DropCachedReply | INVALID |

INVALID is also the answer of an agent without a prefix cache, and for a layout that no engine of
its host has.
"""

from __future__ import annotations

from typing import Literal

import msgspec

MoveRole = Literal["landing", "send"]
MoveState = Literal["open", "complete", "failed", "cancelled"]


class ReserveCacheMove(msgspec.Struct, frozen=True):
    """Reserve memory of the prefix cache for those of these parts that this arena lacks."""

    layout_fingerprint: str
    block_keys: bytes
    parts: list[tuple[int, int]]
    lease_s: float
    grant: bytes = b""
    namespace: str = ""


class ReserveCacheMoveReply(msgspec.Struct, frozen=True):
    """The landing for `parts`, which must be sent end to end in this order. Without parts there is
    no transfer: all of them are here already, or are being stored.
    """

    parts: list[tuple[int, int]]
    transfer_id: str = ""
    token: str = ""
    nbytes: int = 0
    host: str = ""
    port: int = 0
    lease_s: float = 0.0


class SendCacheMove(msgspec.Struct, frozen=True):
    """Send these parts, all of which must be cached here, to the landing at `host`:`port`.

    `priority` "request": a request waits for it; "replication": it is sent behind those.
    """

    transfer_id: str
    token: str
    nbytes: int
    host: str
    port: int
    lease_s: float
    layout_fingerprint: str
    block_keys: bytes
    parts: list[tuple[int, int]]
    priority: Literal["request", "replication"] = "replication"
    tenant: str = ""
    grant: bytes = b""
    namespace: str = ""


class SendCacheMoveReply(msgspec.Struct, frozen=True):
    lease_s: float


class CacheMoveStatus(msgspec.Struct, frozen=True):
    """Ask for the state of one end of a move, when it has ended or after `wait_s`. Renews its lease
    to `lease_s` from now.
    """

    transfer_id: str
    role: MoveRole
    lease_s: float
    wait_s: float = 0.0


class CacheMoveStatusReply(msgspec.Struct, frozen=True):
    """The state of one end of a move. `kept_parts`: parts of a complete landing that are in the
    cache now. Only the sending end knows `transfer_s` (first byte sent to last byte acknowledged)
    and `rtt_s`; they are 0 while unknown.
    """

    state: MoveState
    error: str
    nbytes: int
    done_bytes: int
    kept_parts: int = 0
    transfer_s: float = 0.0
    rtt_s: float = 0.0


class EndCacheMove(msgspec.Struct, frozen=True):
    """End both roles of a move at this agent. A landing that is complete stays in the cache."""

    transfer_id: str
    reason: str = ""


class EndCacheMoveReply(msgspec.Struct, frozen=True):
    """`ended`: whether something was still alive."""

    ended: bool


class DropCached(msgspec.Struct, frozen=True):
    """Drop the parts that only this prefix needs: from its last block back to block `keep_blocks`,
    all parts that nobody uses and that no longer prefix continues.
    """

    layout_fingerprint: str
    block_keys: bytes
    keep_blocks: int = 0
    namespace: str = ""


class DropCachedReply(msgspec.Struct, frozen=True):
    num_parts: int
