"""A process's client of its node agent for embeddings, with a method for each message.

As in `kvmanager.agent.engines.client`, no method raises and no method blocks; each returns whether
the message was handed over. It does not know images or tensors.
"""

from __future__ import annotations

from pathlib import Path

from kvmanager.agent.engines.connection import AgentConnection
from kvmanager.agent.engines.protocol import (
    EmbeddingCancel,
    EmbeddingFind,
    EmbeddingFree,
    EmbeddingPut,
    EmbeddingWritten,
    EncoderHello,
    encode_frame,
)
from kvmanager.arena import Arena


class EmbeddingClient:
    """Speaks to the agent at `socket_path`. Keys have `kvmanager.hashing.KEY_BYTES` bytes."""

    def __init__(self, socket_path: str | Path, hello: EncoderHello) -> None:
        self._connection = AgentConnection(socket_path, hello)
        self.start = self._connection.start
        self.close = self._connection.close

    @property
    def arena(self) -> Arena | None:
        """The agent's arena while connected."""
        return self._connection.arena

    def put(self, key: bytes, nbytes: int) -> bool:
        """Ask for memory to fill."""
        return self._connection.send(encode_frame(EmbeddingPut(key, nbytes)))

    def written(self, key: bytes) -> bool:
        """Say that the memory given for this key is filled."""
        return self._connection.send(encode_frame(EmbeddingWritten(key)))

    def cancel(self, key: bytes) -> bool:
        """Give back the memory given for this key, unfilled."""
        return self._connection.send(encode_frame(EmbeddingCancel(key)))

    def find(self, handle: int, key: bytes) -> bool:
        """Ask for an embedding, under a handle that was not used before."""
        return self._connection.send(encode_frame(EmbeddingFind(handle, key)))

    def free(self, handle: int) -> bool:
        """End the hold of the embedding that was found under this handle."""
        return self._connection.send(encode_frame(EmbeddingFree(handle)))
