"""Moves cached prefixes between the region's nodes: for a request that waits, and ahead of need.

Owns a connection to each agent it has spoken to and every move under way. When a move is worth it
is `scheduler.routing.cache_moves`'s to say; what it rests on, rates of prefill and of links, is
measured here. Does not know requests or how prefixes are found.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from prometheus_client import CollectorRegistry, Counter

from deploy.gateway.cache.cached import CachedPrompt
from deploy.gateway.serving.background import Background
from kvmanager.agent.clients.cache import (
    CacheControl,
    CacheMoveOrder,
    CacheMoveResult,
    move_cache,
)
from kvmanager.agent.messages import CacheModel
from kvmanager.directory.messages import NodeCoverage, NodeName
from kvmanager.hashing import join_keys
from kvmanager.pool.shape import CacheShape, PartKind, PartShape
from scheduler.routing.cache_moves import MoveCase, MoveReason, RateMeter, worth_moving
from transport.rpc import RpcError

logger = logging.getLogger("prfaas.deploy.gateway")

Kind = Literal["request", "replication"]
MoveName = tuple[bytes, NodeName]
"""The prefix's last key, and where it goes."""

STATUS_TIMEOUT_S: Final = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveSettings:
    """`margin`: a request waits for a move that takes less than this share of computing again, and
    at most `max_wait_s`. A prefix is moved for `min_saved_tokens` or more.
    """

    margin: float = 0.5
    max_wait_s: float = 10.0
    min_saved_tokens: int = 1024
    max_moves: int = 8


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
class Prefix:
    """A prefix of a prompt whose keys are known."""

    model: CacheModel
    root: bytes
    keys: tuple[bytes, ...]

    @property
    def shape(self) -> CacheShape:
        """Raises ValueError for parts that are no cache shape."""
        return cache_shape(self.model)

    @property
    def joined(self) -> bytes:
        return join_keys((self.root, *self.keys))


@dataclass(frozen=True, slots=True)
class _Better:
    """A node that could resume more of a prompt than the one that shall compute it."""

    source: NodeName
    destination: NodeName
    prefix: Prefix
    saved_tokens: int
    parts: tuple[tuple[int, int], ...]

    @property
    def nbytes(self) -> int:
        shape = self.prefix.shape
        return sum(shape.parts[part].nbytes for _, part in self.parts)


