"""One incoming transfer: which bytes are verified, which connection may write where, how it ends.

States: OPEN -> COMPLETE when the last byte is verified and, if the sender promised a digest, the
digest agreed; OPEN -> FAILED | CANCELLED by `end`. Claims are given out only in OPEN. These rules
hold at every step (`check_invariants`):

- Memory is written only under a claim: before a connection reads a DATA body, it claims the
  unverified part of the range. Claims of different connections never overlap each other, and never
  overlap verified bytes. So a verified byte is never written again, whatever a late, duplicate or
  damaged frame says.
- A frame whose range is wholly unclaimed and unverified is read straight into its place (DIRECT). A
  frame that repeats verified bytes is read into scratch memory, and the missing bytes are copied
  after its checksum held (SCRATCH).
- A range that another connection has claimed is a CONFLICT. The caller waits for that connection's
  frame, or closes the connection and waits for its claim, and then claims again.
- After the end, once no claim is left, nothing writes, and the ByteSpace is released.

This is a monitor: methods take one lock and may be called from any thread. Only `wait_quiet`,
`wait_claimable` and `wait_settled` block. Knows no frame, no socket and no clock.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum

from transport.errors import PeerError
from transport.interfaces import ByteSpace, TransferState
from transport.wire.digest import digest_of
from transport.wire.ranges import IntervalSet, Range, overlap


class Destination(Enum):
    """The place to which the body of a DATA frame has to go."""

    DIRECT = "direct"
    SCRATCH = "scratch"
    DISCARD = "discard"
    CONFLICT = "conflict"


# Not frozen, because a frozen one takes three times as long to make, and every frame needs one.
@dataclass(slots=True)
class ClaimAnswer:
    """The answer to a claim. `views` is set for DIRECT, `rivals` (connection ids) for CONFLICT."""

    place: Destination
    views: list[memoryview] = field(default_factory=list)
    rivals: frozenset[int] = frozenset()


class IncomingTransfer:
    """The claims, the verified bytes and the end of one incoming transfer."""

    def __init__(
        self,
        transfer_id: bytes,
        *,
        token: bytes,
        fingerprint: bytes,
        space: ByteSpace,
        max_ranges: int,
        wants_digest: bool = False,
    ) -> None:
        self.transfer_id = transfer_id
        self.token = token
        self.fingerprint = fingerprint
        self.nbytes = space.nbytes
        self.state = TransferState.OPEN
        self.failure: tuple[str, str] = ("", "")
        """(code, message) told to the sender once the state is FAILED or CANCELLED."""
        self.attached: set[int] = set()
        """Connections that opened it. The lock of `IncomingTransfers` guards the set."""
        self._space: ByteSpace | None = space
        self._max_ranges = max_ranges
        self._verified = IntervalSet()
        self._final_bytes: int | None = None  # verified bytes, once the ranges are forgotten
        self._claims: dict[int, list[Range]] = {}
        self._received_again_bytes = 0
        self.wants_digest = wants_digest
        self._digest: bytes | None = None  # as the sender computed it
        self._is_judged = False  # a thread has taken on `judge`, so no other may
        self._is_being_judged = False  # that thread may be reading the memory now
        self._settled = False
        self._changed = threading.Condition()

    def verified(self) -> list[Range]:
        with self._changed:
            return list(self._verified)

    @property
    def verified_bytes(self) -> int:
        return self._verified.total if self._final_bytes is None else self._final_bytes

    @property
    def received_again_bytes(self) -> int:
        return self._received_again_bytes

    def claim(self, connection: int, start: int, end: int) -> ClaimAnswer:
        """Ask to write [start, end). The caller must end DIRECT and SCRATCH with `commit` or
        `abandon`.

        Raises PeerError("protocol") for a range outside the transfer. Exceptions of the ByteSpace
        pass through.
        """
        if end > self.nbytes:
            raise PeerError(
                "protocol", f"DATA up to byte {end} of a transfer that has {self.nbytes}"
            )
        with self._changed:
            # The sender has not heard of the end yet. Its frame must still be read, because the
            # next frame begins behind it.
            if self.state is not TransferState.OPEN or self._space is None:
                return ClaimAnswer(Destination.DISCARD)
            missing = self._verified.gaps(start, end)
            rivals = self._rivals(connection, missing)
            if rivals:
                return ClaimAnswer(Destination.CONFLICT, rivals=rivals)
            # Verified bytes may be in use already: only gaps are written, from a copy of the frame.
            if missing != [(start, end)]:
                self._claims[connection] = missing
                return ClaimAnswer(Destination.SCRATCH)
            placement = ClaimAnswer(Destination.DIRECT, self._space.views(start, end - start))
            self._claims[connection] = missing
            return placement

    def commit(self, connection: int, start: int, end: int, scratch: memoryview | None) -> bool:
        """Count [start, end) as verified: the claimed frame arrived and its checksum held.
        `scratch` holds the frame unless it was DIRECT.

        True when nothing is missing any more; the caller must then call `judge`, and nobody else
        does. False otherwise, and also when the transfer has ended in between; then nothing is
        counted. Raises PeerError("fragmented") at the limit of separate ranges.
        """
        with self._changed:
            missing = self._claims.pop(connection, [])
            try:
                if self.state is not TransferState.OPEN:
                    return False
                if scratch is not None:
                    self._copy(missing, start, scratch)
                # The parts that were not missing are verified, so all of [start, end) is now.
                gained = self._verified.add(start, end) if missing else 0
                self._received_again_bytes += end - start - gained
                if len(self._verified) > self._max_ranges:
                    raise PeerError("fragmented", f"more than {self._max_ranges} separate ranges")
                return self._may_judge()
            finally:
                self._release_space()
                self._changed.notify_all()

    def expect_digest(self, digest: bytes) -> bool:
        """Take the sender's digest of the whole transfer. The result is that of `commit`."""
        with self._changed:
            self._digest = digest
            return self._may_judge()

    def is_all_there(self) -> bool:
        """As `commit`, for a transfer of 0 bytes, which no DATA frame completes."""
        with self._changed:
            return not self.nbytes and self._may_judge()

    def judge(self) -> bool:
        """Compare the digest, if the sender promised one, and complete the transfer.

        False when the digests differ (the transfer stays open, and the caller must end it) or when
        the transfer has ended in between.
        """
        # Without the lock: the digest of gigabytes takes seconds, for which other connections'
        # claims and acknowledgements would wait.
        space = self._space
        agrees = True
        try:
            if self.wants_digest and space is not None:
                agrees = digest_of(space) == self._digest
        except BaseException:
            with self._changed:
                self._is_being_judged = False
                self._changed.notify_all()
            raise
        finally:
            del space
        with self._changed:
            if self.state is not TransferState.OPEN or not agrees:
                self._is_being_judged = False
                self._release_space()
                self._changed.notify_all()
                return False
            self.state = TransferState.COMPLETE
            self._is_being_judged = False
            self._space = None
            self._changed.notify_all()
            return True

    def _may_judge(self) -> bool:
        if self.state is not TransferState.OPEN or self._is_judged:
            return False
        # The digest may arrive before the last bytes, on another connection.
        if self._verified.total < self.nbytes or (self.wants_digest and self._digest is None):
            return False
        self._is_judged = self._is_being_judged = True
        return True

    def abandon(self, connection: int) -> None:
        """The connection will not write any more: give back its claim, if it has one."""
        with self._changed:
            self._claims.pop(connection, None)
            self._release_space()
            self._changed.notify_all()

    def end(self, state: TransferState, code: str, message: str) -> bool:
        """End the transfer for this reason: no more claims are given out. False when it has ended
        before.
        """
        with self._changed:
            if self.state is not TransferState.OPEN:
                return False
            self.state = state
            self.failure = (code, message)
            self._release_space()
            self._changed.notify_all()
            return True

    def wait_quiet(self, timeout_s: float | None) -> frozenset[int]:
        """Wait until no claim is left and nobody reads the memory. Returns the connections that
        still hold a claim at the timeout.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: not self._claims and not self._is_being_judged, timeout_s
            )
            self._release_space()
            return frozenset(self._claims)

    def settle(self) -> None:
        """The registry knows of the end, so the sender may be told from now on."""
        with self._changed:
            self._settled = True
            self._changed.notify_all()

    def wait_settled(self, timeout_s: float) -> bool:
        """Wait until `settle`; False at the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self._settled, timeout_s)

    def wait_claimable(self, rivals: Collection[int], timeout_s: float) -> bool:
        """Wait until none of `rivals` holds a claim; False at the timeout."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not any(rival in self._claims for rival in rivals), timeout_s
            )

    def check_invariants(self) -> None:
        """Raise AssertionError unless claims and verified bytes are disjoint."""
        with self._changed:
            claimed = IntervalSet()
            for ranges in self._claims.values():
                for start, end in ranges:
                    assert not self._verified.overlaps(start, end), "claim on verified bytes"
                    assert claimed.add(start, end) == end - start, "overlapping claims"
            if self.state is TransferState.COMPLETE:
                assert self._verified.total == self.nbytes
                assert not any(self._claims.values())

    def _rivals(self, connection: int, missing: list[Range]) -> frozenset[int]:
        return frozenset(
            other
            for other, ranges in self._claims.items()
            if other != connection and overlap(ranges, missing)
        )

    def _copy(self, missing: list[Range], start: int, scratch: memoryview) -> None:
        assert self._space is not None
        for first, last in missing:
            source = scratch[first - start : last - start]
            for view in self._space.views(first, last - first):
                view[:] = source[: view.nbytes]
                source = source[view.nbytes :]

    def _release_space(self) -> None:
        is_read = self._claims or self._is_being_judged
        if self.state is not TransferState.OPEN and not is_read:
            self._space = None
            if self.state is not TransferState.COMPLETE and self._final_bytes is None:
                self._final_bytes = self._verified.total
                # An ended transfer is remembered for tombstone_s, so its ranges are not kept.
                self._verified = IntervalSet()
