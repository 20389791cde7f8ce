"""TCP sockets as streams that several threads may share. Knows no frame, no transfer and no TLS.

One thread receives, one sends, any may `abort`. The file descriptor is closed by `close` only,
which the owner calls when both are done, so that no thread ever touches a descriptor that the
kernel has given to somebody else.

The sockets are blocking: a thread that sends or receives sleeps in the kernel without the GIL and
without a second system call for readiness.
"""

from __future__ import annotations

import fcntl
import select
import socket
import struct
import termios
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from netmon import tcp_info
from netmon.tcp_info import TcpInfo
from transport.config import KIB
from transport.errors import LinkError, TransportError
from transport.socket_options import grow_send_buffer

Buffer = memoryview | bytes
IOV_MAX = 1024
"""Linux: the most buffers of one sendmsg or recvmsg (UIO_MAXIOV)."""
MAX_WAIT_BYTES = 512 * KIB
"""Most bytes that a receiver on a far path lets arrive before it wakes."""


class Stream(Protocol):
    """One connected socket. Methods that send or receive raise LinkError("lost") or
    PeerError("tls") when the connection has ended.
    """

    def send(self, buffers: Sequence[Buffer]) -> None:
        """Send all bytes, however long that takes."""
        ...

    def try_send(self, data: Buffer) -> int:
        """Send the bytes that the kernel takes now and return their number. After 0 the next call
        must begin with the same bytes.
        """
        ...

    def send_some(self, buffers: Sequence[Buffer]) -> list[Buffer]:
        """Send the bytes that the kernel takes now and return the others, which must be next."""
        ...

    def receive(self, buffers: Sequence[memoryview], *, fill: bool) -> int:
        """Wait for bytes and store them; with `fill`, preferably until the buffers are full."""
        ...

    def try_receive(self, buffers: Sequence[memoryview]) -> int:
        """Store the bytes that have arrived and return their number, which may be 0."""
        ...

    def wait_readable(self, timeout_s: float) -> bool:
        """Wait until there are bytes to receive, or the connection ended, at most this long.
        Returns False if it is sure that there are none.
        """
        ...

    def unsent_bytes(self) -> int:
        """Bytes that the peer's kernel has not acknowledged."""
        ...

    def abort(self) -> None:
        """Make all waiting calls of other threads return with an error. Never raises."""
        ...

    def close(self) -> None:
        """Release the descriptor; no other thread may be using the stream any more."""
        ...


class SocketOwner:
    """The part that all streams share: options, and an end that is safe with several threads."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        # Held while a call uses the descriptor, so that `close` cannot free its number in between.
        self._life = threading.Lock()
        self._closed = False
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)

    def wait_for_bytes(self, num_bytes: int) -> None:
        """Wait until this many bytes can be received, or the connection has ended. They must be
        sure to come. Unlike a call that receives them, this wakes once and not for every segment.
        """
        level, option = socket.SOL_SOCKET, socket.SO_RCVLOWAT
        try:
            self._sock.setsockopt(level, option, num_bytes)
            self._readable.poll()
            # A call that receives less than the mark would wait for the mark as well.
            self._sock.setsockopt(level, option, 1)
        except OSError as error:
            raise lost(error) from error

    def unsent_bytes(self) -> int:
        with self._life:
            if self._closed:
                return 0
            try:
                raw = fcntl.ioctl(self._sock.fileno(), termios.TIOCOUTQ, bytes(4))
            # fileno() is -1 after SSLContext.wrap_socket detached this socket, which is a
            # ValueError.
            except (OSError, ValueError):  # ended, or handed over to its TLS wrapper
                return 0
        return int(struct.unpack("@i", raw)[0])

    def tcp_info(self) -> TcpInfo | None:
        """The kernel's TCP_INFO of the connection; None once it has ended."""
        with self._life:
            if self._closed:
                return None
            try:
                return tcp_info.parse(
                    self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, tcp_info.SIZE)
                )
            except OSError:
                return None

    def congestion(self) -> str:
        """The name of the socket's congestion control; "" once it has ended."""
        with self._life:
            if self._closed:
                return ""
            try:
                raw = self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
            except OSError:
                return ""
        return raw.split(b"\0", 1)[0].decode()

    def send_buffer_bytes(self) -> int:
        """SO_SNDBUF, which counts the kernel's overhead as well; 0 once the socket has ended."""
        with self._life:
            if self._closed:
                return 0
            try:
                return self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
            except OSError:
                return 0

    def grow_send_buffer(self) -> int:
        """Double the send buffer within the kernel's limits (CAP_NET_ADMIN may exceed them);
        returns its size in bytes.
        """
        with self._life:
            if self._closed:
                return 0
            try:
                return grow_send_buffer(self._sock)
            except OSError:
                return 0

    def abort(self) -> None:
        """As Stream.abort."""
        with self._life:
            if not self._closed:
                # The base class's method: SSLSocket's own would drop the TLS state under a reader.
                with suppress(OSError):  # not connected any more, which is what was wanted
                    socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def finish(self) -> None:
        """Send FIN: nothing more is sent, and what was sent still arrives."""
        with self._life:
            if not self._closed:
                with suppress(OSError):  # the peer was faster
                    socket.socket.shutdown(self._sock, socket.SHUT_WR)

    def close(self) -> None:
        # close() alone does not wake a thread that sleeps in recv on the same descriptor.
        self.abort()
        with self._life:
            self._closed = True
            self._sock.close()


