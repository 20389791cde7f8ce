"""Moves KVCache between an engine's tensors and the agent's arena, on the CPU or a GPU.

A `PageCopier` copies slabs (`kvmanager.vllm_connector.slabs`) into a transfer's bytes and back. It
knows no requests, groups or steps, and needs nothing of vLLM.
"""

import ctypes
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from kvmanager.vllm_connector.slabs import Piece, Slab, copy_slab, plain

if TYPE_CHECKING:
    from kvmanager.arena import Arena

logger = logging.getLogger("prfaas.kvmanager.connector")

Done = Callable[[BaseException | None], None]
"""Called once when a copy has ended: with None, or with the error that kept its bytes away."""

_REGISTER_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every context of the process."""


class PageCopier(Protocol):
    """Copies slabs. `store` may return before its copy has ended, and calls `done` when it has.

    Copies end in the order in which they began. A `store` that raises does not call `done`, and may
    have written a part of its bytes. `done` may come from another thread and must not call the
    copier.
    """

    def store(self, slabs: Sequence[Slab], done: Done) -> None: ...

    def load(self, slabs: Sequence[Slab]) -> None: ...

    def drain(self) -> None:
        """Wait until no `store` is under way and every `done` has returned. Never raises."""

    def close(self) -> None:
        """Wait a little for copies under way, and release the arena. No copy may begin any more."""


def copier_for(device: torch.device, arena: "Arena") -> PageCopier:
    """The copier for tensors on `device` and bytes in `arena`."""
    return CudaPageCopier(device, arena) if device.type == "cuda" else CpuPageCopier()


class CpuPageCopier:
    """Copies in the caller's thread: on a CPU, engine memory and arena are both host memory."""

    def store(self, slabs: Sequence[Slab], done: Done) -> None:
        for slab in slabs:
            copy_slab(slab, into_space=True)
        done(None)

    def load(self, slabs: Sequence[Slab]) -> None:
        for slab in slabs:
            copy_slab(slab, into_space=False)

    def drain(self) -> None:
        """Do nothing: a copy has ended when `store` returns."""

    def close(self) -> None:
        """Do nothing: this copier holds no memory."""


