"""Answers as clients, limits and records see them: errors in streams, usage, silence, memory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from aiohttp import web
from openai_engine import fixed, refusing, streamed
from raw_client import RawClient

from deploy.gateway.api_keys import ApiKey

ENGINE_DIED = b'data: {"error": {"message": "EngineCore died.", "code": 500}}\n\n'
DONE = b"data: [DONE]\n\n"
STREAM = {"model": "tiny", "prompt": "x", "stream": True}
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 40}}\n\n'


def chunk(text: str, **fields: Any) -> bytes:
    return (
        b"data: "
        + json.dumps({"choices": [{"index": 0, "text": text}]} | fields).encode()
        + b"\n\n"
    )


def limited(**limit: Any) -> dict[str, Any]:
    keys = tuple(ApiKey.model_validate(line) for line in ("acme one", "mallory two"))
    return {
        "api_keys": keys,
        "scheduling": {"admission": {"tenants": {"mallory": limit}}},
    }


TWO = {"headers": {"Authorization": "Bearer two"}}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/v1/responses"])
async def test_a_stream_that_ends_in_an_error_is_a_failure(region: Any, path: str) -> None:
    events = {
        "/v1/completions": (chunk("a"), ENGINE_DIED + DONE),
        "/v1/messages": (
            b'event: content_block_delta\ndata: {"delta": {"text": "a"}}\n\n',
            b'event: error\ndata: {"type": "error", "error": {"message": "EngineCore died."}}\n\n',
        ),
        "/v1/responses": (
            b'event: response.output_text.delta\ndata: {"delta": "a"}\n\n',
            b'event: response.failed\ndata: {"type": "response.failed", "response": '
            b'{"error": {"code": "server_error", "message": "EngineCore died."}}}\n\n',
        ),
    }[path]
    region.engine.reply = streamed(*events)
    body = STREAM | {"input": "x", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
    status, _, answer = await region.post(body, path)
    assert (status, answer) == (200, b"".join(events))
    record = await region.record()
    assert (record.outcome, record.error) == ("engine_error", "EngineCore died.")
    assert record.output_tokens == 1
    async with region.session.get(region.url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    counted = [line for line in lines if line.startswith("prfaas_gateway_requests_total{")]
    assert len(counted) == 1
    assert 'outcome="engine_error"' in counted[0]


@pytest.mark.parametrize(
    "first", [b'{"object": "error", "error": {"message": "m", "code": 503}}', b'{"error": "m"}']
)
async def test_an_error_instead_of_the_first_event_gets_a_status(region: Any, first: bytes) -> None:
    region.engine.reply = streamed(b"data: " + first + b"\n\n" + DONE)
    status, _, answer = await region.post(STREAM)
    assert status == (503 if b"503" in first else 500)
    assert b'"m"' in answer or b"m" in answer


@pytest.mark.parametrize("asks", [None, {}, {"include_usage": False}, {"include_usage": True}])
async def test_tokens_count_as_tokens_whoever_asks_for_the_usage(
    open_region: Any, asks: dict[str, bool] | None
) -> None:
    """Engines that speculate put several tokens into an event."""
    async with open_region(**limited(tokens_per_s=1e-3, burst_tokens=100)) as region:
        events = [chunk("four words at once") for _ in range(10)]
        region.engine.reply = streamed(*events, USAGE, DONE)
        status, _, answer = await region.post(STREAM | {"stream_options": asks}, **TWO)
        assert status == 200
        wants_usage = bool(asks and asks["include_usage"]) if asks else False
        assert answer == b"".join([*events, USAGE if wants_usage else b"", DONE])
        options = json.loads(region.engine.bodies()[0])["stream_options"]
        assert options["include_usage"] is True
        assert (await region.record()).output_tokens == 40
        found = region.gateway.metrics.registry.get_sample_value
        assert found("prfaas_gateway_generation_tokens_total", {"model_name": "tiny"}) == 40
        # 41 of 100 tokens are gone: two more answers, and not nine.
        statuses = [(await region.post(STREAM, **TWO))[0] for _ in range(4)]
        assert statuses == [200, 200, 429, 429]


@pytest.mark.parametrize("cut", ["joined", "split"])
async def test_the_usage_is_left_out_however_it_arrives(region: Any, cut: str) -> None:
    """It may come with the last token, with the end mark, or in parts."""
    whole = chunk("a") + chunk("b", usage=None) + USAGE + DONE
    pieces: Sequence[bytes] = [whole]
    if cut == "split":
        pieces = [whole[i : i + 7] for i in range(0, len(whole), 7)]
    region.engine.reply = streamed(*pieces)
    _, _, answer = await region.post(STREAM)
    assert answer == chunk("a") + chunk("b", usage=None) + DONE


async def test_tokens_of_a_stream_that_is_left_are_counted_by_the_streams_before(
    region: Any,
) -> None:
    events = [chunk("four words at once") for _ in range(10)]
    region.engine.reply = streamed(*events, USAGE, DONE)
    assert (await region.post(STREAM))[0] == 200
    region.engine.reply = streamed(b"".join(events), DONE, before_last=asyncio.Event())
    async with region.session.post(region.url + "/v1/completions", json=STREAM) as response:
        await response.content.readexactly(len(b"".join(events)))
        response.close()
    await region.until(lambda: region.gateway.num_in_flight == 0)
    record = await region.record()
    assert (record.outcome, record.output_tokens) == ("client_gone", 40)


async def test_several_answers_side_by_side_do_not_shorten_a_step(region: Any) -> None:
    """A step makes a token of each choice, so an answer has 10 of these 30."""
    usage = {"prompt_tokens": 1, "completion_tokens": 30}
    region.engine.reply = fixed({"choices": [], "usage": usage})
    assert (await region.post({"model": "tiny", "prompt": "x", "n": 3}))[0] == 200
    assert (await region.post(region.long_body(n=3)))[0] == 200
    scheduler = region.gateway.scheduler
    measured = scheduler.knowledge("tiny").traffic.measured(scheduler.clock())
    assert measured.output.mean_tokens == 10


@pytest.mark.parametrize("by_ids", [True, False])
async def test_a_prompt_that_nobody_can_serve_is_not_prefilled(region: Any, by_ids: bool) -> None:
    """The double refuses what vLLM refuses only when it gets a request."""

    async def strict(request: web.Request, body: Any) -> web.StreamResponse:
        answer = region.engine.answer
        if body.get("logprobs", 0) > 20 or max(body["prompt"], default=0) >= 1000:
            answer = refusing(400, "at most 20", type="BadRequestError")
        elif request.headers.get("X-Data-Parallel-Rank") == "-1":
            answer = refusing(400, "data_parallel_rank -1 is out of range")
        return await answer(request, body)

    async def lists(request: web.Request, body: Any) -> web.StreamResponse:
        return await strict(request, body if by_ids else body | {"prompt": []})

    region.engine.reply = lists
    body = region.long_body(prompt=[7] * 300) if by_ids else region.long_body()
    for _ in range(3):
        status, headers, answer = await region.post(body | {"logprobs": 1000})
        assert (status, json.loads(answer)["error"]["message"]) == (400, "at most 20")
        assert headers["x-prfaas-reason"].startswith("render_refused")
    if by_ids:
        assert (await region.post(region.long_body(prompt=[7] * 300 + [1000])))[0] == 400
    assert region.far.jobs == []
    # What the engine takes is asked once.
    for _ in range(3):
        assert (await region.post(body | {"logprobs": 20}))[1][
            "x-prfaas-route"
        ] == "prefill_cluster"
    asked = [
        path for path, headers, _ in region.engine.requests if "-check" in headers["x-request-id"]
    ]
    assert len(asked) == (5 if by_ids else 4)
    # And costs it no token.
    assert region.engine.sources == ["landing"] * 3


async def test_a_question_about_a_response_costs_one_token(region: Any) -> None:
    """vLLM's `/v1/responses` has no data-parallel ranks to refuse, so it answers."""
    body = {"model": "tiny", "input": "x" * 300, "max_output_tokens": 500}
    body["tools"] = [{"type": "function", "name": "f"}]
    assert (await region.post(body, "/v1/responses"))[1]["x-prfaas-route"] == "prefill_cluster"
    asked = map(json.loads, region.engine.bodies("/v1/responses"))
    assert [one["max_output_tokens"] for one in asked] == [1, 500]


