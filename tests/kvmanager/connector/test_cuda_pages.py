"""The GPU's page copier on a stand-in for CUDA, whose streams work only when they are told to."""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from eventually import wait_until
from fake_cuda import FakeCuda, FakeStream, install
from page_views import PiecewiseSpace, page_view
from simple_layouts import paged

from kvmanager.layout import KVPart
from kvmanager.vllm_connector.cuda_pages import CudaPageCopier, copier_for
from kvmanager.vllm_connector.pages import NO_BLOCKS, Copy, CpuPageCopier, Done
from kvmanager.vllm_connector.slabs import BlockTable, PartView, Piece, Slab

ROW = 256
NUM_PAGES = 12
STAGING = 4 * ROW
"""Four chunks of one page."""
GPU = torch.device("cpu")
"""Stands for the GPU: its tensors must be real, and no GPU is needed to compare bytes."""


class Notes:
    """What `done` was called with, in order."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, BaseException | None]] = []
        self._changed = threading.Condition()

    def of(self, name: str) -> Done:
        def done(error: BaseException | None) -> None:
            with self._changed:
                self.seen.append((name, error))
                self._changed.notify_all()

        return done

    def wait_for(self, count: int) -> list[tuple[str, BaseException | None]]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.seen) >= count, 5)
            return list(self.seen)


class Rig:
    """A copier, and twelve pages with bytes of their own."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.waits: list[float] = []
        self.copier = CudaPageCopier(GPU, STAGING, self.waits.append)
        generator = torch.Generator().manual_seed(1)
        shape = NUM_PAGES, ROW
        self.rows = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        self.before = self.rows.clone()
        self.view: PartView = page_view(paged("layer", ROW).parts[0], self.rows)[0]
        self.notes = Notes()

    @property
    def out_stream(self) -> FakeStream:
        return self.cuda.streams[0]

    def page(self, *numbers: int) -> bytes:
        return b"".join(bytes(self.before[number].numpy()) for number in numbers)

    def store(self, *requests: tuple[str, list[int], Any, int]) -> None:
        """Store the pages of several requests at once: (name, pages, space, offset)."""
        table, copies = self.copies(requests)
        self.copier.store([(self.view, self.view.units)], table, lambda: copies)

    def copies(
        self, requests: Iterable[tuple[str, list[int], Any, int]]
    ) -> tuple[BlockTable, list[Copy]]:
        requests = list(requests)
        table = BlockTable([page for _, pages, _, _ in requests for page in pages])
        copies, before = [], 0
        for name, pages, space, offset in requests:
            slab = self.slab(table, before, len(pages), space, offset)
            before += len(pages)
            copies.append(Copy([slab], self.notes.of(name)))
        return table, copies

    def slab(self, table: BlockTable, start: int, count: int, space: Any, offset: int) -> Slab:
        blocks = table.blocks(start, start + count)
        return Slab(self.view, self.view.units, blocks, 0, count, space, offset, count * ROW)

    def close(self) -> None:
        self.cuda.error = None
        for stream in self.cuda.streams:
            stream.run()
        self.copier.close()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return install(monkeypatch)


@pytest.fixture
def rig(cuda: FakeCuda) -> Iterator[Rig]:
    rig = Rig(cuda)
    yield rig
    rig.close()
    assert not rig.copier._chunks
    assert not rig.copier._out.ring._taken


def in_thread(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call)
    thread.start()
    return thread


def is_blocked(thread: threading.Thread) -> bool:
    thread.join(0.05)
    return thread.is_alive()


# ---- stores


