"""The worker's half of the prefix cache: bytes in and out, and last words to the agent."""

import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from simple_layouts import paged, state

from kvmanager.arena import Arena
from kvmanager.layout import KVGroup, KVKind, KVLayout
from kvmanager.vllm_connector.arena_access import ArenaAccess, StaleArenaError
from kvmanager.vllm_connector.cache.worker import CacheWorker, JoinedSpace
from kvmanager.vllm_connector.metadata import CachedParts, PartPages, StoreStep
from kvmanager.vllm_connector.pages import LayerPages
from kvmanager.vllm_connector.stats import TransferStats

NUM_PAGES = 16
LAYOUT = KVLayout(
    "m",
    "files:0",
    "digest",
    2,
    (
        KVGroup(KVKind.FULL, 16, (paged("full.0", 700), paged("full.1", 300))),
        KVGroup(KVKind.WINDOW, 32, (paged("window", 500, 32),), window_tokens=33),
        KVGroup(KVKind.RECURRENT, 1, (state("state", 5000),)),
    ),
)
"""Blocks of 32 tokens: two full pages, one window page, one state; two ranks."""
RUNS = {0: ((3, 1),), 1: ((1, 1),), 2: ((5, 2), (9, 1))}


class FakeClient:
    def __init__(self, arena: Arena) -> None:
        self.arena: Arena | None = arena
        self.written: list[tuple[int, list[tuple[int, int]], bool]] = []

    def cache_written(
        self, handle: int, parts: Sequence[tuple[int, int]], *, is_last: bool = False
    ) -> bool:
        self.written.append((handle, list(parts), is_last))
        return True


class Rank:
    """One worker with random pages."""

    def __init__(self, client: FakeClient, rank: int) -> None:
        self.client = client
        self.counts = TransferStats()
        generator = torch.Generator().manual_seed(rank)
        self.pages = {
            layer.name: LayerPages(
                layer,
                torch.randint(
                    0, 256, (NUM_PAGES, layer.page_bytes), dtype=torch.uint8, generator=generator
                ),
            )
            for group in LAYOUT.groups
            for layer in group.layers
        }
        any_client: Any = client
        self.access = ArenaAccess(any_client, torch.device("cpu"))
        if client.arena is not None:
            self.access.prepare(client.arena)
        self.worker = CacheWorker(
            LAYOUT, rank, any_client, self.access, self.pages, stats=lambda: self.counts
        )
        self.worker.on_connected()

    def rows(self, layer: str, *blocks: int) -> bytes:
        return bytes(self.pages[layer].rows[list(blocks)].numpy())

    def clear(self) -> None:
        for pages in self.pages.values():
            pages.rows.zero_()


@pytest.fixture
def client(tmp_path: Path) -> Iterator[FakeClient]:
    arena = Arena.create(tmp_path, 16, 4096, prefault=False)
    yield FakeClient(arena)
    arena.close()


def parts_of(*pages: PartPages, asked_s: float | None = None, epoch: str) -> CachedParts:
    return CachedParts(epoch, time.monotonic() if asked_s is None else asked_s, pages)


def part(part: int, *blocks: list[int], index: int = 0) -> PartPages:
    return PartPages(index, part, RUNS[part], blocks)


def store(rank: Rank, *pages: PartPages, handle: int = 1, is_last: bool = False) -> None:
    assert rank.client.arena is not None
    cached = parts_of(*pages, epoch=rank.client.arena.epoch)
    rank.worker.store([StoreStep(handle, cached, is_last)])


def test_all_ranks_blocks_come_back_bit_for_bit(client: FakeClient) -> None:
    ranks = [Rank(client, 0), Rank(client, 1)]
    expected = []
    for rank in ranks:
        store(rank, part(0, [4, 9]), part(1, [2]), part(2, [7]), is_last=True)
        expected.append(
            [
                rank.rows("full.0", 4, 9),
                rank.rows("full.1", 4, 9),
                rank.rows("window", 2),
                rank.rows("state", 7),
            ]
        )
    assert client.written == [(1, [(0, 0), (0, 1), (0, 2)], True)] * 2
    for rank, rows in zip(ranks, expected, strict=True):
        rank.clear()
        assert client.arena is not None
        rank.worker.load(
            parts_of(part(0, [1, 2]), part(1, [3]), part(2, [5]), epoch=client.arena.epoch)
        )
        assert rank.rows("full.0", 1, 2) == rows[0]
        assert rank.rows("full.1", 1, 2) == rows[1]
        assert rank.rows("window", 3) == rows[2]
        assert rank.rows("state", 5) == rows[3]
        assert rank.counts.data["cache_stored_bytes"] == 2 * 1000 + 500 + 5000
        assert rank.counts.data["cache_loaded_bytes"] == 2 * 1000 + 500 + 5000
        assert rank.counts.data["cache_loaded_blocks"] == rank.counts.data["cache_loads"] == 1


def test_the_last_pages_of_a_part_are_copied_alone(client: FakeClient) -> None:
    rank = Rank(client, 1)
    store(rank, part(0, [4, 9]))
    kept = rank.rows("full.0", 9)
    rank.clear()
    assert client.arena is not None
    rank.worker.load(parts_of(part(0, [6]), epoch=client.arena.epoch))
    assert rank.rows("full.0", 6) == kept
    assert not rank.pages["full.0"].rows[:6].any()


def test_each_step_is_announced_and_the_last_one_ends_the_handle(client: FakeClient) -> None:
    rank = Rank(client, 0)
    store(rank, part(0, [1, 2]))
    store(rank, part(1, [3], index=4))
    store(rank, is_last=True)
    assert client.written == [(1, [(0, 0)], False), (1, [(4, 1)], False), (1, [], True)]
    store(rank, is_last=True, handle=2)
    assert client.written[-1] == (2, [], True)