async def test_a_prompt_too_long_for_the_model_is_not_prefilled(open_region: Any) -> None:
    async with open_region(models=[{"name": "tiny", "max_model_len": 300}]) as region:
        assert (await region.post(region.long_body(prompt=[7] * 299)))[0] == 200
        region.engine.render_reply = region.engine.reply = refusing(400, "too long")
        assert (await region.post(region.long_body(prompt=[7] * 300)))[0] == 400
        assert len(region.far.jobs) == 1


async def test_what_was_prefilled_is_charged_when_the_engine_refuses(open_region: Any) -> None:
    async with open_region(**limited(tokens_per_s=1e-3, burst_tokens=1000)) as region:
        region.engine.reply = refusing(400)
        statuses = [(await region.post(region.long_body(), **TWO))[0] for _ in range(5)]
        assert statuses == [400, 400, 400, 429, 429]
        assert len(region.far.jobs) == 3
        # One engine that refuses at once has computed nothing.
        short = {"model": "tiny", "prompt": "x" * 50}
        assert [(await region.post(short, **TWO))[0] for _ in range(3)] == [400] * 3


async def test_a_silent_stream_gets_comments(open_region: Any) -> None:
    async with open_region(stream_keep_alive_s=0.1) as region:
        region.engine.first_token.clear()
        region.engine.next_token.clear()
        async with region.session.post(region.url + "/v1/completions", json=STREAM) as response:
            assert response.status == 200
            assert response.headers["Content-Type"].startswith("text/event-stream")
            assert response.headers["x-prfaas-route"] == "local"
            for _ in range(3):
                assert await response.content.readline() == b": keep-alive\n"
                await response.content.readline()
            region.engine.first_token.set()
            while (line := await response.content.readline()).startswith((b":", b"\n")):
                pass
            assert line.startswith(b"data: {")
            await response.content.readline()
            # Also between two tokens.
            assert await response.content.readline() == b": keep-alive\n"
            region.engine.next_token.set()
            assert (await response.read()).endswith(b"data: [DONE]\n\n")
        assert (await region.record()).outcome == "ok"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
