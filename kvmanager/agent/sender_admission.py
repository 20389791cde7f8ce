"""Admits senders to reserved landings: the agent's `LandingRegistry`, called from receiver threads.

It does not know states, leases or engines, only the landings that are reserved now. The event loop
adds and removes them. Receiver threads look them up and post events to the loop.
"""

from __future__ import annotations

import hmac
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from transport import ByteSpace, Refused, TransportError


class TransferNews(Protocol):
    """Receives the events of transfers, on the event loop."""

    # `AgentTransfers` implements it. It owns this module's objects, so they cannot import it.

    def landing_accepted(self, transfer_id: bytes) -> None: ...

    def landing_complete(self, transfer_id: bytes) -> None: ...

    def landing_failed(self, transfer_id: bytes, reason: str) -> None: ...

    def landing_dropped(self, transfer_id: bytes) -> None: ...

    def outbox_ended(self, transfer_id: bytes, error: str | None) -> None: ...


@dataclass(frozen=True, slots=True)
class AdmittedLanding:
    """Where a sender with this token may write: `space`, or its beginning `short`."""

    token: bytes
    fingerprint: bytes
    space: ByteSpace
    short: ByteSpace | None = None

    def of_size(self, nbytes: int) -> ByteSpace | None:
        """The space for a transfer of this size; None: such a transfer is not admitted."""
        spaces = (self.space, self.short)
        return next((one for one in spaces if one is not None and one.nbytes == nbytes), None)

    def zero_behind(self, nbytes: int) -> None:
        """Fill the bytes behind a transfer of this size with zeros: they may be another's."""
        if nbytes < self.space.nbytes:
            for view in self.space.views(nbytes, self.space.nbytes - nbytes):
                np.frombuffer(view, dtype=np.uint8)[:] = 0


class SenderAdmission:
    """The landings that senders may fill. All methods are thread-safe and do not block."""

    def __init__(
        self,
        news: TransferNews,
        post: Callable[..., None],
        on_refused: Callable[[str], None],
    ) -> None:
        """`post` calls a method of `news` on the event loop."""
        self._news = news
        self._post = post
        self._on_refused = on_refused
        self._lock = threading.Lock()
        self._open: dict[bytes, AdmittedLanding] = {}
        self._accepted: set[bytes] = set()

    def admit(self, transfer_id: bytes, landing: AdmittedLanding) -> None:
        """Admit its sender from now on."""
        with self._lock:
            self._open[transfer_id] = landing

    def revoke(self, transfer_id: bytes) -> None:
        """Admit no other sender. The receiver drops a sender that was admitted before."""
        with self._lock:
            self._open.pop(transfer_id, None)
            self._accepted.discard(transfer_id)

    def take(self, transfer_id: bytes, token: bytes, fingerprint: bytes, nbytes: int) -> None:
        """Check an engine of this agent as a sender is checked, and admit no sender after it.
        Raises Refused as `accept` does, also if a sender was admitted before.
        """
        with self._lock:
            landing, _ = self._check(transfer_id, token, fingerprint, nbytes)
            if transfer_id in self._accepted:
                raise self._refusal("busy", "a sender fills this landing already")
            del self._open[transfer_id]
        landing.zero_behind(nbytes)

    def accept(
        self, transfer_id: bytes, token: bytes, fingerprint: bytes, nbytes: int
    ) -> ByteSpace:
        with self._lock:
            landing, space = self._check(transfer_id, token, fingerprint, nbytes)
            is_first = transfer_id not in self._accepted
            self._accepted.add(transfer_id)
        if is_first:
            landing.zero_behind(nbytes)
        self._post(self._news.landing_accepted, transfer_id)
        return space

    def on_complete(self, transfer_id: bytes) -> None:
        self._post(self._news.landing_complete, transfer_id)

    def on_failed(self, transfer_id: bytes, error: TransportError) -> None:
        message = f"{error.code}: {error.message}"
        self._post(self._news.landing_failed, transfer_id, message)

    def _check(
        self, transfer_id: bytes, token: bytes, fingerprint: bytes, nbytes: int
    ) -> tuple[AdmittedLanding, ByteSpace]:
        landing = self._open.get(transfer_id)
        if landing is None:
            raise self._refusal("no_landing", "no landing is reserved for this transfer")
        # In constant time: how long a refusal takes must not tell how much of a guess was right.
        if not hmac.compare_digest(landing.token, token):
            raise self._refusal("bad_token", "wrong token for this landing")
        if not hmac.compare_digest(landing.fingerprint, fingerprint):
            raise self._refusal(
                "bad_layout",
                f"the landing has KV layout {landing.fingerprint.hex()[:16]}, "
                f"the sender {fingerprint.hex()[:16]}",
            )
        space = landing.of_size(nbytes)
        if space is None:
            raise self._refusal(
                "bad_size", f"the landing holds {landing.space.nbytes} bytes, not {nbytes}"
            )
        return landing, space

    def _refusal(self, code: str, message: str) -> Refused:
        self._on_refused(code)
        return Refused(code, message)
