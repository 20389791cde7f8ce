"""Chooses what a link sends next, and how much: order, pacing, budgets and the size of frames.

It keeps the transfers that have DATA to send (`FairQueue`), and those that have other frames to
send. Pure state, guarded by the link that owns it; time is an argument. Knows no connection.
"""

from __future__ import annotations

from collections.abc import Iterator

from transport.config import TransportConfig
from transport.sending.fair_queue import FairQueue, TokenBucket
from transport.sending.outgoing import OutgoingState
from transport.wire.ranges import Range

FRAME_GRAIN_BYTES = 4096
"""Frames sized here end on a multiple of it, so that no element of a codec is cut."""


class Dispatch:
    """Picks what a link sends next. `note` must be called whenever a transfer has changed."""

    def __init__(self, config: TransportConfig) -> None:
        self.width = config.num_connections
        """Connections that carry DATA."""
        self.frame_bytes = config.frame_bytes
        """Most payload of a frame. The configured size is the least."""
        self.has_budgets = config.pace_bytes_per_s > 0 or config.tenant_bytes_per_s > 0
        """Whether pacing or budgets may delay DATA that could be sent."""
        self._least_bytes = config.frame_bytes
        self._control: dict[bytes, OutgoingState] = {}
        self._queue: FairQueue[OutgoingState] = FairQueue(config.tenant_bytes_per_s)
        self._pace = TokenBucket(config.pace_bytes_per_s)

    @property
    def is_backlogged(self) -> bool:
        """Whether DATA is waiting to be sent."""
        return len(self._queue) > 0

    @property
    def has_work(self) -> bool:
        """Whether anything is waiting to be sent."""
        return bool(self._control) or self.is_backlogged

    def has_only_data_of(self, transfer: OutgoingState) -> bool:
        """Whether DATA of this transfer, and the OPEN before it, is all that waits to be sent."""
        num_opens = 1 if transfer.needs_open else 0
        return (
            len(self._queue) == 1
            and bool(transfer.unsent)
            and not transfer.needs_digest
            and len(self._control) == num_opens
        )

    def note(self, transfer: OutgoingState) -> None:
        """Update whether this transfer has something to send."""
        spec = transfer.spec
        if transfer.has_control:
            self._control[spec.transfer_id] = transfer
        else:
            self._control.pop(spec.transfer_id, None)
        if transfer.unsent:
            self._queue.join(transfer, spec.priority, spec.tenant)
        else:
            self._queue.leave(transfer, spec.priority, spec.tenant)

    def with_control(self) -> list[OutgoingState]:
        """The transfers that have frames other than DATA to send."""
        return list(self._control.values()) if self._control else []

    def in_turn(self, now_s: float) -> Iterator[OutgoingState]:
        """The transfers that may send DATA now, in the order of their turns."""
        if self._pace.ready_at(now_s) <= now_s:
            for transfer, _, _ in self._queue.in_order(now_s):
                yield transfer

    def delay_s(self, now_s: float) -> float | None:
        """Seconds for which pacing or budgets still delay DATA; None when they delay nothing."""
        ready_at_s = self._queue.ready_at(now_s)
        if ready_at_s is None:
            return None
        delay_s = max(ready_at_s, self._pace.ready_at(now_s)) - now_s
        return delay_s if delay_s > 0 else None

    def take(
        self, transfer: OutgoingState, connection: int, max_frame_bytes: int, now_s: float
    ) -> Range | None:
        """The next chunk of this transfer, counted as sent."""
        data = transfer.take(
            connection, min(self._frame_bytes_for(transfer), max_frame_bytes), now_s
        )
        if data is None:
            return None
        spec, num_bytes = transfer.spec, data[1] - data[0]
        self._pace.spend(num_bytes, now_s)
        self._queue.served(transfer, spec.priority, spec.tenant, num_bytes, now_s)
        if not transfer.unsent:
            self._queue.leave(transfer, spec.priority, spec.tenant)
        return data

    def refund(self, num_bytes: int, now_s: float) -> None:
        """Give `num_bytes` back to pacing, which coding saved: pacing counts bytes on the wire."""
        self._pace.spend(-num_bytes, now_s)

    def expects_more(self, transfer: OutgoingState, taken: Range) -> bool:
        """Whether each connection will probably get another chunk like this one at once."""
        return not self.has_budgets and transfer.unsent.total >= self.width * (taken[1] - taken[0])

    def check_invariants(self, transfer: OutgoingState) -> None:
        """Raise AssertionError unless the lists agree with the transfer."""
        spec = transfer.spec
        assert (spec.transfer_id in self._control) == transfer.has_control, "control unseen"
        is_queued = self._queue.has(transfer, spec.priority, spec.tenant)
        assert is_queued == bool(transfer.unsent), "work nobody would find"

    def _frame_bytes_for(self, transfer: OutgoingState) -> int:
        """The size of the transfer's next frame.

        Large frames cost less CPU. Small ones let other transfers in between, and let the
        connections finish together: towards the end of the ready bytes each connection takes half
        of its share of the rest (guided self-scheduling, Polychronopoulos and Kuck 1987).
        """
        least = self._least_bytes
        if len(self._queue) > 1:
            return least
        share = transfer.unsent.total // (2 * self.width)
        share -= share % min(FRAME_GRAIN_BYTES, least)
        return max(least, min(self.frame_bytes, share))
