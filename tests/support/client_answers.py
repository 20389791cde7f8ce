"""What the official clients of OpenAI and Anthropic get for long prompts of an engine or region."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import anthropic
import openai

from deploy.lab.demo.scenario import text

NUM_PROMPT_BYTES = 900
MAX_TOKENS = 12
NUM_CHOICES = 3
GREEDY = {"temperature": 0}
TOOL_ARGS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
"""What engines must be started with, so that they take tools."""
_CITY: dict[str, object] = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
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


async def _tools(
    client: openai.AsyncOpenAI, _: anthropic.AsyncAnthropic, model: str, prompt: str
) -> list[str]:
    answer = await client.chat.completions.create(
        model=model,
        messages=_said(prompt),
        max_tokens=4 * MAX_TOKENS,
        temperature=0,
        tools=[{"type": "function", "function": {"name": "weather", "parameters": _CITY}}],
        tool_choice={"type": "function", "function": {"name": "weather"}},
    )
    return [
        f"{call.function.name} {call.function.arguments}"
        for call in answer.choices[0].message.tool_calls or ()
        if call.type == "function"
    ]


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


async def _count_tokens(
    _: openai.AsyncOpenAI, client: anthropic.AsyncAnthropic, model: str, prompt: str
) -> list[str]:
    counted = await client.messages.count_tokens(model=model, messages=_said(prompt))
    return [str(counted.input_tokens)]


def _said(prompt: str) -> Any:
    return [{"role": "user", "content": prompt}]


_CALLS: Mapping[str, Ask] = {
    "chat": _chat,
    "choices": _choices,
    "structured": _structured,
    "tools": _tools,
    "echo": _echo,
    "responses": _responses,
    "responses_stream": _responses_stream,
    "messages": _messages,
    "messages_stream": _messages_stream,
    "count_tokens": _count_tokens,
}
LOCAL_CALLS = frozenset({"count_tokens"})
"""Those that one engine of the PD cluster answers."""
