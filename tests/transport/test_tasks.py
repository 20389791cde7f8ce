"""Tasks that nobody awaits."""

import asyncio
import gc
from typing import Any

import pytest

from transport.tasks import start_task


async def test_a_failure_is_logged_though_the_owner_never_asks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fail() -> None:
        raise ValueError("what went wrong")

    task = start_task(fail(), "looking after leases")
    await asyncio.wait({task})
    await asyncio.sleep(0)
    (record,) = caplog.records
    assert (record.levelname, record.getMessage()) == ("ERROR", "looking after leases failed")
    assert "what went wrong" in caplog.text


async def test_an_end_and_a_cancellation_are_no_failures(caplog: pytest.LogCaptureFixture) -> None:
    assert await start_task(asyncio.sleep(0, 5), "a value") == 5
    waiting = start_task(asyncio.sleep(3600), "waiting")
    waiting.cancel()
    await asyncio.wait({waiting})
    await asyncio.sleep(0)
    assert not caplog.records


async def test_an_owner_holds_a_task_until_it_ends() -> None:
    owner: set[asyncio.Task[Any]] = set()
    goes_on = asyncio.Event()
    start_task(goes_on.wait(), "held by its owner only", owner)
    await asyncio.sleep(0)
    gc.collect()
    (task,) = owner
    goes_on.set()
    assert await task
    await asyncio.sleep(0)
    assert not owner
