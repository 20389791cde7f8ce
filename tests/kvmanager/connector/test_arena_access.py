"""A worker's arena: that of the agent to which it is connected, and no other."""

import threading
from pathlib import Path
from typing import Any

import pytest
from recording_client import RecordingClient

from kvmanager.arena import Arena
from kvmanager.vllm_connector import arena_access
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


def test_all_pages_are_mapped_before_they_are_needed(tmp_path: Path) -> None:
    made = Arena.create(tmp_path, 64, 65536, prefault=False)
    arena = Arena.attach(made.path, made.nbytes, made.block_bytes, epoch=made.epoch)
    client: Any = RecordingClient(arena)
    access = ArenaAccess(client, CpuPageCopier())
    access.map_pages(arena)
    for mapping in (one for one in threading.enumerate() if one.name == "prfaas-map"):
        mapping.join()
    _, *maps = Path("/proc/self/smaps").read_text().split(str(made.path))
    mapped_kib = [int(one.partition("Rss:")[2].split()[0]) for one in maps]
    assert sorted(mapped_kib) == [0, made.nbytes >> 10], "of the agent's mapping and of this one"
    access.stop_mapping()
    arena.close()
    made.close()


def test_mapping_ends_when_the_arena_is_not_wanted_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory could not be given back while a thread reads it."""
    monkeypatch.setattr(arena_access, "MAP_STEP_BYTES", 1)
    arena = Arena.create(tmp_path, 64, 65536, prefault=False)
    client: Any = RecordingClient(arena)
    access = ArenaAccess(client, CpuPageCopier())
    access.map_pages(arena)
    access.stop_mapping()
    assert not [one for one in threading.enumerate() if one.name == "prfaas-map"]
    access.stop_mapping()
    arena.close()
    assert not arena.path.exists()
