"""An attacker that keeps many connections to one port open, and opens each again when it is cut."""

from __future__ import annotations

import errno
import selectors
import socket
import threading
import time
from contextlib import suppress
from typing import Self

ROUND_S = 0.02
MAX_OPENED_A_ROUND = 32
"""1600 a second: faster than a receiver's places turn over, and other processes keep some CPU."""
AGAIN_S = 0.2


class ConnectionFlood:
    """`num_connections` sockets from the address `source`. Each says `words` once it is connected,
    and again `repeats` every AGAIN_S. A context manager; its thread runs inside.
    """

    def __init__(
        self,
        address: tuple[str, int],
        num_connections: int,
        *,
        words: bytes = b"",
        repeats: bytes = b"",
        source: str = "127.0.0.1",
    ) -> None:
        self.num_opened = 0
        self._address = address
        self._num_connections = num_connections
        self._words = words
        self._repeats = repeats
        self._source = source
        self._selector = selectors.DefaultSelector()
        self._sockets: set[socket.socket] = set()
        self._connected: set[socket.socket] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flood", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        for sock in self._sockets:
            sock.close()
        self._selector.close()

    @property
    def is_up(self) -> bool:
        """Whether it goes on, and already opens connections again that were cut."""
        return self._thread.is_alive() and self.num_opened > self._num_connections

    def _run(self) -> None:
        again_s = 0.0
        while not self._ended.wait(ROUND_S):
            missing = self._num_connections - len(self._sockets)
            for _ in range(min(missing, MAX_OPENED_A_ROUND)):
                self._open()
            for key, events in self._selector.select(0):
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                self._serve(sock, events)
            if self._repeats and time.monotonic() >= again_s:
                again_s = time.monotonic() + AGAIN_S
                for sock in self._connected:
                    with suppress(OSError):  # the loop above finds out that it was cut
                        sock.send(self._repeats)

    def _open(self) -> None:
        sock = socket.socket()
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_BIND_ADDRESS_NO_PORT, 1)
        sock.bind((self._source, 0))
        if sock.connect_ex(self._address) not in (0, errno.EINPROGRESS):
            sock.close()
            return
        self._sockets.add(sock)
        self._selector.register(sock, selectors.EVENT_READ | selectors.EVENT_WRITE)
        self.num_opened += 1

    def _serve(self, sock: socket.socket, events: int) -> None:
        try:
            if events & selectors.EVENT_READ and not sock.recv(65536):
                raise ConnectionError
            if events & selectors.EVENT_WRITE:
                self._selector.modify(sock, selectors.EVENT_READ)
                self._connected.add(sock)
                sock.send(self._words)
        except OSError:
            self._selector.unregister(sock)
            self._sockets.discard(sock)
            self._connected.discard(sock)
            sock.close()
