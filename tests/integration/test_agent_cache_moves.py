"""Two real agents in one process, over real sockets: cached prefixes from one to the other."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Self

import pytest
from cache_node import (
    BLOCK_KEYS,
    FINGERPRINT,
    KEYS,
    NBYTES,
    RESUME,
    ROOT,
    SHAPE,
    Node,
    content,
    node,
)
from eventually import eventually

from kvmanager.agent.between_agents import move_cache
from kvmanager.agent.cache.move_messages import ReserveCacheMoveReply
from kvmanager.agent.client import CacheMoveOrder
from kvmanager.agent.messages import Reserve
from kvmanager.agent.transfer_io import now_s
from kvmanager.hashing import KEY_BYTES
from kvmanager.landing import reserved_landing
from kvmanager.pool.records import BlockPart
from transport.rpc import RpcError


def order(parts: Sequence[BlockPart] = RESUME, fingerprint: str = FINGERPRINT) -> CacheMoveOrder:
    return CacheMoveOrder(fingerprint, BLOCK_KEYS, parts)


@pytest.fixture
async def source(tmp_path: Path) -> AsyncIterator[Node]:
    async with node(tmp_path, "source") as one:
        one.store(RESUME)
        yield one
        await eventually(one.holds_nothing_for_moves)


@pytest.fixture
async def destination(tmp_path: Path) -> AsyncIterator[Node]:
    async with node(tmp_path, "destination") as one:
        yield one
        await eventually(one.holds_nothing_for_moves)


async def test_a_prefix_is_cached_at_the_other_node_as_well(
    source: Node, destination: Node
) -> None:
    result = await move_cache(source.control, destination.control, order())
    assert (result.nbytes, result.num_parts, result.kept_parts) == (NBYTES, 9, 9)
    assert result.transfer_s > 0
    assert destination.pool.match(SHAPE, KEYS).num_blocks == 8
    for part in RESUME:
        assert destination.read(part) == source.read(part) == content(part)
    assert source.pool.match(SHAPE, KEYS).num_blocks == 8
    again = await move_cache(source.control, destination.control, order())
    assert (again.nbytes, again.num_parts) == (0, 0)


async def test_only_what_is_lacking_is_sent(source: Node, destination: Node) -> None:
    destination.store([(index, 0) for index in range(5)])
    result = await move_cache(source.control, destination.control, order())
    assert result.nbytes == NBYTES - 5 * SHAPE.parts[0].nbytes
    assert result.kept_parts == 4
    for part in RESUME:
        assert destination.read(part) == content(part)


async def test_what_the_source_does_not_have_cannot_be_moved(
    tmp_path: Path, destination: Node
) -> None:
    async with node(tmp_path, "empty") as empty:
        empty.store([(index, 0) for index in range(7)])
        with pytest.raises(RpcError, match="not all of these parts are cached here") as caught:
            await move_cache(empty.control, destination.control, order())
        assert caught.value.code == "NOT_FOUND"
        await eventually(lambda: destination.num_used == 0)
        assert empty.holds_nothing_for_moves()


async def test_no_room_at_the_destination(tmp_path: Path, source: Node) -> None:
    async with node(tmp_path, "full", num_blocks=4) as full:
        runs = full.agent.allocator.allocate(4)
        with pytest.raises(RpcError, match="no room") as caught:
            await move_cache(source.control, full.control, order())
        assert caught.value.code == "NO_ROOM"
        full.agent.allocator.free(runs)


async def test_the_destination_makes_room_for_what_fits(tmp_path: Path, source: Node) -> None:
    blocks_each = -(-SHAPE.parts[0].nbytes // 4096)
    async with node(tmp_path, "small", num_blocks=3 * blocks_each) as small:
        result = await move_cache(source.control, small.control, order())
        assert result.kept_parts == 3
        assert small.pool.match(SHAPE, KEYS).kv_blocks == 3


async def test_while_it_is_sent_it_stays_and_an_end_lets_it_go(
    source: Node, destination: Node
) -> None:
    nowhere = ReserveCacheMoveReply(
        list(RESUME), "11" * 16, "22" * 32, NBYTES, "127.0.0.1", 9, lease_s=5.0
    )
    await source.control.send_cache_move(order(), nowhere, 5.0)
    assert not source.pool.make_room(source.agent.allocator.num_blocks)
    assert source.pool.match(SHAPE, KEYS).num_blocks == 8
    assert await source.control.end_cache_move("11" * 16, "enough")
    await eventually(source.holds_nothing_for_moves)
    assert source.pool.make_room(source.agent.allocator.num_blocks)
    seen = await source.control.cache_move_status("11" * 16, "send", lease_s=1, wait_s=1)
    assert (seen.state, seen.error) == ("cancelled", "enough")
    assert not await source.control.end_cache_move("11" * 16, "enough")


async def test_a_landing_nobody_fills_gives_its_memory_back(destination: Node) -> None:
    ended = await destination.control.reserve_cache_move(order(), 30.0)
    assert destination.num_used > 0
    await destination.control.end_cache_move(ended.transfer_id, "no more")
    await eventually(lambda: destination.num_used == 0)
    late = await destination.control.reserve_cache_move(order(), 0.2)
    await eventually(lambda: destination.num_used == 0)
    seen = await destination.control.cache_move_status(
        late.transfer_id, "landing", lease_s=1, wait_s=0
    )
    assert (seen.state, seen.error) == ("cancelled", "its caller has gone away")


async def test_a_sender_without_the_token_is_not_let_in(source: Node, destination: Node) -> None:
    landing = await destination.control.reserve_cache_move(order(), 30.0)
    forged = ReserveCacheMoveReply(
        landing.parts, landing.transfer_id, "00" * 32, landing.nbytes, landing.host, landing.port
    )
    await source.control.send_cache_move(order(), forged, 30.0)
    seen = await source.control.cache_move_status(landing.transfer_id, "send", lease_s=30, wait_s=5)
    assert seen.state == "failed"
    assert "bad_token" in seen.error
    await destination.control.end_cache_move(landing.transfer_id, "forged")
    await eventually(lambda: destination.num_used == 0)


async def test_giving_a_move_up_ends_both_ends(
    source: Node, destination: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing arrives: the sender is told to go where nobody listens.
    reserve = destination.control.reserve_cache_move

    async def elsewhere(what: CacheMoveOrder, lease_s: float) -> ReserveCacheMoveReply:
        real = await reserve(what, lease_s)
        return ReserveCacheMoveReply(
            real.parts, real.transfer_id, real.token, real.nbytes, real.host, 9, real.lease_s
        )

    monkeypatch.setattr(destination.control, "reserve_cache_move", elsewhere)
    moving = asyncio.create_task(move_cache(source.control, destination.control, order()))
    await eventually(lambda: not source.holds_nothing_for_moves())
    moving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await moving
    await eventually(source.holds_nothing_for_moves)
    await eventually(lambda: destination.num_used == 0)


async def test_a_destination_that_stops_fails_the_move(tmp_path: Path, source: Node) -> None:
    async with node(tmp_path, "stopping") as stopping:
        landing = await stopping.control.reserve_cache_move(order(), 30.0)
    await source.control.send_cache_move(order(), landing, 2.0)
    await eventually(source.holds_nothing_for_moves)
    seen = await source.control.cache_move_status(landing.transfer_id, "send", lease_s=1, wait_s=0)
    assert seen.state in ("failed", "cancelled")


async def test_what_a_prefix_stands_on_stays_while_the_rest_is_on_its_way(
    source: Node, destination: Node
) -> None:
    destination.store([(index, 0) for index in range(4)])
    landing = await destination.control.reserve_cache_move(order(), 30.0)
    destination.pool.make_room(destination.agent.allocator.num_blocks)
    await source.control.send_cache_move(order(), landing, 30.0)
    seen = await destination.control.cache_move_status(
        landing.transfer_id, "landing", lease_s=30, wait_s=5
    )
    assert (seen.state, seen.kept_parts) == ("complete", 5)
    assert destination.pool.match(SHAPE, KEYS).num_blocks == 8


async def test_a_prefix_is_dropped_back_to_where_others_need_it(source: Node) -> None:
    dropped = await source.control.drop_cached(FINGERPRINT, BLOCK_KEYS, 6)
    assert dropped == 3  # the KV of two blocks and the state behind them
    assert source.pool.match(SHAPE, KEYS).kv_blocks == 6
    pin = source.pool.pin(SHAPE, KEYS, [(3, 0)], now_s())
    assert await source.control.drop_cached(FINGERPRINT, BLOCK_KEYS, 0) == 2
    assert source.pool.match(SHAPE, KEYS).kv_blocks == 4
    source.pool.unpin(pin.pin_id)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (order([(0, 0), (0, 0)]), "some of them twice"),
        (order([]), "none at all"),
        (order([(8, 0)]), "there are 8 blocks"),
        (order([(0, 9)]), "part 9"),
        (order(fingerprint="00" * 32), "no connected engine"),
        (order(fingerprint="xyz"), "not hex"),
        (CacheMoveOrder(FINGERPRINT, BLOCK_KEYS[:-1], RESUME), "no sequence"),
        (CacheMoveOrder(FINGERPRINT, BLOCK_KEYS + KEYS[0], RESUME), "none twice"),
    ],
)
async def test_what_cannot_be_is_refused(
    destination: Node, wrong: CacheMoveOrder, match: str
) -> None:
    with pytest.raises(RpcError, match=match) as caught:
        await destination.control.reserve_cache_move(wrong, 30.0)
    assert caught.value.code == "INVALID"
    assert destination.num_used == 0


async def test_an_unknown_move_is_not_found(source: Node) -> None:
    with pytest.raises(RpcError, match="no move") as caught:
        await source.control.cache_move_status("00" * 16, "send", lease_s=1, wait_s=0)
    assert caught.value.code == "NOT_FOUND"
    assert not await source.control.end_cache_move("00" * 16, "")


MANY_KEYS = [index.to_bytes(KEY_BYTES, "big") for index in range(1, 601)]
MANY = [(index, 0) for index in range(len(MANY_KEYS))]


class Turns:
    """What is freed and taken in one turn of the agent's event loop at most, in blocks."""

    def __init__(self, one: Node) -> None:
        self._one = one
        self.freed = self.taken = 0

    async def __aenter__(self) -> Self:
        self._watching = asyncio.create_task(self._watch())
        await asyncio.sleep(0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._watching.cancel()

    async def _watch(self) -> None:
        before = self._one.num_used
        while True:
            await asyncio.sleep(0)
            now = self._one.num_used
            self.freed, self.taken = max(self.freed, before - now), max(self.taken, now - before)
            before = now


async def test_a_long_prefix_is_taken_and_dropped_in_steps(tmp_path: Path) -> None:
    """Transfers and engines of the node wait for its event loop."""
    long = CacheMoveOrder(FINGERPRINT, ROOT + b"".join(MANY_KEYS), MANY)
    async with node(tmp_path, "long", num_blocks=2048) as one, Turns(one) as turns:
        landing = await one.control.reserve_cache_move(long, 30.0)
        assert (len(landing.parts), one.num_used) == (600, 1200)
        await one.control.end_cache_move(landing.transfer_id, "enough")
        await eventually(lambda: one.num_used == 0)
        assert (turns.taken, turns.freed) == (256, 256)
        one.store(MANY, keys=MANY_KEYS)
        await asyncio.sleep(0)
        turns.freed = 0
        assert await one.control.drop_cached(FINGERPRINT, long.block_keys, 0) == 600
        assert 0 < turns.freed <= 256


async def test_an_outbox_makes_room_in_steps(tmp_path: Path, destination: Node) -> None:
    landing = await destination.control.reserve(Reserve(1200, 30.0), 5.0)
    async with node(tmp_path, "full", num_blocks=1200) as full, Turns(full) as turns:
        full.store(MANY, keys=MANY_KEYS)
        assert full.num_used == 1200
        where = reserved_landing(landing, 1200, "")
        await full.control.open_outbox(where, 30.0, 5.0)
        assert 0 < turns.freed <= 129, "it needs more than 150 blocks"
        await full.control.cancel(landing.transfer_id, "enough", 5.0)


async def test_a_part_of_the_agent_that_fails_keeps_no_other_one_from_ending_leases(
    destination: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(destination.agent.transfers, "tick", fail)
    monkeypatch.setattr(destination.agent.transfers.prober, "tick", fail)
    await destination.control.reserve_cache_move(order(), 0.2)
    await eventually(lambda: destination.num_used == 0)
