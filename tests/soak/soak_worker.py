"""One process of the transport's soak: a sender or a receiver that obeys lines of JSON.

Commands come on stdin, events go to stdout, both one JSON object a line. Whoever started it decides
what happens and judges the events; this file only acts and tells.
"""

from __future__ import annotations

import ctypes
import heapq
import json
import logging
import os
import random
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from blake3 import blake3
from transport_doubles import MemorySpace
from transport_loopback import Census

from transport import (
    Endpoint,
    OutgoingSpec,
    OutgoingTransfer,
    Receiver,
    Refused,
    Sender,
    TlsFiles,
    TransferState,
    TransportConfig,
    TransportError,
)

MIB = 1024 * 1024
BASE_BYTES = 80 * MIB
ARENA_BYTES = 192 * MIB
TOKEN = b"t" * 32
FINGERPRINT = b"f" * 32


class Channel:
    """Events to whoever started this process, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def tell(self, event: str, **fields: Any) -> None:
        line = json.dumps({"event": event, **fields}) + "\n"
        with self._lock:
            os.write(1, line.encode())  # shorter than PIPE_BUF, so never torn


def is_held(space: MemorySpace) -> bool:
    """Whether somebody still has a view of this memory, whose end was told."""
    try:
        space.release()
    except BufferError:
        return True
    return False


class SenderWorker:
    """Opens, feeds and cancels transfers; tells how each ended."""

    def __init__(self, config: TransportConfig, channel: Channel, port: int) -> None:
        self.sender = Sender(config)
        self._channel = channel
        self._endpoint = Endpoint("127.0.0.1", port)
        self._base = random.Random(0).randbytes(BASE_BYTES)
        self._open: dict[bytes, tuple[OutgoingTransfer, MemorySpace]] = {}
        self._lock = threading.Lock()
        self._stirred = threading.Condition(self._lock)
        self._pieces: list[tuple[float, int, bytes, int, int]] = []
        self._num_pieces = 0
        threading.Thread(target=self._feed, name="feeder", daemon=True).start()

    @property
    def num_open(self) -> int:
        return len(self._open)

    def obey(self, op: str, command: dict[str, Any]) -> None:
        if op == "open":
            self._begin(**command)
        elif op == "cancel":
            held = self._open.get(bytes.fromhex(command["id"]))
            if held is not None:
                held[0].cancel("the soak wants it so")

    def close(self) -> None:
        self.sender.close()

    def _begin(self, id: str, nbytes: int, seed: int, priority: int) -> None:
        dice = random.Random(seed)
        start = dice.randrange(BASE_BYTES - nbytes)
        data = bytearray(self._base[start : start + nbytes])
        data[:16] = bytes.fromhex(id)[: len(data)]
        space = MemorySpace(data, dice.choice([4096, 16384, 65536, 1000003]))
        self._channel.tell("opened", id=id, digest=blake3(data).hexdigest())
        transfer_id = bytes.fromhex(id)
        spec = OutgoingSpec(transfer_id, TOKEN, FINGERPRINT, self._endpoint, **_treatment(priority))
        with self._lock:
            self._open[transfer_id] = (self.sender.open(spec, space, self), space)
            self._plan(transfer_id, nbytes, dice)

    def _plan(self, transfer_id: bytes, nbytes: int, dice: random.Random) -> None:
        """Pieces of all sizes become ready over a while: in order, backwards or anyhow."""
        num_cuts = min(max(0, nbytes - 1), dice.randrange(200))
        cuts = sorted(dice.sample(range(1, nbytes), num_cuts)) if num_cuts else []
        pieces = list(zip([0, *cuts], [*cuts, nbytes], strict=True))
        order = dice.choice(["forward", "backward", "random"])
        if order == "backward":
            pieces.reverse()
        elif order == "random":
            dice.shuffle(pieces)
        spread_s = dice.choice([0.0, 0.1, 2.0])
        now_s = time.monotonic()
        for index, (first, last) in enumerate(pieces):
            self._num_pieces += 1
            due_s = now_s + spread_s * index / len(pieces)
            piece = (due_s, self._num_pieces, transfer_id, first, last - first)
            heapq.heappush(self._pieces, piece)
        self._stirred.notify()

    def _feed(self) -> None:
        with self._lock:
            while True:
                now_s = time.monotonic()
                while self._pieces and self._pieces[0][0] <= now_s:
                    _, _, transfer_id, offset, length = heapq.heappop(self._pieces)
                    held = self._open.get(transfer_id)
                    if held is not None:
                        held[0].ready(offset, length)
                self._stirred.wait(self._pieces[0][0] - now_s if self._pieces else None)

    # TransferListener.

    def on_complete(self, transfer_id: bytes) -> None:
        self._ended(transfer_id, None)

    def on_failed(self, transfer_id: bytes, error: TransportError) -> None:
        self._ended(transfer_id, error)

    def _ended(self, transfer_id: bytes, error: TransportError | None) -> None:
        with self._lock:  # so that it is in the table
            handle, space = self._open.pop(transfer_id)
        self._channel.tell(
            "ended",
            id=transfer_id.hex(),
            code=error.code if error else "",
            message=error.message[:200] if error else "",
            held=is_held(space),
            resent_bytes=handle.progress().resent_bytes,
        )


def _treatment(priority: int) -> dict[str, Any]:
    """What this build of the transport lets a sender say about a transfer."""
    fields = OutgoingSpec.__dataclass_fields__
    treatment: dict[str, Any] = {}
    if "priority" in fields:
        from transport import interfaces

        treatment["priority"] = getattr(interfaces, "Priority", int)(priority)
    if "tenant" in fields:
        treatment["tenant"] = f"tenant-{priority}"
    if "digest" in fields:
        treatment["digest"] = bool(priority)
    return treatment


class SlowSpace(MemorySpace):
    """Memory of a receiver, which may be slow for a while."""

    def __init__(self, data: bytearray, receiver: ReceiverWorker) -> None:
        super().__init__(data, 48 * 1024)
        self._receiver = receiver

    def views(self, offset: int, length: int) -> list[memoryview]:
        if time.monotonic() < self._receiver.slow_until_s:
            time.sleep(self._receiver.pause_s)
        return super().views(offset, length)


class ReceiverWorker:
    """Lands what it was told to expect in an arena that can be full; tells digests."""

    def __init__(self, config: TransportConfig, channel: Channel, port: int) -> None:
        self._channel = channel
        self._expected: dict[bytes, int] = {}
        self._landed: dict[bytes, SlowSpace] = {}
        self._dropped: set[bytes] = set()
        self._lock = threading.Lock()
        self.pause_s = 0.0
        self.slow_until_s = 0.0
        self.receiver = Receiver(Endpoint("127.0.0.1", port), config, self)
        self.receiver.start()

    @property
    def num_open(self) -> int:
        return len(self._landed)

    def obey(self, op: str, command: dict[str, Any]) -> None:
        if op == "expect":
            self._expected[bytes.fromhex(command["id"])] = command["nbytes"]
            self._channel.tell("expected", id=command["id"])
        elif op == "forget":
            self._expected.pop(bytes.fromhex(command["id"]), None)
        elif op == "drop":
            self._drop(bytes.fromhex(command["id"]))
        elif op == "slow":
            self.pause_s = command["pause_s"]
            self.slow_until_s = time.monotonic() + command["for_s"]

    def close(self) -> None:
        self.receiver.close()

    def _drop(self, transfer_id: bytes) -> None:
        with self._lock:
            self._dropped.add(transfer_id)
        self.receiver.drop(transfer_id, "the soak wants it so")
        progress = self.receiver.progress(transfer_id)
        if progress is None or progress.state is TransferState.COMPLETE:
            return  # on_complete has it, or there was nothing
        with self._lock:
            space = self._landed.pop(transfer_id, None)
        if space is not None:
            self._channel.tell("dropped", id=transfer_id.hex(), held=is_held(space))

    # LandingRegistry.

    def accept(
        self, transfer_id: bytes, token: bytes, fingerprint: bytes, nbytes: int
    ) -> MemorySpace:
        with self._lock:
            if transfer_id in self._dropped:
                raise Refused("dropped", "dropped before it was opened")
            if self._expected.get(transfer_id) != nbytes or token != TOKEN:
                raise Refused("unknown_transfer", "no landing is reserved for this transfer")
            if sum(space.nbytes for space in self._landed.values()) + nbytes > ARENA_BYTES:
                raise Refused("no_room", "the arena is full")
            space = self._landed[transfer_id] = SlowSpace(bytearray(nbytes), self)
            return space

    def on_complete(self, transfer_id: bytes) -> None:
        with self._lock:
            space = self._landed.pop(transfer_id)
        held = is_held(space)
        digest = blake3(space.data).hexdigest()
        self._channel.tell("landed", id=transfer_id.hex(), digest=digest, held=held)

    def on_failed(self, transfer_id: bytes, error: TransportError) -> None:
        with self._lock:
            space = self._landed.pop(transfer_id, None)
        if space is None:
            return  # dropped at the same moment
        self._channel.tell("lost", id=transfer_id.hex(), code=error.code, held=is_held(space))


def starve(for_s: float) -> None:
    """No new descriptors for a while."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, hard))

    def feed() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    timer = threading.Timer(for_s, feed)
    timer.daemon = True
    timer.start()


