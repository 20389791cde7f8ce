"""What the control plane says to move cached prefixes between node agents: more structs of service
`prfaas.NodeAgent`.

They do not know how they travel. `block_keys` are joined keys (`kvmanager.hashing`): the root key,
then those of a prefix's blocks from block 0 on; `parts` are (block index, part number) pairs of the
layout's `CacheShape`. Ids, tokens and fingerprints are hex strings. `grant` is a gateway's grant
for the call (`kvmanager.agent.grants`), without which agents with `granting_keys` answer REFUSED.

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
    """Let those of these parts that are not in the arena here land in the prefix cache."""

    layout_fingerprint: str
    block_keys: bytes
    parts: list[tuple[int, int]]
    lease_s: float
    grant: bytes = b""


class ReserveCacheMoveReply(msgspec.Struct, frozen=True):
    """Where to send `parts`, end to end in this order. Without parts there is nothing to send, and
    no transfer: everything is here already, or is being stored.
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

    `priority` "request": somebody waits for it; "replication": behind what requests wait for.
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


class SendCacheMoveReply(msgspec.Struct, frozen=True):
    lease_s: float


class CacheMoveStatus(msgspec.Struct, frozen=True):
    """How one end of a move is doing: its end, or its state after `wait_s`. Lets it live `lease_s`
    from now.
    """

    transfer_id: str
    role: MoveRole
    lease_s: float
    wait_s: float = 0.0


class CacheMoveStatusReply(msgspec.Struct, frozen=True):
    """`kept_parts`: of a landing that is complete, how many parts are in the cache now. Only the
    sending end knows `transfer_s` (first byte sent to last byte acknowledged) and `rtt_s`; 0 while
    not known.
    """

    state: MoveState
    error: str
    nbytes: int
    done_bytes: int
    kept_parts: int = 0
    transfer_s: float = 0.0
    rtt_s: float = 0.0


class EndCacheMove(msgspec.Struct, frozen=True):
    """End the move's ends here; what has landed as a whole stays."""

    transfer_id: str
    reason: str = ""


class EndCacheMoveReply(msgspec.Struct, frozen=True):
    """`ended`: whether something was still alive."""

    ended: bool


class DropCached(msgspec.Struct, frozen=True):
    """Drop what this prefix alone needs: of the blocks from the last one back to block
    `keep_blocks`, all parts that nobody uses and nothing hangs on.
    """

    layout_fingerprint: str
    block_keys: bytes
    keep_blocks: int = 0


class DropCachedReply(msgspec.Struct, frozen=True):
    num_parts: int
