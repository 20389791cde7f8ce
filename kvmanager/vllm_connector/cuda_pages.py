"""The copier of a GPU: gathers and scatters on the device, and moves large pieces over PCIe.

Pages are small and lie anywhere, and a DMA for each of them would cost more than its bytes. So a
store gathers all rows that a step wants of a layer into staging memory on the device, one DMA takes
them to staging memory of the host, and a thread writes them into the arena with NumPy. A load goes
the other way. The arena is never pinned: the price is one copy in host memory for each byte, and
what it buys is pinned memory of a fixed size. Needs nothing of vLLM.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from kvmanager.vllm_connector.pages import (
    Copies,
    Copy,
    CpuPageCopier,
    Mark,
    PageCopier,
    Reads,
    say_done,
)
from kvmanager.vllm_connector.slabs import (
    INTEGERS,
    BlockIds,
    BlockTable,
    PartView,
    Slab,
    clear_slab,
    copy_slab,
)
from kvmanager.vllm_connector.staging import (
    MAX_KEPT_PLACES,
    Ring,
    Span,
    StagedRows,
    StagedView,
    cut,
    largest_row_bytes,
    spans_of,
    staged_view,
)

logger = logging.getLogger("prfaas.kvmanager.connector")

DEFAULT_STAGING_MIB = 64
"""Staging memory for stores, and as much for loads, both on the device and pinned on the host."""

NUM_CHUNKS = 4
"""Copies that fill the staging memory: while one crosses PCIe, others are gathered and written. A
quarter of 64 MiB takes about 0.3 ms at 50 GB/s, which hides the start of a DMA."""


def copier_for(
    views: Sequence[PartView], staging_bytes: int, on_wait: Callable[[float], None]
) -> PageCopier:
    """The copier for these views, which are on one device. Raises ValueError if staging memory of
    so many bytes has no room for a page.

    on_wait: called with the seconds for which a `store` had to wait for staging memory.
    """
    device = views[0].device
    if device.type != "cuda":
        return CpuPageCopier()
    needed = largest_row_bytes(views)
    if needed > staging_bytes:
        raise ValueError(
            f"a page of {needed} bytes does not fit into staging memory of {staging_bytes}: set "
            f"kv_connector_extra_config.staging_mib to {-(-needed * NUM_CHUNKS >> 20)} or more"
        )
    return CudaPageCopier(device, staging_bytes, on_wait)


class Staging:
    """Staging memory for one direction, with the stream on which its bytes cross PCIe."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        raw = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.device = {size: raw.view(dtype) for size, dtype in INTEGERS.items()}
        self.host = _pinned(torch.empty(nbytes, dtype=torch.uint8))
        self.ring = Ring(nbytes)
        self.stream = torch.cuda.Stream(device)
        self.views: dict[tuple[int, range], StagedView] = {}
        self.chunk_bytes = nbytes // NUM_CHUNKS
        self._ranges: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def range(self, base: int, nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A range of bytes on the device, and the same on the host."""
        found = self._ranges.get((base, nbytes))
        if found is None:
            if len(self._ranges) >= MAX_KEPT_PLACES:
                self._ranges.clear()
            end = base + nbytes
            found = self.device[1][base:end], self.host[base:end]
            self._ranges[base, nbytes] = found
        return found


@dataclass(slots=True)
class Call:
    """One `store`. error: what keeps all its bytes away."""

    copies: Copies
    error: BaseException | None = None
    made: list["Share"] | None = None


@dataclass(slots=True)
class Share:
    """A copy of a call: its slabs by view, and what went wrong with it."""

    copy: Copy
    slabs: dict[int, list[Slab]] = field(default_factory=dict)
    error: BaseException | None = None


@dataclass(slots=True)
class Chunk:
    """Rows of a call on their way through staging memory; without rows, the end of the call.

    event: behind the DMA; None if it was not begun well.
    """

    call: Call
    rows: list[StagedRows] = field(default_factory=list)
    base: int = 0
    event: torch.cuda.Event | None = None


class CudaPageCopier:
    """Gathers on the engine's stream, so that the engine may overwrite the pages at once. The DMA
    runs on a side stream and overlaps the layers that follow. A thread waits for each DMA, writes
    its bytes into the arena and says what is done, all in the order of the calls. Loads run on the
    caller's thread and on a stream of their own.

    When staging memory is full, a `store` waits for the oldest piece and so holds up the engine.
    An error of CUDA behind a copy leaves the context unusable, so it fails every later copy.
    """

    def __init__(
        self, device: torch.device, staging_bytes: int, on_wait: Callable[[float], None]
    ) -> None:
        self._device = device
        self._on_wait = on_wait
        # The engine's thread writes into it also where nothing is an inference tensor.
        with torch.inference_mode(False), torch.cuda.device(device):
            self._out = Staging(device, staging_bytes)
            self._in = Staging(device, staging_bytes)
        self._chunks: deque[Chunk] = deque()
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._closed = False
        self._loading = threading.Lock()
        self._thread = threading.Thread(
            target=self._complete, name="prfaas-cuda-store", daemon=True
        )
        self._thread.start()

    # Stores: the engine's thread.

    def store(self, reads: Reads, blocks: BlockTable, copies: Copies) -> None:
        if self._closed:
            raise RuntimeError("this copier is closed")
        call = Call(copies)
        try:
            if self._failure is not None:
                raise RuntimeError("an earlier copy out of the GPU failed") from self._failure
            staging = self._out
            spans = [
                Span(staged_view(staging.views, view, units), blocks, 0, num_rows)
                for view, units in reads
                if units and (num_rows := len(blocks) * view.rows_per_block)
            ]
            for rows, nbytes in cut(spans, staging.chunk_bytes):
                self._begin(call, rows, nbytes)
        except Exception as error:
            # Not raised: every copy of the call ends in its turn, with this error.
            call.error = error
        self._push(Chunk(call))

    def _begin(self, call: Call, rows: list[StagedRows], nbytes: int) -> None:
        """Gather rows, and begin their DMA."""
        staging = self._out
        chunk = Chunk(call, rows, self._room(nbytes))
        try:
            for some in rows:
                gather(staging, some, chunk.base)
            # The DMA must follow the gathers, which run on the engine's stream.
            staging.stream.wait_stream(torch.cuda.current_stream(self._device))
            device, host = staging.range(chunk.base, nbytes)
            with torch.cuda.stream(staging.stream):
                host.copy_(device, non_blocking=True)
            # Without `blocking` (cudaEventBlockingSync) the waiting thread would spin on a core.
            event = torch.cuda.Event(blocking=True)
            event.record(staging.stream)
            chunk.event = event
        finally:
            # Also after an error: its room may be used again only when nothing writes into it.
            self._push(chunk)

    def _room(self, nbytes: int) -> int:
        """A place in staging memory, once there is one."""
        ring = self._out.ring
        with self._changed:
            base = ring.take(nbytes)
            if base is not None:
                return base
            begin_s = time.monotonic()
            while base is None:
                self._changed.wait()
                base = ring.take(nbytes)
        self._on_wait(time.monotonic() - begin_s)
        return base

    def _push(self, chunk: Chunk) -> None:
        with self._changed:
            self._chunks.append(chunk)
            self._changed.notify_all()

    # Stores: the thread that ends them.

    def _complete(self) -> None:
        torch.cuda.set_device(self._device)  # otherwise this thread makes a context on GPU 0
        while self._wait_for_chunk():
            try:
                self._finish(self._chunks[0])
            except Exception:
                logger.exception("copies out of the GPU are lost")  # the thread must go on
            with self._changed:
                if self._chunks.popleft().rows:
                    self._out.ring.give_back()
                self._changed.notify_all()

    def _wait_for_chunk(self) -> bool:
        """Whether there is a chunk to wait for; False once it is closed and there is none left."""
        with self._changed:
            self._changed.wait_for(lambda: self._chunks or self._closed)
            return bool(self._chunks)

    def _finish(self, chunk: Chunk) -> None:
        call = chunk.call
        if not chunk.rows:
            for share in _made(call):
                say_done(share.copy, share.error or call.error or self._failure)
            return
        try:
            if chunk.event is None:
                self._out.stream.synchronize()
            else:
                chunk.event.synchronize()
        except Exception as error:
            logger.exception("a copy out of the GPU failed")
            # Its traceback would keep the chunk, and with it the arena.
            self._failure = self._failure or error.with_traceback(None)
        if chunk.event is None or self._failure is not None:
            return
        for rows in chunk.rows:
            view = rows.host_view(self._out.host, chunk.base)
            numbers = BlockIds.of(range(rows.num_rows))
            for share in _made(call):
                _write(share, rows, view, numbers)

    # Loads: the caller's thread.

    def mark(self) -> Mark:
        with self._changed:
            begun = (chunk.event for chunk in reversed(self._chunks))
            return next((event for event in begun if event is not None), None)

    def load(self, slabs: Iterable[Slab], behind: Mark = None) -> None:
        staging = self._in
        # The engine's tensors may be inference tensors, which only such a block may write.
        with (
            self._loading,
            torch.inference_mode(),
            torch.cuda.device(self._device),
            torch.cuda.stream(staging.stream),
        ):
            if self._closed:
                raise RuntimeError("this copier is closed")
            # The blocks may be those of a request that has ended, and a step that vLLM regards as
            # over may still gather from them: with a drafter, gathers follow the sampled token.
            if behind is not None:
                staging.stream.wait_event(behind)
            under_way: deque[torch.cuda.Event] = deque()
            try:
                spans = spans_of(slabs, staging.views)
                for rows, nbytes in cut(spans, staging.chunk_bytes):
                    while (base := staging.ring.take(nbytes)) is None:
                        under_way.popleft().synchronize()
                        staging.ring.give_back()
                    _bring(staging, rows, base, nbytes)
                    under_way.append(self._load_event())
            finally:
                # Also after an error: the engine may soon use these pages for something else.
                staging.ring.clear()
                self._load_event().synchronize()

    def clear(self, slabs: Iterable[Slab]) -> None:
        with (
            self._loading,
            torch.inference_mode(),
            torch.cuda.device(self._device),
            torch.cuda.stream(self._in.stream),
        ):
            for slab in slabs:
                clear_slab(slab)
            self._load_event().synchronize()

    def _load_event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(blocking=True)
        event.record(self._in.stream)
        return event

    def drain(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._chunks)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout=5)


def gather(staging: Staging, rows: StagedRows, base: int) -> None:
    """Copy rows of the engine's memory into the device's staging memory, on the present stream."""
    found = _uploaded(rows.span, rows.first_row, rows.stop_row)
    for piece, at in rows.span.staged.places(base + rows.at, rows.num_rows):
        words = staging.device[piece.memory.element_size()]
        torch.index_select(piece.memory, 0, found, out=piece.place(words, at, rows.num_rows))


def scatter(staging: Staging, rows: StagedRows, base: int) -> None:
    """Copy what slabs have of these rows from the device's staging memory into the engine's, on the
    present stream.
    """
    staged = rows.span.staged
    whole, partial = rows.whole_and_partial()
    for piece, at in staged.places(base + rows.at, rows.num_rows):
        words = staging.device[piece.memory.element_size()]
        place = piece.place(words, at, rows.num_rows)
        for run in whole:
            found = _uploaded(rows.span, run.start, run.stop)
            first, stop = run.start - rows.first_row, run.stop - rows.first_row
            piece.memory.index_copy_(0, found, place[first:stop])
        # Rows of which only some items are written keep the others.
        for row, items in partial:
            number = int(rows.span.table.rows(staged.view.rows_per_block)[row])
            piece.memory[number, :, items.start : items.stop].copy_(
                place[row - rows.first_row, :, items.start : items.stop], non_blocking=True
            )


def _bring(staging: Staging, rows: list[StagedRows], base: int, nbytes: int) -> None:
    """Read slabs from the arena, and begin to copy them into the engine's memory."""
    for some in rows:
        view, numbers = some.host_view(staging.host, base), BlockIds.of(range(some.num_rows))
        for slab in some.span.slabs:
            share = some.share(slab, view, numbers)
            if share is not None:
                copy_slab(share, into_space=False)
    device, host = staging.range(base, nbytes)
    device.copy_(host, non_blocking=True)
    for some in rows:
        scatter(staging, some, base)


def _write(share: Share, rows: StagedRows, view: PartView, numbers: BlockIds) -> None:
    """Write what these rows have of one copy into the arena."""
    if share.error is not None:
        return
    try:
        for slab in share.slabs.get(id(rows.span.staged.view), ()):
            part = rows.share(slab, view, numbers)
            if part is not None:
                copy_slab(part, into_space=True)
    except Exception as error:
        share.error = error


def _made(call: Call) -> list[Share]:
    """The copies of a call, made once: nobody may ask for them before they can be written."""
    if call.made is None:
        call.made = []
        for copy in call.copies():
            share = Share(copy)
            call.made.append(share)
            try:
                for slab in copy.slabs:
                    share.slabs.setdefault(id(slab.view), []).append(slab)
            except Exception as error:
                share.error = error
    return call.made


def _uploaded(span: Span, first_row: int, stop_row: int) -> torch.Tensor:
    """Numbers of rows of the table, on the device. A table is used on one stream only, so that the
    memory of its numbers can be used again there without waiting.
    """
    staged, table = span.staged, span.table
    per_block = staged.view.rows_per_block
    rows = table.uploaded.get(per_block)
    if rows is None:
        numbers = torch.from_numpy(table.rows(per_block))
        rows = _pinned(numbers).to(staged.view.device, non_blocking=True)
        table.uploaded[per_block] = rows
    return rows if rows.shape[0] == stop_row - first_row else rows[first_row:stop_row]


def _pinned(memory: torch.Tensor) -> torch.Tensor:
    """The same numbers in pinned memory, or in other memory if the driver refuses. Copies then
    still work, but they are slower and hold up the engine's step.
    """
    try:
        return memory.pin_memory()
    except RuntimeError as error:
        logger.warning(
            "KVCache moves slowly: pinning %d bytes failed: %s. Raise the locked-memory limit of "
            "the engine (ulimit -l; containers: --ulimit memlock=-1)",
            memory.nbytes,
            error,
        )
        return memory