class LateCopier:
    """Ends copies when told to, as a GPU does."""

    def __init__(self) -> None:
        self.done: list[Any] = []

    def store(self, pages: Any, block_ids: Any, space: Any, offset: int, done: Any) -> None:
        self.done.append(done)

    def drain(self) -> None: ...
    def close(self) -> None: ...


def test_the_last_word_comes_behind_the_last_copy(client: FakeClient, monkeypatch: Any) -> None:
    rank, copier = Rank(client, 0), LateCopier()
    monkeypatch.setattr(rank.access, "open", lambda epoch: (client.arena, copier))
    store(rank, part(0, [1, 2]))
    store(rank, part(1, [3]))
    store(rank, is_last=True)
    assert client.written == []
    for done in copier.done:
        done(None)
    assert client.written == [(1, [(0, 0)], False), (1, [(0, 1)], True)]


def test_a_copy_that_fails_late_is_not_announced_and_ends_the_handle(
    client: FakeClient, monkeypatch: Any
) -> None:
    rank, copier = Rank(client, 0), LateCopier()
    monkeypatch.setattr(rank.access, "open", lambda epoch: (client.arena, copier))
    store(rank, part(0, [1, 2]))
    store(rank, part(1, [3]))
    first, *others = copier.done
    first(RuntimeError("the GPU is lost"))
    assert client.written == [], "another copy of this handle is under way"
    for done in others:
        done(RuntimeError("the GPU is lost"))
    assert client.written == [(1, [], True)]
    store(rank, part(2, [5]), is_last=True)
    assert client.written == [(1, [], True)], "the handle is over"
    assert rank.counts.data["cache_failed_stores"] == 2


def test_a_failed_copy_ends_the_handle_and_leaves_the_engine_alone(
    client: FakeClient, monkeypatch: Any
) -> None:
    rank = Rank(client, 0)
    store(rank, part(0, [1, 2]))
    store(rank, part(1, [0]))
    store(rank, part(2, [5]))
    store(rank, is_last=True)
    assert client.written == [(1, [(0, 0)], False), (1, [], True)]
    assert rank.counts.data["cache_failed_stores"] == 1

    def broken(*arguments: Any) -> None:
        raise RuntimeError("no memory")

    _, copier = rank.access.open(client.arena.epoch if client.arena else "")
    monkeypatch.setattr(copier, "store", broken)
    store(rank, part(0, [1, 2]), handle=2, is_last=True)
    assert client.written[-1] == (2, [], True)


def test_memory_given_before_the_connection_broke_is_not_touched(client: FakeClient) -> None:
    rank = Rank(client, 0)
    assert client.arena is not None
    old = parts_of(part(0, [1, 2]), epoch=client.arena.epoch)
    rank.worker.on_disconnected()
    with pytest.raises(StaleArenaError):
        rank.worker.load(old)
    rank.worker.on_connected()
    rank.worker.store([StoreStep(1, old, is_last=False)])
    assert client.written == [(1, [], True)], "the agent waits for this rank's last word"
    assert not any(bytes(client.arena.memory))
    with pytest.raises(StaleArenaError):
        rank.worker.load(old)
    based_on_landing = parts_of(part(0, [1, 2]), epoch=client.arena.epoch, asked_s=math.inf)
    rank.worker.load(based_on_landing)


def test_another_agent_hears_nothing_of_its_predecessors_handles(client: FakeClient) -> None:
    rank = Rank(client, 0)
    rank.worker.store([StoreStep(1, parts_of(part(0, [1, 2]), epoch="old"), is_last=True)])
    rank.worker.store([StoreStep(2, parts_of(epoch="old"), is_last=True)])
    client.arena = None
    store_nowhere = StoreStep(3, parts_of(part(0, [1, 2]), epoch="old"), is_last=True)
    rank.worker.store([store_nowhere])
    assert client.written == []


def test_a_connection_that_breaks_during_a_load_fails_it(
    client: FakeClient, monkeypatch: Any
) -> None:
    rank = Rank(client, 0)
    assert client.arena is not None
    cached = parts_of(part(0, [1, 2]), epoch=client.arena.epoch)
    _, copier = rank.access.open(client.arena.epoch)
    monkeypatch.setattr(copier, "load", lambda *arguments: rank.worker.on_disconnected())
    with pytest.raises(StaleArenaError):
        rank.worker.load(cached)
    assert rank.counts.data["cache_loads"] == 0


def test_a_page_without_a_block_is_never_written(client: FakeClient) -> None:
    rank = Rank(client, 0)
    assert client.arena is not None
    with pytest.raises(ValueError, match=r"full\.0"):
        rank.worker.load(parts_of(part(0, [0, 2]), epoch=client.arena.epoch))


@pytest.mark.parametrize("lengths", [(10,), (3, 5, 7), (1, 4, 1), (4, 0, 6)])
def test_joined_ranges_read_as_one(lengths: tuple[int, ...]) -> None:
    memory = memoryview(bytes(range(100)))
    space = SimpleNamespace(views=lambda offset, length: [memory[offset : offset + length]])
    ranges: Any = [(space, 20 * index, length) for index, length in enumerate(lengths)]
    joined = JoinedSpace(ranges)
    whole = b"".join(bytes(memory[start : start + length]) for _, start, length in ranges)
    assert joined.nbytes == len(whole)
    for offset in range(len(whole) + 1):
        for length in range(len(whole) - offset + 1):
            read = b"".join(bytes(view) for view in joined.views(offset, length))
            assert read == whole[offset : offset + length]
    with pytest.raises(ValueError, match="leaves"):
        joined.views(1, len(whole))
