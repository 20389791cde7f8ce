"""The control plane's methods for embeddings: they check requests and call the agent's parts.

They do not know memory or transports.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec

from kvmanager.agent.embeddings.messages import (
    HasEmbeddings,
    HasEmbeddingsReply,
    ReserveEmbeddings,
    ReserveEmbeddingsReply,
    SendEmbeddings,
    SendEmbeddingsReply,
)
from kvmanager.agent.embeddings.moves import EmbeddingMoves, MovedEmbeddings
from kvmanager.agent.embeddings.service import AgentEmbeddings
from kvmanager.agent.grants import AgentGrants, embedding_pull
from kvmanager.agent.request_values import (
    KEY_BYTES,
    PRIORITIES,
    endpoint_of,
    hex_bytes,
    transfer_id_of,
)
from kvmanager.hashing import split_keys
from kvmanager.transfers.records import BadRequest, CallNotGranted
from transport import OutgoingSpec

MAX_EMBEDDINGS: Final = 4096
"""Most embeddings of one request: more than any prompt has."""


class EmbeddingControl:
    """The handlers. They raise the errors of the transfer table. `digest`: whether moves are
    checked by a digest.
    """

    def __init__(
        self,
        embeddings: AgentEmbeddings,
        moves: EmbeddingMoves,
        grants: AgentGrants,
        *,
        digest: bool,
    ) -> None:
        self._embeddings = embeddings
        self._moves = moves
        self._grants = grants
        self._digest = digest

    async def has(self, request: HasEmbeddings) -> HasEmbeddingsReply:
        if not math.isfinite(request.wait_s) or request.wait_s < 0:
            raise BadRequest(f"a wait of {request.wait_s} s")
        keys = _keys(request.keys, "keys")
        return HasEmbeddingsReply(await self._embeddings.sizes(keys, request.wait_s))

    async def reserve(self, request: ReserveEmbeddings) -> ReserveEmbeddingsReply:
        # A caller that may choose the keys of a landing can plant embeddings.
        self._grants.require(request.grant, embedding_pull(_granted(request)))
        return self._moves.open_landing(_moved(request), request.lease_s)

    async def send(self, request: SendEmbeddings) -> SendEmbeddingsReply:
        endpoint = endpoint_of(request.host, request.port)
        self._grants.require_within_send_to(
            request.grant, embedding_pull(_granted(request)), endpoint
        )
        what = _moved(request)
        wire = OutgoingSpec(
            transfer_id_of(request.transfer_id),
            hex_bytes(request.token, KEY_BYTES, "token"),
            what.fingerprint,
            endpoint,
            priority=PRIORITIES[request.priority],
            tenant=request.tenant,
            # The default elements, bytes, which no lossy codec takes: the receiver keeps embeddings
            # under their exact keys.
            digest=self._digest,
        )
        return SendEmbeddingsReply(await self._moves.open_send(what, wire, request.lease_s))


def _moved(request: ReserveEmbeddings | SendEmbeddings) -> MovedEmbeddings:
    return MovedEmbeddings(tuple(_keys(request.keys, "keys")), tuple(request.nbytes))


def _granted(request: ReserveEmbeddings | SendEmbeddings) -> list[bytes]:
    """The keys that the request's grant is for. Raises CallNotGranted if it is about others."""
    keys = _keys(request.keys, "keys")
    granted = _keys(request.granted, "granted") if request.granted else keys
    if not set(keys) <= set(granted):
        raise CallNotGranted("the grant is for other embeddings than the call")
    return granted


def _keys(joined: bytes, field: str) -> list[bytes]:
    try:
        keys = split_keys(joined)
    except ValueError as error:
        raise BadRequest(f"{field}: {error}") from error
    if len(keys) > MAX_EMBEDDINGS:
        raise BadRequest(f"{field}: {len(keys)} keys; at most {MAX_EMBEDDINGS}")
    return keys


async def _keeps_none(_request: msgspec.Struct) -> msgspec.Struct:
    raise BadRequest("this agent keeps no embeddings (embedding_gib is 0)")


def embedding_methods(
    embeddings: AgentEmbeddings | None,
    moves: EmbeddingMoves | None,
    grants: AgentGrants,
    *,
    digest: bool,
) -> list[tuple[type[msgspec.Struct], type[msgspec.Struct], Callable[[Any], Awaitable[Any]]]]:
    """Request, reply and handler of each method; without embeddings all of them say so."""
    if embeddings is None or moves is None:
        return [
            (HasEmbeddings, HasEmbeddingsReply, _keeps_none),
            (ReserveEmbeddings, ReserveEmbeddingsReply, _keeps_none),
            (SendEmbeddings, SendEmbeddingsReply, _keeps_none),
        ]
    control = EmbeddingControl(embeddings, moves, grants, digest=digest)
    return [
        (HasEmbeddings, HasEmbeddingsReply, control.has),
        (ReserveEmbeddings, ReserveEmbeddingsReply, control.reserve),
        (SendEmbeddings, SendEmbeddingsReply, control.send),
    ]
