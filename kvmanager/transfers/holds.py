"""The holders of a transfer's blocks: those who may still touch them, so that they are not free.

It does not know why a transfer is over or what its bytes mean.

The transport is the first holder of a record, since sockets write into a landing and read from an
outbox. Engines are holders while they may touch the memory. Blocks go back to the allocator when
the transfer is over and no holder is left. An engine that does not answer is removed as a holder
when its process has ended, or some time after the transfer's end, when a copy under way must have
finished. The transport and the copies of the prefix cache always answer, so time does not remove
them.

A record may borrow the blocks of another one instead of having its own: an engine then fills a
landing of its own agent. The lender keeps the blocks until the borrower has no holder any more.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from kvmanager.transfers.blocks import BlockAllocator, Run

TRANSPORT: Final = -1
"""The holder that stands for the transport's threads; engines are connection ids from 0 up."""
PROMOTION: Final = -2
"""The holder that stands for copying what landed into the prefix cache."""
BORROWER: Final = -3
"""The holder that stands for another record that was lent the blocks (`BlockHolds.borrow`)."""
_OURS: Final = frozenset({TRANSPORT, PROMOTION, BORROWER})


class Kind(StrEnum):
    """The two ends of a transfer. One agent may have both ends of the same transfer."""

    LANDING = "landing"
    OUTBOX = "outbox"


Key = tuple[Kind, bytes]


@dataclass(slots=True)
class _Record:
    runs: list[Run]
    num_blocks: int
    lender: Key | None = None
    """Whose blocks these are; this record then counts none, and `runs` is empty."""
    holders: set[int] = field(default_factory=lambda: {TRANSPORT})
    drained_at_s: float | None = None  # set when the transfer is over


class BlockHolds:
    """The blocks of all transfers of one arena. Single-threaded; time is an argument.

    `make_room(num_blocks)` is called when fewer blocks are free than a transfer needs, so that
    other users of the arena may give some back. `on_freed(key)` is called when nobody touches a
    transfer's memory any more.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        *,
        make_room: Callable[[int], object] | None = None,
        on_freed: Callable[[Key], object] | None = None,
    ) -> None:
        self._allocator = allocator
        self._make_room = make_room
        self._on_freed = on_freed
        self._records: dict[Key, _Record] = {}
        self._num_blocks = dict.fromkeys(Kind, 0)

    def __contains__(self, key: Key) -> bool:
        return key in self._records

    def num_blocks(self, kind: Kind) -> int:
        """Blocks held for transfers of one kind, those that are over but not yet free included."""
        return self._num_blocks[kind]

    def take(self, key: Key, num_blocks: int) -> list[Run]:
        """Blocks for a new transfer, held by the transport. Raises OutOfBlocks."""
        if key in self._records:
            raise ValueError(f"{key} has blocks already")
        if num_blocks > self._allocator.num_free and self._make_room is not None:
            self._make_room(num_blocks)
        runs = self._allocator.allocate(num_blocks)
        self._records[key] = _Record(runs, num_blocks)
        self._num_blocks[key[0]] += num_blocks
        return runs

    def borrow(self, key: Key, lender: Key) -> None:
        """Begin a new transfer, held by the transport, on the blocks of `lender`, which must have
        some.
        """
        if key in self._records:
            raise ValueError(f"{key} has blocks already")
        self._records[lender].holders.add(BORROWER)
        self._records[key] = _Record([], 0, lender)

    def hold(self, key: Key, holder: int) -> None:
        """Add a holder, who may touch the memory from now on."""
        self._records[key].holders.add(holder)

    def release(self, key: Key, holder: int) -> None:
        """Remove a holder, who does not touch the memory any more. Unknown ones are ignored."""
        record = self._records.get(key)
        if record is not None:
            record.holders.discard(holder)
            self._free_if_possible(key, record)

    def release_engines(self, key: Key) -> None:
        """Remove all engines: by the protocol none touches the memory any more."""
        record = self._records.get(key)
        if record is not None:
            record.holders &= _OURS
            self._free_if_possible(key, record)

    def end_transfer(self, key: Key, drained_at_s: float) -> None:
        """The transfer is over: free its blocks once nobody holds them.

        Engines that have not released them by `drained_at_s` count as done.
        """
        record = self._records.get(key)
        # The first end counts: a later one must not give engines more time.
        if record is not None and record.drained_at_s is None:
            record.drained_at_s = drained_at_s
            self._free_if_possible(key, record)

    def holders(self, key: Key) -> frozenset[int]:
        """The engines that may touch the memory now."""
        record = self._records.get(key)
        return frozenset(record.holders - _OURS) if record else frozenset()

    def process_gone(self, holder: int) -> None:
        """Remove an engine whose process has ended."""
        # A copy, because freeing removes records.
        for key, record in list(self._records.items()):
            if holder in record.holders:
                record.holders.discard(holder)
                self._free_if_possible(key, record)

    def expire(self, now_s: float) -> list[Key]:
        """Remove engines that did not answer in time. Returns the transfers of such engines."""
        late = []
        for key, record in list(self._records.items()):
            waits = record.drained_at_s is not None and record.drained_at_s <= now_s
            if waits and record.holders - _OURS:
                record.holders &= _OURS
                late.append(key)
                self._free_if_possible(key, record)
        return late

    def check_invariants(self, keys_in_use: Iterable[Key], others: Iterable[Run] = ()) -> None:
        """Raises AssertionError unless the books add up and every key in use has its blocks.

        `others`: what somebody else has of the arena.
        """
        self._allocator.check_invariants()
        held = [run for record in self._records.values() for run in record.runs]
        everything = sorted([*held, *others, *self._allocator.free_runs()])
        position = 0
        for run in everything:
            assert run.first == position, f"{run} overlaps or leaves a hole at {position}"
            position = run.end
        assert position == self._allocator.num_blocks
        for kind in Kind:
            records = [r for (k, _), r in self._records.items() if k is kind]
            assert self._num_blocks[kind] == sum(r.num_blocks for r in records)
        lenders = {record.lender for record in self._records.values()}
        for key, record in self._records.items():
            assert (key in lenders) == (BORROWER in record.holders), f"{key} lends to nobody"
            assert record.holders or record.drained_at_s is None, f"{key} should be free"
        for key in keys_in_use:
            assert key in self._records, f"{key} lost its blocks while in use"

    def _free_if_possible(self, key: Key, record: _Record) -> None:
        if record.drained_at_s is not None and not record.holders:
            del self._records[key]
            self._num_blocks[key[0]] -= record.num_blocks
            if record.runs:
                self._allocator.free(record.runs)
            if record.lender is not None:
                self.release(record.lender, BORROWER)
            if self._on_freed is not None:
                self._on_freed(key)
