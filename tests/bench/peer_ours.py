"""This project's transport as a peer: one transfer per job, acknowledged with COMPLETE.

`options` are fields of TransportConfig; `tls` is an object with the paths `cert`, `key` and `ca`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peer_end import Buffer, Job, Place
from transport_doubles import MemoryRegistry, make_spec

from transport import Endpoint, Receiver, Sender, TlsFiles, TransportConfig, TransportError

TIMEOUT_S = 300.0
"""More than the caller waits: it has the better message."""


class BlockSpace:
    """A job's blocks as a ByteSpace."""

    def __init__(self, buffer: Buffer, job: Job) -> None:
        self.nbytes = job.nbytes
        self._memory = buffer.memory
        self._block_bytes = job.block_bytes
        self._offsets: Sequence[int] = buffer.offsets(job)

    def views(self, offset: int, length: int) -> list[memoryview]:
        views: list[memoryview] = []
        end = offset + length
        while offset < end:
            index, skip = divmod(offset, self._block_bytes)
            size = min(end - offset, self._block_bytes - skip)
            start = self._offsets[index] + skip
            views.append(self._memory[start : start + size])
            offset += size
        return views


class Ending:
    """Waits for one transfer's end."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._error: TransportError | None = None

    def on_complete(self, transfer_id: bytes) -> None:
        self._ended.set()

    def on_failed(self, transfer_id: bytes, error: TransportError) -> None:
        self._error = error
        self._ended.set()

    def wait(self) -> None:
        """Raises what the transfer failed with, or TimeoutError."""
        if not self._ended.wait(TIMEOUT_S):
            raise TimeoutError("the transfer did not end")
        if self._error is not None:
            raise self._error


class Receiving:
    def __init__(self, place: Place) -> None:
        self._place = place
        self._registry = MemoryRegistry()
        config = transport_config(place.options)
        self._receiver = Receiver(Endpoint(place.host, 0), config, self._registry)
        self._receiver.start()

    def hello(self) -> dict[str, Any]:
        return {"port": self._receiver.endpoint.port}

    def connect(self, other: dict[str, Any]) -> None: ...

    def prepare(self, job: Job) -> None:
        self._registry.expect(make_spec(job.number), BlockSpace(self._place.buffer, job))

    def settle(self) -> None:
        """Forget what has ended, so that nothing grows with the number of transfers."""
        self._registry.expected.clear()
        self._registry.completed.clear()


class Sending:
    def __init__(self, place: Place) -> None:
        self._place = place
        self._sender = Sender(transport_config(place.options))
        self._endpoint = Endpoint(place.host, 0)

    def hello(self) -> dict[str, Any]:
        return {}

    def connect(self, other: dict[str, Any]) -> None:
        self._endpoint = Endpoint(self._place.host, other["port"])

    def prepare(self, job: Job) -> None: ...

    def run(self, job: Job) -> None:
        ending = Ending()
        space = BlockSpace(self._place.buffer, job)
        handle = self._sender.open(make_spec(job.number, self._endpoint), space, ending)
        handle.ready(0, job.nbytes)
        ending.wait()

    def run_blocks(self, job: Job) -> list[float]:
        ending = Ending()
        space = BlockSpace(self._place.buffer, job)
        handle = self._sender.open(make_spec(job.number, self._endpoint), space, ending)
        taken_s = []
        for start in range(0, job.nbytes, job.block_bytes):
            begin_s = time.perf_counter()
            handle.ready(start, job.block_bytes)
            handle.wait_acked(start + job.block_bytes, TIMEOUT_S)
            taken_s.append(time.perf_counter() - begin_s)
        ending.wait()
        return taken_s

    def settle(self) -> None: ...


def transport_config(options: dict[str, Any]) -> TransportConfig:
    changes = dict(options)
    if "tls" in changes:
        cert, key, ca = (Path(changes["tls"][name]) for name in ("cert", "key", "ca"))
        changes["tls"] = TlsFiles(cert, key, ca)
    return TransportConfig(**changes)


def open_end(place: Place) -> Receiving | Sending:
    return Sending(place) if place.side == "sender" else Receiving(place)
