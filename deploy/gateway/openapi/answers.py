"""JSON Schemas of the answers that come from engines, as far as all engines agree.

Engines add fields, so all answers allow more properties. Does not know routes or requests.
"""

from __future__ import annotations

from typing import Final

from deploy.gateway.intake.endpoints import Kind
from deploy.gateway.openapi.bodies import Schema

_TEXT: Final[Schema] = {"type": "string"}
_INTEGER: Final[Schema] = {"type": "integer"}
_NUMBER: Final[Schema] = {"type": "number"}
_IDS: Final[Schema] = {"type": "array", "items": _INTEGER}
_USAGE: Final[Schema] = {"type": ["object", "null"]}


def _object(optional: dict[str, Schema] | None = None, **required: Schema) -> Schema:
    return {
        "type": "object",
        "properties": required | (optional or {}),
        "required": list(required),
        "additionalProperties": True,
    }


def _list(**required: Schema) -> Schema:
    return {"type": "array", "items": _object(**required)}


_HEAD: Final[dict[str, Schema]] = {"created": _INTEGER, "model": _TEXT, "usage": _USAGE}
_ANSWERS: Final[dict[Kind, Schema]] = {
    "completion": _object(
        _HEAD, id=_TEXT, object={"const": "text_completion"}, choices=_list(index=_INTEGER)
    ),
    "chat": _object(
        _HEAD, id=_TEXT, object={"const": "chat.completion"}, choices=_list(index=_INTEGER)
    ),
    "responses": _object(
        {"model": _TEXT, "status": _TEXT, "usage": _USAGE},
        id=_TEXT,
        object={"const": "response"},
        output=_list(type=_TEXT),
    ),
    "messages": _object(
        {"model": _TEXT, "stop_reason": {"type": ["string", "null"]}, "usage": _USAGE},
        id=_TEXT,
        type={"const": "message"},
        role={"const": "assistant"},
        content=_list(type=_TEXT),
    ),
    "count_tokens": _object(input_tokens=_INTEGER),
    "embeddings": _object(
        {"model": _TEXT, "usage": _USAGE},
        object={"const": "list"},
        data=_list(index=_INTEGER, embedding={"type": ["array", "string"], "items": _NUMBER}),
    ),
    "rerank": _object(
        {"model": _TEXT, "usage": _USAGE},
        results=_list(index=_INTEGER, relevance_score=_NUMBER),
    ),
    "score": _object(
        {"model": _TEXT, "usage": _USAGE},
        object={"const": "list"},
        data=_list(index=_INTEGER, score=_NUMBER),
    ),
    "tokenize": _object(count=_INTEGER, max_model_len=_INTEGER, tokens=_IDS),
    "detokenize": _object(prompt=_TEXT),
}


def answer_schema(kind: Kind) -> Schema:
    """The schema of an answer of the endpoint `kind` that is not streamed."""
    return _ANSWERS[kind]
