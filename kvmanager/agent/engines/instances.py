"""The engine instances that are connected to a node agent, with their KV layouts.

The first connection of an instance sets its layout, the others must agree, and the instance is
forgotten when its last connection leaves. It does not know sockets, transfers or memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from kvmanager.agent.engines.protocol import EngineHello, agreed_version
from kvmanager.agent.messages import CacheModel, EngineStatus
from kvmanager.layout import MAX_WINDOW_STEP_TOKENS, KVLayout, LayoutError
from kvmanager.pool.shape import CacheShape
from kvmanager.transfers.records import BadRequest, EnginePeer
from transport.versions import NoCommonVersion


class EngineNotServed(Exception):
    """This engine cannot be served. It is told the message."""


class UnknownLayout(BadRequest):
    """No connected engine has this KV layout."""


@dataclass(slots=True)
class _Instance:
    layout: KVLayout
    fingerprint: bytes
    pp_size: int
    shape: CacheShape
    namespace: bytes = b""
    pids: dict[int, int] = field(default_factory=dict)
    """The process of each connection."""
    engine: str = ""
    adapters: dict[str, str] = field(default_factory=dict)
    """The identities of its LoRA adapters by name, from its scheduler."""
    text_only: bool = False

    @property
    def cache(self) -> CacheModel | None:
        if not self.namespace:
            return None
        parts = [(int(p.kind), p.nbytes, p.window_tokens) for p in self.shape.parts]
        return CacheModel(self.namespace.hex(), self.shape.block_tokens, parts)


class InstanceBook:
    """The connected instances of one agent."""

    def __init__(self) -> None:
        self._instances: dict[str, _Instance] = {}

    def join(self, conn_id: int, hello: EngineHello) -> EnginePeer:
        """Enter a connection. Raises EngineNotServed."""
        try:
            agreed_version(hello)
        except NoCommonVersion as error:
            raise EngineNotServed(str(error)) from error
        for what in ("tp", "pp"):
            rank, size = getattr(hello, f"{what}_rank"), getattr(hello, f"{what}_size")
            if rank >= size:
                raise EngineNotServed(f"{what}_rank {rank} of {what}_size {size}")
        try:
            layout = KVLayout.decode(hello.layout)
        except LayoutError as error:
            raise EngineNotServed(str(error)) from error
        if layout.tp_size != hello.tp_size:
            raise EngineNotServed(
                f"tp_size {hello.tp_size}, but the layout is for {layout.tp_size} ranks"
            )
        fingerprint = layout.fingerprint()
        # Before the instance is entered: a refused connection must leave nothing behind.
        self._check_namespace(hello, fingerprint, layout.draft_fingerprint)
        step_here = self.window_step(fingerprint)
        if math.lcm(step_here, layout.window_step) > MAX_WINDOW_STEP_TOKENS:
            raise EngineNotServed(
                f"its pages of windows begin at multiples of {layout.window_step} tokens, those of "
                f"the engines here at {step_here}: no transfer suits all"
            )
        instance = self._instances.setdefault(
            hello.instance, _Instance(layout, fingerprint, hello.pp_size, CacheShape.of(layout))
        )
        if instance.layout != layout:
            raise EngineNotServed(
                f"instance {hello.instance} is connected with the layout "
                f"{instance.layout.describe()}, this connection has {layout.describe()}"
            )
        if instance.pp_size != hello.pp_size:
            raise EngineNotServed(
                f"instance {hello.instance} is connected with {instance.pp_size} pipeline stages, "
                f"this connection has {hello.pp_size}"
            )
        instance.namespace = instance.namespace or hello.namespace
        instance.pids[conn_id] = hello.pid
        instance.engine = instance.engine or hello.engine
        instance.adapters = instance.adapters or hello.adapters
        instance.text_only = hello.text_only
        return EnginePeer(
            conn_id,
            hello.instance,
            hello.role,
            hello.pp_rank * hello.tp_size + hello.tp_rank,
            hello.pp_size * hello.tp_size,
            fingerprint,
        )

    def _check_namespace(self, hello: EngineHello, fingerprint: bytes, draft: bytes) -> None:
        """Raise EngineNotServed unless all connections of an instance have one namespace, and all
        instances of a namespace have one layout: a key names the same bytes everywhere.
        """
        for name, other in self._instances.items():
            if not hello.namespace or not other.namespace:
                continue
            if name == hello.instance and other.namespace != hello.namespace:
                raise EngineNotServed(f"instance {name} is connected with another cache namespace")
            is_same = other.fingerprint == fingerprint and other.layout.draft_fingerprint == draft
            if other.namespace == hello.namespace and not is_same:
                raise EngineNotServed(
                    f"instance {name} has this engine's cache namespace with another KV layout, "
                    f"{other.layout.describe()}"
                )

    def cached_layouts(self, fingerprint: bytes) -> list[tuple[KVLayout, CacheShape]]:
        """How the engines that cache this KV layout are cut, each kind of block once. There may be
        several: engines with other block sizes or drafters have other blocks of cached tokens.
        """
        found = {
            (instance.shape.block_tokens, instance.layout.draft_fingerprint): (
                instance.layout,
                instance.shape,
            )
            for instance in self._instances.values()
            if instance.fingerprint == fingerprint and instance.namespace
        }
        return list(found.values())

    def window_step(self, fingerprint: bytes) -> int:
        """The tokens at whose multiples windows must begin that any engine with this layout may
        load: their pages may have different sizes.
        """
        steps = {
            instance.layout.window_step
            for instance in self._instances.values()
            if instance.fingerprint == fingerprint
        }
        return math.lcm(*steps)

    def cached_layout(self, fingerprint: bytes, namespace: bytes) -> tuple[KVLayout, CacheShape]:
        """The layout and cache shape of the engines with this cache namespace; without one, those
        of any engine with this KV layout. Raises UnknownLayout.
        """
        _, layout = self.layout(fingerprint)
        if not namespace:
            return layout, CacheShape.of(layout)
        for instance in self._instances.values():
            if instance.fingerprint == fingerprint and instance.namespace == namespace:
                return instance.layout, instance.shape
        raise UnknownLayout(f"no connected engine has cache namespace {namespace.hex()[:16]}")

    def is_connected(self, instance: str) -> bool:
        """Whether any process of this engine is connected."""
        return instance in self._instances

    def layout_of(self, instance: str) -> KVLayout:
        """How a connected instance is cut."""
        return self._instances[instance].layout

    def shape(self, instance: str) -> CacheShape:
        """The cache shape for a connected instance, whether it uses the cache or not."""
        return self._instances[instance].shape

    def leave(self, peer: EnginePeer) -> None:
        """Forget a connection that joined."""
        instance = self._instances[peer.instance]
        instance.pids.pop(peer.conn_id, None)
        if not instance.pids:
            del self._instances[peer.instance]

    def layout(self, fingerprint: bytes | None, instance: str = "") -> tuple[bytes, KVLayout]:
        """The layout with this fingerprint, of this instance if it has it; None: the only layout
        here. Raises UnknownLayout.
        """
        # Of engines that differ in their drafters alone, one with a drafter: what lands for it can
        # be read without a drafter too.
        ordered = sorted(
            self._instances.items(),
            key=lambda item: (item[0] == instance, bool(item[1].layout.draft_digest)),
        )
        known = {one.fingerprint: one.layout for _, one in ordered}
        if fingerprint is None:
            if len(known) != 1:
                raise UnknownLayout(f"{len(known)} KV layouts are connected: name one")
            return next(iter(known.items()))
        if fingerprint not in known:
            raise UnknownLayout(
                f"no connected engine has KV layout {fingerprint.hex()[:16]}; "
                f"connected: {', '.join(f.hex()[:16] for f in known) or 'none'}"
            )
        return fingerprint, known[fingerprint]

    def describe(self) -> list[EngineStatus]:
        return [
            EngineStatus(
                name,
                len(instance.pids),
                instance.layout.tp_size,
                instance.layout.describe(),
                instance.fingerprint.hex(),
                instance.cache,
                instance.layout.block_bytes,
                instance.layout.model_id,
                instance.layout.weights,
                instance.engine,
                instance.adapters,
                instance.pp_size,
                instance.text_only,
            )
            for name, instance in sorted(self._instances.items())
        ]

    def processes(self) -> dict[str, set[int]]:
        """The processes of each instance, without those that this PID namespace does not see."""
        return {
            name: {pid for pid in instance.pids.values() if pid > 0}
            for name, instance in sorted(self._instances.items())
        }