class PlainStream(SocketOwner):
    """TCP without TLS."""

    def __init__(self, sock: socket.socket, *, is_near: bool = True) -> None:
        super().__init__(sock)
        self._is_near = is_near

    def send(self, buffers: Sequence[Buffer]) -> None:
        pending = list(buffers)
        while pending:
            try:
                count = self._sock.sendmsg(pending[:IOV_MAX])
            except OSError as error:
                raise lost(error) from error
            pending = _skip(pending, count)

    def send_some(self, buffers: Sequence[Buffer]) -> list[Buffer]:
        try:
            count = self._sock.sendmsg(buffers[:IOV_MAX], (), socket.MSG_DONTWAIT)
        except BlockingIOError:
            count = 0
        except OSError as error:
            raise lost(error) from error
        return _skip(list(buffers), count)

    def try_send(self, data: Buffer) -> int:
        try:
            return self._sock.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise lost(error) from error

    def receive(self, buffers: Sequence[memoryview], *, fill: bool) -> int:
        if not fill:
            return self._receive(buffers, 0)
        # On a near path it is faster to copy each segment while it is in the processor's cache.
        # On a far one segments trickle in, and waking for each costs more than all copies.
        if not self._is_near:
            num_bytes = sum(map(len, buffers))
            self.wait_for_bytes(min(num_bytes, MAX_WAIT_BYTES))
            if num_bytes > MAX_WAIT_BYTES:
                return self._receive(buffers, 0)
        return self._receive(buffers, socket.MSG_WAITALL)

    def try_receive(self, buffers: Sequence[memoryview]) -> int:
        try:
            return self._receive(buffers, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0

    def wait_readable(self, timeout_s: float) -> bool:
        """As Stream.wait_readable."""
        return bool(self._readable.poll(1e3 * timeout_s))

    def _receive(self, buffers: Sequence[memoryview], flags: int) -> int:
        try:
            if len(buffers) == 1:
                count = self._sock.recv_into(buffers[0], 0, flags)
            else:
                count = self._sock.recvmsg_into(buffers[:IOV_MAX], 0, flags)[0]
        except BlockingIOError:
            raise
        except OSError as error:
            raise lost(error) from error
        if not count:
            raise LinkError("lost", "the peer closed the connection")
        return count


def _skip(buffers: list[Buffer], count: int) -> list[Buffer]:
    for index, buffer in enumerate(buffers):
        if count < len(buffer):
            rest: list[Buffer] = [memoryview(buffer)[count:]]
            return rest + buffers[index + 1 :]
        count -= len(buffer)
    return []


def lost(error: Exception) -> TransportError:
    """The transport's error for an exception of a socket."""
    reason = getattr(error, "strerror", None) or str(error)
    return LinkError("lost", f"connection lost: {reason}")
