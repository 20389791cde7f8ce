"""Two sites on this machine with a long link between them, for peers that choose their own ports.

A relay (`prfaas relay`) stands in for a link when the addresses are known. Peers that open
connections of their own need a link below TCP: two network namespaces joined by `wan()`, a TUN
device in each with wan_forwarder.c between them, or by `veth()`, a pair without limits. Needs root,
`ip`, and for `wan()` a C compiler. Both move the calling thread into the near site until they end.

`python tests/bench/wan.py --check` prints what was asked of the link and what is found.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import json
import os
import shutil
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import Any, Self

NEAR, FAR = "10.77.0.2", "10.77.0.1"
"""Addresses of the site the caller moves to (decode) and of the other one (prefill)."""

DEVICE = "wan0"
"""The link's network device at either site."""

MTU = 1500
CONGESTION_ALLOWED = FilePath("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
LOCK = FilePath("/run/prfaas-bench.lock")
CONGESTION_AVAILABLE = CONGESTION_ALLOWED.with_name("tcp_available_congestion_control")
MIN_QUEUE_BYTES = 256 * 1024
MIB = 1024 * 1024
IPERF3_INTERVAL_S, IPERF3_SLACK_S = 0.5, 0.1
IPERF3_TRIES = 50
"""Tries to reach an iperf3 server that has just been started, a tenth of a second apart."""

_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4 = 0x01, 0x02
_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True, slots=True)
class Path:
    """What the link does to packets, alike in both directions.

    `rate_bit_per_s` counts IP packets; 0 is no limit. `jitter_s` is added to half of `rtt_s`,
    uniformly, without reordering. `loss` is the probability that a segment is lost, independent of
    the others. `flow_cap_bit_per_s` holds every TCP connection by itself. `queue_bytes` may wait at
    the bottleneck before new segments are dropped; None is what the path holds in one RTT.
    """

    rate_bit_per_s: float
    rtt_s: float
    jitter_s: float = 0.0
    loss: float = 0.0
    flow_cap_bit_per_s: float | None = None
    queue_bytes: int | None = None

    def command(self) -> str:
        """The forwarder's command for this path."""
        cap = self.flow_cap_bit_per_s or 0.0
        queue_bytes = self.queue_bytes
        if queue_bytes is None:
            queue_bytes = self._bytes_in_one_rtt(self.rate_bit_per_s)
        delay_ns, jitter_ns = round(5e8 * self.rtt_s), round(1e9 * self.jitter_s)
        return (
            f"path {self.rate_bit_per_s:.0f} {delay_ns} {jitter_ns} {self.loss:.9f}"
            f" {queue_bytes} {cap:.0f} {self._bytes_in_one_rtt(cap)}"
        )

    def _bytes_in_one_rtt(self, rate_bit_per_s: float) -> int:
        return max(MIN_QUEUE_BYTES, round(rate_bit_per_s * self.rtt_s / 8))

    def __str__(self) -> str:
        text = f"{self.rate_bit_per_s / 1e9:g}g/{1e3 * self.rtt_s:g}ms"
        text += f"/{100 * self.loss:g}%" if self.loss else ""
        cap = self.flow_cap_bit_per_s
        return text + (f"/cap {cap / 1e6:g}m" if cap else "")


class Sites:
    """The two sites. `near`, `far`: names of their network namespaces."""

    def __init__(self, near: str, far: str) -> None:
        self.near, self.far = near, far

    def at_site(self, site: str, argv: Sequence[str]) -> list[str]:
        """The command that runs `argv` at that site, with that site's /sys (UCX reads it)."""
        return ["ip", "netns", "exec", site, *argv]

    def set_sysctl(self, name: str, value: str) -> None:
        """At both sites, for as long as they exist; OSError if it is not theirs to set."""
        for site in (self.near, self.far):
            run(*self.at_site(site, ["sysctl", "-qw", f"{name}={value}"]))

    def set_congestion_control(self, name: str) -> None:
        """What new TCP connections use unless they choose for themselves, such as `cubic`."""
        self.set_sysctl("net.ipv4.tcp_congestion_control", name)

    def set_send_buffer_max(self, nbytes: int) -> None:
        """How far the kernel grows the send buffer of a connection that sets none itself."""
        least, default, _ = FilePath("/proc/sys/net/ipv4/tcp_wmem").read_text().split()
        self.set_sysctl("net.ipv4.tcp_wmem", f"{least} {default} {nbytes}")


