"""Where embeddings are: asks node agents, and has one pull what another one has.

Best effort: an agent that does not answer has nothing, and what does not come is encoded again. It
does not know queues or engines' HTTP.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvmanager.agent.between_agents import EmbeddingOrder, pull_embeddings
from kvmanager.agent.client import AgentClient
from kvmanager.embedding_keys import embedding_key
from kvmanager.hashing import split_keys
from prfaas.encoding.values import Media
from prfaas.engines.instance import Instance
from scheduler.reports import same_model
from transport.rpc import RpcError

logger = logging.getLogger("prfaas.encoding")

ASK_S: Final = 0.5
"""Longest wait for an agent's word about embeddings, seconds."""


@dataclass(frozen=True, slots=True)
class _Node:
    """A node whose agent keeps embeddings of one model, made by `encoder`."""

    agent: AgentClient
    encoder: str


class EmbeddingPlaces:
    """The nodes of a cluster's instances, as node agents."""

    def __init__(self, instances: Mapping[str, Instance]) -> None:
        self._instances = instances
        self.token_bytes: float | None = None
        """The size of an embedding for each media token, by the latest that was found."""

    async def find(self, media: Media, names: Sequence[str]) -> dict[str, str]:
        """The node that has each of these media, without those that none has. One of `media.nodes`
        if possible. Nodes that are known to have some are asked first, and others only for what
        these lack.
        """
        nodes = self._nodes(media.model)
        known = {at: node for at, node in nodes.items() if at in media.holders}
        others = {at: node for at, node in nodes.items() if at not in known}
        found = await self._at(known, media, names)
        lacking = [name for name in names if name not in found]
        return found | (await self._at(others, media, lacking) if lacking else {})

    async def _at(
        self, nodes: Mapping[str, _Node], media: Media, names: Sequence[str]
    ) -> dict[str, str]:
        """`find` at these nodes."""
        answers = await asyncio.gather(*(self._sizes(node, names) for node in nodes.values()))
        found: dict[str, str] = {}
        # Those where the prefill may run come last, so that they stay.
        for at, sizes in sorted(
            zip(nodes, answers, strict=True), key=lambda one: one[0] in media.nodes
        ):
            found |= dict.fromkeys(sizes, at)
            self._learn(media, sizes)
        return found

    async def pull(
        self, media: Media, where: Mapping[str, str], target: Instance, timeout_s: float
    ) -> int:
        """Bring embeddings, whose nodes `where` has, to the node of `target`. Returns the bytes."""
        to = target.spec.agent
        nodes = self._nodes(media.model)
        by_source: dict[str, list[str]] = {}
        for name, at in where.items():
            if at and at != to and at in nodes:
                by_source.setdefault(at, []).append(name)
        if not by_source:
            return 0
        pulls = [
            self._pulled(media, nodes[at], names, target.agent) for at, names in by_source.items()
        ]
        try:
            async with asyncio.timeout(timeout_s):
                return sum(await asyncio.gather(*pulls))
        except TimeoutError:
            logger.warning("%s: embeddings did not come in time to %s", media.request_id, to)
            return 0

    def _nodes(self, model: str) -> dict[str, _Node]:
        """The nodes with an instance of the model whose encoder is known, by agent."""
        found: dict[str, _Node] = {}
        for item in self._instances.values():
            is_of = same_model(item.spec.served_name, model)
            if is_of and item.encoder and item.agent_health.healthy:
                found.setdefault(item.spec.agent, _Node(item.agent, item.encoder))
        return found

    async def _sizes(self, node: _Node, names: Sequence[str]) -> dict[str, int]:
        """The bytes of the embeddings that a node has, by name."""
        keys = [embedding_key(node.encoder, name) for name in names]
        try:
            sizes = await node.agent.has_embeddings(keys, ASK_S)
        except RpcError as error:
            logger.debug("%s does not say which embeddings it has: %s", node.agent.target, error)
            return {}
        return {name: nbytes for name, nbytes in zip(names, sizes, strict=False) if nbytes}

    async def _pulled(
        self, media: Media, source: _Node, names: Collection[str], to: AgentClient
    ) -> int:
        sizes = await self._sizes(source, tuple(names))
        self._learn(media, sizes)
        by_key = {embedding_key(source.encoder, name): nbytes for name, nbytes in sizes.items()}
        granted = tuple(split_keys(media.granted_keys))
        if granted:
            by_key = {key: nbytes for key, nbytes in by_key.items() if key in granted}
        if not by_key:
            return 0
        order = EmbeddingOrder(by_key, media.grant, granted, media.tenant)
        try:
            return (await pull_embeddings(source.agent, to, order)).nbytes
        except RpcError as error:
            at = source.agent.target
            logger.warning("%s: no embeddings came from %s: %s", media.request_id, at, error)
            return 0

    def _learn(self, media: Media, sizes: Mapping[str, int]) -> None:
        tokens = {one.identifier: one.length for one in media.items}
        for name, nbytes in sizes.items():
            if tokens.get(name):
                self.token_bytes = nbytes / tokens[name]


def nodes_of(instances: Iterable[Instance], model: str) -> frozenset[str]:
    """The nodes of the instances that may prefill for a model."""
    return frozenset(
        item.spec.agent
        for item in instances
        if item.role != "encode" and same_model(item.spec.served_name, model)
    )
