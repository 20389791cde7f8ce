"""The global directory: how fast it answers, what a block costs in memory, events per second.

Run: python tests/bench/bench_directory.py [--json FILE] [--smoke | --full] [--matches N]. A region
of four clusters with two nodes each. Prompts of 512 blocks (128Ki tokens, 256 a block) are each
cached by one to three nodes, with states at a few boundaries; the nodes' messages of 1000 blocks
interleave. One core for each process that is named.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import psutil
from redis_server import RedisServer
from smoke import add_smoke

from kvmanager.agent.client import AgentClient
from kvmanager.agent.messages import CacheFeed
from kvmanager.directory.directory import Directory
from kvmanager.directory.embedded import EmbeddedDirectory
from kvmanager.directory.messages import SERVICE, NodeCoverage, NodeName, ResumeRule
from kvmanager.directory.reader import DirectoryReader
from kvmanager.directory.redis_client import connect
from kvmanager.directory.redis_sink import RedisSink
from kvmanager.directory.redis_store import RedisDirectory
from kvmanager.directory.remote import RemoteDirectory
from kvmanager.directory.service import DirectoryService
from kvmanager.hashing import block_keys, root_key
from kvmanager.token_ids import TokenIds
from transport.rpc import RpcServer

Row = dict[str, Any]

NODES: Final = [NodeName(f"cluster-{i // 2}", f"node-{i % 2}") for i in range(8)]
PROMPT_BLOCKS: Final = 512
BLOCK_TOKENS: Final = 256
BATCH: Final = 1000
RULE: Final = ResumeRule(has_kv=True, window_reach=1, has_state=True)
ALL_PARTS: Final = 0b111
KV_ONLY: Final = 0b001

GOALS: Final = {
    "match p99, ms": "< 1 at 1 million blocks",
    "memory per block, bytes": "<= 100",
    "events/s": ">= 200,000",
}

Keys = npt.NDArray[np.uint64]


class Region:
    """What is cached where: the same for every process that is given the same numbers."""

    def __init__(self, num_blocks: int) -> None:
        self._rng = np.random.default_rng(7)
        self.num_prompts = num_blocks // PROMPT_BLOCKS
        size = (self.num_prompts, PROMPT_BLOCKS)
        self.keys: Keys = self._rng.integers(0, 2**64 - 1, size, dtype=np.uint64)

    def whole_keys(self, prompt: int) -> list[bytes]:
        return [int(key).to_bytes(8, "little") + bytes(8) for key in self.keys[prompt]]

    def messages(self) -> Iterator[tuple[NodeName, CacheFeed]]:
        """First an empty snapshot of each node, then what all of them store, mixed."""
        for node in NODES:
            yield node, CacheFeed("bench", 0, b"", b"", is_snapshot=True)
        holders = self._rng.integers(1, 4, self.num_prompts)
        first = self._rng.integers(0, len(NODES), self.num_prompts)
        held = [
            [p for p in range(self.num_prompts) if (number - first[p]) % len(NODES) < holders[p]]
            for number in range(len(NODES))
        ]
        pieces = [
            (number, prompts[start : start + 2])
            for number, prompts in enumerate(held)
            for start in range(0, len(prompts), 2)
        ]
        for seq, index in enumerate(self._rng.permutation(len(pieces)).tolist(), start=1):
            number, prompts = pieces[index]
            keys = self.keys[prompts].reshape(-1)[:BATCH]
            yield NODES[number], self._message(seq, keys)

    def churn(self, num_messages: int, first_seq: int) -> Iterator[tuple[NodeName, CacheFeed]]:
        """Nodes evict and store blocks of random prompts."""
        for seq in range(first_seq, first_seq + num_messages):
            prompts = self._rng.integers(0, self.num_prompts, 2)
            keys = self.keys[prompts].reshape(-1)[:BATCH]
            node = NODES[int(self._rng.integers(0, len(NODES)))]
            yield node, self._message(seq, keys, gone=seq % 2 == 0)

    def _message(self, seq: int, keys: Keys, *, gone: bool = False) -> CacheFeed:
        flags = np.full(len(keys), 0 if gone else KV_ONLY, dtype="<u2")
        if not gone:
            flags[PROMPT_BLOCKS // 4 - 1 :: PROMPT_BLOCKS // 4] = ALL_PARTS
        return CacheFeed("bench", seq, keys.astype("<u8").tobytes(), flags.tobytes())


def percentiles(seconds: Sequence[float]) -> Row:
    p50, p99, worst = np.percentile(np.array(seconds) * 1e3, [50, 99, 100])
    return {"p50_ms": float(p50), "p99_ms": float(p99), "max_ms": float(worst)}


def resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def apply_all(directory: Directory, messages: Iterator[tuple[NodeName, CacheFeed]]) -> Row:
    """Events per second of the applying alone, and the longest time for one message."""
    num_events, seconds = 0, []
    for node, feed in messages:
        began_s = time.perf_counter()
        if not directory.apply(node, feed, 0.0):
            raise RuntimeError(f"{node}: refused its message {feed.seq}")
        seconds.append(time.perf_counter() - began_s)
        num_events += len(feed.flags) // 2
    return {
        "num_events": num_events,
        "events_per_s": num_events / sum(seconds),
        "longest_message_ms": 1e3 * max(seconds),
    }


def measure_size(num_blocks: int, num_matches: int, num_churn: int) -> Row:
    """One directory of so many blocks."""
    region = Region(num_blocks)
    messages = list(region.messages())
    before_bytes = resident_bytes()
    directory = Directory()
    fill = apply_all(directory, iter(messages))
    grown_bytes = resident_bytes() - before_bytes
    held = directory.num_blocks
    memory = {
        "num_blocks": held,
        "table_bytes_per_block": directory.nbytes / held,
        "resident_bytes_per_block": grown_bytes / held,
    }
    matches = measure_matches(directory, region, num_matches)
    churn = apply_all(directory, region.churn(num_churn, len(messages)))
    began_s = time.perf_counter()
    directory.forget(NODES[0])
    forget_ms = 1e3 * (time.perf_counter() - began_s)
    return {**memory, "match": matches, "fill": fill, "churn": churn, "forget_node_ms": forget_ms}


def measure_matches(directory: Directory, region: Region, count: int) -> Row:
    """Whole prompts that are cached, prompts that are not, and one of blocks of eight others, which
    different nodes hold.
    """
    rng = np.random.default_rng(3)
    cached = [region.whole_keys(p) for p in rng.integers(0, region.num_prompts, count).tolist()]
    strange = [[rng.bytes(16) for _ in range(PROMPT_BLOCKS)] for _ in range(50)]
    torn = [cached[i % 8][i] for i in range(PROMPT_BLOCKS)]
    return {
        "cached": time_matches(directory, cached, count),
        "strange": time_matches(directory, strange, count),
        "torn": time_matches(directory, [torn], count),
    }


def time_matches(directory: Directory, prompts: Sequence[list[bytes]], count: int) -> Row:
    """By the clock, and the processor's time alone, to which neighbours do not add."""
    seconds, busy_s = [], []
    for number in range(count):
        keys = prompts[number % len(prompts)]
        began_s, was_busy_s = time.perf_counter(), time.thread_time()
        directory.match(RULE, keys, 0.0)
        seconds.append(time.perf_counter() - began_s)
        busy_s.append(time.thread_time() - was_busy_s)
    return {**percentiles(seconds), "busy": percentiles(busy_s)}


