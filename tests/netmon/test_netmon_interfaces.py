"""Which interface leads somewhere: the kernel's answer, or None. Nothing is sent."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest

from netmon.interfaces import interface_of, read_interface


def test_the_own_host_is_behind_loopback() -> None:
    name = interface_of("127.0.0.1")
    assert name is not None
    before = psutil.net_io_counters(pernic=True, nowrap=False)[name]
    sample = read_interface(name)
    after = psutil.net_io_counters(pernic=True, nowrap=False)[name]
    assert sample is not None
    assert sample.name == name
    assert sample.is_up
    assert before.bytes_sent <= sample.sent_bytes <= after.bytes_sent
    assert sample.bytes_per_s is None  # loopback has no speed


def test_an_address_of_no_interface_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "net_if_addrs", dict)
    assert interface_of("127.0.0.1") is None


def test_an_interface_that_is_gone_is_none() -> None:
    assert read_interface("no-such-interface") is None


def test_counters_and_speed_are_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = SimpleNamespace(bytes_sent=1)
    stats = SimpleNamespace(speed=1000, isup=False)
    monkeypatch.setattr(psutil, "net_io_counters", lambda **_: {"eth0": counters})
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {"eth0": stats})
    sample = read_interface("eth0")
    assert sample is not None
    assert (sample.sent_bytes, sample.bytes_per_s, sample.is_up) == (1, 125e6, False)
