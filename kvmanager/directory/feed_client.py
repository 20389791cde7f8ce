"""Follows the prefix caches of a region's node agents, with one task for each agent.

A `FeedSink` keeps the state; this module does not know how. Each agent is asked for the changes
since the position that the sink has reached, and answers when there are any. The state of an agent
that does not answer grows older; after `forget_s` it counts as holding nothing. An agent without a
cache is asked again now and then.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from kvmanager.agent.client import AgentClient
from kvmanager.agent.messages import CacheFeed
from kvmanager.directory.directory import Directory, Position
from kvmanager.directory.errors import DirectoryError, FeedError
from kvmanager.directory.messages import FORGET_S, SHORT_KEY_BYTES, NodeName
from transport.backoff import Backoff
from transport.rpc import RpcError
from transport.tasks import start_task

logger = logging.getLogger("prfaas.kvmanager.directory")

POLL_S: Final = 5.0
"""Longest time for which an agent without changes may delay its answer."""
BATCH_S: Final = 0.05
"""Least time between two requests, so that changes come in batches."""
RETRY_S: Final = 0.2
MAX_RETRY_S: Final = 5.0
"""An agent that does not answer is asked again after `RETRY_S`, then twice as late each time up to
this, with jitter.
"""
NO_CACHE_S: Final = 15.0
"""Until an agent that has no cache is asked again."""

Sleep = Callable[[float], Awaitable[None]]
"""`asyncio.sleep`, or what a test has in its place."""


class FeedSink(Protocol):
    """Takes the feeds. Its methods may raise `DirectoryError`."""

    async def position(self, node: NodeName) -> Position | None:
        """The position to continue from; None: another process follows this node."""

    async def apply(self, node: NodeName, feed: CacheFeed) -> bool:
        """Apply a feed. False: it does not continue the known state, so `position` now requires a
        snapshot.
        """

    async def forget(self, node: NodeName) -> None:
        """The node holds nothing any more. Idempotent."""


@dataclass(slots=True)
class FollowCounts:
    """Counts over all agents since the start."""

    events: int = 0
    snapshots: int = 0
    gaps: int = 0
    bad_feeds: int = 0
    failures: int = 0


class DirectorySink:
    """Feeds a directory of this process, a little at a time."""

    def __init__(self, directory: Directory, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory = directory
        self._clock = clock

    async def position(self, node: NodeName) -> Position | None:
        return self._directory.position(node)

    async def apply(self, node: NodeName, feed: CacheFeed) -> bool:
        if not self._directory.accepts(node, feed):
            return False
        for _ in self._directory.applying(node, feed, self._clock()):
            # A gateway's own directory shares the event loop with the requests that it serves.
            await asyncio.sleep(0)
        return True

    async def forget(self, node: NodeName) -> None:
        self._directory.forget(node)


class DirectoryFollower:
    """Follows agents for one sink. Call `follow` with all agents, and again when they change."""

    def __init__(
        self,
        sink: FeedSink,
        connect: Callable[[str], AgentClient],
        *,
        forget_s: float = FORGET_S,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        """`connect` makes a client of the agent at a control address, to be closed here. An agent
        that has not answered for `forget_s` is taken to hold nothing.
        """
        self._sink = sink
        self._forget_s = forget_s
        self._sleep = sleep
        self._connect = connect
        self._followed: dict[NodeName, tuple[str, asyncio.Task[None]]] = {}
        self.counts = FollowCounts()

    async def follow(self, agents: Mapping[NodeName, str]) -> None:
        """Follow exactly these agents, by control address; forget those no longer named."""
        for node, (target, _) in list(self._followed.items()):
            if agents.get(node) != target:
                await self._leave(node)
            # At another address it may be the same agent, so its state stays.
            if node not in agents:
                await self._forget(node)
        for node, target in agents.items():
            if node not in self._followed:
                task = start_task(self._run(node, target), f"follow {node}")
                self._followed[node] = target, task

    async def stop(self) -> None:
        """Stop following all agents. Their states stay. Idempotent."""
        for node in list(self._followed):
            await self._leave(node)

    async def _leave(self, node: NodeName) -> None:
        task = self._followed.pop(node)[1]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def _run(self, node: NodeName, target: str) -> None:
        agent = self._connect(target)
        try:
            following = _Following(node, agent, self._sink, self._forget_s, self.counts)
            while True:
                await self._sleep(await following.ask())
        finally:
            await agent.close()

    async def _forget(self, node: NodeName) -> None:
        try:
            await self._sink.forget(node)
        except DirectoryError as error:
            logger.warning("%s: not forgotten: %s", node, error)


class _Following:
    """One agent and how it has answered so far."""

    def __init__(
        self,
        node: NodeName,
        agent: AgentClient,
        sink: FeedSink,
        forget_s: float,
        counts: FollowCounts,
    ) -> None:
        self._node = node
        self._agent = agent
        self._sink = sink
        self._forget_s = forget_s
        self._counts = counts
        self._heard_s = time.monotonic()
        self._trouble = ""
        self._backoff = Backoff(RETRY_S, MAX_RETRY_S)

    async def ask(self) -> float:
        """Send one request and apply the answer. Returns the delay before the next request."""
        began_s = time.monotonic()
        try:
            feed = await self._listen()
        except FeedError as error:
            self._counts.bad_feeds += 1
            return await self._failed(str(error))
        except DirectoryError as error:
            return await self._failed(str(error))
        except RpcError as error:
            # An agent without a prefix cache refuses the question itself.
            if error.code == "INVALID":
                return await self._has_no_cache(error)
            return await self._failed(str(error))
        except Exception as error:
            # Even after an unexpected error the agent must be followed further.
            logger.exception("%s: following failed", self._node)
            return await self._failed(repr(error))
        if feed is None:
            return POLL_S
        self._heard_s = time.monotonic()
        if self._trouble:
            logger.info("%s: followed again", self._node)
            self._trouble = ""
        self._backoff.reset()
        return 0.0 if feed.more else max(0.0, began_s + BATCH_S - self._heard_s)

    async def _listen(self) -> CacheFeed | None:
        """The agent's feed, already applied; None: another process follows the agent."""
        position = await self._sink.position(self._node)
        if position is None:
            return None
        feed = await self._agent.watch_cache(*position, POLL_S)
        if not await self._sink.apply(self._node, feed):
            self._counts.gaps += 1
            logger.info("%s: a gap after %s; a snapshot is asked for", self._node, position)
            return feed
        self._counts.snapshots += feed.is_snapshot
        self._counts.events += (len(feed.keys) + len(feed.embeddings)) // SHORT_KEY_BYTES
        return feed

    async def _failed(self, reason: str) -> float:
        self._counts.failures += 1
        if not self._trouble:
            logger.warning("%s: not followed now, asking again: %s", self._node, reason)
        self._trouble = reason
        if time.monotonic() - self._heard_s > self._forget_s:
            await self._forget()
        return self._backoff.after(0.0)

    async def _has_no_cache(self, error: RpcError) -> float:
        if not self._trouble:
            logger.info("%s: not followed, it has nothing to follow: %s", self._node, error)
        self._trouble = str(error)
        await self._forget()
        return NO_CACHE_S

    async def _forget(self) -> None:
        try:
            await self._sink.forget(self._node)
        except DirectoryError as error:
            logger.debug("%s: not forgotten: %s", self._node, error)
