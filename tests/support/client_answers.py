"""What the official clients of OpenAI and Anthropic get for long prompts of an engine or region."""

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import anthropic
import openai

from deploy.lab.demo.scenario import text

NUM_PROMPT_BYTES = 900
MAX_TOKENS = 12
NUM_CHOICES = 3
GREEDY = {"temperature": 0}
TOOL_ARGS = (
    *("--enable-auto-tool-choice", "--tool-call-parser", "pythonic"),
    # A model without sense would fill its answer with blanks.
    "--structured-outputs-config",
    '{"backend": "xgrammar", "disable_any_whitespace": true}',
)
"""What engines must be started with, so that they take tools. With this parser vLLM holds a call to
the schema of the tool, and not to the format of one family of models, which allows any blanks.
"""
_CITY: dict[str, object] = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
_NAME = "weather"
_FUNCTION: Any = {"type": "function", "function": {"name": _NAME, "parameters": _CITY}}
_AS_JSON: Any = {"type": "json_schema", "json_schema": {"name": _NAME, "schema": _CITY}}
_JSON_TOKENS = 128
"""Enough for a call of a tool with all that is around it."""
_TIMEOUT_S = 120.0

Ask = Callable[[openai.AsyncOpenAI, anthropic.AsyncAnthropic, str, str], Awaitable[list[str]]]


async def client_answers(url: str, model: str) -> dict[str, list[str]]:
    """The texts that `model` at `url` answers, by the call's name, in the order of the calls.

    Each call has a prompt of its own of NUM_PROMPT_BYTES, so that none finds another's KVCache.
    """
    async with (
        openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", timeout=_TIMEOUT_S, max_retries=0
        ) as to_openai,
        anthropic.AsyncAnthropic(
            base_url=url, api_key="none", timeout=_TIMEOUT_S, max_retries=0
        ) as to_anthropic,
    ):
        return {
            name: await ask(to_openai, to_anthropic, model, text(NUM_PROMPT_BYTES, seed))
            for seed, (name, ask) in enumerate(_CALLS.items(), start=8100)
        }


async def _chat(
    client: openai.AsyncOpenAI, _: anthropic.AsyncAnthropic, model: str, prompt: str
) -> list[str]:
    pieces = []
    async for event in await client.chat.completions.create(
        model=model, messages=_said(prompt), max_tokens=MAX_TOKENS, temperature=0, stream=True
    ):
        pieces += [choice.delta.content or "" for choice in event.choices]
    return ["".join(pieces)]


async def _choices(
    client: openai.AsyncOpenAI, _: anthropic.AsyncAnthropic, model: str, prompt: str
) -> list[str]:
    # vLLM takes no `n` above 1 at temperature 0.
    answer = await client.chat.completions.create(
        model=model,
        messages=_said(prompt),
        max_tokens=MAX_TOKENS,
        n=NUM_CHOICES,
        extra_body={"top_k": 1},
    )
    return [choice.message.content or "" for choice in answer.choices]


async def _structured(
    client: openai.AsyncOpenAI, _: anthropic.AsyncAnthropic, model: str, prompt: str
) -> list[str]:
    answer = await client.chat.completions.create(
        model=model,
        messages=_said(prompt),
        max_tokens=MAX_TOKENS,
        temperature=0,
        extra_body={"structured_outputs": {"regex": "[a-f]{8}"}},
    )
    return [answer.choices[0].message.content or ""]


async def _schema(
    client: openai.AsyncOpenAI, _: anthropic.AsyncAnthropic, model: str, prompt: str
) -> list[str]:
    answer = await client.chat.completions.create(
        model=model,
        messages=_said(prompt),
        max_tokens=_JSON_TOKENS,
        temperature=0,
        response_format=_AS_JSON,
    )
    return [_a_city(answer.choices[0].message.content or "")]


