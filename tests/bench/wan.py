"""Two sites on this machine with a long link between them, for peers that choose their own ports.

A relay (`prfaas relay`) stands in for a link when the addresses are known. NIXL opens connections
of its own, so here the link is below TCP: two network namespaces, a TUN device in each, and a
process that carries packets from one to the other at a given rate and delay. Needs root.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import multiprocessing
import os
import select
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from typing import Any

NEAR, FAR = "10.77.0.2", "10.77.0.1"
"""Addresses of the site this process moves to (decode) and of the other one (prefill)."""

DEVICE = "wan0"
"""The link's network device at either site."""

MTU = 32_000
"""Bytes. Large, so that a forwarder in Python keeps up with 5 Gbit/s."""

MAX_QUEUE_S = 0.1
"""What the bottleneck queues before it drops packets, in seconds of its rate."""

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True, slots=True)
class Wan:
    """The link. `near`, `far`: names of the sites' network namespaces."""

    near: str
    far: str
    _gbps: Synchronized[float]
    rtt_s: float

    def set_rate(self, gbps: float) -> None:
        """Gbit/s of IP packets in each direction, from now on."""
        self._gbps.value = gbps

    def at_site(self, site: str, argv: Sequence[str]) -> list[str]:
        """The command that runs `argv` at that site, with that site's /sys (UCX reads it)."""
        return ["ip", "netns", "exec", site, *argv]


@contextlib.contextmanager
def wan(rtt_s: float) -> Iterator[Wan]:
    """Make the two sites and move this process into the near one; PermissionError without root.

    Call it before threads are started. The process stays where it is when the link goes.
    """
    if os.geteuid() != 0:
        raise PermissionError("an emulated wide-area link needs root: run `sudo make bench`")
    near, far = f"prfaas-near-{os.getpid()}", f"prfaas-far-{os.getpid()}"
    gbps: Any = multiprocessing.Value("d", 1.0)
    devices: list[int] = []
    forwarder = None
    try:
        for name, address in ((near, NEAR), (far, FAR)):
            _run("ip", "netns", "add", name)
            devices.append(_tun(name, address))
        # Lets the launcher here choose free ports for the processes over there.
        _run("ip", "netns", "exec", near, "sysctl", "-qw", "net.ipv4.ip_nonlocal_bind=1")
        context = multiprocessing.get_context("fork")
        forwarder = context.Process(target=_forward_both, args=(*devices, gbps, rtt_s / 2))
        forwarder.start()
        _enter(near)
        yield Wan(near, far, gbps, rtt_s)
    finally:
        if forwarder is not None:
            forwarder.terminate()
            forwarder.join()
        for device in devices:
            os.close(device)
        for name in (near, far):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def _run(*argv: str) -> None:
    done = subprocess.run(argv, check=False, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(argv)}: {done.stderr.strip() or done.returncode}")


def _tun(namespace: str, address: str) -> int:
    """A TUN device in the namespace; its packets are read and written through the descriptor."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    request = struct.pack("16sH14x", f"wan{device}".encode(), _IFF_TUN | _IFF_NO_PI)
    name = struct.unpack("16s16x", fcntl.ioctl(device, _TUNSETIFF, request))[0].rstrip(b"\0")
    link = name.decode()
    _run("ip", "link", "set", link, "netns", namespace)
    _run("ip", "netns", "exec", namespace, "sysctl", "-qw", "net.ipv6.conf.all.disable_ipv6=1")
    _run("ip", "-n", namespace, "link", "set", link, "name", DEVICE)
    _run("ip", "-n", namespace, "address", "add", f"{address}/24", "dev", DEVICE)
    queue = ("txqueuelen", "5000")
    _run("ip", "-n", namespace, "link", "set", DEVICE, "up", "mtu", str(MTU), *queue)
    _run("ip", "-n", namespace, "link", "set", "lo", "up")
    return device


def _enter(namespace: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/var/run/netns/{namespace}") as handle:
        if libc.setns(handle.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")


def _forward_both(near: int, far: int, gbps: Synchronized[float], delay_s: float) -> None:
    back = threading.Thread(target=_forward, args=(far, near, gbps, delay_s), daemon=True)
    back.start()
    _forward(near, far, gbps, delay_s)


def _forward(source: int, sink: int, gbps: Synchronized[float], delay_s: float) -> None:
    """Carry packets one way for ever: a bottleneck with a short queue, then the delay."""
    on_way: deque[tuple[float, bytes]] = deque()
    rate: Any = gbps
    idle_at_s = 0.0
    while True:
        wait_s = max(0.0, on_way[0][0] - time.monotonic()) if on_way else 1.0
        if select.select([source], [], [], wait_s)[0]:
            with contextlib.suppress(BlockingIOError):
                for _ in range(64):
                    packet = os.read(source, MTU)
                    now_s = time.monotonic()
                    start_s = max(now_s, idle_at_s)
                    if start_s - now_s < MAX_QUEUE_S:
                        idle_at_s = start_s + 8e-9 * len(packet) / rate.value
                        on_way.append((idle_at_s + delay_s, packet))
        now_s = time.monotonic()
        while on_way and on_way[0][0] <= now_s:
            with contextlib.suppress(OSError):
                os.write(sink, on_way.popleft()[1])
