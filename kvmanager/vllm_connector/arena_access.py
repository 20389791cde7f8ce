"""A worker's way to the agent's arena: the mapping as it is now, and the copier for it.

Knows no transfers and no cached blocks.
"""

from __future__ import annotations

import threading

import torch

from kvmanager.agent.engine_client import EngineClient
from kvmanager.arena import Arena
from kvmanager.vllm_connector.pages import PageCopier, copier_for


class StaleArenaError(Exception):
    """The agent that gave this memory is gone or was restarted."""


class ArenaAccess:
    """Opens the connected agent's arena; a copier lives as long as its mapping is in use."""

    def __init__(self, client: EngineClient, device: torch.device) -> None:
        self._client = client
        self._device = device
        self._lock = threading.Lock()
        self._arena: Arena | None = None
        self._copier: PageCopier | None = None

    def open(self, epoch: str) -> tuple[Arena, PageCopier]:
        """The arena of this epoch; raises `StaleArenaError` when it is not the agent's any more."""
        arena = self._client.arena
        if arena is None or arena.epoch != epoch:
            here = arena.epoch if arena else "none"
            raise StaleArenaError(f"the memory is in arena {epoch}, this worker has {here}")
        with self._lock:
            if self._copier is None or self._arena is not arena:
                if self._copier is not None:
                    self._copier.close()
                self._copier = copier_for(self._device, arena)
                self._arena = arena
            return arena, self._copier

    def drain(self) -> None:
        """Returns when no copy out of the engine is under way."""
        with self._lock:
            copier = self._copier
        if copier is not None:
            copier.drain()

    def close(self) -> None:
        with self._lock:
            if self._copier is not None:
                self._copier.close()
