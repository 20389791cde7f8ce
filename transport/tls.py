"""TLS 1.3 with certificates on both sides: contexts from files, the handshake, and the stream
after it. Knows no frame and no transfer.

Most of the cost is AES-GCM. The rest is system calls and copies for each record of 16 KiB. To keep
these few, the stream joins small buffers, corks the socket while it sends and decrypts straight
into the destination. Buffering whole frames in `ssl.MemoryBIO` was measured to cost more than it
saves. Python 3.11 can neither choose the cipher suite of TLS 1.3 (OpenSSL takes AES-256-GCM, a
little slower than AES-128-GCM) nor ask for TLS in the kernel. From 3.12 on, TLS runs in the kernel
where the kernel offers it.
"""

from __future__ import annotations

import re
import select
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from transport.config import TlsFiles
from transport.errors import LinkError, LocalError, PeerError, TransportError
from transport.identity import (
    SCHEME,
    Identity,
    certificate_identities,
    identities_of,
    refusal,
)
from transport.socket_options import is_near
from transport.sockets import MAX_WAIT_BYTES, Buffer, SocketOwner, lost

RECORD_BYTES: Final = 16 * 1024
"""Most payload of one TLS record (RFC 8446, 5.1)."""
SMALL_BYTES: Final = 2 * RECORD_BYTES
"""Buffers up to this size are joined, because a copy costs less than a record of their own."""
JOINED_BYTES: Final = 4 * RECORD_BYTES
HOLD_BYTES: Final = 64 * RECORD_BYTES
"""Most bytes received under one hold of the lock, since another thread may want to send."""


def client_context(files: TlsFiles) -> ssl.SSLContext:
    """For the sending side; raises LocalError("tls_files")."""
    return _loaded(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), files)


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """For the receiving side, which demands a certificate too; raises LocalError("tls_files")."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # No session is ever resumed: each connection must show its certificate (RFC 8446, 2.2).
    context.num_tickets = 0
    return _loaded(context, files)


def _loaded(context: ssl.SSLContext, files: TlsFiles) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.options |= getattr(ssl, "OP_ENABLE_KTLS", 0)
    path = files.ca
    try:
        context.load_verify_locations(files.ca)
        path = files.cert
        # load_cert_chain does not say which of its two files is wrong, so the certificate is
        # loaded alone first.
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(files.cert)
        path = files.key
        # A password must be given: without one OpenSSL asks at the terminal for an encrypted key.
        context.load_cert_chain(files.cert, files.key, password="")
    except (OSError, ssl.SSLError) as error:
        reason = _reason(error) if isinstance(error, ssl.SSLError) else error.strerror
        if path == files.key:
            reason = f"{reason} (with {files.cert})"
        raise LocalError("tls_files", f"cannot use {path} for TLS: {reason}") from error
    return context


@dataclass(frozen=True, slots=True)
class RegionTls:
    """The needs of a handshake: the context, and the region that the other end must be of."""

    context: ssl.SSLContext
    region: str


def client_tls(files: TlsFiles) -> RegionTls:
    """For the sending side; raises LocalError("tls_files")."""
    return RegionTls(client_context(files), own_region(files))


def server_tls(files: TlsFiles) -> RegionTls:
    """For the receiving side; raises LocalError("tls_files")."""
    return RegionTls(server_context(files), own_region(files))


def own_identities(files: TlsFiles) -> tuple[Identity, ...]:
    """The names in one's own certificate; LocalError("tls_files") unless they are of one region."""
    # Only processes with TLS pay for loading it.
    from cryptography import x509

    try:
        certificate = x509.load_pem_x509_certificates(files.cert.read_bytes())[0]
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        found = identities_of(names.get_values_for_type(x509.UniformResourceIdentifier))
    except (OSError, ValueError) as error:
        raise LocalError("tls_files", f"cannot use {files.cert} for TLS: {error}") from error
    except x509.ExtensionNotFound:
        found = ()
    if len({one.region for one in found}) != 1:
        message = (
            f"cannot use {files.cert} for TLS: its URI subject alternative names must say who it "
            f"is in one region, as {SCHEME}REGION/ROLE/NAME"
        )
        raise LocalError("tls_files", message)
    return found


