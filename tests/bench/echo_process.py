"""A process that passes messages on between two unix sockets and does nothing else.

A message takes the way of a hand-over through an agent: one socket in, another process, another
socket out. So what it takes is the least that a hand-over can take on this machine, in this way.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
from asyncio import AbstractEventLoop
from collections.abc import Callable
from pathlib import Path
from typing import Final, Self

import uvloop

LOOPS: Final[dict[str, Callable[[], AbstractEventLoop]]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}
KINDS: Final = ("thread", *LOOPS)
"""A thread that blocks in the kernel, or an event loop. Agents run uvloop."""
_RECV_BYTES: Final = 64 << 10


class EchoProcess:
    """The process, and both ends of its way; a context manager."""

    def __init__(self, kind: str, path: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, kind, str(path)], text=True, stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise RuntimeError(f"the echo process ({kind}) did not start")
        self.pid = self._process.pid
        self._into, self._out = (socket.socket(socket.AF_UNIX) for _ in range(2))
        self._into.connect(str(path))
        self._out.connect(str(path))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._into.close()
        self._out.close()
        with self._process:  # waits, and closes its output
            pass

    def pass_on(self, message: bytes) -> None:
        """Send a message, and return when it is back."""
        self._into.sendall(message)
        left = len(message)
        while left:
            data = self._out.recv(_RECV_BYTES)
            if not data:
                raise RuntimeError("the echo process has ended")
            left -= len(data)


class _Passing(asyncio.Protocol):
    """Passes on what it receives to `onto`, as an agent answers: within the call."""

    def __init__(self, onto: asyncio.Transport, over: asyncio.Event) -> None:
        self._onto = onto
        self._over = over

    def data_received(self, data: bytes) -> None:
        self._onto.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._over.set()


async def _serve_loop(source: socket.socket, onto: socket.socket) -> None:
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    out, _ = await loop.create_unix_connection(asyncio.Protocol, sock=onto)
    await loop.create_unix_connection(lambda: _Passing(out, over), sock=source)
    await over.wait()


def _serve_thread(source: socket.socket, onto: socket.socket) -> None:
    while data := source.recv(_RECV_BYTES):
        onto.sendall(data)


def main(kind: str, path: str) -> None:
    """Serve one way until its near end closes."""
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(path)
        listener.listen()
        print("ready", flush=True)
        (source, _), (onto, _) = listener.accept(), listener.accept()
    if kind == "thread":
        _serve_thread(source, onto)
        return
    source.setblocking(False)
    onto.setblocking(False)
    with asyncio.Runner(loop_factory=LOOPS[kind]) as runner:
        runner.run(_serve_loop(source, onto))


if __name__ == "__main__":
    main(*sys.argv[1:])
