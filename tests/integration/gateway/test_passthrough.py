"""What goes through the gateway is what the engine would have said to the client itself."""

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web
from documented_metrics import undocumented
from openai_engine import fixed, refusing

BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"model": "tiny", "prompt": "short", "max_tokens": 4}),
    ("/v1/completions", {"model": "tiny", "prompt": "y" * 300, "logprobs": 3, "stop": ["\n"]}),
    (
        "/v1/chat/completions",
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": "ü" * 200}],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "s"}},
        },
    ),
    ("/v1/completions", {"model": "tiny", "prompt": list(range(300)), "return_token_ids": True}),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_bodies_are_equal_byte_for_byte(
    region: Any, path: str, body: dict[str, Any], stream: bool
) -> None:
    if stream:
        body = body | {"stream": True, "stream_options": {"include_usage": True}}
    through = await region.post(body, path, headers={"X-Request-Id": "same"})
    async with region.session.post(
        region.engine.url + path, json=body, headers={"X-Request-Id": "same"}
    ) as response:
        direct = await response.read()
    assert through[0] == 200
    assert through[2] == direct
    assert through[1]["content-type"] == response.headers["Content-Type"]
    assert through[1]["x-request-id"] == "same"


async def test_a_client_that_reads_late_gets_every_byte(region: Any) -> None:
    filler, sent = b"x" * 60_000, []
    events = [b"data: %d %b\n\n" % (number, filler) for number in range(400)]
    events.append(b"data: [DONE]\n\n")

    async def flood(request: Any, body: Any) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in events:
            await response.write(event)
            sent.append(event)
        return response

    region.engine.reply = flood
    body = {"model": "tiny", "prompt": "x", "stream": True}
    async with region.session.post(region.url + "/v1/completions", json=body) as response:
        # More than a transport takes before its writers have to wait.
        await region.until(lambda: len(sent) > 20)
        assert await response.read() == b"".join(events)
    record = await region.record()
    assert (record.outcome, record.output_tokens) == ("ok", 400)


async def test_the_request_body_is_only_appended_to(region: Any) -> None:
    raw = b'{ "prompt":"' + b"z" * 300 + b'", "model" : "tiny","seed":1e0 }\n'
    headers = {"Content-Type": "application/json"}
    async with region.session.post(
        region.url + "/v1/completions", data=raw, headers=headers
    ) as response:
        assert response.status == 200
    rendered, served = region.engine.requests
    assert rendered[2] == raw
    assert served[2].startswith(raw.rstrip()[:-1].rstrip())
    assert list(json.loads(served[2])) == ["prompt", "model", "seed", "kv_transfer_params"]


async def test_a_short_prompt_reaches_the_engine_untouched_and_unrendered(region: Any) -> None:
    raw = b'{"model":"tiny",  "prompt":"hi"}'
    headers = {"Content-Type": "application/json; charset=utf-8"}
    async with region.session.post(
        region.url + "/v1/completions", data=raw, headers=headers
    ) as response:
        assert response.headers["x-prfaas-route"] == "local"
        assert response.headers["x-prfaas-reason"].startswith("below_threshold; ")
    assert region.engine.requests == [("/v1/completions", region.engine.requests[0][1], raw)]
    assert region.far.jobs == []


async def test_an_offloaded_request_says_so(region: Any) -> None:
    status, headers, _ = await region.post(region.long_body())
    assert status == 200
    assert headers["x-prfaas-route"] == "prefill_cluster"
    assert headers["x-prfaas-reason"].startswith("above_threshold; prompt_tokens=300; ")
    assert "; threshold_tokens=100; " in headers["x-prfaas-reason"]
    assert headers["x-prfaas-transfer-bytes"] == str(299 * 512)
    parts = dict(part.split("=") for part in headers["x-prfaas-ttft"].split(", "))
    assert {"render", "reserve", "queue", "prefill", "transfer_tail"} <= set(parts)
    assert region.engine.sources == ["landing"]
    job = region.far.jobs[0]
    assert len(job.prompt_token_ids) == 299
    assert job.landing.num_tokens == 299
    assert job.model == "tiny"
    record = await region.record()
    assert record.outcome == "ok"
    assert record.num_prompt_tokens == 300
    assert record.transfer_bytes == 299 * 512
    assert sum(record.parts.known().values()) == pytest.approx(record.ttft_s, abs=1e-6)
    await region.assert_nothing_held()


async def test_traces_and_ids_reach_both_legs(region: Any) -> None:
    traceparent = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"
    headers = {
        "traceparent": traceparent,
        "tracestate": "v=1",
        "X-Request-Id": "r-1",
        "X-Session-ID": "s",
        "X-Data-Parallel-Rank": "3",
        "Authorization": "Bearer mine",
    }
    await region.post(region.long_body(), headers=headers)
    for _, seen, _ in region.engine.requests:
        assert seen["traceparent"] == traceparent
        assert seen["tracestate"] == "v=1"
        assert seen["x-request-id"] == "r-1"
        assert seen["x-session-id"] == "s"
        assert "authorization" not in seen
        assert "x-data-parallel-rank" not in seen
    assert region.far.jobs[0].traceparent == traceparent
    assert region.far.jobs[0].request_id == "r-1"


