from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmanager.arena import Arena
from kvmanager.pool.parts_space import PartsSpace

BLOCK_BYTES = 4096


@pytest.fixture(scope="module")
def arena(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    directory: Path = tmp_path_factory.mktemp("arena")
    arena = Arena.create(directory, 16, BLOCK_BYTES, prefault=False)
    arena.memory[:] = bytes(index * 31 % 251 for index in range(16 * BLOCK_BYTES))
    yield arena
    arena.close()


PARTS = [([(3, 2)], 5000), ([(9, 1), (1, 1)], 8192), ([(12, 1)], 1), ([(5, 1)], 4096)]
"""Runs and bytes."""


def content(arena: Arena) -> bytes:
    whole = bytearray()
    for runs, nbytes in PARTS:
        part = b"".join(
            arena.memory[first * BLOCK_BYTES : (first + count) * BLOCK_BYTES]
            for first, count in runs
        )
        whole += part[:nbytes]
    return bytes(whole)


@given(st.data())
def test_any_range_is_that_of_the_parts_end_to_end(arena: Arena, data: st.DataObject) -> None:
    space = PartsSpace([arena.view(runs, nbytes) for runs, nbytes in PARTS])
    whole = content(arena)
    assert space.nbytes == len(whole) == 5000 + 8192 + 1 + 4096
    offset = data.draw(st.integers(0, space.nbytes))
    length = data.draw(st.integers(0, space.nbytes - offset))
    views = space.views(offset, length)
    assert b"".join(views) == whole[offset : offset + length]
    assert all(len(view) for view in views)


def test_views_are_the_parts_own_memory(arena: Arena) -> None:
    space = PartsSpace([arena.view(*PARTS[2]), arena.view(*PARTS[3])])
    before = bytes(arena.memory)
    for view in space.views(0, 3):
        view[:] = bytes(len(view))
    assert arena.memory[12 * BLOCK_BYTES] == 0
    assert (
        bytes(arena.memory[12 * BLOCK_BYTES + 1 : 13 * BLOCK_BYTES])
        == (before[12 * BLOCK_BYTES + 1 : 13 * BLOCK_BYTES])
    )
    assert bytes(arena.memory[5 * BLOCK_BYTES : 5 * BLOCK_BYTES + 2]) == bytes(2)
    arena.memory[:] = before


@pytest.mark.parametrize(("offset", "length"), [(-1, 1), (0, 4098), (4097, 1), (0, -1)])
def test_a_range_outside_is_refused(arena: Arena, offset: int, length: int) -> None:
    space = PartsSpace([arena.view(*PARTS[2]), arena.view(*PARTS[3])])
    with pytest.raises(ValueError, match="outside"):
        space.views(offset, length)


def test_nothing_is_no_transfer() -> None:
    with pytest.raises(ValueError, match="no parts"):
        PartsSpace([])