def measure_hashing(rounds: int) -> Row:
    """A prompt of 128Ki tokens, as Python's list and as the packed ids that processes exchange."""
    num_tokens = PROMPT_BLOCKS * BLOCK_TOKENS
    ids: list[int] = np.random.default_rng(1).integers(0, 150_000, num_tokens).tolist()
    kinds: dict[str, Sequence[int] | TokenIds] = {"list": ids, "packed": TokenIds.of(ids)}
    root = root_key(b"bench")
    found = {}
    for kind, tokens in kinds.items():
        seconds = []
        for _ in range(rounds):
            began_s = time.perf_counter()
            block_keys(tokens, BLOCK_TOKENS, root)
            seconds.append(time.perf_counter() - began_s)
        median_s = float(np.median(seconds))
        found[kind] = {
            "ms": 1e3 * median_s,
            "gb_per_s": 4 * num_tokens / median_s / 1e9,
            "keys_per_s": PROMPT_BLOCKS / median_s,
        }
    return found


def serve_region(num_blocks: int, pipe: Connection) -> None:
    """A directory behind gRPC, in a process of its own, until the other end says so."""

    async def run() -> None:
        directory = EmbeddedDirectory(AgentClient)
        for node, feed in Region(num_blocks).messages():
            directory.core.apply(node, feed, time.monotonic())
        server = RpcServer("127.0.0.1:0", {SERVICE: DirectoryService(directory).methods()})
        pipe.send(await server.start())
        await asyncio.to_thread(pipe.recv)
        await server.stop(0)

    asyncio.run(run())


async def time_reader(
    ask: Callable[[Sequence[bytes]], Awaitable[list[NodeCoverage]]], region: Region, count: int
) -> Row:
    seconds = []
    for prompt in np.random.default_rng(3).integers(0, region.num_prompts, count).tolist():
        keys = region.whole_keys(prompt)
        began_s = time.perf_counter()
        if not await ask(keys):
            raise RuntimeError("a prompt that is cached was not found")
        seconds.append(time.perf_counter() - began_s)
    return percentiles(seconds)


async def measure_grpc(num_blocks: int, count: int) -> Row:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve_region, args=(num_blocks, theirs))
    process.start()
    port = await asyncio.to_thread(ours.recv)
    remote = RemoteDirectory(f"127.0.0.1:{port}", timeout_s=5)
    try:
        return await time_reader(reading(remote), Region(num_blocks), count)
    finally:
        await remote.close()
        ours.send(None)
        process.join()


