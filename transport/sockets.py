"""TCP and TLS sockets as streams that several threads may share. Knows no frame and no transfer.

One thread receives, one sends, any may `abort`. The file descriptor is closed by `close` only,
which the owner calls when both are done, so that no thread ever touches a descriptor that the
kernel has given to somebody else.

Plain sockets are blocking: a thread that sends or receives sleeps in the kernel without the GIL and
without a second system call for readiness. An OpenSSL connection must not be used by two threads at
once, so a TLS socket is non-blocking, each operation takes a lock, and waiting happens outside of
it.
"""

from __future__ import annotations

import fcntl
import ipaddress
import logging
import select
import socket
import ssl
import struct
import termios
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from transport.config import Endpoint, TlsFiles, TransportConfig
from transport.errors import LinkError, LocalError, PeerError, TransportError

logger = logging.getLogger("prfaas.transport")

Buffer = memoryview | bytes
Address = tuple[object, ...]
"""What getaddrinfo calls sockaddr: the host first."""
IOV_MAX = 1024


class Stream(Protocol):
    """One connected socket. Every method but `close` raises LinkError("lost") or PeerError("tls")
    when it ended.
    """

    def send(self, buffers: Sequence[Buffer]) -> None:
        """Send all of it, however long that takes."""
        ...

    def try_send(self, data: Buffer) -> int:
        """Send what fits now; 0 when nothing does."""
        ...

    def receive(self, buffers: Sequence[memoryview], *, fill: bool) -> int:
        """Wait for bytes and store them; with `fill`, preferably until the buffers are full."""
        ...

    def try_receive(self, buffers: Sequence[memoryview]) -> int:
        """Store what is there now; 0 when nothing is."""
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
    """A socket with a safe end: the part that all streams share."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._life = threading.Lock()
        self._closed = False

    def unsent_bytes(self) -> int:
        with self._life:
            if self._closed:
                return 0
            try:
                raw = fcntl.ioctl(self._sock.fileno(), termios.TIOCOUTQ, bytes(4))
            except (OSError, ValueError):  # ended, or handed over to its TLS wrapper
                return 0
        return int(struct.unpack("@i", raw)[0])

    def abort(self) -> None:
        """As Stream.abort."""
        with self._life:
            if not self._closed:
                # The base class's method: SSLSocket's own would drop the TLS state under a reader.
                with suppress(OSError):  # not connected any more, which is what was wanted
                    socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def finish(self) -> None:
        """Send nothing more; what was sent still arrives."""
        with self._life:
            if not self._closed:
                with suppress(OSError):  # the peer was faster
                    socket.socket.shutdown(self._sock, socket.SHUT_WR)

    def close(self) -> None:
        self.abort()
        with self._life:
            self._closed = True
            self._sock.close()


class PlainStream(SocketOwner):
    """TCP without TLS."""

    def send(self, buffers: Sequence[Buffer]) -> None:
        pending = list(buffers)
        while pending:
            try:
                count = self._sock.sendmsg(pending[:IOV_MAX])
            except OSError as error:
                raise lost(error) from error
            pending = _skip(pending, count)

    def try_send(self, data: Buffer) -> int:
        try:
            return self._sock.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise lost(error) from error

    def receive(self, buffers: Sequence[memoryview], *, fill: bool) -> int:
        return self._receive(buffers, socket.MSG_WAITALL if fill else 0)

    def try_receive(self, buffers: Sequence[memoryview]) -> int:
        try:
            return self._receive(buffers, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0

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


class TlsStream(SocketOwner):
    """TCP with TLS, after its handshake."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        super().__init__(sock)
        sock.setblocking(False)
        self._tls = sock
        self._use = threading.Lock()

    def send(self, buffers: Sequence[Buffer]) -> None:
        for buffer in buffers:
            rest = memoryview(buffer)
            while rest:
                count, wait_for = self._try_send(rest)
                if count:
                    rest = rest[count:]
                else:
                    self._wait(wait_for)

    def try_send(self, data: Buffer) -> int:
        return self._try_send(data)[0]

    def receive(self, buffers: Sequence[memoryview], *, fill: bool) -> int:
        while True:
            count, wait_for = self._try_receive(buffers[0])
            if count:
                return count
            self._wait(wait_for)

    def try_receive(self, buffers: Sequence[memoryview]) -> int:
        return self._try_receive(buffers[0])[0]

    def _try_send(self, data: Buffer) -> tuple[int, int]:
        with self._use:
            try:
                return self._tls.send(data), 0
            except ssl.SSLWantWriteError:
                return 0, select.POLLOUT
            except ssl.SSLWantReadError:
                return 0, select.POLLIN
            except (OSError, ValueError) as error:
                raise lost(error) from error

    def _try_receive(self, view: memoryview) -> tuple[int, int]:
        with self._use:
            try:
                count = self._tls.recv_into(view)
            except ssl.SSLWantReadError:
                return 0, select.POLLIN
            except ssl.SSLWantWriteError:
                return 0, select.POLLOUT
            except (OSError, ValueError) as error:
                raise lost(error) from error
        if not count:
            raise LinkError("lost", "the peer closed the connection")
        return count, 0

    def _wait(self, wait_for: int) -> None:
        poll = select.poll()
        poll.register(self._sock.fileno(), wait_for)
        poll.poll()


