"""Sends a small piece of work from the thread that has made it ready, on a lane that it borrows.

This saves the time that a lane's thread takes to wake, which is longer than sending 64 KiB. It is
done only when nothing else waits to be sent, and never blocks: what the kernel does not take at
once is left to the lane. Knows no socket.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from transport.codec.coder import LinkCoder
from transport.config import KIB
from transport.errors import LocalError
from transport.sending.lane import Lane
from transport.sending.link import LinkCore
from transport.sending.link_work import Work
from transport.sending.outgoing import RAW_CODED, Coded, OutgoingState
from transport.sending.waiting_lanes import WaitingLanes

MAX_DIRECT_BYTES = 64 * KIB
"""Most bytes that are sent in this way: some 50 microseconds of the caller's time."""


@dataclass(frozen=True, slots=True)
class Loan:
    lane: Lane
    work: Work


class DirectSending:
    """Lends the waiting lanes of one link to threads that have a little to send."""

    def __init__(
        self, lock: threading.Lock, core: LinkCore, waiting: WaitingLanes[Lane], coder: LinkCoder
    ) -> None:
        self._lock = lock
        self._core = core
        self._waiting = waiting
        self._coder = coder

    def begin(self, transfer: OutgoingState, now_s: float) -> Loan | None:
        """Take all that this transfer has to send, if it is little and all there is to do; the
        caller must then call `send`, without the lock. None: it is work for the lanes.
        """
        dispatch = self._core.dispatch
        if transfer.unsent.total > MAX_DIRECT_BYTES or not dispatch.has_only_data_of(transfer):
            return None
        if dispatch.has_budgets or self._coder.codec_name != "raw":
            return None
        lane = self._waiting.borrow()
        if lane is None:
            return None
        work = self._core.take(lane.connection, now_s)
        if work is None:  # its connection is about to end
            self._waiting.give_back(lane, wakes=True)
            return None
        return Loan(lane, work)

    def send(self, loan: Loan) -> None:
        """Send what was begun, and give the lane back."""
        lane, coded, is_done = loan.lane, None, False
        try:
            coded, is_done = lane.send_now(loan.work), True
        finally:
            if not is_done:
                lane.abort(LocalError("internal", "interrupted in the middle of a frame"))
            self._give_back(loan, coded)

    def _give_back(self, loan: Loan, coded: Coded | None) -> None:
        lane, is_whole = loan.lane, coded is not None
        with self._lock:
            if lane.left_over is None:
                now_s, coded = time.monotonic(), coded or RAW_CODED
                self._core.sent(lane.connection, loan.work, now_s, whole=is_whole, coded=coded)
            # Its own thread ends the connection, and calls listeners, who may hold a lock that the
            # present thread has.
            wakes = lane.left_over is not None or lane.error is not None
            wakes = wakes or self._core.has_effects or self._core.dispatch.has_work
            self._waiting.give_back(lane, wakes=wakes)
