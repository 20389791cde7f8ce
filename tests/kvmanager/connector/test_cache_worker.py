"""The worker's half of the prefix cache: bytes in and out, and last words to the agent."""

import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from page_views import page_view
from simple_layouts import paged, state

from kvmanager.arena import Arena
from kvmanager.layout import KVGroup, KVKind, KVLayout
from kvmanager.vllm_connector.arena_access import ArenaAccess, StaleArenaError
from kvmanager.vllm_connector.cache.worker import CacheWorker
from kvmanager.vllm_connector.metadata import CachedParts, PartPages, StoreStep
from kvmanager.vllm_connector.pages import CpuPageCopier
from kvmanager.vllm_connector.stats import TransferStats

NUM_PAGES = 16
LATENT = paged("latent", 900, 64)
LAYOUT = KVLayout(
    "m",
    "files:0",
    "digest",
    2,
    (
        KVGroup(KVKind.FULL, 16, (paged("full.0", 700, 16, 2), paged("full.1", 300, 16, 2))),
        KVGroup(KVKind.WINDOW, 32, (paged("window", 500, 32, 2),), window_tokens=33),
        KVGroup(KVKind.RECURRENT, 1, (state("state", 5000, 2),)),
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

    def __init__(self, client: FakeClient, rank: int, layout: KVLayout = LAYOUT) -> None:
        self.client = client
        self.counts = TransferStats()
        generator = torch.Generator().manual_seed(rank)
        self.pages: dict[str, torch.Tensor] = {}
        views = {}
        for _, layer in layout.layers:
            (part,) = layer.parts
            self.pages[layer.name] = torch.randint(
                0, 256, (NUM_PAGES, part.item_bytes), dtype=torch.uint8, generator=generator
            )
            views[layer.name] = page_view(part, self.pages[layer.name], layout.tp_size, rank)
        any_client: Any = client
        self.access = ArenaAccess(any_client, CpuPageCopier())
        self.worker = CacheWorker(layout, any_client, self.access, views, stats=lambda: self.counts)
        self.worker.on_connected()

    def rows(self, layer: str, *blocks: int) -> bytes:
        return bytes(self.pages[layer][list(blocks)].numpy())

    def clear(self) -> None:
        for pages in self.pages.values():
            pages.zero_()


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
    assert not rank.pages["full.0"][:6].any()


def test_a_rank_with_a_copy_stores_nothing_says_so_and_loads_what_the_first_rank_stored(
    client: FakeClient,
) -> None:
    layout = KVLayout("m", "files:0", "digest", 2, (KVGroup(KVKind.MLA, 64, (LATENT,)),))
    first, second = Rank(client, 0, layout), Rank(client, 1, layout)
    latent = PartPages(0, 0, ((3, 1),), ([4],))
    for rank in (second, first):
        store(rank, latent, is_last=True)
        assert client.written.pop() == (1, [(0, 0)], True)
    assert second.counts.data["cache_stored_bytes"] == 0
    assert client.arena is not None
    second.worker.load(parts_of(latent, epoch=client.arena.epoch))
    assert second.rows("latent", 4) == first.rows("latent", 4)


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

    def store(self, reads: Any, blocks: Any, copies: Any) -> None:
        self.done += [copy.done for copy in copies()]

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
