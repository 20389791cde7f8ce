"""Claims on the memory of one incoming transfer."""

from __future__ import annotations

import pytest
from transport_doubles import MemorySpace

from transport.errors import PeerError
from transport.interfaces import TransferState
from transport.receiving.incoming_transfer import Destination, IncomingTransfer


def make_landing(num_bytes: int = 100, max_ranges: int = 10) -> tuple[IncomingTransfer, bytearray]:
    memory = bytearray(num_bytes)
    landing = IncomingTransfer(
        b"i" * 16,
        token=b"t" * 32,
        fingerprint=b"f" * 32,
        space=MemorySpace(memory, 16),
        max_ranges=max_ranges,
    )
    return landing, memory


def test_fresh_ranges_go_straight_to_their_place() -> None:
    landing, memory = make_landing()
    placement = landing.claim(1, 10, 40)
    assert placement.place is Destination.DIRECT
    for view in placement.views:
        view[:] = b"x" * view.nbytes
    assert memory == bytes(10) + b"x" * 30 + bytes(60)
    assert landing.commit(1, 10, 40, None) is False
    assert landing.verified() == [(10, 40)]
    landing.check_invariants()


def test_the_last_byte_completes_once() -> None:
    landing, _ = make_landing()
    landing.claim(1, 0, 60)
    landing.claim(2, 60, 100)
    assert landing.commit(1, 0, 60, None) is False
    assert landing.commit(2, 60, 100, None) is True
    assert landing.judge()
    assert landing.state is TransferState.COMPLETE
    assert landing.claim(1, 0, 10).place is Destination.DISCARD


def test_verified_bytes_are_never_written_again() -> None:
    landing, memory = make_landing()
    for view in landing.claim(1, 20, 40).views:
        view[:] = b"a" * view.nbytes
    landing.commit(1, 20, 40, None)
    placement = landing.claim(2, 10, 50)
    assert placement.place is Destination.SCRATCH
    assert placement.views == []
    landing.check_invariants()
    landing.commit(2, 10, 50, memoryview(b"b" * 40))
    assert memory == bytes(10) + b"b" * 10 + b"a" * 20 + b"b" * 10 + bytes(50)
    assert landing.received_again_bytes == 20


def test_a_damaged_repeat_leaves_no_trace() -> None:
    landing, memory = make_landing()
    landing.claim(1, 0, 40)
    landing.commit(1, 0, 40, None)
    assert landing.claim(2, 0, 40).place is Destination.SCRATCH
    landing.abandon(2)
    assert memory == bytes(100)
    assert landing.verified() == [(0, 40)]


def test_a_range_under_way_elsewhere_is_a_conflict_until_given_back() -> None:
    landing, _ = make_landing()
    landing.claim(1, 0, 40)
    placement = landing.claim(2, 30, 60)
    assert placement.place is Destination.CONFLICT
    assert placement.rivals == {1}
    assert not landing.wait_claimable({1}, 0)
    landing.abandon(1)
    assert landing.wait_claimable({1}, 0)
    assert landing.claim(2, 30, 60).place is Destination.DIRECT


def test_after_the_end_a_frame_in_flight_counts_for_nothing() -> None:
    landing, _ = make_landing()
    landing.claim(1, 0, 100)
    assert landing.end(TransferState.FAILED, "dropped", "test")
    assert not landing.end(TransferState.CANCELLED, "cancelled", "later")
    assert landing.wait_quiet(0) == {1}
    assert landing.commit(1, 0, 100, None) is False
    assert landing.wait_quiet(0) == frozenset()
    assert landing.verified() == []
    assert landing.failure == ("dropped", "test")


def test_memory_is_let_go_at_the_end() -> None:
    landing, memory = make_landing()
    landing.claim(1, 0, 100)
    landing.commit(1, 0, 100, None)
    assert landing.judge()
    memory.clear()  # raises BufferError if a view were left


def test_scratch_after_the_end_is_not_copied() -> None:
    landing, memory = make_landing()
    landing.claim(1, 0, 10)
    landing.commit(1, 0, 10, None)
    landing.claim(2, 0, 50)
    landing.end(TransferState.FAILED, "dropped", "")
    landing.commit(2, 0, 50, memoryview(b"z" * 50))
    assert memory == bytes(100)


def test_bytes_beyond_the_transfer_are_refused() -> None:
    landing, _ = make_landing()
    with pytest.raises(PeerError, match="up to byte 101 of a transfer that has 100"):
        landing.claim(1, 90, 101)


def test_scattered_ranges_are_bounded() -> None:
    landing, _ = make_landing(max_ranges=3)
    for start in (0, 20, 40):
        landing.claim(1, start, start + 1)
        landing.commit(1, start, start + 1, None)
    landing.claim(1, 60, 61)
    with pytest.raises(PeerError) as caught:
        landing.commit(1, 60, 61, None)
    assert caught.value.code == "fragmented"


def test_nothing_at_all_is_complete_at_once() -> None:
    landing, _ = make_landing(0)
    assert landing.is_all_there()
    assert not landing.is_all_there()
