"""The cached part of one prompt: its block keys, the nodes that hold them, and what that saves.

A prompt has keys for all full blocks before its last token, which is always computed where decoding
happens. A cluster saves what its best node holds, of the nodes whose engines could use it:

    local       nodes of a PD cluster that decode: the longest prefix that one of them can resume
    prefill     nodes of each prefill cluster: the same
    landing     nodes of a PD cluster that decode: leading blocks whose KV need not be sent

All but `prompt_keys` is pure; that lets the event loop run while it hashes a long prompt. Does not
know directories, routes or requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final, TypeAlias

import msgspec

from kvmanager.agent.messages import CacheModel
from kvmanager.directory.messages import Hit, NodeCoverage, NodeName
from kvmanager.hashing import block_keys, join_keys, root_key
from kvmanager.media_items import MediaItem, block_extras
from kvmanager.pool.shape import PartKind
from kvmanager.token_ids import TokenIds
from scheduler.reports import ClusterReport, InstanceReport, serves
from scheduler.routing.decision import HAND_OFF, ONE_ENGINE, PdCached, RequestShape

_STEP_BLOCKS: Final = 256
"""How many blocks are hashed between two turns of the event loop: less than half a millisecond."""

Nodes: TypeAlias = Mapping[str, str]

_NONE: Final[Nodes] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class PromptKeys:
    """The keys of a prompt's full blocks under `model`, in order; `root` comes before them.

    `tenant` is whose prompt it is, "" also where that is not known. `adapter` is the identity of
    the LoRA adapter that is part of the keys, "" for none.
    """

    model: CacheModel
    root: bytes
    blocks: tuple[bytes, ...]
    tenant: str = ""
    adapter: str = ""

    @property
    def joined(self) -> bytes:
        """All keys in one string, as node agents take them; empty without blocks."""
        return join_keys((self.root, *self.blocks)) if self.blocks else b""


@dataclass(frozen=True, slots=True)
class PdNodes:
    """The nodes of a PD cluster that decode a model, and those that prefill it for others."""

    decode: Nodes
    hand_off: Nodes


@dataclass(frozen=True, slots=True)
class CachePlaces:
    """The nodes that serve one model, by what they can do. `Nodes` maps a node's name in the
    directory to the control address of its agent.

    `model` is None if no node caches the model, or none has said so yet. `caches_nothing` tells the
    two apart: the engines of `pd_cluster` have all said what they have, and none caches it.
    `pd_cluster` is where the prompt will decode; `other_pds` are where it could.
    """

    pd_cluster: str = ""
    model: CacheModel | None = None
    decode_nodes: Nodes = field(default_factory=lambda: _NONE)
    hand_off_nodes: Nodes = field(default_factory=lambda: _NONE)
    prefill_nodes: Mapping[str, Nodes] = field(default_factory=lambda: MappingProxyType({}))
    other_pds: Mapping[str, PdNodes] = field(default_factory=lambda: MappingProxyType({}))
    caches_nothing: bool = False

    def at(self, pd: str) -> CachePlaces:
        """The same for a prompt that decodes in another PD cluster."""
        found = self.other_pds.get(pd)
        if found is None:
            return self
        own = {self.pd_cluster: PdNodes(self.decode_nodes, self.hand_off_nodes)}
        others = {name: nodes for name, nodes in self.other_pds.items() if name != pd} | own
        return replace(
            self,
            pd_cluster=pd,
            decode_nodes=found.decode,
            hand_off_nodes=found.hand_off,
            other_pds=MappingProxyType(others),
        )


@dataclass(frozen=True, slots=True)
class CachedPrompt:
    """The known cached part of one prompt; by default nothing is known."""

    keys: PromptKeys | None = None
    places: CachePlaces = CachePlaces()
    coverage: tuple[NodeCoverage, ...] = ()

    @property
    def block_keys(self) -> bytes:
        """The keys for the landing; empty if nothing is cached for this model."""
        return self.keys.joined if self.keys is not None else b""

    def at(self, pd: str) -> CachedPrompt:
        """The same for a prompt that decodes in another PD cluster."""
        return replace(self, places=self.places.at(pd))

    @property
    def local_tokens(self) -> int:
        """Tokens that the PD cluster need not compute on its best node."""
        return self._tokens(_most(self._at(self._pd, self.places.decode_nodes), _usable))

    @property
    def landing_tokens(self) -> int:
        """Tokens whose KV need not be sent to the decode node that holds most of it."""
        return self._tokens(_most(self._at(self._pd, self.places.decode_nodes), _kv))

    @property
    def prefill_tokens(self) -> dict[str, int]:
        """Tokens that each prefill cluster need not compute on its best node."""
        return {
            cluster: self._tokens(_most(self._at(cluster, nodes), _usable))
            for cluster, nodes in self.places.prefill_nodes.items()
        }

    def landing_nodes(self) -> tuple[str, ...]:
        """Agents of decode nodes that hold leading blocks, most first."""
        return self._best_first(self._pd, self.places.decode_nodes, _kv)

    def direct_nodes(self) -> tuple[str, ...]:
        """Agents of decode nodes that can resume part of it, longest first."""
        if not self.coverage:
            return ()
        return self._best_first(self._pd, self.places.decode_nodes, _usable)

    def computing(self, target: str) -> tuple[str, Nodes]:
        """The cluster and the nodes that compute for a route's target."""
        places = self.places
        if target == HAND_OFF:
            return self._pd, places.hand_off_nodes
        if target == ONE_ENGINE:
            return self._pd, places.decode_nodes
        return target, places.prefill_nodes.get(target, _NONE)

    def computing_tokens(self, target: str) -> dict[str, int]:
        """Tokens that the nodes which compute for `target` can resume, by control address."""
        cluster, nodes = self.computing(target)
        return {
            nodes[item.node]: self._tokens(_usable(item))
            for item in self._at(cluster, nodes)
            if _usable(item) > 0
        }

    @property
    def sendable_tokens(self) -> dict[str, int]:
        """Tokens of the longest prefix that a node of each cluster could send to another one."""
        found: dict[str, int] = {}
        for item in self.coverage:
            # An agent can only send what is in its pool, not what only its engines hold.
            tokens = self._tokens(item.pool.usable_blocks)
            found[item.cluster] = max(tokens, found.get(item.cluster, 0))
        return found

    def received(self, node: NodeName, num_blocks: int) -> CachedPrompt:
        """The same once a node has the first `num_blocks` in its pool."""
        others = [item for item in self.coverage if (item.cluster, item.node) != node]
        known = next((item for item in self.coverage if (item.cluster, item.node) == node), None)
        if known is None:
            known = NodeCoverage(*node, Hit(), Hit(), Hit(), Hit(), Hit(), age_s=0.0)

        def at_least(hit: Hit) -> Hit:
            return Hit(max(hit.kv_blocks, num_blocks), max(hit.usable_blocks, num_blocks))

        tiers = {name: at_least(getattr(known, name)) for name in ("every", "pool", "arena")}
        return replace(self, coverage=(*others, msgspec.structs.replace(known, **tiers)))

    def kv_bytes(self, num_tokens: int) -> int:
        """Bytes that a transfer saves if the KV of these tokens is at the landing already."""
        model = self.places.model
        if model is None:
            return 0
        per_block = sum(nbytes for kind, nbytes, _ in model.parts if kind == PartKind.KV)
        return per_block * num_tokens // model.block_tokens

    def shape(self, shape: RequestShape) -> RequestShape:
        """`shape` with the cached tokens that are known here."""
        if not self.coverage:
            return shape
        return msgspec.structs.replace(
            shape,
            local_cached_tokens=self.local_tokens,
            prefill_cached_tokens=MappingProxyType(self.prefill_tokens),
            landing_cached_tokens=self.landing_tokens,
            sendable_tokens=MappingProxyType(self.sendable_tokens),
            cached_in_pds=MappingProxyType(self._cached_in_pds()),
        )

    def _cached_in_pds(self) -> dict[str, PdCached]:
        # A region may have many PD clusters, of which few hold anything.
        holding = {item.cluster for item in self.coverage} & self.places.other_pds.keys()
        others = {name: self.at(name) for name in sorted(holding)}
        return {
            name: PdCached(other.local_tokens, other.landing_tokens)
            for name, other in others.items()
        }

    @property
    def _pd(self) -> str:
        return self.places.pd_cluster

    def _at(self, cluster: str, nodes: Nodes) -> list[NodeCoverage]:
        return [item for item in self.coverage if item.cluster == cluster and item.node in nodes]

    def _best_first(
        self, cluster: str, nodes: Nodes, measure: Callable[[NodeCoverage], int]
    ) -> tuple[str, ...]:
        holding = [item for item in self._at(cluster, nodes) if measure(item) > 0]
        holding.sort(key=lambda item: (-measure(item), item.node))
        return tuple(nodes[item.node] for item in holding)

    def _tokens(self, num_blocks: int) -> int:
        return num_blocks * (self.keys.model.block_tokens if self.keys is not None else 0)


