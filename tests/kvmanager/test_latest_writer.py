"""The newest of many states reaches the disk, in order, however slow the disk is."""

import asyncio
import logging
import threading

import pytest

from kvmanager.latest_writer import LatestWriter


class SlowDisk:
    """Holds each write back until it is let through."""

    def __init__(self) -> None:
        self.written: list[int] = []
        self.begun = threading.Semaphore(0)
        self.let = threading.Semaphore(0)
        self.most_at_once = 0
        self._at_once = 0

    def write(self, state: int) -> None:
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        self.begun.release()
        assert self.let.acquire(timeout=20)
        self.written.append(state)
        self._at_once -= 1

    def let_through(self, count: int) -> None:
        for _ in range(count):
            self.let.release()

    async def is_writing(self) -> None:
        assert await asyncio.to_thread(self.begun.acquire, timeout=20)


async def test_the_newest_state_follows_the_one_that_is_written() -> None:
    disk = SlowDisk()
    writer = LatestWriter("numbers", disk.write)
    writer.put(0)
    await disk.is_writing()
    for state in range(1, 100):
        writer.put(state)
    disk.let_through(2)
    await writer.written()
    assert disk.written == [0, 99]
    assert disk.most_at_once == 1


async def test_the_event_loop_goes_on_while_the_disk_does_not() -> None:
    disk = SlowDisk()
    writer = LatestWriter("numbers", disk.write)
    writer.put(0)
    await disk.is_writing()
    waiting = asyncio.create_task(writer.written())
    await asyncio.sleep(0)
    assert not waiting.done()
    disk.let_through(1)
    await waiting
    assert disk.written == [0]


async def test_who_waits_may_be_cancelled_and_the_write_goes_on() -> None:
    disk = SlowDisk()
    writer = LatestWriter("numbers", disk.write)
    writer.put(0)
    await disk.is_writing()
    writer.put(1)
    waiting = asyncio.create_task(writer.written())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    disk.let_through(2)
    await writer.written()
    assert disk.written == [0, 1]


async def test_a_full_disk_costs_one_state(caplog: pytest.LogCaptureFixture) -> None:
    written: list[int] = []

    def write(state: int) -> None:
        if state == 0:
            raise OSError(28, "No space left on device")
        written.append(state)

    writer = LatestWriter("the numbers", write)
    with caplog.at_level(logging.WARNING):
        writer.put(0)
        await writer.written()
    assert caplog.messages == [
        "the numbers could not be written: [Errno 28] No space left on device"
    ]
    writer.put(1)
    await writer.written()
    assert written == [1]


async def test_nothing_was_put() -> None:
    await LatestWriter("numbers", lambda state: None).written()


async def test_a_write_that_breaks_costs_one_state(caplog: pytest.LogCaptureFixture) -> None:
    written: list[int] = []
    begun, go = threading.Event(), threading.Event()

    def write(state: int) -> None:
        begun.set()
        assert go.wait(timeout=20)
        if state == 0:
            raise ValueError("this state cannot be encoded")
        written.append(state)

    writer = LatestWriter("the numbers", write)
    writer.put(0)
    assert await asyncio.to_thread(begun.wait, 20)
    writer.put(1)
    go.set()
    await writer.written()
    assert written == [1], "the state that waited is written after the one that broke"
    (record,) = caplog.records
    assert (record.levelname, record.message) == ("ERROR", "the numbers could not be written")
    assert "this state cannot be encoded" in caplog.text
