"""The arena's file: shared between mappings, owned by one agent, removed when nobody owns it.

One with a name is instead taken over by the next agent of that name.
"""

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
    assert arena.path.stat().st_blocks * 512 >= arena.nbytes
    assert arena.path.name == f"prfaas-{arena.epoch}.arena"
    assert arena.index_path is None
    other = Arena.attach(arena.path, arena.nbytes, BLOCK, epoch="as the agent says")
    assert other.epoch == "as the agent says"
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
    engine = Arena.attach(living.path, living.nbytes, BLOCK, epoch=living.epoch)
    stale = tmp_path / "prfaas-0123.arena"
    stale.write_bytes(b"left by a killed agent")
    stale.chmod(0o600)
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
        Arena.attach(arena.path, BLOCK, BLOCK, epoch="e")
    arena.close()
    with pytest.raises(ArenaError, match="cannot open"):
        Arena.attach(arena.path, 2 * BLOCK, BLOCK, epoch="e")


@pytest.mark.parametrize(("num_blocks", "block_bytes"), [(0, BLOCK), (1, 1000), (1, 0)])
def test_impossible_sizes(tmp_path: Path, num_blocks: int, block_bytes: int) -> None:
    with pytest.raises(ArenaError, match="page size"):
        Arena.create(tmp_path, num_blocks, block_bytes)
    assert list(tmp_path.iterdir()) == []


def test_too_large_says_what_helps_and_leaves_nothing(tmp_path: Path) -> None:
    stats = os.statvfs(tmp_path)
    num_blocks = stats.f_blocks * stats.f_frsize // BLOCK + 1
    with pytest.raises(ArenaError, match="lower arena_gib"):
        Arena.create(tmp_path, num_blocks, BLOCK)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ArenaError, match="No such file"):
        Arena.create(tmp_path / "missing", 1, BLOCK)


def kept(directory: Path, num_blocks: int = 2) -> Arena:
    return Arena.create(directory, num_blocks, BLOCK, name="node-0")


@pytest.mark.parametrize("prefault", [False, True])
def test_a_named_arena_is_adopted_with_its_bytes_under_a_new_epoch(
    tmp_path: Path, prefault: bool
) -> None:
    first = kept(tmp_path)
    assert first.path == tmp_path / "prfaas-kept-node-0.arena"
    first.memory[BLOCK : BLOCK + 4] = b"kept"
    first.close(keep=True)
    assert remove_stale(tmp_path) == []
    second = Arena.adopt(tmp_path, "node-0", 2, BLOCK, prefault=prefault)
    assert second is not None
    assert (second.path, second.num_blocks) == (first.path, 2)
    assert second.epoch != first.epoch
    assert second.memory[BLOCK : BLOCK + 4] == b"kept"
    second.close()
    assert list(tmp_path.iterdir()) == []


def test_an_arena_is_adopted_though_an_engine_still_maps_it(tmp_path: Path) -> None:
    first = kept(tmp_path)
    engine = Arena.attach(first.path, first.nbytes, BLOCK, epoch=first.epoch)
    first.close(keep=True)
    second = Arena.adopt(tmp_path, "node-0", 2, BLOCK)
    assert second is not None
    engine.memory[:4] = b"late"
    assert second.memory[:4] == b"late"
    engine.close()
    second.close()


def test_only_an_arena_of_the_wanted_size_is_adopted(tmp_path: Path) -> None:
    assert Arena.adopt(tmp_path, "node-0", 2, BLOCK) is None
    first = kept(tmp_path)
    first.close(keep=True)
    assert Arena.adopt(tmp_path, "node-0", 3, BLOCK) is None
    assert Arena.adopt(tmp_path, "node-1", 2, BLOCK) is None
    assert first.index_path is not None
    first.index_path.write_bytes(b"of the smaller arena")
    inode = first.path.stat().st_ino
    hold = first.path.open()  # so that the inode's number is not used again at once
    larger = kept(tmp_path, num_blocks=3)
    assert larger.path.stat().st_ino != inode
    assert larger.memory[:4] == bytes(4)
    assert list(tmp_path.iterdir()) == [larger.path]
    hold.close()
    larger.close()


def test_a_living_agents_arena_is_left_to_it(tmp_path: Path) -> None:
    arena = kept(tmp_path)
    assert arena.index_path is not None
    arena.index_path.touch()
    for take in (Arena.adopt, Arena.create):
        with pytest.raises(ArenaError, match=r"node-0\.arena belongs to an agent that runs"):
            take(tmp_path, num_blocks=2, block_bytes=BLOCK, name="node-0")
    assert Arena.discard(tmp_path, "node-0") == []
    assert arena.path.exists()
    assert arena.index_path.exists()
    arena.close()
    assert list(tmp_path.iterdir()) == []


def test_what_nobody_holds_is_discarded_with_its_index(tmp_path: Path) -> None:
    arena = kept(tmp_path)
    other = Arena.create(tmp_path, 1, BLOCK, name="node-0.b")
    assert arena.index_path is not None
    rewritten = arena.index_path.with_name(arena.index_path.name + ".new")
    for path in (arena.index_path, rewritten):
        path.touch()
    arena.close(keep=True)
    assert Arena.discard(tmp_path, "node-0") == [arena.path, arena.index_path, rewritten]
    assert Arena.discard(tmp_path, "node-0") == []
    assert list(tmp_path.iterdir()) == [other.path]
    other.close()


def test_an_arena_without_a_name_is_never_kept(tmp_path: Path) -> None:
    Arena.create(tmp_path, 1, BLOCK).close(keep=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "x" * 101, "a b", "é"])
def test_names_that_are_no_file_names(tmp_path: Path, name: str) -> None:
    for take in (Arena.adopt, Arena.create):
        with pytest.raises(ArenaError, match="cannot name an arena"):
            take(tmp_path, num_blocks=1, block_bytes=BLOCK, name=name)


def test_an_adopted_arena_needs_room_only_for_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept(tmp_path).close(keep=True)
    sparse = Arena.create(tmp_path, 2, BLOCK, name="sparse")
    sparse.close(keep=True)
    with sparse.path.open("r+b") as file:
        file.truncate(0)
        file.truncate(2 * BLOCK)
    full = os.statvfs_result([4096, 4096, 10, 0, 0, 0, 0, 0, 0, 255])
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    adopted = Arena.adopt(tmp_path, "node-0", 2, BLOCK)
    assert adopted is not None
    adopted.close()
    with pytest.raises(ArenaError, match="lower arena_gib"):
        Arena.adopt(tmp_path, "sparse", 2, BLOCK)
    assert sparse.path.exists()
