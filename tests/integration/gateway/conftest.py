"""Regions of doubles for the gateway's tests; see `gateway_region`."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from gateway_region import OpenAiEngine, Region, open_region


@pytest.fixture
async def lone_engine() -> AsyncIterator[OpenAiEngine]:
    """An engine that no front knows yet."""
    engine = OpenAiEngine("d0")
    await engine.start()
    yield engine
    await engine.stop()


@pytest.fixture(name="open_region")
def open_region_fixture() -> Any:
    """Opens a region of its own with `async with open_region(...)`."""
    return open_region


@pytest.fixture
async def region() -> AsyncIterator[Region]:
    """One decode engine, one prefill cluster called far, a threshold of 100 tokens."""
    async with open_region() as opened:
        yield opened
