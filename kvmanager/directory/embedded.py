"""A directory inside this process, fed by the region's agents. It is a gateway's default."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from kvmanager.agent.client import AgentClient
from kvmanager.directory.directory import Directory
from kvmanager.directory.feed_client import DirectoryFollower, DirectorySink
from kvmanager.directory.messages import FORGET_S, NodeCoverage, NodeName, NodeState, ResumeRule
from kvmanager.directory.table import Keys


class EmbeddedDirectory:
    """A `DirectoryReader`. Call `follow` with the region's agents, and again when they change."""

    def __init__(
        self, connect: Callable[[str], AgentClient], *, forget_s: float = FORGET_S
    ) -> None:
        """`connect` makes a client of the agent at a control address, to be closed here. An agent
        that has not answered for `forget_s` is taken to hold nothing.
        """
        self.core = Directory()
        self.follower = DirectoryFollower(DirectorySink(self.core), connect, forget_s=forget_s)

    async def follow(self, agents: Mapping[NodeName, str]) -> None:
        """Follow exactly the agents with these control addresses."""
        await self.follower.follow(agents)

    async def match(self, rule: ResumeRule, keys: Sequence[bytes]) -> list[NodeCoverage]:
        return self.core.match(rule, keys, time.monotonic())

    async def match_short(self, rule: ResumeRule, keys: Keys) -> list[NodeCoverage]:
        """`match` for keys that are shortened already."""
        return self.core.match_short(rule, keys, time.monotonic())

    async def embedding_holders(self, keys: Sequence[bytes]) -> list[list[NodeName]]:
        return self.core.embedding_holders(keys)

    async def nodes(self) -> list[NodeState]:
        return self.core.nodes(time.monotonic())

    async def close(self) -> None:
        """Stop following all agents."""
        await self.follower.stop()
