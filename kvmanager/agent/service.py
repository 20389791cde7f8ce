"""One running node agent: the event loop's side of the transfer table.

Everything that happens (a call of the control plane, a message of an engine, news of the transport,
time) is put into the table as an event, and the effects that come back are performed here. No rule
about transfers is here; they are in `kvmanager.transfers.table`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec

from kvmanager.agent.cache.move_control import control_methods
from kvmanager.agent.cache.moves import CacheMover
from kvmanager.agent.cache.service import AgentCache, LandingBase
from kvmanager.agent.config import AgentConfig
from kvmanager.agent.engines.events import EngineCaches
from kvmanager.agent.engines.instances import EngineNotServed, InstanceBook
from kvmanager.agent.engines.protocol import (
    AbortOutbox,
    AgentMessage,
    Attach,
    CacheMessage,
    EngineHello,
    FailureNotice,
    HelloRefused,
    Landed,
    PrefillEnd,
    ProtocolError,
    Ready,
    Release,
    TransferMessage,
    Watch,
    Welcome,
)
from kvmanager.agent.engines.server import EngineServer
from kvmanager.agent.kept_arena import KeptArena, open_arena
from kvmanager.agent.links.control import link_methods
from kvmanager.agent.links.probing import AgentProbes
from kvmanager.agent.links.watch import LinkWatch, WatchSettings
from kvmanager.agent.messages import StatusReply, TransferReport
from kvmanager.agent.metrics import AgentMetrics
from kvmanager.agent.reports import landing_report, outbox_report
from kvmanager.agent.transfer_io import TransferIo, now_s
from kvmanager.arena import Arena, remove_stale
from kvmanager.loop.watch import aligned_delay_s
from kvmanager.pool.placement import StatePlacement
from kvmanager.transfers.holds import Key, Kind
from kvmanager.transfers.records import (
    CancelOutbox,
    DropLanding,
    Effect,
    EnginePeer,
    ForwardReady,
    GaveUpOnEngine,
    LandingRecord,
    LandingSpec,
    OutboxRecord,
    OutboxSpec,
    OutcomeKnown,
    RecordPrefillEnd,
    State,
    TellFailed,
    TellLanded,
    TransferError,
)
from kvmanager.transfers.table import TransferTable
from transport import Endpoint, OutgoingSpec

logger = logging.getLogger("prfaas.kvmanager.agent")

TICK_S: Final = 0.1
STOP_GRACE_S: Final = 1.0

ControlMethod = tuple[
    type[msgspec.Struct], type[msgspec.Struct], Callable[[Any], Awaitable[msgspec.Struct]]
]
"""Request, reply and handler of a method that is named like its request."""


class NodeAgent:
    """Owns the arena, the table, the engine socket and the data port. Use on one event loop."""

    def __init__(self, config: AgentConfig) -> None:
        self.config = config
        self.book = InstanceBook()
        self.metrics = AgentMetrics(self.status)
        self._peers: dict[int, EnginePeer] = {}
        self._waiters: defaultdict[Key, set[asyncio.Future[None]]] = defaultdict(set)
        self._started_s = now_s()
        self.cache: AgentCache | None = None
        """Its prefix cache; None: it keeps none."""
        self.mover: CacheMover | None = None
        """Moves of cached prefixes; None as well without a cache."""
        self.engine_events: EngineCaches | None = None
        """What engines say of their own caches; None: nobody wants to know."""
        self.control_methods: list[ControlMethod] = []
        """The methods of its parts. `ControlService` takes them when it is made."""
        self._ticking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Bind everything. Raises ArenaError, SsdError, SocketTaken, transport.LocalError."""
        config = self.config
        for path in remove_stale(config.arena_dir):
            logger.info("removed the arena %s of a dead agent", path)
        self._engines = EngineServer(config.socket, self, linger_s=config.drain_s)
        self._engines.claim()
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(self._engines.stop)
            kept: KeptArena = await asyncio.to_thread(open_arena, config)
            self._kept = kept
            undo.callback(kept.close)
            self.arena: Arena = kept.arena
            self.allocator = kept.allocator
            if config.num_cache_blocks != 0:
                self.cache = AgentCache(config, kept, self._engines.send)
                undo.push_async_callback(self.cache.close)
            self.table = TransferTable(
                self.allocator,
                config.block_bytes,
                config.limits,
                make_room=self.cache.make_room if self.cache is not None else None,
                on_freed=self.cache.transfer_freed if self.cache is not None else None,
            )
            self.io = TransferIo(
                config.transport_config,
                Endpoint.parse(config.listen),
                self,
                lambda code: self.metrics.refused_senders.labels(code).inc(),
            )
            undo.push_async_callback(self.io.stop)
            self.data_endpoint = self.io.start()
            self.advertised = config.advertised(self.data_endpoint)
            self.prober = AgentProbes(self.io, config.transport_config, self.advertised)
            self._watch_links()
            self._start_moves()
            await self._engines.start()
            undo.pop_all()
        if self.cache is not None:
            self.cache.start()
        self.links.start()
        self._ticking = asyncio.create_task(self._tick())
        logger.info(
            "node agent serves %d blocks of %d bytes, epoch %s",
            self.arena.num_blocks,
            config.block_bytes,
            self.arena.epoch,
        )

    def _watch_links(self) -> None:
        config = self.config
        settings = WatchSettings(
            interval_s=config.link_sample_interval_s,
            probes=config.link_probes,
            monitor=config.monitor_config,
        )
        self.links = LinkWatch(
            self.io,
            settings,
            self.metrics.registry,
            data_endpoint=str(self.advertised),
            clock_s=now_s,
        )
        self.control_methods += link_methods(self.links, self.io, now_s, probes=config.link_probes)

    def _start_moves(self) -> None:
        if self.cache is not None:
            self.mover = CacheMover(
                self.io, self.arena, self.cache, advertised=self.advertised, clock_s=now_s
            )
            if self.config.kv_events:
                told = self.cache.engine_blocks_changed
                self.engine_events = EngineCaches(self.config.kv_events, told)
        self.control_methods += control_methods(self.mover, self.book, digest=self.config.digest)

    async def stop(self) -> None:
        """Tell every peer, close everything, leave no file behind."""
        if self._ticking is None:
            return
        self._ticking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._ticking
        for transfer_id in {*self.table.landings, *self.table.outboxes}:
            self.perform(self.table.cancel(transfer_id, "the agent is stopping", now_s()))
        self.prober.close(now_s())
        await self.links.close()
        if self.engine_events is not None:
            await self.engine_events.close()
        if self.mover is not None:
            await self.mover.close()
        await self._engines.stop()
        await self.io.settle(STOP_GRACE_S)
        await self.io.stop()
        if self.cache is not None:
            await self.cache.close()
        self._kept.close()

    # ---- for the control plane

    async def make_room(self, spec: LandingSpec, base: LandingBase | None) -> None:
        """Evict what a landing needs, in steps. Raises TransferError, and drops `base` then."""
        if self.cache is None:
            return
        try:
            self.table.check_landing(spec)
            await self.cache.make_room_in_steps(-(-spec.nbytes // self.arena.block_bytes))
        except BaseException:  # a caller that goes away too
            if base is not None:
                self.cache.drop_base(base)
            raise

    def reserve(self, spec: LandingSpec, base: LandingBase | None = None) -> LandingRecord:
        """Hold memory and let the sender in. Raises TransferError, and drops `base` then."""
        try:
            landing = self.table.reserve(spec, now_s())
        except TransferError:
            if base is not None and self.cache is not None:
                self.cache.drop_base(base)
            raise
        if base is not None and self.cache is not None:
            self.cache.adopt_base(spec.transfer_id, base)
        space = self.arena.view(landing.runs, spec.nbytes)
        self.io.admit(spec.transfer_id, spec.token, spec.fingerprint, space)
        return landing

    def open_outbox(self, spec: OutboxSpec, wire: OutgoingSpec) -> OutboxRecord:
        """Hold memory and begin to send. Raises TransferError."""
        outbox = self.table.open_outbox(spec, now_s())
        space = self.arena.view(outbox.runs, spec.nbytes)
        try:
            self.io.open(wire, space)
        except Exception as error:
            self.outbox_ended(spec.transfer_id, f"cannot send: {error}")
            raise
        return outbox

    def cancel(self, transfer_id: bytes, reason: str) -> bool:
        """End it; whether something was alive."""
        effects = self.table.cancel(transfer_id, reason, now_s())
        self.perform(effects)
        return bool(effects)

    async def wait_ended(self, key: Key, timeout_s: float) -> None:
        """Return when this end is over, or after `timeout_s`."""
        if self.report(key).state != "open":
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[key].add(waiter)
        try:
            await asyncio.wait({waiter}, timeout=timeout_s)
        finally:
            waiters = self._waiters[key]
            waiters.discard(waiter)
            if not waiters:
                del self._waiters[key]

    def report(self, key: Key) -> TransferReport:
        """How an end is doing; raises KeyError when it is unknown."""
        kind, transfer_id = key
        if kind is Kind.LANDING:
            landing = self.table.landings[transfer_id]
            return landing_report(landing, self.io.landing_progress(transfer_id))
        outgoing = self.io.outgoing(transfer_id)
        outbox = self.table.outboxes[transfer_id]
        if outgoing is None:
            return outbox_report(outbox, None, None)
        return outbox_report(outbox, outgoing.handle.progress(), outgoing.sent_at_prefill_end)

    def status(self) -> StatusReply:
        """Numbers of this moment."""
        table, block_bytes = self.table, self.arena.block_bytes
        open_ids = {i for i, outbox in table.outboxes.items() if outbox.state is State.OPEN}
        cap = table.limits.landing_bytes
        return StatusReply(
            arena_epoch=self.arena.epoch,
            arena_bytes=self.arena.nbytes,
            block_bytes=block_bytes,
            free_bytes=self._num_free_blocks * block_bytes,
            landing_bytes=table.holds.num_blocks(Kind.LANDING) * block_bytes,
            landing_cap_bytes=self.arena.nbytes if cap is None else min(cap, self.arena.nbytes),
            outbox_bytes=table.holds.num_blocks(Kind.OUTBOX) * block_bytes,
            num_landings=dict(Counter(str(end.state) for end in table.landings.values())),
            num_outboxes=dict(Counter(str(end.state) for end in table.outboxes.values())),
            engines=self.book.describe(),
            links=self.io.links(open_ids),
            num_received_connections=self.io.num_received_connections,
            uptime_s=now_s() - self._started_s,
            pid=os.getpid(),
            data_endpoint=str(self.advertised),
            arena_path=str(self.arena.path),
            cache=None if self.cache is None else self.cache.status(),
            landing_room_bytes=self.landing_room_bytes,
        )

    @property
    def landing_room_bytes(self) -> int:
        """What one more landing could take now, the prefix cache giving up what it can."""
        return self.table.landing_room_blocks(self._num_free_blocks) * self.arena.block_bytes

    @property
    def _num_free_blocks(self) -> int:
        """Blocks that transfers can have."""
        evictable = 0 if self.cache is None else self.cache.pool.num_evictable_blocks
        return self.allocator.num_free + evictable

    # ---- for the engine server

    def hello(self, conn_id: int, hello: EngineHello) -> AgentMessage:
        try:
            peer = self.book.join(conn_id, hello)
        except EngineNotServed as error:
            return HelloRefused(str(error))
        self._peers[conn_id] = peer
        self.table.connect(peer)
        logger.info("engine %s: %s rank %d connected", peer.instance, peer.role, peer.tp_rank)
        arena = self.arena
        return Welcome(
            arena.epoch,
            str(arena.path),
            arena.nbytes,
            arena.block_bytes,
            self._join_cache(peer, hello),
            self.table.last_attempt,
            # An engine hears of a lost connection a little later than we.
            self.config.drain_s / 2,
        )

    def _join_cache(self, peer: EnginePeer, hello: EngineHello) -> StatePlacement | None:
        """Only a scheduler names the namespace; a worker writes what its scheduler reserved."""
        if self.cache is None or not (hello.namespace or peer.role == "worker"):
            return None
        self.cache.connect(peer, self.book.shape(peer.instance))
        if self.engine_events is not None and hello.namespace:
            _, layout = self.book.layout(peer.fingerprint)
            self.engine_events.engine_joined(peer.instance, layout, hello.namespace)
        return self.cache.placement

    def message(self, conn_id: int, message: TransferMessage | CacheMessage) -> None:
        if isinstance(message, CacheMessage):
            if self.cache is None:
                raise ProtocolError("this agent has no prefix cache")
            self.cache.message(conn_id, message)
            return
        table, transfer_id = self.table, message.transfer_id
        match message:
            case Attach():
                effects = table.attach(conn_id, transfer_id, message.attempt)
            case Ready(_, attempt, ranges):
                effects = table.ranges_ready(conn_id, transfer_id, attempt, ranges, now_s())
            case PrefillEnd(_, attempt, tp_rank):
                effects = table.prefill_end(conn_id, transfer_id, attempt, tp_rank, now_s())
            case AbortOutbox(_, attempt, reason):
                effects = table.abort(conn_id, transfer_id, attempt, reason, now_s())
            case Watch():
                effects = table.watch(conn_id, transfer_id)
            case Release(_, 0):
                effects = table.release_landing(conn_id, transfer_id, now_s())
            case Release(_, attempt):
                table.release_outbox(conn_id, transfer_id, attempt)
                effects = []
        self.perform(effects)

    def connection_lost(self, conn_id: int) -> None:
        peer = self._peers.pop(conn_id)
        self.book.leave(peer)
        logger.info("engine %s: %s rank %d is lost", peer.instance, peer.role, peer.tp_rank)
        self.perform(self.table.disconnected(conn_id, now_s()))
        if self.cache is not None:
            self.cache.connection_lost(conn_id)
        if self.engine_events is not None and peer.role == "scheduler":
            self.engine_events.engine_left(peer.instance)

    def process_gone(self, conn_id: int) -> None:
        self.table.process_gone(conn_id)
        if self.cache is not None:
            self.cache.process_gone(conn_id)

    # ---- for the transport

    def landing_accepted(self, transfer_id: bytes) -> None:
        self.table.landing_accepted(transfer_id)

    def landing_complete(self, transfer_id: bytes) -> None:
        effects = self.table.landing_complete(transfer_id, now_s())
        self.perform(effects)
        if effects and self.cache is not None:
            self.cache.landed(self.table.landings[transfer_id], self.table.holds)
        if self.mover is not None:
            self.mover.landing_complete(transfer_id)

    def landing_failed(self, transfer_id: bytes, reason: str) -> None:
        self.prober.landing_failed(transfer_id, reason)
        if self.mover is not None:
            self.mover.landing_failed(transfer_id, reason)
        self.perform(self.table.landing_failed(transfer_id, reason, now_s()))

    def landing_dropped(self, transfer_id: bytes) -> None:
        self.table.landing_dropped(transfer_id)
        if self.mover is not None:
            self.mover.landing_dropped(transfer_id)

    def outbox_ended(self, transfer_id: bytes, error: str | None) -> None:
        self.perform(self.table.outbox_ended(transfer_id, error, now_s()))

    # ---- inside

    def perform(self, effects: list[Effect]) -> None:
        """Carry out what the table asked for."""
        for effect in effects:
            match effect:
                case ForwardReady(transfer_id, ranges):
                    self.io.ranges_ready(transfer_id, ranges)
                case TellLanded(conn_id, transfer_id):
                    self._engines.send(conn_id, Landed(transfer_id))
                case TellFailed(conn_id, transfer_id, reason, attempt):
                    self._engines.send(conn_id, FailureNotice(transfer_id, reason, attempt))
                case DropLanding(transfer_id, reason):
                    self.io.drop(transfer_id, reason)
                case CancelOutbox(transfer_id, reason):
                    self.io.cancel(transfer_id, reason)
                case RecordPrefillEnd(transfer_id):
                    self.io.note_prefill_end(transfer_id)
                case OutcomeKnown(key):
                    self._transfer_ended(key)
                case GaveUpOnEngine((kind, transfer_id)):
                    logger.warning(
                        "%s %s: an engine did not release its memory", kind, transfer_id.hex()
                    )

    def _transfer_ended(self, key: Key) -> None:
        report = self.report(key)
        self.metrics.transfer_ended(report)
        log = logger.debug if report.state == "complete" else logger.warning
        log("%s %s %s: %s", report.kind, report.transfer_id, report.state, report.error)
        for waiter in self._waiters.get(key, ()):
            if not waiter.done():
                waiter.set_result(None)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(aligned_delay_s(TICK_S, now_s()))
            before = set(self.table.outboxes)
            try:
                self.prober.tick(now_s())
                self.perform(self.table.expire(now_s()))
                for transfer_id in before - self.table.outboxes.keys():
                    self.io.forget(transfer_id)
                if self.cache is not None:
                    self.cache.tick()
                if self.mover is not None:
                    self.mover.tick(now_s())
            except Exception:
                # Leases must go on ending, whatever one transfer ran into.
                logger.exception("expiry failed")
