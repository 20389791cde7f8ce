"""Several gateways of one region, around the same engines, that share through a Redis server."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from eventually import eventually
from gateway_region import Region

from deploy.gateway.config import SharedSection
from deploy.gateway.sharing.overview import SharingOverview
from deploy.gateway.sharing.redis_region import region_at

MODEL = "tiny"


@asynccontextmanager
async def gateways(
    open_region: Any, url: str, num: int = 2, **config: Any
) -> AsyncIterator[list[Region]]:
    """Gateways called g0, g1, ... around the same engines."""
    found: list[Region] = []
    async with AsyncExitStack() as stack:
        for number in range(num):
            opened = open_region(
                around=found[0] if found else None,
                owned={"shared": region_at(url, "r")},
                shared=SharedSection(redis=url, region="r", name=f"g{number}"),
                **config,
            )
            found.append(await stack.enter_async_context(opened))
        await eventually(lambda: all(page(item).state == "joined" for item in found))
        await eventually(lambda: all(len(page(item).peers) == num - 1 for item in found))
        yield found


def page(region: Region) -> SharingOverview:
    assert region.gateway.sharing is not None
    return region.gateway.sharing.overview()


def body(num_bytes: int = 60, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "x" * num_bytes, "max_tokens": 4} | fields


def num_seen(region: Region) -> int:
    known = region.gateway.scheduler.knowledge(MODEL)
    return sum(known.profile(place).num_seen for place in known.places)


async def ask(region: Region, num: int, **fields: Any) -> None:
    for number in range(num):
        asked = body(100 + 300 * (number % 5), stream=True, **fields)
        asked["stream_options"] = {"include_usage": True}  # it says how long the prompt was
        status, _, answer = await region.post(asked)
        assert status == 200, answer


async def served(region: Region) -> None:
    """Wait until a request is let in: the end of one is told to the other gateway soon."""
    await eventually(lambda: region.post(body()), lambda answer: answer[0] == 200)


def limited(**limit: Any) -> dict[str, Any]:
    return {"scheduling": {"admission": {"policy": "off", "default_tenant": limit}}}
