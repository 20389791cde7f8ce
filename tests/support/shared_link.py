"""A link whose sender says in which order it reads the memory of its transfers. With one connection
this is the order in which it sends them, whatever else the machine does.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transport_doubles import MemorySpace, make_spec
from transport_loopback import LoopbackPair, eventually

from transport import Endpoint, LinkState, OutgoingTransfer

PLENTY = bytearray(2_000_000)


class WatchedLink:
    """The transfers of one link by name, and the order in which their bytes were read to be sent.
    Nothing is sent before `let_go`.
    """

    def __init__(self, pair: LoopbackPair, via: Endpoint | None = None) -> None:
        self.pair = pair
        self.endpoint = via or pair.endpoint
        self.reads: list[tuple[str, int]] = []
        self.on_read: Callable[[], None] = lambda: None
        """Called before each frame is sent, by the thread that sends it."""
        self.pause_s = 0.0
        """For so long each connection is busy with each frame."""
        self._numbers = itertools.count(1)
        self._may_read = threading.Event()

    def open(
        self, name: str, data: bytearray = PLENTY, *, ready: int | None = None, **of_spec: Any
    ) -> OutgoingTransfer:
        """A transfer of which `ready` bytes are ready; None: all."""
        spec = replace(make_spec(next(self._numbers), self.endpoint), **of_spec)
        self.pair.registry.expect(spec, MemorySpace(bytearray(len(data))))
        handle = self.pair.sender.open(spec, _WatchedSpace(self, name, data), self.pair.listener)
        handle.ready(0, len(data) if ready is None else ready)
        return handle

    def let_go(self) -> None:
        self._may_read.set()

    def read(self, name: str, num_bytes: int) -> None:
        """The next frame of this transfer is about to be sent."""
        self.reads.append((name, num_bytes))
        self._may_read.wait()
        time.sleep(self.pause_s)
        self.on_read()

    def bytes_of(self, num_reads: int, after: int = 0) -> Counter[str]:
        """What was read of each, of so many frames, once these were."""
        self.let_go()
        eventually(lambda: len(self.reads) >= after + num_reads)
        counted: Counter[str] = Counter()
        for name, num_bytes in self.reads[after : after + num_reads]:
            counted[name] += num_bytes
        return counted

    def state(self) -> LinkState:
        state = self.pair.sender.link_state(self.endpoint)
        assert state is not None
        return state

    def num_carrying(self) -> int:
        """Connections that carry data now."""
        return sum(one.carries_data for one in self.state().connections if one.is_open)

    def close(self) -> None:
        self.let_go()
        self.on_read = lambda: None
        self.pair.close()


class _WatchedSpace(MemorySpace):
    """Tells the link of each frame that is read."""

    def __init__(self, link: WatchedLink, name: str, data: bytearray) -> None:
        super().__init__(data)
        self._link, self._name = link, name

    def views(self, offset: int, length: int) -> list[memoryview]:
        self._link.read(self._name, length)
        return super().views(offset, length)
