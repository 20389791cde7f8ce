"""Messages about the embeddings of a node agent: structs of service `prfaas.NodeAgent`.

They do not know how they travel. `keys` are joined keys of embeddings (`kvmanager.embedding_keys`),
and numbers of bytes are in their order. Ids and tokens are hex strings. `grant` is a gateway's
grant (`kvmanager.agent.grants`) for the embeddings `granted`, of which `keys` must be some; b"":
for `keys` themselves. Agents with `granting_keys` answer REFUSED without it.

A move is asked for and ended with `CacheMoveStatus` and `EndCacheMove`, as one of cached prefixes.

| method | request -> reply | errors beside UNAVAILABLE, INTERNAL, TIMEOUT |
|---|---|---|
| HasEmbeddings | HasEmbeddings -> HasEmbeddingsReply | INVALID |
| ReserveEmbeddings | ReserveEmbeddings -> ReserveEmbeddingsReply | NO_ROOM, INVALID |
| SendEmbeddings | SendEmbeddings -> SendEmbeddingsReply | NO_ROOM, NOT_FOUND (not here), INVALID |

INVALID is also the answer of an agent that keeps no embeddings, and of one of an older release.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class HasEmbeddings(msgspec.Struct, frozen=True):
    """Ask which of these embeddings the agent has, for somebody who is about to use them: they
    count as used now. While somebody puts one of them here, the answer waits for it, for `wait_s`
    at most.
    """

    keys: bytes
    wait_s: float = 0.0


class HasEmbeddingsReply(msgspec.Struct, frozen=True):
    """The bytes of each embedding; 0: it is not here, or not whole."""

    nbytes: list[int]


class ReserveEmbeddings(msgspec.Struct, frozen=True):
    """Reserve memory for those of these embeddings that this agent lacks."""

    keys: bytes
    nbytes: list[int]
    lease_s: float
    grant: bytes = b""
    granted: bytes = b""


class ReserveEmbeddingsReply(msgspec.Struct, frozen=True):
    """The landing for the embeddings at `lacking`, indexes into the keys, which must be sent end to
    end in this order. Without them there is no transfer. Those at `pending` are being put here by
    somebody else; there is no room for those at `no_room`. All others are here.
    """

    lacking: list[int]
    transfer_id: str = ""
    token: str = ""
    nbytes: int = 0
    host: str = ""
    port: int = 0
    lease_s: float = 0.0
    pending: list[int] = []
    no_room: list[int] = []


class SendEmbeddings(msgspec.Struct, frozen=True):
    """Send these embeddings, all of which must be here, to the landing at `host`:`port`. They take
    `nbytes`, each by itself. `priority` and `tenant` are those of `SendCacheMove`.
    """

    transfer_id: str
    token: str
    keys: bytes
    nbytes: list[int]
    host: str
    port: int
    lease_s: float
    priority: Literal["request", "replication"] = "request"
    tenant: str = ""
    grant: bytes = b""
    granted: bytes = b""


class SendEmbeddingsReply(msgspec.Struct, frozen=True):
    lease_s: float
