"""The prefix cache of real agent processes: engines that find and store, landings, restarts."""

import signal
import struct
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from agent_process import CHILD_ENV, SMALL_LAYOUT, AgentProcess, DrivenEngine
from arena_bytes import get_bytes
from caching_engine import KV, NAMESPACE, ROOT, SHAPE, STATE, B, CachingEngine, content, prompt
from eventually import wait_until

from kvmanager.agent.engines.protocol import CacheFound, Landed
from kvmanager.agent.messages import ListCache, ListCacheReply, Reserve, ReserveReply
from kvmanager.hashing import join_keys
from kvmanager.pool.index_records import Stored, decode_records
from transport.rpc import RpcError

# Small blocks and no drain to speak of, so that memory comes back while a test waits.
SETTINGS: dict[str, Any] = {"block_bytes": 4096, "drain_s": 0.5, "arena_gib": 2 / 1024}


@pytest.fixture(scope="module")
def transfers(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Transfers"]:
    """Two agents for the whole file: each test has prompts of its own."""
    with (
        AgentProcess(tmp_path_factory.mktemp("s"), **SETTINGS) as sender,
        AgentProcess(tmp_path_factory.mktemp("r"), **SETTINGS, metrics_port=0) as receiver,
    ):
        yield Transfers(sender, receiver)
        for agent in (sender, receiver):
            assert "Traceback" not in agent.log()


@pytest.fixture
def agent(transfers: "Transfers") -> Iterator[AgentProcess]:
    """Afterwards nothing is in use."""
    yield transfers.receiver
    transfers.receiver.cancel_all()
    wait_until(lambda: is_idle(transfers.receiver), what="nothing is in use")


def is_idle(agent: AgentProcess) -> bool:
    status = agent.status()
    return status.free_bytes == status.arena_bytes and pinned(agent) == 0


def held(agent: AgentProcess) -> int:
    cache = agent.status().cache
    assert cache is not None
    return cache.arena_blocks_bytes


def pinned(agent: AgentProcess) -> int:
    cache = agent.status().cache
    assert cache is not None
    return cache.pinned_bytes


def test_engines_of_a_node_share_what_one_of_them_stored(agent: AgentProcess) -> None:
    keys = prompt(6, 1)
    with CachingEngine(agent, "a") as first, CachingEngine(agent, "b") as second:
        assert first.hit(keys) == 0
        first.store(keys[:4])
        second.check(keys, 4)
        status = agent.status()
        assert status.cache is not None
        assert status.cache.nbytes["arena/kv"] >= 4 * SHAPE.parts[KV].nbytes
        assert status.cache.hit_tokens["arena"] >= 4 * B
        assert [engine.cache is not None for engine in status.engines] == [True, True]
        found = second.find(keys)
        assert pinned(agent) == 4 * SHAPE.parts[KV].nbytes + SHAPE.parts[STATE].nbytes
        second.free(found)
        wait_until(lambda: pinned(agent) == 0)
    reply = agent.call("ListCache", ListCache(), ListCacheReply)
    listed = {prefix.key: prefix for prefix in reply.prefixes}[keys[3].hex()]
    assert (listed.num_tokens, listed.resumable_tokens) == (4 * B, 4 * B)
    with urllib.request.urlopen(f"http://{agent.ready['metrics']}/metrics") as page:
        text = page.read().decode()
    assert 'prfaas_agent_cache_bytes{kind="kv",tier="arena"}' in text
    assert 'prfaas_agent_cache_hit_tokens_total{tier="arena"}' in text


def test_an_agent_without_a_cache(tmp_path: Path) -> None:
    with AgentProcess(tmp_path, **SETTINGS, cache_gib=0, embedding_gib=0) as agent:
        with DrivenEngine(agent, role="scheduler", namespace=NAMESPACE) as engine:
            assert engine.client.cache_find(1, prompt(1))
            assert engine.next() == ("disconnected",)
        with pytest.raises(RpcError, match="no prefix cache and keeps no embeddings"):
            agent.watch_cache()
        assert agent.status().cache is None


def test_an_arena_full_of_cached_prefixes_gives_way_to_transfers(agent: AgentProcess) -> None:
    with CachingEngine(agent) as engine:
        for seed in range(100, 115):
            engine.store(prompt(20, seed))
        assert held(agent) > agent.status().arena_bytes - (1 << 18)
        old, new = prompt(20, 100), prompt(20, 114)
        assert (engine.hit(old), engine.hit(new)) == (0, 20)
        pin = engine.find(new)
        landing = agent.reserve(2400)
        assert landing.nbytes > 1 << 20
        assert pin.num_blocks == 20
        engine.check(new, 20)
        with pytest.raises(RpcError, match="NO_ROOM"):
            agent.reserve(2400)
        agent.cancel_all()
        wait_until(lambda: agent.status().landing_bytes == 0)
        cache = agent.status().cache
        assert cache is not None
        assert cache.evictions["arena/kv"] > 0


def test_followers_hear_of_what_comes_and_goes(agent: AgentProcess) -> None:
    keys = prompt(3, 2)
    with CachingEngine(agent) as engine:
        start = agent.watch_cache()
        assert (start.is_snapshot, start.more) == (True, False)
        began_s = time.monotonic()
        nothing = agent.watch_cache(start.epoch, start.seq, timeout_s=0.2)
        assert nothing.keys == b""
        assert time.monotonic() - began_s >= 0.2
        engine.store(keys)
        told: dict[bytes, int] = {}
        seq = start.seq
        while told.get(keys[2][:8]) != 5:
            reply = agent.watch_cache(start.epoch, seq, timeout_s=5)
            assert not reply.is_snapshot
            seq = reply.seq
            names = [reply.keys[i : i + 8] for i in range(0, len(reply.keys), 8)]
            told |= dict(zip(names, struct.unpack(f"<{len(names)}H", reply.flags), strict=True))
        assert [told[key[:8]] for key in keys] == [1, 1, 5]
        assert agent.watch_cache("other", seq).is_snapshot


def test_garbage_costs_its_engine_the_connection_and_nobody_else_anything(
    agent: AgentProcess,
) -> None:
    keys = prompt(4, 3)
    with CachingEngine(agent, "good") as good, CachingEngine(agent, "bad") as bad:
        good.store(keys)
        found = good.find(keys)
        before = held(agent)
        slots = bad.reserve(prompt(2, 4), [(0, KV), (1, KV)])
        assert len(slots.slots) == 2
        assert bad.worker.client.cache_written(slots.handle, [(7, KV)])
        assert bad.worker.next() == ("disconnected",)
        assert bad.worker.next()[0] == "connected"
        assert bad.scheduler.client.cache_find(77, keys)
        assert bad.scheduler.next()[0] == "found"
        assert bad.scheduler.client.cache_find(77, keys)
        assert bad.scheduler.next() == ("disconnected",)
        wait_until(lambda: "handle 77 is in use" in agent.log())
        assert good.find(keys).slots == found.slots
        assert good.worker.events.empty()
    wait_until(lambda: held(agent) <= before, what="the bad fill is taken back")


KILLED_WORKER = """
import sys, time
from pathlib import Path
from agent_process import DrivenEngine, AgentProcess
class Agent: socket = Path(sys.argv[1])
engine = DrivenEngine(Agent(), "killed")
engine.__enter__()
print("up", flush=True)
time.sleep(60)
"""


def test_a_killed_worker_leaves_no_half_written_part_and_no_lost_memory(tmp_path: Path) -> None:
    keys = prompt(3)
    settings = SETTINGS | {"drain_s": 60.0}
    with AgentProcess(tmp_path, **settings) as agent:
        with DrivenEngine(agent, "killed", role="scheduler", namespace=NAMESPACE) as scheduler:
            worker = subprocess.Popen(
                [sys.executable, "-c", KILLED_WORKER, str(agent.socket)],
                stdout=subprocess.PIPE,
                env=CHILD_ENV,
                text=True,
            )
            try:
                assert worker.stdout is not None
                assert worker.stdout.readline() == "up\n"
                scheduler.client.cache_reserve(1, keys, [(i, KV) for i in range(3)], parent=ROOT)
                name, slots = scheduler.next()
                assert (name, len(slots.slots)) == ("slots", 3)
                assert held(agent) > 0
            finally:
                worker.kill()
                worker.communicate()
            wait_until(lambda: held(agent) == 0, what="the process is gone, so is the fill")
            scheduler.client.cache_find(2, keys)
            assert scheduler.next()[1] == CacheFound(2, 0, 0, [])


class Transfers:
    """A sender and a receiver whose engines cache."""

    def __init__(self, sender: AgentProcess, receiver: AgentProcess) -> None:
        self.sender, self.receiver = sender, receiver

    def send(self, producer: DrivenEngine, landing: ReserveReply, keys: Sequence[bytes]) -> None:
        """Send what an engine has for the tokens of these blocks, as it lies in a landing."""
        num_tokens = len(keys) * B
        outbox = self.sender.open_outbox(landing, num_tokens)
        producer.send(landing, outbox, self.bytes(keys, landing.cached_tokens))
        assert self.sender.wait(landing.transfer_id).state == "complete"

    @staticmethod
    def bytes(keys: Sequence[bytes], cached_tokens: int) -> bytes:
        """Layer by layer; the parts of SMALL_LAYOUT have one page for each layer."""
        first = cached_tokens // B
        kv = [content(key, KV) for key in keys[first:]]
        page_bytes = [layer.parts[0].item_bytes for layer in SMALL_LAYOUT.groups[0].layers]
        data, at = b"", 0
        for size in page_bytes:
            data += b"".join(part[at : at + size] for part in kv)
            at += size
        return data + content(keys[-1], STATE)


def test_a_landing_leaves_out_what_is_cached_and_is_kept(
    transfers: Transfers, agent: AgentProcess
) -> None:
    """The second turn of a conversation: only the new blocks travel, and then all can be found."""
    keys = prompt(8, 5)
    receiver = agent
    with CachingEngine(receiver) as consumer, DrivenEngine(transfers.sender) as producer:
        first = receiver.reserve(5 * B, block_keys=join_keys([ROOT, *keys[:5]]))
        assert first.cached_tokens == 0
        assert first.nbytes == SMALL_LAYOUT.transfer_bytes(5 * B)
        transfers.send(producer, first, keys[:5])
        wait_until(lambda: consumer.hit(keys) == 5, what="the landing is kept")
        consumer.check(keys[:5], 5)

        second = receiver.reserve(8 * B, block_keys=join_keys([ROOT, *keys]))
        assert second.cached_tokens == 5 * B
        assert second.nbytes == SMALL_LAYOUT.transfer_bytes(8 * B, 5 * B)
        transfers.send(producer, second, keys)
        assert consumer.scheduler.client.watch(bytes.fromhex(second.transfer_id))
        assert consumer.scheduler.next() == ("landed", second.transfer_id)
        landed, arena = consumer.scheduler.said(second), consumer.scheduler.client.arena
        assert isinstance(landed, Landed)
        assert arena is not None
        for key, runs in zip(keys[:5], landed.cached_runs, strict=True):
            assert get_bytes(arena, runs, SHAPE.parts[KV].nbytes) == content(key, KV)
        wait_until(lambda: consumer.hit(keys) == 8, what="the second landing is kept")
        consumer.check(keys, 8)
        cache = receiver.status().cache
        assert cache is not None
        assert cache.promotions == 2


def test_what_a_landing_stands_on_stays_until_its_engine_has_let_go(
    transfers: Transfers, agent: AgentProcess
) -> None:
    keys = prompt(4, 6)
    receiver = agent
    with CachingEngine(receiver) as consumer, DrivenEngine(transfers.sender) as producer:
        consumer.store(keys[:3])
        landing = receiver.reserve(4 * B, block_keys=join_keys([ROOT, *keys]))
        assert landing.cached_tokens == 3 * B
        transfer_id = bytes.fromhex(landing.transfer_id)
        assert consumer.scheduler.client.watch(transfer_id)
        transfers.send(producer, landing, keys)
        assert consumer.scheduler.next() == ("landed", landing.transfer_id)
        receiver.cancel_all()
        time.sleep(0.2)
        assert pinned(receiver) == 3 * SHAPE.parts[KV].nbytes
        assert consumer.scheduler.client.release(transfer_id)
        wait_until(lambda: pinned(receiver) == 0)


def test_a_landing_never_leaves_out_its_last_tokens(agent: AgentProcess) -> None:
    keys = prompt(4, 7)
    with CachingEngine(agent) as consumer:
        consumer.store(keys)
        landing = agent.reserve(4 * B, block_keys=join_keys([ROOT, *keys]))
        assert landing.cached_tokens == 3 * B
        longer = agent.reserve(4 * B + 1, block_keys=join_keys([ROOT, *keys]))
        assert longer.cached_tokens == 4 * B


def test_keys_that_are_none_are_refused(agent: AgentProcess) -> None:
    with CachingEngine(agent):
        with pytest.raises(RpcError, match="no sequence of 16") as caught:
            agent.reserve(40, block_keys=b"x" * 15)
        assert caught.value.code == "INVALID"
        assert agent.status().landing_bytes == 0


@pytest.mark.parametrize("num_keys", [0, 3])
def test_keys_of_other_blocks_leave_a_landing_whole(agent: AgentProcess, num_keys: int) -> None:
    keys = prompt(3)
    with CachingEngine(agent) as consumer:
        consumer.store(keys)
        landing = agent.reserve(40, block_keys=join_keys([ROOT, *keys[:num_keys]]))
        assert landing.cached_tokens == 0


def test_a_refused_landing_keeps_nothing_pinned(agent: AgentProcess) -> None:
    keys = prompt(3, 9)
    with CachingEngine(agent) as consumer:
        consumer.store(keys)
        request = Reserve(3 * B, 30.0, token_digest="no hex", block_keys=join_keys([ROOT, *keys]))
        with pytest.raises(RpcError, match="token_digest is not hex"):
            agent.call("Reserve", request, ReserveReply)
        with pytest.raises(RpcError, match="a lease of -1"):
            agent.reserve(3 * B, -1.0, block_keys=join_keys([ROOT, *keys]))
        assert pinned(agent) == 0


def test_an_outbox_must_know_what_its_landing_stands_on(
    transfers: Transfers, agent: AgentProcess
) -> None:
    keys = prompt(4, 8)
    with CachingEngine(agent) as consumer, DrivenEngine(transfers.sender):
        consumer.store(keys)
        landing = agent.reserve(4 * B + 1, block_keys=join_keys([ROOT, *keys]))
        for cached_tokens, words in ((0, "0 of them cached"), (7, "not whole items")):
            with pytest.raises(RpcError, match=words):
                transfers.sender.open_outbox(landing, 4 * B + 1, cached_tokens=cached_tokens)


class Lives:
    """Agents of one directory, one after the other."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.directory = directory
        self.settings = SETTINGS | {"arena_name": "node"} | settings

    def agent(self) -> AgentProcess:
        return AgentProcess(self.directory, **self.settings)


def test_what_is_cached_outlives_a_killed_agent(tmp_path: Path) -> None:
    keys, other = prompt(5), prompt(5, 1)
    agent = Lives(tmp_path).agent().start()
    try:
        with CachingEngine(agent) as engine:
            engine.store(keys)
            engine.reserve(other, [(0, KV), (1, KV)])
            # What was stored after the last write of the index is lost.
            wait_until(lambda: is_indexed(tmp_path, keys), what="the index has the parts")
            used = held(agent)
            agent.end(signal.SIGKILL)
            assert engine.scheduler.next() == ("disconnected",)
            agent.start()
            assert engine.scheduler.next()[0] == "connected"
            wait_until(lambda: engine.hit(keys) == 5, what="the cache is back")
            engine.check(keys, 5)
            assert held(agent) == used - 4 * 4096, "the half-written fill is not"
            assert engine.worker.next() == ("disconnected",)
            assert engine.worker.next()[0] == "connected"
            engine.store(other)
            engine.check(keys, 5)
            wait_until(lambda: is_idle(agent), what="what was set apart is free again")
    finally:
        agent.end()
    assert (tmp_path / "prfaas-kept-node.arena").exists()


def test_a_node_that_took_over_a_full_arena_has_no_room_until_it_may_evict(tmp_path: Path) -> None:
    """A router that believed in room would send prompts that cannot land."""
    lives = Lives(tmp_path, drain_s=4.0)
    with lives.agent() as agent, CachingEngine(agent) as engine:
        for seed in range(15):
            engine.store(prompt(20, seed))
    with lives.agent() as agent, CachingEngine(agent):
        wait_until(lambda: "cached parts are back" in agent.log())
        status = agent.status()
        assert status.landing_room_bytes < 1 << 18
        with pytest.raises(RpcError, match="NO_ROOM"):
            agent.reserve(2400)
        wait_until(lambda: agent.status().landing_room_bytes > 1 << 20)
        assert agent.reserve(2400).nbytes > 1 << 20


def is_indexed(directory: Path, keys: Sequence[bytes]) -> bool:
    """Whether the file of the index has all parts of these keys."""
    records, _ = decode_records((directory / "prfaas-kept-node.index").read_bytes())
    parts = {(record.key, record.part) for record in records if isinstance(record, Stored)}
    return parts >= {*((key, KV) for key in keys), (keys[-1], STATE)}


def test_what_is_damaged_is_not_used(tmp_path: Path) -> None:
    lives, keys = Lives(tmp_path), prompt(4)
    with lives.agent() as agent, CachingEngine(agent) as engine:
        engine.store(keys)
        (_, _, runs) = engine.find(keys).slots[2]
    with (tmp_path / "prfaas-kept-node.arena").open("r+b") as file:
        file.seek(runs[0][0] * 4096)
        file.write(b"harm")
    with lives.agent() as agent, CachingEngine(agent) as engine:
        wait_until(lambda: kv_blocks(engine, keys) == 2, what="restored up to the damage")
        wait_until(lambda: "is damaged: dropped" in agent.log())
        engine.store(keys)
        engine.check(keys, 4)


def kv_blocks(engine: CachingEngine, keys: Sequence[bytes]) -> int:
    found = engine.find(keys)
    engine.free(found)
    return found.kv_blocks


def test_ssd_copies_are_found_again_in_this_life_and_the_next(tmp_path: Path) -> None:
    lives = Lives(tmp_path, arena_name=None, ssd_dir=str(tmp_path / "ssd"), ssd_gib=1.0)
    prompts = [prompt(20, seed) for seed in range(14)]
    with lives.agent() as agent, CachingEngine(agent) as engine:
        for count, keys in enumerate(prompts, 1):
            engine.store(keys)
            wait_until(lambda count=count: num_spilled(agent) == count, what="copied to SSD")
        for keys in prompts:
            engine.check(keys, 20)
        cache = agent.status().cache
        assert cache is not None
        assert cache.evictions["arena/kv"] > 0
        assert cache.ssd_reads > 0
        assert cache.hit_tokens["ssd"] > 0
    with lives.agent() as agent, CachingEngine(agent) as engine:
        wait_until(lambda: "cached parts are back" in agent.log().split("epoch")[-1])
        assert held(agent) == 0
        engine.check(prompts[0], 20)
        damage(tmp_path / "ssd", prompts[1][10])
        found = engine.find(prompts[1])
        assert found.num_blocks == 0
        engine.free(found)
        assert engine.find(prompts[1]).kv_blocks == 10
        engine.check(prompts[2], 20)


def test_a_full_disk_keeps_what_was_used_last(tmp_path: Path) -> None:
    """Others may fill it, and files are larger than what they hold."""
    disk = tmp_path / "disk"
    agent = Lives(tmp_path, arena_name=None, ssd_dir=str(disk / "ssd"), ssd_gib=1.0).agent()
    agent.disk = disk, "3m"
    with agent, CachingEngine(agent) as engine:
        assert agent.process is not None
        files = Path(f"/proc/{agent.process.pid}/root{disk}/ssd")
        for seed in range(30):
            engine.store(keys := prompt(20, seed))
            time.sleep(0.1)  # what is stored faster than a disk takes it is not copied
        names = {f"{key.hex()[:2]}/{key.hex()}.{KV}" for key in keys}
        wait_until(lambda: all((files / name).exists() for name in names))
        cache = agent.status().cache
        assert cache is not None
        assert cache.evictions["ssd/kv"] > 0
        assert cache.ssd_failures < 100, "most of what is written stays"
        engine.check(keys, 20)


def num_spilled(agent: AgentProcess) -> float:
    """Prompts of 20 blocks of which SSD has everything."""
    cache = agent.status().cache
    assert cache is not None
    num_kv = cache.nbytes.get("ssd/kv", 0) / (20 * SHAPE.parts[KV].nbytes)
    return min(num_kv, cache.nbytes.get("ssd/state", 0) / SHAPE.parts[STATE].nbytes)


def damage(directory: Path, key: bytes) -> None:
    (path,) = directory.glob(f"*/{key.hex()}.{KV}")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
