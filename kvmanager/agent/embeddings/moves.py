"""Moves of embeddings: which memory of the embedding cache they send and land in.

The bytes of a move are whole embeddings, end to end, one segment for each. The source holds them in
their place. The destination fills entries of its cache, which can be found when every byte has
landed and was verified. The fingerprint of a move is made of its keys and sizes, so that no
transfer of anything else lands there. The life of a move is in `kvmanager.agent.moves`.

Use it on the agent's event loop. It does not know why anything is moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvmanager.agent.embeddings.messages import ReserveEmbeddingsReply
from kvmanager.agent.embeddings.service import AgentEmbeddings
from kvmanager.agent.moves import Mover
from kvmanager.arena import Arena
from kvmanager.pool.embeddings import EmbeddingCache
from kvmanager.pool.parts_space import PartsSpace
from kvmanager.transfers.blocks import Run
from kvmanager.transfers.records import BadRequest, NoArenaRoom, UnknownTransfer
from transport import ByteSpace, OutgoingSpec
from transport.grants import content_digest


@dataclass(frozen=True, slots=True)
class MovedEmbeddings:
    """Keys of embeddings, and the bytes of each."""

    keys: tuple[bytes, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        """Raises BadRequest."""
        if not self.keys or len(set(self.keys)) < len(self.keys):
            raise BadRequest(f"{len(self.keys)} embeddings, some of them twice or none at all")
        if len(self.sizes) != len(self.keys) or not all(0 < size < 1 << 40 for size in self.sizes):
            raise BadRequest(f"{len(self.keys)} embeddings of {self.sizes} bytes")

    @property
    def fingerprint(self) -> bytes:
        """What both ends of a move must mean by its bytes."""
        sizes = ",".join(map(str, self.sizes))
        return bytes.fromhex(content_digest("embeddings", sizes, *self.keys))


class EmbeddingMoves:
    """The embeddings of one agent, as its mover sends and keeps them. It raises the errors of the
    transfer table.
    """

    def __init__(self, mover: Mover, arena: Arena, embeddings: AgentEmbeddings) -> None:
        self._mover = mover
        self._arena = arena
        self._embeddings = embeddings

    def open_landing(self, what: MovedEmbeddings, lease_s: float) -> ReserveEmbeddingsReply:
        """Reserve memory for the embeddings that this agent lacks, and admit one sender to it.
        Raises NoArenaRoom, BadRequest.
        """
        lease_s = self._mover.admissible("landing", "embeddings", lease_s)
        cache = self._embeddings.cache
        conn_id = self._embeddings.connect_move()
        # Those that are here stay until the others have come, instead of making room for them.
        here = [cache.hold(conn_id, index, key) for index, key in enumerate(what.keys)]
        given: dict[int, Sequence[Run]] = {}
        pending, no_room = [], []
        for index, (key, size) in enumerate(zip(what.keys, what.sizes, strict=True)):
            if here[index] is not None:
                continue
            if cache.is_being_filled(key):
                pending.append(index)
            elif runs := cache.put(conn_id, key, size):
                given[index] = runs
            else:
                no_room.append(index)
        if not given:
            cache.leave(conn_id)
            if no_room and not pending:
                raise NoArenaRoom("no room for any of these embeddings")
            return ReserveEmbeddingsReply([], pending=pending, no_room=no_room)
        moved = MovedEmbeddings(
            tuple(what.keys[index] for index in given), tuple(what.sizes[index] for index in given)
        )
        opened = self._mover.open_landing(
            "embeddings",
            _Landing(cache, conn_id, moved),
            _space(self._arena, list(given.values()), moved.sizes),
            moved.fingerprint,
            lease_s,
        )
        return ReserveEmbeddingsReply(list(given), *opened, pending=pending, no_room=no_room)

    async def open_send(self, what: MovedEmbeddings, wire: OutgoingSpec, lease_s: float) -> float:
        """Begin to send to a landing. Returns the lease in seconds.

        Raises NoArenaRoom, BadRequest, UnknownTransfer (an embedding is not here, or the move ended
        before it began).
        """
        memory = _Held(self._embeddings, self._arena, what)
        return await self._mover.open_send("embeddings", memory, wire, lease_s)


class _Landing:
    """The memory of embeddings that this agent lacks (a `LandingMemory`)."""

    def __init__(self, cache: EmbeddingCache, conn_id: int, what: MovedEmbeddings) -> None:
        self._cache = cache
        self._conn_id = conn_id
        self._what = what

    async def keep(self) -> int:
        for key in self._what.keys:
            self._cache.written(self._conn_id, key)
        return len(self._what.keys)

    def let_go(self) -> None:
        self._cache.leave(self._conn_id)


class _Held:
    """The memory of embeddings that are sent (a `SentMemory`)."""

    def __init__(self, embeddings: AgentEmbeddings, arena: Arena, what: MovedEmbeddings) -> None:
        self._embeddings = embeddings
        self._arena = arena
        self._what = what
        self._conn_id: int | None = None

    async def hold(self) -> ByteSpace:
        runs, cache = [], self._embeddings.cache
        conn_id = self._conn_id = self._embeddings.connect_move()
        for handle, (key, size) in enumerate(zip(self._what.keys, self._what.sizes, strict=True)):
            entry = cache.hold(conn_id, handle, key)
            if entry is None:
                raise UnknownTransfer(f"embedding {key.hex()[:16]} is not here")
            # The landing was reserved for what the caller says.
            if entry.nbytes != size:
                raise BadRequest(
                    f"embedding {key.hex()[:16]} has {entry.nbytes} bytes here, not {size}"
                )
            runs.append(entry.runs)
        return _space(self._arena, runs, self._what.sizes)

    def let_go(self) -> None:
        if self._conn_id is not None:
            self._embeddings.cache.leave(self._conn_id)


def _space(arena: Arena, runs: Sequence[Sequence[Run]], sizes: Sequence[int]) -> PartsSpace:
    """The embeddings' memory, one segment for each."""
    return PartsSpace([arena.view(own, size) for own, size in zip(runs, sizes, strict=True)])
