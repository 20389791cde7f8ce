"""Whatever a link is asked to do, its books balance at every step and its transfers can end."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from transport_doubles import make_spec

from transport.config import TransportConfig
from transport.errors import LinkError, LocalError
from transport.interfaces import Priority, TransferState
from transport.sending.link import LinkCore
from transport.sending.link_work import TransferEnded, Work
from transport.sending.outgoing import OutgoingState
from transport.wire.handshake import own_hello

CONFIG = TransportConfig(frame_bytes=100, idle_timeout_s=1000)
PEER = own_hello(b"R" * 16, 1 << 20)
MOVES = ["add", "ready", "take", "take", "sent", "lose", "connect", "acked", "width", "cancel"]


class RandomUse:
    """A link, and everything that an owner may do to it, drawn at random."""

    def __init__(self, seed: int, config: TransportConfig) -> None:
        self.rng = random.Random(seed)
        self.link = LinkCore(config, "test:1")
        self.transfers: list[OutgoingState] = []
        self.taken: dict[int, Work] = {}
        self.now_s = 0.0
        self.num_connected = 0

    def move(self) -> None:
        self.now_s += self.rng.choice([0.0, 0.0, 0.02])
        getattr(self, self.rng.choice(MOVES))()

    def add(self) -> None:
        if len(self.transfers) == 6:
            return
        spec = replace(
            make_spec(len(self.transfers) + 1),
            priority=self.rng.choice(list(Priority)),
            tenant=self.rng.choice("ab"),
            digest=self.rng.random() < 0.5,
        )
        self.transfers.append(self.link.add(spec, self.rng.choice([0, 50, 700]), self.now_s))

    def ready(self) -> None:
        if self.transfers:
            transfer = self.rng.choice(self.transfers)
            start = self.rng.randrange(transfer.nbytes + 1)
            self.link.ready(transfer, start, min(transfer.nbytes, start + 150), self.now_s)

    def take(self) -> None:
        connection = self.any_connection()
        if connection is None or connection in self.taken:
            return
        work = self.link.take(connection, self.now_s)
        if work is not None:
            self.taken[connection] = work

    def sent(self) -> None:
        if self.taken:
            connection = self.rng.choice(list(self.taken))
            self.link.sent(
                connection, self.taken.pop(connection), self.now_s, whole=self.rng.random() < 0.9
            )

    def lose(self) -> None:
        connection = self.any_connection()
        if connection is None or self.rng.random() < 0.7:
            return
        if connection in self.taken:
            self.link.sent(connection, self.taken.pop(connection), self.now_s, whole=False)
        self.link.disconnected(connection, LinkError("lost", "test"))

    def connect(self) -> None:
        if self.link.num_connections < 5:
            self.num_connected += 1
            self.link.connected(self.num_connected, PEER, self.now_s)

    def acked(self) -> None:
        connection = self.any_connection()
        if connection is None or not self.transfers:
            return
        transfer = self.rng.choice(self.transfers)
        start = self.rng.randrange(transfer.nbytes + 1)
        if transfer.was_taken(start, start + 60):
            ranges = [(start, start + 60)]
            self.link.acked(connection, transfer.spec.transfer_id, ranges, self.now_s)

    def width(self) -> None:
        self.link.dispatch.width = self.rng.randrange(1, 5)
        self.link.dispatch.frame_bytes = self.rng.choice([100, 400])

    def cancel(self) -> None:
        if self.transfers and self.rng.random() < 0.1:
            error = LocalError("cancelled", "test")
            self.link.cancel(self.rng.choice(self.transfers), error, self.now_s)

    def any_connection(self) -> int | None:
        connections = self.link.connections()
        return self.rng.choice(connections) if connections else None

    def send_all(self) -> None:
        """Let everything that is ready be sent."""
        for connection in list(self.taken):
            self.link.sent(connection, self.taken.pop(connection), self.now_s, whole=True)
        delay_s: float | None = 0.0
        while delay_s is not None:
            self.now_s += delay_s
            for connection in self.link.connections():
                while (work := self.link.take(connection, self.now_s)) is not None:
                    self.link.sent(connection, work, self.now_s, whole=True)
            delay_s = self.link.dispatch.delay_s(self.now_s)

    def check(self) -> None:
        self.link.check_invariants()
        delay_s = self.link.dispatch.delay_s(self.now_s)
        assert delay_s is None or delay_s > 0
        for effect in self.link.pop_effects():
            assert isinstance(effect, TransferEnded)
            assert not effect.transfer.pinned


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 1 << 30), st.sampled_from([0.0, 5000.0]), st.sampled_from([0.0, 3000.0]))
def test_the_books_balance_at_every_step(seed: int, pace: float, budget: float) -> None:
    use = RandomUse(seed, replace(CONFIG, pace_bytes_per_s=pace, tenant_bytes_per_s=budget))
    for _ in range(250):
        use.move()
        use.check()
    link, last = use.link, 1000
    link.connected(last, PEER, use.now_s)
    for transfer in use.transfers:
        link.ready(transfer, 0, transfer.nbytes, use.now_s)
    use.send_all()
    assert not link.dispatch.is_backlogged
    for transfer in use.transfers:
        assert not transfer.has_control
        if transfer.state is TransferState.CANCELLING:
            link.cancel_acked(last, transfer.spec.transfer_id, use.now_s)
        link.completed(last, transfer.spec.transfer_id, use.now_s)
        assert transfer.ended
    use.check()
    assert not link.has_transfers
