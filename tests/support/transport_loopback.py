"""A sender and a receiver over real sockets on 127.0.0.1, and a rig that brings a transfer between
them to the point where a fault shall strike and looks for what is left afterwards.

Faults come from `transport.testing.proxy`.
"""

from __future__ import annotations

import operator
import os
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from eventually import wait_until
from transport_doubles import MemoryRegistry, MemorySpace, RecordingListener, make_spec

from transport import Endpoint, LinkPath, OutgoingTransfer, Receiver, Sender, TransportError
from transport.config import TransportConfig
from transport.testing.proxy import HurtfulProxy

LOOPBACK = Endpoint("127.0.0.1", 0)


class LoopbackPair:
    """A receiver and a sender in this process, and the transfers between them."""

    def __init__(
        self,
        config: TransportConfig,
        *,
        receiver_config: TransportConfig | None = None,
        bind: Endpoint = LOOPBACK,
        routes: Callable[[Endpoint], Mapping[Endpoint, Sequence[LinkPath]]] = lambda endpoint: {},
    ) -> None:
        """`routes`: the sender's paths, by where the receiver listens."""
        self.registry = MemoryRegistry()
        self.receiver = Receiver(bind, receiver_config or config, self.registry)
        self.receiver.start()
        self.endpoint = self.receiver.endpoint
        self.sender = Sender(config, routes(self.endpoint))
        self.listener = RecordingListener()

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()

    def begin(
        self, number: int, data: bytearray, *, via: Endpoint | None = None
    ) -> tuple[OutgoingTransfer, bytearray]:
        """A transfer the receiver expects, with nothing ready, and the memory where it lands."""
        spec = make_spec(number, via or self.endpoint)
        landed = bytearray(len(data))
        self.registry.expect(spec, MemorySpace(landed, 48 * 1024))
        return self.sender.open(spec, MemorySpace(data), self.listener), landed


@dataclass(frozen=True, slots=True)
class Census:
    """What this process holds of the kernel: open descriptors and threads."""

    descriptors: dict[str, str]
    threads: frozenset[str]

    @classmethod
    def take(cls) -> Self:
        descriptors: dict[str, str] = {}
        for number in os.listdir("/proc/self/fd"):
            try:
                descriptors[number] = os.readlink(f"/proc/self/fd/{number}")
            except OSError:
                continue  # the one that listed the directory
        threads = (f"{thread.name} {thread.ident}" for thread in threading.enumerate())
        return cls(descriptors, frozenset(threads))

    def leaks(self) -> list[str]:
        """What is there now and was not then."""
        now = Census.take()
        opened = [
            f"descriptor {number} {what}"
            for number, what in now.descriptors.items()
            if number not in self.descriptors
        ]
        return sorted(opened) + sorted(f"thread {name}" for name in now.threads - self.threads)

    def wait_for_no_leaks(self) -> None:
        """AssertionError with what is left after 20 s."""
        wait_until(self.leaks, operator.not_, what="nothing is left", timeout_s=20.0)


class Phase(StrEnum):
    """How far a transfer has come."""

    BEFORE = "before"
    """The link is connected, the transfer is not open."""
    DURING = "during"
    """A half is acknowledged, more is on its way."""
    LAST_FRAME = "last_frame"
    """All but one byte is acknowledged, that one is on its way."""
    LAST_ACK = "last_ack"
    """Everything is in place, the sender has not been told."""


class LaggardSpace(MemorySpace):
    """Memory that takes its time: every look-up lasts `pause_s`, the next one `once_s` longer."""

    pause_s = 0.0
    once_s = 0.0

    def views(self, offset: int, length: int) -> list[memoryview]:
        pause_s, self.once_s = self.pause_s + self.once_s, 0.0
        if pause_s:
            time.sleep(pause_s)
        return super().views(offset, length)


