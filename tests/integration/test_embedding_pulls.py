"""Embeddings from one agent process to another, over real sockets, and what may happen to them."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from agent_process import AgentProcess
from embedding_ends import ENCODER, embeddings_of, finding, found, put, saving
from eventually import eventually, wait_until

from kvmanager.agent.between_agents import EmbeddingOrder, EmbeddingsPulled, pull_embeddings
from kvmanager.agent.client import AgentClient
from kvmanager.agent.embeddings.messages import (
    ReserveEmbeddings,
    ReserveEmbeddingsReply,
    SendEmbeddings,
)
from kvmanager.embedding_keys import embedding_key
from kvmanager.hashing import join_keys
from transport.rpc import RpcError

MIB = 1 << 20
SETTINGS: dict[str, Any] = {"arena_gib": 96 / 1024, "embedding_gib": 64 / 1024, "drain_s": 0.5}


def image(number: int) -> str:
    return f"image {number}"


def key(number: int) -> bytes:
    return embedding_key(ENCODER, image(number))


def content(number: int, nbytes: int) -> bytes:
    return random.Random(number).randbytes(nbytes)


def order(sizes: dict[int, int], **changes: Any) -> EmbeddingOrder:
    return EmbeddingOrder({key(number): nbytes for number, nbytes in sizes.items()}, **changes)


SIZES = {number: (2 + number % 3) * MIB + 8 * number for number in range(8)}
"""Eight images of some MiB, of which few end with a block."""


class Ends:
    """Two agents with clients of both, whose calls are made by `run`."""

    def __init__(self, source: AgentProcess, destination: AgentProcess) -> None:
        self.source, self.destination = source, destination

    def run(
        self, calls: Callable[[AgentClient, AgentClient], Awaitable[Any]], timeout_s: float = 60.0
    ) -> Any:
        async def run() -> Any:
            clients = [AgentClient(end.ready["control"], end.caller) for end in self.both]
            try:
                async with asyncio.timeout(timeout_s):
                    return await calls(clients[0], clients[1])
            finally:
                await asyncio.gather(*(client.close() for client in clients))

        return asyncio.run(run())

    def pull(self, what: EmbeddingOrder) -> EmbeddingsPulled:
        pulled = self.run(lambda source, there: pull_embeddings(source, there, what))
        assert isinstance(pulled, EmbeddingsPulled)
        return pulled

    @property
    def both(self) -> tuple[AgentProcess, AgentProcess]:
        return self.source, self.destination

    def put(self, agent: AgentProcess, sizes: dict[int, int]) -> None:
        with saving(agent) as saver:
            for number, nbytes in sizes.items():
                assert put(saver, image(number), content(number, nbytes))

    def check(self, agent: AgentProcess, sizes: dict[int, int], column_bytes: int = 8) -> None:
        with finding(agent) as finder:
            for number, nbytes in sizes.items():
                assert found(finder, image(number), column_bytes) == content(number, nbytes)


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    with ExitStack() as stack:
        names = ("source", "destination")
        yield Ends(*(stack.enter_context(AgentProcess(tmp_path / n, **SETTINGS)) for n in names))


def held(agent: AgentProcess) -> tuple[int, int]:
    """Embeddings that can be found, and bytes that are held for any."""
    told = embeddings_of(agent)
    return told.num_embeddings, told.held_bytes


def in_blocks(agent: AgentProcess, sizes: dict[int, int]) -> int:
    block_bytes = agent.status().block_bytes
    return sum(-(-nbytes // block_bytes) * block_bytes for nbytes in sizes.values())


def test_a_pull_brings_the_exact_bytes_of_what_is_lacking(ends: Ends) -> None:
    ends.put(ends.source, SIZES)
    ends.put(ends.destination, {3: SIZES[3]})
    pulled = ends.pull(order(SIZES))
    nbytes = sum(SIZES.values()) - SIZES[3]
    assert (pulled.num_pulled, pulled.nbytes, pulled.num_missing) == (7, nbytes, 0)
    assert 0 < pulled.transfer_s < pulled.seconds
    ends.check(ends.destination, SIZES)
    ends.check(ends.source, SIZES)
    again = ends.pull(order(SIZES))
    assert (again.num_pulled, again.nbytes, again.num_missing) == (0, 0, 0)
    for agent in ends.both:
        assert held(agent) == (8, in_blocks(agent, SIZES))
    # No engine has looked anything up for it.
    assert embeddings_of(ends.destination).num_queries == 8


def test_two_pulls_of_one_image_at_once_send_it_once(ends: Ends) -> None:
    ends.put(ends.source, SIZES)

    async def both(source: AgentClient, there: AgentClient) -> Sequence[EmbeddingsPulled]:
        pulls = [pull_embeddings(source, there, order(SIZES)) for _ in range(2)]
        return await asyncio.gather(*pulls)

    first, second = ends.run(both)
    assert first.num_pulled + second.num_pulled == 8
    assert first.num_missing == second.num_missing == 0
    assert first.nbytes + second.nbytes == sum(SIZES.values())
    ends.check(ends.destination, SIZES)
    assert held(ends.destination) == (8, in_blocks(ends.destination, SIZES))


def test_a_pull_waits_for_what_somebody_else_brings_and_says_if_he_gives_up(ends: Ends) -> None:
    ends.put(ends.source, {1: MIB, 2: MIB})

    async def given_up(source: AgentClient, there: AgentClient) -> EmbeddingsPulled:
        landing = await there.reserve_embeddings(
            ReserveEmbeddings(key(1), [MIB], lease_s=30.0), 5.0
        )
        pulling = asyncio.create_task(pull_embeddings(source, there, order({1: MIB, 2: MIB})))
        await eventually(lambda: there.has_embeddings([key(2)], 5.0), lambda sizes: sizes[0])
        assert not pulling.done()
        await there.end_cache_move(landing.transfer_id, "given up")
        return await pulling

    pulled = ends.run(given_up)
    assert (pulled.num_pulled, pulled.num_missing) == (1, 1)
    assert held(ends.destination) == (1, in_blocks(ends.destination, {2: MIB}))


def test_what_the_source_has_lost_fails_the_pull_and_memory_comes_back(ends: Ends) -> None:
    ends.put(ends.source, {1: MIB})
    for wrong, code in ((order({1: MIB, 2: MIB}), "NOT_FOUND"), (order({1: MIB - 8}), "INVALID")):
        with pytest.raises(RpcError) as caught:
            ends.pull(wrong)
        assert caught.value.code == code
        wait_until(lambda: held(ends.destination) == (0, 0), what="the memory is given back")
    assert ends.pull(order({1: MIB})).num_pulled == 1


def test_what_is_sent_is_not_evicted_meanwhile(ends: Ends) -> None:
    ends.put(ends.source, {1: 8 * MIB})
    nowhere = SendEmbeddings("11" * 16, "22" * 32, key(1), [8 * MIB], "127.0.0.1", 9, lease_s=20.0)
    ends.run(lambda source, _: source.send_embeddings(nowhere, 5.0))
    ends.put(ends.source, dict.fromkeys(range(2, 9), 8 * MIB))  # all the room
    with saving(ends.source) as saver:
        assert put(saver, image(9), content(9, 8 * MIB))  # in place of 2
    has = ends.run(lambda source, _: source.has_embeddings([key(n) for n in (1, 2, 9)], 5.0))
    assert has == [8 * MIB, 0, 8 * MIB]
    # Its lease would end it; who has opened it may end it before.
    assert ends.run(lambda source, _: source.end_cache_move("11" * 16, "enough"))
    ends.put(ends.source, dict.fromkeys(range(10, 18), 8 * MIB))
    assert ends.run(lambda source, _: source.has_embeddings([key(1)], 5.0)) == [0]


def test_a_destination_without_room_says_so(tmp_path: Path, ends: Ends) -> None:
    ends.put(ends.source, {1: 3 * MIB, 2: 3 * MIB, 3: 3 * MIB})
    small = AgentProcess(tmp_path / "small", **(SETTINGS | {"embedding_gib": 4 / 1024}))
    with small:
        to_small = Ends(ends.source, small)
        pulled = to_small.pull(order({1: 3 * MIB, 2: 3 * MIB}))
        assert (pulled.num_pulled, pulled.num_missing) == (1, 1)
        to_small.check(small, {1: 3 * MIB})
        # What is there and not used makes room.
        assert to_small.pull(order({3: 3 * MIB})).num_pulled == 1
        with pytest.raises(RpcError, match="no room for any of these embeddings") as caught:
            to_small.pull(order({4: 5 * MIB}))
        assert caught.value.code == "NO_ROOM"
        # What cannot have room costs the others nothing.
        assert held(small) == (1, in_blocks(small, {3: 3 * MIB}))


def test_a_source_that_is_killed_fails_the_pull_and_memory_comes_back(ends: Ends) -> None:
    large = dict.fromkeys(range(8), 8 * MIB)
    ends.put(ends.source, large)

    async def killed(source: AgentClient, there: AgentClient) -> None:
        send = source.send_embeddings

        async def and_die(request: SendEmbeddings, timeout_s: float) -> None:
            await send(request, timeout_s)
            ends.source.end(signal.SIGKILL)

        source.send_embeddings = and_die  # type: ignore[method-assign]
        await pull_embeddings(source, there, order(large))

    with pytest.raises(RpcError) as caught:
        ends.run(killed)
    assert caught.value.code == "UNAVAILABLE"
    wait_until(lambda: held(ends.destination) == (0, 0), what="the memory is given back")
    ends.source.start()
    ends.put(ends.source, large)  # its embeddings died with it
    assert ends.pull(order(large)).num_pulled == 8
    ends.check(ends.destination, large)


def test_a_landing_that_nobody_fills_ends_with_its_lease(ends: Ends) -> None:
    request = ReserveEmbeddings(join_keys([key(1), key(2)]), [MIB, MIB], lease_s=0.3)
    landing = ends.run(lambda _, there: there.reserve_embeddings(request, 5.0))
    assert isinstance(landing, ReserveEmbeddingsReply)
    assert (landing.lacking, landing.nbytes) == ([0, 1], 2 * MIB)
    assert held(ends.destination)[0] == 0  # they cannot be found before they are whole
    wait_until(lambda: held(ends.destination) == (0, 0), what="the lease is over")


def test_who_has_no_token_fills_no_landing(ends: Ends) -> None:
    ends.put(ends.source, {1: MIB})
    request = ReserveEmbeddings(key(1), [MIB], lease_s=30.0)
    landing = ends.run(lambda _, there: there.reserve_embeddings(request, 5.0))
    forged = SendEmbeddings(
        landing.transfer_id, "00" * 32, key(1), [MIB], landing.host, landing.port, lease_s=30.0
    )

    async def send(source: AgentClient, _: AgentClient) -> Any:
        await source.send_embeddings(forged, 5.0)
        return await source.cache_move_status(landing.transfer_id, "send", lease_s=30, wait_s=5)

    seen = ends.run(send)
    assert (seen.state, "bad_token" in seen.error) == ("failed", True)
    assert held(ends.destination)[0] == 0


def test_a_landing_takes_the_embeddings_that_it_was_opened_for(ends: Ends) -> None:
    """Others of the same size would be kept under its keys."""
    ends.put(ends.source, {2: MIB})
    request = ReserveEmbeddings(key(1), [MIB], lease_s=30.0)
    landing = ends.run(lambda _, there: there.reserve_embeddings(request, 5.0))
    swapped = SendEmbeddings(
        landing.transfer_id, landing.token, key(2), [MIB], landing.host, landing.port, lease_s=30.0
    )

    async def send(source: AgentClient, _: AgentClient) -> Any:
        await source.send_embeddings(swapped, 5.0)
        return await source.cache_move_status(landing.transfer_id, "send", lease_s=30, wait_s=5)

    seen = ends.run(send)
    assert (seen.state, "bad_layout" in seen.error) == ("failed", True)
    assert held(ends.destination)[0] == 0


@pytest.mark.parametrize(
    ("keys", "sizes", "match"),
    [
        (key(1) * 2, [1, 1], "some of them twice"),
        (b"", [], "none at all"),
        (key(1), [1, 1], "1 embeddings of"),
        (key(1), [0], "1 embeddings of"),
        (key(1)[:-1], [1], "no sequence"),
    ],
)
def test_what_cannot_be_is_refused(ends: Ends, keys: bytes, sizes: list[int], match: str) -> None:
    request = ReserveEmbeddings(keys, sizes, lease_s=30.0)
    with pytest.raises(RpcError, match=match) as caught:
        ends.run(lambda _, there: there.reserve_embeddings(request, 5.0))
    assert caught.value.code == "INVALID"
    assert held(ends.destination) == (0, 0)
