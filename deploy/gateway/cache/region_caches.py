"""Asks the directory and the node agents what the region has cached.

Owns the directory's reader and a client of every agent that a report names. This file does not know
requests or what the answers are used for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, Literal, TypeVar

from deploy.gateway.cache.cached_prompt import CachedPrompt, CachePlaces, prompt_keys
from kvmanager.agent.client import AgentClient
from kvmanager.agent.messages import ListCacheReply, StatusReply
from kvmanager.directory.messages import NodeName, ResumeRule
from kvmanager.directory.reader import DirectoryReader
from kvmanager.embedding_keys import embedding_key
from kvmanager.media_items import MediaItem
from kvmanager.token_ids import TokenIds
from scheduler.reports import ClusterReport
from transport.rpc import RpcError

logger = logging.getLogger("prfaas.deploy.gateway")

Order = Literal["hits", "size", "recent"]

_AGENT_TIMEOUT_S: Final = 3.0

T = TypeVar("T")

Follow = Callable[[Mapping[NodeName, str]], Awaitable[None]]
"""Makes a directory follow exactly the agents at these control addresses."""


class RegionCaches:
    """What the region has cached, for one gateway. `watch` it before asking."""

    def __init__(
        self,
        directory: DirectoryReader,
        open_agent: Callable[[str], AgentClient],
        follow: Follow | None = None,
    ) -> None:
        """`open_agent` makes a client of the agent at a control address; the caller closes it.
        `follow` is for a directory that must be told which nodes to ask.
        """
        self.directory = directory
        self.open_agent = open_agent
        self._follow = follow
        self._targets: Mapping[NodeName, str] = {}
        self._agents: dict[str, AgentClient] = {}
        self._watching = asyncio.Lock()

    @property
    def targets(self) -> Mapping[NodeName, str]:
        """The control address of each reported node's agent."""
        return self._targets

    async def watch(self, report: ClusterReport) -> None:
        """Take the nodes in `report` as those of its cluster; one of a front that could not be
        asked says nothing.
        """
        if not report.heard:
            return
        found = {
            NodeName(report.name, item.node_name or item.node): item.node
            for item in report.instances
            if item.node
        }
        # `follow` awaits: two reports at once must not overwrite each other's nodes.
        async with self._watching:
            kept = {name: at for name, at in self._targets.items() if name.cluster != report.name}
            if (targets := kept | found) != self._targets:
                self._targets = targets
                for target in self._agents.keys() - set(targets.values()):  # departed nodes
                    await self._agents.pop(target).close()
                if self._follow is not None:
                    await self._follow(targets)

    async def look_up(
        self,
        places: CachePlaces,
        token_ids: TokenIds,
        salt: str = "",
        tenant: str = "",
        *,
        adapter: str = "",
        media: Sequence[MediaItem] = (),
    ) -> CachedPrompt:
        """Find who has what of a prompt of `tenant` with this `cache_salt` and these media,
        computed with the LoRA adapter of this identity. Never raises: nothing is known of a prompt
        that cannot be hashed, and its engine words the error.
        """
        if places.model is None:
            return CachedPrompt(places=places)
        try:
            rule = ResumeRule.of_model(places.model)
            keys = await prompt_keys(
                places.model, token_ids, salt, tenant, adapter=adapter, media=media
            )
        except ValueError as error:
            logger.warning("a prompt cannot be hashed: %s", error)
            return CachedPrompt(places=places)
        if keys is None:
            return CachedPrompt(places=places)
        return CachedPrompt(keys, places, tuple(await self.directory.match(rule, keys.blocks)))

    async def embedding_nodes(
        self, report: ClusterReport | None, identifiers: Sequence[str]
    ) -> tuple[str, ...]:
        """The control addresses of the nodes of this cluster that are known to have embeddings of
        some of these media. None are looked for where nothing encodes apart.
        """
        if report is None or report.encode is None or not identifiers:
            return ()
        encoders = {item.encoder for item in report.instances if item.encoder}
        keys = [embedding_key(one, name) for one in encoders for name in identifiers]
        holders = await self.directory.embedding_holders(keys)
        names = {name for nodes in holders for name in nodes if name.cluster == report.name}
        return tuple(self._targets[name] for name in sorted(names) if name in self._targets)

    async def statuses(self) -> dict[NodeName, StatusReply | str]:
        """Every agent's status, or the reason why it is missing."""
        return await self._ask_all(lambda agent: agent.status(_AGENT_TIMEOUT_S))

    async def prefixes(self, limit: int, order: Order) -> dict[NodeName, ListCacheReply | str]:
        """The first `limit` prefixes of every agent, or the reason why they are missing."""
        return await self._ask_all(lambda agent: agent.list_cache(limit, order, _AGENT_TIMEOUT_S))

    async def close(self) -> None:
        """Close the directory and all connections. Idempotent."""
        await self.directory.close()
        agents = list(self._agents.values())
        self._agents.clear()
        await asyncio.gather(*(agent.close() for agent in agents))

    async def _ask_all(self, ask: Callable[[AgentClient], Awaitable[T]]) -> dict[NodeName, T | str]:
        async def one(target: str) -> T | str:
            agent = self._agents.get(target)
            if agent is None:
                agent = self._agents[target] = self.open_agent(target)
            try:
                return await ask(agent)
            except RpcError as error:
                return error.message

        targets = dict(self._targets)
        answers = await asyncio.gather(*map(one, targets.values()))
        return dict(zip(targets, answers, strict=True))
