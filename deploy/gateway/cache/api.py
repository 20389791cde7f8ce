"""The answers under /prfaas/cache: what nodes hold, hot prefixes, how a prompt would fare.

Pure functions from what agents, directory and router say to JSON-ready values. This file does not
know HTTP.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import msgspec
from blake3 import blake3

from deploy.gateway.cache.cached_prompt import CachedPrompt
from deploy.gateway.cache.region_caches import Order
from kvmanager.agent.messages import (
    CacheModel,
    CacheStatus,
    EmbeddingStatus,
    ListCacheReply,
    PrefixLeaf,
    StatusReply,
)
from kvmanager.directory.messages import Hit, NodeCoverage, NodeName, NodeState
from kvmanager.hashing import KEY_BYTES
from kvmanager.pool.shape import PartKind
from scheduler.routing.decision import Decision, Number, RequestShape


class NodeCacheStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One node's prefix cache and embeddings. `error` says why the agent's numbers are missing.
    `hit_share` is the share of the looked-up tokens that were cached, `embedding_hit_share` that of
    the looked-up media whose embeddings were there. `directory` is None if the directory does not
    know the node.
    """

    cluster: str
    node: str
    agent: str
    error: str = ""
    cache: CacheStatus | None = None
    hit_share: float | None = None
    directory: NodeState | None = None
    embeddings: EmbeddingStatus | None = None
    embedding_hit_share: float | None = None


class CacheOverview(msgspec.Struct, frozen=True):
    """All nodes of the region, by name."""

    nodes: list[NodeCacheStatus]


class RegionPrefix(msgspec.Struct, frozen=True, kw_only=True):
    """A cached prefix that no longer one continues, and all `nodes` ("cluster/node") that hold it.
    Bytes and hits are summed over the nodes. `key` names the last block as `KeyNames` does.
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
    """Prefixes of all nodes; `errors` says by "cluster/node" why a node's prefixes are missing."""

    prefixes: list[RegionPrefix]
    errors: dict[str, str]


class TierTokens(msgspec.Struct, frozen=True):
    """Tokens whose KV is there, and how many of them can be resumed from."""

    kv_tokens: int
    usable_tokens: int