def _skip(buffers: list[Buffer], count: int) -> list[Buffer]:
    for index, buffer in enumerate(buffers):
        if count < len(buffer):
            rest: list[Buffer] = [memoryview(buffer)[count:]]
            return rest + buffers[index + 1 :]
        count -= len(buffer)
    return []


def lost(error: Exception) -> TransportError:
    """What a socket's exception means."""
    if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
        return PeerError("tls", f"TLS failed: {_tls_reason(error)}")
    reason = getattr(error, "strerror", None) or str(error)
    return LinkError("lost", f"connection lost: {reason}")


def _tls_reason(error: ssl.SSLError) -> str:
    reason = (getattr(error, "reason", None) or str(error)).replace("_", " ").lower()
    detail = getattr(error, "verify_message", None)
    return f"{reason}: {detail}" if detail else reason


def client_context(files: TlsFiles) -> ssl.SSLContext:
    """For the sending side; raises LocalError("tls_files")."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = files.server_name is not None
    return _load(context, files)


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """For the receiving side, which demands a certificate too; raises LocalError("tls_files")."""
    return _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), files)


def _load(context: ssl.SSLContext, files: TlsFiles) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(files.cert, files.key)
        context.load_verify_locations(files.ca)
    except (OSError, ssl.SSLError) as error:
        message = f"cannot use {files.cert}, {files.key} and {files.ca} for TLS: {error}"
        raise LocalError("tls_files", message) from error
    return context


def listen(bind: Endpoint) -> socket.socket:
    """A listening socket; raises LocalError("bind")."""
    family = socket.AF_INET6 if ":" in bind.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((bind.host, bind.port))
        sock.listen(256)
    except OSError as error:
        sock.close()
        raise LocalError("bind", f"cannot listen on {bind}: {error.strerror or error}") from error
    return sock


def prepare(sock: socket.socket, config: TransportConfig) -> None:
    """Set the TCP options that both ends use."""
    tcp = socket.IPPROTO_TCP
    sock.setsockopt(tcp, socket.TCP_NODELAY, 1)
    sock.setsockopt(tcp, socket.TCP_USER_TIMEOUT, max(1, int(config.ack_timeout_s * 1000)))
    if config.keepalive_idle_s:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(tcp, socket.TCP_KEEPIDLE, config.keepalive_idle_s)
        sock.setsockopt(tcp, socket.TCP_KEEPINTVL, max(1, config.keepalive_interval_s))
        sock.setsockopt(tcp, socket.TCP_KEEPCNT, max(1, config.keepalive_probes))


def prepare_to_send(sock: socket.socket, config: TransportConfig, address: Address) -> None:
    """Set the TCP options of the end that sends data, before it connects to `address`."""
    prepare(sock, config)
    tcp = socket.IPPROTO_TCP
    if config.notsent_lowat_bytes:
        sock.setsockopt(tcp, socket.TCP_NOTSENT_LOWAT, config.notsent_lowat_bytes)
    is_local = ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback
    congestion = config.loopback_congestion if is_local else config.congestion
    if congestion:
        sock.setsockopt(tcp, socket.TCP_CONGESTION, congestion.encode())


def usable_congestion(name: str | None) -> str | None:
    """`name` if this process may choose it (root, or tcp_allowed_congestion_control), else None."""
    if name is None:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
        except OSError as error:
            logger.warning("kernel refuses TCP congestion control %r: %s", name, error.strerror)
            return None
    return name


def connect(sock: socket.socket, address: Address, timeout_s: float) -> None:
    """Connect and make the socket blocking again; raises LinkError("connect")."""
    sock.settimeout(timeout_s)
    try:
        sock.connect(address)
    except OSError as error:
        reason = "timed out" if isinstance(error, TimeoutError) else error.strerror or error
        raise LinkError("connect", f"cannot connect: {reason}") from error
    sock.settimeout(None)


def wrap_tls(
    context: ssl.SSLContext,
    sock: socket.socket,
    *,
    is_server: bool = False,
    server_name: str | None = None,
) -> ssl.SSLSocket:
    """The socket with TLS on it, before the handshake; it takes over the descriptor."""
    try:
        return context.wrap_socket(
            sock,
            server_side=is_server,
            do_handshake_on_connect=False,
            server_hostname=server_name,
        )
    except (OSError, ValueError) as error:
        raise lost(error) from error


def tls_handshake(sock: ssl.SSLSocket, timeout_s: float) -> TlsStream:
    """Complete the handshake; raises PeerError("tls") or LinkError."""
    sock.settimeout(timeout_s)
    try:
        sock.do_handshake()
    except TimeoutError as error:
        raise LinkError("handshake_timeout", "no answer in the TLS handshake") from error
    except (OSError, ValueError) as error:
        raise lost(error) from error
    return TlsStream(sock)


def resolve(endpoint: Endpoint) -> tuple[socket.AddressFamily, Address]:
    """The first address of an endpoint; raises LinkError("connect")."""
    try:
        found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise LinkError("connect", f"cannot resolve {endpoint}: {error}") from error
    return found[0][0], found[0][4]
