"""What a sender owes its users whatever the receiver does: an end for each transfer, right counts,
and connections that live as long as the settings say. The test plays most of the receivers.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace

import pytest
from open_sockets import open_sockets
from transport_doubles import MemorySpace, RecordingListener, make_spec
from transport_loopback import LoopbackPair, eventually
from transport_network import (
    WELCOME,
    Network,
    PlayedReceiver,
    answer,
    is_ended,
    opening,
    played_sender,
)

from transport import PeerError, Sender, TransportConfig
from transport.wire.frames import FrameType, encode_data_header, encode_frame, encode_ranges
from transport.wire.handshake import Hello

CONFIG = TransportConfig(num_connections=1, autotune=False, reconnect_first_s=0.001)
MIB = 1 << 20
ID = make_spec(1).transfer_id
OTHER_RELEASE = Hello(5, 6, MIB, 0, bytes(16)).encode(FrameType.WELCOME)
LONG_S = 60.0
"""Far more than a test takes: a wait that lasts so long was not woken."""


@pytest.fixture
def played() -> Iterator[PlayedReceiver]:
    with closing(PlayedReceiver()) as played:
        yield played


@pytest.fixture
def sender() -> Iterator[Sender]:
    with closing(Sender(CONFIG)) as sender:
        yield sender


@pytest.mark.parametrize(
    "broken_rule",
    [WELCOME, encode_ranges(FrameType.ACK, make_spec(2).transfer_id, [(0, 1)])],
    ids=["a second WELCOME", "an ACK of what was never sent"],
)
def test_what_ended_before_the_receiver_broke_a_rule_is_reported(
    broken_rule: bytes, sender: Sender, played: PlayedReceiver
) -> None:
    """The end and the broken rule arrive in one piece."""
    listener = RecordingListener()
    transfer = sender.open(make_spec(1, played.endpoint), MemorySpace(bytearray(1000)), listener)
    sender.open(make_spec(2, played.endpoint), MemorySpace(bytearray(1)), listener)
    transfer.ready(0, 1000)
    receiver = played.accept()
    answer(receiver, bytes(1000))
    receiver.sendall(encode_frame(FrameType.COMPLETE, ID) + broken_rule)
    assert listener.wait(ID) is None
    assert is_ended(receiver)


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        (encode_ranges(FrameType.ACK, ID, [(50, 150)]), "never sent"),
        (encode_ranges(FrameType.OPENED, ID, [(0, 1001)]), "beyond the transfer"),
        (encode_frame(FrameType.HELLO), "unexpected HELLO from a receiver"),
    ],
    ids=["ACK", "OPENED", "HELLO"],
)
def test_a_receiver_that_lies_loses_its_connection_and_the_transfer_goes_on(
    lie: bytes, words: str, sender: Sender, played: PlayedReceiver, caplog: pytest.LogCaptureFixture
) -> None:
    listener = RecordingListener()
    transfer = sender.open(make_spec(1, played.endpoint), MemorySpace(bytearray(1000)), listener)
    transfer.ready(0, 100)
    with caplog.at_level(logging.INFO, "prfaas.transport"):
        liar = played.accept()
        answer(liar, bytes(100))
        liar.sendall(lie)
        assert is_ended(liar)
        honest = played.accept()
        answer(honest, bytes(100))
    assert words in caplog.text
    assert transfer.progress().acked_bytes == 0
    honest.sendall(encode_frame(FrameType.COMPLETE, ID))
    assert listener.wait(ID) is None


def test_a_receiver_cannot_scatter_acknowledgements_without_end(played: PlayedReceiver) -> None:
    """Each range costs the sender memory, as it does a receiver, and has the same limit."""
    listener = RecordingListener()
    with closing(Sender(replace(CONFIG, max_ranges_per_transfer=20))) as sender:
        spec = make_spec(1, played.endpoint)
        sender.open(spec, MemorySpace(bytearray(1000)), listener).ready(0, 1000)
        receiver = played.accept()
        answer(receiver, bytes(1000))
        scattered = [(start, start + 1) for start in range(0, 1000, 2)]
        receiver.sendall(encode_ranges(FrameType.ACK, ID, scattered))
        error = listener.wait(ID)
        assert isinstance(error, PeerError)
        assert error.code == "fragmented"


@pytest.mark.parametrize("code", ["unreachable", "cancelled", "version", "closed"])
def test_waiting_for_acknowledgements_ends_with_the_transfer(
    code: str, played: PlayedReceiver
) -> None:
    config = replace(CONFIG, handshake_timeout_s=0.2, ack_timeout_s=0.2, idle_timeout_s=0.5)
    listener, answers = RecordingListener(), list[bool]()
    with closing(Sender(config if code == "unreachable" else CONFIG)) as sender:
        spec = make_spec(1, played.endpoint)
        transfer = sender.open(spec, MemorySpace(bytearray(100)), listener)
        waiting = threading.Thread(
            target=lambda: answers.append(transfer.wait_acked(1, LONG_S)), daemon=True
        )
        waiting.start()
        time.sleep(0.05)  # mostly until it waits
        if code == "cancelled":
            transfer.cancel("not wanted any more")
        elif code == "version":
            played.accept(OTHER_RELEASE)
        elif code == "closed":
            sender.close()
        error = listener.wait(spec.transfer_id)
        waiting.join(5)
    assert answers == [False]
    assert error is not None
    assert error.code == code


def test_a_refusal_ends_what_was_open_when_its_connection_was_begun(
    sender: Sender, played: PlayedReceiver
) -> None:
    """What is opened later may meet a receiver that was replaced meanwhile."""
    early, late = make_spec(1, played.endpoint), make_spec(2, played.endpoint)
    listener = RecordingListener()
    sender.open(early, MemorySpace(bytearray(1)), listener)
    first = played.accept(b"")
    sender.open(late, MemorySpace(bytearray(1)), listener)
    first.sendall(OTHER_RELEASE)
    for spec in (early, late):
        error = listener.wait(spec.transfer_id)
        assert isinstance(error, PeerError)
        assert error.code == "version"
        if spec is early:
            played.accept(OTHER_RELEASE)  # without `late` nobody would come


def test_bytes_that_only_opened_acknowledges_count_as_acknowledged() -> None:
    """The acknowledgements of a connection that breaks are lost, and the next one's OPENED lists
    what arrived.
    """
    with closing(Network(CONFIG)) as network:
        transfer = network.open(1, bytes(MIB))
        eventually(network.is_connected)
        network.proxy.swallow("backward")
        transfer.handle.ready(0, MIB - 1)

        def landed_bytes() -> int:
            progress = network.receiver.progress(transfer.id)
            return progress.acked_bytes if progress else 0

        eventually(lambda: landed_bytes() == MIB - 1)
        assert transfer.handle.progress().acked_bytes == 0
        network.proxy.heal()
        transfer.ready()
        assert network.listener.wait(transfer.id) is None
        link = network.sender.link_state(network.proxy.endpoint)
        assert link is not None
        assert link.acked_bytes == MIB


def test_a_digest_is_of_the_bytes_as_they_are_when_all_are_ready() -> None:
    with closing(Network(CONFIG)) as network:
        transfer = network.open(1, bytes(1000), digest=True)
        transfer.handle.ready(0, 999)
        assert transfer.handle.wait_acked(999, 20)
        transfer.source.data[999] = 1
        transfer.ready()
        assert network.listener.wait(transfer.id) is None
        assert transfer.landed == bytes(999) + b"\1"


@pytest.mark.parametrize(
    ("config", "lifetime_ms"),
    [
        pytest.param(TransportConfig(), 19_000, id="the defaults"),
        pytest.param(
            TransportConfig(keepalive_idle_s=40, keepalive_interval_s=5, keepalive_probes=4),
            60_000,
            id="as set",
        ),
        pytest.param(TransportConfig(keepalive_idle_s=0), 10_000, id="no probes"),
    ],
)
def test_a_connection_outlives_all_probes_but_the_last(
    config: TransportConfig, lifetime_ms: int
) -> None:
    """With a user timeout Linux does not count probes (tcp(7)), so it must leave time for all."""
    with closing(LoopbackPair(config)) as pair:
        pair.begin(1, bytearray(1))
        eventually(lambda: pair.receiver.num_connections == config.num_connections)
        timeouts_ms = [
            sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            for sock in open_sockets(pair.endpoint.port)
        ]
        assert len(timeouts_ms) == 2 * config.num_connections
        assert set(timeouts_ms) == {lifetime_ms}


def test_a_receiver_closes_in_time_whatever_its_connections_do() -> None:
    """Each of twelve connections stopped in the middle of a frame."""
    with closing(LoopbackPair(TransportConfig())) as pair, ExitStack() as stack:
        for number in range(12):
            spec = make_spec(number, pair.endpoint)
            pair.registry.expect(spec, MemorySpace(bytearray(MIB)))
            sock = stack.enter_context(played_sender(pair.endpoint))
            body = bytes(MIB)
            header = encode_data_header(spec.transfer_id, 0, [body])
            sock.sendall(opening(spec, MIB) + header + body[:-1])
        eventually(lambda: pair.registry.num_asked == 12)
        time.sleep(0.2)  # until the frames have been begun
        began_s = time.monotonic()
        pair.receiver.close(timeout_s=2.0)
        # One grace for all; one for each would be 12 * 0.25 s.
        assert time.monotonic() - began_s < 1.5
