"""Following agents: gaps, silence, bad messages, other writers. Agents and sinks are fakes."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest

from kvmanager.agent.client import AgentClient
from kvmanager.agent.messages import CacheFeed
from kvmanager.config_files.problems import FileError
from kvmanager.directory.config import load
from kvmanager.directory.directory import FROM_THE_BEGINNING, Directory, Position
from kvmanager.directory.errors import StoreError
from kvmanager.directory.feed_client import POLL_S, RETRY_S, DirectoryFollower, DirectorySink, Sleep
from kvmanager.directory.messages import FORGET_S, NodeName, ResumeRule
from kvmanager.directory.metrics import DirectoryMetrics
from kvmanager.directory.reader import Outage
from transport.backoff import Backoff
from transport.rpc import RpcError

NODE, OTHER = NodeName("c", "n0"), NodeName("c", "n1")
KEYS = [bytes([i]) * 16 for i in range(4)]
RULE = ResumeRule(has_kv=True, window_reach=0, has_state=False)

Answer = Callable[[Position], CacheFeed]


def feed(seq: int, *keys: bytes, snapshot: bool = False, epoch: str = "e") -> CacheFeed:
    joined = b"".join(key[:8] for key in keys)
    return CacheFeed(epoch, seq, joined, b"\x01\x00" * len(keys), is_snapshot=snapshot, age_s=0.5)


@dataclass
class Agent:
    """Gives one answer after the other, then is silent. Remembers what it was asked."""

    answers: list[CacheFeed | Exception]
    asked: list[Position] = field(default_factory=list)
    done: asyncio.Event = field(default_factory=asyncio.Event)
    closed: bool = False

    async def watch_cache(self, epoch: str, after_seq: int, timeout_s: float) -> CacheFeed:
        assert timeout_s == POLL_S
        self.asked.append((epoch, after_seq))
        if not self.answers:
            self.done.set()
            await asyncio.Event().wait()
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def close(self) -> None:
        self.closed = True


async def at_once(delay_s: float) -> None:
    """A sleep that only lets others run."""
    await asyncio.sleep(0)


async def followed(
    agent: Agent, *, forget_s: float = FORGET_S, sleep: Sleep = at_once
) -> tuple[Directory, DirectoryFollower]:
    """A directory after the agent has given all its answers."""
    directory = Directory()
    sink = DirectorySink(directory, clock=lambda: 100.0)
    follower = DirectoryFollower(sink, lambda _: agent, forget_s=forget_s, sleep=sleep)
    await follower.follow({NODE: "agent:1"})
    await asyncio.wait_for(agent.done.wait(), 5)
    await follower.stop()
    assert agent.closed
    return directory, follower


def num_kv_blocks(directory: Directory) -> int:
    return sum(found.kv_blocks for found in directory.match(RULE, KEYS, 100.0))


async def test_goes_on_from_where_it_is() -> None:
    agent = Agent([feed(1, KEYS[0], snapshot=True), feed(1), feed(2, KEYS[1])])
    directory, follower = await followed(agent)
    assert agent.asked == [FROM_THE_BEGINNING, ("e", 1), ("e", 1), ("e", 2)]
    assert num_kv_blocks(directory) == 2
    assert (follower.counts.events, follower.counts.snapshots) == (2, 1)
    (state,) = directory.nodes(101.0)
    assert (state.age_s, state.lag_s) == (1.0, 0.5)


async def test_a_gap_is_closed_by_a_snapshot() -> None:
    answers = [
        feed(5, KEYS[0], snapshot=True),
        feed(1, KEYS[1], epoch="restarted"),
        feed(2, *KEYS[:3], snapshot=True, epoch="restarted"),
    ]
    agent = Agent(list(answers))
    directory, follower = await followed(agent)
    assert agent.asked == [FROM_THE_BEGINNING, ("e", 5), FROM_THE_BEGINNING, ("restarted", 2)]
    assert num_kv_blocks(directory) == 3
    assert follower.counts.gaps == 1


async def test_a_bad_message_is_counted_and_followed_by_a_snapshot(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bad = CacheFeed("e", 2, KEYS[0][:8], b"\xff\xff")
    agent = Agent([feed(1, KEYS[0], snapshot=True), bad, feed(2, *KEYS[:2], snapshot=True)])
    directory, follower = await followed(agent)
    assert agent.asked[2] == FROM_THE_BEGINNING
    assert num_kv_blocks(directory) == 2
    assert follower.counts.bad_feeds == 1
    assert "flags 0xffff have bits beyond" in caplog.text


async def test_a_silent_agent_keeps_its_state_for_a_while(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    least_jitter = partial(Backoff, uniform=lambda: 0.0)  # half of each delay
    monkeypatch.setattr("kvmanager.directory.feed_client.Backoff", least_jitter)
    gone = RpcError("UNAVAILABLE", "gone")
    agent = Agent([feed(1, KEYS[0], snapshot=True), gone, gone, gone])
    delays_s: list[float] = []

    async def sleep(delay_s: float) -> None:
        delays_s.append(delay_s)

    directory, follower = await followed(agent, sleep=sleep)
    assert delays_s[1:] == [RETRY_S / 2, RETRY_S, 2 * RETRY_S]
    assert num_kv_blocks(directory) == 1
    assert follower.counts.failures == 3
    assert caplog.text.count("not followed now") == 1


async def test_an_agent_that_is_silent_for_long_is_forgotten() -> None:
    gone = RpcError("UNAVAILABLE", "gone")
    agent = Agent([feed(1, KEYS[0], snapshot=True), gone])
    directory, _ = await followed(agent, forget_s=-1)
    assert directory.nodes(0.0) == []
    assert agent.asked[-1] == FROM_THE_BEGINNING


async def test_an_agent_without_a_cache_is_no_trouble(caplog: pytest.LogCaptureFixture) -> None:
    agent = Agent([feed(1, KEYS[0], snapshot=True), RpcError("INVALID", "no cache here")])
    directory, follower = await followed(agent)
    assert directory.nodes(0.0) == []
    assert follower.counts.failures == 0
    assert "WARNING" not in caplog.text


async def test_a_bug_does_not_end_following(caplog: pytest.LogCaptureFixture) -> None:
    agent = Agent([TypeError("surprise"), feed(1, KEYS[0], snapshot=True)])
    directory, _ = await followed(agent)
    assert num_kv_blocks(directory) == 1
    assert "surprise" in caplog.text


async def test_agents_come_and_go() -> None:
    agents: dict[str, Agent] = {}

    def connect(target: str) -> Agent:
        agents[target] = Agent([feed(1, KEYS[0], snapshot=True)])
        return agents[target]

    directory = Directory()
    follower = DirectoryFollower(DirectorySink(directory), connect, sleep=at_once)

    async def known(targets: dict[NodeName, str]) -> list[str]:
        await follower.follow(targets)
        await asyncio.sleep(0)
        await asyncio.gather(*(agents[target].done.wait() for target in targets.values()))
        return [state.node for state in directory.nodes(0.0)]

    assert await known({NODE: "a:1", OTHER: "b:1"}) == ["n0", "n1"]
    assert await known({OTHER: "b:1"}) == ["n1"]
    assert agents["a:1"].closed
    assert await known({OTHER: "b:2"}) == ["n1"]
    assert agents["b:1"].closed
    await follower.stop()
    assert len(directory.nodes(0.0)) == 1


@dataclass
class Sink:
    """A store that is another writer's at first, then does not work, then does."""

    positions: list[Position | Exception | None]
    applied: list[CacheFeed] = field(default_factory=list)

    async def position(self, node: NodeName) -> Position | None:
        answer = self.positions.pop(0) if self.positions else ("e", 1)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def apply(self, node: NodeName, feed: CacheFeed) -> bool:
        self.applied.append(feed)
        return True

    async def forget(self, node: NodeName) -> None:
        raise StoreError("gone")


