"""Codecs: what comes back, what is refused, how much memory a hostile payload can take."""

from __future__ import annotations

import struct
import tracemalloc
from contextlib import suppress
from itertools import pairwise

import lz4.block
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from transport.codec import planes as codec_planes
from transport.codec.codecs import (
    Codec,
    CodecError,
    decode,
    encode,
)

KIB = 1024
MIB = 1024 * KIB
LOSSLESS = [codec for codec in Codec if codec.is_lossless]
PACKING = [codec for codec in LOSSLESS if codec is not Codec.RAW]
PLANES = [codec for codec in Codec if codec.has_planes]

lengths = st.one_of(
    st.integers(1, 300), st.integers(120 * KIB, 140 * KIB), st.integers(520 * KIB, 530 * KIB)
)
cuts = st.lists(st.floats(0, 1), max_size=6)
contents = st.sampled_from(["random", "zeros", "bf16", "fp32", "text", "half zero"])


def content(kind: str, num_bytes: int) -> bytes:
    rng = np.random.default_rng(num_bytes)
    if kind == "random":
        return rng.bytes(num_bytes)
    if kind == "zeros":
        return bytes(num_bytes)
    if kind == "text":
        return (b"the same words again " * (num_bytes // 21 + 1))[:num_bytes]
    if kind == "half zero":
        return (rng.bytes(num_bytes // 2) + bytes(num_bytes))[:num_bytes]
    words = rng.standard_normal(num_bytes // 2 + 1, dtype=np.float32)
    return (bf16(words) if kind == "bf16" else words).tobytes()[:num_bytes]


def bf16(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def from_bf16(patterns: np.ndarray) -> np.ndarray:
    return (patterns.astype(np.uint32) << 16).view(np.float32)


def scattered(memory: memoryview, at: list[float]) -> list[memoryview]:
    """`memory` in consecutive views, some of them possibly empty."""
    edges = [0, *sorted(int(part * memory.nbytes) for part in at), memory.nbytes]
    return [memory[start:end] for start, end in pairwise(edges)]


def round_trip(codec: Codec, data: bytes, element_bytes: int) -> bytes:
    payload = encode(codec, [memoryview(data)], element_bytes)
    out = bytearray(len(data))
    decode(codec, memoryview(payload), len(data), [memoryview(out)])
    return bytes(out)


@pytest.mark.parametrize("codec", LOSSLESS)
@settings(deadline=None)
@given(lengths, contents, st.sampled_from([1, 2, 4]), cuts, cuts)
def test_every_byte_comes_back_whatever_the_views(
    codec: Codec,
    num_bytes: int,
    kind: str,
    element_bytes: int,
    source_cuts: list[float],
    target_cuts: list[float],
) -> None:
    data = content(kind, num_bytes)
    payload = encode(codec, scattered(memoryview(data), source_cuts), element_bytes)
    guarded = bytearray(b"\xaa" * (num_bytes + 16))
    inside = memoryview(guarded)[8 : 8 + num_bytes]
    decode(codec, memoryview(payload), num_bytes, scattered(inside, target_cuts))
    assert guarded == b"\xaa" * 8 + data + b"\xaa" * 8


@pytest.mark.parametrize("codec", LOSSLESS)
@pytest.mark.parametrize("element_bytes", [2, 4])
def test_views_large_enough_to_be_worked_on_alone(codec: Codec, element_bytes: int) -> None:
    data = content("bf16", 640 * KIB + 3)
    views = [memoryview(data)[: 256 * KIB], memoryview(data)[256 * KIB :]]
    payload = memoryview(encode(codec, views, element_bytes))
    out = bytearray(len(data))
    decode(
        codec,
        payload,
        len(data),
        [memoryview(out)[: 320 * KIB], memoryview(out)[320 * KIB :]],
    )
    assert out == data


@pytest.mark.parametrize("codec", PLANES)
def test_every_bit_pattern_of_a_16_bit_element_survives(codec: Codec) -> None:
    data = np.arange(65536, dtype=np.uint16).tobytes()
    assert round_trip(codec, data, 2) == data


@pytest.mark.parametrize("codec", PLANES)
def test_special_float32_values_survive(codec: Codec) -> None:
    values = np.array([0.0, -0.0, np.inf, -np.inf, 1e-45, -1e-45, 3.4e38, 1.0], np.float32)
    nans = np.array([0x7F800001, 0xFFC12345, 0x7FFFFFFF], np.uint32)
    data = values.tobytes() + nans.tobytes()
    assert round_trip(codec, data, 4) == data


def test_the_exponent_of_bf16_is_a_plane_of_its_own() -> None:
    one, minus_pi = 0x3F80, 0xC049
    planes = np.empty((2, 2), np.uint8)
    codec_planes.split(np.array([one, minus_pi], np.uint16).view(np.uint8), planes, 0)
    assert planes[1].tolist() == [127, 128]
    assert planes[0].tolist() == [0, 0x49 << 1 | 1]


@pytest.mark.parametrize(
    ("kind", "element_bytes", "least"), [("bf16", 2, 1.45), ("fp32", 4, 1.18), ("zeros", 2, 1000)]
)
def test_planes_save_what_the_exponents_repeat(kind: str, element_bytes: int, least: float) -> None:
    data = content(kind, MIB)
    assert len(data) / len(encode(Codec.ZSTD_PLANES, [memoryview(data)], element_bytes)) > least


def test_only_planes_that_compress_are_packed() -> None:
    payload = bytes(encode(Codec.ZSTD_PLANES, [memoryview(content("bf16", MIB))], 2))
    low, high = struct.iter_unpack("<BI", payload[1:11])
    assert low == (0, MIB // 2)
    assert high[0] == 1
    assert high[1] < MIB // 4


@pytest.mark.parametrize("codec", PACKING)
def test_what_does_not_compress_costs_a_header(codec: Codec) -> None:
    data = content("random", MIB)
    assert MIB < len(encode(codec, [memoryview(data)], 2)) <= MIB + 11


def test_encode_refuses_what_it_is_not_for() -> None:
    data = memoryview(b"1234")
    with pytest.raises(ValueError, match="3 bytes"):
        encode(Codec.ZSTD, [data], 3)
    with pytest.raises(ValueError, match="at least one byte"):
        encode(Codec.ZSTD, [data[:0]], 2)
    with pytest.raises(ValueError, match="bf16"):
        encode(Codec.FP8, [data], 4)
    with pytest.raises(ValueError, match="do not hold"):
        decode(Codec.RAW, data, 5, [memoryview(bytearray(4))])


# --- FP8


def fp8(values: np.ndarray) -> np.ndarray:
    return from_bf16(np.frombuffer(round_trip(Codec.FP8, bf16(values).tobytes(), 2), np.uint16))


def test_fp8_halves_and_keeps_its_stated_error() -> None:
    values = from_bf16(bf16(np.random.default_rng(1).standard_normal(MIB)))
    assert len(encode(Codec.FP8, [memoryview(bf16(values).tobytes())], 2)) * 2 == values.size * 2
    error = fp8(values) - values
    assert np.sqrt(np.mean(error**2) / np.mean(values**2)) < 0.028
    normal = np.abs(values) >= 2.0**-6
    assert np.max(np.abs(error[normal] / values[normal])) <= 1 / 16
    assert np.max(np.abs(error[~normal])) <= 2.0**-10


def test_fp8_special_values() -> None:
    values = np.array([0.0, -0.0, np.inf, -np.inf, 1e30, -500.0, 448.0, 2.0**-9, 2.0**-10])
    expected = [0.0, -0.0, 448.0, -448.0, 448.0, -448.0, 448.0, 2.0**-9, 0.0]
    found = fp8(values)
    assert found.tolist() == expected
    assert np.signbit(found[1])
    nans = np.array([0x7FC0, 0xFFC0, 0x7F81, 0xFFFF], np.uint16)
    out = np.frombuffer(round_trip(Codec.FP8, nans.tobytes(), 2), np.uint16)
    assert np.isnan(from_bf16(out)).all()
    assert ((out >> 15) == (nans >> 15)).all()


def test_fp8_rounds_to_nearest_even_and_is_stable() -> None:
    # Between 1 and 2 the steps are 1/8: 1 + 1/16 is a tie and goes to the even code, 1.
    assert fp8(np.array([1 + 1 / 16, 1 + 3 / 16])).tolist() == [1.0, 1.25]
    every = np.arange(65536, dtype=np.uint16).tobytes()
    once = round_trip(Codec.FP8, every, 2)
    assert round_trip(Codec.FP8, once, 2) == once


@settings(deadline=None)
@given(st.integers(1, 5000), cuts, cuts)
def test_fp8_with_any_views_and_an_odd_byte(
    num_bytes: int, source_cuts: list[float], target_cuts: list[float]
) -> None:
    data = content("bf16", num_bytes)
    whole = round_trip(Codec.FP8, data, 2)
    payload = encode(Codec.FP8, scattered(memoryview(data), source_cuts), 2)
    out = bytearray(num_bytes)
    decode(Codec.FP8, memoryview(payload), num_bytes, scattered(memoryview(out), target_cuts))
    assert out == whole
    assert num_bytes % 2 == 0 or out[-1] == data[-1]


# --- malformed payloads


def refuse(codec: Codec, payload: bytes, raw_bytes: int, match: str | None = None) -> None:
    """Decoding raises CodecError and stays inside the views and a multiple of raw_bytes."""
    guarded = bytearray(b"\xaa" * (raw_bytes + 16))
    inside = memoryview(guarded)[8 : 8 + raw_bytes]
    decode(codec, memoryview(encode(codec, [inside], 1)), raw_bytes, [inside])  # scratch made
    tracemalloc.start()
    try:
        with pytest.raises(CodecError, match=match):
            decode(codec, memoryview(payload), raw_bytes, [inside])
        assert tracemalloc.get_traced_memory()[1] < 4 * raw_bytes + 256 * KIB
    finally:
        tracemalloc.stop()
    assert guarded[:8] == guarded[-8:] == b"\xaa" * 8


def one_plane(body: bytes, packed: int = 1) -> bytes:
    return struct.pack("<BBI", 1, packed, len(body)) + body


@pytest.mark.parametrize("codec", list(Codec))
@settings(deadline=None)
@given(st.binary(max_size=200), st.integers(1, 500))
def test_random_payloads_raise_nothing_but_codec_errors(
    codec: Codec, payload: bytes, raw_bytes: int
) -> None:
    guarded = bytearray(b"\xaa" * (raw_bytes + 16))
    with suppress(CodecError):
        decode(codec, memoryview(payload), raw_bytes, [memoryview(guarded)[8:-8]])
    assert guarded[:8] == guarded[-8:] == b"\xaa" * 8


@pytest.mark.parametrize("codec", PACKING)
@settings(deadline=None)
@given(data=st.data())
def test_a_damaged_payload_raises_nothing_but_codec_errors(
    codec: Codec, data: st.DataObject
) -> None:
    payload = bytearray(encode(codec, [memoryview(content("bf16", 4000))], 2))
    position = data.draw(st.integers(0, len(payload) - 1))
    payload[position] ^= data.draw(st.integers(1, 255))
    out = bytearray(4000)
    with suppress(CodecError):
        decode(codec, memoryview(payload), 4000, [memoryview(out)])


@pytest.mark.parametrize("codec", [*PACKING, Codec.FP8, Codec.RAW])
def test_truncated_and_prolonged_payloads(codec: Codec) -> None:
    payload = bytes(encode(codec, [memoryview(content("bf16", 3001))], 2))
    for end in [0, 1, 5, 6, 11, len(payload) // 2, len(payload) - 1]:
        out = bytearray(3001)
        with pytest.raises(CodecError):
            decode(codec, memoryview(payload[:end]), 3001, [memoryview(out)])
    with pytest.raises(CodecError):
        decode(codec, memoryview(payload + b"\0"), 3001, [memoryview(out)])


def test_bombs_are_not_unpacked() -> None:
    zeros = bytes(64 * MIB)
    zstd_bomb = one_plane(zstandard.ZstdCompressor().compress(zeros))
    lz4_bomb = one_plane(lz4.block.compress(zeros, store_size=False))
    refuse(Codec.ZSTD, zstd_bomb, 64 * KIB)
    refuse(Codec.LZ4, lz4_bomb[:60_000], 64 * KIB)
    refuse(Codec.LZ4, one_plane(lz4.block.compress(zeros[: 8 * MIB], store_size=False)), 64 * KIB)


def test_frames_that_hide_or_understate_their_size_are_refused() -> None:
    data = bytes(64 * KIB)
    unknown = zstandard.ZstdCompressor(write_content_size=False).compress(data)
    refuse(Codec.ZSTD, one_plane(unknown), 64 * KIB)
    smaller = zstandard.ZstdCompressor().compress(data[:-1])
    refuse(Codec.ZSTD, one_plane(smaller), 64 * KIB)
    followed = zstandard.ZstdCompressor().compress(data) + b"more"
    refuse(Codec.ZSTD, one_plane(followed), 64 * KIB)
    refuse(Codec.LZ4, one_plane(lz4.block.compress(data[:-1], store_size=False)), 64 * KIB)


def test_a_frame_that_needs_a_larger_window_is_refused() -> None:
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=27)
    stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj(size=2 * MIB)
    frame = stream.compress(bytes(2 * MIB)) + stream.flush()
    assert zstandard.get_frame_parameters(frame).content_size == 2 * MIB
    # A truncated frame makes the library reserve its window before it finds the end missing.
    refuse(Codec.ZSTD, one_plane(frame[:-3]), 2 * MIB, match="too much memory")


def test_headers_that_do_not_fit() -> None:
    stored = one_plane(bytes(100), packed=0)
    refuse(Codec.ZSTD, stored, 101)
    refuse(Codec.ZSTD, b"\2" + stored[1:], 100)  # planes in a codec without them
    refuse(Codec.ZSTD_PLANES, b"\3" + stored[1:], 100)
    refuse(Codec.ZSTD, one_plane(bytes(100), packed=2), 100)
    refuse(Codec.ZSTD, one_plane(bytes(100), packed=1), 100)
    refuse(Codec.LZ4, struct.pack("<BBI", 1, 1, 2**32 - 1) + bytes(90), 100)
