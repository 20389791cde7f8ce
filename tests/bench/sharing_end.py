"""One end of bench_sharing in a process of its own: small transfers beside endless bulk ones.

Commands on stdin, answers on stdout, JSON lines, as `peer_process` speaks them: sharing_end.py SIDE
HOST OPTIONS, with fields of TransportConfig as OPTIONS. A bulk transfer maps its logical bytes
cyclically onto a ring, so that it may be as long as anybody likes; what it leaves at the receiver
means nothing. Small transfers carry one slice of a pool after the other, so that each differs from
what the landing held before.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import xxhash
from peer_end import MIB
from peer_worker import serve

from kvmanager.agent.links.probing import RingSpace, SinkSpace
from transport import (
    ByteSpace,
    Endpoint,
    OutgoingSpec,
    OutgoingTransfer,
    Priority,
    Receiver,
    Sender,
    TransportConfig,
    TransportError,
)

SMALL_BYTES = 4 * MIB
RING_BYTES = 64 * MIB
BULK_BYTES = 2**40
"""More than any link here carries while a bulk transfer is wanted."""
NUM_SLICES = 8
TIMEOUT_S = 60.0
TOKEN, FINGERPRINT = b"t" * 32, b"f" * 32


class Landing:
    """Accepts everything: small transfers into one place, the others into none that is kept."""

    def __init__(self) -> None:
        self.small = memoryview(bytearray(SMALL_BYTES))

    def accept(
        self, transfer_id: bytes, token: bytes, fingerprint: bytes, nbytes: int
    ) -> ByteSpace:
        return RingSpace(self.small, nbytes) if nbytes == SMALL_BYTES else SinkSpace(nbytes)

    def on_complete(self, transfer_id: bytes) -> None: ...

    def on_failed(self, transfer_id: bytes, error: TransportError) -> None: ...


class Ending:
    """How and when (`time.perf_counter`) one transfer ended."""

    def __init__(self) -> None:
        self.at_s = 0.0
        self.error: TransportError | None = None
        self._ended = threading.Event()

    def on_complete(self, transfer_id: bytes) -> None:
        self.at_s = time.perf_counter()
        self._ended.set()

    def on_failed(self, transfer_id: bytes, error: TransportError) -> None:
        self.error = error
        self._ended.set()

    def wait(self) -> None:
        if not self._ended.wait(TIMEOUT_S):
            raise TimeoutError(f"the transfer did not end in {TIMEOUT_S:g} s")


class Receiving:
    """Commands of the receiving end."""

    def __init__(self, host: str, config: TransportConfig) -> None:
        self._landing = Landing()
        self._receiver = Receiver(Endpoint(host, 0), config, self._landing)
        self._receiver.start()

    def hello(self) -> int:
        """The port it listens at."""
        return self._receiver.endpoint.port

    def digest(self) -> str:
        """Of the small transfer that came last."""
        return xxhash.xxh3_128_hexdigest(self._landing.small)


class Sending:
    """Commands of the sending end."""

    def __init__(self, host: str, config: TransportConfig) -> None:
        self._host = host
        self._endpoint = Endpoint(host, 0)
        self._sender = Sender(config)
        self._num_opened = 0
        self._bulks: list[tuple[str, OutgoingTransfer, Ending]] = []
        source = random.Random(7)
        self._ring = memoryview(b"".join(source.randbytes(MIB) for _ in range(RING_BYTES // MIB)))
        self._slices = [self._ring[i * SMALL_BYTES :][:SMALL_BYTES] for i in range(NUM_SLICES)]
        self._digests = [xxhash.xxh3_128_hexdigest(part) for part in self._slices]

    def hello(self) -> None: ...

    def connect(self, port: int) -> None:
        self._endpoint = Endpoint(self._host, port)
        self._sender.warm(self._endpoint)

    def small(self, tenant: str) -> list[Any]:
        """Seconds from opening one request transfer to its completion, and its digest."""
        index = self._num_opened % NUM_SLICES
        space, ending = RingSpace(self._slices[index], SMALL_BYTES), Ending()
        spec = self._spec(Priority.REQUEST, tenant)
        begin_s = time.perf_counter()
        handle = self._sender.open(spec, space, ending)
        handle.ready(0, SMALL_BYTES)
        ending.wait()
        if ending.error is not None:
            raise ending.error
        return [ending.at_s - begin_s, self._digests[index]]

    def start_bulk(self, priority: int, tenant: str) -> None:
        """Begin one; it goes on until `stop_bulks`."""
        ending = Ending()
        spec = self._spec(Priority(priority), tenant)
        handle = self._sender.open(spec, RingSpace(self._ring, BULK_BYTES), ending)
        handle.ready(0, BULK_BYTES)
        self._bulks.append((tenant, handle, ending))

    def acked(self) -> list[Any]:
        """The clock, and [tenant, bytes acknowledged] of each bulk in the order they began."""
        counts = [[tenant, handle.progress().acked_bytes] for tenant, handle, _ in self._bulks]
        return [time.perf_counter(), counts]

    def stop_bulks(self) -> None:
        bulks, self._bulks = self._bulks, []
        for _, handle, _ in bulks:
            handle.cancel("measured")
        for _, _, ending in bulks:
            ending.wait()
            if ending.error is not None and ending.error.code != "cancelled":
                raise ending.error

    def link(self) -> dict[str, Any]:
        """What autotuning has found: connections and bytes of a frame."""
        state = self._sender.link_state(self._endpoint)
        assert state is not None, "connect first"
        return {"num_connections": state.width, "frame_bytes": state.frame_bytes}

    def _spec(self, priority: Priority, tenant: str) -> OutgoingSpec:
        self._num_opened += 1
        return OutgoingSpec(
            transfer_id=self._num_opened.to_bytes(16, "little"),
            token=TOKEN,
            fingerprint=FINGERPRINT,
            endpoint=self._endpoint,
            priority=priority,
            tenant=tenant,
        )


def main(argv: list[str]) -> None:
    side, host, options = argv
    config = TransportConfig(**json.loads(options))
    end = Sending(host, config) if side == "sender" else Receiving(host, config)
    serve(end, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