async def test_an_error_after_a_comment_is_an_event(open_region: Any, path: str) -> None:
    async with open_region(stream_keep_alive_s=0.05) as region:
        error = {"error": {"message": "no"}}
        region.engine.reply = fixed(error, 400, after=region.engine.first_token)
        region.engine.first_token.clear()
        body = STREAM | {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
        async with region.session.post(region.url + path, json=body) as response:
            assert response.status == 200
            await response.content.readline()
            region.engine.first_token.set()
            told = (await response.read()).lstrip(b"\n").replace(b": keep-alive\n\n", b"")
        if path == "/v1/messages":
            assert told.startswith(b'event: error\ndata: {"type":"error"')
        else:
            assert told == b'data: {"error": {"message": "no"}}\n\ndata: [DONE]\n\n'
        record = await region.record()
        assert (record.outcome, record.status) == ("engine_error", 400)


async def test_the_usage_of_a_long_answer_is_read_alone(region: Any) -> None:
    """Its number of cached tokens is corrected all the same."""
    usage = b'"usage":{"prompt_tokens":300,"completion_tokens":7,%b}'
    details = b'"prompt_tokens_details":{"cached_tokens":%d}'
    filler = b'{"choices":[{"text":"' + rb"\"usage\":{ " * (1 << 18) + b'"}],'

    def answer(cached_tokens: int) -> bytes:
        return filler + usage % (details % cached_tokens) + b',"prompt_logprobs":null}'

    region.engine.reply = region.engine.after_landing(fixed(answer(299)))
    _, _, found = await region.post(region.long_body())
    assert found == answer(0)
    assert (await region.record()).output_tokens == 7


async def test_an_answer_that_is_not_streamed_has_its_own_patience(open_region: Any) -> None:
    timeouts = {"engine_silence_s": 0.2, "engine_answer_s": 30}
    async with open_region(timeouts=timeouts) as region:
        region.engine.first_token.clear()
        asking = asyncio.create_task(region.post(STREAM | {"stream": False}))
        assert (await region.post(STREAM))[0] == 504
        region.engine.first_token.set()
        assert (await asking)[0] == 200


async def test_the_gateways_own_end_is_told_and_is_not_the_clients(open_region: Any) -> None:
    async with open_region(timeouts={"drain_s": 0.1}) as region:
        region.engine.next_token.clear()
        async with RawClient(region.url) as client:
            body = json.dumps(STREAM).encode()
            headers = {"Content-Type": "application/json"}
            await client.post("/v1/completions", headers, announced=len(body), body=body)
            assert await client.status() == 200
            await region.until(lambda: region.engine.num_serving == 1)
            await region.gateway.drain()
            rest = b""
            while piece := await client.reader.read(4096):
                rest += piece
        # Behind the error, nothing says that the answer is whole.
        assert not rest.endswith(b"0\r\n\r\n")
        assert b'"code":"cut_off"' in rest
        record = await region.record()
        assert (record.outcome, record.error_code) == ("failed", "cut_off")


async def test_proxies_are_told_not_to_gather_events(region: Any) -> None:
    _, headers, _ = await region.post(STREAM)
    assert (headers["cache-control"], headers["x-accel-buffering"]) == ("no-cache", "no")


async def test_an_idle_client_is_kept_as_long_as_the_setting_says(open_region: Any) -> None:
    async with open_region(client_keep_alive_s=0.3) as region, RawClient(region.url) as client:
        await client.send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert await client.status() == 200
        async with asyncio.timeout(10):
            while await client.reader.read(4096):
                pass


async def test_pages_of_allowed_origins_may_use_the_api(open_region: Any) -> None:
    keys = (ApiKey.model_validate("acme one"),)
    async with open_region(allowed_origins=("https://chat.example",), api_keys=keys) as region:

        async def origin(method: str, path: str, **headers: str) -> tuple[int, str | None]:
            url = region.url + path
            async with region.session.request(method, url, headers=headers, json=STREAM) as found:
                return found.status, found.headers.get("Access-Control-Allow-Origin")

        ours = {"Origin": "https://chat.example", "Access-Control-Request-Method": "POST"}
        path, key = "/v1/completions", {"Authorization": "Bearer one"}
        assert await origin("OPTIONS", path, **ours) == (204, ours["Origin"])
        assert await origin("POST", path, **ours, **key) == (200, ours["Origin"])
        # An error is for the page as well.
        assert await origin("POST", path, **ours) == (401, ours["Origin"])
        theirs = ours | {"Origin": "https://evil.example"}
        assert await origin("OPTIONS", path, **theirs) == (405, None)
        assert await origin("POST", path, **theirs, **key) == (200, None)
        # What operators have is for no page of others.
        assert (await origin("OPTIONS", "/prfaas/region", **ours))[1] is None
        assert (await origin("GET", "/v1/pd_role", **ours, **key))[1] is None
