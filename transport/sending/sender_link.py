"""One link of a sender: all transfers to an endpoint, and the lanes that carry them.

The link owns the lock that guards `LinkCore`, and wakes lanes when there is work. It calls
listeners without that lock, from the lanes' threads or the sender's watchdog. Knows no frame and no
socket.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from transport.addresses import SockAddress
from transport.codec.coder import LinkCoder
from transport.config import TlsFiles, TransportConfig
from transport.endpoint import Endpoint
from transport.errors import LinkError, LocalError, TransportError
from transport.interfaces import ByteSpace, OutgoingSpec, TransferListener, TransferProgress
from transport.rotating import Rotating
from transport.sending.direct import DirectSending
from transport.sending.lane import Lane
from transport.sending.link import LinkCore
from transport.sending.link_meter import LinkMeter
from transport.sending.link_state import LinkState
from transport.sending.link_work import AbortConnection, Effect, Work
from transport.sending.outgoing import RAW_CODED, Coded, OutgoingState
from transport.sending.paths import LinkPath
from transport.sending.waiting_lanes import WaitingLanes
from transport.sockets import SocketOwner
from transport.tls import RegionTls
from transport.wire.handshake import Hello
from transport.wire.ranges import Range
from transport.wire.sender_session import Event

logger = logging.getLogger("prfaas.transport")

# Only a change of configuration or release helps against these, so transfers fail at once: after so
# many handshakes in a row. TLS says the same of a wrong peer and of a byte that was damaged on its
# way, which what says "version" has a checksum against.
_HOPELESS = {"version": 1, "tls": 2}


class SenderLink:
    """All connections and transfers to one endpoint. Public methods are thread-safe."""

    def __init__(
        self,
        endpoint: Endpoint,
        config: TransportConfig,
        tls: Rotating[TlsFiles, RegionTls] | None,
        *,
        instance: bytes,
        numbers: Iterator[int],
        stir: Callable[[], None],
        paths: Sequence[LinkPath] = (),
        host: str = "",
    ) -> None:
        """`numbers` gives rising numbers of connections. `stir` wakes the watchdog, which calls
        `tick`. `paths`: the ways to the endpoint; without, the endpoint itself. `host`:
        what its certificate must name; "": the endpoint's host.
        """
        self.endpoint = endpoint
        self.host = host or endpoint.host
        self.paths = tuple(paths) or (LinkPath(endpoint),)
        # Each path gets a connection.
        config = replace(config, num_connections=max(config.num_connections, len(self.paths)))
        self.config = config
        self.tls = tls
        self.instance = instance
        self._stir = stir
        self.idle_since_s = time.monotonic()
        self._core = LinkCore(config, str(endpoint))
        self.coder = LinkCoder(config, str(endpoint))
        self._meter = LinkMeter(config, self.coder)
        self.lock = threading.Lock()
        self._waiting: WaitingLanes[Lane] = WaitingLanes()
        self._direct = DirectSending(self.lock, self._core, self._waiting, self.coder)
        self._wanted = threading.Condition(self.lock)
        self._acked = threading.Condition(self.lock)
        self._num_waiting = 0
        self._parties: dict[OutgoingState, tuple[ByteSpace, TransferListener]] = {}
        self._lanes: dict[int, Lane] = {}  # by the id of their present connection
        self._numbers = numbers
        self._warm_until_s = 0.0
        self.addresses: dict[Endpoint, list[SockAddress]] = {}
        """Of each path that was tried; the one that was good last comes first."""
        # Handshakes since the last good one that ended in one of _HOPELESS, by address.
        self._hopeless: Counter[SockAddress | None] = Counter()
        self._closing = False
        self._someone_paces = False  # whether a lane waits for a budget on behalf of all
        self._threads: list[threading.Thread] = []
        self._grow_to(config.num_connections)

    # Called by the sender and its transfers.

    def open(
        self, spec: OutgoingSpec, space: ByteSpace, listener: TransferListener
    ) -> OutgoingState:
        """Raises ValueError when the id is in use."""
        with self.lock:
            transfer = self._core.add(spec, space.nbytes, time.monotonic())
            self._parties[transfer] = space, listener
            self._waiting.wake()
            self._wanted.notify_all()
        self._stir()
        return transfer

    def warm(self) -> None:
        with self.lock:
            self._warm_until_s = time.monotonic() + self.config.idle_timeout_s
            self._wanted.notify_all()
        self._stir()

    def ready(self, transfer: OutgoingState, ranges: Iterable[Range]) -> None:
        """[start, end) of each range may be sent."""
        with self.lock:
            now_s = time.monotonic()
            gained = sum(self._core.ready(transfer, *each, now_s) for each in ranges)
            loan = self._direct.begin(transfer, now_s) if gained else None
            if gained and loan is None:
                self._waiting.wake(1 + gained // self.config.frame_bytes)
        if loan is not None:
            self._direct.send(loan)

    def cancel(self, transfer: OutgoingState, reason: str) -> None:
        with self.lock:
            self._core.cancel(transfer, LocalError("cancelled", reason), time.monotonic())
            self._waiting.wake_all()
        self._stir()

    def wait_acked(self, transfer: OutgoingState, num_bytes: int, timeout_s: float) -> bool:
        with self.lock:
            self._num_waiting += 1
            try:
                self._acked.wait_for(
                    lambda: transfer.acked.total >= num_bytes or transfer.ended, timeout_s
                )
            finally:
                self._num_waiting -= 1
            return transfer.acked.total >= num_bytes

    def progress(self, transfer: OutgoingState) -> TransferProgress:
        with self.lock:
            return transfer.progress(self._core.num_connections)

    # Called by the watchdog.

    def tick(self, now_s: float) -> None:
        """Apply timeouts and report what ended."""
        with self.lock:
            for connection, lane in self._lanes.items():
                stream = lane.stream
                if stream is not None:
                    self._core.kernel_queue(connection, stream.unsent_bytes(), now_s)
                # Read once, since the lane may clear it now.
                if (deadline_s := lane.deadline_s) is not None and now_s >= deadline_s:
                    lane.abort(LinkError("handshake_timeout", "no answer to HELLO"))
            self._core.expire(now_s)
            # A warm link stays open without transfers, as if it had some.
            if self._core.has_transfers or now_s < self._warm_until_s:
                self.idle_since_s = now_s
            effects = self._pop_effects()
        self.perform(effects)

    def tune(self, now_s: float) -> None:
        """Feed the link's meter and apply what it finds."""
        with self.lock:
            streams = self._streams()
            is_backlogged = self._core.dispatch.is_backlogged
        self._meter.tell_coder(is_backlogged=is_backlogged, now_s=now_s)
        # Each costs a system call, so they are read without the lock that lanes need.
        read = {number: stream.tcp_info() for number, stream in streams.items()}
        infos = {number: info for number, info in read.items() if info is not None}
        with self.lock:
            is_backlogged = self._core.dispatch.is_backlogged
            self._meter.observe(infos, is_backlogged=is_backlogged, now_s=now_s)
            self._core.dispatch.frame_bytes = self._meter.frame_bytes
            self._grow_to(self._meter.width)
            if self._core.dispatch.width != self._meter.width:
                self._core.dispatch.width = self._meter.width
                self._waiting.wake_all()
        self._meter.grow_buffers(streams)

    def state(self) -> LinkState:
        with self.lock:
            standing = self._core.connections()
            streams = {n: stream for n, stream in self._streams().items() if n in standing}
            carrying = frozenset(filter(self._core.carries_data, standing))
            backlog = self._core.backlog(time.monotonic())
            acked, trouble = self._core.acked_bytes, self._core.trouble
        name = str(self.endpoint)
        return self._meter.state(
            name, streams, carrying, acked_bytes=acked, backlog=backlog, trouble=trouble
        )

    def _streams(self) -> dict[int, SocketOwner]:
        return {
            connection: lane.stream
            for connection, lane in self._lanes.items()
            if lane.stream is not None and lane.deadline_s is None
        }

    def _grow_to(self, width: int) -> None:
        # Whoever closes the link waits for the threads that it had then.
        if self._closing:
            return
        for index in range(len(self._threads), width):
            name = f"prfaas-send-{self.endpoint}-{index}"
            thread = threading.Thread(target=Lane(self, index).run, name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # no more threads; `tune` tries again
                logger.error("cannot add a connection to %s: %s", self.endpoint, error)
                return
            self._threads.append(thread)

    @property
    def is_active(self) -> bool:
        """Whether timeouts are running."""
        with self.lock:
            return self._core.has_transfers or len(self._lanes) > self._core.num_connections

    @property
    def has_transfers(self) -> bool:
        with self.lock:
            return self._core.has_transfers

    @property
    def num_connections(self) -> int:
        with self.lock:
            return self._core.num_connections

    def close(self) -> None:
        """Fail all transfers and end all threads; `join` waits for them."""
        with self.lock:
            self._closing = True
            self._core.broken(LocalError("closed", "the sender was closed"), time.monotonic())
            self._acked.notify_all()
            for lane in self._lanes.values():
                lane.abort(LocalError("closed", "the sender was closed"))
            self._waiting.wake_all()
            self._wanted.notify_all()

    def join(self, deadline_s: float) -> bool:
        """Wait for the threads; False when one is still alive at the deadline."""
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    # Called by the lanes.

    def wait_wanted(self, delay_s: float) -> bool:
        """Wait until a connection is wanted, at least `delay_s`; False when the link closes."""
        earliest_s = time.monotonic() + delay_s
        with self.lock:
            while not self._closing:
                now_s = time.monotonic()
                is_wanted = self._core.has_transfers or now_s < self._warm_until_s
                if is_wanted and now_s >= earliest_s:
                    return True
                self._wanted.wait(earliest_s - now_s if now_s < earliest_s else None)
            return False

    def begin(self, lane: Lane) -> int:
        """A new connection id for this lane; raises LocalError("closed")."""
        with self.lock:
            if self._closing:
                raise LocalError("closed", "the sender was closed")
            connection = next(self._numbers)
            self._lanes[connection] = lane
            lane.began_s = time.monotonic()
            return connection

    def established(self, connection: int, peer: Hello) -> None:
        with self.lock:
            self._hopeless.clear()
            good = self._lanes[connection].address
            for found in self.addresses.values():
                found.sort(key=lambda address: address != good)
            self._core.connected(connection, peer, time.monotonic())
            self._waiting.wake_all()  # an older connection may put a waiting one on standby
            effects = self._pop_effects()
        self.perform(effects)

    def next_work(
        self, lane: Lane, done: Work | None, *, whole: bool = True, coded: Coded = RAW_CODED
    ) -> Work:
        """End the work `done` and wait for the next, or for what a loan of the lane left over.
        Raises the error that ended the connection.
        """
        while True:
            with self.lock:
                if done is not None:
                    now_s = time.monotonic()
                    self._core.sent(lane.connection, done, now_s, whole=whole, coded=coded)
                    done = None
                if lane.left_over is not None:
                    return lane.left_over
                if lane.error is not None:
                    raise lane.error
                now_s = time.monotonic()
                work = self._core.take(lane.connection, now_s)
                effects = self._pop_effects()
                if work is None and not effects:
                    self._wait_for_work(lane, now_s)
                elif work is not None and self._core.dispatch.has_budgets:
                    self._waiting.wake()  # there may be enough for another lane
            self.perform(effects)
            if work is not None:
                return work

    def _wait_for_work(self, lane: Lane, now_s: float) -> None:
        """Sleep until there is work, or until pacing allows more; one lane watches the clock for
        all. `now_s` is the time at which there was no work: at a later time pacing might already
        allow more, and the lane would not wait for a time.
        """
        # A lane that carries no data would take a wake-up for work and not do the work.
        is_standby = not self._core.carries_data(lane.connection)
        delay_s = None
        if not is_standby and not self._someone_paces:
            delay_s = self._core.dispatch.delay_s(now_s)
        self._someone_paces |= delay_s is not None
        self._waiting.sleep(lane, delay_s, is_standby=is_standby)
        if delay_s is not None:
            self._someone_paces = False
            self._waiting.wake()

    def sent(self, lane: Lane, work: Work, *, whole: bool = True, coded: Coded = RAW_CODED) -> None:
        """The lane has stopped reading the bytes of `work`. `whole`: the kernel took them all."""
        with self.lock:
            self._core.sent(lane.connection, work, time.monotonic(), whole=whole, coded=coded)

    def unreadable(self, work: Work, error: Exception) -> None:
        """The ByteSpace raised: end the transfer at both ends."""
        logger.error("ByteSpace of %s raised", work.transfer.spec.transfer_id.hex(), exc_info=error)
        message = f"the sender's memory could not be read: {type(error).__name__}: {error}"
        with self.lock:
            self._core.cancel(work.transfer, LocalError("space", message), time.monotonic())

    def space(self, transfer: OutgoingState) -> ByteSpace:
        return self._parties[transfer][0]

    def ended(self, connection: int, error: TransportError, *, in_handshake: bool) -> None:
        """The lane's connection has been closed."""
        with self.lock:
            lane = self._lanes.pop(connection, None)
            self._core.disconnected(connection, error)
            # Such a refusal stays until somebody changes something. It ends the transfers that were
            # open when the connection was begun; later ones may find a repaired receiver.
            # One of several addresses may lead elsewhere, while the others are good.
            unknown: list[SockAddress | None] = [None]
            ways = [way for path in self.paths for way in self.addresses.get(path.to, unknown)]
            works = len(ways) > 1 and self._core.num_connections > 0
            if lane is not None and in_handshake and error.code in _HOPELESS and not works:
                self._hopeless[lane.address] += 1
                if all(self._hopeless[way] >= _HOPELESS[error.code] for way in ways):
                    self._core.broken(error, time.monotonic(), since_s=lane.began_s)
                    self._warm_until_s = 0.0
            self._waiting.wake_all()
            effects = self._pop_effects()
        self.perform(effects)

    def handle(self, lane: Lane, events: Iterable[Event]) -> None:
        """Process the receiver's events on this lane. Raises PeerError when it broke the rules."""
        effects: list[Effect] = []
        try:
            with self.lock:
                try:
                    for event in events:
                        self._core.handle(lane.connection, event, time.monotonic())
                finally:
                    if self._num_waiting:
                        self._acked.notify_all()
                    effects = self._pop_effects()
        finally:
            # Also when a later event broke the rules: what ended before that must be reported.
            self.perform(effects)

    def fail_lane(self, lane: Lane, error: TransportError) -> None:
        """The reader found the connection ended."""
        with self.lock:
            lane.abort(error)
            self._waiting.wake_all()

    def _pop_effects(self) -> list[Effect]:
        """Take the core's effects; called with the lock."""
        # One may be the end of a transfer, for which threads in `wait_acked` must wake up.
        effects = self._core.pop_effects()
        if effects and self._num_waiting:
            self._acked.notify_all()
        return effects

    def perform(self, effects: list[Effect]) -> None:
        """Perform the core's effects; called without the lock."""
        for effect in effects:
            if isinstance(effect, AbortConnection):
                with self.lock:
                    lane = self._lanes.get(effect.connection)
                    if lane is not None:
                        lane.abort(effect.error)
                        self._waiting.wake_all()
            else:
                self._report(effect.transfer)

    def _report(self, transfer: OutgoingState) -> None:
        transfer_id = transfer.spec.transfer_id
        _, listener = self._parties.pop(transfer)
        try:
            if transfer.error is None:
                listener.on_complete(transfer_id)
            else:
                listener.on_failed(transfer_id, transfer.error)
        # A listener that raises must not end this thread, which serves other transfers.
        except Exception:
            logger.exception("listener raised for transfer %s", transfer_id.hex())
