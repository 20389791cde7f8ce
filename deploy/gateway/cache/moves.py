"""Moves cached prefixes between the region's nodes: for a request that waits, and ahead of need.

Owns a connection to each agent that took part in a move, and every move under way. It measures the
rates of prefill and of links; `scheduler.routing.cache_moves` decides by them whether a move is
worth waiting for. Does not know requests or how prefixes are found.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from prometheus_client import CollectorRegistry, Counter

from deploy.gateway.cache.cached_prompt import CachedPrompt, PromptKeys
from deploy.gateway.serving.background import Background
from kvmanager.agent.client import (
    AgentClient,
    CacheMoveOrder,
    CacheMoveResult,
    move_cache,
)
from kvmanager.agent.messages import CacheModel
from kvmanager.directory.messages import NodeCoverage, NodeName
from kvmanager.pool.shape import CacheShape, PartKind, PartShape
from scheduler.routing.cache_moves import MoveCase, MoveReason, RateMeter, worth_moving
from transport.rpc import RpcError

logger = logging.getLogger("prfaas.deploy.gateway")

MoveKind = Literal["request", "replication"]
MoveName = tuple[bytes, NodeName]
"""The last key of the prefix, and the node to which it goes."""

STATUS_TIMEOUT_S: Final = 3.0
MAX_WAIT_S: Final = 10.0
"""A request waits for a move for at most so long."""
MIN_SAVED_TOKENS: Final = 1024
"""A move that saves fewer tokens is not made."""
MAX_MOVES: Final = 8
"""At most so many moves are under way at a time."""


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
            prefix + "moved_bytes_total", "What they moved.", ("kind",), registry=registry
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


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A move that would let `destination` resume `saved_tokens` more of a prompt than it can now.

    `parts` are (block, part of the cache shape); together they have `nbytes`.
    """

    source: NodeName
    destination: NodeName
    prefix: PromptKeys
    saved_tokens: int
    parts: tuple[tuple[int, int], ...]
    nbytes: int


