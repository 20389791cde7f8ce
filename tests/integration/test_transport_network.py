"""Whatever the network does, transfers between a real sender and a real receiver end with the right
bytes, once, and their memory is free afterwards.

The steps are hypothesis's and shrink; what the threads of both ends do between them is not. So
nothing that is drawn depends on it, and a failure that does not come again is a failure still.
"""

from __future__ import annotations

import random
import time
from contextlib import closing
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from transport_loopback import Census, eventually
from transport_network import Network, NetworkTransfer

from transport import Priority, TransportConfig
from transport.testing.proxy import BOTH, Direction, Fault

CONFIG = TransportConfig(
    num_connections=3,
    autotune=False,
    frame_bytes=700,
    max_frame_bytes=900,
    ack_batch_bytes=1500,
    drop_grace_s=0,
    handshake_timeout_s=1,
    ack_timeout_s=0.1,
    idle_timeout_s=30,
    reconnect_first_s=0.001,
    reconnect_max_s=0.002,
)
MAX_TRANSFERS = 4
PIECE_BYTES = 250
LONGER_THAN_ACK_TIMEOUT_S = 0.15


class BadNetwork(RuleBasedStateMachine):
    """Transfers are opened, filled, cancelled and dropped while the network does its worst."""

    def __init__(self) -> None:
        super().__init__()
        self.census = Census.take()
        self.network = Network(CONFIG)
        self.transfers: list[NetworkTransfer] = []
        self.pieces: list[list[tuple[int, int]]] = []
        self.fates: list[str] = []
        self.over: set[int] = set()
        """Numbers of the transfers whose fate was to be cancelled or dropped, and which were."""
        self.dropped: dict[bytes, bytes] = {}
        """What had landed of a transfer when its drop returned."""

    @precondition(lambda self: len(self.transfers) < MAX_TRANSFERS)
    @rule(
        size=st.sampled_from([0, 1, 701, 12_000, 30_000]),
        seed=st.integers(0, 255),
        fate=st.sampled_from(["arrives", "arrives", "is cancelled", "is dropped"]),
        priority=st.sampled_from(list(Priority)),
        tenant=st.sampled_from("ab"),
        digest=st.booleans(),
    )
    def open(
        self, size: int, seed: int, fate: str, priority: Priority, tenant: str, digest: bool
    ) -> None:
        rng = random.Random(seed)
        number = len(self.transfers) + 1
        spec = {"priority": priority, "tenant": tenant, "digest": digest}
        self.transfers.append(self.network.open(number, rng.randbytes(size), **spec))
        starts = range(0, size, PIECE_BYTES)
        self.pieces.append([(start, min(PIECE_BYTES, size - start)) for start in starts])
        rng.shuffle(self.pieces[-1])
        self.fates.append(fate)

    @precondition(lambda self: self.transfers)
    @rule(pick=st.integers(0, MAX_TRANSFERS - 1), count=st.integers(1, 60))
    def ready(self, pick: int, count: int) -> None:
        index = pick % len(self.transfers)
        pieces = self.pieces[index]
        self.transfers[index].handle.ready_ranges([pieces.pop() for _ in range(count) if pieces])

    @precondition(lambda self: self.transfers)
    @rule(pick=st.integers(0, MAX_TRANSFERS - 1))
    def meet_its_fate(self, pick: int) -> None:
        index = pick % len(self.transfers)
        transfer, receiver = self.transfers[index], self.network.receiver
        if self.fates[index] == "is cancelled":
            transfer.handle.cancel("test")
            self.over.add(index)
        elif self.fates[index] == "is dropped":
            # One that the receiver has not heard of yet may still come.
            is_known = receiver.progress(transfer.id) is not None
            receiver.drop(transfer.id, "evicted")
            self.over.add(index)
            if is_known:
                self.dropped.setdefault(transfer.id, transfer.landed)

    @rule(
        fault=st.sampled_from(get_args(Fault)),
        direction=st.sampled_from(BOTH),
        after_bytes=st.one_of(st.integers(0, 300), st.integers(0, 20_000)),
        which=st.integers(0, 5),
    )
    def strike(self, fault: Fault, direction: Direction, after_bytes: int, which: int) -> None:
        """One of the connections of now, or the next one from its first byte on."""
        proxy = self.network.proxy
        numbers = [*proxy.open_connections, proxy.num_accepted + 1]
        number = numbers[which % len(numbers)]
        proxy.strike(fault, direction, after_bytes=after_bytes, connection=number)

    @rule(bytes_per_read=st.sampled_from([40, 700, 65_536]))
    def flow_in_pieces_of(self, bytes_per_read: int) -> None:
        self.network.proxy.bytes_per_read = bytes_per_read

    @rule()
    def let_go(self) -> None:
        self.network.proxy.resume()

    @rule(pause_s=st.sampled_from([0.001, 0.005, 0.02, LONGER_THAN_ACK_TIMEOUT_S]))
    def wait(self, pause_s: float) -> None:
        time.sleep(pause_s)

    @invariant()
    def what_has_landed_stays(self) -> None:
        for transfer in self.transfers:
            assert transfer.source.data == transfer.data, "what is to be sent was written to"
            if transfer.id in self.network.registry.completed:
                assert transfer.landed == transfer.data
            if transfer.id in self.dropped:
                assert transfer.landed == self.dropped[transfer.id], "written after drop"

    def teardown(self) -> None:
        """The network is well again: all that was not cancelled or dropped arrives."""
        network = self.network
        try:
            network.proxy.heal()
            for transfer in self.transfers:
                transfer.ready()
            for index, transfer in enumerate(self.transfers):
                self.check_end(index, transfer)
        finally:
            network.close()
        self.what_has_landed_stays()
        ids = sorted(transfer.id for transfer in self.transfers)
        told = [*network.listener.completed, *network.listener.failed]
        assert sorted(told) == ids, "an end was told twice, or to the wrong one"
        told = [*network.registry.completed, *network.registry.failed]
        assert len(set(told)) == len(told), "the receiver's registry heard of two ends"
        for transfer in self.transfers:
            transfer.source.release()  # BufferError while anybody holds a view
            transfer.landing.release()
        self.census.wait_for_no_leaks()

    def check_end(self, index: int, transfer: NetworkTransfer) -> None:
        error = self.network.listener.wait(transfer.id)
        if error is None:
            assert transfer.id in self.network.registry.completed
            assert transfer.landed == transfer.data
            return
        codes = {"is cancelled": "cancelled", "is dropped": "dropped"}
        assert index in self.over, f"failed for no reason: {error!r}"
        assert error.code == codes[self.fates[index]]


TestBadNetwork = BadNetwork.TestCase
TestBadNetwork.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


@pytest.mark.parametrize("direction", BOTH)
def test_a_connection_may_end_at_any_byte(direction: Direction) -> None:
    """A short conversation is cut after each of its bytes; the next connection goes on with it."""
    data = bytes(range(200)) * 5
    num_cut = 0
    with closing(Network(replace(CONFIG, num_connections=1, ack_timeout_s=5))) as network:
        proxy = network.proxy
        was_cut = True
        while was_cut:
            network.sender.warm(proxy.endpoint)
            eventually(network.is_connected)
            (connection,) = proxy.open_connections
            after_bytes = 7 * num_cut + 1
            proxy.strike("cut", direction, after_bytes=after_bytes, connection=connection)
            transfer = network.open(num_cut + 1, data, digest=True)
            transfer.ready()
            assert network.listener.wait(transfer.id) is None
            assert transfer.landed == data
            was_cut = connection not in proxy.open_connections
            num_cut += was_cut
    # Each with a header of 48 bytes: OPEN and two frames of DATA; OPENED, ACK and COMPLETE.
    assert 7 * num_cut > (len(data) + 3 * 48 if direction == "forward" else 3 * 48)
    assert network.registry.failed == {}