class CacheMoves:
    """See the module text. Use it on one event loop; `close` it."""

    def __init__(
        self,
        targets: Callable[[], Mapping[NodeName, str]],
        open_control: Callable[[str], CacheControl],
        background: Background,
        metrics: MoveMetrics,
        *,
        settings: MoveSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`targets`: the nodes' agents now, by control address."""
        self.metrics = metrics
        self.settings = settings or MoveSettings()
        self._targets = targets
        self._open_control = open_control
        self._background = background
        self._clock = clock
        self._controls: dict[str, CacheControl] = {}
        self._moving: dict[MoveName, asyncio.Task[CacheMoveResult]] = {}
        self._fingerprints: dict[tuple[str, str], str] = {}
        self._prefill_rates: defaultdict[str, RateMeter] = defaultdict(RateMeter)
        self._link_rates: defaultdict[tuple[str, str], RateMeter] = defaultdict(RateMeter)
        self._rtts: dict[tuple[str, str], float] = {}

    @property
    def moving(self) -> set[MoveName]:
        """The moves under way."""
        return set(self._moving)

    # ---- what was measured elsewhere

    def prefilled(self, target: str, num_tokens: int, prefill_s: float) -> None:
        """A prefill of `num_tokens` uncached tokens took that long at a route's target."""
        self._prefill_rates[target].observe(num_tokens, prefill_s, self._clock())

    # ---- for a request

    async def before_prefill(self, cached: CachedPrompt, target: str) -> str | None:
        """Bring the longest prefix that any node has to a node that computes for `target`, when
        waiting for that clearly takes less time than computing it there; the node agent's control
        address then, so that the job can go there. None: go on as things are. Never raises but when
        cancelled.
        """
        try:
            better = self._better(cached, target)
        except ValueError as error:
            logger.warning("no cache shape: %s", error)
            return None
        if better is None:
            return None
        now_s = self._clock()
        link = better.source.cluster, better.destination.cluster
        verdict = worth_moving(
            MoveCase(
                saved_tokens=better.saved_tokens,
                nbytes=better.nbytes,
                prefill_tokens_per_s=self._prefill_rates[target].per_s(now_s),
                link_bytes_per_s=self._link_rates[link].per_s(now_s),
                rtt_s=self._rtts.get(link, 0.0),
            ),
            margin=self.settings.margin,
            max_wait_s=self.settings.max_wait_s,
        )
        self.metrics.decisions.labels(verdict.reason.value).inc()
        logger.debug("moving %s -> %s: %s", better.source, better.destination, verdict)
        if verdict.reason is MoveReason.LINK_RATE_UNKNOWN and not self._moving:
            # Nobody waits for this one: it serves the next request, and measures the link.
            self._begin(better.prefix, better.source, better.destination, better.parts)
        if not verdict.moves:
            return None
        return await self._wait(better)

    def _better(self, cached: CachedPrompt, target: str) -> _Better | None:
        """The longest prefix elsewhere, if it spares the cluster enough."""
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
        if saved_tokens < self.settings.min_saved_tokens:
            return None
        node = max(sorted(nodes), key=lambda name: _kv_blocks(here.get(name)))
        prefix = Prefix(model, cached.keys.root, cached.keys.blocks[:num_blocks])
        kv_there = _kv_blocks(here.get(node))
        shape = prefix.shape
        parts = tuple(
            (index, part)
            for index, part in shape.resume_parts(num_blocks)
            if shape.parts[part].kind is not PartKind.KV or index >= kv_there
        )
        source = NodeName(longest.cluster, longest.node)
        return _Better(source, NodeName(cluster, node), prefix, saved_tokens, parts)

    async def _wait(self, better: _Better) -> str | None:
        task = self._begin(
            better.prefix, better.source, better.destination, better.parts, kind="request"
        )
        if task is None:
            return None
        # A move that takes too long goes on: the next request may have more patience.
        done, _ = await asyncio.wait({task}, timeout=self.settings.max_wait_s)
        if not done or task.cancelled() or task.exception() is not None:
            return None
        return self._targets().get(better.destination)

    # ---- ahead of need

    def replicate(
        self,
        prefix: Prefix,
        source: NodeName,
        destination: NodeName,
        parts: Sequence[tuple[int, int]],
    ) -> asyncio.Task[CacheMoveResult] | None:
        """Begin to copy; None when that is not possible now."""
        return self._begin(prefix, source, destination, parts)

    async def drop(self, prefix: Prefix, node: NodeName, keep_blocks: int) -> int:
        """Drop a copy, but for its first blocks; how many parts. Raises RpcError."""
        control = self._control(node)
        fingerprint = await self._fingerprint(node, prefix.model)
        num_parts = await control.drop(fingerprint, prefix.joined, keep_blocks)
        self.metrics.dropped_parts.inc(num_parts)
        return num_parts

    async def close(self) -> None:
        """End what is under way and close all connections. Idempotent."""
        tasks = list(self._moving.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        controls = list(self._controls.values())
        self._controls.clear()
        await asyncio.gather(*(control.close() for control in controls))

    # ---- one move

    def _begin(
        self,
        prefix: Prefix,
        source: NodeName,
        destination: NodeName,
        parts: Sequence[tuple[int, int]],
        *,
        kind: Kind = "replication",
    ) -> asyncio.Task[CacheMoveResult] | None:
        """The move as a task of its own; the one that is under way already, if there is one."""
        name = prefix.keys[-1], destination
        if name not in self._moving:
            known = self._targets()
            if len(self._moving) >= self.settings.max_moves:
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
        prefix: Prefix,
        source: NodeName,
        destination: NodeName,
        parts: Sequence[tuple[int, int]],
        kind: Kind,
    ) -> CacheMoveResult:
        outcome = "cancelled"
        try:
            fingerprint = await self._fingerprint(source, prefix.model)
            order = CacheMoveOrder(fingerprint, prefix.joined, parts, kind)
            result = await move_cache(self._control(source), self._control(destination), order)
            outcome = "complete"
        except RpcError as error:
            outcome = error.code.lower()
            logger.warning("no cached prefix from %s to %s: %s", source, destination, error)
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
        """The layout behind a cache model, as that node's engines have it. Raises RpcError."""
        target = self._target(node)
        known = self._fingerprints.get((target, model.namespace))
        if known is None:
            status = await self._control(node).status(STATUS_TIMEOUT_S)
            for engine in status.engines:
                if engine.cache is not None:
                    found = target, engine.cache.namespace
                    self._fingerprints[found] = engine.layout_fingerprint
            known = self._fingerprints.get((target, model.namespace))
        if known is None:
            raise RpcError("INVALID", f"no engine of {node} caches this model")
        return known

    def _control(self, node: NodeName) -> CacheControl:
        target = self._target(node)
        if target not in self._controls:
            self._controls[target] = self._open_control(target)
        return self._controls[target]

    def _target(self, node: NodeName) -> str:
        target = self._targets().get(node)
        if target is None:
            raise RpcError("NOT_FOUND", f"no report names {node} any more")
        return target


def cache_shape(model: CacheModel) -> CacheShape:
    """What a model's blocks consist of. Raises ValueError for parts that are no cache shape."""
    parts = tuple(
        PartShape(PartKind(kind), nbytes, window_tokens)
        for kind, nbytes, window_tokens in model.parts
    )
    return CacheShape(model.block_tokens, parts)


def _kv_blocks(item: NodeCoverage | None) -> int:
    return item.pool.kv_blocks if item is not None else 0
