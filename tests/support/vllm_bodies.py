"""Bodies of requests, honest and hostile ones, and what vLLM's own request models read in them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from hypothesis import strategies as st
from pydantic import TypeAdapter
from vllm.entrypoints.anthropic.protocol import (
    AnthropicCountTokensRequest,
    AnthropicMessagesRequest,
)
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.pooling.embed import protocol as embed
from vllm.entrypoints.pooling.scoring.protocol import RerankRequest, ScoreRequest
from vllm.entrypoints.serve.tokenize.protocol import DetokenizeRequest, TokenizeRequest

from deploy.gateway.intake.endpoints import Kind

MODELS: Final[dict[Kind, Any]] = {
    "completion": CompletionRequest,
    "chat": ChatCompletionRequest,
    "responses": ResponsesRequest,
    "messages": AnthropicMessagesRequest,
    "count_tokens": AnthropicCountTokensRequest,
    "embeddings": embed.EmbeddingRequest,
    "rerank": RerankRequest,
    "score": ScoreRequest,
    "tokenize": TokenizeRequest,
    "detokenize": DetokenizeRequest,
}
_ADAPTERS: Final = {kind: TypeAdapter(model) for kind, model in MODELS.items()}
_ADDRESSES: Final = ("image_url", "video_url", "audio_url")

Found = list[str]


def read_by_vllm(kind: Kind, body: bytes) -> dict[str, Any] | None:
    """The fields of the request that an engine makes of `body`; None if it refuses it."""
    try:
        # As Starlette and FastAPI do. Its __dict__ has no fields that the model does not name.
        read = _ADAPTERS[kind].validate_python(json.loads(body)).__dict__
        for name in ("messages", "input"):
            _settle(read.get(name))
    except Exception:  # of pydantic, of vLLM, or one that becomes an internal server error
        return None
    return dict(read)


def _settle(value: Any) -> None:
    """Look at the parts of turns, which pydantic leaves to whoever needs them."""
    if isinstance(value, list):
        for turn in value:
            _settle(turn)
    elif isinstance(value, dict) and not isinstance(value.get("content"), str | None):
        # A single object is taken for texts, which are its keys.
        is_usable = all(isinstance(part, str | dict) for part in value["content"])
        if not is_usable:
            raise TypeError("engines assert that parts are objects or texts")


def addresses(value: Any) -> Iterator[str]:
    """Every address of a medium anywhere in decoded JSON."""
    if isinstance(value, list):
        for item in value:
            yield from addresses(item)
    elif isinstance(value, dict):
        for name in _ADDRESSES:
            url = value.get(name)
            url = url.get("url") if isinstance(url, dict) else url
            if isinstance(url, str) and url[:5].lower() != "data:":
                yield url
        source = value.get("source")
        if value.get("type") == "image" and isinstance(source, dict):
            url = source.get("url")
            if source.get("type") == "url" and isinstance(url, str) and url[:5] != "data:":
                yield url
        for item in value.values():
            yield from addresses(item)


def _object(members: list[tuple[bytes, bytes]]) -> bytes:
    return b"{" + b",".join(b'"%s":%s' % member for member in members) + b"}"


def _list(items: list[bytes]) -> bytes:
    return b"[" + b",".join(items) + b"]"


@st.composite
def _key(draw: st.DrawFn, name: str) -> bytes:
    """The name of a field, sometimes with an escape."""
    how = draw(st.integers(0, 9))
    return f"\\u{ord(name[0]):04x}{name[1:]}".encode() if how == 0 else name.encode()


_BAD: Final = (b"\xed\xa0\x80", b"\xff", b"\\ud83d")
"""What some parsers take for text, and others do not."""
NUMBERS: Final = st.sampled_from(
    [
        b"1",
        b"3",
        b'"3"',
        b'"1_0"',
        b'" 7 "',
        b"1e2",
        b"true",
        b"2.0",
        b"2.5",
        b"-1",
        b"null",
        b"[]",
        b'"3.0"',
        b'"\\u0033"',
        b"100000",
        b'"+5"',
        b'"x"',
        b"1" * 40,
        b'"' + b"0" * 30 + b'5"',
    ]
)
_NOISE: Final = st.sampled_from([b'"x"', b"null", b"5", b"[]", b"{}", b'["http://10.0.0.1/a"]'])
_URLS: Final = st.sampled_from(
    [
        b'"http://10.0.0.1/a"',
        b'"HTTP://h/b"',
        b'"data:image/png;base64,AAAA"',
        b'"DATA:,"',
        b'""',
        b'"\\u0068ttp://h"',
        b"null",
        b"5",
        b'["http://h"]',
        b'"http://h/#%s"' % _BAD[0],
    ]
)


@st.composite
def _holder(draw: st.DrawFn) -> bytes:
    """What may stand where a medium is: its address, or an object with it."""
    if draw(st.booleans()):
        return draw(_URLS)
    members = [(draw(_key("url")), draw(_URLS))]
    if draw(st.integers(0, 5)) == 0:
        members.append((b"url", draw(_URLS)))
    if draw(st.integers(0, 5)) == 0:
        members.append((draw(st.sampled_from([b"detail", *_BAD])), b'"auto"'))
    return _object(members)


_TYPES: Final = st.sampled_from(
    [
        "text",
        "image_url",
        "video_url",
        "audio_url",
        "input_image",
        "input_text",
        "image",
        "refusal",
        "input_audio",
        "tool_result",
        "image_embeds",
        "thinking",
        "x",
    ]
)


@st.composite
def _part(draw: st.DrawFn, depth: int = 0) -> bytes:
    kind = draw(_TYPES)
    members = [(draw(_key("type")), json.dumps(kind).encode())] if draw(st.integers(0, 7)) else []
    media = set(draw(st.lists(st.sampled_from(_ADDRESSES), max_size=2)))
    if kind in _ADDRESSES:
        media.add(kind)
    if kind == "input_image":
        media.add("image_url")
        members.append((b"detail", b'"auto"'))
    members += [(draw(_key(name)), draw(_holder())) for name in sorted(media)]
    if kind in ("text", "input_text", "refusal"):
        members.append((b"refusal" if kind == "refusal" else b"text", b'"hello"'))
    if kind == "image":
        source = [(b"type", draw(st.sampled_from([b'"url"', b'"\\u0075rl"', b'"base64"', b"5"])))]
        source += [(draw(_key("url")), draw(_URLS)), (b"data", b'"AAAA"')]
        members.append((draw(_key("source")), _object(source)))
    if kind == "tool_result":
        members += [(b"tool_use_id", b'"1"'), (draw(_key("content")), draw(_content(depth + 1)))]
    if draw(st.integers(0, 3)) == 0:
        members.append((draw(_key("uuid")), draw(st.sampled_from([b'"logo"', b"null", b"5"]))))
    if draw(st.integers(0, 15)) == 0:
        members.append((draw(st.sampled_from(_BAD)), b"1"))
    return _object(draw(st.permutations(members)))


def _content(depth: int = 0) -> st.SearchStrategy[bytes]:
    """What may stand in the content of a turn."""
    if depth > 2:
        return st.just(b'"hello"')
    part = st.deferred(lambda: _part(depth))
    item = st.one_of(part, part, part, st.just(b'"a text"'), _NOISE)
    parts = st.lists(item, min_size=1, max_size=3).map(_list)
    return st.one_of(st.just(b'"hello"'), parts, parts, parts, part, _NOISE)


@st.composite
def _turn(draw: st.DrawFn) -> bytes:
    role = draw(st.sampled_from([b'"user"', b'"user"', b'"assistant"', b'"system"', b'"tool"']))
    members = [(b"role", role), (draw(_key("content")), draw(_content()))]
    if draw(st.integers(0, 5)) == 0:
        members = [(b"type", b'"function_call_output"'), (b"call_id", b'"1"')]
        members.append((draw(_key("output")), draw(_content())))
    if draw(st.integers(0, 7)) == 0:
        members.append((b"content", draw(_content())))
    return _object(members)


_TURNS: Final = st.one_of(
    st.lists(_turn(), min_size=1, max_size=3).map(_list),
    st.lists(st.one_of(_turn(), st.lists(_turn(), max_size=2).map(_list)), max_size=3).map(_list),
    _NOISE,
)
_PROMPTS: Final = st.sampled_from(
    [
        b'"hello"',
        b"[1,2,3]",
        b"[[1,2],[3]]",
        b'["a","b"]',
        b'["1","2"]',
        b'["1",2]',
        b"[1,2.0]",
        b"[true,1]",
        b"[]",
        b"[[]]",
        b'[1,"2"]',
        b'[["1"]]',
        b"[1,{}]",
        b"null",
        b"[4294967296]",
        b"[[1.0],[2]]",
        b"[ [ 1 ] ]",
        b"[1, 2]",
        b"[-1]",
        b'[[1],"a"]',
        b'[{"prompt":"x"}]',
    ]
)
_SCORED: Final = st.one_of(
    st.just(b'"a text"'),
    st.just(b'["a","b","c"]'),
    _content().map(lambda content: _object([(b"content", content)])),
    st.lists(st.one_of(st.just(b'"a"'), _turn()), max_size=3).map(_list),
)
_SCORE_NAMES: Final = (
    ("queries", "documents"),
    ("queries", "items"),
    ("text_1", "text_2"),
    ("data_1", "data_2"),
)
_NEEDED: Final[dict[Kind, dict[str, st.SearchStrategy[bytes]]]] = {
    "completion": {"prompt": _PROMPTS},
    "chat": {"messages": _TURNS},
    "responses": {"input": st.one_of(_TURNS, st.just(b'"hello"'))},
    "messages": {"messages": _TURNS, "max_tokens": st.just(b"5")},
    "count_tokens": {"messages": _TURNS},
    "embeddings": {"input": st.one_of(_TURNS, _PROMPTS)},
    "rerank": {"query": _SCORED, "documents": _SCORED},
    "tokenize": {"messages": _TURNS},
    "detokenize": {"tokens": st.just(b"[1,2]")},
}
_NUMBERS: Final = ("n", "max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens")
_OTHERS: Final[dict[str, st.SearchStrategy[bytes]]] = {
    **dict.fromkeys((*_NUMBERS, "truncate_prompt_tokens", "priority"), NUMBERS),
    "best_of": NUMBERS,
    "cache_salt": st.sampled_from([b'"mine"', b"null", b"5", b'"\\u0061"', b'"%s"' % _BAD[1]]),
    "kv_transfer_params": st.sampled_from([b"null", b'{"a":1}', b"[]"]),
    "vllm_xargs": st.sampled_from(
        [
            b"null",
            b'{"a":1}',
            b'{"kv_transfer_params":"x"}',
            b'{"\\u006bv_transfer_params":"x"}',
            b"[]",
            b'{"%s":1,"kv_transfer_params":"x"}' % _BAD[0],
            b'"x"',
        ]
    ),
    "echo": st.sampled_from([b"true", b"false", b'"yes"', b"0", b"null"]),
    "messages": _TURNS,
    "prompt": _PROMPTS,
    "text_1": _SCORED,
}


@st.composite
def bodies(draw: st.DrawFn, kind: Kind) -> bytes:
    """A body for the endpoint `kind`. About half of them are refused by engines."""
    needed = _NEEDED.get(kind, {})
    if kind == "score":
        needed = dict.fromkeys(draw(st.sampled_from(_SCORE_NAMES)), _SCORED)
    members = [(draw(_key(name)), draw(value)) for name, value in needed.items()]
    members.append((b"model", b'"tiny"'))
    for name in draw(st.lists(st.sampled_from(sorted(_OTHERS)), max_size=3)):
        if name not in needed:
            members.append((draw(_key(name)), draw(_OTHERS[name])))
    if draw(st.integers(0, 20)) == 0:
        members.append((draw(st.sampled_from(_BAD)), b"1"))
    body = _object(draw(st.permutations(members)))
    return b"\xef\xbb\xbf" + body if draw(st.integers(0, 15)) == 0 else body
