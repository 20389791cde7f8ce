"""A worker's access to the agent's arena, with the copier of its pages.

Knows no transfers and no cached blocks.
"""

from __future__ import annotations

from kvmanager.agent.engines.client import EngineClient
from kvmanager.arena import Arena
from kvmanager.vllm_connector.pages import PageCopier


class StaleArenaError(Exception):
    """This worker may not touch the memory: the agent or the connection has changed since."""


class ArenaAccess:
    """The connected agent's arena, and the copier, which serves any arena."""

    def __init__(self, client: EngineClient, copier: PageCopier) -> None:
        self._client = client
        self.copier = copier

    def open(self, epoch: str) -> tuple[Arena, PageCopier]:
        """The arena of this epoch, and the copier. Raises `StaleArenaError` when it is not the
        agent's any more.
        """
        arena = self._client.arena
        if arena is None or arena.epoch != epoch:
            here = arena.epoch if arena else "none"
            raise StaleArenaError(f"the memory is in arena {epoch}, this worker has {here}")
        return arena, self.copier
