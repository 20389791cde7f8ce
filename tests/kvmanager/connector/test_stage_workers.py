"""Workers of pipeline stages send and store every byte once together, and each loads its own."""

import itertools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from eventually import wait_until
from page_views import page_view
from recording_client import RecordingClient
from simple_layouts import layout, paged, state

from kvmanager.agent.engines.protocol import Welcome
from kvmanager.arena import Arena
from kvmanager.layout import KVGroup, KVKind
from kvmanager.vllm_connector.metadata import (
    CachedParts,
    LoadStep,
    PartPages,
    PrfaasMetadata,
    SendStep,
    StoreStep,
    TransferRef,
)
from kvmanager.vllm_connector.worker import WorkerSide

LAYOUT = layout(
    KVGroup(KVKind.FULL, 16, (paged("layers.0", 70, 16, 2), paged("layers.3", 70, 16, 2))),
    KVGroup(KVKind.WINDOW, 16, (paged("layers.1", 50, 16, 2),), window_tokens=49),
    KVGroup(KVKind.RECURRENT, 1, (state("layers.2", 90, 2),)),
    tp_size=2,
)
STAGES = (("layers.0", "layers.1"), ("layers.2", "layers.3"))
"""The second stage has no window, and the first one no state."""
ALL = tuple(itertools.chain(*STAGES))
TID = bytes(range(16))
NUM_TOKENS = 64
NUM_BLOCKS = 9
RUNS = ((0, 4),)
PARTS = {0: ((4, 1),), 1: ((5, 1),), 2: ((6, 1),)}
"""One block of the cache, of a page: the full layers' pages, the window's, the state."""


class Worker:
    """One rank of one stage, whose pages are random or zero."""

    def __init__(self, arena: Arena, layers: Sequence[str], rank: int, *, seed: int = 0) -> None:
        self.client = RecordingClient(arena)
        self.pages: dict[str, torch.Tensor] = {}
        views = {}
        for _, layer in LAYOUT.layers:
            if layer.name not in layers:
                continue
            (part,) = layer.parts
            shape = (NUM_BLOCKS, part.item_bytes)
            pages = torch.zeros(shape, dtype=torch.uint8)
            if seed:
                pages = torch.randint(1, 256, shape, dtype=torch.uint8)
            self.pages[layer.name] = pages
            views[layer.name] = page_view(part, pages, LAYOUT.tp_size, rank)
        client: Any = self.client
        self.side = WorkerSide(LAYOUT, client, views)
        self.side.start()
        self.side.on_connected(
            Welcome(arena.epoch, str(arena.path), arena.nbytes, arena.block_bytes, grace_s=60.0),
            arena,
        )

    def step(self, meta: PrfaasMetadata) -> None:
        """What vLLM calls in a step: it names the attention layers of this worker's stage."""
        self.side.start_step(meta)
        for name in self.pages:
            if name != "layers.2":
                self.side.save_kv_layer(meta, name)
        self.side.wait_for_save(meta)

    def said(self, what: str) -> list[list[Any]]:
        return [rest for said, *rest in self.client.said if said == what]

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """What it said is ready."""
        return [found for _, _, ranges in self.said("ready") for found in ranges]

    def load(self, step: LoadStep) -> None:
        self.side.begin_step(
            PrfaasMetadata(loads=[step], kept_s={step.request_id: time.monotonic()}), 0.0
        )
        found = wait_until(self.side.transfer_results, lambda found: found.finished_recving)
        assert not found.failed_recving


