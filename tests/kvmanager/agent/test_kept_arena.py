"""What an agent finds of the arena that its former life left."""

from pathlib import Path

import pytest

from kvmanager.agent.config import AgentConfig
from kvmanager.agent.kept_arena import KeptArena, open_arena
from kvmanager.arena import ArenaError
from kvmanager.pool.index_records import Stored
from kvmanager.pool.shape import CacheShape, PartKind, PartShape
from kvmanager.transfers.blocks import Run

SHAPE = CacheShape(64, (PartShape(PartKind.KV, 8192),))
KEY = bytes(range(16))


def opened(tmp_path: Path, name: str | None = "a", num_blocks: int = 16) -> KeptArena:
    config = AgentConfig(
        arena_dir=tmp_path,
        arena_gib=num_blocks * 4096 / (1 << 30),
        block_bytes=4096,
        prefault=False,
        arena_name=name,
    )
    return open_arena(config)


def store(kept: KeptArena, key: bytes = KEY) -> list[Run]:
    """Journal a part as the cache does."""
    assert kept.index is not None
    runs = kept.allocator.allocate(2)
    shape_id = kept.index.shape_id(SHAPE)
    kept.index.append(Stored(key, bytes(16), 0, 0, shape_id, tuple(runs), 8192, 5))
    kept.index.flush()
    return runs


def test_without_a_name_nothing_stays(tmp_path: Path) -> None:
    kept = opened(tmp_path, None)
    assert not kept.is_adopted
    kept.allocator.allocate(3)
    kept.close()
    assert list(tmp_path.iterdir()) == []


def test_cached_parts_stay_and_what_was_handed_out_is_set_apart(tmp_path: Path) -> None:
    kept = opened(tmp_path)
    assert not kept.is_adopted
    epoch = kept.arena.epoch
    cached = store(kept)
    lent = kept.allocator.allocate(5)
    returned = kept.allocator.allocate(4)
    kept.arena.memory[cached[0].first * 4096] = 77
    kept.allocator.free(returned)
    kept.close()
    kept = opened(tmp_path)
    assert kept.is_adopted
    assert kept.arena.epoch != epoch
    assert [(record.key, record.runs) for record in kept.stored] == [(KEY, tuple(cached))]
    assert kept.arena.memory[cached[0].first * 4096] == 77
    assert list(kept.set_apart) == lent
    assert kept.allocator.num_free == 16 - 2 - 5
    kept.release_set_apart()
    assert kept.allocator.num_free == 16 - 2
    kept.release_set_apart()
    kept.close()


def test_what_is_set_apart_is_so_in_the_next_life_too(tmp_path: Path) -> None:
    kept = opened(tmp_path)
    kept.allocator.allocate(5)
    kept.close()
    opened(tmp_path).close()
    kept = opened(tmp_path)
    assert list(kept.set_apart) == [Run(0, 5)]
    kept.release_set_apart()
    kept.close()
    kept = opened(tmp_path)
    assert not kept.is_adopted
    kept.close()


def test_a_part_between_blocks_that_were_handed_out(tmp_path: Path) -> None:
    kept = opened(tmp_path)
    kept.allocator.allocate(3)
    cached = store(kept)
    kept.allocator.allocate(3)
    kept.close()
    kept = opened(tmp_path)
    assert cached == [Run(3, 2)]
    assert list(kept.set_apart) == [Run(0, 3), Run(5, 3)]
    kept.close()


def test_without_the_map_everything_may_be_in_use(tmp_path: Path) -> None:
    kept = opened(tmp_path)
    cached = store(kept)
    kept.close()
    (tmp_path / "prfaas-kept-a.used").unlink()
    kept = opened(tmp_path)
    assert kept.allocator.num_free == 0
    assert [r.runs for r in kept.stored] == [tuple(cached)]
    kept.release_set_apart()
    assert kept.allocator.num_free == 14
    kept.close()


def test_an_arena_of_another_size_is_begun_anew(tmp_path: Path) -> None:
    kept = opened(tmp_path)
    store(kept)
    kept.close()
    kept = opened(tmp_path, num_blocks=20)
    assert not kept.is_adopted
    assert kept.allocator.num_free == 20
    kept.close()


def test_two_agents_of_one_name(tmp_path: Path) -> None:
    kept = opened(tmp_path)
    with pytest.raises(ArenaError, match="prfaas-kept-a"):
        opened(tmp_path)
    kept.close()