async def _schema_stream(
    client: openai.AsyncOpenAI, _: anthropic.AsyncAnthropic, model: str, prompt: str
) -> list[str]:
    pieces = []
    async for event in await client.chat.completions.create(
        model=model,
        messages=_said(prompt),
        max_tokens=_JSON_TOKENS,
        temperature=0,
        response_format=_AS_JSON,
        stream=True,
    ):
        pieces += [choice.delta.content or "" for choice in event.choices]
    return [_a_city("".join(pieces))]


async def _tools(
    client: openai.AsyncOpenAI, _: anthropic.AsyncAnthropic, model: str, prompt: str
) -> list[str]:
    answer = await client.chat.completions.create(
        model=model,
        messages=_said(prompt),
        max_tokens=_JSON_TOKENS,
        temperature=0,
        tools=[_FUNCTION],
        tool_choice={"type": "function", "function": {"name": _NAME}},
    )
    called = []
    for call in answer.choices[0].message.tool_calls or ():
        assert call.type == "function"
        called += [call.function.name, _a_city(call.function.arguments)]
    return called


async def _tools_stream(
    client: openai.AsyncOpenAI, _: anthropic.AsyncAnthropic, model: str, prompt: str
) -> list[str]:
    names, pieces = [], []
    async for event in await client.chat.completions.create(
        model=model,
        messages=_said(prompt),
        max_tokens=_JSON_TOKENS,
        temperature=0,
        tools=[_FUNCTION],
        tool_choice="required",
        parallel_tool_calls=False,
        stream=True,
    ):
        for choice in event.choices:
            for call in choice.delta.tool_calls or ():
                assert call.function is not None
                names += [call.function.name] if call.function.name else []
                pieces.append(call.function.arguments or "")
    return [*names, _a_city("".join(pieces))]


