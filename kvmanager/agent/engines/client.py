"""The engine's client of its node agent, with a method for each message.

Whatever the agent does, no method raises and no method blocks (`kvmanager.agent.engines.connection`
keeps the connection). Each returns whether the message was handed over. It does not know pages,
requests or what an outbox holds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from kvmanager.agent.engines.connection import AgentConnection
from kvmanager.agent.engines.protocol import (
    LENGTH_BYTES,
    MAX_RANGES_PER_READY,
    AbortOutbox,
    Attach,
    BlockPart,
    CacheCancel,
    CacheFind,
    CacheFree,
    CacheMessage,
    CacheReserve,
    CacheWritten,
    EngineHello,
    Loaded,
    PrefillEnd,
    ProtocolError,
    Ready,
    Release,
    TransferMessage,
    Watch,
    decode_engine_message,
    encode_frame,
)
from kvmanager.arena import Arena
from kvmanager.hashing import KEY_BYTES, join_keys
from kvmanager.load_times import LoadTimes

logger = logging.getLogger("prfaas.kvmanager.engine_client")


class EngineClient:
    """Speaks to the agent at `socket_path` for one process of an engine."""

    def __init__(self, socket_path: str | Path, hello: EngineHello) -> None:
        self._tp_rank = hello.tp_rank
        self._connection = AgentConnection(socket_path, hello)
        self.start = self._connection.start
        self.close = self._connection.close

    @property
    def connected(self) -> bool:
        return self._connection.connected

    @property
    def arena(self) -> Arena | None:
        """The agent's arena while connected."""
        return self._connection.arena

    def attach(self, transfer_id: bytes, attempt: int) -> bool:
        """Announce that this process will write into this opening of the outbox."""
        return self._send(Attach(transfer_id, attempt))

    def ready(self, transfer_id: bytes, attempt: int, ranges: Iterable[tuple[int, int]]) -> bool:
        """Say that these (offset, length) ranges of the outbox are final. Returns whether all were
        handed over.
        """
        try:
            pairs = [(int(offset), int(length)) for offset, length in ranges]
            if any(offset < 0 or length < 0 for offset, length in pairs):
                raise ValueError(f"negative range in {pairs}")
        # The engine's forward pass calls this: a caller's mistake costs the transfer, not the
        # engine.
        except (TypeError, ValueError) as error:
            logger.error("ready(%r) called with bad ranges: %s", transfer_id, error)
            return False
        return all(
            self._send(Ready(transfer_id, attempt, pairs[start : start + MAX_RANGES_PER_READY]))
            for start in range(0, len(pairs), MAX_RANGES_PER_READY)
        )

    def prefill_end(self, transfer_id: bytes, attempt: int, prefill_s: float = 0.0) -> bool:
        """Say that the last chunk's forward pass is over in this worker, `prefill_s` after the
        first one began; 0: unknown.
        """
        return self._send(PrefillEnd(transfer_id, attempt, self._tp_rank, prefill_s))

    def loaded(self, transfer_id: bytes, times: LoadTimes) -> bool:
        """Say that the first step with the KVCache of the landing is over in this worker. Only an
        agent that speaks `VERSION_WITH_LOADED` knows the message.
        """
        return self._send_made(
            lambda: Loaded(transfer_id, times.wait_s, times.load_s, times.first_step_s)
        )

    def abort(self, transfer_id: bytes, attempt: int, reason: str) -> bool:
        """Give the outbox up. This process does not write into it any more."""
        return self._send(AbortOutbox(transfer_id, attempt, str(reason)[:4000]))

    def watch(self, transfer_id: bytes) -> bool:
        """Ask for one on_landed or on_failed of this landing."""
        return self._send(Watch(transfer_id))

    def release(self, transfer_id: bytes, attempt: int = 0) -> bool:
        """Say that this instance does not write into this opening of the outbox any more, or, with
        0, that it does not read the landing any more.
        """
        return self._send(Release(transfer_id, attempt))

    def cache_find(self, handle: int, keys: Sequence[bytes]) -> bool:
        """Look this prefix up in the cache. One `on_cache_found` answers while connected."""
        return self._send_made(lambda: CacheFind(handle, _joined(keys)))

    def cache_free(self, handle: int) -> bool:
        """Say that the result of this `cache_find` is not read or not wanted any more."""
        return self._send_made(lambda: CacheFree(handle))

    def cache_reserve(
        self,
        handle: int,
        keys: Sequence[bytes],
        parts: Sequence[BlockPart],
        *,
        parent: bytes,
        first_block: int = 0,
        replaces: bytes = b"",
    ) -> bool:
        """Ask for memory for (index into `keys`, part) pairs, as `CacheReserve` says.

        One `on_cache_slots` answers while connected.
        """
        return self._send_made(
            lambda: CacheReserve(handle, parent, first_block, _joined(keys), list(parts), replaces)
        )

    def cache_written(
        self, handle: int, parts: Sequence[BlockPart], *, is_last: bool = False
    ) -> bool:
        """Say that this worker has written its share of these slots. `is_last`: it touches no other
        slot of the handle any more.

        `parts` are (index into the keys of `cache_reserve`, part), as in the slots given.
        """
        return self._send_made(lambda: CacheWritten(handle, list(parts), is_last, self._tp_rank))

    def cache_cancel(self, handle: int) -> bool:
        """Cancel a `cache_reserve` that no worker has heard of."""
        return self._send_made(lambda: CacheCancel(handle))

    def _send(self, message: TransferMessage) -> bool:
        return self._send_made(lambda: message)

    def _send_made(self, make: Callable[[], TransferMessage | CacheMessage]) -> bool:
        try:
            frame = encode_frame(make())
            # The agent closes the connection over a message that its decoder refuses. So a bad
            # message is found here, where it costs only itself.
            decode_engine_message(frame[LENGTH_BYTES:])
        except Exception:
            # A caller's mistake must not cost the engine its loop.
            logger.exception("message to the agent not sent")
            return False
        return self._connection.send(frame)


def _joined(keys: Sequence[bytes]) -> bytes:
    if any(len(key) != KEY_BYTES for key in keys):
        raise ProtocolError(f"a block key has {KEY_BYTES} bytes")
    return join_keys(keys)
