"""A worker's access to the agent's arena: the present mapping, and the copier for it.

Knows no transfers and no cached blocks.
"""

from __future__ import annotations

import threading

import torch

from kvmanager.agent.engines.client import EngineClient
from kvmanager.arena import Arena
from kvmanager.vllm_connector.pages import PageCopier, copier_for


class StaleArenaError(Exception):
    """This worker may not touch the memory: the agent or the connection has changed since."""


class ArenaAccess:
    """The connected agent's arena and its copier, which lives until another arena comes."""

    def __init__(self, client: EngineClient, device: torch.device) -> None:
        self._client = client
        self._device = device
        self._lock = threading.Lock()
        self._ready: tuple[Arena, PageCopier] | None = None
        self._is_closed = False

    def prepare(self, arena: Arena) -> None:
        """Make the arena of a new connection ready for copies, on the client's thread.

        With a GPU this pins the whole arena, which takes about a second for each 10 GiB and must
        not hold up an engine's step. Does nothing for an arena that is ready already.
        """
        with self._lock:
            if self._ready is not None and self._ready[0] is arena:
                return
        # Outside of the lock, so that `open` can refuse at once while the arena is being pinned.
        self.forget()
        copier = copier_for(self._device, arena)
        with self._lock:
            if not self._is_closed:
                self._ready = arena, copier
                return
        copier.close()

    def open(self, epoch: str) -> tuple[Arena, PageCopier]:
        """The arena of this epoch with its copier. Raises `StaleArenaError` when it is not the
        agent's any more, or not ready yet.
        """
        arena = self._client.arena
        if arena is None or arena.epoch != epoch:
            here = arena.epoch if arena else "none"
            raise StaleArenaError(f"the memory is in arena {epoch}, this worker has {here}")
        with self._lock:
            ready = self._ready
        if ready is None or ready[0] is not arena:
            raise StaleArenaError(f"arena {epoch} is not ready for this worker's copies yet")
        return ready

    def drain(self) -> None:
        """Wait until no copy out of the engine is under way and all are reported."""
        with self._lock:
            ready = self._ready
        if ready is not None:
            ready[1].drain()

    def close(self) -> None:
        """Release the arena for good."""
        with self._lock:
            self._is_closed = True
        self.forget()

    def forget(self) -> None:
        """Release the arena until another one comes. Copies that are under way end first."""
        with self._lock:
            before, self._ready = self._ready, None
        if before is not None:
            before[1].close()
