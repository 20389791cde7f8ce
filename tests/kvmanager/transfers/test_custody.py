"""Who holds a transfer's blocks, and when they are free again."""

import pytest

from kvmanager.transfers.blocks import BlockAllocator
from kvmanager.transfers.custody import PROMOTION, TRANSPORT, Custody, Kind

KEY = (Kind.OUTBOX, b"t" * 16)


@pytest.fixture
def custody() -> Custody:
    """Two blocks of four are held by the transport for one transfer."""
    custody = Custody(BlockAllocator(4))
    custody.take(KEY, 2)
    return custody


def test_blocks_are_free_when_the_transfer_is_over_and_nobody_holds_them(custody: Custody) -> None:
    custody.let_go(KEY, TRANSPORT)
    assert KEY in custody, "it is not over"
    custody.over(KEY, 30)
    assert KEY not in custody
    assert custody.num_blocks(Kind.OUTBOX) == 0


def test_the_last_engines_leave_together(custody: Custody) -> None:
    for engine in (0, 1):
        custody.hold(KEY, engine)
    custody.let_go(KEY, TRANSPORT)
    custody.over(KEY, 30)
    assert custody.holders(KEY) == {0, 1}
    custody.let_all_engines_go(KEY)
    assert KEY not in custody


def test_a_second_end_does_not_prolong_the_drain_time(custody: Custody) -> None:
    custody.hold(KEY, 0)
    custody.over(KEY, 30)
    custody.over(KEY, 60)
    assert custody.expire(30) == [KEY]


def test_our_own_holders_are_no_engines(custody: Custody) -> None:
    custody.hold(KEY, PROMOTION)
    assert custody.holders(KEY) == frozenset()
    custody.hold(KEY, 0)
    assert custody.holders(KEY) == {0}
    custody.let_all_engines_go(KEY)
    custody.let_go(KEY, TRANSPORT)
    custody.over(KEY, 0)
    assert custody.expire(1000) == []
    assert KEY in custody, "the promotion reads it"


def test_one_transfer_takes_blocks_once(custody: Custody) -> None:
    with pytest.raises(ValueError, match="has blocks already"):
        custody.take(KEY, 1)
    assert custody.num_blocks(Kind.OUTBOX) == 2


def test_nothing_is_known_of_a_transfer_without_blocks(custody: Custody) -> None:
    other = (Kind.LANDING, b"t" * 16)
    custody.over(other, 0)
    custody.let_go(other, TRANSPORT)
    custody.let_all_engines_go(other)
    assert custody.holders(other) == frozenset()
    custody.check_invariants([KEY])
