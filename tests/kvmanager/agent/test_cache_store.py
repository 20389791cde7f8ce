"""The bytes of cached parts: what is journalled, what comes back, what is set apart."""

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from eventually import eventually

from kvmanager.agent.cache.ssd_copies import FETCHED_PER_FILL
from kvmanager.agent.cache.store import PartStore
from kvmanager.agent.config import AgentConfig
from kvmanager.agent.kept_arena import KeptArena, open_arena
from kvmanager.pool.pool import HybridPool
from kvmanager.pool.records import Fill, PoolChange, Tier
from kvmanager.pool.shape import CacheShape, PartKind, PartShape
from kvmanager.pool.ssd import SsdEntry, SsdStore

BLOCK = 4096
SHAPE = CacheShape(64, (PartShape(PartKind.KV, 2 * BLOCK),))
ROOT = bytes(16)
KEYS = [bytes([number]) * 16 for number in range(1, 5)]


class Life:
    """An arena with its pool and store, as an agent has them for as long as it lives."""

    def __init__(
        self,
        folder: Path,
        *,
        num_blocks: int = 16,
        with_ssd: bool = False,
        ssd: SsdStore | None = None,
        ssd_bytes: int = 1 << 20,
    ) -> None:
        config = AgentConfig(
            arena_dir=folder,
            arena_gib=num_blocks * BLOCK / (1 << 30),
            block_bytes=BLOCK,
            prefault=False,
            arena_name="a",
        )
        self.kept: KeptArena = open_arena(config)
        self.ssd = SsdStore(folder / "ssd") if with_ssd else ssd
        self.store = PartStore(self.kept.arena, self.kept.index, self.ssd)
        self.pool = HybridPool(
            self.kept.allocator,
            BLOCK,
            listener=self.store.part_changed,
            ssd_bytes=ssd_bytes if self.ssd is not None else 0,
        )
        self.store.attach(self.pool)

    def reserve(self, first: int, keys: Sequence[bytes]) -> Fill:
        parent = KEYS[first - 1] if first else ROOT
        parts = [(index, 0) for index in range(len(keys))]
        return self.pool.reserve(SHAPE, parent, first, keys, parts, 0.0)

    async def commit(self, fill: Fill, keys: Sequence[bytes]) -> None:
        """Write, seal and commit all of it, and end it."""
        for slot in fill.slots:
            for view in self.store.parts.views(SHAPE, slot.part, slot.runs):
                view[:] = keys[slot.index][:1] * len(view)
        await self.store.parts.seal(SHAPE, keys, fill.slots)
        for slot in fill.slots:
            assert self.pool.commit(fill.fill_id, slot.index, slot.part, 0.0)
        self.end(fill, keys)

    def end(self, fill: Fill, keys: Sequence[bytes]) -> None:
        self.pool.abort(fill.fill_id)
        self.store.parts.forget(keys, fill.slots)
        self.pool.check_invariants()

    async def is_on_ssd(self) -> None:
        async with asyncio.timeout(10):
            while self.store.parts.use.ssd_writes < self.pool.status().num_blocks:
                self.store.ssd.spill()
                await asyncio.sleep(0.001)

    async def close(self) -> None:
        await self.store.stop()
        self.store.close()
        self.kept.close()


Begin = Callable[..., Life]


@pytest.fixture
async def begin(tmp_path: Path) -> AsyncIterator[Begin]:
    lives: list[Life] = []

    def begun(**settings: Any) -> Life:
        lives.append(Life(tmp_path, **settings))
        return lives[-1]

    yield begun
    await lives[-1].close()


async def test_a_part_whose_base_comes_when_its_own_fill_is_over(begin: Begin) -> None:
    life = begin()
    base = life.reserve(0, KEYS[:1])
    rest = life.reserve(1, KEYS[1:3])
    await life.commit(rest, KEYS[1:3])
    assert life.pool.match(SHAPE, KEYS).num_blocks == 0
    life.store.flush()
    await life.commit(base, KEYS[:1])
    assert life.pool.match(SHAPE, KEYS).num_blocks == 3
    await life.close()

    life = begin()
    await life.store.restore(life.kept.stored, life.kept.allocator)
    assert life.store.parts.use.wrong_parts == 0
    assert life.pool.match(SHAPE, KEYS).num_blocks == 3


async def test_a_part_whose_base_comes_to_nothing_can_be_stored_anew(begin: Begin) -> None:
    life = begin()
    base = life.reserve(0, KEYS[:1])
    await life.commit(life.reserve(1, KEYS[1:3]), KEYS[1:3])
    life.end(base, KEYS[:1])
    life.store.flush()
    assert life.kept.allocator.num_free == 16
    await life.commit(life.reserve(0, KEYS), KEYS)
    assert life.pool.match(SHAPE, KEYS).num_blocks == 4


