"""The agent's Sender and Receiver, with their threads bridged to the event loop.

It decides nothing about a transfer. It carries out what the transfer table asks for, and reports
each event once, on the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvmanager.agent.messages import LinkStatus
from kvmanager.agent.sender_admission import AdmittedLanding, SenderAdmission, TransferNews
from kvmanager.transfers.records import BadRequest
from transport import (
    ByteSpace,
    Endpoint,
    LinkPath,
    LinkState,
    OutgoingSpec,
    OutgoingTransfer,
    Receiver,
    Refused,
    Sender,
    TransferListener,
    TransferProgress,
    TransportConfig,
    TransportError,
)

DROP_THREADS = 4


@dataclass(slots=True)
class OutboxSend:
    """The sending of one outbox. `sent_at_prefill_end` is None until the prefill has ended."""

    handle: OutgoingTransfer
    endpoint: Endpoint
    ended: asyncio.Future[None]
    sent_at_prefill_end: int | None = None


@dataclass(frozen=True, slots=True)
class OutboxProgress:
    """The progress of an outbox. `sent_at_prefill_end` is None until the prefill has ended."""

    transfer: TransferProgress
    sent_at_prefill_end: int | None


class TransferIo:
    """Runs the sockets. Construct and use it on the event loop that `news` must be called on."""

    def __init__(
        self,
        config: TransportConfig,
        bind: Endpoint,
        news: TransferNews,
        on_refused: Callable[[str], None],
        *,
        send_to: Collection[Endpoint] | None = None,
        routes: Mapping[Endpoint, Sequence[LinkPath]] | None = None,
        hosts: Mapping[Endpoint, str] | None = None,
    ) -> None:
        """`send_to`: the only endpoints that it connects to; None: any. `routes`: the paths to
        endpoints of hosts with several addresses; `hosts` is as in `Sender`. Raises
        transport.LocalError when TLS files cannot be used.
        """
        self.send_to = None if send_to is None else frozenset(send_to)
        self._loop = asyncio.get_running_loop()
        self._news = news
        self._admission = SenderAdmission(news, self.post, on_refused)
        self._sender = Sender(config, routes, hosts)
        self._receiver = Receiver(bind, config, self._admission)
        self._outgoing: dict[bytes, OutboxSend] = {}
        self._droppers = ThreadPoolExecutor(DROP_THREADS, thread_name_prefix="prfaas-drop")
        self._dropping: set[asyncio.Future[None]] = set()
        self._stopped = False

    def start(self) -> Endpoint:
        """Listen, and return the real address. Raises transport.LocalError("bind")."""
        self._receiver.start()
        return self._receiver.endpoint

    async def settle(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` until every drop and every outbox has ended."""
        busy = {*self._dropping, *(outgoing.ended for outgoing in self._outgoing.values())}
        if busy:
            await asyncio.wait(busy, timeout=timeout_s)

    async def stop(self) -> None:
        """Close both ends. Events of open transfers may or may not follow."""
        self._stopped = True
        # On threads: closing waits for the transport's own threads.
        await asyncio.to_thread(self._sender.close)
        await asyncio.to_thread(self._receiver.close)
        self._droppers.shutdown()

    # Landings.

    def admit(self, transfer_id: bytes, landing: AdmittedLanding) -> None:
        """Admit the landing's sender from now on."""
        self._admission.admit(transfer_id, landing)

    def admit_engine(
        self, transfer_id: bytes, token: bytes, fingerprint: bytes, nbytes: int
    ) -> None:
        """Let an engine of this agent fill the landing, and no sender after it. Raises BadRequest
        for what a sender would be refused for.
        """
        try:
            self._admission.take(transfer_id, token, fingerprint, nbytes)
        except Refused as error:
            raise BadRequest(f"{error.code}: {error.message}") from error

    def drop(self, transfer_id: bytes, reason: str) -> None:
        """Make the receiver forget the transfer. `landing_dropped` follows, unless stopped."""
        if self._stopped:
            return
        self._admission.revoke(transfer_id)
        # On a thread: `Receiver.drop` waits until no other thread writes into the memory.
        future = self._loop.run_in_executor(
            self._droppers, self._receiver.drop, transfer_id, reason
        )
        self._dropping.add(future)
        future.add_done_callback(lambda done: self._dropped(done, transfer_id))

    def landing_progress(self, transfer_id: bytes) -> TransferProgress | None:
        return self._receiver.progress(transfer_id)

    @property
    def is_listening(self) -> bool:
        """Whether senders can connect."""
        return self._receiver.is_listening

    @property
    def num_received_connections(self) -> int:
        return self._receiver.num_connections

    @property
    def num_turned_away(self) -> int:
        return self._receiver.num_turned_away

    # Outboxes.

    def open(self, spec: OutgoingSpec, space: ByteSpace) -> None:
        """Begin to send. `outbox_ended` follows, unless this raises BadRequest, ValueError or
        RuntimeError.
        """
        self._check(spec.endpoint)
        listener = SendListener(self, self._send_ended, now_s)
        handle = self._sender.open(spec, space, listener)
        self._outgoing[spec.transfer_id] = OutboxSend(
            handle, spec.endpoint, self._loop.create_future()
        )

    def open_probe(
        self, spec: OutgoingSpec, space: ByteSpace, listener: TransferListener
    ) -> OutgoingTransfer:
        """Begin to send something other than an outbox. A transport thread tells `listener`, and
        not `news`, of its end. Raises as `open` does.
        """
        self._check(spec.endpoint)
        return self._sender.open(spec, space, listener)

    def _check(self, endpoint: Endpoint) -> None:
        # A caller could otherwise let this agent try any port that it reaches.
        if self.send_to is not None and endpoint not in self.send_to:
            known = ", ".join(sorted(map(str, self.send_to))) or "nowhere"
            raise BadRequest(f"this agent sends to {known} (send_to), not to {endpoint}")

    def link_state(self, endpoint: Endpoint) -> LinkState | None:
        """The sender's state of its link to this endpoint; None when there is none."""
        return self._sender.link_state(endpoint)

    def link_activity(self) -> dict[Endpoint, bool]:
        """The endpoints that the sender has links to, and whether each has transfers."""
        return self._sender.link_activity()

    def warm(self, endpoint: Endpoint) -> None:
        """Connect now. Raises RuntimeError after `stop`."""
        self._sender.warm(endpoint)

    def ranges_ready(self, transfer_id: bytes, ranges: list[tuple[int, int]]) -> None:
        self._outgoing[transfer_id].handle.ready_ranges(ranges)

    def cancel(self, transfer_id: bytes, reason: str) -> None:
        self._outgoing[transfer_id].handle.cancel(reason)

    def note_prefill_end(self, transfer_id: bytes) -> None:
        outgoing = self._outgoing[transfer_id]
        outgoing.sent_at_prefill_end = outgoing.handle.progress().sent_bytes

    def progress(self, transfer_id: bytes) -> OutboxProgress | None:
        """The progress of an outbox, until `forget`."""
        outgoing = self._outgoing.get(transfer_id)
        if outgoing is None:
            return None
        return OutboxProgress(outgoing.handle.progress(), outgoing.sent_at_prefill_end)

    def retransmitted_bytes(self, transfer_id: bytes) -> int:
        """The bytes that TCP has sent again on the connections of an outbox's link, for all of its
        transfers. It may begin anew where connections are made anew.
        """
        outgoing = self._outgoing.get(transfer_id)
        state = None if outgoing is None else self._sender.link_state(outgoing.endpoint)
        connections = () if state is None else state.connections
        return sum(connection.info.retransmitted_bytes for connection in connections)

    def forget(self, transfer_id: bytes) -> None:
        """Forget an outbox, whose report nobody will ask for any more."""
        self._outgoing.pop(transfer_id, None)

    def links(self, open_ids: set[bytes]) -> list[LinkStatus]:
        """The endpoints that the given outboxes send to."""
        found: dict[Endpoint, LinkStatus] = {}
        for transfer_id in open_ids:
            outgoing = self._outgoing.get(transfer_id)
            if outgoing is None:
                continue
            endpoint = outgoing.endpoint
            progress = outgoing.handle.progress()
            before = found.get(endpoint)
            unacked = progress.sent_bytes - progress.acked_bytes
            found[endpoint] = LinkStatus(
                str(endpoint),
                1 + (before.num_transfers if before else 0),
                self._sender.num_connections(endpoint),
                max(0, unacked) + (before.unacked_bytes if before else 0),
            )
        return [found[endpoint] for endpoint in sorted(found, key=str)]

    # From other threads.

    def post(self, function: Callable[..., None], *arguments: object) -> None:
        """Call a function on the loop, from any thread. Events after the loop's end are dropped."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)

    def _send_ended(self, transfer_id: bytes, error: str | None, _ended_s: float) -> None:
        self._news.outbox_ended(transfer_id, error)
        outgoing = self._outgoing.get(transfer_id)
        if outgoing is not None and not outgoing.ended.done():
            outgoing.ended.set_result(None)

    def _dropped(self, future: asyncio.Future[None], transfer_id: bytes) -> None:
        self._dropping.discard(future)
        # A drop that failed raises here: its threads may still write, so the landing is not
        # reported as dropped.
        if not future.cancelled():
            future.result()
        self._news.landing_dropped(transfer_id)


class SendListener:
    """Posts the end of a send from sender threads to the loop: None or an error, and the time."""

    def __init__(
        self,
        io: TransferIo,
        ended: Callable[[bytes, str | None, float], None],
        clock_s: Callable[[], float],
    ) -> None:
        self._io = io
        self._ended = ended
        self._clock_s = clock_s

    def on_complete(self, transfer_id: bytes) -> None:
        self._io.post(self._ended, transfer_id, None, self._clock_s())

    def on_failed(self, transfer_id: bytes, error: TransportError) -> None:
        message = f"{error.code}: {error.message}"
        self._io.post(self._ended, transfer_id, message, self._clock_s())


def now_s() -> float:
    """The clock of the agent and of the transport's progress snapshots."""
    return time.monotonic()
