"""Plain sockets as a peer: what blocking threads in Python reach with no protocol at all.

Frames of 1 MiB are dealt to the connections in turn, which both sides know beforehand, so there is
no framing; each connection answers one byte once its share has come. No checksum, no resume, no
limit on memory: an upper bound, not a transport. `options`: connections.
"""

from __future__ import annotations

import queue
import socket
import threading
from typing import Any

from peer_end import MIB, Job, Place

MAX_IOVEC = 1024


def share(job: Job, index: int, connections: int) -> list[slice]:
    """The frames, as slices of the job's blocks, that one connection carries."""
    per_frame = max(1, min(MIB // job.block_bytes, MAX_IOVEC))
    starts = range(0, job.num_blocks, per_frame)[index::connections]
    return [slice(start, min(start + per_frame, job.num_blocks)) for start in starts]


class Lanes:
    """A thread per connection that does its share of every job, in order."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._num = int(place.options["connections"])
        self._jobs: list[queue.SimpleQueue[Job]] = [queue.SimpleQueue() for _ in range(self._num)]
        self._done: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

    def start(self, sock: socket.socket, index: int) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=self._serve, args=(sock, index), daemon=True).start()

    def submit(self, job: Job) -> int:
        """How many connections take part."""
        active = [index for index in range(self._num) if share(job, index, self._num)]
        for index in active:
            self._jobs[index].put(job)
        return len(active)

    def wait(self, num: int) -> None:
        for _ in range(num):
            error = self._done.get()
            if error is not None:
                raise error

    def _serve(self, sock: socket.socket, index: int) -> None:
        move = _send if self._place.side == "sender" else _receive
        while True:
            job = self._jobs[index].get()
            try:
                views = self._place.buffer.views(job)
                for part in share(job, index, self._num):
                    move(sock, views[part])
                if self._place.side == "sender":
                    _exactly(sock.recv(1), 1)
                else:
                    sock.sendall(b"\1")
                self._done.put(None)
            except OSError as error:
                self._done.put(error)
                return


def _send(sock: socket.socket, views: list[memoryview]) -> None:
    while views:
        sent = sock.sendmsg(views)
        views = _after(views, sent)


def _receive(sock: socket.socket, views: list[memoryview]) -> None:
    while views:
        received = sock.recvmsg_into(views, 0, socket.MSG_WAITALL)[0]
        if not received:
            raise ConnectionError("the sender is gone")
        views = _after(views, received)


def _after(views: list[memoryview], num_bytes: int) -> list[memoryview]:
    for index, view in enumerate(views):
        if num_bytes < len(view):
            return [view[num_bytes:], *views[index + 1 :]]
        num_bytes -= len(view)
    return []


def _exactly(data: bytes, num_bytes: int) -> None:
    if len(data) != num_bytes:
        raise ConnectionError("the receiver is gone")


class Receiving:
    def __init__(self, place: Place) -> None:
        self._lanes = Lanes(place)
        self._listener = socket.create_server((place.host, 0), backlog=64)
        self._num = int(place.options["connections"])

    def hello(self) -> dict[str, Any]:
        threading.Thread(target=self._accept, daemon=True).start()
        return {"port": self._listener.getsockname()[1]}

    def _accept(self) -> None:
        for _ in range(self._num):
            sock, _address = self._listener.accept()
            index = sock.recv(1)[0]
            self._lanes.start(sock, index)

    def connect(self, other: dict[str, Any]) -> None: ...

    def prepare(self, job: Job) -> None:
        self._lanes.submit(job)

    def settle(self) -> None: ...


class Sending:
    def __init__(self, place: Place) -> None:
        self._place = place
        self._lanes = Lanes(place)

    def hello(self) -> dict[str, Any]:
        return {}

    def connect(self, other: dict[str, Any]) -> None:
        for index in range(int(self._place.options["connections"])):
            sock = socket.create_connection((self._place.host, other["port"]), timeout=10)
            sock.settimeout(None)
            if self._place.host.startswith("127."):
                # Pacing between two processes of one host only costs CPU.
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
            sock.sendall(bytes([index]))
            self._lanes.start(sock, index)

    def prepare(self, job: Job) -> None: ...

    def run(self, job: Job) -> None:
        self._lanes.wait(self._lanes.submit(job))

    def settle(self) -> None: ...


def open_end(place: Place) -> Receiving | Sending:
    return Sending(place) if place.side == "sender" else Receiving(place)
