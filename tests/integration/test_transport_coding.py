"""Codecs, pacing and standby connections between a real sender and receiver."""

from __future__ import annotations

import random
import time
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from transport_doubles import MemorySpace, make_spec
from transport_loopback import LoopbackPair

from transport import Elements, TransportConfig
from transport.testing.proxy import HurtfulProxy

MIB = 1024 * 1024
CONFIG = TransportConfig(
    num_connections=4, handshake_timeout_s=2, ack_timeout_s=2, idle_timeout_s=5
)


def bf16(num_bytes: int) -> bytearray:
    """Normally distributed numbers as bf16."""
    numbers = np.random.default_rng(0).standard_normal(num_bytes // 2, np.float32)
    return bytearray((numbers.view(np.uint32) >> 16).astype(np.uint16).tobytes())


def values(data: bytearray) -> np.ndarray:
    return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)


def transferred(
    pair: LoopbackPair, data: bytearray, elements: Elements, *, digest: bool = False
) -> tuple[bytearray, tuple[str, ...]]:
    """What landed, and the codecs it went through."""
    spec = replace(make_spec(1, pair.endpoint), elements=elements, digest=digest)
    landed = bytearray(len(data))
    pair.registry.expect(spec, MemorySpace(landed, 48 * 1024))
    handle = pair.sender.open(spec, MemorySpace(data), pair.listener)
    handle.ready(0, len(data))
    assert pair.listener.wait(spec.transfer_id) is None
    return landed, handle.progress().codecs


@pytest.mark.parametrize("codec", ["lz4", "zstd", "lz4_planes", "zstd_planes", "auto"])
@pytest.mark.parametrize("elements", list(Elements))
def test_lossless_codecs_lose_nothing(codec: str, elements: Elements) -> None:
    data = bf16(3 * MIB) + bytearray(MIB) + b"odd"
    with closing(LoopbackPair(replace(CONFIG, codec=codec))) as pair:
        landed, codecs = transferred(pair, data, elements, digest=True)
        assert landed == data
        assert set(codecs) <= ({codec} if codec != "auto" else {"lz4", "zstd_planes"})


def test_fp8_rounds_every_number_and_is_named() -> None:
    data = bf16(8 * MIB)
    config = replace(CONFIG, codec="fp8", frame_bytes=100_001)  # frames that cut numbers go raw
    with closing(LoopbackPair(config)) as pair:
        landed, codecs = transferred(pair, data, Elements.BF16)
    assert codecs == ("fp8",)
    error = values(landed) - values(data)
    assert 0 < np.sqrt(np.mean(error**2) / np.mean(values(data) ** 2)) < 0.03


@pytest.mark.parametrize("elements", [Elements.FP16, Elements.FP32, Elements.BYTES])
def test_fp8_touches_nothing_but_bf16(elements: Elements) -> None:
    data = bf16(2 * MIB)
    with closing(LoopbackPair(replace(CONFIG, codec="fp8"))) as pair:
        assert transferred(pair, data, elements) == (data, ())


def test_fp8_needs_both_sides() -> None:
    data = bf16(2 * MIB)
    lossy = replace(CONFIG, codec="fp8")
    with closing(LoopbackPair(lossy, receiver_config=CONFIG)) as pair:
        assert transferred(pair, data, Elements.BF16) == (data, ())


def test_a_pace_beyond_what_fits_an_int_is_kept() -> None:
    data = bytearray(random.Random(0).randbytes(4 * MIB))
    with closing(LoopbackPair(replace(CONFIG, pace_bytes_per_s=6e9))) as pair:
        assert transferred(pair, data, Elements.BYTES)[0] == data


def test_a_pace_is_kept() -> None:
    data = bytearray(4 * MIB)
    with closing(LoopbackPair(replace(CONFIG, codec="none", pace_bytes_per_s=8e6))) as pair:
        begin_s = time.monotonic()
        transferred(pair, data, Elements.BYTES)
        assert time.monotonic() - begin_s > 0.8 * len(data) / 8e6


def test_connections_that_come_back_in_any_order_lose_no_work() -> None:
    """On a near path one connection carries data; while they come back another may."""
    data = bytearray(64 * 1024)
    config = replace(CONFIG, num_connections=8, idle_timeout_s=3, reconnect_first_s=0.001)
    with (
        closing(LoopbackPair(config)) as pair,
        closing(HurtfulProxy(pair.endpoint)) as proxy,
    ):
        for number in range(1, 12):
            handle, landed = pair.begin(number, data, via=proxy.endpoint)
            handle.ready(0, len(data))
            assert pair.listener.wait(handle.transfer_id) is None
            assert landed == data
            proxy.cut()
