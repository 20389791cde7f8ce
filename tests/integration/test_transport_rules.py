"""What a sender owes its users whatever the receiver does: an end for each transfer, right counts,
and connections that live as long as the settings say. The receivers are raw sockets.
"""

from __future__ import annotations

import socket
import threading
import time
from contextlib import ExitStack, closing, suppress

import pytest
from hostile import own_greeting
from open_sockets import open_sockets
from transport_doubles import MemorySpace, RecordingListener, make_spec
from transport_loopback import LoopbackPair, eventually

from transport import Endpoint, Sender, TransportConfig
from transport.testing.proxy import HurtfulProxy
from transport.wire.frames import FrameType, encode_data_header, encode_frame, encode_open
from transport.wire.handshake import own_hello

CONFIG = TransportConfig(num_connections=1, autotune=False)
MIB = 1 << 20
WELCOME = own_hello(b"R" * 16, MIB).encode(FrameType.WELCOME)


def test_what_ended_before_the_receiver_broke_a_rule_is_reported() -> None:
    """The end and the broken rule arrive in one piece."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
        spec, listener = make_spec(1, Endpoint("127.0.0.1", port)), RecordingListener()

        def receive() -> None:
            with suppress(OSError), server.accept()[0] as peer:
                peer.sendall(WELCOME)
                peer.recv(1 << 16, socket.MSG_WAITALL)
                peer.sendall(encode_frame(FrameType.COMPLETE, spec.transfer_id) + WELCOME)
                while peer.recv(1 << 16):
                    pass

        receiving = threading.Thread(target=receive, daemon=True)
        receiving.start()
        with closing(Sender(CONFIG)) as sender:
            transfer = sender.open(spec, MemorySpace(bytearray(MIB)), listener)
            transfer.ready(0, MIB)
            assert listener.wait(spec.transfer_id) is None
        receiving.join(10)


def test_bytes_that_only_opened_acknowledges_count_as_acknowledged() -> None:
    """The acknowledgements of a connection that breaks are lost, and the next one's OPENED lists
    what arrived.
    """
    with closing(LoopbackPair(CONFIG)) as pair, closing(HurtfulProxy(pair.endpoint)) as proxy:
        transfer, _ = pair.begin(1, bytearray(MIB), via=proxy.endpoint)
        eventually(lambda: transfer.progress().num_connections == 1)
        proxy.swallow("backward")
        transfer.ready(0, MIB - 1)

        def landed_bytes() -> int:
            progress = pair.receiver.progress(transfer.transfer_id)
            return progress.acked_bytes if progress else 0

        eventually(lambda: landed_bytes() == MIB - 1)
        assert transfer.progress().acked_bytes == 0
        proxy.heal()
        transfer.ready(MIB - 1, 1)
        assert pair.listener.wait(transfer.transfer_id) is None
        link = pair.sender.link_state(proxy.endpoint)
        assert link is not None
        assert link.acked_bytes == MIB


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
            sock = socket.create_connection((pair.endpoint.host, pair.endpoint.port), 10)
            stack.enter_context(sock)
            fields = {"token": spec.token, "fingerprint": spec.fingerprint}
            opening = encode_open(spec.transfer_id, nbytes=MIB, **fields)  # type: ignore[arg-type]
            body = bytes(MIB)
            header = encode_data_header(spec.transfer_id, 0, [body])
            sock.sendall(own_greeting() + opening + header + body[:-1])
        eventually(lambda: pair.registry.num_asked == 12)
        time.sleep(0.2)  # until the frames have been begun
        began_s = time.monotonic()
        pair.receiver.close(timeout_s=2.0)
        # One grace for all; one for each would be 12 * 0.25 s.
        assert time.monotonic() - began_s < 1.5
