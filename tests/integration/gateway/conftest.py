"""Regions of doubles for the gateway's tests; see `gateway_region`."""

from collections.abc import AsyncIterator
from typing import Any

import contract_engine
import pytest
from aiohttp import web
from gateway_fixtures import open_region_fixture, region
from gateway_region import Region
from openai_engine import OpenAiEngine

__all__ = ["lone_engine", "open_region_fixture", "region"]


@pytest.fixture
async def lone_engine() -> AsyncIterator[OpenAiEngine]:
    """An engine that no front knows yet."""
    engine = OpenAiEngine("d0")
    await engine.start()
    yield engine
    await engine.stop()


@pytest.fixture(name="speaking")
def speaking_fixture(region: Region) -> Region:
    """`region`, whose engine answers in the shapes of OpenAI's and Anthropic's APIs."""
    engine = region.engine

    async def reply(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await engine._load_landing(body)
        return await contract_engine.reply(request, body)

    engine.reply = reply
    engine.render_reply = contract_engine.render_reply
    return region