def own_region(files: TlsFiles) -> str:
    """The region of one's own certificate; LocalError("tls_files")."""
    return own_identities(files)[0].region


class TlsStream(SocketOwner):
    """A Stream over TLS, after its handshake.

    Two threads must not use an OpenSSL connection at once. So the socket is non-blocking, each
    operation takes a lock, and waiting happens outside of the lock.
    """

    def __init__(self, sock: ssl.SSLSocket) -> None:
        super().__init__(sock)
        sock.setblocking(False)
        self._tls = sock
        self._is_far = not is_near(sock)
        # The same as recv_into with less Python code per record. typeshed allows bytearrays only.
        self._read: Callable[[int, memoryview], int] = sock.read  # type: ignore[assignment]
        self._use = threading.Lock()
        self._end: TransportError | None = None

    @property
    def peer_names(self) -> str:
        """The names in the other end's certificate."""
        return " ".join(map(str, certificate_identities(self._tls.getpeercert())))

    def wrong_peer(self, region: str) -> str | None:
        """Why the other end may not exchange KVCache with an agent of `region`; None: it may."""
        presented = certificate_identities(self._tls.getpeercert())
        return refusal(presented, region=region, roles={"agent"}, what="the data connection")

    def send(self, buffers: Sequence[Buffer]) -> None:
        pieces = _joined(buffers)
        is_long = sum(map(len, pieces)) > RECORD_BYTES
        # OpenSSL writes record by record, and with TCP_NODELAY each write ends with a short
        # segment. TCP_CORK joins the records into full segments.
        if is_long:
            self._cork(True)
        for piece in pieces:
            rest = memoryview(piece)
            while rest:
                count, wait_for = self._try_send(rest)
                if count:
                    rest = rest[count:]
                else:
                    self._wait(wait_for)
        if is_long:
            self._cork(False)

    def send_some(self, buffers: Sequence[Buffer]) -> list[Buffer]:
        pieces = _joined(buffers)
        is_long = sum(map(len, pieces)) > RECORD_BYTES
        if is_long:
            self._cork(True)
        while pieces:
            count = self.try_send(pieces[0])
            if not count:
                break
            rest = memoryview(pieces[0])[count:]
            pieces[:1] = [rest] if rest else []
        if is_long:
            self._cork(False)
        return pieces

    def try_send(self, data: Buffer) -> int:
        """As Stream.try_send. After 0 the next call must begin with the same bytes, because OpenSSL
        may already have encrypted them into a record (SSL_write(3)).
        """
        return self._try_send(data)[0]

    def wait_readable(self, timeout_s: float) -> bool:
        """As Stream.wait_readable, but returns at once: OpenSSL may hold bytes that poll does not
        see.
        """
        return True

    def receive(self, buffers: Sequence[memoryview], *, fill: bool) -> int:
        total, size = 0, sum(map(len, buffers))
        for view in buffers:
            rest = view
            while rest:
                count, wait_for = self._try_receive(rest)
                total += count
                rest = rest[count:]
                if total and not fill:
                    return total
                # Records are longer than what they hold, and OpenSSL may have one already.
                sure_bytes = min(size - total - RECORD_BYTES, MAX_WAIT_BYTES)
                if wait_for == select.POLLIN and fill and self._is_far and sure_bytes > 0:
                    self.wait_for_bytes(sure_bytes)
                elif wait_for:
                    self._wait(wait_for)
        return total

    def try_receive(self, buffers: Sequence[memoryview]) -> int:
        total = 0
        for view in buffers:
            rest = view
            while rest:
                count, wait_for = self._try_receive(rest)
                total += count
                rest = rest[count:]
                if wait_for:
                    return total
        return total

    def _try_send(self, data: Buffer) -> tuple[int, int]:
        with self._use:
            try:
                return self._tls.send(data), 0
            except ssl.SSLWantWriteError:
                return 0, select.POLLOUT
            except ssl.SSLWantReadError:
                return 0, select.POLLIN
            except (OSError, ValueError) as error:
                raise tls_lost(error) from error

    def _try_receive(self, view: memoryview) -> tuple[int, int]:
        """The number of bytes stored, at most HOLD_BYTES, and the poll event to wait for before
        there can be more (0: none).
        """
        if self._end is not None:
            raise self._taken_end()
        count, wait_for, size = 0, 0, min(len(view), HOLD_BYTES)
        with self._use:
            try:
                while count < size:  # each call yields at most one record
                    got = self._read(size - count, view[count:size])
                    if not got:
                        self._end = LinkError("lost", "the peer closed the connection")
                        break
                    count += got
            except ssl.SSLWantReadError:
                wait_for = select.POLLIN
            except ssl.SSLWantWriteError:
                wait_for = select.POLLOUT
            except (OSError, ValueError) as error:
                self._end = tls_lost(error)
        if self._end is not None and not count:
            # With bytes in hand the error waits for the next call, so that they are not lost.
            raise self._taken_end()
        return count, wait_for

    def _taken_end(self) -> TransportError:
        """Return the error and forget it: its traceback would keep views of a ByteSpace alive."""
        end, self._end = self._end, None
        assert end is not None
        return end

    def _wait(self, wait_for: int) -> None:
        poll = select.poll()
        poll.register(self._sock.fileno(), wait_for)
        poll.poll()

    def _cork(self, is_on: bool) -> None:
        try:
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, is_on)
        except OSError as error:
            raise lost(error) from error


