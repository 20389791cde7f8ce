"""What processes tell systemd: readiness, the watchdog's beats, and nothing without a socket."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmanager.loop.systemd import notify, served, watchdog_s


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.settimeout(30.0)
        yield sock


async def test_a_process_says_that_it_serves_lives_and_stops(
    manager: socket.socket, tmp_path: Path
) -> None:
    environment = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "20000"}
    async with served(environment):
        heard = [await asyncio.to_thread(manager.recv, 100) for _ in range(3)]
    assert heard == [b"READY=1", b"WATCHDOG=1", b"WATCHDOG=1"]
    while (last := manager.recv(100)) == b"WATCHDOG=1":
        pass
    assert last == b"STOPPING=1"


async def test_without_a_watchdog_there_are_no_beats(
    manager: socket.socket, tmp_path: Path
) -> None:
    async with served({"NOTIFY_SOCKET": str(tmp_path / "notify")}):
        await asyncio.sleep(0)
    assert [manager.recv(100), manager.recv(100)] == [b"READY=1", b"STOPPING=1"]


def test_the_watchdog_of_a_parent_is_not_ours() -> None:
    wanted = {"WATCHDOG_USEC": "3000000"}
    assert watchdog_s(wanted) == 3.0
    assert watchdog_s(wanted | {"WATCHDOG_PID": str(os.getpid())}) == 3.0
    assert watchdog_s(wanted | {"WATCHDOG_PID": str(os.getppid())}) is None
    assert watchdog_s({}) is watchdog_s({"WATCHDOG_USEC": "soon"}) is None


def test_abstract_sockets_and_lost_ones() -> None:
    name = f"prfaas-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(f"\0{name}")
        sock.settimeout(30.0)
        notify("READY=1", {"NOTIFY_SOCKET": f"@{name}"})
        assert sock.recv(100) == b"READY=1"
    notify("READY=1", {"NOTIFY_SOCKET": f"@{name}"})
    notify("READY=1", {})
