"""The arena's file: shared between mappings, owned by one agent, removed when nobody owns it."""

import gc
import os
from pathlib import Path

import pytest

from kvmanager.arena import Arena, ArenaError, remove_stale

BLOCK = 4096


@pytest.mark.parametrize("prefault", [False, True])
def test_two_mappings_share_their_bytes(tmp_path: Path, prefault: bool) -> None:
    arena = Arena.create(tmp_path, 8, BLOCK, prefault=prefault)
    assert arena.path.stat().st_mode & 0o777 == 0o600
    assert (arena.path.stat().st_blocks > 0) == prefault
    other = Arena.attach(arena.path, arena.nbytes, BLOCK)
    assert other.epoch == arena.epoch
    runs = [(6, 1), (1, 2)]
    pieces = arena.view(runs, 2 * BLOCK + 10).views(BLOCK - 2, BLOCK + 4)
    assert [len(piece) for piece in pieces] == [2, BLOCK + 2]
    pieces[0][:] = b"ab"
    pieces[1][:2] = b"cd"
    assert other.memory[7 * BLOCK - 2 : 7 * BLOCK] == b"ab"
    assert other.memory[BLOCK : BLOCK + 2] == b"cd"
    assert other.view(runs, 2 * BLOCK).extents(BLOCK - 2, 4) == [(7 * BLOCK - 2, 2), (BLOCK, 2)]
    other.close()
    assert arena.path.exists()
    arena.close()
    arena.close()
    assert not arena.path.exists()


def test_views_outlive_the_arena(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path, 2, BLOCK)
    view = arena.view([(0, 1)], 10).views(0, 10)[0]
    arena.close()
    del arena
    gc.collect()
    view[:] = b"0123456789"
    assert bytes(view) == b"0123456789"


def test_runs_outside_the_arena_are_refused(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path, 2, BLOCK)
    with pytest.raises(ValueError, match="leave the arena"):
        arena.view([(1, 2)], 10)
    arena.close()


def test_only_arenas_without_a_living_owner_are_stale(tmp_path: Path) -> None:
    living = Arena.create(tmp_path, 1, BLOCK)
    engine = Arena.attach(living.path, living.nbytes, BLOCK)
    stale = tmp_path / "prfaas-0123.arena"
    stale.write_bytes(b"left by a killed agent")
    unrelated = tmp_path / "other.arena"
    unrelated.touch()
    assert remove_stale(tmp_path) == [stale]
    assert living.path.exists()
    assert unrelated.exists()
    engine.close()
    assert remove_stale(tmp_path) == []
    living.close()


def test_attach_to_what_is_not_this_arena(tmp_path: Path) -> None:
    arena = Arena.create(tmp_path, 2, BLOCK)
    with pytest.raises(ArenaError, match="has 8192 bytes"):
        Arena.attach(arena.path, BLOCK, BLOCK)
    arena.close()
    with pytest.raises(ArenaError, match="cannot open"):
        Arena.attach(arena.path, 2 * BLOCK, BLOCK)


@pytest.mark.parametrize(("num_blocks", "block_bytes"), [(0, BLOCK), (1, 1000), (1, 0)])
def test_impossible_sizes(tmp_path: Path, num_blocks: int, block_bytes: int) -> None:
    with pytest.raises(ArenaError, match="page size"):
        Arena.create(tmp_path, num_blocks, block_bytes)
    assert list(tmp_path.iterdir()) == []


def test_too_large_says_what_helps_and_leaves_nothing(tmp_path: Path) -> None:
    stats = os.statvfs(tmp_path)
    num_blocks = stats.f_blocks * stats.f_frsize // BLOCK + 1
    with pytest.raises(ArenaError, match="make the arena smaller"):
        Arena.create(tmp_path, num_blocks, BLOCK)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ArenaError, match="No such file"):
        Arena.create(tmp_path / "missing", 1, BLOCK)
