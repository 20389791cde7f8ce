"""The endpoints beside completions and chat: responses, messages, and what is only forwarded."""

import json
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from openai_engine import fixed, refusing, streamed

from deploy.gateway.api_keys import ApiKey
from deploy.gateway.intake.endpoints import ENDPOINTS
from deploy.gateway.scheduling.config import RoutingSection, SchedulingConfig
from prfaas.engines.errors import PrefillFailed

LONG: dict[str, dict[str, Any]] = {
    "/v1/responses": {"model": "tiny", "input": "x" * 300, "future_field": 1},
    "/v1/messages": {
        "model": "tiny",
        "max_tokens": 4,
        "messages": [{"role": "user", "content": "x" * 300}],
        "future_field": 1,
    },
}
STREAMS = {
    "/v1/responses": [
        ("response.created", {}),
        ("response.output_text.delta", {"delta": "a"}),
        ("response.output_text.delta", {"delta": "b"}),
        (
            "response.completed",
            {"response": {"usage": {"input_tokens": 302, "output_tokens": 2}}},
        ),
    ],
    "/v1/messages": [
        ("message_start", {"message": {}}),
        ("content_block_delta", {"delta": {"text": "a"}}),
        ("message_delta", {"usage": {"input_tokens": 302, "output_tokens": 2}}),
        ("message_stop", {}),
    ],
}
FORWARDED = [
    (kind, path) for kind, one in ENDPOINTS.items() if not one.is_routed for path in one.paths
]


def written(events: list[tuple[str, dict[str, Any]]]) -> list[bytes]:
    return [
        f"event: {name}\ndata: {json.dumps({'type': name} | data)}\n\n".encode()
        for name, data in events
    ]


@pytest.mark.parametrize("path", LONG)
async def test_a_long_prompt_is_prefilled_remotely(region: Any, path: str) -> None:
    status, headers, answer = await region.post(LONG[path], path)
    assert (status, headers["x-prfaas-route"]) == (200, "prefill_cluster")
    assert region.engine.sources == ["landing"]
    assert len(region.far.jobs[0].prompt_token_ids) == 301
    assert [seen for seen, _, _ in region.engine.requests] == [path + "/render", path]
    assert json.loads(region.engine.bodies(path)[0])["future_field"] == 1
    assert json.loads(json.loads(answer)["choices"][0]["text"]) == LONG[path]
    await region.assert_nothing_held()


@pytest.mark.parametrize("path", LONG)
async def test_a_stream_passes_as_it_is(region: Any, path: str) -> None:
    events = written(STREAMS[path])
    region.engine.reply = region.engine.after_landing(streamed(*events))
    status, _, answer = await region.post(LONG[path] | {"stream": True}, path)
    assert (status, answer) == (200, b"".join(events))
    record = await region.record()
    assert (record.outcome, record.output_tokens, record.route) == ("ok", 2, "prefill_cluster")


@pytest.mark.parametrize("path", LONG)
async def test_a_broken_stream_never_looks_whole(region: Any, path: str) -> None:
    events = written(STREAMS[path])[:2]
    region.engine.reply = region.engine.after_landing(streamed(*events))
    got, is_whole = b"", True
    async with region.session.post(
        region.url + path, json=LONG[path] | {"stream": True}
    ) as response:
        try:
            async for piece in response.content.iter_any():
                got += piece
        except aiohttp.ClientPayloadError:
            is_whole = False
    assert not is_whole
    assert got.startswith(b"".join(events))
    head, _, data = got.removeprefix(b"".join(events)).partition(b"\ndata: ")
    told = json.loads(data)
    assert (head, told["type"]) == (b"event: error", "error")
    assert "broke off" in json.dumps(told)
    assert (await region.record()).outcome == "engine_lost"


@pytest.mark.parametrize("path", LONG)
async def test_an_engine_that_dies_before_the_first_token_is_tried_again(
    region: Any, path: str
) -> None:
    region.engine.reply = region.engine.after_landing(streamed(*written(STREAMS[path])[:1]))
    status, _, answer = await region.post(LONG[path] | {"stream": True}, path)
    assert status == 502
    assert "error" in json.loads(answer)
    assert (await region.record()).num_retries == 1