async def measure_redis(num_blocks: int, count: int) -> Row:
    with tempfile.TemporaryDirectory() as folder, RedisServer(Path(folder)) as server:
        redis = connect(server.url, timeout_s=5)
        region, sink = Region(num_blocks), RedisSink(redis)
        before = (await redis.info("memory"))["used_memory"]
        num_events, began_s = 0, time.perf_counter()
        for node, feed in region.messages():
            await sink.position(node)
            await sink.apply(node, feed)
            num_events += len(feed.flags) // 2
        events_per_s = num_events / (time.perf_counter() - began_s)
        used = (await redis.info("memory"))["used_memory"] - before
        reader = RedisDirectory(redis)
        found = await time_reader(reading(reader), region, count)
        await reader.close()
        per_block = used / (region.num_prompts * PROMPT_BLOCKS)
        return {**found, "events_per_s": events_per_s, "bytes_per_block": per_block}


async def measure_embedded(num_blocks: int, count: int) -> Row:
    directory = EmbeddedDirectory(AgentClient)
    region = Region(num_blocks)
    for node, feed in region.messages():
        directory.core.apply(node, feed, time.monotonic())
    return await time_reader(reading(directory), region, count)


def reading(reader: DirectoryReader) -> Callable[[Sequence[bytes]], Awaitable[list[NodeCoverage]]]:
    return lambda keys: reader.match(RULE, keys)


def show(name: str, value: str, goal: str = "") -> None:
    print(f"{name:58} {value:>24}{'   goal ' + goal if goal else ''}")


def show_size(row: Row) -> None:
    blocks = f"{row['num_blocks']:,} blocks"
    for kind, found in row["match"].items():
        goal = GOALS["match p99, ms"] if kind == "cached" else ""
        show(f"{blocks}: match, {kind}, p50 / p99, ms", pair(found), goal)
        show(f"{blocks}: the processor's time of it", pair(found["busy"]))
    table, resident = row["table_bytes_per_block"], row["resident_bytes_per_block"]
    goal = GOALS["memory per block, bytes"]
    show(f"{blocks}: bytes per block, table / resident", f"{table:.0f} / {resident:.0f}", goal)
    for what in ("fill", "churn"):
        rate = f"{row[what]['events_per_s']:,.0f}"
        show(f"{blocks}: events/s, {what}", rate, GOALS["events/s"])
        show(f"{blocks}: longest message, {what}, ms", f"{row[what]['longest_message_ms']:.1f}")
    show(f"{blocks}: forgetting a node, ms", f"{row['forget_node_ms']:.1f}")


def pair(found: Row) -> str:
    return f"{found['p50_ms']:.3f} / {found['p99_ms']:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the raw numbers here")
    parser.add_argument("--full", action="store_true", help="10 million blocks, too")
    parser.add_argument("--matches", type=int, default=2000, help="timed for each number")
    parser.add_argument("--blocks", type=int, default=10**6, help="in the directory")
    parser.add_argument("--shared", type=int, help="where it is read from elsewhere [200,000]")
    parser.add_argument("--churn", type=int, default=500, help="messages of it")
    add_smoke(parser, matches=50, blocks=20_000, shared=5_000, churn=20)
    arguments = parser.parse_args()
    sizes = []
    for num_blocks in [arguments.blocks, 10**7] if arguments.full else [arguments.blocks]:
        sizes.append(measure_size(num_blocks, arguments.matches, arguments.churn))
        show_size(sizes[-1])
    hashing = measure_hashing(2 if arguments.smoke else 20)
    for kind, row in hashing.items():
        show(f"hashing 128Ki tokens, {kind}, ms", f"{row['ms']:.2f}")
        rate = f"{row['gb_per_s']:.2f} / {row['keys_per_s']:,.0f}"
        show(f"hashing, {kind}, GB/s / keys/s", rate)
    num_shared = arguments.shared or (10**6 if arguments.full else 2 * 10**5)
    readers = {
        "embedded": asyncio.run(measure_embedded(num_shared, arguments.matches)),
        "gRPC": asyncio.run(measure_grpc(num_shared, arguments.matches)),
        "Redis": asyncio.run(measure_redis(num_shared, arguments.matches)),
    }
    for name, found in readers.items():
        show(f"a match with {num_shared:,} blocks, {name}, p50 / p99, ms", pair(found))
    written = readers["Redis"]
    show("Redis: events/s written", f"{written['events_per_s']:,.0f}")
    show("Redis: bytes per block", f"{written['bytes_per_block']:.0f}")
    if arguments.json:
        kept = {"sizes": sizes, "hashing": hashing, "num_shared": num_shared, "readers": readers}
        arguments.json.write_text(json.dumps(kept, indent=1))


if __name__ == "__main__":
    main()
