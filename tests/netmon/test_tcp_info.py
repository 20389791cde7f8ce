"""struct tcp_info: literal bytes, short answers of old kernels, and a real connection."""

from __future__ import annotations

import socket
import struct
import sys
import time

import pytest

from netmon import tcp_info
from netmon.tcp_info import parse

# Offset and format of each field, as in linux/tcp.h.
LAYOUT = {
    "tcpi_snd_mss": (16, "I", 1448),
    "tcpi_unacked": (24, "I", 31),
    "tcpi_rtt": (68, "I", 20_500),
    "tcpi_bytes_acked": (120, "Q", 5_000_000_001),
    "tcpi_notsent_bytes": (144, "I", 131_072),
    "tcpi_min_rtt": (148, "I", 20_100),
    "tcpi_busy_time": (168, "Q", 9_000_000),
    "tcpi_rwnd_limited": (176, "Q", 1_000_000),
    "tcpi_sndbuf_limited": (184, "Q", 2_500_000),
    "tcpi_bytes_sent": (200, "Q", 5_000_100_000),
    "tcpi_bytes_retrans": (208, "Q", 99_000),
}


def struct_bytes(size: int = 240, **other: int) -> bytes:
    """A struct tcp_info whose other bytes are 0xA5, so that no wrong field reads as nothing."""
    raw = bytearray(b"\xa5" * 240)
    for name, (offset, kind, value) in LAYOUT.items():
        struct.pack_into(f"={kind}", raw, offset, other.get(name, value))
    return bytes(raw[:size])


def test_every_field_is_where_the_kernel_has_it() -> None:
    info = parse(struct_bytes())
    assert info is not None
    assert (info.rtt_s, info.min_rtt_s) == (0.0205, 0.0201)
    assert (info.mss_bytes, info.unacked_segments) == (1448, 31)
    assert (info.acked_bytes, info.sent_bytes) == (5_000_000_001, 5_000_100_000)
    assert (info.retransmitted_bytes, info.notsent_bytes) == (99_000, 131_072)
    assert (info.busy_s, info.rwnd_limited_s, info.sndbuf_limited_s) == (9.0, 1.0, 2.5)


def test_no_sample_reads_as_nothing() -> None:
    info = parse(struct_bytes(tcpi_min_rtt=0xFFFFFFFF))
    assert info is not None
    assert info.min_rtt_s == 0.0


def test_what_an_older_kernel_does_not_give_reads_as_nothing() -> None:
    info = parse(struct_bytes(192))
    assert info is not None
    assert info.sndbuf_limited_s == 2.5
    assert (info.sent_bytes, info.retransmitted_bytes) == (0, 0)


@pytest.mark.parametrize("size", [0, 1, 104, 160, 191])
def test_too_little_is_no_answer(size: int) -> None:
    assert parse(struct_bytes(size)) is None


def test_a_newer_kernel_may_give_more() -> None:
    assert parse(struct_bytes() + bytes(40)) == parse(struct_bytes())


@pytest.mark.skipif(sys.platform != "linux", reason="TCP_INFO has another layout elsewhere")
def test_a_real_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as sender, server.accept()[0] as peer:
            first = of_socket(sender)
            payload = bytes(100_000)
            sender.sendall(payload)
            received = 0
            while received < len(payload):
                received += len(peer.recv(1 << 16))
            last = of_socket(sender)
            deadline_s = time.monotonic() + 5
            while last.acked_bytes < len(payload) and time.monotonic() < deadline_s:
                last = of_socket(sender)
    assert 0 < last.rtt_s < 1
    assert 0 < last.min_rtt_s <= last.rtt_s
    assert len(payload) <= last.acked_bytes - first.acked_bytes <= len(payload) + 1
    assert last.sent_bytes - first.sent_bytes >= len(payload)
    assert 500 <= last.mss_bytes <= 65_536
    assert last.retransmitted_bytes == 0
    assert 0 <= last.sndbuf_limited_s <= last.busy_s + 0.01


def of_socket(sock: socket.socket) -> tcp_info.TcpInfo:
    raw = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, tcp_info.SIZE)
    info = parse(raw)
    assert info is not None
    return info
