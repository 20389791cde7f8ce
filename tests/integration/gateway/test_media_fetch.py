"""Media at addresses become data in the body before anything else reads it."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from media_server import PIXELS, MediaServer, asking, settings
from openai_engine import fixed

CHAT = "/v1/chat/completions"
NUM_TOKENS = 300


@pytest.fixture(name="server")
async def server_fixture() -> AsyncIterator[MediaServer]:
    async with MediaServer() as server:
        yield server


async def render(_request: Any, body: dict[str, Any]) -> web.Response:
    """Every chat has the same tokens, whatever its media."""
    (turn,) = body.get("messages") or body["input"]
    names = [part.get("uuid", "by path") for part in turn["content"] if "text" not in part["type"]]
    places = [{"offset": 10 + 20 * at, "length": 20} for at in range(len(names))]
    features = {"mm_hashes": {"image": names}, "mm_placeholders": {"image": places}}
    return web.json_response({"token_ids": [1] * NUM_TOKENS, "features": features})


def data_uri(pixels: bytes = PIXELS, content_type: str = "image/png") -> str:
    return f"data:{content_type};base64,{base64.b64encode(pixels).decode()}"


def series(region: Any, name: str, **labels: str) -> float:
    found = region.gateway.metrics.registry.get_sample_value(
        f"prfaas_gateway_media_{name}", labels or None
    )
    return found or 0.0


async def test_an_address_is_prefilled_elsewhere_as_its_data_is(
    open_region: Any, server: MediaServer
) -> None:
    async with open_region(**settings(server)) as region:
        region.engine.render_reply = render
        private = {"Authorization": "Bearer secret", "Cookie": "a=b", "X-Secret": "c"}
        at = server.url + "/a.png"
        status, headers, _ = await region.post(asking(at, at), CHAT, headers=private)
        assert (status, headers["x-prfaas-route"]) == (200, "prefill_cluster")
        assert [path for path, _ in server.requests] == ["/a.png"]
        _, seen = server.requests[0]
        assert seen == {
            "Host": f"127.0.0.1:{server.port}",
            "Accept": "image/*",
            "Accept-Encoding": "identity",
            "User-Agent": "prfaas",
            "Connection": "close",
        }
        (job,) = region.far.jobs
        decoded = region.engine.bodies(CHAT)[0]
        for body in (job.chat, decoded):
            parts = json.loads(body)["messages"][0]["content"]
            assert [part["image_url"]["url"] for part in parts[1:]] == [data_uri()] * 2

        # The same as if the client had sent the bytes itself.
        await region.post(asking(data_uri(), data_uri()), CHAT)
        assert region.far.jobs[1].media == job.media
        assert region.far.jobs[1].landing.token_digest == job.landing.token_digest
        record = await region.record()
        assert record.parts.media_s is None
        assert region.gateway.records[0].parts.media_s > 0
        assert series(region, "fetches_total") == 1
        assert series(region, "fetched_bytes_total") == len(PIXELS)
        assert series(region, "running_fetches") == 0
        await region.assert_nothing_held()
        assert region.gateway._limits.num_body_bytes == 0


async def test_other_bytes_at_the_same_address_are_another_picture(
    open_region: Any, server: MediaServer
) -> None:
    async with open_region(**settings(server)) as region:
        region.engine.render_reply = render
        for pixels in (b"first", b"second"):
            server.bodies["a"] = ("image/png", pixels)
            assert (await region.post(asking(server.url + "/body/a"), CHAT))[0] == 200
        first, second = region.far.jobs
        assert first.prompt_token_ids == second.prompt_token_ids
        assert first.media != second.media
        assert first.landing.token_digest != second.landing.token_digest


@pytest.mark.parametrize("kind", ["image", "video", "audio"])
async def test_each_kind_of_media(open_region: Any, server: MediaServer, kind: str) -> None:
    server.bodies["a"] = (f"{kind.upper()}/x-One; charset=utf-8", b"bytes")
    server.bodies["b"] = ("binary/octet-stream", b"others")
    async with open_region(**settings(server)) as region:
        region.engine.render_reply = render
        urls = [f"{server.url}/body/{name}" for name in "ab"]
        status, headers, _ = await region.post(asking(*urls, kind=f"{kind}_url"), CHAT)
        assert (status, headers["x-prfaas-route"]) == (200, "prefill_cluster")
        parts = json.loads(region.engine.bodies(CHAT)[0])["messages"][0]["content"]
        assert [part[f"{kind}_url"]["url"] for part in parts[1:]] == [
            data_uri(b"bytes", f"{kind}/x-one"),
            data_uri(b"others", "application/octet-stream"),
        ]
        assert all(part["uuid"].startswith("content-") for part in parts[1:])


async def test_requests_that_come_together_fetch_once(
    open_region: Any, server: MediaServer
) -> None:
    async with open_region(**settings(server)) as region:
        region.engine.render_reply = render
        posts = [
            asyncio.create_task(region.post(asking(server.url + "/slow"), CHAT)) for _ in range(3)
        ]
        await region.until(lambda: server.num_open["/slow"] == 1)
        await region.until(lambda: region.gateway.num_in_flight == 3)
        # One that goes away leaves the fetch to the others.
        posts[0].cancel()
        await region.until(lambda: region.gateway.num_in_flight == 2)
        assert series(region, "running_fetches") == 1
        server.gate.set()
        assert [(await post)[0] for post in posts[1:]] == [200, 200]
        assert server.asked("/slow") == 1
        # And later ones fetch anew.
        await region.post(asking(server.url + "/slow"), CHAT)
        assert server.asked("/slow") == 2


async def test_a_fetch_that_nobody_waits_for_ends(open_region: Any, server: MediaServer) -> None:
    async with open_region(**settings(server)) as region:
        post = asyncio.create_task(region.post(asking(server.url + "/trickle"), CHAT))
        await region.until(lambda: server.num_open["/trickle"] == 1)
        await region.until(lambda: region.gateway._limits.num_body_bytes > 2000 or post.done())
        post.cancel()
        await region.until(lambda: server.num_open["/trickle"] == 0)
        await region.assert_nothing_held()
        await region.until(lambda: series(region, "running_fetches") == 0)
        assert region.gateway._limits.num_body_bytes == 0


ALL_PATHS: list[tuple[str, Any]] = [
    (CHAT, asking("@")),
    (
        "/v1/responses",
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "@"}]}]},
    ),
    (
        "/v1/messages",
        {
            "max_tokens": 5,
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image", "source": {"type": "url", "url": "@"}}],
                }
            ],
        },
    ),
    ("/v1/messages/count_tokens", asking("@")),
    ("/v1/embeddings", asking("@")),
    ("/v1/score", {"text_1": {"content": asking("@")["messages"][0]["content"]}, "text_2": "x"}),
    ("/v1/rerank", {"query": "x", "documents": [asking("@")["messages"][0]]}),
    ("/tokenize", asking("@")),
]


@pytest.mark.parametrize(("path", "body"), ALL_PATHS, ids=[path for path, _ in ALL_PATHS])
async def test_no_endpoint_hands_an_address_on(
    open_region: Any, server: MediaServer, path: str, body: Any
) -> None:
    good = json.loads(json.dumps(body | {"model": "tiny"}).replace("@", server.url + "/a.png"))
    bad = json.loads(json.dumps(good).replace(server.url, "http://127.0.0.2"))
    async with open_region(**settings(server)) as region:
        region.engine.reply, region.engine.render_reply = fixed({"usage": {}}), render
        status, _, said = await region.post(bad, path)
        assert status == 400, said
        assert region.engine.requests == []
        status, _, said = await region.post(good, path)
        assert status == 200, said
        assert server.asked("/a.png") == 1
        for _, _, raw in region.engine.requests:
            assert server.url.encode() not in raw
            assert base64.b64encode(PIXELS) in raw


async def test_who_fetches_is_configuration(open_region: Any, server: MediaServer) -> None:
    at = server.url + "/a.png"
    async with open_region(**settings(server, fetch="refuse")) as region:
        status, _, said = await region.post(asking(at), CHAT)
        error = json.loads(said)["error"]
        assert (status, error["code"]) == (400, "media_fetch")
        assert error["param"] == "messages[0].content[1].image_url"
        assert (await region.post(asking(data_uri()), CHAT))[0] == 200
    allowed = {"fetch": "engine", "domains": ["127.0.0.1"]}
    async with open_region(**settings(server, **allowed)) as region:
        status, headers, _ = await region.post(asking(at), CHAT)
        assert (status, headers["x-prfaas-route"]) == (200, "direct")
        assert at.encode() in region.engine.bodies(CHAT)[0]
        for url in ("http://example.org/a.png", "file:///etc/passwd"):
            assert (await region.post(asking(url), CHAT))[0] == 400
    assert server.requests == []


async def test_explaining_a_prompt_fetches_its_media(open_region: Any, server: MediaServer) -> None:
    async with open_region(**settings(server)) as region:
        region.engine.render_reply = render
        await region.post(asking("http://127.0.0.2/a.png"), "/prfaas/cache/explain")
        assert region.engine.requests == []
