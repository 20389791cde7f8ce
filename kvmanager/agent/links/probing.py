"""Probes: random bytes from one agent's sender to another's receiver, to measure the path.

A probe uses the same port, connections, tuning, TLS and checksums as KVCache. But it is no transfer
of the table and uses no arena: the sender reads from a small ring of memory, and the receiver keeps
nothing. It is sent behind the KVCache that requests wait for. Each end has a lease that `status`
renews, so that it ends and frees its memory when its caller goes away.

Use it on the agent's event loop; time is an argument.
"""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from kvmanager.agent.links.host_load import agent_load, kernel_tcp
from kvmanager.agent.probe_messages import (
    ProbeLanding,
    ProbeLandingReply,
    ProbeRole,
    ProbeSendReply,
    ProbeStatusReply,
)
from kvmanager.agent.sender_admission import AdmittedLanding
from kvmanager.agent.transfer_io import SendListener, TransferIo
from kvmanager.transfers.records import BadRequest, NoArenaRoom, UnknownTransfer
from transport import (
    ByteSpace,
    Endpoint,
    OutgoingSpec,
    OutgoingTransfer,
    Priority,
    TransferProgress,
    TransferState,
    TransportConfig,
)

RING_BYTES: Final = 32 << 20
MAX_PROBE_BYTES: Final = 8 << 30
MAX_PROBES: Final = 2
"""Most probes of each role at a time."""
MAX_LEASE_S: Final = 60.0
KEEP_S: Final = 30.0
"""Time for which an ended probe can still be asked for."""
TENANT: Final = "probe"

State = Literal["open", "complete", "failed", "cancelled"]
_STATES: Final[dict[TransferState, State]] = {
    TransferState.COMPLETE: "complete",
    TransferState.FAILED: "failed",
    TransferState.CANCELLED: "cancelled",
}


class RingSpace:
    """`nbytes` logical bytes that repeat `memory` (implements `transport.ByteSpace`).

    Only for reading, because bytes at the distance of the ring's size share memory.
    """

    def __init__(self, memory: memoryview, nbytes: int) -> None:
        self._memory = memory
        self.nbytes = nbytes

    def views(self, offset: int, length: int) -> list[memoryview]:
        """The memory of a logical range; ValueError outside [0, nbytes)."""
        _check_range(offset, length, self.nbytes)
        views = []
        while length:
            start = offset % len(self._memory)
            piece = self._memory[start : start + length]
            views.append(piece)
            offset += len(piece)
            length -= len(piece)
        return views


