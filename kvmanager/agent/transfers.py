"""Runs what goes over one agent's data port: transfers, moves of its cache, and probes.

Every event of a transfer (a call of the control plane, a message of an engine, an event of the
transport, the time) goes into the transfer table, and this module performs the effects that come
back. The rules about transfers are in `kvmanager.transfers.table`. This module does not know the
engine socket, layouts, or how its callers reached it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from kvmanager.agent.cache.landing_bases import LandingBase, LandingBases
from kvmanager.agent.cache.service import AgentCache
from kvmanager.agent.config import AgentConfig
from kvmanager.agent.engines.protocol import (
    AbortOutbox,
    AgentMessage,
    Attach,
    FailureNotice,
    Landed,
    Loaded,
    OutboxOpened,
    PrefillEnd,
    Ready,
    Release,
    TransferMessage,
    Watch,
)
from kvmanager.agent.hand_offs import ArenaHandOffs
from kvmanager.agent.kept_arena import KeptArena
from kvmanager.agent.links.probing import AgentProbes
from kvmanager.agent.messages import LinkStatus, TransferReport
from kvmanager.agent.metrics import AgentMetrics
from kvmanager.agent.moves import Mover
from kvmanager.agent.reports import landing_report, outbox_report
from kvmanager.agent.sender_admission import AdmittedLanding
from kvmanager.agent.transfer_io import TransferIo, now_s
from kvmanager.agent.transfer_spans import TransferSpans
from kvmanager.load_times import LoadTimes
from kvmanager.transfers.holds import Key, Kind
from kvmanager.transfers.records import (
    MOVES,
    CancelOutbox,
    DropLanding,
    Effect,
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
)
from kvmanager.transfers.table import TransferTable
from transport import Endpoint, OutgoingSpec

if TYPE_CHECKING:  # which needs the extra `traces`
    from kvmanager.tracing.export import Tracer

logger = logging.getLogger("prfaas.kvmanager.agent")

STOP_GRACE_S: Final = 1.0


class AgentTransfers:
    """Owns the transfer table and the data port. Use it on one event loop."""

    def __init__(
        self,
        config: AgentConfig,
        kept: KeptArena,
        cache: AgentCache | None,
        metrics: AgentMetrics,
        send: Callable[[int, AgentMessage], None],
        tracer: Tracer | None = None,
    ) -> None:
        """`send` sends a message to an engine connection, `tracer` records transfers of traced
        requests. Raises transport.LocalError.
        """
        self.bases = LandingBases(cache, kept.arena) if cache is not None else None
        """The cached prefixes that landings build on; None without a cache."""
        self.table = TransferTable(
            kept.allocator,
            config.block_bytes,
            config.limits,
            make_room=cache.pool.make_room if cache is not None else None,
            on_freed=self.bases.transfer_freed if self.bases is not None else None,
        )
        self.io = TransferIo(
            config.transport_config,
            Endpoint.parse(config.listen),
            self,
            lambda code: metrics.refused_senders.labels(code).inc(),
            send_to=config.destinations,
            routes=config.paths,
            hosts=config.hosts,
        )
        self._spans = TransferSpans(tracer, self.io.retransmitted_bytes)
        self._hand_offs = ArenaHandOffs(self, now_s)
        self._config = config
        self._arena = kept.arena
        self._cache = cache
        self._metrics = metrics
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._waiters: defaultdict[Key, set[asyncio.Future[None]]] = defaultdict(set)

    def start(self) -> None:
        """Listen on the data port. Raises transport.LocalError."""
        self.data_endpoint = self.io.start()
        self.advertised = self._config.advertised(self.data_endpoint)
        self.prober = AgentProbes(self.io, self._config.transport_config, self.advertised)
        self.mover = Mover(
            self.io,
            advertised=self.advertised,
            clock_s=now_s,
            on_over=self._metrics.move_over,
        )

    def end_all(self) -> None:
        """End every transfer and every probe, and answer the callers that wait for them."""
        for transfer_id in {*self.table.landings.records, *self.table.outboxes.records}:
            self.cancel(transfer_id, "the agent is stopping")
        self.prober.close(now_s())

    async def stop(self) -> None:
        """Close the data port, after a moment in which peers hear of the ends."""
        await self.io.settle(STOP_GRACE_S)
        await self.io.stop()

    def tick(self) -> None:
        """End transfers whose lease is over. Call a few times a second, as `prober` and `mover`."""
        before = set(self.table.outboxes.records)
        self._perform(self.table.expire(now_s()))
        for transfer_id in before - self.table.outboxes.records.keys():
            self.io.forget(transfer_id)
            self._hand_offs.forget(transfer_id)

    # ---- for the control plane

    async def reserve(self, spec: LandingSpec, base: LandingBase | None = None) -> LandingRecord:
        """Reserve memory, for which it evicts in steps, and admit the sender.

        Raises TransferError, and drops `base` then.
        """
        try:
            if self._cache is not None:
                # Before anything is evicted for a request that would be refused in any case.
                self.table.landings.check(spec)
                await self._cache.make_room_in_steps(-(-spec.nbytes // self._arena.block_bytes))
            landing = self.table.landings.reserve(spec, now_s())
        except BaseException:  # also when the caller goes away
            if base is not None and self.bases is not None:
                self.bases.drop(base)
            raise
        if base is not None and self.bases is not None:
            self.bases.adopt(spec.transfer_id, base)
        space = self._arena.view(landing.runs, spec.nbytes)
        short = None
        if spec.nbytes_without_draft not in (None, spec.nbytes):
            short = self._arena.view(landing.runs, spec.nbytes_without_draft)
        admitted = AdmittedLanding(spec.token, spec.fingerprint, space, short)
        self.io.admit(spec.transfer_id, admitted)
        return landing

    async def open_outbox(
        self, spec: OutboxSpec, wire: OutgoingSpec, *, by_transport: bool = False
    ) -> OutboxRecord:
        """Reserve memory, for which it evicts in steps, and begin to send. Raises TransferError.

        If the landing is at this agent, the engine fills its memory, unless `by_transport`.
        """
        landing = self.table.landings.records.get(spec.transfer_id)
        if landing is not None and landing.state in MOVES and not by_transport:
            return self._hand_off(spec, wire.token, landing)
        if self._cache is not None:
            self.table.outboxes.check(spec)
            await self._cache.make_room_in_steps(-(-spec.nbytes // self._arena.block_bytes))
        outbox = self.table.outboxes.open(spec, now_s())
        # Another try may have been a hand-off.
        self._hand_offs.forget(spec.transfer_id)
        space = self._arena.view(outbox.runs, spec.nbytes)
        try:
            self.io.open(wire, space)
            self._spans.opened(outbox)
        except Exception as error:
            self.outbox_ended(spec.transfer_id, f"cannot send: {error}")
            raise
        self._tell_opened(outbox)
        return outbox

    def _hand_off(self, spec: OutboxSpec, token: bytes, landing: LandingRecord) -> OutboxRecord:
        # Before `admit_engine`, which takes the landing from other senders: a request that was
        # refused after that would leave the landing to nobody.
        self.table.outboxes.check(spec)
        self.io.admit_engine(spec.transfer_id, token, spec.fingerprint, spec.nbytes)
        self.io.forget(spec.transfer_id)
        outbox = self.table.outboxes.open(spec, now_s(), landing)
        self._hand_offs.begin(outbox)
        self._tell_opened(outbox)
        return outbox

    def _tell_opened(self, outbox: OutboxRecord) -> None:
        """Tell engines where the outbox is, before any of them is asked to fill it."""
        spec, books = outbox.spec, self.table.books
        opened = OutboxOpened(
            spec.transfer_id,
            outbox.attempt,
            spec.num_tokens,
            [(first, length) for first, length in outbox.runs],
            spec.cached_tokens,
            spec.window_step,
            spec.draft,
        )
        for conn_id in books.connected:
            if books.peers[conn_id].fingerprint == spec.fingerprint:
                self._send(conn_id, opened)

    def cancel(self, transfer_id: bytes, reason: str) -> bool:
        """End a transfer. Returns whether something was alive."""
        effects = self.table.cancel(transfer_id, reason, now_s())
        self._perform(effects)
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
        """The report of one end. Raises KeyError when it is unknown."""
        kind, transfer_id = key
        if kind is Kind.LANDING:
            landing = self.table.landings.records[transfer_id]
            filling = self._hand_offs.progress(transfer_id) if landing.is_filled_here else None
            arrived = filling.transfer if filling else self.io.landing_progress(transfer_id)
            return landing_report(landing, arrived)
        outbox = self.table.outboxes.records[transfer_id]
        return outbox_report(outbox, self._carrier(transfer_id).progress(transfer_id))

    def links(self) -> list[LinkStatus]:
        """The endpoints that open outboxes send to."""
        outboxes = self.table.outboxes.records.items()
        return self.io.links({i for i, outbox in outboxes if outbox.state is State.OPEN})

    # ---- for engines

    def engine_says(self, conn_id: int, message: TransferMessage) -> None:
        """Process an engine's message about one transfer."""
        landings, outboxes = self.table.landings, self.table.outboxes
        transfer_id = message.transfer_id
        effects: list[Effect] = []
        match message:
            case Ready(_, attempt, ranges):  # the first, since most are
                effects = outboxes.ranges_ready(conn_id, transfer_id, attempt, ranges, now_s())
            case Attach(_, attempt):
                effects = outboxes.attach(conn_id, transfer_id, attempt)
            case PrefillEnd(_, attempt, _, prefill_s):
                effects = outboxes.prefill_end(conn_id, transfer_id, attempt, now_s(), prefill_s)
            case AbortOutbox(_, attempt, reason):
                effects = outboxes.abort(conn_id, transfer_id, attempt, reason, now_s())
            case Loaded(_, wait_s, load_s, step_s):
                times = LoadTimes(wait_s, load_s, step_s)
                landings.loaded(conn_id, transfer_id, times)
                if (landing := landings.records.get(transfer_id)) is not None:
                    self._spans.loaded(landing, self.table.books.peers[conn_id], times, now_s())
            case Watch():
                effects = landings.watch(conn_id, transfer_id)
            case Release(_, 0):  # attempts begin at 1, so 0 means a landing
                effects = landings.release(conn_id, transfer_id, now_s())
            case Release(_, attempt):
                outboxes.release(conn_id, transfer_id, attempt)
        self._perform(effects)

    def connection_lost(self, conn_id: int) -> None:
        """An engine connection is closed; its process may live on."""
        self._perform(self.table.disconnected(conn_id, now_s()))

    # ---- news of the transport; each part knows which transfers are its own

    def landing_accepted(self, transfer_id: bytes) -> None:
        self.table.landings.accepted(transfer_id)

    def landing_complete(self, transfer_id: bytes) -> None:
        effects = self.table.landings.complete(transfer_id, now_s())
        self._perform(effects)
        # No effects: the event came too late, or the landing belongs to a move or a probe. A cache
        # key promises the exact bytes, which a lossy codec does not keep.
        if effects and self.bases is not None and not self._config.is_lossy:
            self.bases.landed(self.table.landings.records[transfer_id], self.table.holds)
        self.mover.landing_complete(transfer_id)

    def landing_failed(self, transfer_id: bytes, reason: str) -> None:
        self.prober.landing_failed(transfer_id, reason)
        self.mover.landing_failed(transfer_id, reason)
        self._perform(self.table.landings.failed(transfer_id, reason, now_s()))

    def landing_dropped(self, transfer_id: bytes) -> None:
        self.table.landings.dropped(transfer_id)
        self.mover.landing_dropped(transfer_id)

    def outbox_ended(self, transfer_id: bytes, error: str | None) -> None:
        self._perform(self.table.outboxes.ended(transfer_id, error, now_s()))

    # ---- inside

    def _carrier(self, transfer_id: bytes) -> TransferIo | ArenaHandOffs:
        """The part of the agent that brings this outbox to its landing."""
        return self._hand_offs if transfer_id in self._hand_offs else self.io

    def _mark(self, transfer_id: bytes) -> None:
        """Note how far a transfer is, each time that the engine has filled some more of it."""
        outbox = self.table.outboxes.records[transfer_id]
        if outbox.is_mark_due:
            known = self._carrier(transfer_id).progress(transfer_id)
            sent_bytes = known.transfer.sent_bytes if known is not None else 0
            passed_s = now_s() - outbox.opened_s
            outbox.marks.append((passed_s, outbox.ready.total, sent_bytes))

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            try:
                self._perform_one(effect)
            except Exception:
                # The others are of other transfers, or free the memory of this one.
                logger.exception("cannot do %s", type(effect).__name__)

    def _perform_one(self, effect: Effect) -> None:
        match effect:
            case ForwardReady(transfer_id, ranges):
                self._carrier(transfer_id).ranges_ready(transfer_id, ranges)
                self._mark(transfer_id)
            case TellLanded(conn_id, transfer_id):
                self._send(conn_id, self._landed(transfer_id))
            case TellFailed(conn_id, transfer_id, reason, attempt):
                self._send(conn_id, FailureNotice(transfer_id, reason, attempt))
            case DropLanding(transfer_id, reason):
                self._hand_offs.landing_over(transfer_id, reason)
                self.io.drop(transfer_id, reason)
            case CancelOutbox(transfer_id, reason):
                self._carrier(transfer_id).cancel(transfer_id, reason)
            case RecordPrefillEnd(transfer_id):
                self._carrier(transfer_id).note_prefill_end(transfer_id)
            case OutcomeKnown(key):
                # In the loop's next turn: engines wait for what this one sends them.
                self._loop.call_soon(self._transfer_ended, key)
            case GaveUpOnEngine((kind, transfer_id)):
                logger.warning(
                    "%s %s: an engine did not release its memory", kind, transfer_id.hex()
                )

    def _landed(self, transfer_id: bytes) -> Landed:
        landing = self.table.landings.records[transfer_id]
        spec = landing.spec
        return Landed(
            transfer_id,
            spec.num_tokens,
            spec.token_digest,
            [(first, length) for first, length in landing.runs],
            spec.cached_tokens,
            self.bases.runs(transfer_id) if self.bases is not None else [],
            spec.window_step,
            spec.draft,
        )

    def _transfer_ended(self, key: Key) -> None:
        report = self.report(key)
        self._metrics.transfer_ended(report)
        kind, transfer_id = key
        if kind is Kind.LANDING:
            self._spans.landed(self.table.landings.records[transfer_id], report)
        else:
            self._spans.sent(self.table.outboxes.records[transfer_id], report)
        log = logger.debug if report.state == "complete" else logger.warning
        log("%s %s %s: %s", report.kind, report.transfer_id, report.state, report.error)
        for waiter in self._waiters.get(key, ()):
            if not waiter.done():
                waiter.set_result(None)
