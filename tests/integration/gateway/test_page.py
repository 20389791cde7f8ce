"""`/ui` over HTTP: what it gives to whom, and what a slow or hostile client can do."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from page_region import with_instances

from deploy.gateway.api_keys import ApiKey
from deploy.gateway.ui import routes
from deploy.gateway.ui.view import MAX_TEXT, changes, view

KEYS = tuple(
    ApiKey.model_validate({"key": f"key-of-{name}", "name": name}) for name in ("ann", "bob")
)
HOSTILE = '<img src=x onerror="alert(1)">'


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer key-of-{name}"}


async def next_event(response: aiohttp.ClientResponse) -> tuple[str, Any]:
    block = b""
    async with asyncio.timeout(20):
        while not block.startswith(b"event: "):
            block = await response.content.readuntil(b"\n\n")
    name, data = block.decode().strip().split("\n")
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


async def test_the_files_hold_no_data_and_run_nothing_foreign(open_region: Any) -> None:
    async with open_region(api_keys=KEYS, operators=("ann",)) as region:
        for path in ("/ui", "/ui/page.js", "/ui/stream.js", "/ui/draw.js", "/ui/page.css"):
            async with region.session.get(region.url + path) as response:
                assert response.status == 200
                policy = response.headers["Content-Security-Policy"]
                assert "default-src 'none'" in policy
                assert "frame-ancestors 'none'" in policy
                assert "unsafe" not in policy
                assert response.headers["X-Content-Type-Options"] == "nosniff"
                text = await response.text()
                assert "innerHTML" not in text
                assert "far" not in text.split()
        for path in ("/ui/nothing.js", "/ui/routes.py", "/ui/..%2froutes.py"):
            async with region.session.get(region.url + path) as response:
                assert response.status == 404, path


@pytest.mark.parametrize(
    ("headers", "status"),
    [({}, 401), ({"Authorization": "Bearer wrong"}, 401), (bearer("bob"), 403)],
)
async def test_without_the_key_of_an_operator_nothing_leaks(
    open_region: Any, headers: dict[str, str], status: int
) -> None:
    async with open_region(api_keys=KEYS, operators=("ann",)) as region:
        await region.post(region.long_body(), headers=bearer("ann"))
        async with region.session.get(region.url + "/ui/events", headers=headers) as response:
            assert response.status == status
            answer = await response.text()
        assert not any(word in answer for word in ("far", "home", "d0", "tiny", "ann"))


async def test_an_operator_gets_a_view_and_then_what_changes(open_region: Any) -> None:
    async with open_region(api_keys=KEYS, operators=("ann",)) as region:
        url = region.url + "/ui/events"
        async with region.session.get(url, headers=bearer("ann")) as response:
            assert response.status == 200
            assert response.headers["Cache-Control"] == "no-store"
            name, first = await next_event(response)
            assert name == "view"
            assert first["instances"]["home/d0"]["role"] == "both"
            assert first["clusters"]["far"]["kind"] == "prefill"
            assert first["links"]["far home"]["threshold_tokens"] == 100
            assert first["requests"] == {}
            await region.post(region.long_body(), headers=bearer("ann"))
            found: dict[str, Any] = {}
            while not any(row["outcome"] == "ok" for row in found.values()):
                name, changed = await next_event(response)
                assert name == "changes"
                found |= changed.get("requests", {"set": {}})["set"]
            (row,) = found.values()
            assert (row["tenant"], row["route"]) == ("ann", "prefill_cluster")
            assert row["reason"]
            assert row["parts"]
            # Its key is taken away.
            region.gateway._keys.replace(KEYS[1:])
            while name != "refused":
                name, last = await next_event(response)
            assert last == {"code": "invalid_api_key"}
            assert await response.content.read() == b""


async def test_where_pages_have_an_address_of_their_own_the_page_is_there(open_region: Any) -> None:
    async with open_region(admin="127.0.0.1:0") as region:
        for url, status in ((region.url, 404), (region.admin_url, 200)):
            async with region.session.get(url + "/ui") as response:
                assert response.status == status


async def test_a_reader_too_many_is_told_so(
    open_region: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "MAX_READERS", 1)
    async with open_region() as region:
        url = region.url + "/ui/events"
        async with region.session.get(url) as response:
            await next_event(response)
            async with region.session.get(url) as second:
                assert second.status == 503
                assert (await second.json())["error"]["code"] == "too_many_readers"


async def test_a_reader_that_takes_nothing_is_cut_off(
    open_region: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "STALL_S", 0.2)
    monkeypatch.setattr(routes, "TICK_S", 0.01)
    monkeypatch.setattr(routes, "MAX_READERS", 1)
    # Every look gives the whole again, which is soon more than sockets hold.
    monkeypatch.setattr(routes, "changes", lambda before, after: after)
    async with open_region() as region:
        with_instances(region.far, ["prefill"] * 1000)
        reports = region.gateway.pages.watcher.prefill_reports
        await region.until(lambda: len(reports()["far"].instances) == 1000)
        url = region.url + "/ui/events"
        async with region.session.get(url) as stalled:
            assert stalled.status == 200
            async with asyncio.timeout(30):
                # It gives back its place.
                status = 503
                while status == 503:
                    await asyncio.sleep(0.05)
                    async with region.session.get(url) as other:
                        status = other.status
        assert status == 200


def test_names_of_any_length_are_cut_and_stay_text() -> None:
    record = {
        "request_id": "__proto__",
        "started_s": 1.0,
        "tenant": HOSTILE,
        "error": "x" * 9999,
        "numbers": {"a" * 9999: 1.23456789},
    }
    row = view({"/prfaas/requests": {"requests": [record]}})["requests"]["1.000000 __proto__"]
    assert row["tenant"] == HOSTILE
    assert len(row["error"]) == MAX_TEXT + 1
    assert row["numbers"] == {"a" * MAX_TEXT + "…": 1.235}


def test_changes_name_what_differs_only() -> None:
    before = {"links": {"a": {"x": 1}, "b": {"x": 1}}, "plan": {"now": {"x": 1}}}
    after = {"links": {"a": {"x": 2}, "c": {"x": 1}}, "plan": {"now": {"x": 1}}}
    assert changes(before, after) == {
        "links": {"set": {"a": {"x": 2}, "c": {"x": 1}}, "gone": ["b"]}
    }
    assert changes(after, after) == {}


def test_ages_are_no_change() -> None:
    link = {"source": "far", "target": "home", "condition": "clear", "age_s": 1.0}
    older = link | {"age_s": 2.0, "condition_s": 9.0}
    views = [view({"/prfaas/links": {"links": [item]}}) for item in (link, older)]
    assert changes(*views) == {}
