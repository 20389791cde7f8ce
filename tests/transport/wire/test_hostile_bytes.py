"""Hostile peers without sockets: whatever bytes come, only PeerErrors, whole memory, and bounds.

The same attacks are driven by coverage in tests/fuzz.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
from attacks import (
    CONFIG,
    ReceiverUnderFire,
    attack_reader,
    attack_receiver,
)
from hostile import SIZES_BYTES, GuardedSpace, forge, held_bytes, own_greeting
from hypothesis import given, settings
from hypothesis import strategies as st
from transport_doubles import MemoryRegistry, MemorySpace, NoConnections, make_spec

from transport import PeerError, TransferState
from transport.config import TransportConfig
from transport.receiving.incoming_transfer import Destination, IncomingTransfer
from transport.receiving.reception import Reception
from transport.wire.frames import FrameType, encode_frame, encode_open
from transport.wire.receiver_session import ReceiverSession
from transport.wire.sender_session import SenderSession

KIB = 1024

scripts = st.one_of(st.binary(max_size=60), st.binary(min_size=300, max_size=900))
few = settings(max_examples=80, deadline=None, derandomize=True)


@few
@given(scripts)
def test_a_reader_gives_the_same_frames_however_hostile_bytes_are_cut(script: bytes) -> None:
    attack_reader(script)


@few
@given(scripts)
def test_a_receiver_keeps_its_promises_to_three_hostile_connections(script: bytes) -> None:
    attack_receiver(script)


def new_session() -> ReceiverSession:
    """A connection that has said nothing yet."""
    reception = Reception(CONFIG, MemoryRegistry(), NoConnections())
    return ReceiverSession(1, config=CONFIG, reception=reception, instance=b"R" * 16, now_s=0)


@given(st.binary(max_size=2000), st.booleans(), st.integers(1, 500))
def test_a_receiver_fed_anything_answers_and_stays_small(
    garbage: bytes, greets: bool, piece: int
) -> None:
    session = new_session()
    wire = (own_greeting() if greets else b"") + garbage
    try:
        for start in range(0, len(wire), piece):
            session.feed(wire[start : start + piece], 0.0)
            assert sum(view.nbytes for view in session.buffers()) <= 64 * KIB
    except PeerError:
        assert session.outgoing()
    session.close(0.0)


frames = st.tuples(
    st.sampled_from(list(FrameType)), st.binary(min_size=16, max_size=16), st.binary(max_size=80)
).map(lambda parts: encode_frame(*parts))


@given(st.lists(frames, max_size=8))
def test_wellformed_frames_out_of_place_end_in_a_peer_error_at_most(wire: list[bytes]) -> None:
    session = new_session()
    with suppress(PeerError):
        session.feed(own_greeting() + b"".join(wire), 0.0)
    with suppress(PeerError):
        SenderSession(CONFIG, b"S" * 16).feed(b"".join(wire))
    session.close(0.0)


# A valid conversation, hurt on its way.

NUMBER = 3
SPEC = make_spec(NUMBER)
NUM_BYTES = SIZES_BYTES[NUMBER]
PATTERN = bytes(index * 7 % 251 for index in range(NUM_BYTES))


def conversation() -> list[bytes]:
    """Frames that land the whole of one transfer."""
    opening = encode_open(
        SPEC.transfer_id, token=SPEC.token, fingerprint=SPEC.fingerprint, nbytes=NUM_BYTES
    )
    return [
        own_greeting(),
        opening,
        *(data_frame(start, 250) for start in range(0, NUM_BYTES, 250)),
    ]


def data_frame(start: int, num_bytes: int, transfer_id: bytes = SPEC.transfer_id) -> bytes:
    body = PATTERN[start : start + num_bytes]
    return forge(FrameType.DATA, body, transfer_id=transfer_id, offset=start)


def hurt(frames: list[bytes], kind: str, first: int, second: int) -> list[bytes]:
    """One mutation of what is sent, at places chosen by two large numbers."""
    if kind in ("repeat", "reorder"):
        low, high = first % len(frames), second % len(frames)
        moved = frames[low] if kind == "repeat" else frames.pop(low)
        frames.insert(high, moved)
        return frames
    wire = bytearray(b"".join(frames))
    low, high = sorted((first % len(wire), second % len(wire)))
    if kind == "flip":
        wire[low] ^= 1 << second % 8
    elif kind == "truncate":
        del wire[low:]
    elif kind == "cut out":
        del wire[low:high]
    else:
        wire[high:high] = wire[low : low + 400]
    return [bytes(wire)] if wire else [b"\0"]


mutations = st.tuples(
    st.sampled_from(
        ["repeat", "reorder", "repeat", "reorder", "flip", "truncate", "cut out", "splice"]
    ),
    st.integers(0, 1 << 20),
    st.integers(0, 1 << 20),
)


@few
@given(st.lists(mutations, max_size=4), st.integers(1, 700))
def test_what_is_verified_is_what_was_sent_however_the_bytes_were_hurt(
    hurts: list[tuple[str, int, int]], piece_bytes: int
) -> None:
    frames = conversation()
    for kind, first, second in hurts:
        frames = hurt(frames, kind, first, second)
    wire = b"".join(frames)
    fire = ReceiverUnderFire()
    number = fire.connect()
    for start in range(0, len(wire), piece_bytes):
        fire.feed(number, wire[start : start + piece_bytes])
    frozen = fire.frozen[SPEC.transfer_id]
    for start, end in frozen.verified:
        assert frozen.space.content[start:end] == PATTERN[start:end]
    if not hurts:
        assert fire.registry.completed == [SPEC.transfer_id]


# Bounds, in the default configuration.


def default_session(nbytes: int) -> tuple[ReceiverSession, Reception, MemorySpace]:
    """A greeted connection that opened a transfer of `nbytes`."""
    space = MemorySpace(bytearray(nbytes))
    registry = MemoryRegistry()
    registry.expect(SPEC, space)
    reception = Reception(TransportConfig(), registry, ReceiverUnderFire())
    session = ReceiverSession(
        1, config=TransportConfig(), reception=reception, instance=b"R" * 16, now_s=0.0
    )
    opening = encode_open(
        SPEC.transfer_id, token=SPEC.token, fingerprint=SPEC.fingerprint, nbytes=nbytes
    )
    session.feed(own_greeting() + opening, 0.0)
    session.outgoing()
    return session, reception, space


def single_bytes(num_frames: int) -> Iterator[bytes]:
    """DATA frames of one byte at every other offset."""
    for index in range(num_frames):
        yield forge(FrameType.DATA, b"x", transfer_id=SPEC.transfer_id, offset=2 * index)


def test_acknowledgements_of_single_bytes_do_not_pile_up() -> None:
    """A sender that is always faster than the receiver, so that its socket is never empty."""
    session, _, space = default_session(64 * KIB)
    session.feed(forge(FrameType.DATA, b"x" * (64 * KIB - 1), transfer_id=SPEC.transfer_id), 0.0)
    session.flush_acks()
    for frame in single_bytes(20_000):
        session.feed(frame, 0.0)
        if session.acks_due:
            session.flush_acks()
        session.outgoing()
    assert held_bytes(session, [space.data]) < 640 * KIB


def test_long_answers_do_not_pile_up_while_more_is_coming_in() -> None:
    """An OPEN of 124 bytes may be repeated, and is answered with every range there is."""
    session, _, space = default_session(64 * KIB)
    for frame in single_bytes(8192):
        session.feed(frame, 0.0)
    session.flush_acks()
    session.outgoing()
    opening = encode_open(
        SPEC.transfer_id, token=SPEC.token, fingerprint=SPEC.fingerprint, nbytes=space.nbytes
    )
    for _ in range(60):
        session.feed(opening, 0.0)
        if session.acks_due:
            session.flush_acks()
            session.outgoing()
        assert held_bytes(session, [space.data]) < 512 * KIB


def test_repeated_data_is_let_go_of_once_it_was_checked() -> None:
    session, _, space = default_session(4 * 1024 * KIB)
    whole = forge(FrameType.DATA, bytes(4 * 1024 * KIB - 1), transfer_id=SPEC.transfer_id)
    session.feed(whole, 0.0)
    session.feed(whole[:-1], 0.0)
    session.flush_acks()
    session.outgoing()
    assert 4096 * KIB < held_bytes(session, [space.data]) < 4200 * KIB
    session.feed(whole[-1:], 0.0)
    session.flush_acks()
    session.outgoing()
    assert held_bytes(session, [space.data]) < 8 * KIB


def test_a_connection_without_transfers_holds_a_body_and_a_sink() -> None:
    session, _, space = default_session(1)
    stranger = b"?" * 16
    session.feed(forge(FrameType.DATA, bytes(100 * KIB), transfer_id=stranger), 0.0)
    session.feed(forge(FrameType.ACK, bytes(64 * KIB))[:-1], 0.0)
    session.outgoing()
    assert held_bytes(session, [space.data]) < 136 * KIB


def test_the_end_of_a_scattered_transfer_is_remembered_without_its_ranges() -> None:
    session, reception, _ = default_session(64 * KIB)
    for frame in single_bytes(2000):
        session.feed(frame, 0.0)
    session.flush_acks()
    landing = reception.transfers.find(SPEC.transfer_id)
    assert landing is not None
    reception.cancel(landing, "test", 0.0)
    assert landing.verified_bytes == 2000
    assert held_bytes(vars(landing)) < 8 * KIB


def scattered_landing(num_ranges: int) -> IncomingTransfer:
    """Of which the first `num_ranges` even bytes are verified."""
    landing = IncomingTransfer(
        SPEC.transfer_id,
        token=SPEC.token,
        fingerprint=SPEC.fingerprint,
        space=GuardedSpace(2 * num_ranges + 1),
        max_ranges=num_ranges,
    )
    for start in range(0, 2 * num_ranges, 2):
        landing.claim(1, start, start + 1)
        landing.commit(1, start, start + 1, None)
    return landing


def test_claims_over_scattered_ranges_are_compared_in_linear_time() -> None:
    """Two frames that each fill thousands of gaps: their comparison holds the landing's lock."""
    landing = scattered_landing(8192)
    assert landing.claim(1, 0, 8192).place is Destination.SCRATCH
    before_s = time.thread_time()
    assert landing.claim(2, 8192, 16_384).place is Destination.SCRATCH
    assert time.thread_time() - before_s < 0.2


