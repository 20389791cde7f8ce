"""Odd but legal requests to the routed endpoints, and common illegal ones.

A part is written by hand. The rest is drawn with a fixed seed from an engine's OpenAPI document:
each field of each endpoint with each kind of value that its schema allows, alone and in pairs.
Answers are greedy and short, so that hundreds of them take seconds.
"""

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import aiohttp
from same_answers import HttpRequest
from schema_values import legal_values, resolved

from deploy.lab.demo.byte_tokenizer import EOS_ID
from deploy.lab.demo.scenario import text

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
LONG_BYTES = 300
"""Long enough to be prefilled in the prefill cluster."""
NUM_PAIRS = 120
"""Requests with two drawn fields, beside those with one."""

_LIMITS = {
    COMPLETIONS: "max_tokens",
    CHAT: "max_completion_tokens",
    RESPONSES: "max_output_tokens",
    MESSAGES: "max_tokens",
}
_NOT_DRAWN: Mapping[str, str] = {
    **dict.fromkeys(("model", "messages", "prompt", "input", "stream"), "each request has its own"),
    **dict.fromkeys(_LIMITS.values(), "without a limit an answer fills the context"),
    "temperature": "answers must not depend on chance",
    # vLLM 0.32 answers -9999 as the other requests' second best of `logprobs`.
    "logprob_token_ids": "it spoils the answers that are computed together with it",
    "request_id": "a server answers with its own",
    **dict.fromkeys(
        ("kv_transfer_params", "ec_transfer_params", "previous_response_id", "background"),
        "the gateway refuses it: see `REFUSED_HERE`",
    ),
}

REFUSED_HERE: tuple[tuple[str, dict[str, Any], str], ...] = (
    (COMPLETIONS, {"kv_transfer_params": {"a": 1}}, "it names memory of the region's nodes"),
    (CHAT, {"ec_transfer_params": {"a": 1}}, "it names memory of the region's nodes"),
    (RESPONSES, {"previous_response_id": "resp_1"}, "an engine keeps it in one process"),
    (CHAT, {"messages": [{"role": "user", "content": {}}]}, "no API has parts that are no list"),
    (RESPONSES, {"background": True}, "an engine keeps it in one process"),
)
"""What the gateway answers otherwise than an engine, and why. docs/api.md says it to clients."""


