"""Replays of a request trace against the prefix pool, for `bench_kv.py`: LRU, placements, policies.

Sizes are the paper's case study: 17,280 bytes a token, and 173.93 MiB of recurrent states wherever
they are kept. Arena memory is numbers here, so capacities cost nothing; replays of one table run in
processes of their own, each reading the trace itself.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any, Final

from pool_replay import ReplayConfig, ReplayResult, replay

from deploy.plan.trace import load_trace
from kvmanager.pool.eviction import POLICIES, eviction_policy
from kvmanager.pool.placement import StatePlacement
from kvmanager.pool.shape import CacheShape, PartKind, PartShape
from scheduler.planning.prefix_reuse import TracePrompt, cached_tokens

GB: Final = 10**9
BLOCK_TOKENS: Final = 512
KV_BYTES: Final = 17_280 * BLOCK_TOKENS
STATE_BYTES: Final = round(173.93 * (1 << 20))
ARENA_BLOCK_BYTES: Final = KV_BYTES // 3
"""A state then takes 62 of them, a quarter of a percent more than its bytes."""
FULL: Final = CacheShape(BLOCK_TOKENS, (PartShape(PartKind.KV, KV_BYTES),))
HYBRID: Final = CacheShape(
    BLOCK_TOKENS, (PartShape(PartKind.KV, KV_BYTES), PartShape(PartKind.STATE, STATE_BYTES))
)
UNLIMITED_BLOCKS: Final = 1 << 40
LRU_BLOCKS: Final = (None, 100_000, 50_000, 30_000, 10_000, 1_000)
CAPACITIES_GB: Final = (256, 1000)
ALL_CAPACITIES_GB: Final = (64, 256, 1000, 4000, None)
CHUNK_TOKENS: Final = 8192
"""What vLLM computes in a step by default."""
EVERY_BLOCK: Final = StatePlacement(every_block=True)

Row = dict[str, Any]
Placed = tuple[StatePlacement, int | None]
"""What is kept, and the tokens of an engine's steps; None: it ends a step wherever it is asked."""


def dense(every_tokens: int, dense_tokens: int) -> StatePlacement:
    return StatePlacement(
        ends=True, branches=True, every_tokens=every_tokens, dense_tokens=dense_tokens
    )


PLACEMENTS: Final[dict[str, Placed]] = {
    "every block": (EVERY_BLOCK, None),
    "every step's end": (EVERY_BLOCK, CHUNK_TOKENS),
    "ends": (StatePlacement(ends=True, branches=False), CHUNK_TOKENS),
    "branches": (StatePlacement(ends=False, branches=True), CHUNK_TOKENS),
    "ends + branches": (StatePlacement(ends=True, branches=True), CHUNK_TOKENS),
    "+ 8192 if a step ends": (dense(8192, 131072), CHUNK_TOKENS),
    "+ every 8192 to 32768": (dense(8192, 32768), None),
    "+ every 2048 to 8192": (dense(2048, 8192), None),
}
MORE_PLACEMENTS: Final[dict[str, Placed]] = {
    "+ every 16384": (dense(16384, 131072), None),
    "+ every 4096 to 16384": (dense(4096, 16384), None),
    "+ every 512 to 2048": (dense(512, 2048), None),
}


def whole_blocks(prompts: Sequence[TracePrompt]) -> list[TracePrompt]:
    """Without the block at the end of a prompt that is not full: it is never cached."""
    whole = []
    for prompt in prompts:
        num_blocks = prompt.input_tokens // BLOCK_TOKENS
        whole.append(dataclasses.replace(prompt, block_ids=prompt.block_ids[:num_blocks]))
    return whole


def timed_replay(trace: Path, config: ReplayConfig) -> tuple[ReplayResult, float]:
    """One replay of the trace's whole blocks, and its seconds."""
    prompts = whole_blocks(load_trace(trace))
    began_s = time.perf_counter()
    return replay(prompts, config), time.perf_counter() - began_s


def replays(trace: Path, configs: Sequence[ReplayConfig]) -> Iterator[tuple[ReplayResult, float]]:
    """`timed_replay` of each, in order, as many at a time as there are cores."""
    with ProcessPoolExecutor(os.cpu_count()) as processes:
        yield from processes.map(timed_replay, repeat(trace), configs)


def num_arena_blocks(capacity_gb: float | None) -> int:
    return UNLIMITED_BLOCKS if capacity_gb is None else int(capacity_gb * GB) // ARENA_BLOCK_BYTES


