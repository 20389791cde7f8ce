"""Moves pages between an engine's KV tensors and the agent's arena, on the CPU or a GPU.

`LayerPages` shows one layer as rows of bytes, one row for each block. A `PageCopier` gathers rows
into a transfer's bytes and scatters them back. Knows no requests, groups or steps.
"""

import ctypes
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from kvmanager.layout import KVLayer, KVLayout, LayoutError

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvmanager.arena import Arena
    from transport import ByteSpace

logger = logging.getLogger("prfaas.kvmanager.connector")

Done = Callable[[BaseException | None], None]
"""Called once when a copy has ended: with None, or with the error that kept its bytes away."""

_REGISTER_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every context of the process."""


class LayerPages:
    """One layer's cache as a uint8 tensor of shape (num_blocks, page_bytes), rows strided."""

    def __init__(self, layer: KVLayer, rows: torch.Tensor) -> None:
        self.layer = layer
        self.rows = rows

    @classmethod
    def of(
        cls, layer: KVLayer, cache: torch.Tensor | Sequence[torch.Tensor], config: "KVCacheConfig"
    ) -> "LayerPages":
        """The pages of `cache`, as vLLM passes it to `register_kv_caches`.

        Raises `LayoutError` where a page is not one run of bytes (heads outside of blocks).
        """
        # A recurrent layer has several tensors (convolution, state) in one page.
        first = cache if isinstance(cache, torch.Tensor) else cache[0]
        place = next(t for t in config.kv_cache_tensors if layer.name in t.layers)
        if first.dim() == 4 and not _is_one_run(first):
            raise LayoutError(
                f"layer {layer.name} keeps a block in several pieces "
                f"(strides {tuple(first.stride())}); set VLLM_KV_CACHE_LAYOUT=LBHNC or LBNHC"
            )
        # Bytes of the whole storage: `first` may have any dtype, and vLLM lays the pages of several
        # layers into one tensor with a common stride.
        storage = torch.empty(0, dtype=torch.uint8, device=first.device)
        storage.set_(first.untyped_storage())
        rows = storage.as_strided(
            (config.num_blocks, layer.page_bytes),
            (place.block_stride, 1),
            first.storage_offset() * first.element_size(),
        )
        return cls(layer, rows)


def registered_pages(
    layout: KVLayout, kv_caches: Mapping[str, torch.Tensor], config: "KVCacheConfig"
) -> dict[str, LayerPages]:
    """All layers' pages by name, of the tensors that vLLM registered.

    Raises `LayoutError` for an unsupported geometry.
    """
    return {
        layer.name: LayerPages.of(layer, kv_caches[layer.name], config)
        for group in layout.groups
        for layer in group.layers
    }


def _is_one_run(cache: torch.Tensor) -> bool:
    """Whether the dimensions inside a block fill one run of bytes, in any order."""
    inner = sorted(zip(cache.stride()[1:], cache.shape[1:], strict=True))
    expected = 1
    for stride, size in inner:
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


class PageCopier(Protocol):
    """Copies rows. `store` may return before its copy has ended, and calls `done` when it has.

    Copies end in the order in which they began. A `store` that raises does not call `done`, and may
    have written a part of its bytes. `done` may come from another thread and must not call the
    copier.
    """

    def store(
        self,
        pages: LayerPages,
        block_ids: Sequence[int],
        space: "ByteSpace",
        offset: int,
        done: Done,
    ) -> None: ...

    def load(
        self, pages: LayerPages, block_ids: Sequence[int], space: "ByteSpace", offset: int
    ) -> None: ...

    def drain(self) -> None:
        """Wait until no `store` is under way and every `done` has returned. Never raises."""

    def close(self) -> None:
        """Wait a little for copies under way, and release the arena. No copy may begin any more."""


def copier_for(device: torch.device, arena: "Arena") -> PageCopier:
    """The copier for tensors on `device` and bytes in `arena`."""
    return CudaPageCopier(device, arena) if device.type == "cuda" else CpuPageCopier()


