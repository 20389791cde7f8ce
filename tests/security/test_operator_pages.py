"""Attacks on what only operators may see and change, on a real gateway."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from raw_client import RawClient

from deploy.gateway.api_keys import ApiKey

KEYS = tuple(ApiKey.model_validate(line) for line in ("ops key-of-ops", "acme key-of-acme"))
PAGES = (
    "/metrics",
    "/prfaas/requests",
    "/prfaas/requests/x",
    "/prfaas/region",
    "/prfaas/scheduling",
    "/prfaas/plan",
    "/prfaas/links",
    "/prfaas/instances",
    "/prfaas/gateways",
    "/prfaas/cache",
    "/prfaas/cache/top",
    "/v1/pd_role",
)
ORDER = {"instance": "d0", "role": "prefill"}


async def status_of(region: Any, url: str, key: str = "") -> int:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with region.session.get(url, headers=headers) as response:
        return int(response.status)


async def test_pages_of_operators_ask_for_their_keys(open_region: Any) -> None:
    async with open_region(api_keys=KEYS, operators=("ops",)) as region:
        for path in PAGES:
            assert await status_of(region, region.url + path) == 401, path
            assert await status_of(region, region.url + path, "guessed") == 401, path
            assert await status_of(region, region.url + path, "key-of-acme") == 403, path
            assert await status_of(region, region.url + path, "key-of-ops") in (200, 404), path


async def test_no_spelling_of_a_path_goes_round_the_key(open_region: Any) -> None:
    paths = (
        "/prfaas/region",
        "//prfaas/region",
        "/%70rfaas/region",
        "/prfaas%2fregion",
        "/prfaas/./region",
        "/v1/../prfaas/region",
        "/v1/models/../../metrics",
        "/metrics/",
        "/metrics;x",
        "/metrics?/health",
        "http://127.0.0.1/metrics",
    )
    upgrade = "Connection: Upgrade\r\nUpgrade: websocket\r\nX-Original-URL: /health"
    async with open_region(api_keys=KEYS) as region:
        for path in paths:
            for method in ("GET", "HEAD", "OPTIONS", "TRACE", "POST"):
                async with RawClient(region.url) as client:
                    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\n{upgrade}\r\n\r\n"
                    await client.send(head.encode())
                    assert await client.status() in (400, 401, 404, 405), (method, path)


async def test_the_key_of_a_run_opens_pages_and_no_model(open_region: Any) -> None:
    async with open_region(api_keys=KEYS, operators=("ops",), owned={"run_key": "run"}) as region:
        assert await status_of(region, region.url + "/prfaas/region", "run") == 200
        headers = {"Authorization": "Bearer run"}
        body = {"model": "tiny", "prompt": "x"}
        assert (await region.post(body, headers=headers))[0] == 401
        assert await status_of(region, region.url + "/v1/models", "run") == 401


async def test_without_api_keys_only_the_user_of_the_run_adds_instances(open_region: Any) -> None:
    order = {"cluster": "none", "name": "p9", "url": "http://127.0.0.1:1", "agent": "127.0.0.1:2"}
    async with open_region(owned={"run_key": "run"}) as region:
        for shown, expected in ((None, 401), ("guessed", 401), ("run", 404)):
            headers = {} if shown is None else {"Authorization": f"Bearer {shown}"}
            status, _, answer = await region.post(order, "/prfaas/instances", headers=headers)
            assert status == expected, answer
        assert b"unknown_cluster" in answer
        assert await status_of(region, region.url + "/prfaas/instances") == 200


async def test_a_listener_of_their_own_is_the_only_place_of_the_pages(open_region: Any) -> None:
    async with open_region(api_keys=KEYS, operators=("ops",), admin="127.0.0.1:0") as region:
        assert region.admin_url != region.url
        for path in PAGES:
            assert await status_of(region, region.url + path, "key-of-ops") == 404, path
            assert await status_of(region, region.admin_url + path) == 401, path
            assert await status_of(region, region.admin_url + path, "key-of-ops") in (200, 404)
        assert await status_of(region, region.admin_url + "/v1/models", "key-of-ops") == 404
        for url in (region.url, region.admin_url):
            assert await status_of(region, url + "/health") == 200
        body = {"model": "tiny", "prompt": "x"}
        headers = {"Authorization": "Bearer key-of-acme"}
        assert (await region.post(body, headers=headers))[0] == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        # A name of the page's own that leads to this gateway: then both are equal.
        {"Origin": "http://evil.example", "Host": "evil.example"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-origin"},
    ],
)
async def test_no_web_page_changes_roles(region: Any, headers: dict[str, str]) -> None:
    status, _, answer = await region.post(ORDER, "/v1/pd_role", headers=headers)
    assert status == 403
    assert b"from_a_browser" in answer


async def test_no_web_page_gives_orders_to_instances(region: Any) -> None:
    headers = {"Origin": "http://evil.example"}
    order = {"cluster": "far", "name": "p9", "url": "http://evil.example", "agent": "10.0.0.1:2"}
    status, _, answer = await region.post(order, "/prfaas/instances", headers=headers)
    assert (status, b"from_a_browser" in answer) == (403, True)
    url = region.url + "/prfaas/instances/d0"
    async with region.session.delete(url, headers=headers) as refused:
        assert (refused.status, b"from_a_browser" in await refused.read()) == (403, True)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", None])
async def test_forms_change_no_roles(region: Any, kind: str | None) -> None:
    """A request that a browser sends to other sites without asking them first."""
    headers = {} if kind is None else {"Content-Type": kind}
    url = region.url + "/v1/pd_role"
    raw = b'{"instance":"d0","role":"prefill"}'
    async with region.session.post(url, data=raw, headers=headers) as response:
        assert response.status == 415
    assert (await region.post(ORDER, "/v1/pd_role"))[0] == 409, "an operator's order is heard"


async def test_a_revoked_operator_is_one_no_more(open_region: Any, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("ops key-of-ops\nacme key-of-acme\n")
    async with open_region(api_keys=KEYS, operators=("ops",), owned={"keys_file": path}) as region:
        url = region.url + "/prfaas/region"
        assert await status_of(region, url, "key-of-ops") == 200
        path.write_text("acme key-of-acme\n")
        while await status_of(region, url, "key-of-ops") != 401:
            pass
        assert await status_of(region, url, "key-of-acme") == 403


async def test_an_operator_revoked_while_its_order_arrives_is_not_heard(
    open_region: Any, tmp_path: Path
) -> None:
    path = tmp_path / "keys"
    path.write_text("ops key-of-ops\nacme key-of-acme\n")
    order = json.dumps(ORDER).encode()
    headers = {"Authorization": "Bearer key-of-ops", "Content-Type": "application/json"}
    async with (
        open_region(api_keys=KEYS, operators=("ops",), owned={"keys_file": path}) as region,
        RawClient(region.url) as client,
    ):
        await client.post("/v1/pd_role", headers, announced=len(order), body=order[:5])
        path.write_text("acme key-of-acme\n")
        while await status_of(region, region.url + "/prfaas/region", "key-of-ops") != 401:
            pass
        await client.send(order[5:])
        assert await client.status() == 401
