"""OpenAI's own client takes the gateway's answers, and schemathesis finds none that contradicts
/openapi.json.
"""

import importlib.util
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from gateway_region import Region
from limited_command import check_python

NUM_EXAMPLES = 8
LIMIT_S = 90.0
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "unsupported_method",
)
"""Engines judge the types of fields, and take some that the document does not name. So the checks
that wrong data is refused are left out.
"""
LONG = "x" * 300
"""Above the threshold of 100 tokens, so that another cluster prefills it."""


@pytest.fixture
async def client(speaking: Region) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"{speaking.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as opened:
        yield opened


@pytest.mark.parametrize("prompt", ["short", LONG])
async def test_the_openai_client_completes(client: openai.AsyncOpenAI, prompt: str) -> None:
    whole = await client.completions.create(model="tiny", prompt=prompt)
    stream = await client.completions.create(model="tiny", prompt=prompt, stream=True)
    text = "".join([chunk.choices[0].text async for chunk in stream])
    assert whole.choices[0].text == text == "Hello from the region"
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len(prompt)


@pytest.mark.parametrize("content", ["short", LONG])
async def test_the_openai_client_chats(client: openai.AsyncOpenAI, content: str) -> None:
    messages: Any = [{"role": "user", "content": content}]
    whole = await client.chat.completions.create(model="tiny", messages=messages)
    stream = await client.chat.completions.create(model="tiny", messages=messages, stream=True)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert whole.choices[0].message.content == text == "Hello from the region"


async def test_the_openai_client_calls_tools_and_asks_for_a_schema(
    client: openai.AsyncOpenAI,
) -> None:
    messages: Any = [{"role": "user", "content": "Which city?"}]
    city = {"type": "object", "properties": {"city": {"type": "string"}}}
    tool: Any = {"type": "function", "function": {"name": "weather", "parameters": city}}
    called = await client.chat.completions.create(model="tiny", messages=messages, tools=[tool])
    calls: Any = called.choices[0].message.tool_calls
    assert calls[0].function.name == "weather"
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": city}}
    answer = await client.chat.completions.create(
        model="tiny", messages=messages, response_format=wanted
    )
    assert answer.choices[0].message.content == '{"city": "Paris"}'


async def test_the_openai_client_lists_models_and_knows_errors(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["tiny"]
    assert (await client.models.retrieve("tiny")).owned_by == "prfaas"
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.completions.create(model="other", prompt="x")
    assert unknown.value.code == "model_not_found"
    wrong: Any = 7
    with pytest.raises(openai.BadRequestError):
        await client.chat.completions.create(model="tiny", messages=wrong)
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other")


@pytest.mark.parametrize("text", ["short", LONG])
async def test_the_openai_client_asks_for_responses(
    client: openai.AsyncOpenAI, speaking: Region, text: str
) -> None:
    whole = await client.responses.create(model="tiny", input=text, max_output_tokens=4)
    stream = await client.responses.create(model="tiny", input=text, stream=True)
    events = [event async for event in stream]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert whole.output_text == "".join(deltas) == "Hello from the region"
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == whole.output_text
    assert whole.usage is not None
    assert whole.usage.input_tokens == len(text) + 2
    assert len(speaking.far.jobs) == (2 if text == LONG else 0)


async def test_the_openai_client_uses_tools_and_schemas_in_responses(
    client: openai.AsyncOpenAI,
) -> None:
    city = {"type": "object", "properties": {"city": {"type": "string"}}}
    tool: Any = {"type": "function", "name": "weather", "parameters": city, "strict": False}
    called = await client.responses.create(model="tiny", input="Which city?", tools=[tool])
    item = called.output[0]
    assert item.type == "function_call"
    assert (item.name, item.arguments) == ("weather", '{"city": "Paris"}')
    wanted: Any = {"format": {"type": "json_schema", "name": "city", "schema": city}}
    answer = await client.responses.create(model="tiny", input="Which city?", text=wanted)
    assert answer.output_text == '{"city": "Paris"}'
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(model="tiny", input="More", previous_response_id="resp_1")
    assert refused.value.param == "previous_response_id"
    assert "whole conversation" in refused.value.message


async def test_the_openai_client_asks_for_embeddings(client: openai.AsyncOpenAI) -> None:
    one = await client.embeddings.create(model="tiny", input="text", encoding_format="float")
    two = await client.embeddings.create(model="tiny", input=["a", "b"], encoding_format="float")
    assert [item.embedding for item in one.data] == [[0.5, -0.5]]
    assert [item.index for item in two.data] == [0, 1]


async def test_schemathesis_finds_no_answer_that_contradicts_the_document(
    speaking: Region, tmp_path: Path
) -> None:
    assert importlib.util.find_spec("schemathesis"), "install requirements/dev.txt"
    argv = ["run", f"{speaking.url}/openapi.json", "--checks", ",".join(CHECKS)]
    argv += ["--phases", "examples,coverage,fuzzing", "--max-examples", str(NUM_EXAMPLES)]
    argv += ["--seed", "1", "--generation-deterministic"]
    argv += ["--request-timeout", "10", "--no-color"]
    await check_python(
        *("-m", "schemathesis.cli", *argv),
        directory=tmp_path,
        limit_s=LIMIT_S,
        shown_chars=20000,
    )