class NodeTokens(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a prompt that one node holds, by tier and in `together`, as known `age_s` ago."""

    cluster: str
    node: str
    together: TierTokens
    arena: TierTokens
    ssd: TierTokens
    engine: TierTokens
    age_s: float


class RouteWork(msgspec.Struct, frozen=True, kw_only=True):
    """The work of one route: tokens computed, tokens whose KV crosses the link, and about how many
    bytes that is with windows and states. `target` is a prefill cluster or the PD cluster itself.
    """

    route: str
    target: str
    computed_tokens: int
    sent_tokens: int = 0
    sent_bytes: int = 0


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """How one prompt would fare now. `key` names its last full block as `KeyNames` does, "" if it
    has none. `note` says why nothing is known to be cached, "" if something is. `cluster` is the PD
    cluster that would decode it, `home` the one that it belongs to.
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
    home: str = ""
    cluster: str = ""


def node_caches(
    targets: Mapping[NodeName, str],
    statuses: Mapping[NodeName, StatusReply | str],
    known: Iterable[NodeState],
) -> list[NodeCacheStatus]:
    """One status for every node in `targets`, sorted by name."""
    states = {NodeName(state.cluster, state.node): state for state in known}
    return [
        _node_cache(name, targets[name], statuses[name], states.get(name))
        for name in sorted(targets)
    ]


class KeyNames:
    """Names to show for cache keys. A key itself would tell whoever guesses the prompt that it is
    cached; a name, made with a secret of this process, tells nothing.
    """

    def __init__(self, secret: bytes) -> None:
        """`secret` has 32 bytes."""
        self._secret = secret

    def name(self, key: bytes) -> str:
        return blake3(key, key=self._secret).hexdigest(KEY_BYTES)


def hot_prefixes(
    listed: Mapping[NodeName, ListCacheReply | str], order: Order, limit: int, names: KeyNames
) -> list[RegionPrefix]:
    """The first `limit` prefixes of all nodes; a prefix that several nodes hold is listed once."""
    held: dict[str, list[tuple[NodeName, PrefixLeaf]]] = {}
    for name in sorted(listed):
        reply = listed[name]
        for prefix in reply.prefixes if isinstance(reply, ListCacheReply) else ():
            held.setdefault(prefix.key, []).append((name, prefix))
    merged = [_merged(names.name(bytes.fromhex(key)), held[key]) for key in held]
    merged.sort(key=lambda item: (_rank(item, order), item.key))
    return merged[:limit]


def explanation(
    model: str,
    shape: RequestShape,
    cached: CachedPrompt,
    decision: Decision,
    names: KeyNames,
    *,
    home: str = "",
    linked: Collection[str] | None = None,
) -> Explanation:
    """How a prompt of `shape` fares with what is `cached` of it, where `decision` has it decoded.
    `linked` are the prefill clusters that could send there, by default all.
    """
    keys = cached.keys
    block_tokens = cached.places.model.block_tokens if cached.places.model is not None else 0
    return Explanation(
        model=model,
        num_prompt_tokens=shape.num_prompt_tokens,
        block_tokens=block_tokens,
        num_blocks=len(keys.blocks) if keys is not None else 0,
        key=names.name(keys.blocks[-1]) if keys is not None else "",
        note=_note(cached),
        nodes=[_node_tokens(item, block_tokens) for item in cached.coverage],
        routes=_routes(shape, cached, linked),
        route=decision.route,
        target=decision.target,
        reason=decision.reason.value,
        numbers=dict(decision.numbers),
        home=home,
        cluster=decision.pd,
    )


def _node_cache(
    name: NodeName, target: str, status: StatusReply | str, known: NodeState | None
) -> NodeCacheStatus:
    # A string is the error of an agent that did not answer.
    if isinstance(status, str):
        cache, embeddings, error = None, None, status
    else:
        cache, embeddings = status.cache, status.embeddings
        error = "this agent keeps no prefix cache" if cache is None else ""
    return NodeCacheStatus(
        cluster=name.cluster,
        node=name.node,
        agent=target,
        error=error,
        cache=cache,
        hit_share=None if cache is None else hit_share(cache),
        directory=known,
        embeddings=embeddings,
        embedding_hit_share=embeddings.num_hits / embeddings.num_queries
        if embeddings is not None and embeddings.num_queries
        else None,
    )


def hit_share(cache: CacheStatus) -> float | None:
    """Hit tokens of all tiers by tokens looked up; None before the first look-up."""
    if not cache.query_tokens:
        return None
    return min(1.0, sum(cache.hit_tokens.values()) / cache.query_tokens)


def _merged(key: str, entries: list[tuple[NodeName, PrefixLeaf]]) -> RegionPrefix:
    prefixes = [prefix for _, prefix in entries]
    nbytes: dict[str, int] = {}
    for prefix in prefixes:
        for part, size in prefix.nbytes.items():
            nbytes[part] = nbytes.get(part, 0) + size
    return RegionPrefix(
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


def _rank(prefix: RegionPrefix, order: Order) -> float:
    match order:
        case "hits":
            return -prefix.hits
        case "size":
            return -sum(prefix.nbytes.values())
        case "recent":
            return prefix.idle_s


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


def _routes(
    shape: RequestShape, cached: CachedPrompt, linked: Collection[str] | None
) -> list[RouteWork]:
    pd = cached.places.pd_cluster
    routes = [
        RouteWork(route="local", target=pd, computed_tokens=shape.local_uncached_tokens),
    ]
    # The last token is computed where decoding happens, whatever has arrived.
    sent_tokens = max(0, shape.num_prompt_tokens - 1 - shape.landing_cached_tokens)
    clusters = cached.places.prefill_nodes
    for cluster in sorted(name for name in clusters if linked is None or name in linked):
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
    """About how many bytes the KV of `sent_tokens` has. Windows and states are always sent; whole
    pages make it a little more.
    """
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