class Forwarder:
    """A running wan_forwarder: the link between two network devices."""

    def __init__(self, process: subprocess.Popen[str], path: Path) -> None:
        self._process = process
        self.set_path(path)

    @property
    def rtt_s(self) -> float:
        return self.path.rtt_s

    def set_path(self, path: Path) -> None:
        """For packets that enter from now on, in both directions; counters start at zero."""
        answer = self._ask(path.command())
        if answer != "ok":
            raise ValueError(f"{path}: {answer}")
        self.path = path

    def set_rate(self, gbps: float) -> None:
        """Gbit/s of IP packets in each direction, from now on."""
        self.set_path(replace(self.path, rate_bit_per_s=1e9 * gbps))

    def counters(self) -> dict[str, dict[str, Any]]:
        """Since the last `set_path`, for `to_far` and `to_near`.

        `segments` and their wire `bytes` came in; of them some were `dropped_segments` for want of
        queue and some `lost_segments`; `delivered_segments` left in `packets_out` writes, of which
        `late_packets` more than 1 ms after their time (`latest_ms`: the worst).
        """
        answer: dict[str, dict[str, Any]] = json.loads(self._ask("counters"))
        return answer

    def _ask(self, command: str) -> str:
        pipes = self._process
        assert pipes.stdin is not None
        assert pipes.stdout is not None
        pipes.stdin.write(f"{command}\n")
        pipes.stdin.flush()
        if not (answer := pipes.stdout.readline()):
            raise OSError(f"the link's forwarder ended: status {pipes.wait()}")
        return answer.strip()


class Wan(Sites, Forwarder):
    """Two sites and the link between them."""

    def __init__(self, near: str, far: str, process: subprocess.Popen[str], path: Path) -> None:
        Sites.__init__(self, near, far)
        Forwarder.__init__(self, process, path)


@contextlib.contextmanager
def wan(rtt_s: float = 0.02, rate_bit_per_s: float = 1e9) -> Iterator[Wan]:
    """Make the sites and the link and move this thread into the near site.

    Threads and processes that are started inside are at the near site too. PermissionError without
    root, OSError where there is no C compiler or the sites cannot be made.
    """
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="prfaas-wan-"))
        binary = build_forwarder(FilePath(folder))
        near, far = stack.enter_context(_namespaces())
        ends = End(near, DEVICE, NEAR), End(far, DEVICE, FAR)
        process = stack.enter_context(forwarding(binary, *ends))
        link = Wan(near, far, process, Path(rate_bit_per_s, rtt_s))
        stack.enter_context(Inside(near))
        yield link


@dataclass(frozen=True, slots=True)
class End:
    """One end of a link: its network device in a namespace, with an address of a /24 network."""

    namespace: str
    device: str
    address: str


