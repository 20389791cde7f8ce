"""Moves cached prefixes between the region's nodes: for a request that waits, and ahead of need.

Owns a connection to each agent that took part in a move, and every move under way. A route says
what a prompt gets from another cluster (`scheduler.routing.candidates`), and the scheduler hears
from here how moves between clusters ended. This file does not know requests or how prefixes are
found.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal, NamedTuple

from prometheus_client import CollectorRegistry, Counter

from deploy.gateway.cache.cached_prompt import CachedPrompt, PromptKeys
from deploy.gateway.serving.background import Background
from kvmanager.agent.between_agents import CacheMoveResult, move_cache
from kvmanager.agent.client import AgentClient, CacheMoveOrder
from kvmanager.agent.messages import CacheModel
from kvmanager.directory.messages import NodeName, shape_of
from kvmanager.pool.shape import PartKind
from scheduler.live.core import Event
from scheduler.live.feedback import CacheMoveBegun, CacheMoveOver
from scheduler.routing.candidates import MAX_MOVE_S
from scheduler.routing.short_term import RouteDecision
from transport.rpc import RpcError

logger = logging.getLogger("prfaas.deploy.gateway")

MoveKind = Literal["request", "replication"]
MoveName = tuple[bytes, NodeName]
"""The last key of the prefix, and the node to which it goes."""

STATUS_TIMEOUT_S: Final = 3.0
MAX_MOVES: Final = 8
"""The most moves under way at a time."""


class MoveMetrics:
    """Counters of moves (`prfaas_gateway_cache_move*`)."""

    def __init__(self, registry: CollectorRegistry) -> None:
        prefix = "prfaas_gateway_cache_"
        self.moves = Counter(
            prefix + "moves_total",
            "Moves of cached prefixes that ended.",
            ("kind", "outcome"),
            registry=registry,
        )
        self.bytes = Counter(
            prefix + "moved_bytes_total",
            "Bytes that moves of cached prefixes carried.",
            ("kind",),
            registry=registry,
        )
        self.decisions = Counter(
            prefix + "move_decisions_total",
            "Whether a longer prefix elsewhere was worth moving first.",
            ("reason",),
            registry=registry,
        )
        self.dropped_parts = Counter(
            prefix + "dropped_parts_total", "Parts of copies that were dropped.", registry=registry
        )


class _Shipment(NamedTuple):
    """One move: `source` sends these parts of a prefix to `destination`.

    `parts` are (block, part of the cache shape).
    """

    prefix: PromptKeys
    source: NodeName
    destination: NodeName
    parts: tuple[tuple[int, int], ...]


class CacheMoves:
    """All moves of one gateway. Runs on one event loop; `close` it."""

    def __init__(
        self,
        targets: Callable[[], Mapping[NodeName, str]],
        open_agent: Callable[[str], AgentClient],
        background: Background,
        metrics: MoveMetrics,
        tell: Callable[[Event[Any]], Any],
    ) -> None:
        """`targets` gives the control address of each node's agent as it is now. `open_agent`
        makes a client of the agent at such an address, to be closed here. `tell` hands an event to
        the live scheduler.
        """
        self.metrics = metrics
        self._targets = targets
        self._open_agent = open_agent
        self._background = background
        self._tell = tell
        self._agents: dict[str, AgentClient] = {}
        self._moving: dict[MoveName, asyncio.Task[CacheMoveResult]] = {}
        self._fingerprints: dict[tuple[str, str], str] = {}

    @property
    def moving(self) -> set[MoveName]:
        """The names of the moves under way."""
        return set(self._moving)

    def knows(self, *nodes: NodeName) -> bool:
        """Whether the clusters' reports name all of these."""
        return self._targets().keys() >= set(nodes)

    async def bring(self, cached: CachedPrompt, decision: RouteDecision) -> CachedPrompt:
        """Carry out what a route says of the prompt's cached prefix, and wait for it if the route
        does. Returns what is cached after that, which without a move, or with one that failed or
        takes too long, is `cached` itself. Raises nothing but `CancelledError`.
        """
        move = decision.move
        if move.source:
            self.metrics.decisions.labels(move.reason.value).inc()
            logger.debug("%s: %s", decision.target, move)
        if not move.begins:
            return cached
        try:
            found = _shipment(cached, move.source, decision.target)
        except ValueError as error:
            logger.warning("a model's cache shape is not usable: %s", error)
            return cached
        if found is None:
            return cached
        task = self.begin(*found, "request" if move.pays else "replication")
        if task is None or not move.pays:
            return cached
        # A move that takes too long goes on without the request: a later one can use it.
        done, _ = await asyncio.wait({task}, timeout=MAX_MOVE_S)
        if not done or task.cancelled() or task.exception() is not None:
            return cached
        is_there = _is_whole(task.result())
        return cached.received(found.destination, len(found.prefix.blocks)) if is_there else cached

    async def drop(self, prefix: PromptKeys, node: NodeName, keep_blocks: int) -> int:
        """Drop a node's copy of `prefix` but for its first `keep_blocks`; returns the number of
        dropped parts. Raises `RpcError`.
        """
        agent = self._agent(node)
        fingerprint = await self._fingerprint(node, prefix.model)
        num_parts = await agent.drop_cached(
            fingerprint, prefix.joined, keep_blocks, prefix.model.namespace
        )
        self.metrics.dropped_parts.inc(num_parts)
        return num_parts

    async def close(self) -> None:
        """Cancel all moves and close all connections. Idempotent."""
        tasks = list(self._moving.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        agents = list(self._agents.values())
        self._agents.clear()
        await asyncio.gather(*(agent.close() for agent in agents))

    def begin(
        self,
        prefix: PromptKeys,
        source: NodeName,
        destination: NodeName,
        parts: Sequence[tuple[int, int]],
        kind: MoveKind = "replication",
    ) -> asyncio.Task[CacheMoveResult] | None:
        """Start to copy `parts` of a prefix in a task of its own, and return the task.

        Returns the running task if this prefix is on its way there already, and None if there are
        too many moves or a node is not reported any more.
        """
        name = prefix.blocks[-1], destination
        if name not in self._moving:
            self.forget_departed()
            if len(self._moving) >= MAX_MOVES:
                return None
            if not self.knows(source, destination):
                return None
            work = self._move(prefix, source, destination, parts, kind)
            task = self._background.begin(work, f"moving a cached prefix to {destination}")
            self._moving[name] = task
            task.add_done_callback(lambda _: self._moving.pop(name, None))
        return self._moving[name]

    async def _move(
        self,
        prefix: PromptKeys,
        source: NodeName,
        destination: NodeName,
        parts: Sequence[tuple[int, int]],
        kind: MoveKind,
    ) -> CacheMoveResult:
        outcome, result = "cancelled", CacheMoveResult(0, 0, 0)
        between = source.cluster != destination.cluster
        key = self._tell(CacheMoveBegun(source.cluster, destination.cluster)) if between else None
        try:
            fingerprint = await self._fingerprint(source, prefix.model)
            order = CacheMoveOrder(
                fingerprint,
                prefix.joined,
                parts,
                kind,
                prefix.tenant,
                prefix.model.namespace,
            )
            result = await move_cache(self._agent(source), self._agent(destination), order)
            outcome = "complete"
        except RpcError as error:
            outcome = error.code.lower()
            logger.warning("moving a prefix from %s to %s failed: %s", source, destination, error)
            raise
        finally:
            self.metrics.moves.labels(kind, outcome).inc()
            self.metrics.bytes.labels(kind).inc(result.nbytes)
            if key is not None:
                failed = outcome not in ("complete", "cancelled") or not _is_whole(result)
                measured = result.nbytes, result.transfer_s, result.rtt_s
                self._tell(CacheMoveOver(key, failed, *measured))
        return result

    async def _fingerprint(self, node: NodeName, model: CacheModel) -> str:
        """The fingerprint of the layout with which a node's engines cache `model`.

        Raises `RpcError`.
        """
        target = self._target(node)
        known = self._fingerprints.get((target, model.namespace))
        if known is None:
            status = await self._agent(node).status(STATUS_TIMEOUT_S)
            for engine in status.engines:
                if engine.cache is not None:
                    found = target, engine.cache.namespace
                    self._fingerprints[found] = engine.layout_fingerprint
            known = self._fingerprints.get((target, model.namespace))
        if known is None:
            raise RpcError("INVALID", f"no engine of {node} caches this model")
        return known

    def forget_departed(self) -> None:
        """Forget agents that no report names any more, once no move may need them."""
        if self._moving:
            return
        known = set(self._targets().values())
        for target in self._agents.keys() - known:
            self._background.spawn(self._agents.pop(target).close(), f"closing {target}")
        self._fingerprints = {key: v for key, v in self._fingerprints.items() if key[0] in known}

    def _agent(self, node: NodeName) -> AgentClient:
        target = self._target(node)
        if target not in self._agents:
            self._agents[target] = self._open_agent(target)
        return self._agents[target]

    def _target(self, node: NodeName) -> str:
        target = self._targets().get(node)
        if target is None:
            raise RpcError("NOT_FOUND", f"no report names {node} any more")
        return target


def _shipment(cached: CachedPrompt, source: str, target: str) -> _Shipment | None:
    """The longest prefix that a cluster has, for a node that computes for a route's target. None if
    there are no such nodes. Raises `ValueError` if the model's parts are no cache shape.
    """
    cluster, nodes = cached.computing(target)
    sending = [item for item in cached.coverage if item.cluster == source]
    if cached.keys is None or not nodes or not sending:
        return None
    sender = max(sending, key=lambda item: item.pool.usable_blocks)
    num_blocks = sender.pool.usable_blocks
    there = {item.node: item.pool.kv_blocks for item in cached.coverage if item.cluster == cluster}
    # The node that has the most of it needs the fewest bytes.
    node = max(sorted(nodes), key=lambda name: there.get(name, 0))
    shape = shape_of(cached.keys.model)
    return _Shipment(
        prefix=replace(cached.keys, blocks=cached.keys.blocks[:num_blocks]),
        source=NodeName(source, sender.node),
        destination=NodeName(cluster, node),
        parts=tuple(
            (index, part)
            for index, part in shape.resume_parts(num_blocks)
            if shape.parts[part].kind is not PartKind.KV or index >= there.get(node, 0)
        ),
    )


def _is_whole(result: CacheMoveResult) -> bool:
    """Whether the destination kept all that it got: it may have had no room for some."""
    return result.kept_parts >= result.num_parts