def tell_census(worker: SenderWorker | ReceiverWorker, channel: Channel) -> None:
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        rss_bytes = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    census = Census.take()
    channel.tell(
        "census",
        rss_bytes=rss_bytes,
        num_descriptors=len(census.descriptors),
        num_threads=len(census.threads),
        num_open=worker.num_open,
    )


def config_of(options: dict[str, Any]) -> TransportConfig:
    """`tls` of the options: the paths of `TlsFiles`, or none."""
    paths = [Path(path) for path in options.pop("tls")]
    return TransportConfig(**options, tls=TlsFiles(*paths) if paths else None)


def main() -> None:
    role, options, port = sys.argv[1:]
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {role} %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when this process ends
    channel = Channel()
    make = SenderWorker if role == "sender" else ReceiverWorker
    census = Census.take()
    worker = make(config_of(json.loads(options)), channel, int(port))
    listening = worker.receiver.endpoint.port if isinstance(worker, ReceiverWorker) else 0
    channel.tell("started", port=listening)
    for line in sys.stdin:
        command = json.loads(line)
        op = command.pop("op")
        if op == "quit":
            worker.close()
            time.sleep(0.2)
            leaks = [leak for leak in census.leaks() if "feeder" not in leak]
            channel.tell("quit", leaks=leaks, num_open=worker.num_open)
            return
        if op == "census":
            tell_census(worker, channel)
        elif op == "starve":
            starve(command["for_s"])
        else:
            worker.obey(op, command)


if __name__ == "__main__":
    main()
