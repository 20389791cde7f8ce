"""Whoever waits for its own bound holds up nobody else."""

import asyncio

from deploy.gateway.media.config import MediaSection
from deploy.gateway.media.turns import Turn, Turns

CONFIG = MediaSection(max_fetches=3, max_tenant_fetches=2, max_host_fetches=2)


class Taker:
    """Takes a turn, and keeps it until it is told to end."""

    def __init__(self, turns: Turns, who: str, host: str) -> None:
        self.has_turn = False
        self.turn: Turn | None = None
        self._end = asyncio.Event()
        self.task = asyncio.create_task(self._take(turns, who, host))

    async def _take(self, turns: Turns, who: str, host: str) -> None:
        async with turns.turn(who, host) as self.turn:
            self.has_turn = True
            await self._end.wait()
        self.has_turn = False

    async def end(self) -> None:
        self._end.set()
        await self.task


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_bounds_of_tenants_and_hosts_leave_others_their_turns() -> None:
    turns = Turns(CONFIG)
    a1, a2, a3 = (Taker(turns, "a", f"h{n}") for n in range(3))
    b1 = Taker(turns, "b", "h0")
    await settle()
    assert [a1.has_turn, a2.has_turn, a3.has_turn, b1.has_turn] == [True, True, False, True]
    assert turns.num_running == 3
    c1 = Taker(turns, "c", "h9")
    await settle()
    assert not c1.has_turn
    # The place of b is none that a may have.
    await b1.end()
    await settle()
    assert c1.has_turn
    assert not a3.has_turn
    await a1.end()
    await settle()
    assert a3.has_turn
    for taker in (a2, a3, c1):
        await taker.end()
    assert turns.num_running == 0


async def test_a_slow_host_takes_only_its_own_turns() -> None:
    turns = Turns(CONFIG)
    slow = [Taker(turns, who, "slow") for who in "abc"]
    other = Taker(turns, "d", "quick")
    await settle()
    assert [taker.has_turn for taker in slow] == [True, True, False]
    assert other.has_turn
    for taker in (*slow[:2], other):
        await taker.end()
    await slow[2].end()
    assert turns.num_running == 0


async def test_who_gives_up_gives_back() -> None:
    turns = Turns(MediaSection(max_fetches=1))
    first, second, third = (Taker(turns, "a", "h") for _ in range(3))
    await settle()
    second.task.cancel()
    await settle()
    await first.end()
    await settle()
    assert third.has_turn
    # Given a turn and cancelled at the same moment.
    fourth = Taker(turns, "a", "h")
    await settle()
    third._end.set()
    await asyncio.sleep(0)
    fourth.task.cancel()
    await asyncio.gather(third.task, fourth.task, return_exceptions=True)
    assert turns.num_running == 0
    last = Taker(turns, "a", "h")
    await settle()
    assert last.has_turn
    await last.end()


async def test_what_outlasts_a_turn_keeps_its_place() -> None:
    turns = Turns(MediaSection(max_fetches=1))
    first, second = Taker(turns, "a", "h"), Taker(turns, "a", "h")
    await settle()
    assert first.turn is not None
    turns.hold(first.turn)
    await first.end()
    await settle()
    assert not second.has_turn
    turns.let_go(first.turn)
    await settle()
    assert second.has_turn
    await second.end()
    assert turns.num_running == 0
