"""Placements that share calls: who waits, what goes along, and what becomes of failures."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from eventually import eventually

from local_pd.gathered import MAX_CALLS, MAX_TOGETHER, GatheredCalls
from local_pd.messages import DirectRequest, DirectTarget, Placed, PlaceReply, PlaceRequest
from transport.rpc import RpcError

TARGET = DirectTarget(instance="d0", engine_url="http://d0", reason="only")


class Front:
    """Answers when it is let; keeps what it was asked."""

    def __init__(self) -> None:
        self.calls: list[PlaceRequest] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.error: Exception | None = None
        self.num_answers: int | None = None
        self.gathered = GatheredCalls(self.call)

    async def call(self, request: PlaceRequest) -> PlaceReply:
        self.calls.append(request)
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        placed = tuple(self.answer(item) for item in request.direct)
        return PlaceReply(placed[: self.num_answers])

    def answer(self, request: DirectRequest) -> Placed:
        if request.model == "unknown":
            return Placed(code="REFUSED", message="no instance serves it")
        return Placed(target=TARGET)

    def ask(self, name: str, model: str = "") -> "asyncio.Task[DirectTarget]":
        request = DirectRequest(request_id=name, model=model)
        return asyncio.create_task(self.gathered.direct(request))

    @property
    def asked(self) -> list[list[str]]:
        return [[item.request_id for item in call.direct] for call in self.calls]

    async def until_calls(self, num: int) -> None:
        await eventually(lambda: len(self.calls) >= num)


@pytest.fixture
async def front() -> AsyncIterator[Front]:
    found = Front()
    yield found
    found.may_answer.set()
    await found.gathered.close()


async def test_one_at_a_time_has_a_call_each(front: Front) -> None:
    for name in ("a", "b"):
        assert await front.ask(name) == TARGET
    assert front.asked == [["a"], ["b"]]


async def test_what_comes_during_calls_shares_the_next_one(front: Front) -> None:
    front.may_answer.clear()
    first = []
    for number in range(MAX_CALLS):
        first.append(front.ask(f"first{number}"))
        await front.until_calls(number + 1)
    rest = [front.ask(f"{number}") for number in range(MAX_TOGETHER + 1)]
    for _ in range(5):
        await asyncio.sleep(0)
    assert len(front.calls) == MAX_CALLS
    front.may_answer.set()
    assert await asyncio.gather(*first, *rest) == [TARGET] * len(first + rest)
    assert sorted(map(len, front.asked)) == [1, 1, 1, MAX_TOGETHER]


async def test_each_hears_its_own_answer(front: Front) -> None:
    good, bad = front.ask("a"), front.ask("b", "unknown")
    found = await asyncio.gather(good, bad, return_exceptions=True)
    assert len(front.calls) == 1
    assert found[0] == TARGET
    assert isinstance(found[1], RpcError)
    assert (found[1].code, found[1].message) == ("REFUSED", "no instance serves it")


async def test_the_end_of_a_request_goes_along_or_alone(front: Front) -> None:
    front.gathered.ended("d0")
    await front.ask("a")
    assert front.calls[0].ended == ("d0",)
    front.gathered.ended("d1")
    await front.until_calls(2)
    assert front.calls[1] == PlaceRequest(ended=("d1",))
    front.gathered.ended("d2")
    await front.gathered.close()
    assert front.calls[2:] == [PlaceRequest(ended=("d2",))]


@pytest.mark.parametrize("error", [RpcError("UNAVAILABLE", "gone"), RuntimeError("odd")])
async def test_a_failed_call_fails_all_in_it_and_no_other(front: Front, error: Exception) -> None:
    front.error = error
    found = await asyncio.gather(front.ask("a"), front.ask("b"), return_exceptions=True)
    assert [getattr(item, "code", None) for item in found] == ["UNAVAILABLE"] * 2
    assert found[0] is not found[1]
    front.error = None
    assert await front.ask("c") == TARGET


async def test_an_answer_that_lacks_some_is_an_error(front: Front) -> None:
    front.num_answers = 1
    found = await asyncio.gather(front.ask("a"), front.ask("b"), return_exceptions=True)
    assert [getattr(item, "code", None) for item in found] == ["INTERNAL"] * 2


async def test_who_gives_up_is_not_counted(front: Front) -> None:
    front.may_answer.clear()
    placed = front.ask("a")
    await front.until_calls(1)
    placed.cancel()
    front.may_answer.set()
    await front.until_calls(2)
    assert front.calls[1] == PlaceRequest(ended=("d0",))
    early = front.ask("b")
    await asyncio.sleep(0)
    early.cancel()
    await asyncio.gather(placed, early, return_exceptions=True)
    await front.gathered.close()
    assert len(front.calls) == 2
