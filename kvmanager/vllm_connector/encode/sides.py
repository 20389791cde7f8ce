"""The two sides of the encoder cache: a worker that saves embeddings, a scheduler that finds them.

Both know the agent's messages and its arena. They do not know vLLM or tensors; an image is its
identifier, an embedding is bytes.

No answer depends on an embedding: what is not found in time is encoded again. The finder copies the
bytes out of the arena as soon as it has them and frees the place. So nothing that happens to the
agent later can take them away from a step that has been scheduled without the encoder.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from kvmanager.agent.engines.embedding_client import EmbeddingClient
from kvmanager.agent.engines.protocol import EmbeddingFound, EmbeddingRoom
from kvmanager.embedding_keys import embedding_key

logger = logging.getLogger("prfaas.kvmanager.ec_connector")

DEFAULT_ANSWER_TIMEOUT_S: Final = 0.5
"""How long an engine waits for an answer of its agent."""
MAX_HELD_BYTES: Final = 2 << 30
"""The most that a scheduler keeps of embeddings for requests that wait; the rest is encoded again.
vLLM asks for the images of all waiting requests at once.
"""


class EmbeddingSaver:
    """Puts embeddings into the agent's arena, from an engine's worker."""

    def __init__(
        self, client: EmbeddingClient, encoder: str, timeout_s: float = DEFAULT_ANSWER_TIMEOUT_S
    ) -> None:
        self._client = client
        self._encoder = encoder
        self._timeout_s = timeout_s
        self._answered = threading.Condition()
        self._rooms: dict[bytes, EmbeddingRoom | None] = {}
        """The answers of the agent, by the key that was asked for last."""
        self._is_silent = False
        """Whether the agent has left a question open; then nobody waits for it again."""

    def start(self) -> None:
        """Connect in the background."""
        self._client.start(self)

    def close(self) -> None:
        """Disconnect."""
        self._client.close()

    def save(self, identifier: str, nbytes: int, data: Callable[[], memoryview]) -> bool:
        """Put an embedding of `nbytes`; returns whether this call has put it. False as well if the
        agent has it already, has no room, is away or does not answer in time. `data` is called only
        if there is room.
        """
        key = embedding_key(self._encoder, identifier)
        with self._answered:
            if self._is_silent:
                return False
            self._rooms[key] = None
            if not self._client.put(key, nbytes):
                del self._rooms[key]
                return False
            self._answered.wait_for(lambda: self._rooms.get(key, True) is not None, self._timeout_s)
            self._is_silent = key in self._rooms and self._rooms[key] is None
            room = self._rooms.pop(key, None)
            arena = self._client.arena
        # Without an arena the connection is lost, and the agent takes its memory back.
        if room is None or not room.runs or arena is None:
            return False
        start, filled = 0, data()
        for view in arena.view(room.runs, nbytes).views(0, nbytes):
            view[:] = filled[start : start + view.nbytes]
            start += view.nbytes
        return self._client.written(key)

    def on_embedding_room(self, room: EmbeddingRoom) -> None:
        with self._answered:
            self._is_silent = False
            if room.key in self._rooms:
                self._rooms[room.key] = room
                self._answered.notify_all()
                return
        # The answer came too late for `save`.
        if room.runs:
            self._client.cancel(room.key)

    def on_disconnected(self) -> None:
        with self._answered:
            self._is_silent = False
            self._rooms.clear()
            self._answered.notify_all()


@dataclass(slots=True)
class _Image:
    """The agent's answer about one image. `data` is its embedding, or None if the agent has none.
    A column of the embedding has `column_bytes` bytes.
    """

    handle: int
    ask_until_s: float
    column_bytes: int
    is_known: bool = False
    data: bytes | None = None
    requests: set[str] = field(default_factory=set)


class EmbeddingFinder:
    """Asks the agent for the images of waiting requests, from an engine's scheduler."""

    def __init__(
        self,
        client: EmbeddingClient,
        encoder: str,
        timeout_s: float = DEFAULT_ANSWER_TIMEOUT_S,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._encoder = encoder
        self._timeout_s = timeout_s
        self._clock_s = clock_s
        self._handles = itertools.count()
        self._lock = threading.Lock()
        self._images: dict[str, _Image] = {}
        self._asked: dict[int, _Image] = {}

    def start(self) -> None:
        """Connect in the background."""
        self._client.start(self)

    def close(self) -> None:
        """Disconnect."""
        self._client.close()

    def are_known(self, request_id: str, images: Mapping[str, int]) -> bool:
        """Whether the agent has said of each image whether it has it. Asks for new ones. After the
        timeout, and without an agent, it has none.

        `images`: by identifier the bytes of one column of the embedding, which has as many rows as
        the prompt has places for it. One with a part of a column is as good as none.
        """
        now_s = self._clock_s()
        with self._lock:
            # All of them, so that the agent is asked for every image at once.
            known = [self._is_known(request_id, *one, now_s) for one in images.items()]
        return all(known)

    def data(self, identifier: str) -> bytes | None:
        """The embedding of an image of a request that waits, or None: encode it here."""
        with self._lock:
            image = self._images.get(identifier)
            return None if image is None else image.data

    def drop(self, request_id: str, identifiers: Iterable[str]) -> None:
        """A request has no use for these images any more."""
        with self._lock:
            for identifier in identifiers:
                image = self._images.get(identifier)
                if image is None:
                    continue
                image.requests.discard(request_id)
                if not image.requests:
                    del self._images[identifier]

    def on_embedding_found(self, found: EmbeddingFound) -> None:
        with self._lock:
            image = self._asked.pop(found.handle, None)
            held_bytes = sum(len(one.data) for one in self._images.values() if one.data)
        is_wanted = image is not None and held_bytes + found.nbytes <= MAX_HELD_BYTES
        # A step that was scheduled without the encoder could not do anything about it.
        if image is not None and found.nbytes % image.column_bytes:
            logger.warning(
                "an embedding of %d bytes is not used: a column has %d",
                found.nbytes,
                image.column_bytes,
            )
            is_wanted = False
        data, arena = None, self._client.arena
        if found.runs and arena is not None:
            if is_wanted:
                # This thread copies, and the engine's own goes on meanwhile.
                data = b"".join(arena.view(found.runs, found.nbytes).views(0, found.nbytes))
            # Once the connection is lost, nothing protects what was copied from other writers.
            if not self._client.free(found.handle):
                data = None
        if image is not None:
            with self._lock:
                image.data, image.is_known = data, True

    def on_disconnected(self) -> None:
        with self._lock:
            asked, self._asked = self._asked, {}
            for image in asked.values():
                image.is_known = True

    def _is_known(self, request_id: str, identifier: str, column_bytes: int, now_s: float) -> bool:
        image = self._images.get(identifier)
        if image is None:
            image = _Image(next(self._handles), now_s + self._timeout_s, column_bytes)
            self._images[identifier] = image
            self._asked[image.handle] = image
            if not self._client.find(image.handle, embedding_key(self._encoder, identifier)):
                del self._asked[image.handle]
                image.is_known = True
        image.requests.add(request_id)
        if not image.is_known and now_s >= image.ask_until_s:
            self._asked.pop(image.handle, None)
            image.is_known = True
        return image.is_known
