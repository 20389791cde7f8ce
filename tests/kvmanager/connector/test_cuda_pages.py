"""The GPU's page copier on a stand-in for CUDA, whose streams work only when they are told to."""

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda, install
from page_views import PiecewiseSpace, page_view, slab_of_pages
from simple_layouts import paged

from kvmanager.vllm_connector.pages import CudaPageCopier
from kvmanager.vllm_connector.slabs import PartView, Slab

ROW = 8
GPU = torch.device("cpu")
"""Stands for the GPU: its tensors must be real, and no GPU is needed to compare bytes."""


class ArenaOf:
    def __init__(self, memory: bytearray) -> None:
        self.memory = memoryview(memory)


class Notes:
    """What `done` was called with, in order."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, BaseException | None]] = []
        self._changed = threading.Condition()

    def of(self, name: str) -> Callable[[BaseException | None], None]:
        def done(error: BaseException | None) -> None:
            with self._changed:
                self.seen.append((name, error))
                self._changed.notify_all()

        return done

    def wait_for(self, count: int) -> list[tuple[str, BaseException | None]]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.seen) >= count, 5)
            return list(self.seen)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return install(monkeypatch)


ARENA = bytearray(64)


@pytest.fixture
def copier(cuda: FakeCuda) -> Iterator[CudaPageCopier]:
    arena: Any = ArenaOf(ARENA)
    copier = CudaPageCopier(GPU, arena)
    yield copier
    for stream in cuda.streams:
        stream.run()
    copier.close()


class Pages:
    """Four pages; the bytes of page n are 10 * n, 10 * n + 1 and so on."""

    def __init__(self) -> None:
        numbers = torch.arange(4, dtype=torch.uint8).view(4, 1) * 10
        self.rows = numbers + torch.arange(ROW).to(torch.uint8)
        self.view: PartView = page_view(paged("layer", ROW).parts[0], self.rows)[0]

    def slab(self, block_ids: list[int], space: PiecewiseSpace, offset: int = 0) -> Slab:
        return slab_of_pages(self.view, block_ids, space, offset)


@pytest.fixture
def pages() -> Pages:
    return Pages()


def page(number: int) -> bytes:
    return bytes(10 * number + i for i in range(ROW))


def test_a_copy_is_announced_when_its_bytes_are_there(
    cuda: FakeCuda, copier: CudaPageCopier, pages: Pages
) -> None:
    space, notes = PiecewiseSpace(4 * ROW, ROW + 3), Notes()
    copier.store([pages.slab([3, 1], space, ROW // 2)], notes.of("first"))
    pages.rows.zero_()  # the engine may use the pages for something else at once
    store_stream, _ = cuda.streams
    assert store_stream.waits_for == ["the engine's stream"]
    assert not any(space.memory)
    store_stream.run(1)
    assert notes.seen == [], "only one of the two pieces is there"
    store_stream.run()
    assert notes.wait_for(1) == [("first", None)]
    assert bytes(space.memory[ROW // 2 : ROW // 2 + 2 * ROW]) == page(3) + page(1)


def test_copies_are_announced_in_order(
    cuda: FakeCuda, copier: CudaPageCopier, pages: Pages
) -> None:
    space, notes = PiecewiseSpace(4 * ROW), Notes()
    for number in range(3):
        copier.store([pages.slab([number], space, number * ROW)], notes.of(str(number)))
    cuda.streams[0].run(2)
    assert [name for name, _ in notes.wait_for(2)] == ["0", "1"]
    cuda.streams[0].run()
    assert [name for name, _ in notes.wait_for(3)] == ["0", "1", "2"]


def test_gathered_pages_stay_until_the_copy_has_read_them(
    cuda: FakeCuda, copier: CudaPageCopier, pages: Pages
) -> None:
    """PyTorch would give their memory to the engine's stream, which does not wait for the copy."""
    copier.store([pages.slab([2], PiecewiseSpace(ROW))], Notes().of("x"))
    assert cuda.kept_for == [(ROW, cuda.streams[0])]


def test_slabs_of_one_copy_are_announced_together(
    cuda: FakeCuda, copier: CudaPageCopier, pages: Pages
) -> None:
    space, notes = PiecewiseSpace(4 * ROW), Notes()
    slabs = [pages.slab([2], space, 3 * ROW), pages.slab([0, 1], space)]
    copier.store(slabs, notes.of("both"))
    assert [nbytes for nbytes, _ in cuda.kept_for] == [ROW, 2 * ROW]
    cuda.streams[0].run(1)
    assert notes.seen == []
    cuda.streams[0].run()
    assert notes.wait_for(1) == [("both", None)]
    assert bytes(space.memory) == page(0) + page(1) + bytes(ROW) + page(2)


def test_a_copy_without_slabs_is_announced_behind_those_before_it(
    cuda: FakeCuda, copier: CudaPageCopier, pages: Pages
) -> None:
    """A rank whose units others send has nothing to copy, and must say so in its turn."""
    notes = Notes()
    copier.store([pages.slab([2], PiecewiseSpace(ROW))], notes.of("copy"))
    copier.store([], notes.of("none"))
    assert notes.seen == []
    cuda.streams[0].run()
    assert notes.wait_for(2) == [("copy", None), ("none", None)]


