"""JSON Schemas of the bodies of OpenAI's endpoints, as far as the gateway reads them.

The gateway passes every other field on, so all bodies allow more properties. The engine judges the
types of fields; the schemas say what suits every engine. Does not know routes.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

from deploy.gateway.intake.inbound import Kind

Schema: TypeAlias = dict[str, Any]

_TEXT: Final[Schema] = {"type": "string"}
_IDS: Final[Schema] = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_OBJECT: Final[Schema] = {"type": "object"}
_FLAG: Final[Schema] = {"type": ["boolean", "null"]}
_COUNT: Final[Schema] = {"type": ["integer", "null"], "minimum": 1}
_PRIVATE: Final[Schema] = {
    "type": "null",
    "description": "The gateway sets this field and refuses it from clients.",
}

_MESSAGE: Final[Schema] = {
    "type": "object",
    "properties": {
        "role": _TEXT,
        "content": {"anyOf": [_TEXT, {"type": "array", "items": _OBJECT}, {"type": "null"}]},
    },
    "required": ["role"],
    "additionalProperties": True,
}

_SHARED: Final[dict[str, Schema]] = {
    "model": {
        "type": ["string", "null"],
        "description": "A name of /v1/models. May be left out where the region serves one model.",
    },
    "n": _COUNT,
    "max_tokens": _COUNT,
    "min_tokens": {"type": ["integer", "null"], "minimum": 0},
    "stream": _FLAG,
    "stream_interval": _COUNT,
    "stream_options": {"type": ["object", "null"], "properties": {"include_usage": _FLAG}},
    "echo": _FLAG,
    "prompt_logprobs": {"type": ["integer", "null"], "minimum": -1},
    "use_beam_search": _FLAG,
    "truncate_prompt_tokens": {"type": ["integer", "null"], "minimum": -1},
    "kv_transfer_params": _PRIVATE,
    "ec_transfer_params": _PRIVATE,
    "vllm_xargs": {
        "type": ["object", "null"],
        "properties": {"kv_transfer_params": _PRIVATE, "ec_transfer_params": _PRIVATE},
    },
    "cache_salt": {"type": ["string", "null"], "minLength": 1},
    "priority": {
        "type": ["integer", "null"],
        "description": "A lower number goes first. Tenants need a permit for one below 0.",
    },
    "request_id": {"type": ["string", "null"]},
}

_OWN: Final[dict[Kind, dict[str, Schema]]] = {
    "completion": {
        "prompt": {
            "anyOf": [
                _TEXT,
                {"type": "array", "items": _TEXT},
                _IDS,
                {"type": "array", "items": _IDS},
            ]
        },
        "best_of": _COUNT,
        "prompt_embeds": {"type": ["string", "array", "null"], "items": _TEXT},
    },
    "chat": {
        "messages": {"type": "array", "items": _MESSAGE},
        "max_completion_tokens": _COUNT,
        "tools": {"type": ["array", "null"], "items": _OBJECT},
        "documents": {"type": ["array", "null"], "items": _OBJECT},
    },
}
_REQUIRED: Final[dict[Kind, list[str]]] = {"completion": ["prompt"], "chat": ["messages"]}
_EXAMPLES: Final[dict[Kind, Schema]] = {
    "completion": {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 16},
    "chat": {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Say hello."}],
        "max_completion_tokens": 16,
    },
}


def body_schema(kind: Kind) -> Schema:
    """The schema of a request for a completion or a chat completion."""
    return {
        "type": "object",
        "properties": _OWN[kind] | _SHARED,
        "required": _REQUIRED[kind],
        "additionalProperties": True,
        "examples": [_EXAMPLES[kind]],
    }


def answer_schema(kind: Kind) -> Schema:
    """The schema of an answer that is not streamed; engines add fields."""
    choice = {"type": "object", "properties": {"index": {"type": "integer"}}, "required": ["index"]}
    return {
        "type": "object",
        "properties": {
            "id": _TEXT,
            "object": {"const": "text_completion" if kind == "completion" else "chat.completion"},
            "created": {"type": "integer"},
            "model": _TEXT,
            "choices": {"type": "array", "items": choice},
            "usage": {"type": ["object", "null"]},
        },
        "required": ["id", "object", "choices"],
        "additionalProperties": True,
    }
