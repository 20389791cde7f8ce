"""What probes ask of an agent's `TransferIo`, without connections."""

import asyncio
from typing import Any

from kvmanager.agent.sender_admission import AdmittedLanding
from transport import Endpoint, OutgoingSpec, TransferProgress


class FakeOutgoing:
    """A transfer of which a test says how it goes."""

    def __init__(self, progress: TransferProgress) -> None:
        self.ready_ranges: list[tuple[int, int]] = []
        self.cancelled: list[str] = []
        self._progress = progress

    def ready(self, offset: int, length: int) -> None:
        self.ready_ranges.append((offset, length))

    def cancel(self, reason: str) -> None:
        self.cancelled.append(reason)

    def progress(self) -> TransferProgress:
        return self._progress


class FakeIo:
    """Every transfer that it opens is `outgoing`; with `ends` it is complete soon after."""

    def __init__(self, progress: TransferProgress, *, ends: bool) -> None:
        self.admitted: dict[bytes, Any] = {}
        self.dropped: dict[bytes, str] = {}
        self.landing: TransferProgress | None = None
        self.opened: list[tuple[OutgoingSpec, Any, Any]] = []
        self.outgoing = FakeOutgoing(progress)
        self._ends = ends

    def admit(self, transfer_id: bytes, landing: AdmittedLanding) -> None:
        self.admitted[transfer_id] = landing.space

    def drop(self, transfer_id: bytes, reason: str) -> None:
        self.dropped[transfer_id] = reason

    def landing_progress(self, transfer_id: bytes) -> TransferProgress | None:
        return self.landing

    def open_probe(self, spec: OutgoingSpec, space: Any, listener: Any) -> FakeOutgoing:
        self.opened.append((spec, space, listener))
        if self._ends:
            asyncio.get_running_loop().call_soon(listener.on_complete, spec.transfer_id)
        return self.outgoing

    def link_state(self, endpoint: Endpoint) -> None:
        return None

    def post(self, function: Any, *arguments: object) -> None:
        function(*arguments)
