"""The HTTP client of an engine: what it sends, and how foreign errors come out."""

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import pytest
from front_doubles import FakeEngine
from openai_engine import fixed, refusing

from kvmanager.token_ids import TokenIds
from prfaas.engines.client import EngineHttp, open_session
from prfaas.engines.errors import EngineRefused, EngineUnreachable


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with open_session() as made:
        yield made


@pytest.fixture
async def fake() -> AsyncIterator[FakeEngine]:
    engine = await FakeEngine().start()
    yield engine
    engine.first_token.set()
    await engine.stop()


async def test_health_and_load(session: aiohttp.ClientSession, fake: FakeEngine) -> None:
    http = EngineHttp(fake.url + "/", session)
    assert await http.health()
    fake.healthy = False
    assert not await http.health()
    fake.waiting = 5
    load = await http.load()
    assert (load.num_running, load.num_waiting) == (0, 5)
    await fake.stop()
    assert not await http.health()
    with pytest.raises(EngineUnreachable, match="/metrics"):
        await http.load()


async def test_an_engines_error_object_is_kept(
    session: aiohttp.ClientSession, fake: FakeEngine
) -> None:
    fake.reply = refusing(400, "max_tokens must be at least 1")
    with pytest.raises(EngineRefused, match="max_tokens") as caught:
        await EngineHttp(fake.url, session).prefill("r", TokenIds.of([1]), {})
    assert caught.value.status == 400
    assert b"max_tokens must be at least 1" in caught.value.body
    assert caught.value.content_type == "application/json"


async def test_an_answer_that_is_not_vllms_is_no_answer(
    session: aiohttp.ClientSession, fake: FakeEngine
) -> None:
    fake.reply = fixed("<html>hello</html>")
    with pytest.raises(EngineUnreachable, match="unexpected answer"):
        await EngineHttp(fake.url, session).prefill("r", TokenIds.of([1]), {})


async def test_a_prefill_says_all_that_the_engine_must_know(
    session: aiohttp.ClientSession, fake: FakeEngine
) -> None:
    reply = await EngineHttp(fake.url, session).prefill(
        "r1",
        TokenIds.of([1, 2, 3]),
        {"prfaas": {}},
        model="tiny",
        cache_salt="s",
        traceparent="00-aa-bb-01",
    )
    assert (reply.num_prompt_tokens, reply.cached_tokens) == (3, 3)
    assert fake.posted == [
        {
            "prompt": [1, 2, 3],
            "max_tokens": 1,
            "temperature": 0.0,
            "request_id": "r1",
            "kv_transfer_params": {"prfaas": {}},
            "model": "tiny",
            "cache_salt": "s",
        }
    ]


async def test_a_prefill_of_a_response_is_one_of_the_clients_body(
    session: aiohttp.ClientSession, fake: FakeEngine
) -> None:
    details = {"cached_tokens": 2}
    usage = {"input_tokens": 9, "input_tokens_details": details, "output_tokens": 1}
    fake.reply = fixed({"status": "incomplete", "usage": usage})
    http, params = EngineHttp(fake.url, session), {"prfaas": {}}
    body = b'{"input": [{"x": 1.0e0}], "stream": true, "max_output_tokens": 7, "seed": 1}'
    found = await http.prefill("r", body, params, api="responses", next_token=5)
    assert (found.num_prompt_tokens, found.cached_tokens) == (9, 2)
    await http.prefill("r", b'{"messages": [], "max_tokens": 7}', params, next_token=5)
    paths = [path for path, _, _ in fake.requests]
    assert paths == ["/v1/responses", "/v1/chat/completions"]
    response, chat = fake.posted
    assert response["input"] == [{"x": 1.0}]
    expected = {
        "max_output_tokens": 1,
        "stream": False,
        "seed": 1,
        "temperature": 0.0,
        "logit_bias": {"5": 100.0},
        "kv_transfer_params": params,
    }
    assert expected.items() <= response.items()
    assert "max_tokens" not in response
    assert (chat["max_tokens"], chat["allowed_token_ids"]) == (1, [5])


async def test_cancelling_a_prefill_closes_its_connection(
    session: aiohttp.ClientSession, fake: FakeEngine
) -> None:
    fake.first_token.clear()
    task = asyncio.create_task(EngineHttp(fake.url, session).prefill("r1", TokenIds.of([1]), {}))
    await fake.wait_requests(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await fake.wait_aborts(1)


async def test_an_engine_that_dies_or_is_slow_is_unreachable(
    session: aiohttp.ClientSession, fake: FakeEngine
) -> None:
    fake.first_token.clear()
    http = EngineHttp(fake.url, session)
    with pytest.raises(EngineUnreachable, match=r"no answer within 0\.1 s"):
        await http.prefill("r1", TokenIds.of([1]), {}, timeout_s=0.1)
    task = asyncio.create_task(http.prefill("r2", TokenIds.of([1]), {}))
    await fake.wait_requests(2)
    await fake.stop()
    with pytest.raises(EngineUnreachable, match="/v1/completions"):
        await task