async def test_a_trace_and_an_id_are_made_up_when_missing(region: Any) -> None:
    _, headers, _ = await region.post(region.long_body(), headers={"X-Request-Id": "a b"})
    assert len(headers["x-request-id"]) == 32
    seen = region.engine.requests[-1][1]
    assert seen["x-request-id"] == headers["x-request-id"]
    assert len(seen["traceparent"]) == 55


async def test_a_request_id_in_the_body_is_kept(region: Any) -> None:
    _, headers, _ = await region.post(region.long_body(request_id="mine"))
    assert headers["x-request-id"] == "mine"


async def test_several_choices_are_prefilled_once(region: Any) -> None:
    _, headers, _ = await region.post(region.long_body(n=3))
    assert headers["x-prfaas-route"] == "prefill_cluster"
    assert [job.num_choices for job in region.far.jobs] == [3]
    asked = json.loads(region.engine.bodies("/v1/completions")[0])
    assert asked["kv_transfer_params"]["prfaas"]["num_requests"] == 3
    await region.assert_nothing_held()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"n": "2"}, "several_choices"),
        ({"echo": 1}, "echo"),
        ({"echo": True, "logprobs": 0}, "prompt_logprobs"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"prompt": ["a" * 200, "b" * 200]}, "several_prompts"),
        ({"use_beam_search": True}, "beam_search"),
        ({"prompt": None}, "unusual_body"),
    ],
)
async def test_what_one_engine_must_serve_whole(
    region: Any, fields: dict[str, Any], reason: str
) -> None:
    region.engine.reply = fixed({"ok": True})
    status, headers, _ = await region.post(region.long_body(**fields))
    assert status == 200
    assert headers["x-prfaas-route"] == "direct"
    assert headers["x-prfaas-reason"].split(";")[0] == reason
    assert [path for path, _, _ in region.engine.requests] == ["/v1/completions"]


async def test_token_ids_from_the_client_need_no_rendering(region: Any) -> None:
    await region.post(region.long_body(prompt=list(range(200))))
    assert [path for path, _, _ in region.engine.requests] == ["/v1/completions"]
    assert region.far.jobs[0].prompt_token_ids.tolist() == list(range(199))


async def test_the_models_are_the_configured_ones(region: Any) -> None:
    async with region.session.get(region.url + "/v1/models") as response:
        models = (await response.json())["data"]
    assert [model["id"] for model in models] == ["tiny"]
    assert models[0]["max_model_len"] == 8192
    async with region.session.get(region.url + "/v1/models/tiny") as response:
        assert (await response.json())["object"] == "model"
    async with region.session.get(region.url + "/v1/models/huge") as response:
        assert response.status == 404
        assert (await response.json())["error"]["code"] == "model_not_found"


async def test_the_small_endpoints(region: Any) -> None:
    async with region.session.get(region.url + "/health") as response:
        assert response.status == 200
    async with region.session.get(region.url + "/version") as response:
        assert "version" in await response.json()
    await region.post(region.long_body())
    record = await region.record()
    async with region.session.get(region.url + "/metrics") as response:
        text = await response.text()
    assert 'prfaas_gateway_decisions_total{model_name="tiny",reason="above_threshold"' in text
    assert 'part="transfer_tail"' in text
    assert undocumented(text) == []
    async with region.session.get(region.url + "/prfaas/requests?limit=5") as response:
        listed = (await response.json())["requests"]
    assert listed[0]["request_id"] == record.request_id
    assert listed[0]["parts"]["prefill_s"] == 2e-6
    url = f"{region.url}/prfaas/requests/{record.request_id}"
    async with region.session.get(url) as response:
        assert len((await response.json())["requests"]) == 1
    async with region.session.get(region.url + "/prfaas/region") as response:
        assert (await response.json())["prefill"]["far"]["healthy"] is True
    async with region.session.get(region.url + "/prfaas/requests?limit=no") as response:
        assert response.status == 400


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("prompt", "num_given"), [("short", 1), ("y" * 300, 2)])
async def test_the_front_hears_the_end_of_what_it_gave_to_an_engine(
    region: Any, prompt: str, num_given: int, stream: bool
) -> None:
    """A long prompt is rendered by an engine before it is served by one."""
    await region.post({"model": "tiny", "prompt": prompt, "stream": stream})
    await region.record()
    await region.until(lambda: len(region.pd.ended_at) >= num_given)
    assert region.pd.ended_at == ["d0"] * num_given
    assert region.gateway.scheduler.live.ledger.change_since({"home/d0"}, 0.0) == 0


async def test_the_front_hears_of_requests_that_an_engine_never_answered(region: Any) -> None:
    """One whose client leaves, and one that the engine fails before another try is answered."""
    region.engine.first_token.clear()
    asking = asyncio.create_task(region.post({"model": "tiny", "prompt": "short"}))
    await region.until(lambda: region.engine.num_serving == 1)
    asking.cancel()
    await region.until(lambda: region.pd.ended_at == ["d0"])
    region.engine.first_token.set()
    region.engine.reply_once(refusing(500, "dying"))
    assert (await region.post({"model": "tiny", "prompt": "short"}))[0] == 200
    await region.until(lambda: region.pd.ended_at == ["d0"] * 3)
    assert region.gateway.scheduler.live.ledger.change_since({"home/d0"}, 0.0) == 0
