"""Messages about the embeddings of a node agent: structs of service `prfaas.NodeAgent`.

They do not know how they travel. `keys` are joined keys of embeddings (`kvmanager.embedding_keys`).

| method | request -> reply | errors beside UNAVAILABLE, INTERNAL, TIMEOUT |
|---|---|---|
| HasEmbeddings | HasEmbeddings -> HasEmbeddingsReply | INVALID |

INVALID is also the answer of an agent that keeps no embeddings, and of one of an older release.
"""

from __future__ import annotations

import msgspec


class HasEmbeddings(msgspec.Struct, frozen=True):
    """Ask which of these embeddings the agent has, for somebody who is about to use them: they
    count as used now.
    """

    keys: bytes


class HasEmbeddingsReply(msgspec.Struct, frozen=True):
    """The bytes of each embedding, in the order of the keys; 0: it is not here, or not whole."""

    nbytes: list[int]
