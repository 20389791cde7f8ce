"""The fixtures of regions of doubles around a real gateway; see `gateway_region`."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from gateway_region import Region, open_region


@pytest.fixture(name="open_region")
def open_region_fixture() -> Any:
    """Opens a region of its own with `async with open_region(...)`."""
    return open_region


@pytest.fixture
async def region() -> AsyncIterator[Region]:
    """One decode engine, one prefill cluster called far, a threshold of 100 tokens."""
    async with open_region() as opened:
        yield opened