@contextlib.contextmanager
def forwarding(binary: FilePath, near: End, far: End) -> Iterator[subprocess.Popen[str]]:
    """Make the devices and run the forwarder `binary` between them. OSError."""
    with contextlib.ExitStack() as stack:
        devices = []
        for end in (near, far):
            device, interface = _tun()
            stack.callback(os.close, device)
            _place(interface, end)
            devices.append(device)
        process = subprocess.Popen(
            [str(binary), *map(str, devices)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=devices,
            start_new_session=True,  # Ctrl-C is for us; it ends when its stdin does
        )
        stack.enter_context(process)
        stack.callback(process.kill)
        with contextlib.suppress(PermissionError):  # a link does not wait for a busy processor
            os.sched_setscheduler(process.pid, os.SCHED_FIFO, os.sched_param(10))
        yield process


@contextlib.contextmanager
def veth() -> Iterator[Sites]:
    """Two sites joined by an unshaped pair of devices; like `wan()` in everything else."""
    with _namespaces() as (near, far):
        ends = f"pn{os.getpid()}", f"pf{os.getpid()}"
        run("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        _place(ends[0], End(near, DEVICE, NEAR))
        _place(ends[1], End(far, DEVICE, FAR))
        with Inside(near):
            yield Sites(near, far)


def build_forwarder(folder: FilePath) -> FilePath:
    """Compile wan_forwarder.c into the folder; OSError without a compiler or if it fails."""
    if shutil.which("cc") is None:
        raise OSError("an emulated wide-area link needs a C compiler: no `cc` was found")
    binary = folder / "wan_forwarder"
    source = FilePath(__file__).with_name("wan_forwarder.c")
    run("cc", "-O2", "-Wall", "-Wextra", "-o", str(binary), str(source), "-lm")
    return binary


def run(*argv: str) -> None:
    done = subprocess.run(argv, check=False, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(argv)}: {done.stderr.strip() or done.returncode}")


@contextlib.contextmanager
def _namespaces() -> Iterator[tuple[str, str]]:
    """The names of two new ones. Meanwhile the host lets everyone use every congestion control that
    it has: a namespace can only default to those. That is all that changes outside of them.
    """
    if os.geteuid() != 0:
        raise PermissionError("an emulated wide-area link needs root: run `sudo make bench`")
    names = f"prfaas-near-{os.getpid()}", f"prfaas-far-{os.getpid()}"
    with contextlib.ExitStack() as stack:
        stack.enter_context(_every_congestion_control())
        for name in names:
            stack.callback(
                subprocess.run, ["ip", "netns", "delete", name], check=False, capture_output=True
            )
            add_namespace(name)
        yield names


def add_namespace(name: str, *settings: str) -> None:
    """Make a network namespace with these sysctl settings beside those that every link needs."""
    run("ip", "netns", "add", name)
    always = (
        "net.ipv6.conf.all.disable_ipv6=1",  # the forwarder counts IPv4 segments
        "net.ipv4.tcp_no_metrics_save=1",  # one point's RTT and window are not the next's
        "net.ipv4.ip_nonlocal_bind=1",  # a launcher here picks ports for processes there
    )
    run("ip", "netns", "exec", name, "sysctl", "-qw", *always, *settings)
    run("ip", "-n", name, "link", "set", "lo", "up")


@contextlib.contextmanager
def _every_congestion_control() -> Iterator[None]:
    """The host's setting, as it was before at the end. Benches beside each other take turns: one
    would end with what the other has set, or without it.
    """
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        allowed = CONGESTION_ALLOWED.read_text()
        try:
            CONGESTION_ALLOWED.write_text(CONGESTION_AVAILABLE.read_text())
            yield
        finally:
            CONGESTION_ALLOWED.write_text(allowed)


def _tun() -> tuple[int, str]:
    """A TUN device that hands over TCP super-packets whole: its descriptor and its name."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    request = struct.pack("16sH14x", b"wan%d", _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR)
    name: bytes = struct.unpack("16s16x", fcntl.ioctl(device, _TUNSETIFF, request))[0]
    fcntl.ioctl(device, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4)
    return device, name.rstrip(b"\0").decode()


def _place(interface: str, end: End) -> None:
    """Move a network device into the end's namespace, with its name and address there."""
    namespace, device = end.namespace, end.device
    run("ip", "link", "set", interface, "netns", namespace)
    run("ip", "-n", namespace, "link", "set", interface, "name", device)
    run("ip", "-n", namespace, "address", "add", f"{end.address}/24", "dev", device)
    settings = ("mtu", str(MTU), "txqueuelen", "5000")
    run("ip", "-n", namespace, "link", "set", device, "up", *settings)


class Inside:
    """Moves this thread into a network namespace and back."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace

    def __enter__(self) -> Self:
        self._home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        with open(f"/var/run/netns/{self._namespace}") as handle:
            _set_namespace(handle.fileno())
        return self

    def __exit__(self, *_: object) -> None:
        _set_namespace(self._home)
        os.close(self._home)


def _set_namespace(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "cannot enter a network namespace")


CHECKED = (
    Path(1e9, 0.010),
    Path(1e9, 0.040, loss=0.001),
    Path(1e9, 0.040, loss=0.01),
    Path(2e9, 0.020),
    Path(5e9, 0.020),
)
NUM_CHECK_STREAMS, CHECK_S, SINK_PORT = 8, 4.0, 25310


def check(congestion: str) -> None:
    """Print asked and found, for the points of CHECKED."""
    how = "iperf3" if shutil.which("iperf3") else "raw streams"
    print(f"{NUM_CHECK_STREAMS} connections ({how}, {congestion}), {CHECK_S:g} s each")
    print("asked               RTT ms min/p50  Gbit/s  % lost  % dropped  % resent   late packets")
    with wan() as link:
        link.set_congestion_control(congestion)
        sink = subprocess.Popen(
            link.at_site(link.far, [sys.executable, __file__, "--sink"]), stdout=subprocess.PIPE
        )
        assert sink.stdout is not None
        sink.stdout.readline()
        try:
            for path in CHECKED:
                print(_check_one(link, path), flush=True)
        finally:
            sink.terminate()
            sink.communicate()


def _check_one(link: Wan, path: Path) -> str:
    link.set_path(path)
    rtts_ms = [1e3 * _connect_s() for _ in range(20)]
    link.set_path(path)
    measure = iperf3_stream if shutil.which("iperf3") else _raw_streams
    gbps, num_resent = measure(link, NUM_CHECK_STREAMS, CHECK_S)
    found = link.counters()["to_far"]
    dropped, resent = (100 * n / found["segments"] for n in (found["dropped_segments"], num_resent))
    lost = 100 * found["lost_segments"] / (found["segments"] - found["dropped_segments"])
    late = f"{found['late_packets']} of {found['packets_out']} (worst {found['latest_ms']:.1f} ms)"
    rtt = f"{min(rtts_ms):.2f}/{statistics.median(rtts_ms):.2f}"
    return f"{path!s:<19} {rtt:>14}{gbps:>8.3f}{lost:>8.4f}{dropped:>11.4f}{resent:>10.4f}   {late}"


def _connect_s() -> float:
    begin_s = time.perf_counter()
    with socket.create_connection((FAR, SINK_PORT), timeout=5):
        return time.perf_counter() - begin_s


def iperf3_stream(link: Sites, num_connections: int, seconds: float) -> tuple[float, int]:
    """(payload Gbit/s, segments sent again) of `num_connections` streams; SubprocessError when it
    fails. The rate is what the receiver read between the end of the first second and that of the
    last whole interval, by its own clock. (The rate that iperf3 sums up itself counts the bytes
    that were under way when the first second ended, which can be more than the link carries.)
    """
    argv = ["iperf3", "-s", "-1", "-J", "-i", str(IPERF3_INTERVAL_S)]
    server = subprocess.Popen(link.at_site(link.far, argv), stdout=subprocess.PIPE, text=True)
    try:
        argv = ["iperf3", "-c", FAR, "-P", str(num_connections), "-t", f"{1 + seconds:g}", "-J"]
        sent = _iperf3_client(link.at_site(link.near, argv), 60 + seconds)
        received, _ = server.communicate(timeout=60)
        sums = [interval["sum"] for interval in json.loads(received)["intervals"]]
        whole = [
            one for one in sums if one["start"] > 0.9 and one["end"] < 1 + seconds + IPERF3_SLACK_S
        ]
        if not whole:
            raise subprocess.SubprocessError("iperf3 has reported no whole interval")
        num_bytes = sum(one["bytes"] for one in whole)
        taken_s = sum(one["seconds"] for one in whole)
        return 8e-9 * num_bytes / taken_s, sent["end"]["sum_sent"]["retransmits"]
    finally:
        server.kill()
        server.communicate()


def _iperf3_client(argv: Sequence[str], timeout_s: float) -> dict[str, Any]:
    """The client's report; tried again until the server listens, which says nothing with -J."""
    for attempt in range(IPERF3_TRIES):
        done = subprocess.run(argv, capture_output=True, check=False, timeout=timeout_s)
        if done.returncode == 0:
            break
        if attempt < IPERF3_TRIES - 1:
            time.sleep(0.1)
    done.check_returncode()
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def _raw_streams(_link: Sites, num_connections: int, seconds: float) -> tuple[float, int]:
    """The same without iperf3, from the senders' TCP_INFO. Counts what the first second resent."""
    streams = [
        socket.create_connection((FAR, SINK_PORT), timeout=0.2) for _ in range(num_connections)
    ]
    is_over = threading.Event()

    def send(stream: socket.socket) -> None:
        chunk = bytes(MIB)
        while not is_over.is_set():
            with contextlib.suppress(TimeoutError):
                stream.send(chunk)

    threads = [threading.Thread(target=send, args=(stream,)) for stream in streams]
    for thread in threads:
        thread.start()
    time.sleep(1.0)
    first = [_tcp_info(stream) for stream in streams]
    time.sleep(seconds)
    last = [_tcp_info(stream) for stream in streams]
    is_over.set()
    for thread, stream in zip(threads, streams, strict=True):
        thread.join()
        # Reset: what its buffer still holds must not meet the next point.
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        stream.close()
    acked_bytes = sum(after[0] - before[0] for before, after in zip(first, last, strict=True))
    return 8e-9 * acked_bytes / seconds, sum(after[1] for after in last)


def _tcp_info(stream: socket.socket) -> tuple[int, int]:
    """(payload bytes acknowledged, segments sent again) of the connection so far."""
    info = stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    return struct.unpack_from("=Q", info, 120)[0], struct.unpack_from("=I", info, 100)[0]


def _sink() -> None:
    """Accept connections at the far site and discard what comes, until killed."""

    def drain(stream: socket.socket) -> None:
        buffer = bytearray(MIB)
        with stream, contextlib.suppress(OSError):
            while stream.recv_into(buffer):
                pass

    with socket.create_server((FAR, SINK_PORT)) as server:
        print("ready", flush=True)
        while True:
            threading.Thread(target=drain, args=(server.accept()[0],), daemon=True).start()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="measure the emulated link itself")
    parser.add_argument("--congestion", default="bbr", help="for --check")
    parser.add_argument("--sink", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.sink:
        _sink()
    elif arguments.check:
        check(arguments.congestion)
    else:
        parser.print_help()


if __name__ == "__main__":
    main()
