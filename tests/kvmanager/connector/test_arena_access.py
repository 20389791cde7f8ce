"""A worker's arena: made ready once for each life of the agent, and never by an engine's step."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvmanager.arena import Arena
from kvmanager.vllm_connector import arena_access as module
from kvmanager.vllm_connector.arena_access import ArenaAccess, StaleArenaError


class Client:
    def __init__(self) -> None:
        self.arena: Arena | None = None


class Copier:
    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.is_closed = False
        self.num_drains = 0

    def drain(self) -> None:
        self.num_drains += 1

    def close(self) -> None:
        self.is_closed = True


class Rig:
    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.client = Client()
        self.made: list[Copier] = []
        self.arenas = [Arena.create(directory, 1, 4096, prefault=False) for _ in range(2)]
        client: Any = self.client
        self.access = ArenaAccess(client, torch.device("cpu"))
        monkeypatch.setattr(module, "copier_for", self._copier_for)

    def _copier_for(self, device: torch.device, arena: Arena) -> Copier:
        self.made.append(Copier(arena))
        return self.made[-1]

    def connect(self, arena: Arena) -> None:
        self.client.arena = arena
        self.access.prepare(arena)

    def close(self) -> None:
        for arena in self.arenas:
            arena.close()


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    rig = Rig(tmp_path, monkeypatch)
    yield rig
    rig.close()


def test_a_reconnect_to_the_same_agent_keeps_the_copier(rig: Rig) -> None:
    arena, _ = rig.arenas
    rig.connect(arena)
    before = rig.access.open(arena.epoch)
    rig.client.arena = None
    with pytest.raises(StaleArenaError, match="none"):
        rig.access.open(arena.epoch)
    rig.connect(arena)
    assert rig.access.open(arena.epoch) == before
    assert len(rig.made) == 1
    assert not rig.made[0].is_closed


def test_another_agents_arena_replaces_the_one_before(rig: Rig) -> None:
    old, new = rig.arenas
    rig.connect(old)
    rig.connect(new)
    assert rig.made[0].is_closed
    with pytest.raises(StaleArenaError, match=old.epoch):
        rig.access.open(old.epoch)
    assert rig.access.open(new.epoch) == (new, rig.made[1])


def test_a_step_does_not_make_an_arena_ready(rig: Rig) -> None:
    arena, other = rig.arenas
    rig.client.arena = arena
    with pytest.raises(StaleArenaError, match="not ready"):
        rig.access.open(arena.epoch)
    assert rig.made == []
    rig.connect(arena)
    rig.client.arena = other
    with pytest.raises(StaleArenaError, match="not ready"):
        rig.access.open(other.epoch)


def test_drain_and_close_reach_the_copier(rig: Rig) -> None:
    rig.access.drain()
    rig.connect(rig.arenas[0])
    rig.access.drain()
    assert rig.made[0].num_drains == 1
    rig.access.close()
    rig.access.close()
    assert rig.made[0].is_closed
    rig.access.drain()
    assert rig.made[0].num_drains == 1


def test_a_forgotten_arena_is_made_ready_again(rig: Rig) -> None:
    arena, _ = rig.arenas
    rig.connect(arena)
    rig.access.forget()
    assert rig.made[0].is_closed
    rig.connect(arena)
    assert rig.access.open(arena.epoch) == (arena, rig.made[1])


def test_an_arena_that_comes_during_the_shutdown_is_let_go(rig: Rig) -> None:
    rig.access.close()
    rig.connect(rig.arenas[0])
    assert rig.made[0].is_closed
    with pytest.raises(StaleArenaError):
        rig.access.open(rig.arenas[0].epoch)