def blocks(computed: int) -> tuple[list[int], ...]:
    """The block tables of the layout's groups after so many tokens."""
    pages = -(-computed // 16)
    return [1, 2, 3, 4][:pages], [5, 6, 7][: max(0, pages - 1)], [8]


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    arena = Arena.create(tmp_path, 8, 4096, prefault=False)
    yield arena
    arena.close()


@pytest.fixture
def stages(arena: Arena) -> Iterator[dict[tuple[int, int], Worker]]:
    torch.manual_seed(5)
    workers = {
        (stage, rank): Worker(arena, STAGES[stage], rank, seed=1)
        for stage in range(2)
        for rank in range(2)
    }
    yield workers
    for worker in workers.values():
        worker.side.close()


@pytest.fixture
def others(arena: Arena) -> Iterator[dict[int, Worker]]:
    """An engine of the same ranks and one stage, with empty memory."""
    workers = {rank: Worker(arena, ALL, rank) for rank in range(2)}
    yield workers
    for worker in workers.values():
        worker.side.close()


def has_loaded(
    others: dict[int, Worker], stages: dict[tuple[int, int], Worker], table: dict[str, list[int]]
) -> bool:
    return all(
        torch.equal(others[rank].pages[name][table[name]], worker.pages[name][table[name]])
        for (_, rank), worker in stages.items()
        for name in worker.pages
    )


TABLE = {"layers.0": [1, 2, 3, 4], "layers.3": [1, 2, 3, 4], "layers.1": [5, 6, 7], "layers.2": [8]}


def test_stages_fill_an_outbox_chunk_by_chunk_and_one_engine_loads_it(
    arena: Arena, stages: dict[tuple[int, int], Worker], others: dict[int, Worker]
) -> None:
    ref = TransferRef(TID, NUM_TOKENS, arena.epoch, RUNS, attempt=1)
    for computed in (32, 48, 64):
        meta = PrfaasMetadata(sends=[SendStep(ref, blocks(computed), computed)])
        for worker in stages.values():
            worker.step(meta)
    ranges = sorted(found for worker in stages.values() for found in worker.ranges)
    ends = [offset + length for offset, length in ranges]
    assert [offset for offset, _ in ranges] == [0, *ends[:-1]]
    assert ends[-1] == LAYOUT.transfer_bytes(NUM_TOKENS)
    assert [worker.said("prefill_end") for worker in stages.values()] == [[[TID, 1]]] * 4
    landing = TransferRef(TID, NUM_TOKENS, arena.epoch, RUNS)
    for other in others.values():
        other.load(LoadStep("r", landing, blocks(NUM_TOKENS)))
    assert has_loaded(others, stages, TABLE)


def test_a_stage_may_run_ahead_of_the_next_one(
    arena: Arena, stages: dict[tuple[int, int], Worker], others: dict[int, Worker]
) -> None:
    """The first stage has ended all chunks before the second one begins the first."""
    ref = TransferRef(TID, NUM_TOKENS, arena.epoch, RUNS, attempt=1)
    for stage in (0, 1):
        for computed in (32, 64):
            meta = PrfaasMetadata(sends=[SendStep(ref, blocks(computed), computed)])
            for rank in range(2):
                stages[stage, rank].step(meta)
    total = sum(length for worker in stages.values() for _, length in worker.ranges)
    assert total == LAYOUT.transfer_bytes(NUM_TOKENS)
    landing = TransferRef(TID, NUM_TOKENS, arena.epoch, RUNS)
    for other in others.values():
        other.load(LoadStep("r", landing, blocks(NUM_TOKENS)))
    assert has_loaded(others, stages, TABLE)


def test_stages_store_and_load_the_cache_with_engines_of_one_stage(
    arena: Arena, stages: dict[tuple[int, int], Worker], others: dict[int, Worker]
) -> None:
    """Every worker says that it has written each part, also one that has no layer of it."""
    table = {"layers.0": [1], "layers.3": [1], "layers.1": [5], "layers.2": [8]}
    groups = {0: ([1],), 1: ([5],), 2: ([8],)}
    parts = tuple(PartPages(0, part, runs, groups[part]) for part, runs in PARTS.items())
    cached = CachedParts(arena.epoch, time.monotonic(), parts)
    for worker in stages.values():
        worker.step(PrfaasMetadata(stores=[StoreStep(3, cached, is_last=True)]))
    assert [worker.said("cache_written") for worker in stages.values()] == [
        [[3, [(0, 0), (0, 1), (0, 2)], True]]
    ] * 4
    given = CachedParts(arena.epoch, time.monotonic(), parts)
    for other in others.values():
        other.load(LoadStep("r", cached=given))
    assert has_loaded(others, stages, table)
    before = {key: {n: p.clone() for n, p in w.pages.items()} for key, w in stages.items()}
    for key, worker in stages.items():
        for pages in worker.pages.values():
            pages.zero_()
        worker.load(LoadStep("r", cached=given))
        for name, pages in worker.pages.items():
            assert torch.equal(pages[table[name]], before[key][name][table[name]])