class CudaPageCopier:
    """Gathers slabs on the engine's stream, then copies them to the pinned arena on a side stream.

    The gather is ordered with the forward pass, so the engine may overwrite the pages at once; the
    device-to-host copy overlaps the layers that follow. A thread waits for the copies' events and
    calls `done` in order. Loads run on the caller's thread and a stream of their own.

    A CUDA error that shows behind a copy leaves the context unusable, so it fails every later one.
    """

    def __init__(self, device: torch.device, arena: "Arena") -> None:
        self._device = device
        self._arena = arena
        self._pinned_address = _pin(device, arena.memory)
        self._store_stream = torch.cuda.Stream(device)
        self._load_stream = torch.cuda.Stream(device)
        # Stores whose `done` has not returned, with what the copy still reads.
        self._pending: deque[tuple[torch.cuda.Event, list[torch.Tensor], Done]] = deque()
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._closed = False
        self._loading = threading.Lock()
        self._thread = threading.Thread(
            target=self._complete, name="prfaas-cuda-store", daemon=True
        )
        self._thread.start()

    def store(self, slabs: Sequence[Slab], done: Done) -> None:
        if self._failure is not None:
            raise RuntimeError("an earlier copy out of the GPU failed") from self._failure
        gathered = [(slab, self._gathered(slab)) for slab in slabs]
        # The copies must follow the gathers, which run on the engine's stream.
        self._store_stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._store_stream):
            for slab, data in gathered:
                for host, start in _host_pieces(slab):
                    host.copy_(data[start : start + host.numel()], non_blocking=True)
            # Without `blocking` (cudaEventBlockingSync) the waiting thread would spin on a core.
            event = torch.cuda.Event(blocking=True)
            event.record(self._store_stream)
        # Without it PyTorch's allocator could reuse this memory on the engine's stream before the
        # copy.
        for _, data in gathered:
            data.record_stream(self._store_stream)
        with self._changed:
            self._pending.append((event, [data for _, data in gathered], done))
            self._changed.notify_all()

    def load(self, slabs: Sequence[Slab]) -> None:
        with (
            self._loading,
            torch.cuda.device(self._device),
            torch.cuda.stream(self._load_stream),
        ):
            if self._closed:
                raise RuntimeError("the arena of this copier is another agent's now")
            for slab in slabs:
                staged = torch.empty(slab.nbytes, dtype=torch.uint8, device=self._device)
                for host, start in _host_pieces(slab):
                    staged[start : start + host.numel()].copy_(host, non_blocking=True)
                self._scatter(slab, staged)
            self._load_stream.synchronize()

    def _gathered(self, slab: Slab) -> torch.Tensor:
        """A slab's bytes in the order of the transfer, on the device."""
        view = slab.view
        data = torch.empty(
            (len(slab.units), slab.num_items, view.part.item_bytes),
            dtype=torch.uint8,
            device=self._device,
        )
        rows, first_item = self._rows(slab)
        for _, memory, place in _pieces(slab, data):
            # (rows, units, items of a row, ...) -> (units, items, ...)
            found = memory.index_select(0, rows).swapaxes(0, 1).flatten(1, 2)
            items = found[:, first_item : first_item + slab.num_items]
            place.copy_(items.reshape(place.shape))
        return data.view(-1)

    def _scatter(self, slab: Slab, staged: torch.Tensor) -> None:
        """Put a slab's bytes, in the order of the transfer, into the engine's memory."""
        view = slab.view
        data = staged.view(len(slab.units), slab.num_items, view.part.item_bytes)
        rows, first_item = self._rows(slab)
        for piece, memory, place in _pieces(slab, data):
            per_row, end = view.items_per_row, first_item + slab.num_items
            if first_item or end % per_row:
                # Rows of which only some items are written keep the others.
                found = memory.index_select(0, rows)
                flat = found.swapaxes(0, 1).flatten(1, 2)
                flat[:, first_item:end] = place.view(*place.shape[:2], *piece.item_shape)
                whole = flat.unflatten(1, (len(rows), per_row)).swapaxes(0, 1)
            else:
                whole = place.view(len(slab.units), len(rows), per_row, *piece.item_shape)
                whole = whole.swapaxes(0, 1)
            memory.index_copy_(0, rows, whole)

    def _rows(self, slab: Slab) -> tuple[torch.Tensor, int]:
        """The rows with the slab's items, and the first item's number in the first of them."""
        per_row = slab.view.items_per_row
        first, stop = slab.first_item // per_row, -(-(slab.first_item + slab.num_items) // per_row)
        rows = torch.from_numpy(slab.view.rows(slab.block_ids)[first:stop])
        return rows.to(self._device, non_blocking=True), slab.first_item - first * per_row

    def drain(self) -> None:
        try:
            # This also waits for copies of a `store` that raised, which have no event.
            self._store_stream.synchronize()
        except Exception:
            logger.exception("a copy out of the GPU failed")
        with self._changed:
            self._changed.wait_for(lambda: not self._pending)

    def close(self) -> None:
        with self._loading, self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout=5)
        if self._pinned_address is not None and not self._thread.is_alive():
            with torch.cuda.device(self._device):
                torch.cuda.cudart().cudaHostUnregister(self._pinned_address)

    def _complete(self) -> None:
        torch.cuda.set_device(self._device)  # otherwise this thread makes a context on GPU 0
        while self._wait_for_pending():
            event, _, done = self._pending[0]
            try:
                event.synchronize()
            except Exception as error:
                logger.exception("a copy out of the GPU failed")
                self._failure = self._failure or error
            try:
                done(self._failure)
            except Exception:
                logger.exception("the callback at the end of a copy raised")
            del event, done
            with self._changed:
                self._pending.popleft()
                self._changed.notify_all()

    def _wait_for_pending(self) -> bool:
        """Whether there is a copy to wait for; False once it is closed and there is none left."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self._closed)
            return bool(self._pending)


def _pieces(slab: Slab, data: torch.Tensor) -> Iterator[tuple[Piece, torch.Tensor, torch.Tensor]]:
    """Each piece of a slab's items, the engine's memory of its units, and its place in `data` of
    the shape (units, items, bytes of an item).
    """
    first = slab.units.start - slab.view.units.start
    for piece in slab.view.pieces:
        memory = plain(piece.memory)[:, first : first + len(slab.units)]
        nbytes = math.prod(piece.item_shape) * memory.element_size()
        place = data[:, :, piece.offset : piece.offset + nbytes].view(memory.dtype)
        yield piece, memory, place


def _host_pieces(slab: Slab) -> Iterator[tuple[torch.Tensor, int]]:
    """The slab's memory in the arena in order, each piece with the number of its first byte."""
    start = 0
    for offset, nbytes in slab.ranges():
        for memory in slab.space.views(offset, nbytes):
            yield torch.frombuffer(memory, dtype=torch.uint8), start
            start += len(memory)


def _pin(device: torch.device, buffer: memoryview) -> int | None:
    """Register a mapping as page-locked host memory, and return its address.

    None when the driver refuses, usually because of a limit of locked memory. Copies still work,
    but they are slower and hold up the engine's step.
    """
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    with torch.cuda.device(device):
        status = torch.cuda.cudart().cudaHostRegister(address, buffer.nbytes, _REGISTER_PORTABLE)
    if int(status) != 0:
        logger.warning(
            "KVCache moves slowly: cudaHostRegister of %d bytes failed with %s. Raise the "
            "locked-memory limit of the engine (ulimit -l; containers: --ulimit memlock=-1)",
            buffer.nbytes,
            status,
        )
        return None
    return address
