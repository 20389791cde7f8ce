"""A prefill leg gets names and places of media, or one engine serves their prompt whole."""

import json
from typing import Any

import pytest
from aiohttp import web

from kvmanager.hashing import token_digest
from kvmanager.media_items import MediaItem
from scheduler.routing.decision import ONE_ENGINE

PICTURE = "data:image/png;base64,AAAA"
NUM_TOKENS = 300
LENGTH = 20
STREAM = {"stream": True, "max_tokens": 4}


def chat(
    url: str = PICTURE, options: dict[str, Any] | None = None, **fields: Any
) -> dict[str, Any]:
    content = [
        {"type": "text", "text": "what is it?"},
        {"type": "image_url", "image_url": {"url": url}, **fields},
    ]
    message = {"role": "user", "content": content}
    return {"model": "tiny", "messages": [message], **(options or {})}


class Renderer:
    """Renders every chat to the same tokens, with the picture at `offset`."""

    def __init__(self, offset: int = 10) -> None:
        self.offset = offset
        self.bodies: list[dict[str, Any]] = []

    async def __call__(self, _request: Any, body: dict[str, Any]) -> web.Response:
        self.bodies.append(body)
        parts = body["messages"][0]["content"]
        names = [part.get("uuid", "by path") for part in parts if part["type"] != "text"]
        places = [{"offset": self.offset, "length": LENGTH} for _ in names]
        features = {"mm_hashes": {"image": names}, "mm_placeholders": {"image": places}}
        return web.json_response({"token_ids": [1] * NUM_TOKENS, "features": features})


async def test_a_prompt_with_a_picture_is_predicted_with_its_encoding(region: Any) -> None:
    scheduler = region.gateway.scheduler
    await region.post(region.long_body(**STREAM))
    text = await region.record()
    region.engine.render_reply = Renderer()
    known = scheduler.knowledge("tiny")
    for place in ("far", ONE_ENGINE):
        for num_tokens in (250, 500, 1000, 2000):
            known.learn(place, num_tokens, 0, num_tokens * 1e-3)
        for tokens in (10, 20, 40):
            known.media.encoded(place, tokens, tokens * 0.1)
    before = known.prefill("far"), known.service("far", scheduler.clock())
    status, _, _ = await region.post(chat(options=STREAM), "/v1/chat/completions")
    assert status == 200
    record = await region.record()
    assert record.first_target == "far"
    parts = record.predictions["remote"]
    assert parts["encode_s"] == pytest.approx(LENGTH * 0.1, rel=0.05)
    assert record.predicted_ttft_s == pytest.approx(sum(parts.values()), abs=1e-5)
    assert "encode_s" not in text.predictions["remote"]
    # Its own times taught nothing about text.
    assert (known.prefill("far"), known.service("far", scheduler.clock())) == before


async def test_a_picture_goes_to_the_prefill_cluster_with_its_name(region: Any) -> None:
    renderer = region.engine.render_reply = Renderer()
    status, headers, _ = await region.post(chat(), "/v1/chat/completions")
    assert (status, headers["x-prfaas-route"]) == (200, "prefill_cluster")
    (job,) = region.far.jobs
    (item,) = job.media
    assert item == MediaItem(item.identifier, 10, LENGTH)
    assert renderer.bodies[0]["mm_payload"] == "none"
    sent, decoded = (
        json.loads(job.chat),
        json.loads(region.engine.bodies("/v1/chat/completions")[0]),
    )
    assert sent["messages"] == decoded["messages"] == renderer.bodies[0]["messages"]
    assert sent["messages"][0]["content"][1]["uuid"] == item.identifier
    assert job.landing.token_digest == token_digest(job.prompt_token_ids, job.media).hex()

    # The same token ids with another picture.
    await region.post(chat(PICTURE + "AAAA"), "/v1/chat/completions")
    other = region.far.jobs[1]
    assert other.prompt_token_ids == job.prompt_token_ids
    assert other.landing.token_digest != job.landing.token_digest


@pytest.mark.parametrize(
    "body",
    [
        chat("https://example.org/a.png"),
        chat(uuid="mine"),
        chat() | {"mm_processor_kwargs": {"size": 3}},
        chat() | {"media_io_kwargs": {"image": {}}},
    ],
)
async def test_media_that_only_one_engine_can_read_stay_there(
    region: Any, body: dict[str, Any]
) -> None:
    region.engine.render_reply = renderer = Renderer()
    status, headers, _ = await region.post(body, "/v1/chat/completions")
    assert (status, headers["x-prfaas-route"]) == (200, "direct")
    assert headers["x-prfaas-reason"].startswith("multimodal")
    assert renderer.bodies == region.far.jobs == []


async def test_a_picture_at_the_very_end_is_not_cut(region: Any) -> None:
    region.engine.render_reply = Renderer(offset=NUM_TOKENS - LENGTH)
    _, headers, _ = await region.post(chat(), "/v1/chat/completions")
    assert headers["x-prfaas-reason"].startswith("multimodal")
    region.engine.render_reply = Renderer(offset=NUM_TOKENS - LENGTH - 1)
    _, headers, _ = await region.post(chat(), "/v1/chat/completions")
    assert headers["x-prfaas-route"] == "prefill_cluster"


async def test_media_that_the_gateway_did_not_see_stay_on_one_engine(region: Any) -> None:
    async def unseen(_request: Any, _body: Any) -> web.Response:
        places = {"image": [{"offset": 10, "length": LENGTH}]}
        features = {"mm_hashes": {"image": ["by path"]}, "mm_placeholders": places}
        return web.json_response([{"token_ids": [1] * NUM_TOKENS, "features": features}])

    region.engine.render_reply = unseen
    _, headers, _ = await region.post(region.long_body())
    assert headers["x-prfaas-reason"].startswith("multimodal")
    assert region.far.jobs == []
