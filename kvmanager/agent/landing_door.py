"""Lets senders into reserved landings: the agent's `LandingRegistry`, called from receiver threads.

It does not know states, leases or engines. Inside is only what is reserved now; the event loop puts
landings in and takes them out, receiver threads look them up and hand their news to the loop.
"""

from __future__ import annotations

import hmac
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from transport import ByteSpace, Refused, TransportError


class LandingNews(Protocol):
    """Called from receiver threads; hands over to the event loop."""

    def landing_accepted(self, transfer_id: bytes) -> None: ...

    def landing_complete(self, transfer_id: bytes) -> None: ...

    def landing_failed(self, transfer_id: bytes, reason: str) -> None: ...


@dataclass(frozen=True, slots=True)
class _Open:
    token: bytes
    fingerprint: bytes
    space: ByteSpace


class LandingDoor:
    """See the module text. All methods are thread-safe and immediate."""

    def __init__(self, news: LandingNews, on_refused: Callable[[str], None]) -> None:
        self._news = news
        self._on_refused = on_refused
        self._lock = threading.Lock()
        self._open: dict[bytes, _Open] = {}

    def admit(self, transfer_id: bytes, token: bytes, fingerprint: bytes, space: ByteSpace) -> None:
        """From now on a sender with this token is let into `space`."""
        with self._lock:
            self._open[transfer_id] = _Open(token, fingerprint, space)

    def shut(self, transfer_id: bytes) -> None:
        """Nobody is let in any more. Who is inside is the receiver's to drop."""
        with self._lock:
            self._open.pop(transfer_id, None)

    def accept(
        self, transfer_id: bytes, token: bytes, fingerprint: bytes, nbytes: int
    ) -> ByteSpace:
        with self._lock:
            landing = self._open.get(transfer_id)
        if landing is None:
            raise self._refusal("no_landing", "no landing is reserved for this transfer")
        if not hmac.compare_digest(landing.token, token):
            raise self._refusal("bad_token", "wrong token for this landing")
        if not hmac.compare_digest(landing.fingerprint, fingerprint):
            raise self._refusal(
                "bad_layout",
                f"the landing has KV layout {landing.fingerprint.hex()[:16]}, "
                f"the sender {fingerprint.hex()[:16]}",
            )
        if landing.space.nbytes != nbytes:
            raise self._refusal(
                "bad_size", f"the landing holds {landing.space.nbytes} bytes, not {nbytes}"
            )
        self._news.landing_accepted(transfer_id)
        return landing.space

    def on_complete(self, transfer_id: bytes) -> None:
        self._news.landing_complete(transfer_id)

    def on_failed(self, transfer_id: bytes, error: TransportError) -> None:
        self._news.landing_failed(transfer_id, f"{error.code}: {error.message}")

    def _refusal(self, code: str, message: str) -> Refused:
        self._on_refused(code)
        return Refused(code, message)