def _pieces(
    pages: LayerPages, block_ids: Sequence[int], space: "ByteSpace", offset: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Each run of a page's bytes with its place in `space`, in order. A page is one run unless the
    arena is fragmented.
    """
    rows = pages.rows.numpy()
    row_bytes = rows.shape[1]
    # All views are taken before the first copy: a range that leaves `space` raises here.
    views = [space.views(offset + row * row_bytes, row_bytes) for row in range(len(block_ids))]
    for block, memories in zip(block_ids, views, strict=True):
        start = 0
        for memory in memories:
            yield rows[block, start : start + len(memory)], np.frombuffer(memory, np.uint8)
            start += len(memory)


class CpuPageCopier:
    """Copies in the caller's thread: on a CPU, engine memory and arena are both host memory."""

    def store(
        self,
        pages: LayerPages,
        block_ids: Sequence[int],
        space: "ByteSpace",
        offset: int,
        done: Done,
    ) -> None:
        for page, memory in _pieces(pages, block_ids, space, offset):
            memory[:] = page
        done(None)

    def load(
        self, pages: LayerPages, block_ids: Sequence[int], space: "ByteSpace", offset: int
    ) -> None:
        for page, memory in _pieces(pages, block_ids, space, offset):
            page[:] = memory

    def drain(self) -> None:
        """Do nothing: a copy has ended when `store` returns."""

    def close(self) -> None:
        """Do nothing: this copier holds no memory."""


class CudaPageCopier:
    """Gathers pages on the engine's stream, then copies them to the pinned arena on a side stream.

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
        self._pending: deque[tuple[torch.cuda.Event, torch.Tensor, Done]] = deque()
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._closed = False
        self._loading = threading.Lock()
        self._thread = threading.Thread(
            target=self._complete, name="prfaas-cuda-store", daemon=True
        )
        self._thread.start()

    def store(
        self,
        pages: LayerPages,
        block_ids: Sequence[int],
        space: "ByteSpace",
        offset: int,
        done: Done,
    ) -> None:
        if self._failure is not None:
            raise RuntimeError("an earlier copy out of the GPU failed") from self._failure
        ids = torch.tensor(block_ids, dtype=torch.int64).to(self._device, non_blocking=True)
        gathered = pages.rows.index_select(0, ids).view(-1)
        # The copy must follow the gather, which runs on the engine's stream.
        self._store_stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._store_stream):
            start = 0
            for piece in space.views(offset, gathered.numel()):
                host = torch.frombuffer(piece, dtype=torch.uint8)
                host.copy_(gathered[start : start + len(piece)], non_blocking=True)
                start += len(piece)
            # Without `blocking` (cudaEventBlockingSync) the waiting thread would spin on a core.
            event = torch.cuda.Event(blocking=True)
            event.record(self._store_stream)
        # Without it PyTorch's allocator could reuse this memory on the engine's stream before the
        # copy.
        gathered.record_stream(self._store_stream)
        with self._changed:
            self._pending.append((event, gathered, done))
            self._changed.notify_all()

    def load(
        self, pages: LayerPages, block_ids: Sequence[int], space: "ByteSpace", offset: int
    ) -> None:
        row_bytes = pages.rows.shape[1]
        with (
            self._loading,
            torch.cuda.device(self._device),
            torch.cuda.stream(self._load_stream),
        ):
            if self._closed:
                raise RuntimeError("the arena of this copier is another agent's now")
            staged = torch.empty(len(block_ids) * row_bytes, dtype=torch.uint8, device=self._device)
            start = 0
            for piece in space.views(offset, staged.numel()):
                host = torch.frombuffer(piece, dtype=torch.uint8)
                staged[start : start + len(piece)].copy_(host, non_blocking=True)
                start += len(piece)
            ids = torch.tensor(block_ids, dtype=torch.int64, device=self._device)
            pages.rows.index_copy_(0, ids, staged.view(-1, row_bytes))
            self._load_stream.synchronize()

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
