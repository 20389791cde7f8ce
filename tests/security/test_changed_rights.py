"""Rights that a tenant loses while the gateway runs are gone for its next request."""

from __future__ import annotations

import json
from typing import Any

from deploy.gateway.api_keys import ApiKey
from deploy.gateway.config import GatewayConfig

KEYS = tuple(ApiKey.model_validate(line) for line in ("ops one", "acme two", "eve three"))
BODY = {"model": "tiny", "prompt": "x"}


def using(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def change(region: Any, **settings: Any) -> None:
    """As when the gateway's file was changed."""
    config: GatewayConfig = region.gateway.config
    region.gateway.use_live(config.model_copy(update=settings))


async def status_of(region: Any, key: str, **fields: Any) -> int:
    return int((await region.post(BODY | fields, headers=using(key)))[0])


async def page_status(region: Any, key: str) -> int:
    url = region.url + "/prfaas/region"
    async with region.session.get(url, headers=using(key)) as response:
        return int(response.status)


async def salt_of(region: Any, key: str) -> str:
    """The root of the cache keys of the tenant's prompt."""
    assert await status_of(region, key) == 200
    return str(json.loads(region.engine.bodies()[-1])["cache_salt"])


async def test_an_operator_that_is_one_no_more_sees_nothing(open_region: Any) -> None:
    async with open_region(api_keys=KEYS, operators=("ops", "acme")) as region:
        assert await page_status(region, "two") == 200
        change(region, operators=("ops",))
        assert await page_status(region, "two") == 403
        assert await page_status(region, "one") == 200


async def test_who_may_go_first_no_more_does_not(open_region: Any) -> None:
    async with open_region(api_keys=KEYS, priority_tenants=("acme",)) as region:
        assert await status_of(region, "two", priority=-1) == 200
        change(region, priority_tenants=("ops",))
        assert await status_of(region, "two", priority=-1) == 403
        assert await status_of(region, "one", priority=-1) == 200


async def test_who_leaves_a_group_finds_nothing_of_it_any_more(open_region: Any) -> None:
    groups = {"team": ("acme", "eve")}
    async with open_region(api_keys=KEYS, shared_caches=groups) as region:
        shared = await salt_of(region, "two")
        assert await salt_of(region, "three") == shared
        change(region, shared_caches={"team": ("acme",)})
        alone = await salt_of(region, "three")
        assert alone != shared
        assert await salt_of(region, "two") == shared
        change(region, shared_caches={})
        assert len({shared, alone, await salt_of(region, "two")}) == 3
        assert await salt_of(region, "three") == alone


async def test_requests_in_flight_count_towards_a_lower_limit(open_region: Any) -> None:
    async with open_region(api_keys=KEYS) as region:
        region.engine.next_token.clear()
        url = region.url + "/v1/completions"
        body = BODY | {"stream": True}
        streams = [
            await region.session.post(url, json=body, headers=using("two")) for _ in range(2)
        ]
        assert [stream.status for stream in streams] == [200, 200]
        change(region, max_in_flight=2)
        assert await status_of(region, "one") == 429
        change(region, max_in_flight=3)
        region.engine.next_token.set()
        assert await status_of(region, "one") == 200
        for stream in streams:
            assert (await stream.read()).endswith(b"data: [DONE]\n\n")
        await region.until(lambda: region.gateway.num_in_flight == 0)
