"""Transfers inside one agent: an engine writes its pages straight into the landing.

For such a transfer this module does what sender and receiver do between agents: it ends each of the
two ends with the other, and measures. Nothing is copied and nothing passes a socket. The memory is
the landing's, which the outbox has borrowed (`kvmanager.transfers.outboxes`); who may fill it was
checked as for any sender (`kvmanager.agent.sender_admission`).

    every range is ready     -> the landing is complete, then the outbox
    the outbox ends early    -> the landing fails
    the landing ends early   -> the outbox fails, and its engine stops writing

It does not know engines, layouts, or how memory is held.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvmanager.agent.sender_admission import TransferNews
from kvmanager.agent.transfer_io import OutboxProgress
from kvmanager.transfers.records import OutboxRecord, State
from transport import TransferProgress, TransferState


@dataclass(slots=True)
class _HandOff:
    outbox: OutboxRecord
    first_ready_s: float | None = None
    ready_at_prefill_end: int | None = None
    ended_s: float | None = None


class ArenaHandOffs:
    """The transfers of one agent to itself. It has the methods that `TransferIo` has for outboxes.

    Use it on the event loop. `news` hears of each end within the call that causes it.
    """

    def __init__(self, news: TransferNews, clock_s: Callable[[], float]) -> None:
        self._news = news
        self._clock_s = clock_s
        self._known: dict[bytes, _HandOff] = {}

    def __contains__(self, transfer_id: bytes) -> bool:
        return transfer_id in self._known

    def begin(self, outbox: OutboxRecord) -> None:
        """The outbox was opened on the memory of its landing."""
        self._known[outbox.spec.transfer_id] = _HandOff(outbox)
        self._news.landing_accepted(outbox.spec.transfer_id)

    def ranges_ready(self, transfer_id: bytes, _ranges: list[tuple[int, int]]) -> None:
        """The outbox's record counts the ranges; with the last one the transfer is complete."""
        hand_off = self._known[transfer_id]
        if hand_off.first_ready_s is None:
            hand_off.first_ready_s = self._clock_s()
        if hand_off.outbox.is_filled and self._end(hand_off):
            # The landing first: who reads the outbox's report may then ask for the landing.
            self._news.landing_complete(transfer_id)
            self._news.outbox_ended(transfer_id, None)

    def note_prefill_end(self, transfer_id: bytes) -> None:
        hand_off = self._known[transfer_id]
        hand_off.ready_at_prefill_end = hand_off.outbox.ready.total

    def cancel(self, transfer_id: bytes, reason: str) -> None:
        """The outbox has ended, so that the landing will not be filled."""
        if self._end(self._known[transfer_id]):
            self._news.outbox_ended(transfer_id, reason)
            self._news.landing_failed(transfer_id, reason)

    def landing_over(self, transfer_id: bytes, reason: str) -> None:
        """The landing has ended. Does nothing for one that no engine of this agent fills."""
        hand_off = self._known.get(transfer_id)
        if hand_off is not None and self._end(hand_off):
            self._news.outbox_ended(transfer_id, reason)

    def progress(self, transfer_id: bytes) -> OutboxProgress | None:
        """The progress of an outbox, until `forget`."""
        hand_off = self._known.get(transfer_id)
        if hand_off is None:
            return None
        outbox = hand_off.outbox
        num_bytes = outbox.ready.total
        transfer = TransferProgress(
            state=_PROGRESS_STATE.get(outbox.state, TransferState.FAILED),
            nbytes=outbox.spec.nbytes,
            # A byte that is ready has arrived.
            ready_bytes=num_bytes,
            sent_bytes=num_bytes,
            acked_bytes=num_bytes,
            resent_bytes=0,
            opened_s=outbox.opened_s,
            first_sent_s=hand_off.first_ready_s,
            completed_s=hand_off.ended_s,
            num_connections=0,
        )
        return OutboxProgress(transfer, hand_off.ready_at_prefill_end)

    def forget(self, transfer_id: bytes) -> None:
        """Forget an outbox, whose report nobody will ask for any more."""
        self._known.pop(transfer_id, None)

    def _end(self, hand_off: _HandOff) -> bool:
        """Whether it ends now. Each end causes the other one, which must not cause it again."""
        if hand_off.ended_s is not None:
            return False
        hand_off.ended_s = self._clock_s()
        return True


_PROGRESS_STATE = {State.OPEN: TransferState.OPEN, State.COMPLETE: TransferState.COMPLETE}
