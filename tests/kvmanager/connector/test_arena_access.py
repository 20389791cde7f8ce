"""A worker's arena: that of the agent to which it is connected, and no other."""

from pathlib import Path
from typing import Any

import pytest
from recording_client import RecordingClient

from kvmanager.arena import Arena
from kvmanager.vllm_connector.arena_access import ArenaAccess, StaleArenaError
from kvmanager.vllm_connector.pages import CpuPageCopier


def test_memory_is_touched_only_in_the_connected_agents_arena(tmp_path: Path) -> None:
    old, new = (Arena.create(tmp_path, 1, 4096, prefault=False) for _ in range(2))
    client: Any = RecordingClient(old)
    copier = CpuPageCopier()
    access = ArenaAccess(client, copier)
    assert access.open(old.epoch) == (old, copier)
    client.arena = None
    with pytest.raises(StaleArenaError, match="this worker has none"):
        access.open(old.epoch)
    client.arena = new
    with pytest.raises(StaleArenaError, match=f"arena {old.epoch}, this worker has {new.epoch}"):
        access.open(old.epoch)
    assert access.open(new.epoch) == (new, copier)
    old.close()
    new.close()