class FaultRig:
    """One transfer from a sender through a `HurtfulProxy` to a receiver.

    Use: `bring_to(phase)`, hurt something, `go_on()`, let the proxy resume, `outcome()`; then
    `check_usable()` once the fault is gone and `check_left_nothing()` at the end.
    """

    def __init__(
        self,
        config: TransportConfig,
        *,
        nbytes: int = 2 * 1024 * 1024,
        receiver_config: TransportConfig | None = None,
        seed: int = 0,
    ) -> None:
        self.census = Census.take()
        self.config = config
        self.data = bytearray(random.Random(seed).randbytes(nbytes))
        self.landed = bytearray(nbytes)
        self.pair = LoopbackPair(config, receiver_config=receiver_config)
        self.proxy = HurtfulProxy(self.pair.endpoint)
        self.spec = make_spec(1, self.proxy.endpoint)
        self.transfer_id = self.spec.transfer_id
        self.source = MemorySpace(self.data)
        self.landing = LaggardSpace(self.landed, 48 * 1024)
        self.pair.registry.expect(self.spec, self.landing)
        self.handle: OutgoingTransfer | None = None
        self._expected = bytes(self.data)

    # To the point where it hurts.

    def bring_to(self, phase: Phase) -> None:
        """What is on its way then stays in the proxy, or before it, until the proxy resumes."""
        self.pair.sender.warm(self.spec.endpoint)
        wanted = self.config.num_connections
        eventually(lambda: self.pair.sender.num_connections(self.spec.endpoint) >= wanted)
        if phase is Phase.BEFORE:
            return
        handle = self._open()
        first_bytes = len(self.data) // 2 if phase is Phase.DURING else len(self.data) - 1
        handle.ready(0, first_bytes)
        eventually(lambda: handle.progress().acked_bytes == first_bytes)
        self.proxy.stall("backward" if phase is Phase.LAST_ACK else "forward")
        handle.ready(first_bytes, len(self.data) - first_bytes)
        if phase is Phase.LAST_ACK:
            eventually(self.is_complete)
        else:
            eventually(lambda: handle.progress().sent_bytes > first_bytes)

    def go_on(self) -> None:
        """Open the transfer if it is not; everything is ready from now on. The proxy still stalls
        what `bring_to` made it stall.
        """
        handle = self.handle or self._open()
        handle.ready(0, len(self.data))

    def outcome(self, timeout_s: float) -> TransportError | None:
        """How the transfer ended at the sender, whose memory must be free by then; TimeoutError,
        AssertionError when it ended well with other bytes than were sent.
        """
        error = self.pair.listener.wait(self.transfer_id, timeout_s)
        self.source.release()
        if error is None:
            assert self.is_exact(), "wrong bytes were acknowledged"
        return error

    def is_complete(self) -> bool:
        """Whether the receiver has everything."""
        return self.transfer_id in self.pair.registry.completed

    def is_exact(self) -> bool:
        """Whether it has what was sent; asked after a good end only."""
        return self.landed == self._expected

    def restart_receiver(self) -> None:
        """A new receiver on the port of the old one."""
        self.pair.receiver.close()
        self.pair.receiver = Receiver(self.pair.endpoint, self.config, self.pair.registry)
        self.pair.receiver.start()

    # What must hold afterwards.

    def check_usable(self, number: int = 2, timeout_s: float = 20.0) -> None:
        """A further transfer between the same two, the fault being gone, is exact."""
        data = bytearray(random.Random(number).randbytes(300_000))
        handle, landed = self.pair.begin(number, data, via=self.spec.endpoint)
        handle.ready(0, len(data))
        assert self.pair.listener.wait(handle.transfer_id, timeout_s) is None
        assert landed == data

    def check_left_nothing(self) -> None:
        """The landing's memory is free once the receiver's side heard of the end, or dropped it;
        after `close` no descriptor and no thread is left.
        """
        registry = self.pair.registry
        if self.transfer_id not in registry.completed and self.transfer_id not in registry.failed:
            self.pair.receiver.drop(self.transfer_id, "the test is over")
        self.landing.release()
        self.close()
        self.census.wait_for_no_leaks()

    def close(self) -> None:
        self.pair.close()
        self.proxy.close()

    def _open(self) -> OutgoingTransfer:
        self.handle = self.pair.sender.open(self.spec, self.source, self.pair.listener)
        return self.handle


def eventually(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    """`wait_until` with the patience of the transport's tests."""
    wait_until(condition, timeout_s=timeout_s)


__all__ = [
    "Census",
    "FaultRig",
    "HurtfulProxy",
    "LaggardSpace",
    "LoopbackPair",
    "Phase",
    "eventually",
]