async def test_memory_of_what_is_not_taken_over_is_set_apart(begin: Begin) -> None:
    """Who read it in the former life may still be at it."""
    life = begin()
    await life.commit(life.reserve(0, KEYS[:2]), KEYS[:2])
    wrong = life.pool.lookup(KEYS[0], 0)
    assert wrong is not None
    life.store.parts.views(SHAPE, 0, wrong)[0][7] ^= 1
    await life.close()

    life = begin()
    kept = life.kept
    assert kept.allocator.num_free == 12
    await life.store.restore(kept.stored, kept.allocator, kept.set_more_apart)
    assert life.store.parts.use.wrong_parts == 1
    assert life.pool.match(SHAPE, KEYS).num_blocks == 0
    assert kept.allocator.num_free == 12
    kept.release_set_apart()
    assert kept.allocator.num_free == 16


async def test_a_file_that_is_copied_anew_while_the_old_ones_are_entered(begin: Begin) -> None:
    life = begin(with_ssd=True)
    await life.commit(life.reserve(0, KEYS[:1]), KEYS[:1])
    await life.is_on_ssd()
    await life.store.restore((), life.kept.allocator)
    assert life.ssd is not None
    await asyncio.wrap_future(life.ssd.remove(KEYS[0], 99))  # whatever was begun before is done
    assert life.pool.discard(KEYS[0], 0, Tier.ARENA)
    await life.store.ssd.fetch(SHAPE, KEYS[:1], [(0, 0)])
    assert life.store.parts.use.ssd_failures == 0
    assert life.pool.match(SHAPE, KEYS).arena_blocks == 1


