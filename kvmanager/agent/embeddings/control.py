"""The control plane's methods for embeddings: they check requests and call the agent's part.

They do not know memory or transports.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec

from kvmanager.agent.embeddings.messages import HasEmbeddings, HasEmbeddingsReply
from kvmanager.agent.embeddings.service import AgentEmbeddings
from kvmanager.hashing import split_keys
from kvmanager.transfers.records import BadRequest

MAX_EMBEDDINGS: Final = 4096
"""Most embeddings of one request: more than any prompt has."""


class EmbeddingControl:
    """The handlers. `embeddings` None: this agent keeps none."""

    def __init__(self, embeddings: AgentEmbeddings | None) -> None:
        self._embeddings_or_none = embeddings

    async def has(self, request: HasEmbeddings) -> HasEmbeddingsReply:
        """Raises BadRequest."""
        return HasEmbeddingsReply(self._embeddings.sizes(_keys(request.keys)))

    @property
    def _embeddings(self) -> AgentEmbeddings:
        if self._embeddings_or_none is None:
            raise BadRequest("this agent keeps no embeddings (embedding_gib is 0)")
        return self._embeddings_or_none


def _keys(joined: bytes) -> list[bytes]:
    try:
        keys = list(split_keys(joined))
    except ValueError as error:
        raise BadRequest(f"keys: {error}") from error
    if len(keys) > MAX_EMBEDDINGS:
        raise BadRequest(f"keys: {len(keys)} keys; at most {MAX_EMBEDDINGS}")
    return keys


def embedding_methods(
    embeddings: AgentEmbeddings | None,
) -> list[tuple[type[msgspec.Struct], type[msgspec.Struct], Callable[[Any], Awaitable[Any]]]]:
    """Request, reply and handler of each method."""
    control = EmbeddingControl(embeddings)
    return [(HasEmbeddings, HasEmbeddingsReply, control.has)]