async def prompt_keys(
    model: CacheModel,
    token_ids: TokenIds,
    salt: str = "",
    tenant: str = "",
    *,
    adapter: str = "",
    media: Sequence[MediaItem] = (),
) -> PromptKeys | None:
    """The keys of a whole prompt's blocks without the last token; None if it has no full block.
    `salt` is the request's `cache_salt`, `adapter` the identity of its LoRA adapter, "" for none,
    and `media` are its media. The event loop runs between every `_STEP_BLOCKS`.
    """
    # The decoding engine computes the last token anyway: a block that ends with it saves nothing.
    prefix = token_ids[:-1]
    if len(prefix) < model.block_tokens:
        return None
    root = root_key(bytes.fromhex(model.namespace), tenant=salt, lora=adapter)
    keys: list[bytes] = []
    extras = block_extras(media, model.block_tokens)
    step_tokens = _STEP_BLOCKS * model.block_tokens
    for start in range(0, len(prefix), step_tokens):
        if start:
            await asyncio.sleep(0)
        before = keys[-1] if keys else root
        tokens = prefix[start : start + step_tokens]
        keys += block_keys(tokens, model.block_tokens, before, extras, len(keys))
    return PromptKeys(model, root, tuple(keys), tenant, adapter)


def places_of(
    pd: ClusterReport | None,
    prefill: Mapping[str, ClusterReport | None],
    model: str,
    *,
    is_only_model: bool = False,
    other_pds: Iterable[ClusterReport | None] = (),
) -> CachePlaces:
    """Where prompts for `model` may be cached, by the latest reports. The PD clusters' engines say
    how it is cached: a prefill cluster that caches it otherwise could not send it there either.

    Unless it `is_only_model`, instances that do not say what they serve are left out: the name may
    be an adapter's, whose KVCache has other keys.
    """

    def serving(report: ClusterReport) -> list[InstanceReport]:
        return [
            instance
            for instance in report.instances
            if serves(instance, model) and (is_only_model or not model or instance.model)
        ]

    def pd_nodes(instances: list[InstanceReport]) -> PdNodes:
        decoding = [item for item in instances if not _hands_off(item)]
        handing = [item for item in instances if _hands_off(item)]
        return PdNodes(_nodes(decoding or handing), _nodes(handing))

    # The home's engines first; where it does not report, the others know how the model is cached.
    pds = {report.name: serving(report) for report in (pd, *other_pds) if report is not None}
    if not pds:
        return CachePlaces()
    decoding_first = (sorted(items, key=_hands_off) for items in pds.values())
    caches = (item.cache for items in decoding_first for item in items)
    nodes = {name: pd_nodes(items) for name, items in pds.items()}
    home = "" if pd is None else pd.name
    own = nodes.pop(home, PdNodes(_NONE, _NONE))
    found = next((cache for cache in caches if cache is not None), None)
    engines = pds.get(home, [])
    # An engine names its layout and its cache together, so one without a layout has said nothing.
    has_said = bool(engines) and all(item.layout_fingerprint for item in engines)
    return CachePlaces(
        pd_cluster=home,
        model=found,
        caches_nothing=has_said and found is None,
        decode_nodes=own.decode,
        hand_off_nodes=own.hand_off,
        prefill_nodes=MappingProxyType(
            {
                name: _nodes(serving(report))
                for name, report in prefill.items()
                if report is not None
            }
        ),
        other_pds=MappingProxyType(nodes),
    )


def _hands_off(instance: InstanceReport) -> bool:
    return instance.role == "prefill"


def _nodes(instances: Iterable[InstanceReport]) -> Nodes:
    return MappingProxyType(
        {item.node_name or item.node: item.node for item in instances if item.node}
    )


def _usable(item: NodeCoverage) -> int:
    return item.usable_blocks


def _kv(item: NodeCoverage) -> int:
    # A landing cannot build on blocks that are only in an engine's own memory.
    return item.pool.kv_blocks


def _most(coverage: Iterable[NodeCoverage], measure: Callable[[NodeCoverage], int]) -> int:
    return max(map(measure, coverage), default=0)
