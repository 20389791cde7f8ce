"""The longest gaps of event loops: a big directory, a big pool whose SSD fails, agents that send.

Run: python tests/bench/bench_loops.py [--json FILE] [--smoke] [--blocks N] [--seconds S]. A gap is
the process's own time, as its own watch sees it (`kvmanager.loop.watch`): computing, collecting
garbage and waiting, without the time in which the machine gave it no core.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

import aiohttp
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from agent_process import AgentProcess, DrivenEngine
from bench_directory import NODES, RULE, Region
from smoke import add_smoke

from kvmanager.agent.cache.feed import FeedLog
from kvmanager.agent.cache.store import PartStore
from kvmanager.agent.client import AgentClient
from kvmanager.agent.config import AgentConfig
from kvmanager.agent.kept_arena import open_arena
from kvmanager.directory.embedded import EmbeddedDirectory
from kvmanager.loop.gaps import LoopGap
from kvmanager.loop.watch import LoopWatch
from kvmanager.pool.pool import HybridPool
from kvmanager.pool.records import PoolChange, Tier
from kvmanager.pool.shape import CacheShape, PartKind, PartShape
from kvmanager.pool.ssd import SsdStore

Row = dict[str, Any]

GOAL_MS: Final = 100.0
BLOCK: Final = 4096
SHAPE: Final = CacheShape(64, (PartShape(PartKind.KV, 2 * BLOCK),))
CHAIN: Final = 100
LONG_CHAIN: Final = 500
NUM_TOKENS: Final = 4096


def watched(name: str, work: Callable[[], Awaitable[None]]) -> Row:
    """The longest own gap of a loop while it does `work`."""
    longest = LoopGap(ended_s=0.0, gap_s=0.0, own_s=0.0, cpu_s=0.0, gc_s=0.0)

    def note(gap: LoopGap) -> None:
        nonlocal longest
        longest = max(longest, gap, key=lambda gap: gap.own_s)

    async def run() -> None:
        with LoopWatch(limit_s=GOAL_MS / 2e3, idle_period_s=0.01, on_gap=note):
            await work()

    uvloop.run(run())
    place = longest.stacks[0][0][-1] if longest.stacks else None
    return {
        "name": name,
        "longest_own_ms": 1e3 * longest.own_s,
        "of_it_garbage_ms": 1e3 * longest.gc_s,
        "at": "" if place is None else f"{Path(place[0]).name}:{place[1]} {place[2]}",
    }


def measure_directory(num_blocks: int) -> list[Row]:
    """Filled by the messages of eight nodes, while it is asked; then a node is forgotten."""
    region, directory = Region(num_blocks), EmbeddedDirectory(AgentClient)

    async def fill() -> None:
        prompts = random.Random(3)
        for node, feed in region.messages():
            directory.core.apply(node, feed, time.monotonic())
            await directory.match(RULE, region.whole_keys(prompts.randrange(region.num_prompts)))
            await asyncio.sleep(0)

    async def forget() -> None:
        directory.core.forget(NODES[0])

    return [
        watched("directory: fill and match", fill),
        watched("directory: forget a node", forget),
        watched("directory: full garbage collection", collect),
    ]


async def collect() -> None:
    await asyncio.sleep(0.05)
    gc.collect()
    await asyncio.sleep(0.05)


class DeadSsd(SsdStore):
    """Has no file that can be read."""

    def read(self, *_: Any) -> Future[bool | None]:
        result: Future[bool | None] = Future()
        result.set_result(False)
        return result


def measure_pool(num_blocks: int, folder: Path) -> list[Row]:
    """A prompt of 500 blocks beside many others, all on an SSD of which nothing can be read."""
    arena_blocks = 2 * LONG_CHAIN + 10
    config = AgentConfig.of(
        arena_dir=folder,
        arena_gib=arena_blocks * BLOCK / (1 << 30),
        block_bytes=BLOCK,
        prefault=False,
        arena_name="bench",
    )
    kept, feed = open_arena(config), FeedLog()
    store = PartStore(kept.arena, kept.index, DeadSsd(folder / "ssd"))

    def changed(change: PoolChange) -> None:
        store.part_changed(change)
        feed.part_changed(change, 0.0)

    pool = HybridPool(kept.allocator, BLOCK, listener=changed, ssd_bytes=1 << 50)
    store.attach(pool)
    long_keys = chain(0, LONG_CHAIN)
    restore(pool, feed, long_keys)
    for number in range(1, num_blocks // CHAIN + 1):
        restore(pool, feed, chain(number, CHAIN))

    async def fail() -> None:
        await store.ssd.fetch(SHAPE, long_keys, [(index, 0) for index in range(LONG_CHAIN)])
        await store.ssd.drop_lost()

    async def follow() -> None:
        epoch, seq, more = "", 0, True
        while more:
            page = feed.read(epoch, seq, 0.0)
            epoch, seq, more = page.epoch, page.seq, page.more
            await asyncio.sleep(0)

    rows = [
        watched("pool: the SSD fails under a prompt", fail),
        watched("pool: a follower reads everything", follow),
        watched("pool: full garbage collection", collect),
    ]
    if not store.parts.use.ssd_failures or pool.match(SHAPE, long_keys).kv_blocks:
        raise RuntimeError("blocks that cannot be read are still offered")
    asyncio.run(stop(store))
    store.close()
    kept.close()
    return rows


async def stop(store: PartStore) -> None:
    await store.stop()


def chain(number: int, num_blocks: int) -> list[bytes]:
    return [number.to_bytes(4, "big") + index.to_bytes(12, "big") for index in range(num_blocks)]


def restore(pool: HybridPool, feed: FeedLog, keys: list[bytes]) -> None:
    parent = bytes(16)
    for index, key in enumerate(keys):
        change = PoolChange(True, Tier.SSD, key, parent, index, 0, SHAPE, ())
        if not pool.restore(change, 0.0):
            raise RuntimeError("the pool takes no more")
        feed.part_changed(change, 0.0)
        parent = key


def measure_agents(seconds: float, folder: Path) -> list[Row]:
    """One transfer after the other between two agents, as two engines would ask for them."""
    settings: Row = {"metrics_port": 0, "arena_gib": 0.25}
    with (
        AgentProcess(folder / "sender", **settings) as sender,
        AgentProcess(folder / "receiver", **settings) as receiver,
        DrivenEngine(sender) as producer,
        DrivenEngine(receiver) as consumer,
    ):
        end_s = time.monotonic() + seconds
        num_transfers = 0
        while time.monotonic() < end_s:
            transfer(sender, receiver, producer, consumer)
            num_transfers += 1
        return [
            {"name": f"agent: {num_transfers} transfers, {end}", **asyncio.run(shown_gaps(agent))}
            for end, agent in (("sender", sender), ("receiver", receiver))
        ]


def transfer(
    sender: AgentProcess, receiver: AgentProcess, producer: DrivenEngine, consumer: DrivenEngine
) -> None:
    landing = receiver.reserve(NUM_TOKENS)
    transfer_id = bytes.fromhex(landing.transfer_id)
    consumer.client.watch(transfer_id)
    outbox = sender.open_outbox(landing, NUM_TOKENS)
    producer.client.attach(transfer_id, outbox.attempt)
    step = max(1, landing.nbytes // 64)
    for start in range(0, landing.nbytes, step):
        length = min(step, landing.nbytes - start)
        producer.client.ready(transfer_id, outbox.attempt, [(start, length)])
    producer.client.prefill_end(transfer_id, outbox.attempt)
    if consumer.next()[0] != "landed":
        raise RuntimeError("a transfer failed")
    consumer.client.release(transfer_id)


async def shown_gaps(agent: AgentProcess) -> Row:
    """What an agent's own metrics say."""
    async with aiohttp.ClientSession() as session:
        async with session.get(f"http://{agent.ready['metrics']}/metrics") as answer:
            lines = (await answer.text()).splitlines()
    wanted = 'prfaas_agent_loop_longest_own_gap_seconds{within="start"} '
    (longest_s,) = (float(line[len(wanted) :]) for line in lines if line.startswith(wanted))
    return {"longest_own_ms": 1e3 * longest_s, "of_it_garbage_ms": 0.0, "at": ""}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the raw numbers here")
    parser.add_argument("--blocks", type=int, default=500_000, help="in the directory, in the pool")
    parser.add_argument("--seconds", type=float, default=30.0, help="of transfers between agents")
    add_smoke(parser, blocks=10_000, seconds=1.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure_directory(arguments.blocks)
        rows += measure_pool(arguments.blocks, Path(folder))
        rows += measure_agents(arguments.seconds, Path(folder))
    print(f"longest own gap of the event loop, ms (goal: under {GOAL_MS:.0f})")
    for row in rows:
        garbage = f" ({row['of_it_garbage_ms']:.0f} of garbage)" if row["of_it_garbage_ms"] else ""
        print(f"{row['name']:45} {row['longest_own_ms']:8.0f}{garbage}  {row['at']}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"num_blocks": arguments.blocks, "rows": rows}))


if __name__ == "__main__":
    main()
