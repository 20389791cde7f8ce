"""Attacks with bodies: on the gateway's time, past its checks, and past the limits of tenants."""

from __future__ import annotations

import asyncio
import io
import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai_engine import fixed

from deploy.gateway.api_keys import ApiKey
from deploy.gateway.errors import ApiError
from deploy.gateway.intake.inbound import parsing_request

KEYS = tuple(ApiKey.model_validate(line) for line in ("acme one", "mallory two"))
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MIB = 1 << 20
STEP_S = 0.05
"""The longest step of reading a body that these tests take, of its own CPU time."""


def limited(**limits: dict[str, Any]) -> dict[str, Any]:
    """A gateway whose tenants have these limits."""
    return {"api_keys": KEYS, "scheduling": {"admission": {"tenants": limits}}}


async def send(
    region: Any, raw: bytes, path: str = CHAT, key: str = "two"
) -> tuple[int, dict[str, Any]]:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    async with region.session.post(
        region.url + path, data=io.BytesIO(raw), headers=headers
    ) as response:
        return response.status, json.loads(await response.read())


async def refused(region: Any, raw: bytes, path: str = CHAT) -> dict[str, Any]:
    """The error of a body that no engine may see."""
    status, answer = await send(region, raw, path)
    assert status == 400, answer
    assert region.engine.requests == []
    error: dict[str, Any] = answer["error"]
    return error