def test_a_refused_transfer_costs_a_connection_nothing_but_the_answer() -> None:
    session, reception, space = default_session(1)
    for number in range(100, 2100):
        session.feed(
            encode_open(
                make_spec(number).transfer_id, token=b"?" * 32, fingerprint=b"?" * 32, nbytes=9
            ),
            0.0,
        )
        assert 0 < len(session.outgoing()) < 256
    assert held_bytes(session, [space.data]) < 8 * KIB
    assert len(reception.transfers.open_ones()) == 1


class ForgottenSpace(MemorySpace):
    """Memory that somebody took away: it can be written, and not be read again."""

    def views(self, offset: int, length: int) -> list[memoryview]:
        if offset == 0 and length == self.nbytes and self.data[-1]:
            raise RuntimeError("gone")
        return super().views(offset, length)


def test_memory_that_is_gone_when_the_digest_comes_fails_the_transfer() -> None:
    registry = MemoryRegistry()
    registry.expect(SPEC, ForgottenSpace(bytearray(2)))
    reception = Reception(TransportConfig(), registry, ReceiverUnderFire())
    session = ReceiverSession(
        1, config=TransportConfig(), reception=reception, instance=b"R" * 16, now_s=0.0
    )
    opening = encode_open(
        SPEC.transfer_id, token=SPEC.token, fingerprint=SPEC.fingerprint, nbytes=2, digest=True
    )
    session.feed(own_greeting() + opening, 0.0)
    for offset in (0, 1):
        session.feed(forge(FrameType.DATA, b"x", transfer_id=SPEC.transfer_id, offset=offset), 0.0)
    session.feed(forge(FrameType.DIGEST, bytes(32), transfer_id=SPEC.transfer_id), 0.0)
    assert registry.failed[SPEC.transfer_id].code == "space"


def test_a_broken_rule_lets_go_of_everything_with_the_connection() -> None:
    session, reception, space = default_session(4 * 1024 * KIB)
    session.feed(forge(FrameType.DATA, bytes(1024 * KIB), transfer_id=SPEC.transfer_id), 0.0)
    with pytest.raises(PeerError):
        session.feed(forge(FrameType.DATA, b"x", transfer_id=SPEC.transfer_id, body_sum=1), 0.0)
    session.outgoing()
    session.close(1.0)
    landing = reception.transfers.find(SPEC.transfer_id)
    assert landing is not None
    assert landing.state is TransferState.OPEN
    landing.check_invariants()
    assert landing.end(TransferState.FAILED, "test", "")
    space.release()  # BufferError while anybody holds a view
