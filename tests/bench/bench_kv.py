"""The prefix cache: what it finds of a trace, how fast pages move, what the directory answers.

Run: python tests/bench/bench_kv.py [--json FILE] [--smoke | --full] [--trace FILE] [--only PART
...]. Parts:

    lru, placement, policy   replays of --trace, JSON lines in Mooncake's format with blocks of 512
                             tokens; left out without one (`kv_replays.py`)
    copies                   the connector's copies between engine pages and the arena
    directory                `bench_directory.py`

With --smoke the replays play a few requests that are made up here.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from kv_replays import BLOCK_TOKENS, Row, measure_lru, measure_placements, measure_policies
from numpy.typing import NDArray
from smoke import add_smoke

from kvmanager.arena import Arena
from kvmanager.layout import KVPart
from kvmanager.vllm_connector.pages import NO_BLOCKS, Copy, CpuPageCopier
from kvmanager.vllm_connector.slabs import BlockIds, PartView, Piece, Slab

GB: Final = 10**9
KIB: Final = 1 << 10
MIB: Final = 1 << 20
PAGE_KIB: Final = (16, 64, 256, 1024, 2048)
REPLAYS: Final = ("lru", "placement", "policy")
PARTS: Final = (*REPLAYS, "copies", "directory")


def rates(nbytes: int, rounds: int, run: Callable[[], object]) -> float:
    """Bytes per second, the median over the rounds after one that faults pages in."""
    seconds = []
    for _ in range(rounds + 1):
        began_s = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began_s)
    return nbytes / statistics.median(seconds[1:])


def layer_runs(num_arena_blocks: int, *, scattered: bool) -> list[tuple[int, int]]:
    """One run, or every arena block for itself in a random order."""
    if not scattered:
        return [(0, num_arena_blocks)]
    order = np.random.default_rng(5).permutation(num_arena_blocks)
    return [(int(block), 1) for block in order]


def measure_copies(total_bytes: int, rounds: int) -> list[Row]:
    """Pages of an engine's cache to arena memory and back, against memcpy of as many bytes: all at
    once (past the caches, as libc does it for long copies), and page by page in the same order."""
    print(
        f"engine pages and the arena, {total_bytes // MIB} MiB, GB/s of one core\n"
        "page KiB   arena       store    load   memcpy by page   store/memcpy   load/memcpy"
    )
    rows = []
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as at:
        arena = Arena.create(Path(at), total_bytes // (64 * KIB))
        try:
            for page_kib in PAGE_KIB:
                for scattered in (False, True):
                    rows.append(copy_row(arena, page_kib * KIB, rounds, scattered=scattered))
        finally:
            arena.close()
    return rows


def copy_by_page(flat: NDArray[np.uint8], pages: NDArray[np.uint8], order: list[int]) -> None:
    """What a copier cannot beat without changing how a page is written."""
    rows = flat.reshape(len(order), -1)
    for row, page in enumerate(order):
        rows[row] = pages[page]


def store_all(copier: CpuPageCopier, slabs: list[Slab]) -> None:
    """Store slabs as one copy. Raises what it failed with."""
    errors: list[BaseException | None] = []
    copier.store((), NO_BLOCKS, lambda: [Copy(slabs, errors.append)])
    for error in filter(None, errors):
        raise error


def copy_row(arena: Arena, page_bytes: int, rounds: int, *, scattered: bool) -> Row:
    """One page size: all pages of a layer, in a random order."""
    num_pages = arena.nbytes // page_bytes
    cache = torch.randint(0, 256, (num_pages, page_bytes), dtype=torch.uint8)
    part = KVPart("pages", 1, page_bytes, "opaque", BLOCK_TOKENS)
    one = range(1)
    view = PartView(part, one, one, (Piece(cache.view(num_pages, 1, 1, page_bytes)),))
    space = arena.view(layer_runs(arena.num_blocks, scattered=scattered), arena.nbytes)
    order = [int(page) for page in np.random.default_rng(7).permutation(num_pages)]
    blocks = BlockIds.of(order)
    slabs = [Slab(view, one, blocks, 0, num_pages, space, 0, arena.nbytes)]
    copier = CpuPageCopier()
    engine = cache.numpy().reshape(-1)
    flat = np.frombuffer(arena.memory, np.uint8)
    copied = rates(arena.nbytes, rounds, lambda: np.copyto(flat, engine))
    by_page = rates(arena.nbytes, rounds, lambda: copy_by_page(flat, cache.numpy(), order))
    store = rates(arena.nbytes, rounds, lambda: store_all(copier, slabs))
    before = cache.clone()
    load = rates(arena.nbytes, rounds, lambda: copier.load(slabs))
    if not torch.equal(before, cache):
        raise RuntimeError(f"pages of {page_bytes} bytes came back changed")
    name = "scattered" if scattered else "one run"
    print(
        f"{page_bytes // KIB:8}   {name:9} {store / GB:7.2f} {load / GB:7.2f} {copied / GB:8.2f} "
        f"{by_page / GB:7.2f} {store / copied:14.2f} {load / copied:13.2f}",
        flush=True,
    )
    return {
        "page_bytes": page_bytes,
        "scattered": scattered,
        "store_bytes_per_s": store,
        "load_bytes_per_s": load,
        "memcpy_bytes_per_s": copied,
        "memcpy_by_page_bytes_per_s": by_page,
    }


def measure_directory(*more: str) -> Any:
    """What `bench_directory.py` measures, in a process of its own: it counts its memory."""
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "directory.json"
        script = Path(__file__).with_name("bench_directory.py")
        subprocess.run([sys.executable, str(script), "--json", str(kept), *more], check=True)
        return json.loads(kept.read_text())


def measure(part: str, arguments: argparse.Namespace) -> Any:
    """The raw numbers of one part; None where it was left out."""
    if part in REPLAYS and arguments.trace is None:
        print(f"{part}: not measured (no --trace FILE)")
        return None
    match part:
        case "lru":
            return measure_lru(arguments.trace)
        case "placement":
            return measure_placements(arguments.trace, full=arguments.full)
        case "policy":
            return measure_policies(arguments.trace, full=arguments.full)
        case "copies":
            return measure_copies(arguments.mib * MIB, arguments.rounds)
        case _:
            sizes = {"--smoke": arguments.smoke, "--full": arguments.full}
            return measure_directory(*(flag for flag, is_asked in sizes.items() if is_asked))


def made_up_trace(folder: str) -> Path:
    """Turns of a few conversations, in Mooncake's format."""
    path = Path(folder) / "trace.jsonl"
    lines: list[str] = []
    for turn in range(6):
        for conversation in range(5):
            num_blocks = 3 * (turn + 1)
            hash_ids = [100 * conversation + block for block in range(num_blocks + 1)]
            line = {
                "timestamp": 1000 * len(lines),
                "input_length": BLOCK_TOKENS * num_blocks + 100,
                "output_length": 50,
                "hash_ids": hash_ids,
            }
            lines.append(json.dumps(line))
    path.write_text("\n".join(lines) + "\n")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the raw numbers here")
    parser.add_argument("--trace", type=Path, help="request trace for the replays")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--full", action="store_true", help="all capacities, larger directories")
    parser.add_argument("--mib", type=int, default=128, help="MiB copied at once")
    parser.add_argument("--rounds", type=int, default=5, help="of copies")
    add_smoke(parser, rounds=1, mib=4)
    arguments = parser.parse_args()
    kept = {}
    with tempfile.TemporaryDirectory() as folder:
        if arguments.smoke and arguments.trace is None:
            arguments.trace = made_up_trace(folder)
        for part in arguments.only:
            kept[part] = measure(part, arguments)
            print(flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