def many(head: bytes, item: bytes, tail: bytes = b"]}", nbytes: int = 4 * MIB) -> bytes:
    return head + b",".join([item] * (nbytes // (len(item) + 1))) + tail


PARTS = b'{"model":"tiny","messages":[{"role":"user","content":['
FLOODS = {
    "parts": many(PARTS, b"{}", b"]}]}"),
    "named parts": many(PARTS, b'{"uuid":1,"image_url":"http://a"}', b"]}]}"),
    "text parts": many(PARTS, b'"a"', b"]}]}"),
    "messages": many(b'{"model":"tiny","messages":[', b"{}"),
    "lists": many(b'{"model":"tiny","messages":[', b"[]"),
    "prompts": many(b'{"model":"tiny","prompt":[', b'"a"'),
    "tools": many(b'{"model":"tiny","input":"a","tools":[', b"{}"),
    "keys": many(b'{"model":"tiny",', b'"a":1', b"}"),
    "arguments": many(b'{"model":"tiny","vllm_xargs":{', b'"a":1', b"}}"),
    "few parts": many(PARTS, b"{}", b"]}]}", 60_000),
    "few messages": many(b'{"model":"tiny","messages":[', b"{}", nbytes=60_000),
    "few prompts": many(b'{"model":"tiny","prompt":[', b'"a"', nbytes=60_000),
}


@pytest.mark.parametrize("flood", FLOODS)
async def test_no_body_of_tiny_things_is_worked_through(region: Any, flood: str) -> None:
    path = {"prompts": COMPLETIONS, "tools": "/v1/responses"}.get(flood.split()[-1], CHAT)
    error = await refused(region, FLOODS[flood], path)
    assert error["code"] == "too_many_items"
    assert "the limit here" in error["message"]


SMALL = st.sampled_from(
    [b"{}", b"[]", b'""', b"1", b"null", b'"a\\"b"', b'"\\\\"', b'{"type":"text","text":"a"}']
)
MEDIA = st.sampled_from(
    [b'{"type":"image_url","image_url":"data:,"}', b'{"uuid":1,"image_url":{"url":"http://a"}}']
)
HEADS = st.sampled_from(
    [
        b'{"messages":[',
        PARTS,
        b'{"prompt":[',
        b'{"input":[',
        b'{"messages":[{"a":[',
        b'{"n":[',
        b'{"documents":["a",',
        b'{"tools":[',
        b'{"prompt":[[',
        b'{"vllm_xargs":{"a":',
        b'{"x":"',
    ]
)


@given(
    head=HEADS,
    item=SMALL | MEDIA,
    num=st.sampled_from([100, 5_000, 60_000, 600_000]),
    kind=st.sampled_from(["completion", "chat", "responses", "messages", "embeddings", "rerank"]),
)
def test_every_step_of_reading_a_body_is_short(
    head: bytes, item: bytes, num: int, kind: Any
) -> None:
    closing = {ord("["): b"]", ord("{"): b"}"}
    tail = b"".join(closing[byte] for byte in reversed(head) if byte in closing)
    raw = head + b",".join([item] * num) + tail
    longest_s, steps = 0.0, parsing_request(kind, raw, template_tokens=0)
    while True:
        begun_s = time.thread_time()
        try:
            next(steps)
        except (StopIteration, ApiError):
            break
        finally:
            longest_s = max(longest_s, time.thread_time() - begun_s)
    assert longest_s < STEP_S, (len(raw), head, item)


HALF = b"\xed\xa0\x80"
ADDRESS = b'"http://169.254.169.254/latest"'


def part(inner: bytes) -> bytes:
    return b'{"model":"tiny","messages":[{"role":"user","content":[{' + inner + b"}]}]}"


HIDDEN = {
    "beside an address": part(
        b'"type":"image_url","image_url":{"url":' + ADDRESS + b',"' + HALF + b'":1}'
    ),
    "within an address": part(b'"type":"image_url","image_url":"http://10.0.0.1/#' + HALF + b'"'),
    "beside a source": part(
        b'"type":"image","source":{"type":"url","url":' + ADDRESS + b',"' + HALF + b'":1}'
    ),
    "an address in a list": part(b'"type":"image_url","image_url":[' + ADDRESS + b"]"),
    "beside another item": b'{"messages":[5,{"content":[{"image_url":' + ADDRESS + b"}]}]}",
    "beside parameters": b'{"vllm_xargs":{"' + HALF + b'":1,"kv_transfer_params":"x"},'
    b'"messages":[{"role":"user","content":"a"}]}',
    "parameters in a list": b'{"vllm_xargs":[{"kv_transfer_params":"x"}],"messages":[]}',
    "in a field that nobody reads": b'{"x":"' + HALF + b'","messages":[]}',
}


@pytest.mark.parametrize("media", [{"fetch": "refuse"}, {}])
@pytest.mark.parametrize("name", HIDDEN)
async def test_what_cannot_be_read_is_not_taken_for_absent(
    open_region: Any, name: str, media: dict[str, Any]
) -> None:
    async with open_region(media=media) as region:
        path = "/v1/messages" if name == "beside a source" else CHAT
        await refused(region, HIDDEN[name], path)


async def test_bytes_that_are_no_utf_8_are_refused_wherever_they_are(region: Any) -> None:
    error = await refused(region, b'{"model":"tiny","x":"\xff","messages":[]}')
    assert "not UTF-8" in error["message"]
    assert "(byte 21)" in error["message"]
    error = await refused(region, b'{"x":"' + b"\xc3\xa9" * MIB + b'\xe4\xb8"}')
    assert f"(byte {6 + 2 * MIB})" in error["message"]


@pytest.mark.parametrize(
    ("text", "half"),
    [
        (rb"cut here \ud83d", r"\ud83d"),
        (rb"\\\ude00", r"\ude00"),
        (rb"\ud83d\ude00 \ud83d\u0041", r"\ud83d"),
        (rb"\ud83d\ude00" * 20_000 + rb"\uDE00", r"\uDE00"),
    ],
)
async def test_half_of_a_character_is_named(region: Any, text: bytes, half: str) -> None:
    raw = b'{"n":1,"prompt":"' + text + b'"}'
    error = await refused(region, raw, COMPLETIONS)
    assert error["code"] == "invalid_json"
    assert f"{half} is half of a character (byte {raw.rfind(half.encode())})" in error["message"]


async def test_a_byte_order_mark_is_passed_over(region: Any) -> None:
    for prompt in ("a", "x" * 300):
        raw = json.dumps({"model": "tiny", "prompt": prompt}).encode()
        status, _ = await send(region, b"\xef\xbb\xbf" + raw, COMPLETIONS)
        assert status == 200
    assert not any(body.startswith(b"\xef") for _, _, body in region.engine.requests)
    region.engine.requests.clear()
    await refused(region, 2 * b"\xef\xbb\xbf" + raw, COMPLETIONS)


async def tokens_in_flight(region: Any, body: Any, path: str) -> int:
    """What counts for mallory while `body` is being answered."""
    region.engine.first_token.clear()
    asking = asyncio.create_task(send(region, json.dumps(body).encode(), path))
    await region.until(lambda: region.engine.num_serving == 1)
    async with region.session.get(
        region.url + "/prfaas/region", headers={"Authorization": "Bearer one"}
    ) as response:
        tenants = (await response.json())["admission"]["tenants"]
    region.engine.first_token.set()
    await asking
    return int(tenants["mallory"]["tokens"])


LONG = "word " * 4000
CUT = {"model": "tiny", "max_tokens": 1, "max_output_tokens": 1, "truncate_prompt_tokens": 10}


@pytest.mark.parametrize(
    ("path", "fields", "least", "most"),
    [
        # Engines cut prompts and chats.
        (COMPLETIONS, {"prompt": LONG}, 10, 11),
        (CHAT, {"messages": [{"role": "user", "content": LONG}] * 3}, 10, 11),
        (COMPLETIONS, {"prompt": [7] * 1500}, 10, 11),
        # They do not know the field at these endpoints.
        ("/v1/responses", {"input": LONG}, 4000, 30_000),
        ("/v1/messages", {"messages": [{"role": "user", "content": LONG}]}, 4000, 30_000),
        # They cut each of several prompts.
        (COMPLETIONS, {"prompt": [LONG] * 50}, 550, 550),
        ("/v1/embeddings", {"input": [LONG] * 50}, 500, 600),
        ("/v1/rerank", {"query": "word", "documents": [LONG] * 50}, 500, 600),
    ],
)
async def test_prompts_count_as_engines_cut_them(
    open_region: Any, path: str, fields: dict[str, Any], least: int, most: int
) -> None:
    async with open_region(operators=("acme",), **limited(mallory={"max_requests": 8})) as region:
        answer = {"choices": [], "usage": {}}
        region.engine.reply = fixed(answer, after=region.engine.first_token)
        assert least <= await tokens_in_flight(region, CUT | fields, path) <= most


async def test_a_query_counts_once_for_each_document(open_region: Any) -> None:
    async with open_region(operators=("acme",), **limited(mallory={"max_requests": 8})) as region:
        answer = {"results": [], "usage": {}}
        region.engine.reply = fixed(answer, after=region.engine.first_token)
        body = {"model": "tiny", "query": LONG, "documents": ["word"] * 50}
        assert await tokens_in_flight(region, body, "/v1/rerank") >= 50 * 4000


async def test_one_prompt_of_ids_that_is_cut_is_one_prompt(open_region: Any) -> None:
    limit = {"tokens_per_s": 1e-3, "burst_tokens": 20_000}
    async with open_region(**limited(mallory=limit)) as region:
        for cut in (400, -1, 400):
            body = {"model": "tiny", "prompt": [7] * 1500, "max_tokens": 50}
            raw = json.dumps(body | {"truncate_prompt_tokens": cut}).encode()
            assert (await send(region, raw, COMPLETIONS))[0] == 200
            assert (await region.record()).reason != "several_prompts"


async def test_no_tenant_teaches_that_the_prompts_of_others_are_short(open_region: Any) -> None:
    """In a field that engines ignore, and in blanks that JSON allows."""
    limits = {"mallory": {"max_requests": 8}, "acme": {"max_tokens": 5000}}
    async with open_region(**limited(**limits)) as region:
        for filled in (b'"x":"' + b"A" * 4 * MIB + b'",', b" " * 4 * MIB):
            raw = b'{"model":"tiny","messages":[{' + filled + b'"role":"user","content":"hi"}]}'
            assert (await send(region, raw))[0] == 200
        region.engine.first_token.clear()
        long = json.dumps({"model": "tiny", "n": 2, "prompt": [LONG * 25] * 2}).encode()
        first = asyncio.create_task(send(region, long, COMPLETIONS, "one"))
        await region.until(lambda: region.engine.num_serving == 1)
        status, answer = await send(region, long, COMPLETIONS, "one")
        assert (status, answer["error"]["code"]) == (429, "tenant_tokens")
        region.engine.first_token.set()
        await first


async def test_whoever_may_not_ask_has_no_body_read(open_region: Any) -> None:
    async with open_region(**limited(mallory={"max_requests": 1})) as region:
        region.engine.first_token.clear()
        hello = b'{"model":"tiny","prompt":"x"}'
        first = asyncio.create_task(send(region, hello, COMPLETIONS))
        await region.until(lambda: region.engine.num_serving == 1)
        for body in (FLOODS["parts"], b"no JSON", hello):
            status, answer = await send(region, body)
            assert (status, answer["error"]["code"]) == (429, "tenant_requests")
            record = await region.record()
            assert (record.tenant, record.outcome) == ("mallory", "refused")
        region.engine.first_token.set()
        assert (await first)[0] == 200
        assert (await send(region, hello, COMPLETIONS))[0] == 200