async def test_nothing_is_copied_to_ssd_while_its_files_are_listed(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = begin(with_ssd=True)
    await life.commit(life.reserve(0, KEYS[:1]), KEYS[:1])
    listed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    run = life.store.parts.run

    async def slow_run(*work: object) -> object:
        await listed
        return await run(*work)  # type: ignore[arg-type]

    monkeypatch.setattr(life.store.parts, "run", slow_run)
    restoring = asyncio.create_task(life.store.restore((), life.kept.allocator))
    await asyncio.sleep(0)
    life.store.ssd.spill()
    [spill] = life.pool.ssd.choose(1)
    life.pool.ssd.not_stored(spill)
    listed.set_result(None)
    await restoring
    monkeypatch.undo()
    await life.commit(life.reserve(1, KEYS[1:2]), KEYS[1:2])
    async with asyncio.timeout(10):
        while not life.store.parts.use.ssd_writes:
            life.store.ssd.spill()
            await asyncio.sleep(0.001)


async def test_one_call_copies_all_that_wants_to_be_on_ssd(begin: Begin) -> None:
    """A fixed number for each tick of the agent's clock would be a limit below that of the disk."""
    life = begin(num_blocks=256, with_ssd=True)
    keys = [number.to_bytes(16, "big") for number in range(1, 101)]
    await life.commit(life.reserve(0, keys), keys)
    life.store.ssd.spill()
    await eventually(lambda: life.store.parts.use.ssd_writes >= len(keys))


class Turns:
    """The longest time that the event loop's thread computed between two turns of this task.

    The garbage collector rests meanwhile: its time grows with what the tests before have left.
    """

    def __init__(self) -> None:
        gc.disable()
        self.longest_s = 0.0
        self._task = asyncio.create_task(self._measure())

    async def _measure(self) -> None:
        before_s = time.thread_time()
        while True:
            await asyncio.sleep(0)
            after_s = time.thread_time()
            self.longest_s = max(self.longest_s, after_s - before_s)
            before_s = after_s

    async def end(self) -> float:
        self._task.cancel()
        await asyncio.wait({self._task})
        gc.enable()
        return self.longest_s


def chain(name: int, num_blocks: int) -> list[bytes]:
    return [name.to_bytes(8, "big") + index.to_bytes(8, "big") for index in range(num_blocks)]


def restore_on_ssd(life: Life, keys: Sequence[bytes], parent: bytes = ROOT, first: int = 0) -> None:
    """The books say that these blocks are on SSD, where there is no file of them."""
    for index, key in enumerate(keys, first):
        change = PoolChange(True, Tier.SSD, key, parent, index, 0, SHAPE, ())
        assert life.pool.restore(change, 0.0)
        parent = key


async def test_an_ssd_that_fails_does_not_hold_up_the_event_loop(begin: Begin) -> None:
    """A prompt of 500 blocks beside 50,000 others, of which no file can be read."""
    life = begin(num_blocks=1010, with_ssd=True, ssd_bytes=1 << 40)
    keys = chain(0, 500)
    restore_on_ssd(life, keys)
    for number in range(1, 501):
        restore_on_ssd(life, chain(number, 100))
    turns = Turns()
    await life.store.ssd.fetch(SHAPE, keys, [(index, 0) for index in range(500)])
    await life.store.ssd.drop_lost()
    assert await turns.end() < 0.1
    assert life.pool.match(SHAPE, keys).kv_blocks == 0
    assert life.pool.status().num_blocks == 50_000
    assert life.kept.allocator.num_free == 1010
    assert 1 <= life.store.parts.use.ssd_failures <= 64


async def test_all_that_stands_on_a_lost_block_goes_in_steps(begin: Begin) -> None:
    """A system prompt of which a file is lost, with 40 prompts of 20 blocks behind it."""
    life = begin(num_blocks=8, with_ssd=True, ssd_bytes=1 << 40)
    restore_on_ssd(life, KEYS)
    for number in range(1, 41):
        restore_on_ssd(life, chain(number, 20), KEYS[-1], len(KEYS))
    await life.store.ssd.fetch(SHAPE, KEYS, [(0, 0)])
    assert life.pool.has_lost
    await asyncio.gather(life.store.ssd.drop_lost(), life.store.ssd.drop_lost())
    assert life.pool.status().num_blocks == 0


async def test_what_was_read_before_a_failure_stays(begin: Begin) -> None:
    life = begin(with_ssd=True)
    await life.commit(life.reserve(0, KEYS), KEYS)
    await life.is_on_ssd()
    assert life.pool.make_room(16)
    assert life.ssd is not None
    await asyncio.wrap_future(life.ssd.remove(KEYS[2], 0))
    await life.store.ssd.fetch(SHAPE, KEYS, [(index, 0) for index in range(4)])
    assert (life.store.parts.use.ssd_reads, life.store.parts.use.ssd_failures) == (2, 1)
    match = life.pool.match(SHAPE, KEYS)
    assert (match.arena_kv_blocks, match.kv_blocks) == (2, 2)
    life.pool.check_invariants()


class HeldSsd(SsdStore):
    """Files that are written when the test says so."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.writing: list[Future[bool]] = []
        self.asked: list[str] = []

    def write(self, entry: SsdEntry, views: Sequence[memoryview]) -> Future[bool]:
        self.asked.append("write")
        self.writing.append(Future())
        return self.writing[-1]

    def remove(self, key: bytes, part: int) -> Future[bool]:
        self.asked.append("remove")
        return Future()

    async def written(self, is_written: bool) -> None:
        """The first write that is under way is over."""
        self.writing.pop(0).set_result(is_written)
        await asyncio.sleep(0)


async def spilled_twice(life: Life, ssd: HeldSsd) -> None:
    """The part leaves the arena while it is copied to SSD, comes back and is copied again."""
    for _ in range(2):
        await life.commit(life.reserve(0, KEYS[:1]), KEYS[:1])
        life.store.ssd.spill()
        is_first = len(ssd.writing) == 1
        assert life.pool.discard(KEYS[0], 0, Tier.ARENA) if is_first else True
    assert ssd.asked == ["write", "write"]


async def test_a_copy_that_came_too_late_does_not_take_the_next_one_away(
    begin: Begin, tmp_path: Path
) -> None:
    ssd = HeldSsd(tmp_path / "held")
    life = begin(ssd=ssd, ssd_bytes=1 << 20)
    await spilled_twice(life, ssd)
    await ssd.written(True)
    assert life.pool.status().nbytes.get((Tier.SSD, PartKind.KV), 0) == 0
    await ssd.written(True)
    assert life.pool.status().nbytes[Tier.SSD, PartKind.KV] == 2 * BLOCK
    assert "remove" not in ssd.asked, "both wrote the same file"


async def test_a_file_of_an_earlier_copy_is_removed_when_the_last_one_fails(
    begin: Begin, tmp_path: Path
) -> None:
    ssd = HeldSsd(tmp_path / "held")
    life = begin(ssd=ssd, ssd_bytes=1 << 20)
    await spilled_twice(life, ssd)
    await ssd.written(True)
    await ssd.written(False)
    assert ssd.asked == ["write", "write", "remove"]
    assert life.pool.match(SHAPE, KEYS[:1]).arena_blocks == 1


class ReadySsd(HeldSsd):
    """Files that are read at once."""

    def read(self, entry: SsdEntry, views: Sequence[memoryview]) -> Future[bool]:
        done: Future[bool] = Future()
        done.set_result(True)
        return done


async def test_a_long_prompt_is_fetched_in_fills_of_a_bounded_size(
    begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = begin(num_blocks=700, ssd=ReadySsd(tmp_path / "ready"), ssd_bytes=1 << 40)
    keys = chain(0, 300)
    restore_on_ssd(life, keys)
    reserve, sizes = life.pool.reserve, list[int]()

    def reserved(*arguments: Any) -> Fill:
        fill = reserve(*arguments)
        sizes.append(len(fill.slots))
        return fill

    monkeypatch.setattr(life.pool, "reserve", reserved)
    await life.store.ssd.fetch(SHAPE, keys, [(index, 0) for index in range(300)])
    assert life.pool.match(SHAPE, keys).arena_blocks == 300
    assert sum(sizes) == 300
    assert max(sizes) <= FETCHED_PER_FILL
