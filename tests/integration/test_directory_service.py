"""A directory that follows feeds over gRPC, and the service and command that answer from it."""

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
from eventually import eventually
from typer.testing import CliRunner

from deploy.cli import app
from kvmanager.agent.cache.feed import FeedLog
from kvmanager.agent.client import AgentClient
from kvmanager.agent.messages import SERVICE as AGENT_SERVICE
from kvmanager.agent.messages import CacheFeed as FeedReply
from kvmanager.agent.messages import WatchCache
from kvmanager.directory.embedded import EmbeddedDirectory
from kvmanager.directory.messages import SERVICE, Hit, Match, MatchReply, NodeName, ResumeRule
from kvmanager.directory.reader import DirectoryReader
from kvmanager.directory.remote import RemoteDirectory
from kvmanager.directory.service import DirectoryService
from kvmanager.hashing import block_keys, root_key
from transport.rpc import Method, RpcClient, RpcError, RpcServer

KEYS = block_keys(range(100), 1, root_key(b"model"))
RULE = ResumeRule(has_kv=True, window_reach=0, has_state=False)
NODE = NodeName("pd", "n0")

RUN_COMMAND = """
import typer
from kvmanager.directory.cli import directory_command
typer.run(directory_command)
"""


@dataclass
class FollowedAgent:
    """The part of an agent that is followed: its real feed, told what engines hold."""

    feed: FeedLog = field(default_factory=FeedLog)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    port: int = 0

    def holds(self, first: int, last: int, kinds: int = 1) -> None:
        self.feed.engine_changed([(key, kinds) for key in KEYS[first:last]], 0.0)
        self.changed.set()

    async def watch(self, request: WatchCache) -> FeedReply:
        if not self.feed.has_news(request.epoch, request.after_seq):
            self.changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.changed.wait(), request.timeout_s)
        return self.feed.read(request.epoch, request.after_seq, 0.0, max_keys=30)

    def server(self) -> RpcServer:
        methods = {"WatchCache": Method(WatchCache, FeedReply, self.watch)}
        return RpcServer(f"127.0.0.1:{self.port}", {AGENT_SERVICE: methods})

    async def start(self) -> RpcServer:
        server = self.server()
        self.port = await server.start()
        return server


@pytest.fixture
async def agent() -> AsyncIterator[FollowedAgent]:
    fake = FollowedAgent()
    server = await fake.start()
    yield fake
    await server.stop(grace_s=0)


async def until(directory: DirectoryReader, num_blocks: int) -> None:
    """Wait until exactly that many leading blocks of the prompt are known."""
    await eventually(
        lambda: directory.match(RULE, KEYS),
        lambda found: sum(node.engine.kv_blocks for node in found) == num_blocks,
    )


async def test_follows_changes_pages_and_a_restart(agent: FollowedAgent) -> None:
    agent.holds(0, 100)
    directory = EmbeddedDirectory(AgentClient, forget_s=0.5)
    await directory.follow({NODE: f"127.0.0.1:{agent.port}"})
    await until(directory, 100)
    agent.holds(60, 100, kinds=0)
    await until(directory, 60)
    agent.feed = FeedLog()
    agent.holds(0, 7)
    await until(directory, 7)
    (state,) = await directory.nodes()
    assert (state.num_blocks, state.complete, state.epoch) == (7, True, agent.feed.epoch)
    await directory.close()


async def test_an_agent_that_dies_is_forgotten_and_known_again_when_it_is_back() -> None:
    fake = FollowedAgent()
    server = await fake.start()
    fake.holds(0, 50)
    directory = EmbeddedDirectory(AgentClient, forget_s=0.5)
    await directory.follow({NODE: f"127.0.0.1:{fake.port}"})
    await until(directory, 50)
    await server.stop(grace_s=0)
    await until(directory, 0)
    assert await directory.nodes() == []
    server = await fake.start()
    await until(directory, 50)
    await directory.close()
    await server.stop(grace_s=0)


async def test_the_service_answers_as_the_directory_does(agent: FollowedAgent) -> None:
    agent.holds(0, 33)
    directory = EmbeddedDirectory(AgentClient, forget_s=0.5)
    await directory.follow({NODE: f"127.0.0.1:{agent.port}"})
    server = RpcServer("127.0.0.1:0", {SERVICE: DirectoryService(directory).methods()})
    target = f"127.0.0.1:{await server.start()}"
    remote = RemoteDirectory(target, timeout_s=5)
    await until(remote, 33)
    (found,) = await remote.match(RULE, KEYS)
    assert (found.cluster, found.node) == NODE
    assert (found.every, found.pool, found.engine) == (Hit(33, 33), Hit(), Hit(33, 33))
    assert found.age_s < 5
    assert [state.node for state in await remote.nodes()] == ["n0"]
    picture, other = b"picture!" * 2, b"another!" * 2
    agent.feed.embedding_changed(picture, True, 0.0)
    agent.changed.set()
    await eventually(
        lambda: remote.embedding_holders([other, picture]), lambda found: found == [[], [NODE]]
    )
    (state,) = await remote.nodes()
    assert (state.num_blocks, state.num_embeddings) == (33, 1)
    client = RpcClient(target, SERVICE)
    with pytest.raises(RpcError, match="7 bytes are no sequence") as caught:
        await client.call("Match", Match(RULE, b"7 bytes"), MatchReply, 5)
    assert caught.value.code == "INVALID"
    await client.close()
    await server.stop(grace_s=0)
    await directory.close()
    assert await remote.match(RULE, KEYS) == []
    assert await remote.embedding_holders([picture]) == [[]]
    assert await remote.nodes() == []
    await remote.close()


async def test_a_directory_of_the_release_before_says_nothing_of_embeddings(
    agent: FollowedAgent,
) -> None:
    agent.holds(0, 5)
    directory = EmbeddedDirectory(AgentClient, forget_s=0.5)
    await directory.follow({NODE: f"127.0.0.1:{agent.port}"})
    methods = DirectoryService(directory).methods()
    del methods["FindEmbeddings"]
    server = RpcServer("127.0.0.1:0", {SERVICE: methods})
    remote = RemoteDirectory(f"127.0.0.1:{await server.start()}", timeout_s=5)
    await until(remote, 5)
    assert await remote.embedding_holders([b"picture!"]) == [[]]
    # That is no outage: it goes on answering what it knows.
    assert len(await remote.match(RULE, KEYS)) == 1
    await remote.close()
    await server.stop(grace_s=0)
    await directory.close()


async def test_the_command_serves_until_it_is_told_to_stop(agent: FollowedAgent) -> None:
    agent.holds(0, 21)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", RUN_COMMAND),
        *("--listen", "127.0.0.1:0", "--agent", f"pd/n0=127.0.0.1:{agent.port}"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        ready = json.loads(await asyncio.wait_for(process.stdout.readline(), 30))
        assert ready["event"] == "ready"
        remote = RemoteDirectory(ready["control"], timeout_s=5)
        await until(remote, 21)
        await remote.close()
    finally:
        process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 0


def test_the_command_says_what_is_wrong() -> None:
    result = CliRunner().invoke(app, ["directory", "--agent", "n0=127.0.0.1:1"])
    assert result.exit_code == 2
    assert "'n0' is not cluster/node" in result.stderr
