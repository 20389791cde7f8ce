"""The connections of one link: which carry DATA, what is unacknowledged, and which are silent.

Pure state, guarded by the link that owns it; time is an argument. It knows which transfers have
bytes in flight, but not in which order they are sent or how they end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from transport.sending.outgoing import OutgoingState
from transport.wire.handshake import Hello


@dataclass(slots=True)
class _Connection:
    peer: Hello
    progress_s: float
    heard_s: float
    """When the receiver last sent something on this connection."""
    kernel_queue_bytes: int = 0
    aborted: bool = False
    in_flight: set[bytes] = field(default_factory=set)
    """Transfers of which this connection has unacknowledged bytes."""


class LinkConnections:
    """The open connections by number. Calls about any other number do nothing."""

    def __init__(self, ack_timeout_s: float) -> None:
        self._ack_timeout_s = ack_timeout_s
        self._connections: dict[int, _Connection] = {}

    def __len__(self) -> int:
        return len(self._connections)

    def __iter__(self) -> Iterator[int]:
        return iter(self._connections)

    def add(self, connection: int, peer: Hello, now_s: float) -> None:
        self._connections[connection] = _Connection(peer, now_s, now_s)

    def remove(self, connection: int) -> None:
        self._connections.pop(connection, None)

    def peer(self, connection: int) -> Hello:
        """The receiver's HELLO on this connection. Raises KeyError when it is not open."""
        return self._connections[connection].peer

    def may_send(self, connection: int) -> bool:
        """Whether it is open and not aborted."""
        state = self._connections.get(connection)
        return state is not None and not state.aborted

    def carries_data(self, connection: int, width: int) -> bool:
        """Whether it is one of the `width` oldest."""
        if len(self._connections) <= width:
            return True
        # Connections are numbered as they are made, so the oldest ones come first.
        return connection in sorted(self._connections)[:width]

    def took(self, connection: int, transfer: OutgoingState, now_s: float) -> None:
        """A chunk of the transfer goes out on this connection and awaits its acknowledgement."""
        state = self._connections[connection]
        # An idle connection awaits no acknowledgement, so its silence only counts from here on.
        if not state.in_flight:
            state.progress_s = now_s
        state.in_flight.add(transfer.spec.transfer_id)

    def settle(self, transfer: OutgoingState) -> None:
        """Forget the transfer on each connection that has none of its bytes in flight any more."""
        transfer_id = transfer.spec.transfer_id
        for connection, state in self._connections.items():
            if transfer.ended or not transfer.is_in_flight(connection):
                state.in_flight.discard(transfer_id)

    def heard(self, connection: int, now_s: float) -> None:
        """The receiver sent something on this connection."""
        state = self._connections.get(connection)
        if state is not None:
            state.progress_s = state.heard_s = now_s

    def kernel_queue(self, connection: int, num_bytes: int, now_s: float) -> None:
        """The kernel's send queue of this connection holds `num_bytes`."""
        state = self._connections.get(connection)
        # TCP acknowledgements shrink the queue, so a change shows that the path still works.
        if state is not None and state.kernel_queue_bytes != num_bytes:
            state.kernel_queue_bytes = num_bytes
            state.progress_s = now_s

    def abort(self, connection: int) -> bool:
        """Give it nothing more to send. False if that was so already."""
        if not self.may_send(connection):
            return False
        self._connections[connection].aborted = True
        return True

    def silent(self, now_s: float) -> Iterator[tuple[int, str]]:
        """The connections to close, each with the reason: those that wait too long for an
        acknowledgement, and idle ones that have heard nothing since such a wait began.
        """
        # What breaks one connection of a path usually breaks the idle ones too. Without this, each
        # of them would cost a timeout of its own when it is used next.
        for connection, state in self._connections.items():
            if not state.in_flight or now_s - state.progress_s < self._ack_timeout_s:
                continue
            yield connection, f"no acknowledgement for {self._ack_timeout_s:g} s"
            for other, idle in self._connections.items():
                if not idle.in_flight and idle.heard_s <= state.progress_s:
                    yield other, "idle since before another connection fell silent"

    def check_invariants(self, transfer: OutgoingState) -> None:
        """Raise AssertionError unless the books agree with those of the transfer."""
        for connection, state in self._connections.items():
            is_noted = transfer.spec.transfer_id in state.in_flight
            assert is_noted == transfer.is_in_flight(connection), "wrong about what is in flight"