class CacheMoves:
    """All moves of one gateway. Runs on one event loop; `close` it."""

    def __init__(
        self,
        targets: Callable[[], Mapping[NodeName, str]],
        open_agent: Callable[[str], AgentClient],
        background: Background,
        metrics: MoveMetrics,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`targets` gives the control address of each node's agent as it is now. `open_agent`
        makes a client of the agent at such an address, to be closed here.
        """
        self.metrics = metrics
        self._targets = targets
        self._open_agent = open_agent
        self._background = background
        self._clock = clock
        self._agents: dict[str, AgentClient] = {}
        self._moving: dict[MoveName, asyncio.Task[CacheMoveResult]] = {}
        self._fingerprints: dict[tuple[str, str], str] = {}
        self._prefill_rates: defaultdict[str, RateMeter] = defaultdict(RateMeter)
        self._link_rates: defaultdict[tuple[str, str], RateMeter] = defaultdict(RateMeter)
        self._rtts: dict[tuple[str, str], float] = {}

    @property
    def moving(self) -> set[MoveName]:
        """The names of the moves under way."""
        return set(self._moving)

    def prefilled(self, target: str, num_tokens: int, prefill_s: float) -> None:
        """Note that a route's target computed `num_tokens` uncached tokens in `prefill_s`."""
        self._prefill_rates[target].observe(num_tokens, prefill_s, self._clock())

    async def before_prefill(self, cached: CachedPrompt, target: str) -> str | None:
        """Move the longest prefix that any node has to a node that computes for `target`, if that
        clearly takes less time than to compute it there.

        Returns the control address of that node's agent, so that the job can go there, or None if
        nothing was moved. Raises nothing but `CancelledError`.
        """
        try:
            found = self._candidate(cached, target)
        except ValueError as error:
            logger.warning("a model's cache shape is not usable: %s", error)
            return None
        if found is None:
            return None
        now_s = self._clock()
        link = found.source.cluster, found.destination.cluster
        verdict = worth_moving(
            MoveCase(
                saved_tokens=found.saved_tokens,
                nbytes=found.nbytes,
                prefill_tokens_per_s=self._prefill_rates[target].per_s(now_s),
                link_bytes_per_s=self._link_rates[link].per_s(now_s),
                rtt_s=self._rtts.get(link, 0.0),
            ),
            max_wait_s=MAX_WAIT_S,
        )
        self.metrics.decisions.labels(verdict.reason.value).inc()
        logger.debug("moving %s -> %s: %s", found.source, found.destination, verdict)
        if verdict.reason is MoveReason.LINK_RATE_UNKNOWN and not self._moving:
            # This request does not wait: the move measures the link and serves the next request.
            self.begin(found.prefix, found.source, found.destination, found.parts)
        if not verdict.moves:
            return None
        task = self.begin(
            found.prefix, found.source, found.destination, found.parts, kind="request"
        )
        if task is None:
            return None
        # A move that takes too long goes on without the request: a later one can use it.
        done, _ = await asyncio.wait({task}, timeout=MAX_WAIT_S)
        if not done or task.cancelled() or task.exception() is not None:
            return None
        return self._targets().get(found.destination)

    def _candidate(self, cached: CachedPrompt, target: str) -> _Candidate | None:
        """The longest prefix that another cluster has, if it saves the target enough tokens."""
        cluster, nodes = cached.computing(target)
        elsewhere = [item for item in cached.coverage if item.cluster != cluster]
        if cached.keys is None or not nodes or not elsewhere:
            return None
        longest = max(elsewhere, key=lambda item: item.pool.usable_blocks)
        num_blocks = longest.pool.usable_blocks
        here = {i.node: i for i in cached.coverage if i.cluster == cluster and i.node in nodes}
        best_here = max((item.usable_blocks for item in here.values()), default=0)
        model = cached.keys.model
        saved_tokens = (num_blocks - best_here) * model.block_tokens
        if saved_tokens < MIN_SAVED_TOKENS:
            return None
        # The node that has the most of it needs the fewest bytes.
        node = max(sorted(nodes), key=lambda name: _kv_blocks(here.get(name)))
        kv_there = _kv_blocks(here.get(node))
        shape = cache_shape(model)
        parts = tuple(
            (index, part)
            for index, part in shape.resume_parts(num_blocks)
            if shape.parts[part].kind is not PartKind.KV or index >= kv_there
        )
        return _Candidate(
            source=NodeName(longest.cluster, longest.node),
            destination=NodeName(cluster, node),
            prefix=replace(cached.keys, blocks=cached.keys.blocks[:num_blocks]),
            saved_tokens=saved_tokens,
            parts=parts,
            nbytes=sum(shape.parts[part].nbytes for _, part in parts),
        )

    async def drop(self, prefix: PromptKeys, node: NodeName, keep_blocks: int) -> int:
        """Drop a node's copy of `prefix` but for its first `keep_blocks`; returns the number of
        dropped parts. Raises `RpcError`.
        """
        agent = self._agent(node)
        fingerprint = await self._fingerprint(node, prefix.model)
        num_parts = await agent.drop_cached(fingerprint, prefix.joined, keep_blocks)
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
        *,
        kind: MoveKind = "replication",
    ) -> asyncio.Task[CacheMoveResult] | None:
        """Start to copy `parts` of a prefix in a task of its own, and return the task.

        Returns the running task if this prefix is on its way there already, and None if there are
        too many moves or a node is not reported any more.
        """
        name = prefix.blocks[-1], destination
        if name not in self._moving:
            known = self._targets()
            if len(self._moving) >= MAX_MOVES:
                return None
            if source not in known or destination not in known:
                return None
            work = self._move(prefix, source, destination, parts, kind)
            task = self._background.spawn(work, f"moving a cached prefix to {destination}")
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
        outcome = "cancelled"
        try:
            fingerprint = await self._fingerprint(source, prefix.model)
            order = CacheMoveOrder(fingerprint, prefix.joined, parts, kind)
            result = await move_cache(self._agent(source), self._agent(destination), order)
            outcome = "complete"
        except RpcError as error:
            outcome = error.code.lower()
            logger.warning("moving a prefix from %s to %s failed: %s", source, destination, error)
            raise
        finally:
            self.metrics.moves.labels(kind, outcome).inc()
        self.metrics.bytes.labels(kind).inc(result.nbytes)
        link = source.cluster, destination.cluster
        self._link_rates[link].observe(result.nbytes, result.transfer_s, self._clock())
        if result.rtt_s:
            self._rtts[link] = result.rtt_s
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


def cache_shape(model: CacheModel) -> CacheShape:
    """The parts of a model's blocks. Raises `ValueError` if they are no cache shape."""
    parts = tuple(
        PartShape(PartKind(kind), nbytes, window_tokens)
        for kind, nbytes, window_tokens in model.parts
    )
    return CacheShape(model.block_tokens, parts)


def _kv_blocks(item: NodeCoverage | None) -> int:
    return item.pool.kv_blocks if item is not None else 0
