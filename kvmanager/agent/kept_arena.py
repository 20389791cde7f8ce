"""Makes an agent's arena, or takes over the arena of the agent before, with the parts cached in it.

It does not know what blocks are used for. Beside a named arena lies a file with a byte for each
block: 1 from before anybody may touch the block until nobody may any more. It tells the next agent
which blocks the former one had handed out. The index says which of these hold cached parts. Engines
of the former agent may still write into the others, so these are set apart for the drain time.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvmanager.agent.config import AgentConfig
from kvmanager.arena import Arena, ArenaError
from kvmanager.pool.index import PoolIndex
from kvmanager.pool.index_records import IndexHeader, Stored
from kvmanager.private_files import allocate, open_private
from kvmanager.transfers.blocks import BlockAllocator, Run

logger = logging.getLogger("prfaas.kvmanager.agent")

_USED: Final = b"\1"
_FREE: Final = b"\0"


class UsedMap:
    """The blocks that somebody may touch, in a file that outlives the process."""

    def __init__(self, path: Path, num_blocks: int) -> None:
        """Open or make the file; `is_new` tells which. Raises OSError."""
        fd = open_private(path, os.O_RDWR | os.O_CREAT)
        try:
            self.is_new = os.fstat(fd).st_size != num_blocks
            # The size of another arena says nothing about this one, so the map is emptied first.
            if self.is_new:
                os.ftruncate(fd, 0)
            allocate(fd, num_blocks, path.parent, "the map of an arena's blocks")
            self._map = mmap.mmap(fd, num_blocks)
        finally:
            os.close(fd)

    def set(self, run: Run) -> None:
        self._map[run.first : run.end] = _USED * run.length

    def clear(self, run: Run) -> None:
        self._map[run.first : run.end] = _FREE * run.length

    def used_runs(self) -> list[Run]:
        """The blocks that are in use, in order."""
        runs = []
        end = 0
        while (first := self._map.find(_USED, end)) >= 0:
            end = self._map.find(_FREE, first)
            end = len(self._map) if end < 0 else end
            runs.append(Run(first, end - first))
        return runs

    def close(self) -> None:
        self._map.close()


class MappedAllocator(BlockAllocator):
    """An allocator that keeps a `UsedMap`."""

    def __init__(self, num_blocks: int, used: UsedMap) -> None:
        super().__init__(num_blocks)
        self._used = used

    def allocate(self, num_blocks: int) -> list[Run]:
        runs = super().allocate(num_blocks)
        for run in runs:
            # Before anybody writes: a killed agent must leave no used block unmarked.
            self._used.set(run)
        return runs

    def take(self, runs: Iterable[Run]) -> None:
        runs = list(runs)
        super().take(runs)
        for run in runs:
            self._used.set(run)

    def free(self, runs: Iterable[Run]) -> None:
        runs = list(runs)
        super().free(runs)
        for run in runs:
            self._used.clear(run)


@dataclass(slots=True)
class KeptArena:
    """An arena with its records. `stored`: the parts that the former agent cached. `set_apart`:
    blocks that nobody may use before the drain time is over. The blocks of both are taken.
    """

    arena: Arena
    allocator: BlockAllocator
    index: PoolIndex | None = None
    used: UsedMap | None = None
    stored: Sequence[Stored] = ()
    set_apart: Sequence[Run] = ()

    @property
    def is_adopted(self) -> bool:
        """Whether a former life's engines may still touch the arena."""
        return bool(self.stored or self.set_apart)

    def set_more_apart(self, runs: Sequence[Run]) -> None:
        """Take these blocks, which are free, until `release_set_apart`."""
        self.allocator.take(runs)
        self.set_apart = [*self.set_apart, *runs]

    def release_set_apart(self) -> None:
        """Free the blocks that were set apart, after the drain time."""
        runs, self.set_apart = self.set_apart, ()
        self.allocator.free(runs)

    def close(self) -> None:
        """Close all files. A named arena stays, another one is removed. Idempotent."""
        if self.index is not None:
            self.index.close()
        self.arena.close(keep=self.index is not None)
        if self.used is not None:
            self.used.close()


def open_arena(config: AgentConfig) -> KeptArena:
    """Make the arena that the configuration asks for, or take over that of the agent before.

    Takes about a third of a second for each GiB. Raises ArenaError.
    """
    size = config.num_blocks, config.block_bytes
    if config.arena_name is None:
        arena = Arena.create(config.arena_dir, *size, prefault=config.prefault)
        return KeptArena(arena, BlockAllocator(arena.num_blocks))
    adopted = Arena.adopt(config.arena_dir, config.arena_name, *size, prefault=config.prefault)
    arena = adopted or Arena.create(
        config.arena_dir, *size, name=config.arena_name, prefault=config.prefault
    )
    try:
        return _with_books(arena, is_adopted=adopted is not None)
    except (OSError, ValueError) as error:
        arena.close()
        raise ArenaError(
            f"cannot keep what belongs to the arena {arena.path} of {arena.nbytes} bytes: {error}"
        ) from error


def _with_books(arena: Arena, *, is_adopted: bool) -> KeptArena:
    assert arena.index_path is not None, "a named arena has an index"
    index, stored = PoolIndex.open(arena.index_path, IndexHeader.of(arena))
    used = UsedMap(arena.path.with_suffix(".used"), arena.num_blocks)
    whole = Run(0, arena.num_blocks)
    # An adopted arena without a map: any block may be in use.
    before = [whole] if is_adopted and used.is_new else used.used_runs()
    allocator = MappedAllocator(arena.num_blocks, used)
    cached = [run for record in stored for run in record.runs]
    allocator.take(cached)
    # Bytes of cached parts are final. The former agent's engines may still write the others.
    set_apart = _without(before, cached)
    allocator.take(set_apart)
    if is_adopted:
        logger.info(
            "took over the arena %s: %d cached parts, %d blocks set apart",
            arena.path,
            len(stored),
            sum(run.length for run in set_apart),
        )
    return KeptArena(arena, allocator, index, used, stored, set_apart)


def _without(runs: Iterable[Run], others: Iterable[Run]) -> list[Run]:
    """The blocks that are in `runs` and not in `others`, which do not overlap each other."""
    cuts = sorted(others)
    left = []
    position = 0
    for run in sorted(runs):
        first = run.first
        while position < len(cuts) and cuts[position].end <= first:
            position += 1
        cut = position
        while cut < len(cuts) and cuts[cut].first < run.end:
            if cuts[cut].first > first:
                left.append(Run(first, cuts[cut].first - first))
            first = max(first, cuts[cut].end)
            cut += 1
        if first < run.end:
            left.append(Run(first, run.end - first))
    return left
