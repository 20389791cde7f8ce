"""What /prfaas/cache answers: what nodes hold, which prefixes are hot, what becomes of one prompt.

Turns values into JSON-ready ones. Does not know HTTP, and asks nobody itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from deploy.gateway.cache.cached import CachedPrompt
from deploy.gateway.cache.caches import Order
from deploy.gateway.cache.shares import hit_share
from kvmanager.agent.messages import (
    CachedPrefix,
    CacheModel,
    CacheStatus,
    ListCacheReply,
    StatusReply,
)
from kvmanager.directory.messages import Hit, NodeCoverage, NodeName, NodeState
from kvmanager.pool.shape import PartKind
from scheduler.routing.decision import Decision, Number, RequestShape


class NodeCache(msgspec.Struct, frozen=True, kw_only=True):
    """One node's prefix cache. `error` says why its agent's numbers are missing; `hit_share` is of
    the tokens its engines looked up. `directory` is what is known of it there, None if nothing.
    """

    cluster: str
    node: str
    agent: str
    error: str = ""
    cache: CacheStatus | None = None
    hit_share: float | None = None
    directory: NodeState | None = None


class CacheOverview(msgspec.Struct, frozen=True):
    """All nodes of the region, by name."""

    nodes: list[NodeCache]


class HotPrefix(msgspec.Struct, frozen=True, kw_only=True):
    """A prefix that nothing longer continues, with all nodes ("cluster/node") that hold it; bytes
    and hits are theirs together.
    """

    key: str
    num_tokens: int
    resumable_tokens: int
    branch_tokens: int
    nbytes: dict[str, int]
    hits: int
    idle_s: float
    pinned: bool
    nodes: list[str]


class TopPrefixes(msgspec.Struct, frozen=True):
    """Prefixes of all nodes; `errors` by "cluster/node" say whose are missing."""

    prefixes: list[HotPrefix]
    errors: dict[str, str]


class TierTokens(msgspec.Struct, frozen=True):
    """Tokens whose KV is there, and tokens of the longest prefix that can be resumed from it."""

    kv_tokens: int
    usable_tokens: int


class NodeTokens(msgspec.Struct, frozen=True, kw_only=True):
    """What one node holds of a prompt, by tier and together; `age_s` old."""

    cluster: str
    node: str
    together: TierTokens
    arena: TierTokens
    ssd: TierTokens
    engine: TierTokens
    age_s: float


class RouteWork(msgspec.Struct, frozen=True, kw_only=True):
    """What one route takes: tokens computed, tokens whose KV crosses the link, and about how many
    bytes, windows and states included. `target`: a prefill cluster, or the PD cluster itself.
    """

    route: str
    target: str
    computed_tokens: int
    sent_tokens: int = 0
    sent_bytes: int = 0


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """How one prompt would fare now. `key` is that of its last full block, "" if it has none;
    `note` says why nothing is known to be cached, where nothing is.
    """

    model: str
    num_prompt_tokens: int
    block_tokens: int
    num_blocks: int
    key: str
    note: str
    nodes: list[NodeTokens]
    routes: list[RouteWork]
    route: str
    target: str
    reason: str
    numbers: dict[str, Number]


def node_caches(
    targets: Mapping[NodeName, str],
    statuses: Mapping[NodeName, StatusReply | str],
    known: Iterable[NodeState],
) -> list[NodeCache]:
    """One for every node, by name."""
    states = {NodeName(state.cluster, state.node): state for state in known}
    return [
        _node_cache(name, targets[name], statuses[name], states.get(name))
        for name in sorted(targets)
    ]


def hot_prefixes(
    listed: Mapping[NodeName, ListCacheReply | str], order: Order, limit: int
) -> list[HotPrefix]:
    """The first `limit` prefixes of all nodes; what several hold comes once."""
    held: dict[str, list[tuple[NodeName, CachedPrefix]]] = {}
    for name in sorted(listed):
        reply = listed[name]
        for prefix in reply.prefixes if isinstance(reply, ListCacheReply) else ():
            held.setdefault(prefix.key, []).append((name, prefix))
    merged = [_merged(key, entries) for key, entries in held.items()]
    merged.sort(key=lambda item: (_rank(item, order), item.key))
    return merged[:limit]


def explanation(
    model: str, shape: RequestShape, cached: CachedPrompt, decision: Decision
) -> Explanation:
    """How a prompt of `shape` fares with what is `cached` of it."""
    keys = cached.keys
    block_tokens = cached.places.model.block_tokens if cached.places.model is not None else 0
    return Explanation(
        model=model,
        num_prompt_tokens=shape.num_prompt_tokens,
        block_tokens=block_tokens,
        num_blocks=len(keys.blocks) if keys is not None else 0,
        key=keys.blocks[-1].hex() if keys is not None else "",
        note=_note(cached),
        nodes=[_node_tokens(item, block_tokens) for item in cached.coverage],
        routes=_routes(shape, cached),
        route=decision.route,
        target=decision.target,
        reason=decision.reason.value,
        numbers=dict(decision.numbers),
    )


def _node_cache(
    name: NodeName, target: str, status: StatusReply | str, known: NodeState | None
) -> NodeCache:
    cluster, node = name
    if isinstance(status, str):
        return NodeCache(cluster=cluster, node=node, agent=target, error=status, directory=known)
    if status.cache is None:
        error = "this agent keeps no prefix cache"
        return NodeCache(cluster=cluster, node=node, agent=target, error=error, directory=known)
    return NodeCache(
        cluster=cluster,
        node=node,
        agent=target,
        cache=status.cache,
        hit_share=hit_share(status.cache),
        directory=known,
    )


def _merged(key: str, entries: list[tuple[NodeName, CachedPrefix]]) -> HotPrefix:
    prefixes = [prefix for _, prefix in entries]
    nbytes: dict[str, int] = {}
    for prefix in prefixes:
        for part, size in prefix.nbytes.items():
            nbytes[part] = nbytes.get(part, 0) + size
    return HotPrefix(
        key=key,
        num_tokens=prefixes[0].num_tokens,
        resumable_tokens=max(prefix.resumable_tokens for prefix in prefixes),
        branch_tokens=max(prefix.branch_tokens for prefix in prefixes),
        nbytes=nbytes,
        hits=sum(prefix.hits for prefix in prefixes),
        idle_s=min(prefix.idle_s for prefix in prefixes),
        pinned=any(prefix.pinned for prefix in prefixes),
        nodes=[str(name) for name, _ in entries],
    )


def _rank(prefix: HotPrefix, order: Order) -> float:
    ranks: dict[Order, float] = {
        "hits": -prefix.hits,
        "size": -sum(prefix.nbytes.values()),
        "recent": prefix.idle_s,
    }
    return ranks[order]


def _node_tokens(item: NodeCoverage, block_tokens: int) -> NodeTokens:
    def tokens(hit: Hit) -> TierTokens:
        return TierTokens(hit.kv_blocks * block_tokens, hit.usable_blocks * block_tokens)

    return NodeTokens(
        cluster=item.cluster,
        node=item.node,
        together=tokens(item.every),
        arena=tokens(item.arena),
        ssd=tokens(item.ssd),
        engine=tokens(item.engine),
        age_s=item.age_s,
    )


def _note(cached: CachedPrompt) -> str:
    if cached.places.model is None:
        return "no engine of the PD cluster caches this model's prompts, or none has said so yet"
    if cached.keys is None:
        return f"shorter than a block of {cached.places.model.block_tokens} tokens"
    return "" if cached.coverage else "no node is known to hold any of it"


def _routes(shape: RequestShape, cached: CachedPrompt) -> list[RouteWork]:
    pd = cached.places.pd_cluster
    routes = [
        RouteWork(route="local", target=pd, computed_tokens=shape.local_uncached_tokens),
    ]
    # The last token is computed where decoding happens, whatever has arrived.
    sent_tokens = max(0, shape.num_prompt_tokens - 1 - shape.landing_cached_tokens)
    for cluster in sorted(cached.places.prefill_nodes):
        routes.append(
            RouteWork(
                route="prefill_cluster",
                target=cluster,
                computed_tokens=shape.prefill_uncached_tokens(cluster),
                sent_tokens=sent_tokens,
                sent_bytes=_bytes_sent(cached.places.model, shape, sent_tokens),
            )
        )
    return routes


def _bytes_sent(model: CacheModel | None, shape: RequestShape, sent_tokens: int) -> int:
    """In whole pages it is a little more. Windows and states are sent whatever is cached."""
    if model is None:
        return 0
    total = 0
    for kind, nbytes, window_tokens in model.parts:
        if kind == PartKind.STATE:
            total += nbytes
        else:
            is_window = kind == PartKind.WINDOW
            tokens = min(window_tokens, shape.num_prompt_tokens - 1) if is_window else sent_tokens
            total += nbytes * tokens // model.block_tokens
    return total


ORDERS: Final[tuple[Order, ...]] = ("hits", "size", "recent")
