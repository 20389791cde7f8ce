"""The link emulator as a process: its rate and delay, and each of its faults, on loopback."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from eventually import wait_until

from deploy.lab.emulator import RelayControl, RelayError, RelayProcess


class Echo:
    """Accepts connections; returns what it gets, or collects it when `echo` is off."""

    def __init__(self, *, echo: bool = True) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.to = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.received: list[bytearray] = []
        self.ended: list[str] = []
        self.reading = threading.Event()
        self.reading.set()
        self._echo = echo
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self.listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(peer,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, peer: socket.socket) -> None:
        data = bytearray()
        self.received.append(data)
        with peer:
            try:
                while self.reading.wait(10.0) and (piece := peer.recv(1 << 20)):
                    data += piece
                    if self._echo:
                        peer.sendall(piece)
                self.ended.append("end")
            except OSError:
                self.ended.append("reset")

    def close(self) -> None:
        # A blocked accept returns on shutdown, not on close.
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.reading.set()
        for thread in self._threads:
            thread.join(5.0)


@contextmanager
def echo_server(*, echo: bool = True) -> Iterator[Echo]:
    server = Echo(echo=echo)
    try:
        yield server
    finally:
        server.close()


def connect(link: RelayProcess) -> socket.socket:
    return socket.create_connection((link.host, link.port), timeout=5.0)


def receive(sock: socket.socket, nbytes: int) -> bytes:
    data = bytearray()
    while len(data) < nbytes and (piece := sock.recv(nbytes - len(data))):
        data += piece
    return bytes(data)


def test_bytes_pass_unchanged_both_ways() -> None:
    payload = os.urandom(3_000_000)
    with echo_server() as server, RelayProcess(server.to) as link:
        with connect(link) as client:
            sender = threading.Thread(target=client.sendall, args=(payload,))
            sender.start()
            assert receive(client, len(payload)) == payload
            sender.join()
            client.shutdown(socket.SHUT_WR)
            assert client.recv(1) == b""
        report = link.report()
        assert report.forward.in_bytes == report.forward.out_bytes == len(payload)
        assert report.backward.out_bytes == len(payload)
        wait_until(lambda: link.report().open_connections == 0)


@pytest.mark.alone
def test_round_trip_takes_the_rtt() -> None:
    with echo_server() as server, RelayProcess(server.to, rtt="60ms") as link:
        with connect(link) as client:
            client.sendall(b"x")
            receive(client, 1)
            times_s = []
            for _ in range(5):
                started_s = time.monotonic()
                client.sendall(b"x")
                receive(client, 1)
                times_s.append(time.monotonic() - started_s)
        assert min(times_s) > 0.055
        assert min(times_s) < 0.075
        first_in_s = link.report().forward.first_in_s
        first_out_s = link.report().forward.first_out_s
        assert first_in_s is not None
        assert first_out_s is not None
        assert 0.025 < first_out_s - first_in_s < 0.1


@pytest.mark.alone
def test_connecting_costs_a_round_trip() -> None:
    with echo_server() as server, RelayProcess(server.to, rtt="100ms") as link:
        started_s = time.monotonic()
        with connect(link) as client:
            client.sendall(b"x")
            receive(client, 1)
        assert 0.19 < time.monotonic() - started_s < 0.6


def test_jitter_spreads_delays_and_keeps_order() -> None:
    with (
        echo_server() as server,
        RelayProcess(server.to, rtt="20ms", jitter="5ms") as link,
        connect(link) as client,
    ):
        numbers = bytes(range(100))
        for number in numbers:
            client.sendall(bytes([number]))
            time.sleep(0.001)
        assert receive(client, 100) == numbers


@pytest.mark.parametrize("num_connections", [1, 4])
def test_rate_is_shared_by_all_connections(num_connections: int) -> None:
    with (
        echo_server(echo=False) as server,
        RelayProcess(server.to, rate="80Mbit", rtt="10ms") as link,
    ):
        payload = bytes(1_500_000)
        clients = [connect(link) for _ in range(num_connections)]
        threads = [threading.Thread(target=c.sendall, args=(payload,)) for c in clients]
        for thread in threads:
            thread.start()
        expected = num_connections * len(payload)
        wait_until(lambda: link.report().forward.out_bytes == expected)
        for thread, client in zip(threads, clients, strict=True):
            thread.join()
            client.close()
        report = link.report().forward
        assert report.first_out_s is not None
        assert report.last_out_s is not None
        took_s = report.last_out_s - report.first_out_s
        # Never faster; how much slower depends on who else uses this machine.
        assert 0.85 < took_s / (expected / 10e6) < 2.0
        wait_until(lambda: [len(data) for data in server.received] == [len(payload)] * len(clients))


def test_a_receiver_that_does_not_read_stops_the_sender() -> None:
    with (
        echo_server(echo=False) as server,
        RelayProcess(server.to, rate="800Mbit", rtt="2ms") as link,
    ):
        server.reading.clear()
        with connect(link) as client:
            client.settimeout(0.5)
            with pytest.raises(TimeoutError):
                client.sendall(bytes(64 << 20))
            assert link.report().forward.held_bytes < 4 << 20
            server.reading.set()


def test_cut_refuses_and_heal_accepts_again_on_the_same_port() -> None:
    with echo_server() as server, RelayProcess(server.to) as link:
        with connect(link) as client:
            client.sendall(b"x")
            assert receive(client, 1) == b"x"
            assert link.cut().is_cut
            with pytest.raises(ConnectionRefusedError):
                connect(link)
            with suppress(ConnectionResetError):
                assert client.recv(1) == b""
        assert not link.heal().is_cut
        with connect(link) as client:
            client.sendall(b"y")
            assert receive(client, 1) == b"y"


def test_cut_after_bytes_heals_by_itself() -> None:
    with echo_server(echo=False) as server, RelayProcess(server.to) as link:
        link.cut(after_bytes=100_000, for_s=0.3)
        with connect(link) as client, suppress(OSError):
            client.sendall(bytes(50_000_000))
            pytest.fail("the link took everything")
        assert link.report().forward.in_bytes == 100_000
        wait_until(lambda: not link.report().is_cut)
        connect(link).close()


def test_reset_strikes_once() -> None:
    with echo_server() as server, RelayProcess(server.to) as link:
        with connect(link) as client:
            client.sendall(b"x")
            receive(client, 1)
            link.reset()
            with pytest.raises(ConnectionResetError):
                client.recv(1)
        with connect(link) as client:
            client.sendall(b"y")
            assert receive(client, 1) == b"y"
        wait_until(lambda: "reset" in server.ended)


def test_black_hole_swallows_and_resets_on_healing() -> None:
    with echo_server() as server, RelayProcess(server.to) as link:
        with connect(link) as client:
            client.sendall(b"x")
            receive(client, 1)
            link.blackhole()
            client.sendall(b"lost")
            wait_until(lambda: link.report().forward.swallowed_bytes == 4)
            client.settimeout(0.1)
            with pytest.raises(TimeoutError):
                client.recv(1)
            with connect(link) as late:
                late.sendall(b"also lost")
                wait_until(lambda: link.report().forward.swallowed_bytes == 13)
            link.heal()
            client.settimeout(5.0)
            with pytest.raises(ConnectionResetError):
                client.recv(1)
        assert bytes(server.received[0]) == b"x"


def test_stall_freezes_and_goes_on() -> None:
    with echo_server() as server, RelayProcess(server.to) as link, connect(link) as client:
        client.sendall(b"x")
        receive(client, 1)
        link.stall("forward", for_s=0.3)
        started_s = time.monotonic()
        client.sendall(b"later")
        assert receive(client, 5) == b"later"
        assert time.monotonic() - started_s > 0.2


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_flip_changes_exactly_one_byte(direction: str) -> None:
    payload = bytes(300_000)
    with echo_server() as server, RelayProcess(server.to) as link:
        if direction == "forward":
            link.flip("forward", after_bytes=123_456)
        else:
            link.flip("backward", after_bytes=123_456)
        with connect(link) as client:
            sender = threading.Thread(target=client.sendall, args=(payload,))
            sender.start()
            returned = receive(client, len(payload))
            sender.join()
        assert [(i, byte) for i, byte in enumerate(returned) if byte] == [(123_456, 0xFF)]
        report = link.report()
        assert report.forward.flipped_bytes + report.backward.flipped_bytes == 1


def test_the_shape_can_change_while_bytes_flow() -> None:
    with (
        echo_server() as server,
        RelayProcess(server.to, rtt="2ms") as link,
        connect(link) as client,
    ):
        report = link.configure(rate="10Mbit", rtt="80ms")
        assert report.rate_bytes_per_s == pytest.approx(1.25e6)
        client.sendall(b"x")
        receive(client, 1)
        started_s = time.monotonic()
        client.sendall(b"x")
        receive(client, 1)
        assert time.monotonic() - started_s > 0.07
        with pytest.raises(ValueError, match="not a rate"):
            link.configure(rate="fast")


def test_nobody_at_the_target_resets_the_client() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        to = f"127.0.0.1:{listener.getsockname()[1]}"
    with RelayProcess(to) as link:
        # The reset may overtake the return of connect.
        with pytest.raises(ConnectionResetError), connect(link) as client:
            client.recv(1)
        assert link.report().failed_connections == 1


def test_a_wrong_command_is_answered_with_what_is_wrong() -> None:
    with echo_server() as server, RelayProcess(server.to) as link:
        with socket.socket(socket.AF_UNIX) as peer:
            peer.connect(str(link.socket_path))
            peer.sendall(b'{"op": "cut", "after_bytes": -1}\n')
            assert b"negative" in peer.recv(4096)
            peer.sendall(b'{"op": "dance"}\nnot json\n')
            assert b"dance" in peer.recv(4096)
        assert link.report().open_connections == 0


def test_stop_leaves_nothing() -> None:
    with echo_server() as server:
        link = RelayProcess(server.to).start()
        pid, path = link.pid, link.socket_path
        link.stop()
        assert not path.exists()
        assert not Path(f"/proc/{pid}").exists()
        with pytest.raises(RelayError, match="no relay answers"):
            RelayControl(path).report()


def test_a_start_that_fails_says_why() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        link = RelayProcess("127.0.0.1:1", listen=listen)
        with pytest.raises(RelayError, match="in use"), link:
            pass


def test_it_dies_with_the_process_that_started_it() -> None:
    code = (
        "import os, signal\n"
        "from deploy.lab.emulator import RelayProcess\n"
        "link = RelayProcess('127.0.0.1:1').start()\n"
        "print(link.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=False, timeout=30
    )
    assert done.returncode == -signal.SIGKILL
    pid = int(done.stdout)

    def is_gone() -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except FileNotFoundError:
            return True

    wait_until(is_gone)
