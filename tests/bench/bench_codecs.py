"""Ratio and speed of the transport's codecs on one core, on synthetic KVCache and other arrays.

Run: python tests/bench/bench_codecs.py [--json FILE] [--smoke] [--kv FOLDER]. Speeds are raw bytes
per CPU second of one thread, the median over --rounds passes through --mib MiB in chunks of
--chunk-kib. Synthetic: K is Gaussian with a scale and an offset for each channel, some channels ten
times larger; V is Gaussian with a scale for each token. How real KVCache compresses can only be
said of real KVCache: --kv takes a folder of files that hold bare bf16.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from smoke import add_smoke

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from transport.codec.codecs import Codec, decode, encode

KIB = 1024
MIB = 1024 * KIB
HEAD_DIM = 128


@dataclass(frozen=True)
class Array:
    """What is encoded: `data` holds elements of `element_bytes`; FP8 is only for bf16."""

    name: str
    data: memoryview
    element_bytes: int
    is_bf16: bool


@dataclass(frozen=True)
class Result:
    """One codec on one array; speeds in raw bytes per CPU second."""

    array: str
    codec: str
    ratio: float
    encode_bytes_per_s: float
    decode_bytes_per_s: float

    @property
    def pays_below_gbits(self) -> float:
        """Link rate up to which one core here and one there send faster than without the codec."""
        slower = min(self.encode_bytes_per_s, self.decode_bytes_per_s)
        return slower * 8 / 1e9 if self.ratio > 1.05 else 0.0


def as_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Rounded to nearest, as frameworks do it."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def arrays(num_bytes: int) -> Iterator[Array]:
    """The synthetic arrays, each of `num_bytes`."""
    rng = np.random.default_rng(20261121)
    shape = (num_bytes // 2 // HEAD_DIM, HEAD_DIM)
    gaussian = rng.standard_normal(shape, dtype=np.float32)
    scale = np.exp(rng.normal(0, 0.5, HEAD_DIM)).astype(np.float32)
    scale[rng.choice(HEAD_DIM, 8, replace=False)] *= 10
    offset = rng.normal(0, 1, HEAD_DIM).astype(np.float32) * scale
    keys = as_bf16(gaussian * scale + offset)
    token = np.exp(rng.normal(0, 0.3, (shape[0], 1))).astype(np.float32)
    padded = keys.copy()
    padded[shape[0] * 2 // 3 :] = 0
    plain = gaussian.ravel()
    yield Array("bf16 K", _bytes(keys), 2, True)
    yield Array("bf16 V", _bytes(as_bf16(gaussian * token * np.float32(0.3))), 2, True)
    yield Array("bf16 gaussian", _bytes(as_bf16(gaussian)), 2, True)
    yield Array("bf16 K, a third zeros", _bytes(padded), 2, True)
    yield Array("fp16 gaussian", _bytes(plain.astype(np.float16)), 2, False)
    yield Array("fp32 gaussian", _bytes(plain[: num_bytes // 4]), 4, False)
    widened = as_bf16(plain[: num_bytes // 4]).astype(np.uint32) << 16
    yield Array("fp32 from bf16", _bytes(widened), 4, False)


def real_arrays(folder: Path | None) -> Iterator[Array]:
    """Every file of `folder` as bf16."""
    for path in sorted(folder.iterdir()) if folder is not None else []:
        yield Array(path.name, memoryview(path.read_bytes()), 2, True)


def _bytes(array: NDArray[np.generic]) -> memoryview:
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def measure(array: Array, codec: Codec, chunk_bytes: int, rounds: int) -> Result:
    """Encode and decode the whole array `rounds` times; every lossless byte is compared."""
    num_bytes = array.data.nbytes
    out = memoryview(bytearray(num_bytes))
    at = range(0, num_bytes, chunk_bytes)
    encode_s, decode_s = [], []
    for _ in range(rounds + 1):
        begin_s = time.thread_time()
        payloads = [
            encode(codec, [array.data[start : start + chunk_bytes]], array.element_bytes)
            for start in at
        ]
        middle_s = time.thread_time()
        for start, payload in zip(at, payloads, strict=True):
            target = out[start : start + chunk_bytes]
            decode(codec, memoryview(payload), target.nbytes, [target])
        decode_s.append(time.thread_time() - middle_s)
        encode_s.append(middle_s - begin_s)
    if codec.is_lossless and out != array.data:
        raise RuntimeError(f"{codec.name} changed {array.name}")
    return Result(
        array=array.name,
        codec=codec.name.lower(),
        ratio=num_bytes / sum(len(payload) for payload in payloads),
        # The first pass makes contexts and faults pages in.
        encode_bytes_per_s=num_bytes / statistics.median(encode_s[1:]),
        decode_bytes_per_s=num_bytes / statistics.median(decode_s[1:]),
    )


def table(results: list[Result]) -> str:
    lines = [
        "array                  codec         ratio  encode GB/s  decode GB/s  pays below Gbit/s"
    ]
    lines += [
        f"{result.array:<22} {result.codec:<12} {result.ratio:6.2f} "
        f"{result.encode_bytes_per_s / 1e9:12.2f} {result.decode_bytes_per_s / 1e9:12.2f} "
        f"{result.pays_below_gbits:18.1f}"
        for result in results
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--mib", type=int, default=16)
    parser.add_argument("--chunk-kib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv", type=Path, help="folder of files that hold bare bf16 KVCache")
    add_smoke(parser, rounds=1, mib=1, chunk_kib=512)
    arguments = parser.parse_args()
    results = [
        measure(array, codec, arguments.chunk_kib * KIB, arguments.rounds)
        for array in (*arrays(arguments.mib * MIB), *real_arrays(arguments.kv))
        for codec in Codec
        if codec is not Codec.RAW and (codec.is_lossless or array.is_bf16)
    ]
    print(table(results))
    if arguments.kv is None:
        print("real KVCache: not measured (no --kv FOLDER)")
    if arguments.json is not None:
        settings = {
            "mib": arguments.mib,
            "chunk_kib": arguments.chunk_kib,
            "kv": bool(arguments.kv),
        }
        kept = {"settings": settings, "results": [asdict(result) for result in results]}
        arguments.json.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
