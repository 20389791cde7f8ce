"""The emulated link's forwarder between socket pairs: no root, no devices."""

from __future__ import annotations

import json
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path as FilePath

import pytest

sys.path.insert(0, str(FilePath(__file__).resolve().parent))

from wan import Path, build_forwarder

pytestmark = pytest.mark.skipif(
    shutil.which("cc") is None, reason="cc is not installed; `make system` does that"
)

MSS = 1448
VIRTIO = struct.Struct("<BBHHHH")
HEADER_BYTES = 40
NEEDS_CSUM, GSO_TCPV4 = 1, 1
FIN, CWR = 0x01, 0x80


def _sum(data: bytes) -> int:
    total: int = sum(struct.unpack(f">{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def packet(payload: bytes, port: int = 5000, flags: int = 0x10) -> bytes:
    """A super-packet as a TUN device hands it over: no TCP checksum yet."""
    ip = bytearray(
        struct.pack(
            ">BBHHHBBH4s4s", 0x45, 0, 40 + len(payload), 7, 0, 64, 6, 0, b"\12\0\0\1", b"\12\0\0\2"
        )
    )
    ip[10:12] = struct.pack(">H", 0xFFFF ^ _sum(bytes(ip)))
    tcp = struct.pack(">HHIIBBHHH", port, 80, 1000, 1, 0x50, flags, 512, 0, 0)
    virtio = VIRTIO.pack(NEEDS_CSUM, GSO_TCPV4, HEADER_BYTES, MSS, 20, 16)
    return virtio + bytes(ip) + tcp + payload


@dataclass
class Link:
    process: subprocess.Popen[str]
    near: socket.socket
    far: socket.socket

    def ask(self, command: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def set_path(self, path: Path) -> None:
        assert self.ask(path.command()) == "ok"

    def counters(self) -> dict[str, float]:
        found: dict[str, float] = json.loads(self.ask("counters"))["to_far"]
        return found

    def arrived(self, wait_s: float = 0.3) -> list[bytes]:
        """What reaches the far end until nothing came for `wait_s`."""
        self.far.settimeout(wait_s)
        packets = []
        try:
            while True:
                packets.append(self.far.recv(1 << 17))
        except TimeoutError:
            return packets


@pytest.fixture(scope="module")
def binary(tmp_path_factory: pytest.TempPathFactory) -> FilePath:
    return build_forwarder(tmp_path_factory.mktemp("forwarder"))


@pytest.fixture
def link(binary: FilePath) -> Iterator[Link]:
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
    inner = [pair[1].fileno() for pair in pairs]
    process = subprocess.Popen(
        [str(binary), *map(str, inner)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=inner,
    )
    with process:
        yield Link(process, pairs[0][0], pairs[1][0])
        assert process.stdin is not None
        process.stdin.close()  # ends the program
        assert process.wait(5) == 0
    for pair in pairs:
        for end in pair:
            end.close()


def test_super_packet_passes_whole_after_rate_and_delay(link: Link) -> None:
    link.set_path(Path(10e6, 0.1))
    sent = packet(bytes(40 * MSS))
    begin_s = time.perf_counter()
    link.near.send(sent)
    assert link.far.recv(1 << 17) == sent
    wire_s = 40 * (MSS + HEADER_BYTES) * 8 / 10e6
    elapsed_s = time.perf_counter() - begin_s
    assert wire_s + 0.05 <= elapsed_s < wire_s + 0.3
    found = link.counters()
    assert (found["segments"], found["bytes"]) == (40, 40 * (MSS + HEADER_BYTES))
    assert found["delivered_segments"] == 40


def test_lost_segments_are_cut_out_and_the_rest_is_valid(link: Link) -> None:
    payload = bytes(range(256)) * 182  # 33 segments, the last one short
    link.set_path(Path(0, 0.0, loss=0.2))
    link.near.send(packet(payload, flags=0x10 | FIN | CWR))
    pieces = link.arrived()
    found = link.counters()
    assert found["lost_segments"] > 0
    assert found["delivered_segments"] == 33 - found["lost_segments"]
    num_segments = 0
    for piece in pieces:
        _, gso_type, header, gso_size, start, offset = VIRTIO.unpack_from(piece)
        ip, tcp, data = piece[10:30], piece[30:50], piece[50:]
        count = -(-len(data) // MSS)
        num_segments += count
        assert (gso_type, gso_size) == ((GSO_TCPV4, MSS) if count > 1 else (0, 0))
        assert (header, start, offset) == (HEADER_BYTES, 20, 16)
        assert _sum(ip) == 0xFFFF
        assert struct.unpack_from(">H", ip, 2)[0] == 40 + len(data)
        (sequence,) = struct.unpack_from(">I", tcp, 4)
        begin = sequence - 1000
        assert data == payload[begin : begin + len(data)]
        assert struct.unpack_from(">H", ip, 4)[0] == 7 + begin // MSS
        assert bool(tcp[13] & CWR) == (begin == 0)
        assert bool(tcp[13] & FIN) == (begin + len(data) == len(payload))
        pseudo = ip[12:20] + struct.pack(">HH", 6, 20 + len(data))
        assert struct.unpack_from(">H", tcp, 16)[0] == _sum(pseudo)
    assert num_segments == found["delivered_segments"]


def test_full_queue_drops_the_tail(link: Link) -> None:
    link.set_path(Path(100e6, 0.0, queue_bytes=10 * (MSS + HEADER_BYTES)))
    link.near.send(packet(bytes(40 * MSS)))
    link.arrived()
    found = link.counters()
    assert (found["delivered_segments"], found["dropped_segments"]) == (10, 30)


def test_flow_cap_holds_each_connection_by_itself(link: Link) -> None:
    link.set_path(Path(1e9, 0.0, flow_cap_bit_per_s=10e6))
    begin_s = time.perf_counter()
    for port in (1, 1, 2, 2):
        link.near.send(packet(bytes(40 * MSS), port))
    arrived_s = []
    for _ in range(4):
        link.far.recv(1 << 17)
        arrived_s.append(time.perf_counter() - begin_s)
    one_s = 40 * (MSS + HEADER_BYTES) * 8 / 10e6
    assert arrived_s == pytest.approx([one_s, one_s, 2 * one_s, 2 * one_s], abs=0.03)


def test_jitter_keeps_the_order(link: Link) -> None:
    link.set_path(Path(0, 0.0, jitter_s=0.02))
    sent = [packet(bytes([number]) * 100) for number in range(50)]
    for one in sent:
        link.near.send(one)
    assert link.arrived() == sent