def test_drain_waits_for_the_last_announcement(
    cuda: FakeCuda, copier: CudaPageCopier, pages: Pages
) -> None:
    """Memory is given back behind a drain: what is announced later would be taken for new bytes."""
    order: list[str] = []
    may_end = threading.Event()

    def done(error: BaseException | None) -> None:
        assert may_end.wait(5)
        order.append("announced")

    def drain() -> None:
        copier.drain()
        order.append("drained")

    copier.store([pages.slab([1], PiecewiseSpace(ROW))], done)
    draining = threading.Thread(target=drain)
    draining.start()
    assert cuda.synchronizing.wait(5)
    may_end.set()
    draining.join(5)
    assert order == ["announced", "drained"]


def test_drain_waits_for_a_copy_that_was_begun_and_then_failed(
    cuda: FakeCuda, copier: CudaPageCopier, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    space, notes = PiecewiseSpace(2 * ROW), Notes()

    def no_event(**named: Any) -> None:
        raise RuntimeError("out of events")

    monkeypatch.setattr(torch.cuda, "Event", no_event)
    with pytest.raises(RuntimeError, match="out of events"):
        copier.store([pages.slab([1], space)], notes.of("x"))
    assert cuda.streams[0].queue
    copier.drain()
    assert not cuda.streams[0].queue
    assert notes.seen == []


def test_an_error_of_the_gpu_fails_that_copy_and_all_later_ones(
    cuda: FakeCuda, copier: CudaPageCopier, pages: Pages, caplog: pytest.LogCaptureFixture
) -> None:
    space, notes = PiecewiseSpace(4 * ROW), Notes()
    copier.store([pages.slab([0], space)], notes.of("good"))
    cuda.streams[0].run()
    assert notes.wait_for(1) == [("good", None)]
    copier.store([pages.slab([1], space)], notes.of("bad"))
    copier.store([pages.slab([2], space)], notes.of("behind it"))
    cuda.error = RuntimeError("illegal memory access")
    cuda.streams[0].run()
    assert notes.wait_for(3)[1:] == [("bad", cuda.error), ("behind it", cuda.error)]
    with pytest.raises(RuntimeError, match="earlier copy"):
        copier.store([pages.slab([3], space)], notes.of("later"))
    copier.drain()
    assert "a copy out of the GPU failed" in caplog.text
    cuda.error = None


def test_an_announcement_that_raises_does_not_stop_the_next(
    cuda: FakeCuda, copier: CudaPageCopier, pages: Pages, caplog: pytest.LogCaptureFixture
) -> None:
    notes = Notes()

    def fails(error: BaseException | None) -> None:
        raise KeyError("a bug")

    copier.store([pages.slab([0], PiecewiseSpace(ROW))], fails)
    copier.store([pages.slab([1], PiecewiseSpace(ROW))], notes.of("next"))
    cuda.streams[0].run()
    assert notes.wait_for(1) == [("next", None)]
    copier.drain()
    assert "the callback at the end of a copy raised" in caplog.text


def test_a_load_returns_when_the_pages_have_their_bytes(
    cuda: FakeCuda, copier: CudaPageCopier, pages: Pages
) -> None:
    space = PiecewiseSpace(4 * ROW, 2 * ROW + 1)
    space.memory[ROW:] = bytes(range(100, 100 + 3 * ROW))
    copier.load([pages.slab([3, 0], space, ROW)])
    assert bytes(pages.rows[3].numpy()) == bytes(range(100, 100 + ROW))
    assert bytes(pages.rows[0].numpy()) == bytes(range(100 + ROW, 100 + 2 * ROW))
    assert bytes(pages.rows[1].numpy()) == page(1)
    store_stream, load_stream = cuda.streams
    assert (store_stream.num_queued, load_stream.num_queued) == (0, 3)


def test_the_arena_is_pinned_once_on_the_engines_gpu(cuda: FakeCuda) -> None:
    arena: Any = ArenaOf(ARENA)
    copier = CudaPageCopier(GPU, arena)
    ((address, (nbytes, flags)),) = cuda.registered.items()
    assert (nbytes, flags) == (len(ARENA), 1)
    assert cuda.unregistered == []
    copier.close()
    assert cuda.unregistered == [address]
    assert cuda.devices == [GPU, GPU]
    assert cuda.thread_devices == [("prfaas-cuda-store", GPU)]
    with pytest.raises(RuntimeError, match="another agent's"):
        copier.load([Pages().slab([0], PiecewiseSpace(ROW))])


def test_an_arena_that_cannot_be_pinned_is_used_unpinned(
    cuda: FakeCuda, pages: Pages, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.register_status = 2
    arena: Any = ArenaOf(ARENA)
    with caplog.at_level(logging.WARNING):
        copier = CudaPageCopier(GPU, arena)
    assert "ulimit -l" in caplog.text
    space, notes = PiecewiseSpace(ROW), Notes()
    copier.store([pages.slab([2], space)], notes.of("x"))
    copier.drain()
    assert notes.seen == [("x", None)]
    assert bytes(space.memory) == page(2)
    copier.close()
    assert cuda.unregistered == []


def test_copies_under_way_end_before_the_arena_is_let_go(cuda: FakeCuda, pages: Pages) -> None:
    arena: Any = ArenaOf(ARENA)
    copier = CudaPageCopier(GPU, arena)
    seen_at_end: list[list[int]] = []
    copier.store(
        [pages.slab([1], PiecewiseSpace(ROW))], lambda e: seen_at_end.append([*cuda.unregistered])
    )
    cuda.streams[0].run()
    copier.close()
    assert seen_at_end == [[]]
    assert len(cuda.unregistered) == 1
