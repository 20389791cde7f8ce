"""Whatever the network does, transfers end with the right bytes, and the books balance at every
step.
"""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transport_doubles import (
    MemoryNetwork,
    MemoryRegistry,
    MemorySpace,
    greeting,
    make_spec,
)

from transport.config import TransportConfig
from transport.errors import PeerError
from transport.interfaces import Priority
from transport.receiving.reception import Reception
from transport.wire.frames import FrameType, encode_frame, encode_reason
from transport.wire.receiver_session import ReceiverSession
from transport.wire.sender_session import SenderSession

CONFIG = TransportConfig(frame_bytes=700, max_frame_bytes=900, drop_grace_s=0, ack_batch_bytes=1)

USUAL = ["send", "deliver", "answer", "ready"]
RARE = ["cut", "connect", "connect", "connect", "damage", "give_up", "give_up", "width"]


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 1 << 30), st.sampled_from([600, 300, 20]), st.integers(1, 3))
def test_transfers_survive_any_weather(seed: int, num_moves: int, num_transfers: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.choice([0, 1, 701, 12_000, 30_000]) for _ in range(num_transfers)]
    registry = MemoryRegistry()
    network = MemoryNetwork(CONFIG, registry)
    network.connect()
    network.connect()
    network.run()
    contents, landings, handles, waiting = {}, {}, {}, []
    for number, size in enumerate(sizes, start=1):
        spec = replace(
            make_spec(number),
            priority=rng.choice(list(Priority)),
            tenant=rng.choice("ab"),
            digest=rng.random() < 0.5,
        )
        contents[number], landings[number] = bytearray(rng.randbytes(size)), bytearray(size)
        registry.expect(spec, MemorySpace(landings[number], 512))
        handles[number] = network.open(spec, MemorySpace(contents[number], 333))
        waiting += [(number, offset) for offset in range(0, size, 250)]
    rng.shuffle(waiting)

    def make_ready() -> None:
        number, offset = waiting.pop()
        network.ready(handles[number], offset, min(250, sizes[number - 1] - offset))

    for _ in range(num_moves):
        name = rng.choice(RARE if rng.random() < 0.12 else USUAL)
        amount = rng.choice([1, 40, 300, 700, 2500, 2500])
        numbers = list(network.connections)
        number = rng.choice(numbers) if numbers else 0
        if name == "connect" and len(numbers) < 6:
            network.connect()
        elif name == "send":
            network.send(number)
        elif name == "deliver":
            network.deliver(number, amount)
        elif name == "answer":
            network.answer(number, amount)
        elif name == "cut":
            network.cut(number)
        elif name == "give_up" and number:
            network.give_up(number)
        elif name == "ready" and waiting:
            make_ready()
        elif name == "width":
            network.core.dispatch.width = rng.randrange(1, 5)
            network.core.dispatch.frame_bytes = rng.choice([700, 850])
        elif name == "damage":
            network.deliver(number, amount, damage=lambda data: flip(data, rng))
        network.check_invariants()
        for number in registry_completed(registry):
            assert landings[number] == contents[number]

    while waiting:
        make_ready()
    for number in list(network.connections):
        network.cut(number)
    network.connect()
    network.connect()
    network.run()
    for number in handles:
        assert landings[number] == contents[number]
        assert handles[number].error is None
    assert sorted(registry.completed) == sorted(make_spec(n).transfer_id for n in handles)
    assert sorted(network.listener.completed) == sorted(registry.completed)
    assert registry.failed == {}


def flip(data: bytes, rng: random.Random) -> bytes:
    if not data:
        return data
    hurt = bytearray(data)
    hurt[rng.randrange(len(hurt))] ^= 1 << rng.randrange(8)
    return bytes(hurt)


def registry_completed(registry: MemoryRegistry) -> list[int]:
    return [int.from_bytes(transfer_id, "little") for transfer_id in registry.completed]


class NoConnections:
    """Nobody else is connected."""

    def abort(self, connections: object, error: object) -> None: ...

    def tell(self, connections: object, frame: bytes) -> None: ...


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=2000), st.booleans(), st.integers(1, 500))
def test_a_receiver_fed_anything_answers_and_stays_small(
    garbage: bytes, greets: bool, piece: int
) -> None:
    reception = Reception(CONFIG, MemoryRegistry(), NoConnections())
    session = ReceiverSession(1, config=CONFIG, reception=reception, instance=b"R" * 16, now_s=0)
    wire = (greeting() if greets else b"") + garbage
    try:
        for start in range(0, len(wire), piece):
            session.feed(wire[start : start + piece], 0.0)
            assert sum(view.nbytes for view in session.buffers()) <= 64 * 1024
    except PeerError:
        assert session.outgoing()
    session.close(0.0)


frames = st.tuples(
    st.sampled_from(list(FrameType)), st.binary(min_size=16, max_size=16), st.binary(max_size=80)
).map(lambda parts: encode_frame(*parts))


@settings(max_examples=200, deadline=None)
@given(st.lists(frames, max_size=8))
def test_wellformed_frames_out_of_place_end_in_a_peer_error_at_most(wire: list[bytes]) -> None:
    reception = Reception(CONFIG, MemoryRegistry(), NoConnections())
    session = ReceiverSession(1, config=CONFIG, reception=reception, instance=b"R" * 16, now_s=0)
    sender = SenderSession(CONFIG, b"S" * 16)
    with suppress(PeerError):
        session.feed(greeting() + b"".join(wire), 0.0)
    with suppress(PeerError):
        sender.feed(b"".join(wire))
    session.close(0.0)


def test_truncation_anywhere_leaves_nothing_half_done() -> None:
    """Cut a short conversation anywhere; the rest is resumed on a new connection."""
    data = bytearray(range(200)) * 5
    full_length = 0
    for cut_at in range(0, 2000, 7):
        registry = MemoryRegistry()
        network = MemoryNetwork(CONFIG, registry)
        landed = bytearray(len(data))
        registry.expect(make_spec(1), MemorySpace(landed, 64))
        number = network.connect()
        transfer = network.open(make_spec(1), MemorySpace(data, 64))
        network.ready(transfer, 0, len(data))
        network.deliver(number, 1000)
        network.answer(number, 1000)
        while network.send(number):
            pass
        full_length = max(full_length, len(network.connections[number].to_receiver))
        network.deliver(number, cut_at)
        network.cut(number)
        network.check_invariants()
        network.connect()
        network.run()
        assert landed == data
        assert network.listener.completed == [transfer.spec.transfer_id]
    assert full_length < 2000


def test_an_error_frame_from_the_receiver_is_reported_in_its_words() -> None:
    sender = SenderSession(CONFIG, b"S" * 16)
    with pytest.raises(PeerError, match="come back later") as caught:
        sender.feed(encode_reason(FrameType.ERROR, "busy", "come back later"))
    assert caught.value.code == "busy"
