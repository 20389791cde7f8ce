"""A stand-in for CUDA on tensors of the CPU, whose streams work only when they are told to."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch


class FakeCuda:
    """CUDA's streams and events: work waits in its stream until `run`, or a `synchronize` of the
    stream; waiting for an event waits for somebody else to run what is before it.
    """

    def __init__(self) -> None:
        self.here = threading.local()
        self.changed = threading.Condition()
        self.streams: list[FakeStream] = []
        self.is_immediate = False
        """Streams work at once."""
        self.pinned_bytes: list[int] = []
        self.pin_error: RuntimeError | None = None
        self.devices: list[object] = []
        """Chosen while host memory was pinned."""
        self.thread_devices: list[tuple[str, object]] = []
        self.error: Exception | None = None
        """What waiting for an event raises."""
        self.num_waits_for_events = 0

    def stream(self) -> "FakeStream | None":
        return getattr(self.here, "stream", None)

    # What the copier calls.

    def make_stream(self, device: torch.device) -> "FakeStream":
        self.streams.append(FakeStream(self))
        return self.streams[-1]

    @contextlib.contextmanager
    def on_stream(self, stream: "FakeStream") -> Iterator[None]:
        before, self.here.stream = self.stream(), stream
        try:
            yield
        finally:
            self.here.stream = before

    @contextlib.contextmanager
    def on_device(self, device: torch.device) -> Iterator[None]:
        self.here.device = device
        try:
            yield
        finally:
            self.here.device = None

    def set_device(self, device: torch.device) -> None:
        self.thread_devices.append((threading.current_thread().name, device))

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.pin_error is not None:
            raise self.pin_error
        self.devices.append(getattr(self.here, "device", None))
        self.pinned_bytes.append(tensor.nbytes)
        return tensor.clone()


class FakeStream:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.queue: list[Callable[[], object]] = []
        self.num_queued = 0
        self.num_done = 0
        self.waits_for: list[object] = []

    def add(self, work: Callable[[], object]) -> None:
        self.queue.append(work)
        self.num_queued += 1
        if self.cuda.is_immediate:
            self.run()

    def wait_stream(self, other: object) -> None:
        assert self.num_done == self.num_queued or self.queue, "a stream waits before its copies"
        self.waits_for.append(other)

    def wait_event(self, event: "FakeEvent") -> None:
        """What is queued behind this happens only after the event."""

        def wait() -> None:
            stream = event.stream
            assert stream is not None
            assert stream.num_done >= event.position, "ran ahead of what it was to wait for"

        self.add(wait)

    def run(self, count: int | None = None) -> None:
        """The GPU works off the first `count` pieces of work, or all."""
        # Work is queued in an inference-mode block, of which CUDA would know nothing.
        with self.cuda.changed, torch.inference_mode():
            for work in self.queue[:count]:
                work()
                self.num_done += 1
            del self.queue[:count]
            self.cuda.changed.notify_all()

    def synchronize(self) -> None:
        if self.cuda.error is not None:
            raise self.cuda.error
        self.run()


class FakeEvent:
    def __init__(self, *, blocking: bool = False) -> None:
        assert blocking, "waiting for it would use up a core"
        self.stream: FakeStream | None = None
        self.position = 0

    def record(self, stream: FakeStream) -> None:
        self.stream, self.position = stream, stream.num_queued

    def synchronize(self) -> None:
        stream = self.stream
        assert stream is not None
        with stream.cuda.changed:
            stream.cuda.num_waits_for_events += 1
            assert stream.cuda.changed.wait_for(lambda: stream.num_done >= self.position, 5)
            if stream.cuda.error is not None:
                raise stream.cuda.error


def install(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Put the stand-in into `torch.cuda`."""
    cuda = FakeCuda()

    def on_its_stream(name: str) -> None:
        really = getattr(torch.Tensor, name)

        def queued(tensor: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
            stream = cuda.stream()
            if stream is None:
                result: torch.Tensor = really(tensor, *arguments, **named)
                return result
            stream.add(lambda: really(tensor, *arguments, **named))
            return tensor

        monkeypatch.setattr(torch.Tensor, name, queued)

    on_its_stream("copy_")
    on_its_stream("index_copy_")
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: cuda.pin(tensor))
    monkeypatch.setattr(torch.cuda, "Stream", cuda.make_stream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "stream", cuda.on_stream)
    monkeypatch.setattr(torch.cuda, "device", cuda.on_device)
    monkeypatch.setattr(torch.cuda, "set_device", cuda.set_device)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the engine's stream")
    return cuda
