"""One running node agent: its parts, its engines, its start and its end.

It owns the arena, the engine socket, the prefix cache and the watch over links. It passes messages
of engines and the time on to these parts. It does not know the rules of transfers or of the cache,
which are in `kvmanager.agent.transfers` and `kvmanager.agent.cache.service`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from kvmanager.agent.cache.move_control import control_methods
from kvmanager.agent.cache.moves import PrefixMoves
from kvmanager.agent.cache.node_feed import NodeFeed
from kvmanager.agent.cache.service import AgentCache
from kvmanager.agent.config import AgentConfig
from kvmanager.agent.embeddings.control import embedding_methods
from kvmanager.agent.embeddings.moves import EmbeddingMoves
from kvmanager.agent.embeddings.service import AgentEmbeddings
from kvmanager.agent.engines.events import EngineCaches
from kvmanager.agent.engines.instances import EngineNotServed, InstanceBook
from kvmanager.agent.engines.protocol import (
    AgentMessage,
    CacheMessage,
    EmbeddingMessage,
    EncoderHello,
    EngineHello,
    Hello,
    HelloRefused,
    ProtocolError,
    TransferMessage,
    Welcome,
    agreed_version,
)
from kvmanager.agent.engines.server import EngineServer
from kvmanager.agent.grants import AgentGrants
from kvmanager.agent.host_facts import host_facts
from kvmanager.agent.host_messages import HostFacts, HostFactsReply
from kvmanager.agent.kept_arena import KeptArena, open_arena
from kvmanager.agent.links.control import link_methods
from kvmanager.agent.links.watch import LinkWatch, WatchSettings
from kvmanager.agent.messages import StatusReply
from kvmanager.agent.metrics import AgentMetrics
from kvmanager.agent.transfer_io import now_s
from kvmanager.agent.transfers import AgentTransfers
from kvmanager.arena import Arena, remove_stale
from kvmanager.loop.watch import aligned_delay_s
from kvmanager.pool.placement import StatePlacement
from kvmanager.transfers.holds import Kind
from kvmanager.transfers.records import EnginePeer
from transport.tasks import start_task
from transport.versions import NoCommonVersion

if TYPE_CHECKING:  # which needs the extra `traces`
    from kvmanager.tracing.export import Tracer

logger = logging.getLogger("prfaas.kvmanager.agent")

TICK_S: Final = 0.1

ControlMethod = tuple[
    type[msgspec.Struct], type[msgspec.Struct], Callable[[Any], Awaitable[msgspec.Struct]]
]
"""Request, reply and handler of a method that is named like its request."""


class NodeAgent:
    """Owns the arena, the engine socket and the parts that use them. Use on one event loop."""

    def __init__(self, config: AgentConfig, tracer: Tracer | None = None) -> None:
        self.config = config
        self._tracer = tracer
        self.book = InstanceBook()
        self.metrics = AgentMetrics(self.status)
        self._peers: dict[int, EnginePeer] = {}
        self.feed = NodeFeed()
        """What followers are told of the prefix cache and the embeddings."""
        self._started_s = now_s()
        self.cache: AgentCache | None = None
        """The prefix cache; None: the agent has none."""
        self.embeddings: AgentEmbeddings | None = None
        """The embeddings of images; None: the agent keeps none."""
        self.engine_events: EngineCaches | None = None
        """Follows the engines' own caches; None: no engine's endpoint is configured."""
        self.control_methods: list[ControlMethod] = []
        """The control methods of the agent's parts, which `ControlService` adds to its own."""
        self._ticking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Bind everything. Raises ArenaError, SsdError, SocketTaken, transport.LocalError."""
        config = self.config
        for path in remove_stale(config.arena_dir):
            logger.info("removed the arena %s of a dead agent", path)
        self._engines = EngineServer(config.socket, self, linger_s=config.drain_s)
        # The socket first: it shows whether another agent serves these engines, before anything big
        # is made.
        self._engines.claim()
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(self._engines.stop)
            # On a thread: allocating takes a third of a second for each GiB.
            kept: KeptArena = await asyncio.to_thread(open_arena, config)
            self._kept = kept
            undo.callback(kept.close)
            self.arena: Arena = kept.arena
            self.allocator = kept.allocator
            if config.num_cache_blocks != 0:
                self.cache = AgentCache(config, kept, self._engines.send, self.feed)
                undo.push_async_callback(self.cache.close)
            if config.num_embedding_blocks:
                make_room = None if self.cache is None else self.cache.pool.make_room
                self.embeddings = AgentEmbeddings(
                    config, kept, make_room, self._engines.send, self.feed
                )
            self.transfers = AgentTransfers(
                config, kept, self.cache, self.metrics, self._engines.send, self._tracer
            )
            undo.push_async_callback(self.transfers.io.stop)
            self.transfers.start()
            self.grants = AgentGrants(
                config.grant_file,
                agent=str(self.transfers.advertised),
                send_to=config.destinations,
            )
            self._watch_links()
            self._follow_engine_caches()
            self._serve_moves()
            # Last, since an engine may send messages as soon as it is connected.
            await self._engines.start()
            undo.pop_all()
        if self.cache is not None:
            self.cache.start()
        self.links.start()
        self._ticking = start_task(self._tick(), "the agent's clock")
        logger.info(
            "node agent serves %d blocks of %d bytes, epoch %s",
            self.arena.num_blocks,
            config.block_bytes,
            self.arena.epoch,
        )

    def _watch_links(self) -> None:
        config, io = self.config, self.transfers.io
        settings = WatchSettings(
            interval_s=config.link_sample_interval_s,
            probes=config.link_probes,
            detector=config.link_detector,
        )
        self.links = LinkWatch(
            io,
            settings,
            self.metrics.registry,
            data_endpoint=str(self.transfers.advertised),
            clock_s=now_s,
        )
        self.control_methods += link_methods(
            self.links, io, self.grants, now_s, probes=config.link_probes
        )

    def _follow_engine_caches(self) -> None:
        if self.cache is not None and self.config.kv_events:
            told = self.cache.engine_blocks_changed
            self.engine_events = EngineCaches(self.config.kv_events, told)

    def _serve_moves(self) -> None:
        """Take part in moves between agents, of prefixes and embeddings."""
        config, mover, arena = self.config, self.transfers.mover, self.arena
        prefixes = None if self.cache is None else PrefixMoves(mover, arena, self.cache, now_s)
        self.control_methods += control_methods(
            mover,
            prefixes,
            self.book,
            self.grants,
            digest=config.digest,
            is_lossy=config.is_lossy,
        )
        moves = None if self.embeddings is None else EmbeddingMoves(mover, arena, self.embeddings)
        self.control_methods += embedding_methods(
            self.embeddings, moves, self.grants, digest=config.digest
        )

    async def stop(self) -> None:
        """Tell every peer, close everything, leave no file behind."""
        if self._ticking is None:
            return
        self._ticking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._ticking
        # Order: peers hear of the end while connections stand, then connections close, then memory
        # goes.
        self.feed.close()
        self.transfers.end_all()
        await self.links.close()
        if self.engine_events is not None:
            await self.engine_events.close()
        await self.transfers.mover.close()
        await self._engines.stop()
        await self.transfers.stop()
        if self.cache is not None:
            await self.cache.close()
        self._kept.close()

    def status(self) -> StatusReply:
        """Numbers of this moment."""
        table, arena = self.transfers.table, self.arena
        landings, outboxes = table.landings.records.values(), table.outboxes.records.values()
        cap = table.books.limits.landing_bytes
        return StatusReply(
            arena_bytes=arena.nbytes,
            block_bytes=arena.block_bytes,
            free_bytes=self._num_free_blocks * arena.block_bytes,
            landing_bytes=table.books.held_bytes(Kind.LANDING),
            landing_cap_bytes=arena.nbytes if cap is None else min(cap, arena.nbytes),
            outbox_bytes=table.books.held_bytes(Kind.OUTBOX),
            num_landings=dict(Counter(str(landing.state) for landing in landings)),
            num_outboxes=dict(Counter(str(outbox.state) for outbox in outboxes)),
            engines=self.book.describe(),
            links=self.transfers.links(),
            num_received_connections=self.transfers.io.num_received_connections,
            num_turned_away=self.transfers.io.num_turned_away,
            uptime_s=now_s() - self._started_s,
            pid=os.getpid(),
            data_endpoint=str(self.transfers.advertised),
            cache=None if self.cache is None else self.cache.status(),
            landing_room_bytes=self.landing_room_bytes,
            exposures=self.config.exposures,
            is_encrypted=self.config.tls is not None,
            embeddings=None if self.embeddings is None else self.embeddings.status(),
            encoders=[] if self.embeddings is None else self.embeddings.encoders(),
        )

    async def why_not_ready(self) -> str:
        """A `transport.health.WhyNotReady`, for an agent that has started."""
        # The arena is open as long as the port is.
        return "" if self.transfers.io.is_listening else "the data port is closed"

    async def host_facts(self, _request: HostFacts) -> HostFactsReply:
        """The facts of this agent's host, read in a thread."""
        return await asyncio.to_thread(
            host_facts,
            self.config.arena_dir,
            self.book.processes(),
            ssd_dir=self.config.ssd_dir,
            congestion=self.config.transport_config.congestion or "",
            granting_keys=self.grants.key_digests(),
        )

    @property
    def landing_room_bytes(self) -> int:
        """Bytes that one more landing could take now, if the prefix cache gave up what it can."""
        landings = self.transfers.table.landings
        return landings.room_blocks(self._num_free_blocks) * self.arena.block_bytes

    @property
    def _num_free_blocks(self) -> int:
        """Blocks that transfers can have."""
        evictable = 0 if self.cache is None else self.cache.pool.num_evictable_blocks
        return self.allocator.num_free + evictable

    # ---- for the engine server

    def hello(self, conn_id: int, hello: Hello) -> AgentMessage:
        if isinstance(hello, EncoderHello):
            return self._hello_of_encoder(conn_id, hello)
        try:
            peer = self.book.join(conn_id, hello)
        except EngineNotServed as error:
            return HelloRefused(str(error))
        self._peers[conn_id] = peer
        self.transfers.table.connect(peer)
        logger.info("engine %s: %s rank %d connected", peer.instance, peer.role, peer.rank)
        last_attempt = self.transfers.table.outboxes.last_attempt
        return self._welcome(hello, self._join_cache(peer, hello), last_attempt)

    def _hello_of_encoder(self, conn_id: int, hello: EncoderHello) -> AgentMessage:
        if self.embeddings is None:
            return HelloRefused("this agent keeps no embeddings: embedding_gib is 0")
        try:
            welcome = self._welcome(hello)
        except NoCommonVersion as error:
            return HelloRefused(str(error))
        self.embeddings.connect(conn_id, hello)
        logger.info("encoder %s: its %s is connected", hello.instance, hello.role)
        return welcome

    def _welcome(
        self, hello: Hello, placement: StatePlacement | None = None, last_attempt: int = 0
    ) -> Welcome:
        arena = self.arena
        return Welcome(
            arena.epoch,
            str(arena.path),
            arena.nbytes,
            arena.block_bytes,
            placement,
            last_attempt,
            # Half of the drain time: an engine notices a lost connection later than the agent.
            self.config.drain_s / 2,
            version=agreed_version(hello),
            is_lossy=self.config.is_lossy,
        )

    def _join_cache(self, peer: EnginePeer, hello: EngineHello) -> StatePlacement | None:
        """Join an engine to the prefix cache; None if it does not use it. Its scheduler reserves
        parts and says what the engine holds; its workers write them.
        """
        if self.cache is None or not (hello.namespace or peer.role == "worker"):
            return None
        self.cache.connect(peer, self.book.shape(peer.instance))
        # Only the scheduler's Hello has the adapters, and workers connect before it.
        if self.engine_events is not None and hello.namespace and peer.role == "scheduler":
            layout = self.book.layout_of(peer.instance)
            self.engine_events.engine_joined(peer.instance, layout, hello.namespace, hello.adapters)
        return self.cache.placement

    def message(
        self, conn_id: int, message: TransferMessage | CacheMessage | EmbeddingMessage
    ) -> None:
        if self.embeddings is not None and self.embeddings.serves(conn_id):
            self.embeddings.message(conn_id, message)
            return
        if isinstance(message, EmbeddingMessage):
            raise ProtocolError(f"{type(message).__name__} without EncoderHello")
        if isinstance(message, CacheMessage):
            if self.cache is None:
                raise ProtocolError("this agent has no prefix cache")
            self.cache.message(conn_id, message)
            return
        self.transfers.engine_says(conn_id, message)

    def connection_lost(self, conn_id: int) -> None:
        if self.embeddings is not None and self.embeddings.lost(conn_id):
            return
        peer = self._peers.pop(conn_id)
        self.book.leave(peer)
        logger.info("engine %s: %s rank %d is lost", peer.instance, peer.role, peer.rank)
        self.transfers.connection_lost(conn_id)
        if self.cache is not None:
            self.cache.connection_lost(conn_id)
        if self.engine_events is not None and peer.role == "scheduler":
            self.engine_events.engine_left(peer.instance)

    def process_gone(self, conn_id: int) -> None:
        if self.embeddings is not None:
            self.embeddings.process_gone(conn_id)
        self.transfers.table.process_gone(conn_id)
        if self.cache is not None:
            self.cache.process_gone(conn_id)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(aligned_delay_s(TICK_S, now_s()))
            transfers, others = self.transfers, (self.embeddings, self.cache)
            ticks: list[Callable[[], None]] = [
                partial(transfers.prober.tick, now_s()),
                transfers.tick,
                partial(transfers.mover.tick, now_s()),
                *(part.tick for part in others if part is not None),
            ]
            for tick in ticks:
                try:
                    tick()
                except Exception:
                    # One part's failure must not keep the leases of others from ending.
                    logger.exception("expiry failed")
