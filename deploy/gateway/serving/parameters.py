"""What engines are known to take: parameters, ids and lengths, so that no prefill is for nothing.

A decode engine judges a request only when it gets it, which is after the prefill. So it is asked
before with a question that has one token in place of the prompt, and whatever it took once is not
asked again. This file knows no engine and no route.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from msgspec import Raw

from deploy.gateway.intake.endpoints import Kind
from deploy.gateway.intake.inbound import InboundRequest
from deploy.gateway.intake.raw_fields import is_set
from kvmanager.token_ids import TokenIds

_MOST_KNOWN: Final = 10_000
_PROMPT: Final = frozenset({"prompt", "messages", "input", "documents", "instructions", "system"})
_SMALL: Final[dict[Kind, dict[str, Any]]] = {
    "chat": {"messages": [{"role": "user", "content": "."}]},
    "messages": {"messages": [{"role": "user", "content": "."}]},
    # vLLM looks at no rank for responses, so this one is computed. Its length was judged with the
    # rendering of the prompt.
    "responses": {"input": ".", "max_output_tokens": 1},
}
_TEXT: Final = re.compile(rb'"[^"\\]+"')
_NUMBER: Final = re.compile(rb"\d{1,9}")
_LENGTH: Final = re.compile(rb"[1-9]\d{0,8}")
_HARMLESS: Final = {
    "cache_salt": _TEXT,
    "request_id": _TEXT,
    "user": _TEXT,
    "priority": _NUMBER,
    "seed": _NUMBER,
    "max_tokens": _LENGTH,
    "max_completion_tokens": _LENGTH,
    "max_output_tokens": _LENGTH,
    "model": _TEXT,
    "stream": re.compile(rb"true|false"),
    "temperature": re.compile(rb"[01](\.\d{1,9})?"),
    "top_p": re.compile(rb"0\.\d{0,8}[1-9]|1(\.0)?"),
}
"""Fields that engines take if they are written like this, whatever the others are."""
_JUDGED_LATE: Final = frozenset(
    {
        "allowed_token_ids",
        "bad_words",
        "logit_bias",
        "logprob_token_ids",
        "logprobs",
        "output_config",
        "response_format",
        "stop_token_ids",
        "structured_outputs",
        "text",
        "thinking_token_budget",
        "tool_choice",
        "tools",
        "top_logprobs",
        "vllm_xargs",
        "watermarking",
    }
)
"""What vLLM looks at when it gets a request, and not yet when it renders its prompt."""
_USAGE: Final = re.compile(rb'\{("(include|continuous)_usage(_stats)?": ?(true|false)(, ?)?)*\}')
"""Options that every stream may have."""
_NO_RANK: Final = {"X-Data-Parallel-Rank": "-1"}
"""vLLM looks at it after all parameters and the adapter, and refuses it, so nothing is computed.
Other engines pass over it.
"""
_RANK_REFUSED: Final = b"data_parallel_rank -1"
_ALL_TAKE: Final = {"output": 16, "id": 255}
"""What no engine refuses: no vocabulary has fewer tokens than there are bytes."""
_ALWAYS: Final = ("model", "max_tokens", "max_completion_tokens", "max_output_tokens")
"""Fields of every question, as some endpoint takes no request without them."""


class Question(NamedTuple):
    """`body` and `headers` ask an engine whether it takes a request. `key` and `bounds` are known
    if it does.
    """

    body: bytes
    headers: dict[str, str]
    key: bytes
    bounds: dict[tuple[str, str], int]


class TakenParameters:
    """What the engines of each model have taken. All requests of a gateway share it."""

    def __init__(self, max_lengths: Mapping[str, int] | None = None) -> None:
        """`max_lengths` has the most tokens of prompt and output of models, as far as the
        configuration says.
        """
        self._keys: dict[bytes, None] = {}
        # Engines that take a number take each smaller one.
        self._bounds: dict[tuple[str, str], int] = {}
        for model, most in (max_lengths or {}).items():
            self._bounds |= {(model, "output"): most, (model, "prompt"): most - 1}

    def question(self, inbound: InboundRequest, token_ids: TokenIds) -> Question | None:
        """What to ask an engine before the request is prefilled; None if all is known."""
        fields = msgspec.json.decode(inbound.body, type=dict[str, Raw])
        is_rendered = inbound.token_ids is None
        kept = {
            name: value
            for name, value in fields.items()
            if not _is_harmless(name, value, is_rendered=is_rendered)
        }
        if inbound.is_stream and _USAGE.fullmatch(kept.get("stream_options", b"")):
            del kept["stream_options"]
        named = [inbound.kind, inbound.model, inbound.adapter, kept]
        key = blake2b(msgspec.json.encode(named), digest_size=16).digest()
        largest_id = int(np.frombuffer(token_ids.packed, "<u4").max())
        bounds = {}
        # Ids that an engine made are in its vocabulary, and it has looked at the length.
        if not is_rendered:
            bounds = {
                (inbound.model, "id"): largest_id,
                (inbound.model, "output"): inbound.max_output_tokens,
            }
        is_within = all(self._is_within(*where, most) for where, most in bounds.items())
        # An engine that rendered the prompt has the adapter.
        asks_nothing = not kept and (is_rendered or not inbound.adapter)
        if is_within and (asks_nothing or key in self._keys):
            return None
        # Ids are looked at after the rank, so that new ones cost the engine a token: as a stream,
        # which may be left after it. What is refused otherwise needs none, and an engine logs an
        # error of a stream as one of its own.
        is_new_id = not is_rendered and not self._is_within(inbound.model, "id", largest_id)
        # Options of what is no stream are for the engine to refuse.
        is_stream = inbound.is_stream if "stream_options" in kept else is_new_id
        always = {name: fields[name] for name in _ALWAYS if name in fields}
        prompt = _SMALL.get(inbound.kind, {"prompt": [largest_id]})
        body = msgspec.json.encode({**kept, **always, **prompt, "stream": is_stream})
        return Question(body, {} if is_new_id else _NO_RANK, key, bounds)

    def heard(self, question: Question, status: int, answer: bytes) -> bool:
        """Note an engine's answer to a question. False: it does not take the request."""
        has_taken = status == 200 or (status == 400 and _RANK_REFUSED in answer)
        if has_taken:
            self._took(question)
        # One that is unwell has judged nothing.
        return has_taken or not 400 <= status < 500

    def _took(self, question: Question) -> None:
        self._keys[question.key] = None
        if len(self._keys) > _MOST_KNOWN:
            del self._keys[next(iter(self._keys))]
        for where, most in question.bounds.items():
            self._bounds[where] = max(most, self._bounds.get(where, 0))

    def is_long(self, model: str, num_tokens: int) -> bool:
        """Whether a prompt is longer than each that engines have taken."""
        return not self._is_within(model, "prompt", num_tokens)

    def took_length(self, model: str, num_tokens: int) -> None:
        """Note that an engine has taken a prompt of this length."""
        self._bounds[model, "prompt"] = max(num_tokens, self._bounds.get((model, "prompt"), 0))

    def _is_within(self, model: str, what: str, number: int) -> bool:
        return number <= self._bounds.get((model, what), _ALL_TAKE.get(what, -1))


def _is_harmless(name: str, value: Raw, *, is_rendered: bool) -> bool:
    if name in _PROMPT or not is_set(value):
        return True
    if is_rendered and name not in _JUDGED_LATE:
        return True
    pattern = _HARMLESS.get(name)
    return pattern is not None and pattern.fullmatch(memoryview(value)) is not None
