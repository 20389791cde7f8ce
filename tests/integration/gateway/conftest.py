"""Regions of doubles for the gateway's tests; see `gateway_region`."""

from collections.abc import AsyncIterator

import contract_engine
import pytest
from gateway_fixtures import open_region_fixture, region
from gateway_region import Region
from openai_engine import OpenAiEngine

__all__ = ["lone_engine", "open_region_fixture", "region"]


@pytest.fixture
async def lone_engine() -> AsyncIterator[OpenAiEngine]:
    """An engine that no front knows yet."""
    engine = await OpenAiEngine("d0").start()
    yield engine
    await engine.stop()


@pytest.fixture(name="speaking")
def speaking_fixture(region: Region) -> Region:
    """`region`, whose engine answers in the shapes of OpenAI's and Anthropic's APIs."""
    region.engine.reply = region.engine.after_landing(contract_engine.reply)
    region.engine.render_reply = contract_engine.render_reply
    return region
