"""Work that outlives the caller who began it."""

import asyncio

import pytest

from prfaas.engines.ownership import Cleanups, cancel_requested


async def test_what_is_acquired_for_a_cancelled_caller_is_undone() -> None:
    cleanups, begun, go_on = Cleanups(), asyncio.Event(), asyncio.Event()
    undone: list[int] = []

    async def acquire() -> int:
        begun.set()
        await go_on.wait()
        return 7

    async def undo(value: int) -> None:
        undone.append(value)

    task = asyncio.create_task(cleanups.acquire(acquire(), undo))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert undone == []
    go_on.set()
    await cleanups.close()
    assert undone == [7]


async def test_what_is_acquired_for_a_waiting_caller_is_kept() -> None:
    cleanups = Cleanups()
    undone: list[int] = []

    async def acquire() -> int:
        return 7

    async def undo(value: int) -> None:
        undone.append(value)

    assert await cleanups.acquire(acquire(), undo) == 7
    await cleanups.close()
    assert undone == []


async def test_nothing_is_undone_when_acquiring_failed() -> None:
    cleanups, begun, go_on = Cleanups(), asyncio.Event(), asyncio.Event()
    undone: list[int] = []

    async def acquire() -> int:
        begun.set()
        await go_on.wait()
        raise OSError("no")

    async def undo(value: int) -> None:
        undone.append(value)

    go_on.set()
    with pytest.raises(OSError, match="no"):
        await cleanups.acquire(acquire(), undo)
    begun.clear()
    go_on.clear()
    task = asyncio.create_task(cleanups.acquire(acquire(), undo))
    await begun.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    go_on.set()
    await cleanups.close()
    assert undone == []


async def test_a_clean_up_goes_on_after_its_caller() -> None:
    cleanups, begun, go_on = Cleanups(), asyncio.Event(), asyncio.Event()
    finished: list[bool] = []

    async def work() -> None:
        begun.set()
        await go_on.wait()
        finished.append(True)

    task = asyncio.create_task(cleanups.finish(work()))
    await begun.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    go_on.set()
    await cleanups.close()
    assert finished == [True]


async def test_own_cancellation_is_told_from_that_of_what_is_awaited() -> None:
    async def caller(awaited: "asyncio.Future[None]") -> bool:
        try:
            await awaited
        except asyncio.CancelledError:
            return cancel_requested()
        raise AssertionError("not cancelled")

    loop = asyncio.get_running_loop()
    inner = loop.create_future()
    task = asyncio.create_task(caller(inner))
    inner.cancel()
    assert await task is False
    task = asyncio.create_task(caller(loop.create_future()))
    await asyncio.sleep(0)
    task.cancel()
    assert await task is True
