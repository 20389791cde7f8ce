"""A prefill leg gets names and places of media, or one engine serves their prompt whole."""

import json
from typing import Any

import gateway_region
import msgspec
import pytest
from aiohttp import web
from cache_doubles import FakeDirectory, MovingAgents
from eventually import eventually
from msgspec import structs
from openai_engine import fixed, refusing

from deploy.gateway.cache.region_caches import RegionCaches
from kvmanager.agent.messages import CacheModel
from kvmanager.directory.messages import NodeName
from kvmanager.embedding_keys import embedding_key
from kvmanager.hashing import block_keys, root_key, token_digest
from kvmanager.media_items import MediaItem, block_extras
from prfaas.engines.errors import PrefillFailed
from scheduler.reports import EncodeReport, takes_text_only
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
        (turn,) = body.get("messages") or body["input"]
        parts = [part for part in turn["content"] if "text" not in part["type"]]
        names = [part.get("uuid", "by path") for part in parts]
        places = [
            {"offset": self.offset + at * LENGTH, "length": LENGTH} for at in range(len(names))
        ]
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


async def test_a_picture_with_an_embedding_is_not_predicted_to_be_encoded(
    open_region: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = gateway_region.report

    def with_encoder(*fields: Any) -> Any:
        return msgspec.structs.replace(plain(*fields), encoder="vit")

    monkeypatch.setattr(gateway_region, "report", with_encoder)
    directory = FakeDirectory()
    caches = RegionCaches(directory, lambda _: pytest.fail("no agent is asked"))
    async with open_region(caches=caches) as region:
        region.engine.render_reply = Renderer()
        known = region.gateway.scheduler.knowledge("tiny")
        for place in ("far", ONE_ENGINE):
            for num_tokens in (250, 500, 1000, 2000):
                known.learn(place, num_tokens, 0, num_tokens * 1e-3)
            for tokens in (10, 20, 40):
                known.media.encoded(place, tokens, tokens * 0.1)
        await region.post(chat(options=STREAM), "/v1/chat/completions")
        first = (await region.record()).predictions
        assert first["local"]["encode_s"] == pytest.approx(2.0, rel=0.05)
        (key,) = directory.embeddings_asked[0]
        directory.embeddings = {key: [NodeName("home", "d0")]}
        await region.post(chat(options=STREAM), "/v1/chat/completions")
        second = (await region.record()).predictions
        assert "encode_s" not in second["local"]
        assert second["remote"]["encode_s"] == pytest.approx(2.0, rel=0.05)


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


async def test_a_job_names_the_nodes_that_have_embeddings_of_its_pictures(
    open_region: Any,
) -> None:
    directory, encoder = FakeDirectory(), "files:1 bfloat16"
    caches = RegionCaches(directory, MovingAgents(CacheModel("ab", 64, []), 0, 0).at)
    async with open_region(caches=caches) as region:
        region.engine.render_reply = Renderer()
        said = await region.far.report()
        (instance,) = said.instances
        region.far.set_report = structs.replace(
            said,
            instances=(structs.replace(instance, encoder=encoder),),
            encode=EncodeReport(),
        )
        await eventually(
            lambda: region.gateway._watcher.prefill_reports()["far"].encode is not None
        )
        assert (await region.post(chat(), "/v1/chat/completions"))[0] == 200
        (job,) = region.far.jobs
        assert job.embedding_nodes == ()
        key = embedding_key(encoder, job.media[0].identifier)
        directory.embeddings[key] = [NodeName("far", "far-0"), NodeName("home", "d0")]
        await region.post(chat(), "/v1/chat/completions")
        assert region.far.jobs[1].embedding_nodes == ("far-0:1",)
        # Another picture, and text.
        await region.post(chat(PICTURE + "AAAA"), "/v1/chat/completions")
        region.engine.render_reply = None
        await region.post(region.long_body())
        assert [job.embedding_nodes for job in region.far.jobs[2:]] == [(), ()]


@pytest.mark.parametrize(
    "body",
    [
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
    places = {"image": [{"offset": 10, "length": LENGTH}]}
    features = {"mm_hashes": {"image": ["by path"]}, "mm_placeholders": places}
    rendered = [{"token_ids": [1] * NUM_TOKENS, "features": features}]
    region.engine.render_reply = fixed(rendered)
    _, headers, _ = await region.post(region.long_body())
    assert headers["x-prfaas-reason"].startswith("multimodal")
    assert region.far.jobs == []


def part(kind: str, data: str) -> dict[str, Any]:
    """One of the parts with a medium that vLLM names, whose bytes are `data`."""
    if kind == "input_audio":
        return {"type": kind, kind: {"data": data, "format": "wav"}}
    url = f"data:{kind.removesuffix('_url')}/x;base64,{data}"
    return {"type": kind, kind: {"url": url}}


@pytest.mark.parametrize("kind", ["image_url", "video_url", "audio_url", "input_audio"])
async def test_each_kind_of_media_is_named(region: Any, kind: str) -> None:
    region.engine.render_reply = Renderer()
    for data in ("AAAA", "BBBB", "AAAA"):
        body = chat()
        body["messages"][0]["content"][1] = part(kind, data)
        status, headers, _ = await region.post(body, "/v1/chat/completions")
        assert (status, headers["x-prfaas-route"]) == (200, "prefill_cluster")
    first, other, again = (job.media[0].identifier for job in region.far.jobs)
    assert first == again != other


async def test_a_response_with_a_picture_goes_to_the_prefill_cluster(region: Any) -> None:
    renderer = region.engine.render_reply = Renderer()
    content = [
        {"type": "input_text", "text": "what is it?"},
        {"type": "input_image", "image_url": PICTURE, "detail": "auto"},
    ]
    body = {"model": "tiny", "input": [{"role": "user", "content": content}]}
    answer = {"object": "response", "usage": {"input_tokens": NUM_TOKENS}}
    region.engine.reply = region.engine.after_landing(fixed(answer))
    status, headers, _ = await region.post(body, "/v1/responses")
    assert (status, headers["x-prfaas-route"]) == (200, "prefill_cluster")
    assert region.engine.sources == ["landing"]
    (job,) = region.far.jobs
    assert job.api == "responses"
    assert renderer.bodies[0]["mm_payload"] == "none"
    sent = json.loads(job.chat)["input"][0]["content"]
    decoded = json.loads(region.engine.bodies("/v1/responses")[0])["input"][0]["content"]
    assert sent == decoded
    assert sent[1].pop("uuid") == job.media[0].identifier
    assert sent == content

    # The name is that of the same picture in a chat.
    region.engine.reply = None
    await region.post(chat(), "/v1/chat/completions")
    assert region.far.jobs[1].media == job.media


async def test_a_message_with_a_picture_stays_on_one_engine(region: Any) -> None:
    region.engine.reply = fixed({"type": "message", "usage": {"input_tokens": 1}})
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    turn = {"role": "user", "content": [{"type": "image", "source": source}]}
    body = {"model": "tiny", "max_tokens": 5, "messages": [turn]}
    status, headers, _ = await region.post(body, "/v1/messages")
    assert (status, headers["x-prfaas-route"]) == (200, "direct")
    assert headers["x-prfaas-reason"].startswith("multimodal")
    assert region.far.jobs == []


async def test_prompts_share_blocks_up_to_the_first_picture_that_differs(region: Any) -> None:
    region.engine.render_reply = Renderer()
    for letters in ("AB", "AC", "BA", "AB"):
        body = chat()
        pictures = [part("image_url", letter * 4) for letter in letters]
        body["messages"][0]["content"][1:] = pictures
        await region.post(body, "/v1/chat/completions")
    jobs = region.far.jobs
    assert len({job.prompt_token_ids.packed for job in jobs}) == 1
    root = root_key(b"model")
    keys = [block_keys(job.prompt_token_ids, 16, root, block_extras(job.media, 16)) for job in jobs]
    digests = [job.landing.token_digest for job in jobs]
    assert keys[0] == keys[3]
    assert digests[0] == digests[3]
    assert len(set(digests)) == 3
    # The first picture has tokens 10 to 30, the second those from 30 to 50.
    ab, ac, ba = keys[:3]
    assert ab[:1] == ac[:1]
    assert not set(ab[1:]) & set(ac[1:])
    assert not set(ab) & set(ba)


REFUSAL = {"error": {"message": "At most 1 image(s) may be provided.", "code": 400}}


@pytest.mark.parametrize("local_prefill", ["allow", "refuse"])
async def test_media_that_the_prefill_engine_refuses_are_not_tried_elsewhere(
    open_region: Any, local_prefill: str
) -> None:
    scheduling = {"routing": {"local_prefill": local_prefill}}
    async with open_region(prefill=("a", "b"), scheduling=scheduling) as region:
        region.engine.render_reply = Renderer()
        for cluster in region.prefill.values():
            cluster.error = PrefillFailed("rejected", "a-0: HTTP 400: At most 1 image(s)")
        region.engine.reply = fixed(REFUSAL, 400)
        status, _, said = await region.post(chat(), "/v1/chat/completions")
        assert (status, json.loads(said)) == (400, REFUSAL)
        assert sum(len(cluster.jobs) for cluster in region.prefill.values()) == 1
        record = await region.record()
        assert record.num_retries == 0
        # What one engine would take, it gets.
        region.engine.reply = None
        status, headers, _ = await region.post(chat(), "/v1/chat/completions")
        assert (status, headers["x-prfaas-route"]) == (200, "local")
        await region.assert_nothing_held()


async def test_media_that_rendering_refuses_get_the_engines_own_error(region: Any) -> None:
    region.engine.render_reply = region.engine.reply = fixed(REFUSAL, 400)
    status, headers, said = await region.post(chat(), "/v1/chat/completions")
    assert (status, json.loads(said)) == (400, REFUSAL)
    assert headers["x-prfaas-reason"].startswith("render_refused")
    assert region.far.jobs == []


async def test_media_that_no_engine_takes_are_answered_at_once(region: Any) -> None:
    region.engine.render_reply = renderer = Renderer()
    told = await region.pd.report()
    instances = tuple(structs.replace(item, text_only=True) for item in told.instances)
    region.pd.set_report = structs.replace(told, instances=instances)
    await eventually(lambda: takes_text_only(region.gateway._watcher.pd_reports().values(), "tiny"))
    status, _, answer = await region.post(chat(), "/v1/chat/completions")
    error = json.loads(answer)["error"]
    assert (status, error["code"], error["param"]) == (400, "text_only", "messages")
    assert error["message"].startswith("The model `tiny` takes text only here")
    assert renderer.bodies == region.engine.bodies("/v1/chat/completions") == []
    status, _, _ = await region.post(region.long_body())
    assert status == 200


async def test_too_many_pixels_are_the_clients_fault(open_region: Any) -> None:
    message = "Image size (400000000 pixels) exceeds limit, could be decompression bomb DOS attack."
    async with open_region(num_engines=2) as region:
        for engine in region.engines:
            fails = refusing(500, message, type="InternalServerError")
            engine.reply = engine.render_reply = fails
        status, _, said = await region.post(chat(), "/v1/chat/completions")
        error = json.loads(said)["error"]
        assert (status, error["code"], error["type"]) == (
            400,
            "media_pixels",
            "invalid_request_error",
        )
        # No engine is ill, so none is asked in its place.
        assert sum(len(engine.bodies("/v1/chat/completions")) for engine in region.engines) == 1
        await region.assert_nothing_held()
        # A text may speak of bombs.
        status, _, _ = await region.post({"model": "tiny", "prompt": "x"})
        assert status == 500
