"""JSON Schemas of the bodies that the gateway passes on to engines, as far as it reads them.

The gateway passes every other field on, so all bodies allow more properties. The engine judges the
types of fields; the schemas say what suits every engine. Does not know routes or answers.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

from deploy.gateway.intake.endpoints import Kind

Schema: TypeAlias = dict[str, Any]

_TEXT: Final[Schema] = {"type": "string"}
_IDS: Final[Schema] = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_OBJECT: Final[Schema] = {"type": "object"}
_OBJECTS: Final[Schema] = {"type": "array", "items": _OBJECT}
_OPTIONAL_OBJECTS: Final[Schema] = {"type": ["array", "null"], "items": _OBJECT}
_FLAG: Final[Schema] = {"type": ["boolean", "null"]}
_COUNT: Final[Schema] = {"type": ["integer", "null"], "minimum": 1}
_NOT_NEGATIVE: Final[Schema] = {"type": ["integer", "null"], "minimum": 0}
_PRIVATE: Final[Schema] = {
    "type": "null",
    "description": "The gateway sets this field and refuses it from clients.",
}
_REMEMBERED: Final[Schema] = {
    "type": "null",
    "description": "Refused: no engine keeps responses for others. Send the whole conversation.",
}
_PROMPTS: Final[Schema] = {
    "anyOf": [_TEXT, {"type": "array", "items": _TEXT}, _IDS, {"type": "array", "items": _IDS}]
}
_TEXTS: Final[Schema] = {"anyOf": [_TEXT, {"type": "array", "items": _TEXT}]}
_SYSTEM: Final[Schema] = {"type": ["string", "array", "null"], "items": _OBJECT}

_CONTENT: Final[Schema] = {"anyOf": [_TEXT, _OBJECTS]}
_MESSAGES: Final[Schema] = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"role": _TEXT, "content": {"anyOf": [_TEXT, _OBJECTS, {"type": "null"}]}},
        "required": ["role"],
        "additionalProperties": True,
    },
}
_ANTHROPIC_MESSAGES: Final[Schema] = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"role": {"enum": ["user", "assistant", "system"]}, "content": _CONTENT},
        "required": ["role", "content"],
        "additionalProperties": True,
    },
}

_SHARED: Final[dict[str, Schema]] = {
    "model": {
        "type": ["string", "null"],
        "description": "A name of /v1/models. May be left out where the region serves one model.",
    },
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
_COMPLETIONS: Final[dict[str, Schema]] = {
    "n": _COUNT,
    "max_tokens": _COUNT,
    "min_tokens": _NOT_NEGATIVE,
    "stream": _FLAG,
    "stream_interval": _COUNT,
    "stream_options": {"type": ["object", "null"], "properties": {"include_usage": _FLAG}},
    "echo": _FLAG,
    "prompt_logprobs": {"type": ["integer", "null"], "minimum": -1},
    "use_beam_search": _FLAG,
    "truncate_prompt_tokens": {"type": ["integer", "null"], "minimum": -1},
}
_ANY: Final[Schema] = {"type": ["object", "null"]}
_PROCESSOR: Final = {"mm_processor_kwargs": _ANY, "media_io_kwargs": _ANY}
_TRUNCATED: Final = {"truncate_prompt_tokens": _COMPLETIONS["truncate_prompt_tokens"]}
_CONVERSATION: Final[dict[str, Schema]] = {
    "messages": _ANTHROPIC_MESSAGES,
    "system": _SYSTEM,
    "tools": _OPTIONAL_OBJECTS,
}
_SCORED: Final[dict[str, Schema]] = dict.fromkeys(
    ("queries", "documents", "items", "text_1", "text_2", "data_1", "data_2"), _TEXTS
)

_OWN: Final[dict[Kind, dict[str, Schema]]] = {
    "completion": _COMPLETIONS
    | {
        "prompt": _PROMPTS,
        "logprobs": _NOT_NEGATIVE,
        "prompt_embeds": {"type": ["string", "array", "null"], "items": _TEXT},
    },
    "chat": _COMPLETIONS
    | {
        "messages": _MESSAGES,
        "max_completion_tokens": _COUNT,
        "logprobs": _FLAG,
        "tools": _OPTIONAL_OBJECTS,
        "documents": _OPTIONAL_OBJECTS,
    }
    | _PROCESSOR,
    "responses": {
        "input": _CONTENT,
        "instructions": {"type": ["string", "null"]},
        "tools": _OPTIONAL_OBJECTS,
        "max_output_tokens": _COUNT,
        "stream": _FLAG,
        "previous_input_messages": _OPTIONAL_OBJECTS,
        "previous_response_id": _REMEMBERED,
        "conversation": _REMEMBERED,
        "background": {"enum": [False, None], "description": _REMEMBERED["description"]},
    }
    | _PROCESSOR,
    "messages": _CONVERSATION | {"max_tokens": {"type": "integer", "minimum": 1}, "stream": _FLAG},
    "count_tokens": _CONVERSATION,
    "embeddings": {
        "input": _PROMPTS,
        "messages": _MESSAGES,
        "encoding_format": {"enum": ["float", "base64"]},
        "dimensions": _COUNT,
    }
    | _TRUNCATED,
    "rerank": {"query": _TEXT, "documents": _TEXTS, "top_n": {"type": "integer", "minimum": 0}}
    | _TRUNCATED,
    "score": _SCORED | _TRUNCATED,
    "tokenize": {
        "prompt": _TEXT,
        "messages": _MESSAGES,
        "tools": _OPTIONAL_OBJECTS,
        "add_special_tokens": {"type": "boolean"},
    },
    "detokenize": {"tokens": _IDS},
}
_REQUIRED: Final[dict[Kind, tuple[tuple[str, ...], ...]]] = {
    "completion": (("prompt",),),
    "chat": (("messages",),),
    "responses": (("input",),),
    "messages": (("messages", "max_tokens"),),
    "count_tokens": (("messages",),),
    "embeddings": (("input",), ("messages",)),
    "rerank": (("query", "documents"),),
    "score": (("queries", "documents"), ("queries", "items"), ("text_1", "text_2")),
    "tokenize": (("prompt",), ("messages",)),
    "detokenize": (("tokens",),),
}
"""Fields that a body must have: all of one of these groups."""
_HELLO: Final = [{"role": "user", "content": "Say hello."}]
_EXAMPLES: Final[dict[Kind, Schema]] = {
    "completion": {"prompt": "Once upon a time", "max_tokens": 16},
    "chat": {"messages": _HELLO, "max_completion_tokens": 16},
    "responses": {"input": "Say hello.", "max_output_tokens": 16},
    "messages": {"messages": _HELLO, "max_tokens": 16},
    "count_tokens": {"messages": _HELLO},
    "embeddings": {"input": ["Once upon a time"]},
    "rerank": {"query": "capital", "documents": ["Paris", "a cat"]},
    "score": {"queries": "capital", "documents": ["Paris", "a cat"]},
    "tokenize": {"prompt": "Once upon a time"},
    "detokenize": {"tokens": [1, 2, 3]},
}


def body_schema(kind: Kind) -> Schema:
    """The schema of a request's body at the endpoint `kind`."""
    first, *others = (list(names) for names in _REQUIRED[kind])
    required: Schema = {"required": first}
    if others:
        required = {"anyOf": [{"required": names} for names in (first, *others)]}
    return {
        "type": "object",
        "properties": _OWN[kind] | _SHARED,
        **required,
        "additionalProperties": True,
        "examples": [{"model": "tiny"} | _EXAMPLES[kind]],
    }
