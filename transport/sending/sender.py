"""Sends transfers: the public interface of the sending side. Links are in `sender_link`.

Knows no frame, and not what the bytes of a transfer mean.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from transport.config import TransportConfig
from transport.endpoint import Endpoint
from transport.interfaces import ByteSpace, OutgoingSpec, TransferListener, TransferProgress
from transport.rotating import Rotating
from transport.sending.link_state import LinkState
from transport.sending.outgoing import OutgoingState
from transport.sending.paths import LinkPath
from transport.sending.sender_link import SenderLink
from transport.socket_options import usable_congestion
from transport.tls import client_tls
from transport.wire.ranges import Range

logger = logging.getLogger("prfaas.transport")

TUNE_S = 0.1
"""Time between two observations of a link with transfers by its tuner."""
LINGER_S = 1.0
"""Time for which the watchdog still observes a link that has become idle."""


class OutgoingTransfer:
    """A handle; its methods may be called from any thread, and none but `wait_acked` waits for the
    network.
    """

    def __init__(self, link: SenderLink, transfer: OutgoingState) -> None:
        self._link = link
        self._transfer = transfer

    @property
    def transfer_id(self) -> bytes:
        return self._transfer.spec.transfer_id

    def ready(self, offset: int, length: int) -> None:
        """[offset, offset + length) of the ByteSpace is final and may be sent; repeats are ignored.

        Raises ValueError when the range lies outside of the transfer. Ignored after the end. The
        ByteSpace may be read before this returns.
        """
        self.ready_ranges([(offset, length)])

    def ready_ranges(self, ranges: Sequence[tuple[int, int]]) -> None:
        """As `ready` for each (offset, length), which costs less for many small ranges."""
        found: list[Range] = []
        for offset, length in ranges:
            if offset < 0 or length < 0 or offset + length > self._transfer.nbytes:
                raise ValueError(
                    f"[{offset}, {offset + length}) is outside of {self._transfer.nbytes} bytes"
                )
            found.append((offset, offset + length))
        self._link.ready(self._transfer, found)

    def cancel(self, reason: str) -> None:
        """Cancel the transfer. `on_failed` with code "cancelled" follows once the receiver has
        stopped writing, at the latest after ack_timeout_s. If the transfer completes first,
        `on_complete` is called.
        """
        self._link.cancel(self._transfer, reason)

    def wait_acked(self, num_bytes: int, timeout_s: float) -> bool:
        """Wait until the receiver has acknowledged this many bytes. False: the transfer ended
        before, or the time is over.
        """
        return self._link.wait_acked(self._transfer, num_bytes, timeout_s)

    def progress(self) -> TransferProgress:
        return self._link.progress(self._transfer)


class Sender:
    """Sends any number of transfers to any number of endpoints.

    Raises LocalError("tls_files") when the TLS files cannot be used.
    """

    def __init__(
        self,
        config: TransportConfig,
        routes: Mapping[Endpoint, Sequence[LinkPath]] | None = None,
        hosts: Mapping[Endpoint, str] | None = None,
    ) -> None:
        """`routes`: the paths to endpoints that are reached in several ways. `hosts`: what the
        certificate behind an endpoint must name in place of the endpoint's own host.
        """
        self._routes = dict(routes or {})
        self._hosts = dict(hosts or {})
        self._config = replace(
            config,
            congestion=usable_congestion(config.congestion),
            near_congestion=usable_congestion(config.near_congestion),
        )
        self._tls = Rotating(config.tls, client_tls) if config.tls else None
        self._instance = os.urandom(16)
        # Shared by all links, so that a link that is closed and opened again repeats no number.
        self._connection_numbers = itertools.count(1)
        self._links: dict[Endpoint, SenderLink] = {}
        self._retired: list[SenderLink] = []
        """Links that were idle for long and are closed, until their threads have ended."""
        self._lock = threading.Lock()
        self._stirred = threading.Event()
        self._rests = True  # whether the watchdog sleeps for longer than a tick
        self._closed = False  # no more transfers
        self._stopped = False  # no more lanes
        self._watchdog = threading.Thread(
            target=self._watch, name="prfaas-send-watchdog", daemon=True
        )
        self._watchdog.start()

    def open(
        self, spec: OutgoingSpec, space: ByteSpace, listener: TransferListener
    ) -> OutgoingTransfer:
        """Begin a transfer of `space.nbytes` bytes. Never waits for the network: the listener is
        told whether the receiver can be reached and takes it. Raises ValueError when the id is in
        use, RuntimeError after close.
        """
        with self._lock:
            link = self._link(spec.endpoint)
            transfer = link.open(spec, space, listener)
        return OutgoingTransfer(link, transfer)

    def warm(self, endpoint: Endpoint) -> None:
        """Connect now, so that the first transfer finds open connections."""
        with self._lock:
            self._link(endpoint).warm()

    def link_state(self, endpoint: Endpoint) -> LinkState | None:
        """The state of the link to this endpoint; None when there is none."""
        with self._lock:
            link = self._links.get(endpoint)
        return link.state() if link else None

    def link_activity(self) -> dict[Endpoint, bool]:
        """The endpoints that there are links to, and whether each has transfers."""
        with self._lock:
            links = dict(self._links)
        return {endpoint: link.has_transfers for endpoint, link in links.items()}

    def num_connections(self, endpoint: Endpoint) -> int:
        """Established connections to this endpoint."""
        with self._lock:
            link = self._links.get(endpoint)
        return link.num_connections if link else 0

    def close(self, timeout_s: float = 2.0) -> None:
        """Fail open transfers with code "closed" and end all threads. On return, listeners were
        told and no transport thread reads any ByteSpace, unless a warning was logged. A listener
        must not call it.
        """
        with self._lock:
            self._closed = True
            links = [*self._links.values(), *self._retired]
        for link in links:
            link.close()
        deadline_s = time.monotonic() + timeout_s
        for link in links:
            if not link.join(deadline_s):
                logger.warning("threads to %s did not end within %g s", link.endpoint, timeout_s)
        self._stopped = True
        self._stirred.set()
        self._watchdog.join(max(0.1, deadline_s - time.monotonic()))

    def _link(self, endpoint: Endpoint) -> SenderLink:
        if self._closed:
            raise RuntimeError("the sender is closed")
        link = self._links.get(endpoint)
        if link is None:
            link = self._links[endpoint] = SenderLink(
                endpoint,
                self._config,
                self._tls,
                instance=self._instance,
                numbers=self._connection_numbers,
                stir=self._stir,
                paths=self._routes.get(endpoint, ()),
                host=self._hosts.get(endpoint, endpoint.host),
            )
        return link

    def _watch(self) -> None:
        """Apply the timeouts of all links; sleep while nothing runs."""
        while True:
            stopped = self._stopped
            with self._lock:
                links = list(self._links.values())
            now_s = time.monotonic()
            for link in links:
                try:
                    link.tick(now_s)
                    self._retire(link, now_s)
                    if link.has_transfers:  # last: timeouts must not depend on it
                        link.tune(now_s)
                except Exception:
                    # The watchdog must survive: without timeouts a sender would hang for ever.
                    logger.exception("watchdog of the link to %s", link.endpoint)
            if stopped:
                return
            # Set before the pause is computed: a transfer that begins now is either seen there, or
            # wakes this thread.
            self._rests = True
            pause_s = self._pause_s(links, now_s)
            self._rests = pause_s is None or pause_s > self._config.tick_s
            self._stirred.wait(pause_s)
            self._stirred.clear()

    def _stir(self) -> None:
        """Wake the watchdog because a transfer begins, unless it wakes soon anyway. Waking it costs
        the calling thread more than the rest of its call.
        """
        if self._rests:
            self._stirred.set()

    def _pause_s(self, links: list[SenderLink], now_s: float) -> float | None:
        if any(link.is_active or now_s - link.idle_since_s < LINGER_S for link in links):
            return min(self._config.tick_s, TUNE_S)
        return max(self._config.tick_s, self._config.link_idle_timeout_s) if links else None

    def _retire(self, link: SenderLink, now_s: float) -> None:
        """Close a link that has had no transfer for link_idle_timeout_s."""
        if now_s - link.idle_since_s < self._config.link_idle_timeout_s:
            return
        with self._lock:
            if link.has_transfers or self._links.get(link.endpoint) is not link:
                return
            del self._links[link.endpoint]
            self._retired = [one for one in self._retired if not one.join(now_s)]
            self._retired.append(link)
        link.close()
