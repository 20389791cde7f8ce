"""A worker's access to the agent's arena, with the copier of its pages.

Knows no transfers and no cached blocks.
"""

from __future__ import annotations

import mmap
import threading
from typing import Final

import numpy as np

from kvmanager.agent.engines.client import EngineClient
from kvmanager.arena import Arena
from kvmanager.vllm_connector.pages import PageCopier

MAP_STEP_BYTES: Final = 64 << 20
"""Mapped between two looks whether the arena is still wanted: some milliseconds."""


class StaleArenaError(Exception):
    """This worker may not touch the memory: the agent or the connection has changed since."""


class ArenaAccess:
    """The connected agent's arena, and the copier, which serves any arena.

    `map_pages` and `stop_mapping` are called on the client's thread.
    """

    def __init__(self, client: EngineClient, copier: PageCopier) -> None:
        self._client = client
        self.copier = copier
        self._is_unwanted = threading.Event()
        self._mapping: threading.Thread | None = None

    def open(self, epoch: str) -> tuple[Arena, PageCopier]:
        """The arena of this epoch, and the copier. Raises `StaleArenaError` when it is not the
        agent's any more.
        """
        arena = self._client.arena
        if arena is None or arena.epoch != epoch:
            here = arena.epoch if arena else "none"
            raise StaleArenaError(f"the memory is in arena {epoch}, this worker has {here}")
        return arena, self.copier

    def map_pages(self, arena: Arena) -> None:
        """Begin to map all pages of an arena into this process.

        The agent has allocated them, but a page that this process touches for the first time costs
        a fault: a copy into such memory takes six times as long. Copiers of GPUs copy from and to
        their staging memory, so they pay it like others.
        """
        self.stop_mapping()
        self._is_unwanted = unwanted = threading.Event()
        # A thread, because an arena may be large, and the client has other news to deliver.
        self._mapping = threading.Thread(
            target=_map_pages, args=(arena, unwanted), name="prfaas-map", daemon=True
        )
        self._mapping.start()

    def stop_mapping(self) -> None:
        """Map no more. Afterwards nothing here keeps an arena mapped."""
        self._is_unwanted.set()
        mapping, self._mapping = self._mapping, None
        if mapping is not None:
            mapping.join()


def _map_pages(arena: Arena, unwanted: threading.Event) -> None:
    memory = np.frombuffer(arena.memory, dtype=np.uint8)
    for start in range(0, len(memory), MAP_STEP_BYTES):
        if unwanted.is_set():
            return
        # NumPy reads a byte of each page and releases the GIL meanwhile.
        memory[start : start + MAP_STEP_BYTES : mmap.PAGESIZE].max()