def test_a_copy_is_announced_when_its_bytes_are_there(rig: Rig) -> None:
    space = PiecewiseSpace(4 * ROW, ROW + 3)
    rig.store(("first", [3, 1], space, ROW // 2))
    rig.rows.zero_()  # the engine may use the pages for something else at once
    # Each chunk's DMA waits for its gather, which is ordered with the forward pass.
    assert rig.out_stream.waits_for == ["the engine's stream"] * 2
    assert not any(space.memory)
    rig.out_stream.run(1)
    rig.store(("behind it", [], space, 0))
    assert rig.notes.seen == [], "only one of the two chunks is there"
    rig.out_stream.run()
    assert rig.notes.wait_for(2) == [("first", None), ("behind it", None)]
    assert bytes(space.memory) == bytes(ROW // 2) + rig.page(3, 1) + bytes(3 * ROW // 2)


def test_all_requests_of_a_step_are_gathered_and_copied_at_once(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(cuda)
    rig.copier.close()
    rig.copier = CudaPageCopier(GPU, 64 * ROW, rig.waits.append)
    gathered: list[int] = []
    really = torch.index_select

    def counted(memory: torch.Tensor, dim: int, rows: torch.Tensor, **named: Any) -> None:
        gathered.append(len(rows))
        really(memory, dim, rows, **named)

    monkeypatch.setattr(torch, "index_select", counted)
    space = PiecewiseSpace(NUM_PAGES * ROW)
    rig.store(*((f"r{n}", [n], space, n * ROW) for n in range(NUM_PAGES)))
    assert gathered == [NUM_PAGES]
    *_, out_stream, _ = cuda.streams
    assert out_stream.num_queued == 1
    out_stream.run()
    assert rig.notes.wait_for(NUM_PAGES) == [(f"r{n}", None) for n in range(NUM_PAGES)]
    assert bytes(space.memory) == rig.page(*range(NUM_PAGES))
    rig.close()


def test_block_ids_go_up_once_for_all_layers(rig: Rig) -> None:
    pinned = rig.cuda.pinned_bytes
    assert pinned == [STAGING, STAGING], "memory for stores, and for loads"
    space = PiecewiseSpace(2 * ROW)
    table, copies = rig.copies([("x", [4, 2], space, 0)])
    for _ in range(2):
        rig.copier.store([(rig.view, rig.view.units)], table, lambda: copies)
    assert pinned[2:] == [2 * 8]


def test_a_store_waits_while_staging_memory_is_full(rig: Rig) -> None:
    space = PiecewiseSpace(NUM_PAGES * ROW)
    rig.store(("first", [0, 1, 2], space, 0))
    engine = in_thread(lambda: rig.store(("second", [3, 4, 5, 6, 7], space, 3 * ROW)))
    assert is_blocked(engine)
    assert rig.out_stream.num_queued == 4
    for _ in range(4):
        rig.out_stream.run(1)
        assert is_blocked(engine) or rig.out_stream.num_queued == 8
    engine.join(5)
    assert not engine.is_alive()
    rig.out_stream.run()
    assert rig.notes.wait_for(2) == [("first", None), ("second", None)]
    assert bytes(space.memory[: 8 * ROW]) == rig.page(*range(8))
    assert len(rig.waits) == 4
    assert all(waited_s > 0 for waited_s in rig.waits)
    # Once round again, beginning in the middle of the ring.
    rig.store(("third", [9, 8, 11], space, 8 * ROW))
    rig.out_stream.run()
    rig.notes.wait_for(3)
    assert bytes(space.memory[8 * ROW : 11 * ROW]) == rig.page(9, 8, 11)


def test_a_copy_without_slabs_is_announced_behind_those_before_it(rig: Rig) -> None:
    """The end of a prefill is said behind its last copy."""
    rig.store(("copy", [2], PiecewiseSpace(ROW), 0))
    rig.copier.store((), NO_BLOCKS, lambda: [Copy((), rig.notes.of("none"))])
    assert rig.notes.seen == []
    rig.out_stream.run()
    assert rig.notes.wait_for(2) == [("copy", None), ("none", None)]


def test_drain_waits_for_the_last_announcement(rig: Rig) -> None:
    """Memory is given back behind a drain: what is announced later would be taken for new bytes."""
    order: list[str] = []
    may_end = threading.Event()

    def done(error: BaseException | None) -> None:
        assert may_end.wait(5)
        order.append("announced")

    def drain() -> None:
        rig.copier.drain()
        order.append("drained")

    table, (copy,) = rig.copies([("x", [1], PiecewiseSpace(ROW), 0)])
    rig.copier.store([(rig.view, rig.view.units)], table, lambda: [Copy(copy.slabs, done)])
    draining = in_thread(drain)
    rig.out_stream.run()
    assert is_blocked(draining)
    may_end.set()
    draining.join(5)
    assert order == ["announced", "drained"]


def test_what_a_store_is_for_is_asked_when_it_can_be_written(rig: Rig) -> None:
    """A request may be given up while its pages cross PCIe: then nothing of it is written."""
    space, asked = PiecewiseSpace(2 * ROW), threading.Event()
    table, (given_up, other) = rig.copies([("a", [1], space, 0), ("b", [2], space, ROW)])
    wanted = [given_up, other]

    def copies() -> list[Copy]:
        asked.set()
        return wanted

    rig.copier.store([(rig.view, rig.view.units)], table, copies)
    assert not asked.wait(0.05)
    wanted.remove(given_up)
    rig.out_stream.run()
    assert rig.notes.wait_for(1) == [("b", None)]
    assert bytes(space.memory) == bytes(ROW) + rig.page(2)


# ---- failures


def test_one_broken_request_fails_alone(rig: Rig) -> None:
    class NoMemory(PiecewiseSpace):
        def views(self, offset: int, length: int) -> list[memoryview]:
            raise ValueError("outside of the arena")

    space = PiecewiseSpace(5 * ROW)
    requests = [(f"r{n}", [n], NoMemory(ROW) if n == 2 else space, n * ROW) for n in range(4)]
    table, copies = rig.copies(requests)

    slabs = copies[1].slabs

    def broken() -> Iterator[Slab]:
        yield from slabs
        raise KeyError("no such layer")

    copies[1] = Copy(broken(), copies[1].done)
    rig.copier.store([(rig.view, rig.view.units)], table, lambda: copies)
    rig.out_stream.run()
    seen = dict(rig.notes.wait_for(4))
    assert (seen["r0"], seen["r3"]) == (None, None)
    assert isinstance(seen["r1"], KeyError)
    assert isinstance(seen["r2"], ValueError)
    assert bytes(space.memory[:ROW]) == rig.page(0)
    assert bytes(space.memory[3 * ROW : 4 * ROW]) == rig.page(3)


@pytest.mark.parametrize("where", ["gather", "DMA", "event", "record"])
def test_a_store_that_cannot_begin_fails_by_its_callback(
    rig: Rig, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first chunk is under way when the second one fails."""
    error = RuntimeError("out of resources")
    calls = 0

    def fails_second(really: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: Any, **named: Any) -> object:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise error
            return really(*arguments, **named)

        return call

    places: dict[str, tuple[Any, str]] = {
        "gather": (torch, "index_select"),
        "DMA": (torch.Tensor, "copy_"),
        "event": (torch.cuda, "Event"),
        "record": (torch.cuda.Event, "record"),
    }
    owner, name = places[where]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fails_second(getattr(owner, name)))
        rig.store(("bad", [1, 2, 3], PiecewiseSpace(3 * ROW), 0))
    space = PiecewiseSpace(4 * ROW)
    rig.store(("good", [7], space, 0))
    rig.out_stream.run()
    assert rig.notes.wait_for(2) == [("bad", error), ("good", None)]
    rig.copier.drain()
    assert bytes(space.memory[:ROW]) == rig.page(7)
    # All of the staging memory is there again.
    for _ in range(3):
        rig.store(("more", [4, 5, 6, 7], space, 0))
        rig.out_stream.run()
        rig.copier.drain()
    assert bytes(space.memory) == rig.page(4, 5, 6, 7)
    assert rig.waits == []


def test_an_error_of_the_gpu_fails_that_copy_and_all_later_ones(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    space = PiecewiseSpace(4 * ROW)
    rig.store(("good", [0], space, 0))
    rig.out_stream.run()
    assert rig.notes.wait_for(1) == [("good", None)]
    rig.store(("bad", [1], space, ROW))
    rig.store(("behind it", [2], space, 2 * ROW))
    rig.cuda.error = error = RuntimeError("illegal memory access")
    rig.out_stream.run()
    assert rig.notes.wait_for(3)[1:] == [("bad", error), ("behind it", error)]
    rig.store(("later", [3], space, 3 * ROW))
    (_, late) = rig.notes.wait_for(4)[-1]
    assert str(late) == "an earlier copy out of the GPU failed"
    rig.copier.drain()
    assert "a copy out of the GPU failed" in caplog.text
    assert bytes(space.memory) == rig.page(0) + bytes(3 * ROW)


def test_callbacks_that_raise_do_not_stop_the_next(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(error: BaseException | None) -> None:
        raise KeyError("a bug")

    def no_copies() -> list[Copy]:
        raise KeyError("another bug")

    table, (copy,) = rig.copies([("x", [0], PiecewiseSpace(ROW), 0)])
    reads = [(rig.view, rig.view.units)]
    rig.copier.store(reads, table, lambda: [Copy(copy.slabs, fails)])
    rig.copier.store(reads, table, no_copies)
    rig.store(("next", [1], PiecewiseSpace(ROW), 0))
    rig.out_stream.run()
    assert rig.notes.wait_for(1) == [("next", None)]
    rig.copier.drain()
    assert "the callback at the end of a copy raised" in caplog.text
    assert "copies out of the GPU are lost" in caplog.text


# ---- loads


def run_beside(stream: FakeStream, call: Callable[[], object]) -> None:
    """The GPU works while `call` runs on another thread."""
    thread = in_thread(call)
    for _ in range(100):
        thread.join(0.02)
        if not thread.is_alive():
            return
        stream.run()
    raise AssertionError("it did not return")


def test_a_load_returns_when_the_pages_have_their_bytes(rig: Rig) -> None:
    """Ten pages go through room for four, and the thread waits only where it must."""
    space = PiecewiseSpace(10 * ROW, 2 * ROW + 1)
    space.memory[:] = bytes(number % 251 for number in range(10 * ROW))
    pages = [3, 0, 7, 8, 9, 10, 11, 1, 2, 5]
    table = BlockTable(pages)
    slabs = [rig.slab(table, 0, 4, space, 0), rig.slab(table, 4, 6, space, 4 * ROW)]
    _, load_stream = rig.cuda.streams
    run_beside(load_stream, lambda: rig.copier.load(iter(slabs)))
    expected = rig.before.clone()
    flat = torch.frombuffer(space.memory, dtype=torch.uint8)
    expected[pages] = flat.view(10, ROW)
    assert torch.equal(rig.rows, expected)
    assert rig.out_stream.num_queued == 0
    assert rig.cuda.num_waits_for_events == 6 + 1


def test_a_load_writes_only_behind_the_stores_that_began_before_it(rig: Rig) -> None:
    """A request may have ended, and another one have its blocks, while they are gathered."""
    copier, load_stream, space = rig.copier, rig.cuda.streams[1], PiecewiseSpace(2 * ROW, ROW)
    assert copier.mark() is None, "nothing is read"
    rig.store(("first", [3], space, 0))
    mark = copier.mark()
    rig.store(("behind the mark", [1], space, ROW))
    table = BlockTable([3])
    loading = in_thread(lambda: copier.load([rig.slab(table, 0, 1, space, ROW)], mark))
    wait_until(lambda: load_stream.num_queued == 3, what="the load has begun")
    with pytest.raises(AssertionError, match="ran ahead"):
        load_stream.run(1)
    rig.out_stream.run(1)
    load_stream.run()
    loading.join(5)
    assert not loading.is_alive()
    assert bytes(rig.rows[3].numpy()) == bytes(ROW), "it brought what lay in the arena"
    assert bytes(rig.rows[1].numpy()) == rig.page(1), "no other page"
    rig.out_stream.run()
    assert rig.notes.wait_for(2) == [("first", None), ("behind the mark", None)]
    assert copier.mark() is None


def test_a_load_of_little_waits_once(rig: Rig) -> None:
    rig.cuda.is_immediate = True
    table, space = BlockTable([1, 2]), PiecewiseSpace(2 * ROW)
    rig.copier.load([rig.slab(table, 0, 1, space, 0), rig.slab(table, 1, 1, space, ROW)])
    assert not rig.rows[1:3].any()
    assert rig.cuda.num_waits_for_events == 1


def test_rows_of_which_some_items_are_loaded_keep_the_others(cuda: FakeCuda) -> None:
    """Two cached blocks may share a page of the engine."""
    cuda.is_immediate = True
    part = KVPart("kv", 2, 4, "uint8")
    memory = torch.full((3, 2, 4, 4), 9, dtype=torch.uint8)
    view = PartView(part, range(2), range(2), (Piece(memory),))
    copier = CudaPageCopier(GPU, 4096, lambda waited_s: None)
    space = PiecewiseSpace(2 * 10 * 4)
    space.memory[:] = bytes(range(80))
    table = BlockTable([2, 0, 0, 1])
    # Items 1-4 of the blocks 2 and 0, then items 1-5 of the blocks 0 and 1.
    first = Slab(view, view.units, table.blocks(0, 2), 1, 4, space, 0, 40)
    second = Slab(view, view.units, table.blocks(2, 4), 1, 5, space, 16, 40)
    copier.load([first, second])
    copier.close()
    expected = torch.full((3, 2, 4, 4), 9, dtype=torch.uint8)
    items = torch.arange(80, dtype=torch.uint8).view(2, 10, 4)
    expected[2, :, 1:] = items[:, :3]
    expected[0, :, :1] = items[:, 3:4]
    expected[0, :, 1:] = items[:, 4:7]
    expected[1, :, :2] = items[:, 7:9]
    assert torch.equal(memory, expected)


@pytest.mark.parametrize("where", ["slabs", "arena", "scatter"])
def test_after_a_load_that_fails_nothing_writes_into_the_engine(
    rig: Rig, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    space, table = PiecewiseSpace(3 * ROW), BlockTable([1, 2, 3])

    def slabs() -> Iterator[Slab]:
        for number in range(3):
            if where == "slabs" and number == 2:
                raise KeyError("no such layer")
            gone = where == "arena" and number == 2
            yield rig.slab(table, number, 1, PiecewiseSpace(ROW) if gone else space, number * ROW)

    if where == "scatter":
        monkeypatch.setattr(torch.Tensor, "index_copy_", lambda *a: [][0])
    errors: list[BaseException] = []

    def load() -> None:
        with pytest.raises((KeyError, ValueError, IndexError)) as info:
            rig.copier.load(slabs())
        errors.append(info.value)

    _, load_stream = rig.cuda.streams
    run_beside(load_stream, load)
    assert len(errors) == 1
    assert not load_stream.queue
    monkeypatch.undo()
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor.clone())
    assert not rig.copier._in.ring._taken


# ---- memory


def test_staging_memory_is_pinned_on_the_engines_gpu(rig: Rig) -> None:
    assert rig.cuda.pinned_bytes == [STAGING, STAGING]
    assert rig.cuda.devices == [GPU, GPU]
    rig.store(("x", [0], PiecewiseSpace(ROW), 0))
    rig.out_stream.run()
    rig.notes.wait_for(1)
    assert rig.cuda.thread_devices == [("prfaas-cuda-store", GPU)]


def test_memory_that_cannot_be_pinned_is_used_unpinned(
    cuda: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.pin_error = RuntimeError("CUDA error: out of memory")
    with caplog.at_level(logging.WARNING):
        rig = Rig(cuda)
    assert "pinning 1024 bytes failed: CUDA error: out of memory" in caplog.text
    assert "ulimit -l" in caplog.text
    space = PiecewiseSpace(ROW)
    rig.store(("x", [2], space, 0))
    rig.close()
    assert rig.notes.seen == [("x", None)]
    assert bytes(space.memory) == rig.page(2)


def test_copies_under_way_end_before_the_copier_closes(cuda: FakeCuda) -> None:
    rig = Rig(cuda)
    rig.store(("x", [1], PiecewiseSpace(ROW), 0))
    rig.out_stream.run()
    rig.copier.close()
    assert rig.notes.seen == [("x", None)]
    with pytest.raises(RuntimeError, match="closed"):
        rig.store(("y", [1], PiecewiseSpace(ROW), 0))
    with pytest.raises(RuntimeError, match="closed"):
        rig.copier.load([])


def test_the_copier_is_chosen_by_the_engines_memory() -> None:
    (view,) = page_view(paged("layer", ROW).parts[0], torch.zeros(1, ROW, dtype=torch.uint8))
    assert isinstance(copier_for([view], 1, lambda waited_s: None), CpuPageCopier)
    memory = torch.zeros(1, 3 << 20, dtype=torch.uint8, device="meta")
    (large,) = page_view(paged("layer", 3 << 20).parts[0], memory)

    class OnGpu:
        device = torch.device("cuda")
        view = large

        def __getattr__(self, name: str) -> Any:
            return getattr(large, name)

    views: Any = [OnGpu()]
    with pytest.raises(ValueError, match=r"page of 3145728 bytes .*staging_mib to 12 or more"):
        copier_for(views, 1 << 20, lambda waited_s: None)
