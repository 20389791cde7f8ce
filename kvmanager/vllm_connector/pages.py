"""Moves KVCache between an engine's tensors and the agent's arena.

A `PageCopier` copies slabs (`kvmanager.vllm_connector.slabs`) into a transfer's bytes and back. It
knows no requests, groups or steps, and needs nothing of vLLM. `cuda_pages` has the copier of a GPU.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch

from kvmanager.vllm_connector.slabs import BlockTable, PartView, Slab, clear_slab, copy_slab

logger = logging.getLogger("prfaas.kvmanager.connector")

Done = Callable[[BaseException | None], None]
"""Called once when a copy has ended: with None, or with the error that kept its bytes away."""


@dataclass(frozen=True, slots=True)
class Copy:
    """What one request wants of a `store`. `slabs` is iterated once, and may raise."""

    slabs: Iterable[Slab]
    done: Done


Reads = Sequence[tuple[PartView, range]]
"""The views that a `store` reads, each with the units that its slabs are of."""

Copies = Callable[[], Iterable[Copy]]
"""Says what a `store` is for, once its bytes can be written. It must not raise."""

NO_BLOCKS = BlockTable(())

Mark: TypeAlias = torch.cuda.Event | None
"""Behind what stores have begun to read; None: they have read all of it."""


class PageCopier(Protocol):
    """Copies slabs. `store` may return before its copies have ended.

    store: read all of `blocks` now, so that the engine may write them at once, and later write the
        slabs of `copies()`, which are of these views and blocks. Each copy's `done` is called; what
        fails for one copy fails no other. Copies end in the order in which they began. One that
        failed may have written a part of its bytes. Without views and blocks it reads nothing and
        ends behind all copies before it. One thread calls it at a time. `copies` and `done` may be
        called on another thread and must not call the copier.
    mark: what stores have begun to read so far. The engine's thread calls it.
    load: copy slabs into the engine's memory, and begin to write there only behind `behind`. It
        returns when they are there. If it raises, nothing writes into that memory any more.
    clear: fill slabs of the engine's memory with zeros. It returns when they are there.
    """

    def store(self, reads: Reads, blocks: BlockTable, copies: Copies) -> None: ...

    def mark(self) -> Mark: ...

    def load(self, slabs: Iterable[Slab], behind: Mark = None) -> None: ...

    def clear(self, slabs: Iterable[Slab]) -> None: ...

    def drain(self) -> None:
        """Wait until no `store` is under way and every `done` has returned. Never raises."""

    def close(self) -> None:
        """Wait a little for copies under way. No copy may begin any more."""


class CpuPageCopier:
    """Copies in the caller's thread: on a CPU, engine memory and arena are both host memory."""

    def __init__(self) -> None:
        self._storing = threading.Lock()

    def store(self, reads: Reads, blocks: BlockTable, copies: Copies) -> None:
        with self._storing:
            for copy in copies():
                error: BaseException | None = None
                try:
                    for slab in copy.slabs:
                        copy_slab(slab, into_space=True)
                except Exception as raised:
                    error = raised
                say_done(copy, error)

    def mark(self) -> None:
        """None: a `store` reads before it returns."""

    def load(self, slabs: Iterable[Slab], behind: Mark = None) -> None:
        for slab in slabs:
            copy_slab(slab, into_space=False)

    def clear(self, slabs: Iterable[Slab]) -> None:
        for slab in slabs:
            clear_slab(slab)

    def drain(self) -> None:
        with self._storing:
            pass

    def close(self) -> None:
        """Do nothing: this copier holds no memory."""


def say_done(copy: Copy, error: BaseException | None) -> None:
    """Call `done`, which must not stop the copies behind it."""
    try:
        copy.done(error)
    except Exception:
        logger.exception("the callback at the end of a copy raised")
