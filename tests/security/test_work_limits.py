"""Attacks on limits of tenants: work that is not counted, engines that work for refused requests,
and places before others.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from openai_engine import fixed, streamed
from raw_client import RawClient

from deploy.gateway.api_keys import ApiKey

KEYS = tuple(ApiKey.model_validate(line) for line in ("acme one", "mallory two"))
SHORT = {"model": "tiny", "prompt": "x"}


def limited(**limit: Any) -> dict[str, Any]:
    """A gateway whose tenant mallory has this limit."""
    admission = {"tenants": {"mallory": limit}}
    return {"api_keys": KEYS, "operators": ("acme",), "scheduling": {"admission": admission}}


async def ask(region: Any, body: Any, key: str = "two", **headers: str) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {key}"} | headers
    status, _, answer = await region.post(body, headers=headers)
    return status, json.loads(answer)


async def in_flight(region: Any) -> int:
    """Tokens that count for mallory now."""
    headers = {"Authorization": "Bearer one"}
    async with region.session.get(region.url + "/prfaas/region", headers=headers) as response:
        tenants = (await response.json())["admission"]["tenants"]
    return int(tenants["mallory"]["tokens"])


@pytest.mark.parametrize(
    ("fields", "num_tokens"),
    [
        ({}, 10 + 16),
        ({"max_tokens": 100_000}, 10 + 100_000),
        ({"max_tokens": "100000"}, 10 + 100_000),
        ({"max_tokens": 1e5}, 10 + 100_000),
        ({"n": 16384, "max_tokens": 100_000}, 16384 * (10 + 100_000)),
        # Fields that engines ignore at this endpoint.
        ({"best_of": 64, "max_tokens": 5}, 10 + 5),
        ({"max_completion_tokens": 500}, 10 + 16),
        ({"prompt_logprobs": 20, "max_tokens": 1}, 2 * 10 + 1),
        ({"echo": True, "logprobs": 5, "max_tokens": 1}, 2 * 10 + 1),
        ({"n": -3, "max_tokens": -5}, 10),
        # Other spellings that engines take for numbers.
        ({"max_tokens": "100_000"}, 10 + 100_000),
        ({"max_tokens": " +100000 "}, 10 + 100_000),
        ({"max_tokens": "100000.0"}, 10 + 100_000),
        ({"min_tokens": 100_000}, 10 + 100_000),
        ({"n": 10**30, "max_tokens": 10**30}, 1 << 40),
    ],
)
async def test_what_a_request_asks_for_counts(
    open_region: Any, fields: dict[str, Any], num_tokens: int
) -> None:
    async with open_region(**limited(max_requests=8)) as region:
        region.engine.first_token.clear()
        body = {"model": "tiny", "prompt": list(range(10))} | fields
        asking = asyncio.create_task(ask(region, body))
        await region.until(lambda: region.engine.num_serving == 1)
        assert await in_flight(region) == num_tokens
        region.engine.first_token.set()
        assert (await asking)[0] == 200


async def test_many_choices_do_not_pass_a_limit_of_tokens(open_region: Any) -> None:
    async with open_region(**limited(max_tokens=1000)) as region:
        region.engine.first_token.clear()
        first = asyncio.create_task(ask(region, SHORT))
        await region.until(lambda: region.engine.num_serving == 1)
        status, answer = await ask(region, SHORT | {"n": 16384, "max_tokens": 100_000})
        assert (status, answer["error"]["code"]) == (429, "tenant_tokens")
        region.engine.first_token.set()
        assert (await first)[0] == 200


async def test_a_rate_counts_the_answers_that_came(open_region: Any) -> None:
    """The double answers with 4 tokens, whatever was asked for."""
    limit = {"tokens_per_s": 1e-3, "burst_tokens": 1000}
    async with open_region(**limited(**limit)) as region:
        # What was asked for and did not come is given back.
        for _ in range(3):
            assert (await ask(region, SHORT | {"max_tokens": 900}))[0] == 200
        usage = {"prompt_tokens": 1, "completion_tokens": 5000}
        region.engine.reply = fixed({"choices": [], "usage": usage})
        assert (await ask(region, SHORT))[0] == 200
        status, answer = await ask(region, SHORT)
        assert (status, answer["error"]["code"]) == (429, "tenant_rate")
        assert (await ask(region, SHORT, "one"))[0] == 200


async def test_an_answer_that_is_broken_off_counts(open_region: Any) -> None:
    limit = {"tokens_per_s": 1e-3, "burst_tokens": 40}
    async with open_region(**limited(**limit)) as region:
        events = b"".join(b'data: {"choices":[{"text":"a"}]}\n\n' for _ in range(100))
        region.engine.reply = streamed(events, b"", before_last=asyncio.Event())
        headers = {"Authorization": "Bearer two"}
        body = SHORT | {"stream": True}
        url = region.url + "/v1/completions"
        async with region.session.post(url, json=body, headers=headers) as response:
            await response.content.readexactly(len(events))
            response.close()
        await region.until(lambda: region.gateway.num_in_flight == 0)
        status, answer = await ask(region, SHORT)
        assert (status, answer["error"]["code"]) == (429, "tenant_rate")


async def test_tokens_in_few_long_events_count(open_region: Any) -> None:
    """`stream_interval` puts as many tokens into one event as the client wants."""
    async with open_region(**limited(tokens_per_s=1e-3, burst_tokens=200)) as region:
        event = b'data: {"choices":[{"text":"' + b"word " * 1000 + b'"}]}\n\n'
        region.engine.reply = streamed(event + b"data: [DONE]\n\n")
        body = SHORT | {"stream": True, "stream_interval": 100_000, "max_tokens": 150}
        assert (await region.post(body, headers={"Authorization": "Bearer two"}))[0] == 200
        status, answer = await ask(region, SHORT)
        assert (status, answer["error"]["code"]) == (429, "tenant_rate")


async def test_text_that_claims_to_be_an_image_counts(open_region: Any) -> None:
    """Engines take the last of several fields with one name."""
    async with open_region(**limited(max_requests=8)) as region:
        region.engine.first_token.clear()
        part = b'{"type":"image_url","type":"text","text":"' + b"word " * 1000 + b'"}'
        raw = b'{"model":"tiny","messages":[{"role":"user","content":[' + part + b"]}]}"
        headers = {"Authorization": "Bearer two", "Content-Type": "application/json"}

        async def send() -> int:
            url = region.url + "/v1/chat/completions"
            async with region.session.post(url, data=raw, headers=headers) as response:
                return int(response.status)

        asking = asyncio.create_task(send())
        await region.until(lambda: region.engine.num_serving == 1)
        assert await in_flight(region) >= 4000
        region.engine.first_token.set()
        assert await asking == 200


async def test_what_an_answer_says_of_its_prompt_counts(open_region: Any) -> None:
    """Nobody counts media before an engine has made tokens of them."""
    async with open_region(**limited(tokens_per_s=1e-3, burst_tokens=5000)) as region:
        usage = {"prompt_tokens": 100_000, "completion_tokens": 1}
        region.engine.reply = fixed({"choices": [], "usage": usage})
        part = {"type": "image_url", "image_url": {"url": "data:,"}}
        body = {"model": "tiny", "messages": [{"role": "user", "content": [part]}]}
        headers = {"Authorization": "Bearer two"}
        assert (await region.post(body, "/v1/chat/completions", headers=headers))[0] == 200
        status, answer = await ask(region, SHORT)
        assert (status, answer["error"]["code"]) == (429, "tenant_rate")


@pytest.mark.parametrize(
    "fields", [{"n": 1 << 60, "max_tokens": 1 << 60}, {"n": 10**40}, {"priority": 10**40}]
)
async def test_no_number_ends_the_recording(
    open_region: Any, tmp_path: Path, fields: dict[str, Any]
) -> None:
    """Recordings have integers of 64 bits."""
    async with open_region(recorder={"dir": tmp_path}) as region:
        for body in (SHORT, region.long_body()):
            assert (await region.post(body | fields))[0] == 200
        found = region.gateway.metrics.registry.get_sample_value
        assert found("prfaas_gateway_recorder_events_total") > 0
        assert found("prfaas_gateway_recorder_lost_events_total") == 0


async def test_no_engine_renders_for_refused_requests(open_region: Any) -> None:
    async with open_region(**limited(max_requests=1)) as region:
        region.engine.first_token.clear()
        first = asyncio.create_task(ask(region, SHORT))
        await region.until(lambda: region.engine.num_serving == 1)
        region.engine.requests.clear()
        for _ in range(20):
            assert (await ask(region, region.long_body()))[0] == 429
        assert region.engine.requests == []
        headers = {"Authorization": "Bearer two"}
        status, _, _ = await region.post(SHORT, "/prfaas/cache/explain", headers=headers)
        assert status in (404, 429), "404: this gateway has no directory of caches"
        assert region.engine.requests == []
        region.engine.first_token.set()
        assert (await first)[0] == 200


async def test_no_engine_renders_for_many_requests_at_one_moment(open_region: Any) -> None:
    async with open_region(**limited(max_requests=2)) as region:
        rendering, error = asyncio.Event(), {"error": {"message": "no"}}
        region.engine.render_reply = fixed(error, 400, after=rendering)
        asking = [asyncio.create_task(ask(region, region.long_body())) for _ in range(20)]
        await region.until(lambda: sum(task.done() for task in asking) == 18)
        await region.until(lambda: len(region.engine.requests) == 2)
        assert all(task.result()[0] == 429 for task in asking if task.done())
        rendering.set()
        statuses = [(await task)[0] for task in asking]
        assert sorted(statuses) == [200] * 2 + [429] * 18
        # What was held for them is given back.
        assert (await ask(region, SHORT))[0] == 200


async def test_a_client_that_leaves_before_its_prompt_is_counted_holds_nothing(
    open_region: Any,
) -> None:
    async with open_region(
        **limited(max_requests=1, tokens_per_s=1e-3, burst_tokens=400)
    ) as region:
        region.engine.render_reply = fixed({}, after=asyncio.Event())
        for path in ("/v1/completions", "/v1/chat/completions"):
            text = "x" * 300
            body = {
                "model": "tiny",
                "prompt": text,
                "messages": [{"role": "user", "content": text}],
            }
            headers = {"Authorization": "Bearer two"}
            asking = asyncio.create_task(region.post(body, path, headers=headers))
            await region.until(lambda: region.gateway.num_in_flight == 1 and region.engine.requests)
            asking.cancel()
            await region.until(lambda: region.gateway.num_in_flight == 0)
            region.engine.requests.clear()
        region.engine.render_reply = None
        assert (await ask(region, region.long_body()))[0] == 200


async def test_no_engine_renders_for_what_a_rate_refuses(open_region: Any) -> None:
    limit = {"tokens_per_s": 1e-3, "burst_tokens": 330}
    async with open_region(**limited(**limit)) as region:
        assert (await ask(region, region.long_body()))[0] == 200
        region.engine.requests.clear()
        for _ in range(20):
            assert (await ask(region, region.long_body()))[0] == 429
        assert region.engine.requests == []


@pytest.mark.parametrize("priority", [-1, "-1", -1.0, "x", True])
async def test_only_some_go_before_others(open_region: Any, priority: Any) -> None:
    async with open_region(api_keys=KEYS, priority_tenants=("acme",)) as region:
        status, answer = await ask(region, SHORT | {"priority": priority})
        assert (status, answer["error"]["code"]) == (403, "priority_not_allowed")
        assert (await ask(region, SHORT | {"priority": priority}, "one"))[0] == 200
        status, answer = await ask(region, SHORT, **{"X-Vllm-Priority": str(priority)})
        assert (status, answer["error"]["code"]) == (403, "priority_not_allowed")
        assert (await ask(region, SHORT | {"priority": 5}))[0] == 200
        assert (await ask(region, SHORT | {"priority": None}))[0] == 200


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("X-Vllm-Priority", b"9" * 5000),
        ("X-Vllm-Priority", b"1_0"),
        ("X-Session-ID", b"\xff\xfe"),
        ("X-Session-ID", "ü".encode()),
    ],
)
async def test_no_header_that_breaks_an_engine_is_passed_on(
    region: Any, name: str, value: bytes
) -> None:
    body = json.dumps(SHORT).encode()
    fields = {"Content-Type": "application/json", "Content-Length": str(len(body))}
    lines = [f"{key}: {text}".encode() for key, text in fields.items()]
    head = [b"POST /v1/completions HTTP/1.1", b"Host: x", *lines, name.encode() + b": " + value]
    async with RawClient(region.url) as client:
        await client.send(b"\r\n".join([*head, b"", body]))
        assert await client.status() == 200
    ((_, headers, _),) = region.engine.requests
    assert name.lower() not in headers


async def test_without_keys_everybody_may_go_before_others(region: Any) -> None:
    assert (await region.post(SHORT | {"priority": -1}))[0] == 200
