"""The digest of a whole transfer: what it covers, and who compares it when."""

from __future__ import annotations

import threading

from blake3 import blake3
from transport_doubles import MemorySpace, make_spec

from transport import TransferState
from transport.receiving.incoming_transfer import IncomingTransfer
from transport.wire.digest import PIECE_BYTES, digest_of


def test_the_digest_does_not_depend_on_how_the_bytes_lie() -> None:
    data = bytearray(bytes(range(251)) * 9000)
    assert len(data) > 2 * PIECE_BYTES
    expected = blake3(data).digest()
    assert digest_of(MemorySpace(data, 1000)) == expected
    assert digest_of(MemorySpace(data, 1 << 24)) == expected
    assert digest_of(MemorySpace(bytearray())) == blake3(b"").digest()


def make_landing(data: bytes) -> tuple[IncomingTransfer, MemorySpace]:
    space = MemorySpace(bytearray(data), 16)
    landing = IncomingTransfer(
        make_spec(1).transfer_id,
        token=b"",
        fingerprint=b"",
        space=space,
        max_ranges=10,
        wants_digest=True,
    )
    return landing, space


def test_only_one_is_told_to_judge() -> None:
    landing, _ = make_landing(bytes(100))
    digest = blake3(bytes(100)).digest()
    assert not landing.expect_digest(digest)
    landing.claim(1, 0, 100)
    assert landing.commit(1, 0, 100, None)
    assert not landing.expect_digest(digest)
    assert landing.judge()
    assert not landing.expect_digest(digest)
    assert landing.state is TransferState.COMPLETE


def test_an_end_while_the_digest_is_compared_waits_for_it() -> None:
    landing, space = make_landing(bytes(100))
    reading, go_on = threading.Event(), threading.Event()
    views = space.views

    def slow_views(offset: int, length: int) -> list[memoryview]:
        reading.set()
        assert go_on.wait(10)
        return views(offset, length)

    landing.expect_digest(blake3(bytes(100)).digest())
    landing.claim(1, 0, 100)
    assert landing.commit(1, 0, 100, None)
    space.views = slow_views  # type: ignore[method-assign]
    verdicts: list[bool] = []
    judge = threading.Thread(target=lambda: verdicts.append(landing.judge()))
    judge.start()
    assert reading.wait(10)
    assert landing.end(TransferState.FAILED, "dropped", "test")
    waiter = threading.Thread(target=landing.wait_quiet, args=(None,))
    waiter.start()
    waiter.join(0.05)
    assert waiter.is_alive()
    go_on.set()
    for thread in (judge, waiter):
        thread.join(10)
        assert not thread.is_alive()
    assert verdicts == [False]
    assert landing.state is TransferState.FAILED