async def test_responses_with_a_memory_are_refused(region: Any) -> None:
    body = LONG["/v1/responses"] | {"previous_response_id": "resp_1"}
    status, _, answer = await region.post(body, "/v1/responses")
    error = json.loads(answer)["error"]
    assert (status, error["param"]) == (400, "previous_response_id")
    assert region.engine.requests == []


@pytest.mark.parametrize(
    "sent", [b"[]", b"{", b'{"model":"nobody"}', b'{"kv_transfer_params":{},"model":"tiny"}']
)
async def test_anthropic_gets_errors_in_its_own_shape(region: Any, sent: bytes) -> None:
    async with region.session.post(
        region.url + "/v1/messages", data=sent, headers={"Content-Type": "application/json"}
    ) as response:
        told = await response.json()
    assert response.status in (400, 404)
    assert told["type"] == "error"
    assert told["error"].keys() == {"type", "message"}


async def test_an_engines_refusal_takes_the_shape_of_anthropic(region: Any) -> None:
    region.engine.reply = refusing(400, "no max_tokens")
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    status, _, answer = await region.post(body, "/v1/messages")
    assert status == 400
    assert json.loads(answer)["error"] == {
        "type": "invalid_request_error",
        "message": "no max_tokens",
    }


@pytest.mark.parametrize(("kind", "path"), FORWARDED)
async def test_the_rest_is_forwarded(region: Any, kind: Any, path: str) -> None:
    async def reply(_request: Any, body: dict[str, Any]) -> web.Response:
        return web.json_response({"seen": body, "usage": {"prompt_tokens": 9}})

    region.engine.reply = reply
    body = {"model": "tiny", "input": ["y" * 4000], "future_field": 1}
    status, headers, answer = await region.post(body, path)
    assert (status, json.loads(answer)["seen"]) == (200, body)
    assert (headers["x-prfaas-route"], headers["x-prfaas-reason"].split(";")[0]) == (
        "direct",
        "forwarded",
    )
    assert [seen for seen, _, _ in region.engine.requests] == [ENDPOINTS[kind].path]
    record = await region.record()
    assert (record.endpoint, record.outcome) == (kind, "ok")


async def test_a_model_without_the_task_answers_itself(region: Any) -> None:
    told = {"error": {"message": "The model does not support Embeddings API", "code": 404}}
    region.engine.reply = fixed(told, 404)
    status, _, answer = await region.post({"model": "tiny", "input": "x"}, "/v1/embeddings")
    assert (status, json.loads(answer)) == (404, told)


async def test_a_key_in_anthropics_header(open_region: Any) -> None:
    async with open_region(api_keys=(ApiKey(key="secret", name="one"),)) as region:
        body = LONG["/v1/messages"]
        status, _, answer = await region.post(body, "/v1/messages", headers={"X-Api-Key": "wrong"})
        assert (status, json.loads(answer)["error"]["type"]) == (401, "authentication_error")
        status, _, _ = await region.post(body, "/v1/messages", headers={"X-Api-Key": "secret"})
        assert status == 200
        assert (await region.record()).tenant == "one"


async def test_local_prefill_is_refused_on_request(open_region: Any) -> None:
    routing = RoutingSection(local_prefill="refuse")
    async with open_region(scheduling=SchedulingConfig(routing=routing)) as region:
        region.far.error = PrefillFailed("engine_failed", "dead")
        status, headers, answer = await region.post(region.long_body())
        assert (status, headers["retry-after"]) == (503, "1")
        error = json.loads(answer)["error"]
        assert error["code"] == "prefill_unavailable"
        assert "prefill_failed" in error["message"]
        assert region.engine.bodies() == []
        record = region.gateway.records[-1]
        assert (record.outcome, record.error_code) == ("failed", "prefill_unavailable")
        assert record.reason == "prefill_failed"
        status, _, _ = await region.post({"model": "tiny", "prompt": "short"})
        assert status == 200