class SinkSpace:
    """`nbytes` logical bytes that nobody keeps (implements `transport.ByteSpace`). Each thread
    writes into memory of its own, so that it verifies the bytes that it wrote.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._own = threading.local()

    def views(self, offset: int, length: int) -> list[memoryview]:
        """Memory that this thread has until it asks again; ValueError outside [0, nbytes)."""
        _check_range(offset, length, self.nbytes)
        memory: memoryview | None = getattr(self._own, "memory", None)
        if memory is None or len(memory) < length:
            memory = self._own.memory = memoryview(bytearray(length))
        return [memory[:length]]


@dataclass(slots=True)
class _Probe:
    """One end. `space` is None once its memory is given back."""

    nbytes: int
    lease_until_s: float
    space: ByteSpace | None
    state: State = "open"
    error: str = ""
    done_bytes: int = 0
    ended_s: float = 0.0
    outgoing: OutgoingTransfer | None = None
    endpoint: Endpoint | None = None


class AgentProbes:
    """The probes of one agent. It raises the errors of the transfer table."""

    def __init__(self, io: TransferIo, config: TransportConfig, advertised: Endpoint) -> None:
        self._io = io
        self._config = config
        self._advertised = advertised
        self._landings: dict[bytes, _Probe] = {}
        self._sends: dict[bytes, _Probe] = {}

    def num_open(self, role: ProbeRole) -> int:
        """Probes of this role that hold memory."""
        return sum(probe.space is not None for probe in self._of(role).values())

    def open_landing(self, request: ProbeLanding, now_s: float) -> ProbeLandingReply:
        """Admit one sender to a landing that keeps nothing. Raises NoArenaRoom, BadRequest."""
        lease_s = self._admissible("landing", request.nbytes, request.lease_s)
        transfer_id, token, fingerprint = (secrets.token_bytes(size) for size in (16, 32, 32))
        space = SinkSpace(request.nbytes)
        self._landings[transfer_id] = _Probe(request.nbytes, now_s + lease_s, space)
        self._io.admit(transfer_id, AdmittedLanding(token, fingerprint, space))
        return ProbeLandingReply(
            transfer_id=transfer_id.hex(),
            token=token.hex(),
            fingerprint=fingerprint.hex(),
            host=self._advertised.host,
            port=self._advertised.port,
            lease_s=lease_s,
        )

    async def open_send(
        self,
        transfer_id: bytes,
        *,
        keys: tuple[bytes, bytes],
        endpoint: Endpoint,
        nbytes: int,
        lease_s: float,
        clock_s: Callable[[], float],
    ) -> ProbeSendReply:
        """Begin to send to a probe's landing; `keys` are its token and fingerprint.

        Raises NoArenaRoom, BadRequest, UnknownTransfer (ended before it began).
        """
        lease_s = self._admissible("send", nbytes, lease_s)
        if transfer_id in self._sends:
            raise BadRequest(f"probe {transfer_id.hex()} is being sent already")
        # A placeholder, so that the limit of probes counts this one while its content is made.
        empty = RingSpace(memoryview(b""), 0)
        probe = _Probe(nbytes, clock_s() + lease_s, empty, endpoint=endpoint)
        self._sends[transfer_id] = probe
        try:
            # On a thread: making 32 MiB of random bytes takes tens of milliseconds. No codec makes
            # them smaller.
            content = await asyncio.to_thread(os.urandom, RING_BYTES)
            if probe.state != "open":
                raise UnknownTransfer(f"the probe has ended already: {probe.error}")
            probe.space = RingSpace(memoryview(content), nbytes)
            spec = OutgoingSpec(
                transfer_id, *keys, endpoint, priority=Priority.REPLICATION, tenant=TENANT
            )
            listener = SendListener(self._io, self._send_ended, clock_s)
            probe.outgoing = self._io.open_probe(spec, probe.space, listener)
        # Also when cancelled: the placeholder must not count as a probe.
        except BaseException:
            self._sends.pop(transfer_id, None)
            raise
        probe.outgoing.ready(0, nbytes)
        return ProbeSendReply(lease_s)

    def status(
        self, transfer_id: bytes, role: ProbeRole, lease_s: float, now_s: float
    ) -> ProbeStatusReply:
        """The state of this end. Renews its lease. Raises UnknownTransfer, BadRequest."""
        probe = self._of(role).get(transfer_id)
        if probe is None:
            raise UnknownTransfer(
                f"no probe {transfer_id.hex()} here; its caller was away too long"
            )
        probe.lease_until_s = max(probe.lease_until_s, now_s + _checked_lease_s(lease_s))
        progress = self._progress(transfer_id, probe)
        if progress is not None:
            probe.done_bytes = progress.acked_bytes
        endpoint = probe.endpoint
        config = self._config
        return ProbeStatusReply(
            state=probe.state,
            error=probe.error,
            nbytes=probe.nbytes,
            done_bytes=probe.done_bytes,
            load=agent_load(now_s),
            kernel=kernel_tcp(),
            num_connections=progress.num_connections if progress is not None else 0,
            link=self._io.link_state(endpoint) if endpoint is not None else None,
            congestion=config.congestion or "",
            max_connections=max(config.num_connections, config.max_link_connections)
            if config.autotune
            else config.num_connections,
        )

    def end(self, transfer_id: bytes, reason: str, now_s: float) -> bool:
        """End both roles of this probe here. Returns whether one was alive."""
        # A list: `any` of a generator would stop at the first role that was alive.
        ended = [self._cancel(role, transfer_id, reason, now_s) for role in _ROLES]
        return any(ended)

    def landing_failed(self, transfer_id: bytes, reason: str) -> None:
        """Note why the receiver gave up a landing, if it is a probe's. `tick` ends the probe."""
        probe = self._landings.get(transfer_id)
        if probe is not None and not probe.error:
            probe.error = reason

    def tick(self, now_s: float) -> None:
        """End probes whose lease is over, and forget probes that have ended."""
        for role in _ROLES:
            probes = self._of(role)
            for transfer_id, probe in list(probes.items()):
                if role == "landing":
                    self._notice_end(transfer_id, probe, now_s)
                if probe.state == "open" and now_s >= probe.lease_until_s:
                    self._cancel(role, transfer_id, "its caller has gone away", now_s)
                is_over = probe.state != "open" and probe.space is None
                if is_over and now_s >= max(probe.ended_s + KEEP_S, probe.lease_until_s):
                    del probes[transfer_id]

    def close(self, now_s: float) -> None:
        """End everything."""
        for role in _ROLES:
            for transfer_id in self._of(role):
                self._cancel(role, transfer_id, "the agent is stopping", now_s)

    def _of(self, role: ProbeRole) -> dict[bytes, _Probe]:
        return self._landings if role == "landing" else self._sends

    def _progress(self, transfer_id: bytes, probe: _Probe) -> TransferProgress | None:
        if probe.endpoint is None:
            return self._io.landing_progress(transfer_id)
        return probe.outgoing.progress() if probe.outgoing is not None else None

    def _notice_end(self, transfer_id: bytes, probe: _Probe, now_s: float) -> None:
        """The receiver has ended a landing: nothing writes into it any more."""
        progress = self._io.landing_progress(transfer_id)
        if probe.state != "open" or progress is None or progress.state not in _STATES:
            return
        self._io.drop(transfer_id, "the probe is over")
        probe.done_bytes = progress.acked_bytes
        self._over(probe, _STATES[progress.state], probe.error, now_s)

    def _cancel(self, role: ProbeRole, transfer_id: bytes, reason: str, now_s: float) -> bool:
        probe = self._of(role).get(transfer_id)
        if probe is None or probe.state != "open":
            return False
        if role == "landing":
            self._io.drop(transfer_id, reason)  # its threads keep the memory until they are out
            self._over(probe, "cancelled", reason, now_s)
        else:
            probe.state, probe.error, probe.ended_s = "cancelled", reason, now_s
            if probe.outgoing is not None:
                probe.outgoing.cancel(reason)  # `_send_ended` follows
        return True

    def _send_ended(self, transfer_id: bytes, error: str | None, now_s: float) -> None:
        probe = self._sends.get(transfer_id)
        if probe is None:
            return
        if probe.outgoing is not None:
            probe.done_bytes = probe.outgoing.progress().acked_bytes
        if probe.state != "open":
            # It was cancelled; only now do the sender's threads read the memory no more.
            probe.space = None
        elif error is None:
            self._over(probe, "complete", "", now_s)
        else:
            self._over(probe, "failed", error, now_s)

    def _over(self, probe: _Probe, state: State, error: str, now_s: float) -> None:
        probe.state, probe.error, probe.ended_s = state, error, now_s
        probe.space = None

    def _admissible(self, role: ProbeRole, nbytes: int, lease_s: float) -> float:
        """The lease to give. Raises NoArenaRoom, BadRequest."""
        if not 0 < nbytes <= MAX_PROBE_BYTES:
            raise BadRequest(f"a probe of {nbytes} bytes; at most {MAX_PROBE_BYTES}")
        lease_s = _checked_lease_s(lease_s)
        if self.num_open(role) >= MAX_PROBES:
            raise NoArenaRoom(f"{MAX_PROBES} probes run here already; wait until one is over")
        return lease_s


_ROLES: Final[tuple[ProbeRole, ...]] = ("landing", "send")


def _checked_lease_s(lease_s: float) -> float:
    if not math.isfinite(lease_s) or lease_s <= 0:
        raise BadRequest(f"a lease of {lease_s} s")
    return min(lease_s, MAX_LEASE_S)


def _check_range(offset: int, length: int, nbytes: int) -> None:
    if offset < 0 or length < 0 or offset + length > nbytes:
        raise ValueError(f"[{offset}, {offset + length}) is outside of {nbytes} bytes")
