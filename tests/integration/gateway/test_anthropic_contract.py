"""Anthropic's own client takes the gateway's answers and knows its errors."""

from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest
from gateway_region import Region

from deploy.gateway.api_keys import ApiKey

LONG = "x" * 300
"""Above the threshold of 100 tokens, so that another cluster prefills it."""
TOOL: Any = {
    "name": "weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}


def client_of(url: str, key: str = "any") -> anthropic.AsyncAnthropic:
    """It sends the key as X-Api-Key."""
    return anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0)


def asked(content: str = "Say hello.", **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {"model": "tiny", "max_tokens": 8, "messages": messages} | fields


@pytest.fixture
async def client(speaking: Region) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with client_of(speaking.url) as opened:
        yield opened


@pytest.mark.parametrize("content", ["short", LONG])
async def test_the_client_gets_messages(
    client: anthropic.AsyncAnthropic, speaking: Region, content: str
) -> None:
    whole = await client.messages.create(**asked(content, system="Be short."))
    assert [block.text for block in whole.content] == ["Hello from the region"]
    assert (whole.stop_reason, whole.usage.input_tokens) == ("end_turn", len(content) + 2)
    async with client.messages.stream(**asked(content)) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        final = await stream.get_final_message()
    assert text == final.content[0].text == "Hello from the region"
    assert (final.stop_reason, final.usage.output_tokens) == ("end_turn", 4)
    assert len(speaking.far.jobs) == (2 if content == LONG else 0)


async def test_the_client_calls_tools_and_counts_tokens(client: anthropic.AsyncAnthropic) -> None:
    called = await client.messages.create(**asked("Which city?", tools=[TOOL]))
    (block,) = called.content
    assert (called.stop_reason, block.type) == ("tool_use", "tool_use")
    assert (block.name, block.input) == ("weather", {"city": "Paris"})
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "18 degrees"}
    turns = [*asked("Which city?")["messages"], {"role": "assistant", "content": called.content}]
    answer = await client.messages.create(
        **asked(messages=[*turns, {"role": "user", "content": [result]}])
    )
    assert answer.content[0].text == "Hello from the region"
    counted = await client.messages.count_tokens(
        model="tiny", messages=asked("four")["messages"], system="Be short."
    )
    assert counted.input_tokens == 6


async def test_the_client_knows_errors(client: anthropic.AsyncAnthropic, speaking: Region) -> None:
    with pytest.raises(anthropic.NotFoundError) as unknown:
        await client.messages.create(**asked(model="other"))
    body: Any = unknown.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == "not_found_error"
    assert "other" in body["error"]["message"]
    with pytest.raises(anthropic.BadRequestError) as wrong:
        await client.messages.create(**asked(messages=7))
    body = wrong.value.body
    assert body["error"] == {
        "type": "invalid_request_error",
        "message": "messages must be a text, or a list of texts or objects.",
    }
    with pytest.raises(anthropic.BadRequestError, match="kv_transfer_params"):
        await client.messages.create(**asked(), extra_body={"kv_transfer_params": {}})
    speaking.gateway.stop_accepting()
    with pytest.raises(anthropic.APIStatusError) as stopping:
        await client.messages.create(**asked())
    body = stopping.value.body
    assert (stopping.value.status_code, body["error"]["type"]) == (503, "overloaded_error")


async def test_the_client_needs_a_key_where_there_are_keys(open_region: Any) -> None:
    async with open_region(api_keys=(ApiKey(key="secret", name="one"),)) as region:
        async with client_of(region.url, "wrong") as stranger:
            with pytest.raises(anthropic.AuthenticationError) as unknown:
                await stranger.messages.count_tokens(**asked_to_count())
        body: Any = unknown.value.body
        assert body["error"]["type"] == "authentication_error"
        assert region.engine.requests == []
        async with client_of(region.url, "secret") as client:
            await client.messages.count_tokens(**asked_to_count())
        assert (await region.record()).tenant == "one"


def asked_to_count() -> dict[str, Any]:
    return {"model": "tiny", "messages": asked()["messages"]}
