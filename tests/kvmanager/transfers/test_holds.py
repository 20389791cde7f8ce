"""Who holds a transfer's blocks, and when they are free again."""

import pytest

from kvmanager.transfers.blocks import BlockAllocator
from kvmanager.transfers.holds import PROMOTION, TRANSPORT, BlockHolds, Kind

KEY = (Kind.OUTBOX, b"t" * 16)


@pytest.fixture
def holds() -> BlockHolds:
    """Two blocks of four are held by the transport for one transfer."""
    holds = BlockHolds(BlockAllocator(4))
    holds.take(KEY, 2)
    return holds


def test_blocks_are_free_when_the_transfer_is_over_and_nobody_holds_them(holds: BlockHolds) -> None:
    holds.release(KEY, TRANSPORT)
    assert KEY in holds, "it is not over"
    holds.end_transfer(KEY, 30)
    assert KEY not in holds
    assert holds.num_blocks(Kind.OUTBOX) == 0


def test_the_last_engines_leave_together(holds: BlockHolds) -> None:
    for engine in (0, 1):
        holds.hold(KEY, engine)
    holds.release(KEY, TRANSPORT)
    holds.end_transfer(KEY, 30)
    assert holds.holders(KEY) == {0, 1}
    holds.release_engines(KEY)
    assert KEY not in holds


def test_a_second_end_does_not_prolong_the_drain_time(holds: BlockHolds) -> None:
    holds.hold(KEY, 0)
    holds.end_transfer(KEY, 30)
    holds.end_transfer(KEY, 60)
    assert holds.expire(30) == [KEY]


def test_our_own_holders_are_no_engines(holds: BlockHolds) -> None:
    holds.hold(KEY, PROMOTION)
    assert holds.holders(KEY) == frozenset()
    holds.hold(KEY, 0)
    assert holds.holders(KEY) == {0}
    holds.release_engines(KEY)
    holds.release(KEY, TRANSPORT)
    holds.end_transfer(KEY, 0)
    assert holds.expire(1000) == []
    assert KEY in holds, "the promotion reads it"


def test_one_transfer_takes_blocks_once(holds: BlockHolds) -> None:
    with pytest.raises(ValueError, match="has blocks already"):
        holds.take(KEY, 1)
    assert holds.num_blocks(Kind.OUTBOX) == 2


def test_nothing_is_known_of_a_transfer_without_blocks(holds: BlockHolds) -> None:
    other = (Kind.LANDING, b"t" * 16)
    holds.end_transfer(other, 0)
    holds.release(other, TRANSPORT)
    holds.release_engines(other)
    assert holds.holders(other) == frozenset()
    holds.check_invariants([KEY])