async def _tools_unasked(
    client: openai.AsyncOpenAI, _: anthropic.AsyncAnthropic, model: str, prompt: str
) -> list[str]:
    """The model may call a tool that it knows, and answer what the tool said before."""
    said = {"name": _NAME, "arguments": '{"city": "Rome"}'}
    call = {"id": "call_1", "type": "function", "function": said}
    turns: Any = [
        *_said(prompt),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    answer = await client.chat.completions.create(
        model=model, messages=turns, max_tokens=MAX_TOKENS, temperature=0, tools=[_FUNCTION]
    )
    return [answer.choices[0].message.content or ""]


async def _echo(
    client: openai.AsyncOpenAI, _: anthropic.AsyncAnthropic, model: str, prompt: str
) -> list[str]:
    answer = await client.completions.create(
        model=model, prompt=prompt, max_tokens=MAX_TOKENS, temperature=0, echo=True
    )
    return [answer.choices[0].text]


async def _responses(
    client: openai.AsyncOpenAI, _: anthropic.AsyncAnthropic, model: str, prompt: str
) -> list[str]:
    answer = await client.responses.create(
        model=model, input=prompt, max_output_tokens=MAX_TOKENS, temperature=0
    )
    return [answer.output_text]


async def _responses_stream(
    client: openai.AsyncOpenAI, _: anthropic.AsyncAnthropic, model: str, prompt: str
) -> list[str]:
    pieces = []
    async for event in await client.responses.create(
        model=model, input=prompt, max_output_tokens=MAX_TOKENS, temperature=0, stream=True
    ):
        if event.type == "response.output_text.delta":
            pieces.append(event.delta)
    return ["".join(pieces)]


async def _responses_schema(
    client: openai.AsyncOpenAI, _: anthropic.AsyncAnthropic, model: str, prompt: str
) -> list[str]:
    answer = await client.responses.create(
        model=model,
        input=prompt,
        max_output_tokens=_JSON_TOKENS,
        temperature=0,
        text={"format": {"type": "json_schema", "name": _NAME, "schema": _CITY}},
    )
    return [_a_city(answer.output_text)]


async def _responses_tools(
    client: openai.AsyncOpenAI, _: anthropic.AsyncAnthropic, model: str, prompt: str
) -> list[str]:
    tool: Any = {"type": "function", "name": _NAME, "parameters": _CITY, "strict": False}
    answer = await client.responses.create(
        model=model,
        input=prompt,
        max_output_tokens=_JSON_TOKENS,
        temperature=0,
        tools=[tool],
        tool_choice={"type": "function", "name": _NAME},
    )
    (call,) = (item for item in answer.output if item.type == "function_call")
    return [call.name, _a_city(call.arguments)]


async def _responses_again(
    client: openai.AsyncOpenAI, _: anthropic.AsyncAnthropic, model: str, prompt: str
) -> list[str]:
    """The next turn: with the conversation before it in place of a previous id."""
    turns: Any = [
        *_said(prompt),
        {"role": "assistant", "content": "before"},
        {"role": "user", "content": "and now?"},
    ]
    answer = await client.responses.create(
        model=model, input=turns, max_output_tokens=MAX_TOKENS, temperature=0
    )
    return [answer.output_text]


async def _messages(
    _: openai.AsyncOpenAI, client: anthropic.AsyncAnthropic, model: str, prompt: str
) -> list[str]:
    answer = await client.messages.create(
        model=model, messages=_said(prompt), max_tokens=MAX_TOKENS, extra_body=GREEDY
    )
    return [block.text for block in answer.content if block.type == "text"]


async def _messages_stream(
    _: openai.AsyncOpenAI, client: anthropic.AsyncAnthropic, model: str, prompt: str
) -> list[str]:
    async with client.messages.stream(
        model=model, messages=_said(prompt), max_tokens=MAX_TOKENS, extra_body=GREEDY
    ) as stream:
        return [await stream.get_final_text()]


async def _messages_tools(
    _: openai.AsyncOpenAI, client: anthropic.AsyncAnthropic, model: str, prompt: str
) -> list[str]:
    answer = await client.messages.create(
        model=model,
        messages=_said(prompt),
        max_tokens=_JSON_TOKENS,
        extra_body=GREEDY,
        tools=[{"name": _NAME, "input_schema": _CITY}],
        tool_choice={"type": "tool", "name": _NAME},
    )
    return _called(answer)


async def _messages_tools_stream(
    _: openai.AsyncOpenAI, client: anthropic.AsyncAnthropic, model: str, prompt: str
) -> list[str]:
    async with client.messages.stream(
        model=model,
        messages=_said(prompt),
        max_tokens=_JSON_TOKENS,
        extra_body=GREEDY,
        tools=[{"name": _NAME, "input_schema": _CITY}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    ) as stream:
        return _called(await stream.get_final_message())


async def _count_tokens(
    _: openai.AsyncOpenAI, client: anthropic.AsyncAnthropic, model: str, prompt: str
) -> list[str]:
    counted = await client.messages.count_tokens(model=model, messages=_said(prompt))
    return [str(counted.input_tokens)]


def _called(answer: Any) -> list[str]:
    """The name of the tool that a message calls, and what it gives to it."""
    (call,) = (block for block in answer.content if block.type == "tool_use")
    return [call.name, _a_city(json.dumps(call.input))]


def _a_city(text: str) -> str:
    """`text`, which must be what the schema allows."""
    found = json.loads(text)
    assert found in [{"city": "Rome"}, {"city": "Oslo"}], text
    return text


def _said(prompt: str) -> Any:
    return [{"role": "user", "content": prompt}]


_CALLS: Mapping[str, Ask] = {
    "chat": _chat,
    "choices": _choices,
    "structured": _structured,
    "schema": _schema,
    "schema_stream": _schema_stream,
    "tools": _tools,
    "tools_stream": _tools_stream,
    "tools_unasked": _tools_unasked,
    "echo": _echo,
    "responses": _responses,
    "responses_stream": _responses_stream,
    "responses_schema": _responses_schema,
    "responses_tools": _responses_tools,
    "responses_again": _responses_again,
    "messages": _messages,
    "messages_stream": _messages_stream,
    "messages_tools": _messages_tools,
    "messages_tools_stream": _messages_tools_stream,
    "count_tokens": _count_tokens,
}
LOCAL_CALLS = frozenset({"count_tokens"})
"""Those that one engine of the PD cluster answers."""
