"""Regions of doubles for the gateway's tests; see `gateway_region`."""

from collections.abc import AsyncIterator

import pytest
from gateway_fixtures import open_region_fixture, region
from gateway_region import OpenAiEngine

__all__ = ["lone_engine", "open_region_fixture", "region"]


@pytest.fixture
async def lone_engine() -> AsyncIterator[OpenAiEngine]:
    """An engine that no front knows yet."""
    engine = OpenAiEngine("d0")
    await engine.start()
    yield engine
    await engine.stop()
