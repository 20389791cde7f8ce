"""What both ends promise their users about one transfer: what counts, what waits, and how cancels,
refusals and drops end it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest
from transport_doubles import MemorySpace, RecordingListener, make_spec
from transport_loopback import eventually
from transport_network import Network, answer, is_ended, opening, played_sender

from transport import (
    ByteSpace,
    Endpoint,
    LocalError,
    PeerError,
    Sender,
    TransferState,
    TransportConfig,
)
from transport.testing.proxy import BOTH, Direction
from transport.wire.frames import FrameType, encode_data_header, encode_frame, encode_ranges

CONFIG = TransportConfig(
    num_connections=2,
    autotune=False,
    frame_bytes=1000,
    max_frame_bytes=4000,
    codec="none",
    drop_grace_s=0,
    handshake_timeout_s=2,
    ack_timeout_s=5,
    idle_timeout_s=20,
    reconnect_first_s=0.001,
    reconnect_max_s=0.01,
)
ONE = replace(CONFIG, num_connections=1)
DATA = bytes(range(250)) * 40  # 10,000 bytes
LONG_S = 60.0
"""Far more than a test takes."""


@pytest.fixture
def network() -> Iterator[Network]:
    with closing(Network(CONFIG)) as network:
        yield network


@pytest.fixture
def narrow() -> Iterator[Network]:
    """A network with one connection at a time."""
    with closing(Network(ONE)) as network:
        yield network


def is_taken(network: Network, transfer_id: bytes) -> bool:
    """Whether the receiver has taken the transfer."""
    return network.receiver.progress(transfer_id) is not None


def the_connection(network: Network) -> int:
    """The number of the only one, once it stands."""
    eventually(network.is_connected)
    (connection,) = network.proxy.open_connections
    return connection


# What counts.


def test_bytes_count_once_however_often_they_are_said_to_be_ready(network: Network) -> None:
    transfer = network.open(1, DATA)
    for offset, length in ((0, 6000), (4000, 4000), (0, 8000)):
        transfer.handle.ready(offset, length)
    assert transfer.handle.progress().ready_bytes == 8000
    for offset, length in ((-1, 2), (9999, 2), (0, -1)):
        with pytest.raises(ValueError, match="outside of 10000 bytes"):
            transfer.handle.ready(offset, length)
    assert transfer.handle.wait_acked(8000, 20)
    transfer.ready()
    assert network.listener.wait(transfer.id) is None
    transfer.ready()  # after the end, which is ignored
    progress = transfer.handle.progress()
    assert (progress.sent_bytes, progress.acked_bytes) == (len(DATA), len(DATA))
    assert progress.resent_bytes == 0
    assert progress.first_sent_s is not None
    assert progress.completed_s is not None
    assert progress.opened_s <= progress.first_sent_s <= progress.completed_s


def test_what_a_lost_connection_had_under_way_counts_as_sent_again(narrow: Network) -> None:
    transfer = narrow.open(1, DATA)
    eventually(lambda: is_taken(narrow, transfer.id))
    narrow.proxy.strike("hold", "forward", connection=the_connection(narrow))
    transfer.handle.ready(0, 5000)
    eventually(lambda: transfer.handle.progress().sent_bytes == 5000)
    narrow.proxy.cut()
    transfer.ready()
    assert narrow.listener.wait(transfer.id) is None
    assert transfer.landed == DATA
    assert transfer.handle.progress().resent_bytes == 5000


def test_frames_are_no_larger_than_the_receiver_takes() -> None:
    tight = replace(ONE, max_frame_bytes=30)
    with closing(Network(ONE, receiver_config=tight)) as network:
        transfer = network.open(1, DATA)
        transfer.ready()
        assert network.listener.wait(transfer.id) is None
        assert transfer.landed == DATA


def test_a_link_tells_what_it_owes_and_why_it_does_not_get_on(narrow: Network) -> None:
    sender, endpoint = narrow.sender, narrow.proxy.endpoint
    assert sender.link_state(endpoint) is None
    transfer = narrow.open(1, bytes(8_000_000))

    def owed() -> tuple[bool, int, bool]:
        """Whether bytes are queued, the number of transfers, and whether some wait for an
        acknowledgement.
        """
        state = sender.link_state(endpoint)
        assert state is not None
        backlog = state.backlog
        has_waited = backlog.oldest_queued_s is not None
        return backlog.queued_bytes > 0, backlog.num_transfers, has_waited

    def trouble() -> str:
        state = sender.link_state(endpoint)
        assert state is not None
        return state.trouble

    eventually(lambda: is_taken(narrow, transfer.id))
    assert owed() == (False, 1, False)
    assert trouble() == ""
    narrow.proxy.strike("hold", "forward", connection=the_connection(narrow))
    transfer.handle.ready(0, 7_000_000)
    assert owed() == (True, 1, True)
    narrow.receiver.close()
    narrow.proxy.cut()
    eventually(lambda: trouble() != "")
    sender.close()
    assert owed() == (False, 0, False)


# What waits.


@pytest.mark.alone
def test_a_transfer_that_nothing_is_ready_of_does_not_age() -> None:
    impatient = replace(ONE, handshake_timeout_s=0.5, ack_timeout_s=0.5, idle_timeout_s=0.8)
    with closing(Network(impatient)) as network:
        transfer = network.open(1, DATA)
        transfer.handle.ready(0, 1000)
        assert transfer.handle.wait_acked(1000, 20)
        time.sleep(1.5 * impatient.idle_timeout_s)
        transfer.ready()
        assert network.listener.wait(transfer.id) is None
        assert transfer.landed == DATA


def test_a_listener_that_does_not_return_is_named_when_the_sender_closes(
    network: Network, caplog: pytest.LogCaptureFixture
) -> None:
    may_return = threading.Event()

    class Stubborn(RecordingListener):
        def on_complete(self, transfer_id: bytes) -> None:
            super().on_complete(transfer_id)
            may_return.wait(LONG_S)

    network.listener = Stubborn()
    transfer = network.open(1, DATA)
    transfer.ready()
    assert network.listener.wait(transfer.id) is None
    with caplog.at_level(logging.WARNING, "prfaas.transport"):
        network.sender.close(timeout_s=0.1)
    may_return.set()
    assert f"threads to {network.proxy.endpoint} did not end within 0.1 s" in caplog.text


# Cancels.


def test_a_cancel_of_what_no_receiver_has_heard_of_ends_at_once() -> None:
    listener, spec = RecordingListener(), make_spec(1, Endpoint("127.0.0.1", 1))
    with closing(Sender(ONE)) as sender:
        transfer = sender.open(spec, MemorySpace(bytearray(DATA)), listener)
        began_s = time.monotonic()
        transfer.cancel("not wanted")
        error = listener.wait(spec.transfer_id)
        assert isinstance(error, LocalError)
        assert (error.code, error.message) == ("cancelled", "not wanted")
        assert time.monotonic() - began_s < ONE.ack_timeout_s
        assert transfer.progress().state is TransferState.CANCELLED


def test_a_cancel_that_was_lost_is_said_again_on_the_next_connection(narrow: Network) -> None:
    transfer = narrow.open(1, DATA)
    transfer.handle.ready(0, 1000)
    assert transfer.handle.wait_acked(1000, 20)
    narrow.proxy.stall("forward")
    transfer.handle.cancel("preempted")
    assert transfer.handle.progress().state is TransferState.CANCELLING
    time.sleep(0.05)  # mostly until it is on its way
    narrow.proxy.cut()
    narrow.proxy.resume()
    for told in (narrow.listener, narrow.registry):
        error = told.wait(transfer.id)
        assert error is not None
        assert (error.code, error.message) == ("cancelled", "preempted")
    transfer.source.release()  # BufferError while anybody holds a view
    transfer.landing.release()


def test_a_transfer_that_is_complete_wins_over_its_cancel(network: Network) -> None:
    transfer = network.open(1, DATA)
    eventually(lambda: is_taken(network, transfer.id))
    network.proxy.stall("backward")
    transfer.ready()
    assert network.registry.wait(transfer.id) is None
    transfer.handle.cancel("too late")
    network.proxy.resume()
    assert network.listener.wait(transfer.id) is None
    assert transfer.handle.progress().state is TransferState.COMPLETE
    assert network.registry.failed == {}


# Refusals and drops.


def test_a_transfer_of_another_size_than_was_reserved_is_refused(network: Network) -> None:
    transfer = network.open(1, DATA)
    spec = make_spec(2, network.proxy.endpoint)
    network.registry.expect(spec, MemorySpace(bytearray(11)))
    network.sender.open(spec, MemorySpace(bytearray(10)), network.listener)
    error = network.listener.wait(spec.transfer_id)
    assert isinstance(error, PeerError)
    assert error.code == "mismatch"
    assert error.message == "10 bytes offered, 11 bytes reserved"
    transfer.ready()
    assert network.listener.wait(transfer.id) is None


def test_an_id_is_used_once_at_a_time(network: Network) -> None:
    transfer = network.open(1, DATA)
    with pytest.raises(ValueError, match="already open"):
        network.open(1, DATA)
    transfer.handle.cancel("test")
    assert network.listener.wait(transfer.id) is not None
    network.open(1, DATA)


def test_whoever_opens_a_transfer_as_well_needs_its_token(network: Network) -> None:
    transfer = network.open(1, DATA)
    eventually(lambda: is_taken(network, transfer.id))
    with played_sender(network.endpoint) as stranger:
        stranger.sendall(opening(make_spec(1), len(DATA), token=b"x" * 32))
        answer(stranger, b"wrong token for this transfer")
        body = [b"?" * 100]
        stranger.sendall(encode_data_header(transfer.id, 0, body) + body[0])
        answer(stranger, b"DATA for a transfer that was not opened on this connection")
    transfer.ready()
    assert network.listener.wait(transfer.id) is None
    assert transfer.landed == DATA
    assert transfer.handle.progress().resent_bytes == 0


def test_a_registry_that_raises_refuses_in_words(network: Network) -> None:
    def broken(*_: object) -> ByteSpace:
        raise RuntimeError("bug")

    accept = network.registry.accept
    network.registry.accept = broken  # type: ignore[method-assign]
    transfer = network.open(1, DATA)
    error = network.listener.wait(transfer.id)
    assert isinstance(error, PeerError)
    assert error.code == "registry"
    assert error.message == "the receiver could not look up this transfer"
    network.registry.accept = accept  # type: ignore[method-assign]
    other = network.open(2, DATA)
    other.ready()
    assert network.listener.wait(other.id) is None


def test_a_drop_while_the_registry_is_asked_wins(network: Network) -> None:
    accept = network.registry.accept

    def accept_and_drop(transfer_id: bytes, *others: object) -> ByteSpace:
        space = accept(transfer_id, *others)  # type: ignore[arg-type]
        network.receiver.drop(transfer_id, "changed my mind")
        return space

    network.registry.accept = accept_and_drop  # type: ignore[method-assign]
    transfer = network.open(1, DATA)
    transfer.ready()
    error = network.listener.wait(transfer.id)
    assert isinstance(error, PeerError)
    assert error.code == "dropped"
    assert transfer.landed == bytes(len(DATA))
    assert (network.registry.completed, network.registry.failed) == ([], {})
    transfer.landing.release()


@pytest.mark.parametrize("is_remembered", [True, False])
def test_an_end_is_remembered_and_then_forgotten(is_remembered: bool) -> None:
    config = replace(ONE, tombstone_s=LONG_S if is_remembered else 0.1)
    with closing(Network(config)) as network:
        transfer = network.open(1, DATA)
        transfer.ready()
        assert network.listener.wait(transfer.id) is None
        if not is_remembered:
            eventually(lambda: not is_taken(network, transfer.id))
            network.registry.expected.clear()
        with played_sender(network.endpoint) as late:
            late.sendall(opening(make_spec(1), len(DATA)))
            if is_remembered:
                answer(late, encode_frame(FrameType.COMPLETE, transfer.id))
            else:
                answer(late, b"no landing is reserved for this transfer")
        assert network.registry.num_asked == (1 if is_remembered else 2)


def test_memory_that_changed_after_it_was_sent_fails_at_both_ends(network: Network) -> None:
    transfer = network.open(1, DATA, digest=True)
    transfer.handle.ready(0, 9000)
    assert transfer.handle.wait_acked(9000, 20)
    transfer.source.data[100] ^= 1
    transfer.ready()
    for told in (network.listener, network.registry):
        error = told.wait(transfer.id)
        assert isinstance(error, PeerError)
        assert error.code == "digest"
    transfer.landing.release()


# A connection that is hurt.


def test_a_frame_that_stops_in_its_middle_costs_its_connection_and_no_byte() -> None:
    """The sender gives the connection up and sends the frame again: it meets its own first half."""
    with closing(Network(replace(ONE, ack_timeout_s=0.2))) as network:
        transfer = network.open(1, DATA)
        eventually(lambda: is_taken(network, transfer.id))
        stuck = the_connection(network)
        network.proxy.strike("hold", "forward", after_bytes=500, connection=stuck)
        transfer.ready()
        assert network.listener.wait(transfer.id) is None
        assert transfer.landed == DATA
        eventually(lambda: network.receiver.num_connections == 1)
        network.proxy.resume()
        eventually(lambda: stuck not in network.proxy.open_connections)
        assert transfer.landed == DATA


@pytest.mark.parametrize(
    ("direction", "position"),
    [
        *((direction, position) for direction in BOTH for position in (20, 60, 100, 200)),
        ("forward", 300),
        ("forward", 3000),
    ],
)
def test_a_damaged_byte_costs_its_connection_and_no_other_byte(
    direction: Direction, position: int, narrow: Network
) -> None:
    """In the greeting, in OPEN or its answer, in a header and a body of DATA, in what ends it."""
    narrow.proxy.strike("flip", direction, after_bytes=position, connection=1)
    transfer = narrow.open(1, DATA)
    transfer.ready()
    assert narrow.listener.wait(transfer.id) is None
    assert transfer.landed == DATA
    eventually(lambda: 1 not in narrow.proxy.open_connections)


def test_a_connection_whose_transfer_ended_on_another_one_does_not_keep_its_place() -> None:
    forgetful = replace(ONE, link_idle_timeout_s=0.5)
    with closing(Network(ONE, receiver_config=forgetful)) as network:
        spec = make_spec(1)
        network.registry.expect(spec, MemorySpace(bytearray(len(DATA))))
        with played_sender(network.endpoint) as silent, played_sender(network.endpoint) as busy:
            for sock in (silent, busy):
                sock.sendall(opening(spec, len(DATA)))
                answer(sock, encode_ranges(FrameType.OPENED, spec.transfer_id, []))
            for start in range(0, len(DATA), 1000):
                body = [DATA[start : start + 1000]]
                busy.sendall(encode_data_header(spec.transfer_id, start, body) + body[0])
            for sock in (silent, busy):
                answer(sock, encode_frame(FrameType.COMPLETE, spec.transfer_id))
            assert is_ended(silent)