def _joined(buffers: Sequence[Buffer]) -> list[Buffer]:
    """The same bytes, with runs of small buffers joined up to JOINED_BYTES each."""
    pieces: list[Buffer] = []
    run: list[Buffer] = []
    num_bytes = 0
    for buffer in buffers:
        if run and (len(buffer) > SMALL_BYTES or num_bytes + len(buffer) > JOINED_BYTES):
            pieces.append(b"".join(run) if len(run) > 1 else run[0])
            run, num_bytes = [], 0
        if len(buffer) > SMALL_BYTES:
            pieces.append(buffer)
        else:
            run.append(buffer)
            num_bytes += len(buffer)
    if run:
        pieces.append(b"".join(run) if len(run) > 1 else run[0])
    return pieces


def wrap_tls(
    context: ssl.SSLContext,
    sock: socket.socket,
    *,
    is_server: bool = False,
    server_name: str | None = None,
) -> ssl.SSLSocket:
    """Wrap the socket in TLS without a handshake. The result takes over the descriptor."""
    try:
        return context.wrap_socket(
            sock,
            server_side=is_server,
            do_handshake_on_connect=False,
            server_hostname=server_name,
        )
    except (OSError, ValueError) as error:
        raise tls_lost(error) from error


def tls_handshake(sock: ssl.SSLSocket, timeout_s: float) -> TlsStream:
    """Complete the handshake; raises PeerError("tls") or LinkError."""
    sock.settimeout(timeout_s)
    try:
        sock.do_handshake()
    except TimeoutError as error:
        raise LinkError("handshake_timeout", "no answer in the TLS handshake") from error
    except (OSError, ValueError) as error:
        raise tls_lost(error) from error
    return TlsStream(sock)


def tls_lost(error: Exception) -> TransportError:
    """The transport's error for an exception of a TLS socket."""
    # SSLEOFError says that TCP ended without close_notify: the connection was lost, TLS did not
    # fail.
    if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
        return PeerError("tls", f"TLS failed: {_reason(error)}")
    return lost(error)


def _reason(error: ssl.SSLError) -> str:
    reason = (getattr(error, "reason", None) or str(error)).replace("_", " ").lower()
    # OpenSSL names alerts after the protocol that introduced them.
    reason = re.sub(r"^(ssl|tls)v\d+ alert ", "the peer reports: ", reason)
    detail = getattr(error, "verify_message", None)
    return f"{reason}: {detail}" if detail else reason