async def odd_requests(url: str, model: str, max_model_len: int) -> list[HttpRequest]:
    """All of them, each with a name of its own; `url` is an engine's."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/openapi.json") as response:
        openapi = await response.json()
    found = [
        *_by_hand(model, max_model_len),
        *_illegal(model),
        *_drawn(openapi, model),
        *(
            HttpRequest(f"refused {name} {fields}", name, _body(name, model, "Hi") | fields, why)
            for name, fields, why in REFUSED_HERE
        ),
    ]
    return [
        HttpRequest(f"{number} {one.path} {one.name}", one.path, one.body, one.differs)
        for number, one in enumerate(found)
    ]


def _body(path: str, model: str, prompt: Any, limit: int = 3) -> dict[str, Any]:
    """A greedy request with `prompt`: a text, or whatever the endpoint has in its place."""
    body: dict[str, Any] = {"model": model, _LIMITS[path]: limit, "temperature": 0}
    if path == COMPLETIONS:
        return body | {"prompt": prompt}
    if path == RESPONSES:
        return body | {"input": prompt}
    said = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    return body | {"messages": said}


def _streamed(requests: Sequence[HttpRequest]) -> Iterator[HttpRequest]:
    """Each as it is, and as a stream."""
    for one in requests:
        assert isinstance(one.body, dict)
        yield one
        yield HttpRequest(f"{one.name}, stream", one.path, one.body | {"stream": True})


# --- by hand --------------------------------------------------------------------------------------

LENGTHS_TOKENS = (
    *(1, 2, 31, 32, 33, 99, 100, 101, 127, 128, 129, 255, 256, 257),
    *(511, 512, 513, 1023, 1024, 1025),
)
"""About blocks of 32, the threshold of 100, the window of 128 and chunks of 512."""
EOS = str(EOS_ID)
_CHOICES: dict[str, Any] = {"n": 2, "top_k": 1, "temperature": 1}
"""vLLM takes no `n` above 1 at temperature 0."""
_OF_COMPLETIONS: tuple[dict[str, Any], ...] = (
    {"echo": True},
    {"echo": True, "max_tokens": 0},
    {"echo": True, "max_tokens": 1},
    {"echo": True, "logprobs": 1},
    {"echo": True, "logprobs": 0, "max_tokens": 1},
    {"echo": True, "return_token_ids": True},
    {"echo": True, **_CHOICES},
    {"logprobs": 5},
    {"logprobs": 1, "return_tokens_as_token_ids": True},
    {"logprobs": 2, "return_token_ids": True, **_CHOICES},
    {"prompt_logprobs": 0},
    {"prompt_logprobs": 2},
    {**_CHOICES},
    {**_CHOICES, "n": 5},
    {"use_beam_search": True, "n": 2},
    {"min_tokens": 3, "max_tokens": 3},
    {"max_tokens": None},
    {"max_tokens": 1},
    {"max_tokens": 1, **_CHOICES},
    {"stop": ["\n\n", "zzz", "\u00e9", "never"]},
    {"stop_token_ids": list(range(32, 127))},
    {"stop_token_ids": list(range(32, 127)), "min_tokens": 2},
    {"seed": 7, "temperature": 0.2},
    {"logit_bias": {EOS: 100}},
    {"logit_bias": {EOS: 100}, "min_tokens": 2},
    {"logit_bias": {EOS: 100}, "ignore_eos": True},
    {"logit_bias": {EOS: 100}, "logprobs": 1, "skip_special_tokens": False},
    {"logit_bias": {"65": 100}, "stop_token_ids": [65]},
    {"logit_bias": {"65": 100}, "stop_token_ids": [65], "min_tokens": 2},
    {"cache_salt": "mine"},
    {"truncate_prompt_tokens": 5},
    {"truncate_prompt_tokens": 120, "truncation_side": "right"},
    {"truncate_prompt_tokens": 120, "truncation_side": "left", "echo": True},
    {"logit_bias": {"65": 100}},
    {"logit_bias": {"65": -100, "66": 100.0}},
    {"bad_words": ["a", "the"]},
    {"structured_outputs": {"choice": ["yes", "no"]}, "max_tokens": 8},
    {"structured_outputs": {"regex": "[a-f]{3}"}, "max_tokens": 8},
    {"response_format": {"type": "json_object"}},
    {"skip_special_tokens": False, "spaces_between_special_tokens": False},
    {"stream_interval": 2},
    {"unknown_field": {"a": [1, None]}},
    {"top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1.5, "presence_penalty": -2},
)
_PROMPTS: tuple[Any, ...] = (
    "",
    " ",
    "\n",
    "\u0000",
    "\u00e9\u2028\U0001f600",
    "<|im_end|>",
    "<|endoftext|>",
    "e\u0301\ufeff\u200d",
    [],
    [[]],
    [""],
    [0],
    [65],
    [[65]],
    [258],
    [256, 257, 258],
    [319],
    ["a"],
    ["a", "b"],
    ["a", ""],
    ["a", "a", "a"],
    [[65, 66], [67]],
    [[65], [65]],
    [[65, 66], []],
    [text(LONG_BYTES, 7001), "a"],
    [list(text(LONG_BYTES, 7002).encode())],
    [text(LONG_BYTES, 7003)],
)
ANSWER = "stop here, please"
"""An answer that is known beforehand. Each of its bytes is a token, and a chunk of a stream."""
STOPS: tuple[Any, ...] = ("s", "st", "op he", "e, p", "se", "please!", ["never", "h", " h"])
_STREAM_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"include_usage": True},
    {"include_usage": False},
    {"continuous_usage_stats": True},
    {"include_usage": True, "continuous_usage_stats": True},
)
_TURNS: tuple[list[dict[str, Any]], ...] = (
    [],
    [{"role": "system", "content": "Be brief."}],
    [{"role": "user", "content": ""}],
    [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
    [{"role": "assistant", "content": "a"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
    [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
    [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
    [{"role": "user", "content": []}],
    [{"role": "user", "content": "a", "name": "Ann"}],
    [{"role": "user", "content": None}],
    [{"role": "user"}],
    [{"role": "developer", "content": "d"}, {"role": "user", "content": "u"}],
    [{"role": "user", "content": "\u00e9\U0001f600<|im_end|>"}],
    [{"role": "user", "content": text(LONG_BYTES, 7010)}, {"role": "assistant", "content": "so"}],
    [{"role": "user", "content": [{"type": "text", "text": text(LONG_BYTES, 7011)}]}],
)
_OF_CHATS: tuple[dict[str, Any], ...] = (
    {"logprobs": True},
    {"logprobs": True, "top_logprobs": 3},
    {"logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True},
    {"top_logprobs": 0},
    {"prompt_logprobs": 1},
    {"return_token_ids": True},
    {"return_prompt_text": True},
    {**_CHOICES},
    {**_CHOICES, "n": 4, "logprobs": True},
    {"n": None},
    {"max_tokens": 2, "max_completion_tokens": None},
    {"max_tokens": 2, "max_completion_tokens": 4},
    {"echo": True},
    {"add_generation_prompt": False},
    {"add_generation_prompt": False, "continue_final_message": True},
    {"min_tokens": 2},
    {"stop": "e"},
    {"tool_choice": "none"},
    {"tools": []},
    {"tools": None, "tool_choice": None},
    {"response_format": {"type": "text"}},
    {"response_format": {"type": "json_object"}},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"documents": [{"title": "t", "text": "x"}]},
    {"reasoning_effort": "low"},
    {"parallel_tool_calls": None},
    {"metadata": {"a": "b"}, "store": True, "service_tier": "auto"},
    {"truncate_prompt_tokens": 50},
    {"cache_salt": "mine"},
)
_OF_RESPONSES: tuple[dict[str, Any], ...] = (
    {"instructions": "Be brief."},
    {"instructions": ""},
    {"instructions": None, "metadata": {"a": "b"}},
    {"store": False},
    {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    {"top_logprobs": 1},
    {"truncation": "auto"},
    {"text": {"format": {"type": "text"}}},
    {"tools": [], "tool_choice": "none"},
    {"max_tool_calls": 1},
    {"reasoning": {"effort": "low"}},
    {"enable_response_messages": True},
    {"stop": ["e"]},
    {"service_tier": "flex", "user": "u", "prompt_cache_key": "k"},
)
_INPUTS: tuple[Any, ...] = (
    "",
    [],
    [{"role": "user", "content": "a"}],
    [{"type": "message", "role": "user", "content": "a"}],
    [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
    [{"role": "developer", "content": "d"}, {"role": "user", "content": "u"}],
    [{"role": "user", "content": text(LONG_BYTES, 7020)}],
)
_OF_MESSAGES: tuple[dict[str, Any], ...] = (
    {"system": "Be brief."},
    {"system": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    {"stop_sequences": []},
    {"stop_sequences": ["e", "a"]},
    {"metadata": {"user_id": "u"}},
    {"top_k": 1, "top_p": 1.0},
    {"thinking": {"type": "disabled"}},
    {"tools": []},
    {"max_tokens": 1},
)


_FORWARDED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/tokenize", {"prompt": ""}),
    ("/tokenize", {"prompt": "a\u00e9", "return_token_strs": True, "add_special_tokens": False}),
    ("/tokenize", {"messages": [{"role": "user", "content": "a"}]}),
    ("/tokenize", {"prompt": 5}),
    ("/detokenize", {"tokens": []}),
    ("/detokenize", {"tokens": [65, 258, 319]}),
    ("/detokenize", {"tokens": [-1]}),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "a"}]}),
    ("/v1/messages/count_tokens", {"messages": []}),
)


def _by_hand(model: str, max_model_len: int) -> Iterator[HttpRequest]:
    def of(path: str, prompt: Any, **fields: Any) -> HttpRequest:
        name = " ".join(f"{key}={value}" for key, value in fields.items())
        if not isinstance(prompt, str) or len(prompt) < 20:
            name = f"{str(prompt)[:60]!r} {name}"
        return HttpRequest(name, path, _body(path, model, prompt) | fields)

    long = (text(LONG_BYTES, seed) for seed in itertools.count(7100))
    yield from _streamed([of(COMPLETIONS, one) for one in _PROMPTS])
    for fields in _OF_COMPLETIONS:
        yield from _streamed([of(COMPLETIONS, "Once", **fields)])
        yield of(COMPLETIONS, next(long), **fields)
    for length in LENGTHS_TOKENS:
        prompt = text(length, 7300 + length)
        yield of(COMPLETIONS, prompt, num_tokens=length)
        yield of(COMPLETIONS, list(prompt.encode()), stream=True, return_token_ids=True)
    for stop, path in itertools.product(STOPS, (COMPLETIONS, CHAT)):
        fields = {"stop": stop, _LIMITS[path]: 24, "structured_outputs": {"choice": [ANSWER]}}
        yield from _streamed([of(path, "Stop", **fields)])
        fields["include_stop_str_in_output"] = True
        yield of(path, "Stop", **fields, stream=True, stream_interval=3)
        yield of(path, next(long), **fields, stream=True)
    for room in (0, 1, 2, 3):
        prompt = text(max_model_len - room, 7900 + room)
        yield of(COMPLETIONS, prompt, room=room, max_tokens=None)
        yield of(COMPLETIONS, prompt, room=room, max_tokens=2)
    yield of(CHAT, text(max_model_len - 60, 7910), max_completion_tokens=None)
    for path in (COMPLETIONS, CHAT):
        for options in _STREAM_OPTIONS:
            yield of(path, "Usage", stream=True, stream_options=options)
            yield of(path, next(long), stream=True, stream_options=options)
    for path, odd in ((CHAT, _OF_CHATS), (RESPONSES, _OF_RESPONSES), (MESSAGES, _OF_MESSAGES)):
        for fields in odd:
            yield from _streamed([of(path, "Once", **fields)])
            yield of(path, next(long), **fields)
    for path, fields in _FORWARDED:
        yield HttpRequest(f"{fields}", path, {"model": model} | fields)
    for path, odd_turns in ((CHAT, _TURNS), (MESSAGES, _TURNS), (RESPONSES, _INPUTS)):
        yield from _streamed([of(path, turns) for turns in odd_turns])


# --- illegal --------------------------------------------------------------------------------------

_WRONG: Mapping[str, tuple[Any, ...]] = {
    "model": (None, "", "unknown", 5, ["a"]),
    "temperature": (-1, "x", "0", []),
    "top_p": (0, 1.1, -1),
    "n": (0, -1, "2", 1.5, 100_000, True),
    "stream": ("yes", 1, None, "x", []),
    "stream_options": ({"include_usage": True}, [], "x"),
    "stop": ("", [""], [1], {}, ["a"] * 20),
    "logit_bias": ({"a": 1}, {"99999": 1}, []),
    "seed": (1 << 63, 1.5, "x"),
    "min_tokens": (5, -1, "x"),
    "logprobs": (-1, 1000, "x", True),
    "response_format": ({"type": "x"}, "json", {"type": "json_schema"}),
    "structured_outputs": ({"regex": "(("}, {}, {"json": "{"}),
    "stop_token_ids": ([-1], ["x"], [1 << 40]),
    "cache_salt": ("", 5, "x" * 2000),
    "priority": (1, "x"),
    "allowed_token_ids": ([], [99999]),
    "truncate_prompt_tokens": (-2, 1 << 40),
    "vllm_xargs": ([], {"a": None}),
}
_NO_PROMPTS: tuple[Any, ...] = (None, 5, [None], [{}], [-1], [1.5], ["a", 1], [[["a"]]], [True])
_NO_BODIES = (b"", b"null", b"[]", b"{", b'"x"', b"{}", b'{"model": }', b"\xff", b'{"a": NaN}')


def _illegal(model: str) -> Iterator[HttpRequest]:
    for path, limit in _LIMITS.items():
        for name, values in _WRONG.items():
            for value in values:
                body = _body(path, model, "Hi") | {name: value}
                yield HttpRequest(f"{name}={value!r}", path, body)
        for prompt in _NO_PROMPTS:
            yield HttpRequest(f"no prompt {prompt}", path, _body(path, model, prompt))
        for value in (0, -1, "x", 1.5, 1 << 40, "3", True):
            body = _body(path, model, "Hi") | {limit: value}
            yield HttpRequest(f"{limit}={value!r}", path, body)
        for raw in _NO_BODIES:
            yield HttpRequest(f"raw {raw!r}", path, raw)
        for name in _body(path, model, "Hi"):
            # Without a temperature an answer depends on chance.
            if name != "temperature" and (name != limit or path == MESSAGES):
                body = _body(path, model, "Hi")
                del body[name]
                yield HttpRequest(f"without {name}", path, body)


# --- drawn ----------------------------------------------------------------------------------------


def _drawn(openapi: Mapping[str, Any], model: str) -> Iterator[HttpRequest]:
    draw = random.Random(20260)
    schemas = openapi["components"]["schemas"]
    for path in _LIMITS:
        content = openapi["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        fields = resolved(content["schema"], schemas)["properties"]
        values = [
            (name, value)
            for name, schema in fields.items()
            if name not in _NOT_DRAWN
            for value in legal_values(schema, schemas)
        ]
        alone = [dict([one]) for one in values]
        pairs = [dict(draw.sample(values, 2)) for _ in range(NUM_PAIRS // len(_LIMITS))]
        for number, odd in enumerate([*alone, *pairs]):
            is_long, is_stream = draw.random() < 0.2, draw.random() < 0.4
            prompt = text(LONG_BYTES, 9000 + number) if is_long else f"Draw {number}"
            body = _body(path, model, prompt) | odd
            name = f"drawn {odd}{' long' * is_long}{' stream' * is_stream}"
            yield HttpRequest(name, path, body | ({"stream": True} if is_stream else {}))
