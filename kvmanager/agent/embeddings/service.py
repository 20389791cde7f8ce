"""The agent's part for embeddings: messages of encoders in, answers out.

The rules are in `kvmanager.pool.embeddings`. It does not know images, models or sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Final

from kvmanager.agent.cache.node_feed import NodeFeed
from kvmanager.agent.config import AgentConfig
from kvmanager.agent.engines.protocol import (
    AgentMessage,
    CacheMessage,
    EmbeddingCancel,
    EmbeddingFind,
    EmbeddingFound,
    EmbeddingFree,
    EmbeddingMessage,
    EmbeddingPut,
    EmbeddingRoom,
    EmbeddingWritten,
    EncoderHello,
    ProtocolError,
    TransferMessage,
)
from kvmanager.agent.kept_arena import KeptArena
from kvmanager.agent.messages import EmbeddingStatus, EncoderStatus
from kvmanager.agent.transfer_io import now_s
from kvmanager.pool.embeddings import EmbeddingCache, NotHeld
from kvmanager.transfers.blocks import Run

MAX_WAIT_S: Final = 60.0
"""Longest wait for embeddings that are being put here."""


class AgentEmbeddings:
    """The embeddings in the arena of one agent. Use on the agent's event loop."""

    def __init__(
        self,
        config: AgentConfig,
        kept: KeptArena,
        make_room: Callable[[int], bool] | None,
        send: Callable[[int, AgentMessage], None],
        feed: NodeFeed,
    ) -> None:
        """Followers of `feed` are told which embeddings come and go."""
        self._drain_s = config.drain_s
        self._block_bytes = config.block_bytes
        self._max_blocks = config.num_embedding_blocks
        self._send = send
        self._feed = feed
        self._hellos: dict[int, EncoderHello] = {}
        """Of the encoders that are connected, by connection."""
        self.cache = EmbeddingCache(
            kept.allocator, config.block_bytes, self._max_blocks, make_room, self._changed
        )
        self._news = asyncio.Event()
        self._move_ids = itertools.count(-1, -1)

    def serves(self, conn_id: int) -> bool:
        """Whether this connection began with `EncoderHello`."""
        return self.cache.is_connected(conn_id)

    def connect(self, conn_id: int, hello: EncoderHello) -> None:
        self._hellos[conn_id] = hello
        self.cache.connect(conn_id)

    def message(
        self, conn_id: int, message: TransferMessage | CacheMessage | EmbeddingMessage
    ) -> None:
        """Process a message. Raises ProtocolError for one that this process must not send."""
        try:
            match message:
                case EmbeddingPut(key, nbytes):
                    runs = self.cache.put(conn_id, key, nbytes)
                    self._send(conn_id, EmbeddingRoom(key, _on_wire(runs)))
                case EmbeddingWritten(key):
                    self.cache.written(conn_id, key)
                case EmbeddingCancel(key):
                    self.cache.cancel(conn_id, key)
                case EmbeddingFind(handle, key):
                    self._find(conn_id, handle, key)
                case EmbeddingFree(handle):
                    self.cache.free(conn_id, handle)
                case _:
                    raise ProtocolError(f"{type(message).__name__} from an encoder")
        except NotHeld as error:
            raise ProtocolError(str(error)) from error

    def lost(self, conn_id: int) -> bool:
        """A connection is closed; False if it was not an encoder's."""
        if not self.cache.is_connected(conn_id):
            return False
        del self._hellos[conn_id]
        self.cache.lost(conn_id, now_s() + self._drain_s)
        return True

    def process_gone(self, conn_id: int) -> None:
        """The process of a lost connection has ended."""
        self.cache.process_gone(conn_id)

    def tick(self) -> None:
        self.cache.tick(now_s())

    def status(self) -> EmbeddingStatus:
        cache, block_bytes = self.cache, self._block_bytes
        return EmbeddingStatus(
            num_embeddings=len(cache),
            held_bytes=cache.num_held_blocks * block_bytes,
            cap_bytes=self._max_blocks * block_bytes,
            num_queries=cache.num_queries,
            num_hits=cache.num_hits,
        )

    async def sizes(self, keys: Sequence[bytes], wait_s: float) -> list[int]:
        """The bytes of each of these embeddings, 0 for one that is not here and whole. Waits for
        those that somebody fills now, for `wait_s` at most.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(wait_s, MAX_WAIT_S)):
                while any(self.cache.is_being_filled(key) for key in keys):
                    self._news.clear()
                    await self._news.wait()
        return [self.cache.use(key) for key in keys]

    def connect_move(self) -> int:
        """A connection of the embedding cache for one end of a move, which must `leave` it."""
        # Below those of engines, which are counted from 0.
        conn_id = next(self._move_ids)
        self.cache.connect(conn_id)
        return conn_id

    def _changed(self, key: bytes, is_here: bool) -> None:
        self._feed.embedding_changed(key, is_here)
        self._news.set()

    def encoders(self) -> list[EncoderStatus]:
        """The instances that are connected, by name."""
        hellos: dict[str, list[EncoderHello]] = {}
        for hello in self._hellos.values():
            hellos.setdefault(hello.instance, []).append(hello)
        # The one that has come last: an engine may be back with other weights before the agent
        # has noticed that the process before it is gone.
        return [
            EncoderStatus(name, len(own), own[-1].encoder, own[-1].engine)
            for name, own in sorted(hellos.items())
        ]

    def _find(self, conn_id: int, handle: int, key: bytes) -> None:
        entry = self.cache.find(conn_id, handle, key)
        if entry is None:
            self._send(conn_id, EmbeddingFound(handle, 0, []))
            return
        self._send(conn_id, EmbeddingFound(handle, entry.nbytes, _on_wire(entry.runs)))


def _on_wire(runs: Sequence[Run]) -> list[tuple[int, int]]:
    return [(run.first, run.length) for run in runs]