def lru_row(trace: Path, num_blocks: int | None) -> Row:
    """The pool against a brute-force LRU, request by request; every block id counts."""
    prompts = load_trace(trace)
    began_s = time.perf_counter()
    result = replay(prompts, ReplayConfig(FULL, KV_BYTES, num_blocks or UNLIMITED_BLOCKS))
    seconds = time.perf_counter() - began_s
    expected = cached_tokens(prompts, BLOCK_TOKENS, num_blocks)
    return {
        "blocks": num_blocks,
        "block_hit_ratio": result.block_hit_ratio,
        "equal": result.request_hit_tokens == expected,
        "seconds": seconds,
    }


def measure_lru(trace: Path) -> list[Row]:
    """Full attention at each number of blocks."""
    print("LRU of full attention, every block id of the trace")
    print("blocks   block hit ratio   brute force   replay s")
    with ProcessPoolExecutor(os.cpu_count()) as processes:
        rows = list(processes.map(lru_row, repeat(trace), LRU_BLOCKS))
    for row in rows:
        verdict = "equal" if row["equal"] else "DIFFERS"
        print(
            f"{row['blocks'] or 'inf':>6} {row['block_hit_ratio']:17.4f}   {verdict:11} "
            f"{row['seconds']:10.1f}"
        )
    return rows


def replay_row(result: ReplayResult, full: ReplayResult, seconds: float) -> Row:
    """The numbers of one replay; `loss` is the share of full attention's hit tokens it lacks."""
    return {
        "hit_tokens": result.hit_tokens,
        "token_hit_ratio": result.token_hit_ratio,
        "block_hit_ratio": result.block_hit_ratio,
        "loss": 1 - result.hit_tokens / full.hit_tokens,
        "mean_held_gb": result.mean_held_bytes / GB,
        "hit_tokens_per_gb": result.hit_tokens_per_gb,
        "held_state_share": result.held_bytes[PartKind.STATE] / sum(result.held_bytes.values()),
        "stored_gb": {kind.name.lower(): n / GB for kind, n in result.stored_bytes.items()},
        "evictions": {kind.name.lower(): n for kind, n in result.evictions.items()},
        "seconds": seconds,
    }


REPLAY_HEAD: Final = (
    f"{'GB':>6} {'what':24} {'hit tokens':>11} {'of input':>8} {'loss':>6} "
    f"{'held GB':>8} {'hit/GB':>8} {'states':>7}"
)


def replay_line(row: Row) -> str:
    return (
        f"{row['capacity_gb'] or 'inf':>6} {row['what']:24} {row['hit_tokens']:11} "
        f"{row['token_hit_ratio']:8.4f} {row['loss']:6.1%} {row['mean_held_gb']:8.0f} "
        f"{row['hit_tokens_per_gb']:8.0f} {row['held_state_share']:7.1%}"
    )


def measure_replays(
    trace: Path, capacity_gb: float | None, configs: dict[str, ReplayConfig]
) -> list[Row]:
    """Each of `configs`, after full attention with as many bytes a token and as much memory."""
    reference = ReplayConfig(FULL, ARENA_BLOCK_BYTES, num_arena_blocks(capacity_gb))
    named = {"full attention": reference, **configs}
    rows: list[Row] = []
    full: ReplayResult | None = None
    for what, (result, seconds) in zip(named, replays(trace, list(named.values())), strict=True):
        full = full or result
        row = {"capacity_gb": capacity_gb, "what": what, **replay_row(result, full, seconds)}
        print(replay_line(row), flush=True)
        rows.append(row)
    return rows


def measure_placements(trace: Path, *, full: bool) -> list[Row]:
    """Each placement under LRU."""
    print(f"placements of states, LRU\n{REPLAY_HEAD}")
    placements = PLACEMENTS | MORE_PLACEMENTS if full else PLACEMENTS
    rows = []
    for capacity_gb in ALL_CAPACITIES_GB if full else CAPACITIES_GB:
        num_blocks = num_arena_blocks(capacity_gb)
        configs = {
            name: ReplayConfig(
                HYBRID, ARENA_BLOCK_BYTES, num_blocks, placement, chunk_tokens=chunk_tokens
            )
            for name, (placement, chunk_tokens) in placements.items()
        }
        rows += measure_replays(trace, capacity_gb, configs)
    return rows


def measure_policies(trace: Path, *, full: bool) -> list[Row]:
    """Each eviction policy with the default placement, where memory is limited."""
    print(f"eviction policies, default placement\n{REPLAY_HEAD}")
    rows = []
    for capacity_gb in ALL_CAPACITIES_GB if full else CAPACITIES_GB[:1]:
        if capacity_gb is None:
            continue
        num_blocks = num_arena_blocks(capacity_gb)
        configs = {
            name: ReplayConfig(
                HYBRID,
                ARENA_BLOCK_BYTES,
                num_blocks,
                policy=eviction_policy(name),
                chunk_tokens=CHUNK_TOKENS,
            )
            for name in POLICIES
        }
        rows += measure_replays(trace, capacity_gb, configs)
    return rows