async def test_a_store_may_be_another_writers_or_fail() -> None:
    sink = Sink([None, StoreError("gone"), FROM_THE_BEGINNING])
    agent = Agent([feed(1, KEYS[0], snapshot=True)])
    follower = DirectoryFollower(sink, lambda _: agent, forget_s=-1, sleep=at_once)
    await follower.follow({NODE: "agent:1"})
    await asyncio.wait_for(agent.done.wait(), 5)
    assert len(sink.applied) == 1
    assert agent.asked == [FROM_THE_BEGINNING, ("e", 1)]
    await follower.follow({})


async def test_giving_up_in_the_middle_of_a_message_leads_to_a_snapshot() -> None:
    directory = Directory()
    sink = DirectorySink(directory)
    keys = random.Random(1).randbytes(8 * 50_000)
    large = CacheFeed("e", 1, keys, b"\x01\x00" * 50_000, is_snapshot=True)
    applying = asyncio.create_task(sink.apply(NODE, large))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    applying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await applying
    assert 0 < directory.num_blocks < 50_000
    assert await sink.position(NODE) == FROM_THE_BEGINNING


def test_an_outage_is_told_once_and_tried_again_later(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    outage = Outage("store", quiet_s=1.0)
    assert not outage.quiet(0.0)
    outage.failed("refused", 0.0)
    assert outage.quiet(0.9)
    assert not outage.quiet(1.0)
    outage.failed("refused", 1.0)
    outage.worked()
    assert not outage.quiet(1.1)
    assert caplog.text.count("going on without: refused") == 1
    assert caplog.text.count("answers again") == 1


def test_metrics_show_what_they_were_told_last() -> None:
    directory = Directory()
    for node in (NODE, OTHER):
        assert directory.apply(node, feed(1, *KEYS[:3], snapshot=True), 1.0)
    metrics = DirectoryMetrics()
    follower = DirectoryFollower(DirectorySink(directory), AgentClient)
    metrics.update(directory.nodes(3.0), follower.counts, directory.nbytes)
    value = metrics.registry.get_sample_value
    labels = {"cluster": "c", "node": "n1"}
    assert value("prfaas_directory_node_blocks", labels) == 3
    assert value("prfaas_directory_node_age_seconds", labels) == 2
    assert value("prfaas_directory_followed_total", {"what": "gaps"}) == 0
    directory.forget(OTHER)
    metrics.update(directory.nodes(3.0), follower.counts, directory.nbytes)
    assert value("prfaas_directory_node_blocks", labels) is None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "agents: is required and missing"),
        ({"agents": {"n0": "h:1"}}, "'n0' is not cluster/node"),
        ({"agents": {"c/n0": "h"}}, "'h' is not host:port"),
        ({"agents": {"c/n0": "h:1"}, "listen": "0.0.0.0:7300"}, "reachable from other hosts"),
        ({"agents": {"c/n0": "h:1"}, "forget_s": 0}, "forget_s"),
    ],
)
def test_configurations_that_cannot_work(settings: dict[str, object], words: str) -> None:
    with pytest.raises(FileError, match=words):
        load(None, settings)


def test_a_configuration_names_its_agents() -> None:
    config = load(None, {"agents": {"c/n0": "h:1"}, "redis": "rediss://:secret@h"})
    assert config.targets == {NODE: "h:1"}
    assert "secret" not in repr(config)
