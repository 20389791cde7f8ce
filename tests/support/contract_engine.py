"""An engine's answers in the shapes of OpenAI's and Anthropic's APIs, for tests with clients that
check shapes.
"""

import json
from typing import Any

from aiohttp import web
from openai_engine import fixed, refusing, streamed

from deploy.gateway.intake.endpoints import KINDS, Kind

WORDS = ("Hello", " from", " the", " region")
TEXT = "".join(WORDS)
CITY = '{"city": "Paris"}'
Event = dict[str, Any]


async def reply(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Answer at any endpoint; 400 for a body that vLLM refuses as well."""
    kind = KINDS[request.path]
    try:
        whole = _whole(kind, body, len(_ids(kind, body)))
        is_stream = body.get("stream") is True and kind in _EVENTS
        answer = streamed(*_pieces(kind, body, whole)) if is_stream else fixed(whole)
    except (AttributeError, KeyError, TypeError, ValueError):
        answer = _refuse
    return await answer(request, body)


async def render_reply(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Answer with the ids of a prompt; 400 for a body that vLLM refuses as well."""
    kind = KINDS[request.path.removesuffix("/render")]
    try:
        rendered = {"token_ids": _ids(kind, body), "features": None, "sampling_params": {"n": 1}}
        answer = fixed([rendered] if kind == "completion" else rendered)
    except (AttributeError, KeyError, TypeError, ValueError):
        answer = _refuse
    return await answer(request, body)


_refuse = refusing(
    400, "a field is missing or has a wrong type", type="BadRequestError", param=None
)


def _pieces(kind: Kind, body: dict[str, Any], whole: dict[str, Any]) -> list[bytes]:
    events = _EVENTS[kind](whole)
    if kind not in ("completion", "chat"):
        return [f"event: {one['type']}\ndata: {json.dumps(one)}\n\n".encode() for one in events]
    if (body.get("stream_options") or {}).get("include_usage"):
        events.append(events[0] | {"choices": [], "usage": whole["usage"]})
    return [*(f"data: {json.dumps(one)}\n\n".encode() for one in events), b"data: [DONE]\n\n"]


def _ids(kind: Kind, body: dict[str, Any]) -> list[int]:
    """The tokens of everything that the engine reads."""
    if kind in ("completion", "embeddings", "tokenize") and "messages" not in body:
        prompt = body["input" if kind == "embeddings" else "prompt"]
        return list(prompt) if isinstance(prompt, list) else list(prompt.encode())
    if kind == "responses" and isinstance(body["input"], str):
        return [1, *body["input"].encode(), 2]
    if kind in ("rerank", "score"):
        return [1] * len(_documents(body))
    if kind == "detokenize":
        return [int(number) for number in body["tokens"]]
    turns = body["input" if kind == "responses" else "messages"]
    text = "".join(str(turn.get("content")) for turn in turns)
    return [1, *text.encode(), 2]


def _documents(body: dict[str, Any]) -> list[Any]:
    names = [name for name in ("documents", "items", "text_2") if name in body]
    documents = body[names[0]] if names else None
    if isinstance(documents, str):
        return [documents]
    if not isinstance(documents, list):
        raise TypeError(names)
    return documents


def _whole(kind: Kind, body: dict[str, Any], num_tokens: int) -> dict[str, Any]:
    model = body.get("model") or "tiny"
    answer: dict[str, Any]
    if kind in ("completion", "chat"):
        answer = _completion(kind, body) | {"model": model, "usage": _usage(num_tokens)}
    elif kind == "responses":
        answer = _response(body) | {"model": model, "usage": _named_usage(num_tokens)}
    elif kind == "messages":
        answer = _message(body) | {"model": model, "usage": _named_usage(num_tokens)}
    elif kind == "count_tokens":
        answer = {"input_tokens": num_tokens}
    elif kind == "embeddings":
        several = isinstance(body.get("input"), list)
        vector = {"object": "embedding", "embedding": [0.5, -0.5]}
        data = [vector | {"index": i} for i in range(num_tokens if several else 1)]
        answer = {"object": "list", "data": data}
        answer |= {"model": model, "usage": {"prompt_tokens": num_tokens, "total_tokens": 1}}
    elif kind == "rerank":
        results = [
            {"index": i, "document": {"text": str(text)}, "relevance_score": 0.5}
            for i, text in enumerate(_documents(body))
        ]
        answer = {"id": "rerank-1", "model": model, "results": results}
    elif kind == "score":
        scores = [{"index": i, "object": "score", "score": 0.5} for i in range(num_tokens)]
        answer = {"id": "score-1", "object": "list", "model": model, "data": scores}
    elif kind == "tokenize":
        ids = _ids(kind, body)
        answer = {"count": num_tokens, "max_model_len": 8192, "tokens": ids}
    else:
        answer = {"prompt": TEXT}
    return answer


def _usage(num_tokens: int) -> dict[str, Any]:
    num_output_tokens = len(WORDS)
    return {
        "prompt_tokens": num_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_tokens + num_output_tokens,
    }


def _named_usage(num_tokens: int) -> dict[str, Any]:
    """As responses and messages name it."""
    return {
        "input_tokens": num_tokens,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": len(WORDS),
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_tokens + len(WORDS),
    }


def _wants_city(wanted: Any) -> bool:
    return isinstance(wanted, dict) and wanted.get("type") == "json_schema"


def _completion(kind: Kind, body: dict[str, Any]) -> dict[str, Any]:
    content = CITY if _wants_city(body.get("response_format")) else TEXT
    choice: dict[str, Any] = {"index": 0, "finish_reason": "stop", "logprobs": None}
    if kind == "completion":
        choice["text"] = content
    elif body.get("tools"):
        called = {"name": "weather", "arguments": CITY}
        call = {"id": "call-1", "type": "function", "function": called}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        choice |= {"message": message, "finish_reason": "tool_calls"}
    else:
        choice["message"] = {"role": "assistant", "content": content}
    name = "chat.completion" if kind == "chat" else "text_completion"
    return {"id": "answer-1", "object": name, "created": 1, "choices": [choice]}


def _response(body: dict[str, Any]) -> dict[str, Any]:
    text = body.get("text")
    content = CITY if isinstance(text, dict) and _wants_city(text.get("format")) else TEXT
    part = {"type": "output_text", "text": content, "annotations": []}
    item: dict[str, Any] = {"id": "msg-1", "type": "message", "role": "assistant"}
    item |= {"status": "completed", "content": [part]}
    if body.get("tools"):
        item = {"id": "call-1", "type": "function_call", "call_id": "call-1", "name": "weather"}
        item |= {"arguments": CITY, "status": "completed"}
    fixed = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True}
    head = {"id": "resp_1", "object": "response", "created_at": 1, "status": "completed"}
    return head | fixed | {"output": [item]}


def _message(body: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(body["max_tokens"], int):
        raise TypeError("max_tokens")
    block: dict[str, Any] = {"type": "text", "text": TEXT}
    if body.get("tools"):
        block = {"type": "tool_use", "id": "call-1", "name": "weather", "input": json.loads(CITY)}
    reason = "tool_use" if body.get("tools") else "end_turn"
    head = {"id": "message-1", "type": "message", "role": "assistant"}
    return head | {"content": [block], "stop_reason": reason, "stop_sequence": None}


def _chunks(whole: dict[str, Any]) -> list[Event]:
    is_chat = whole["object"] == "chat.completion"
    head = {key: whole[key] for key in ("id", "created", "model")}
    head["object"] = "chat.completion.chunk" if is_chat else "text_completion"
    told: list[dict[str, Any]] = [
        {"delta": {"role": "assistant", "content": word}} if is_chat else {"text": word}
        for word in WORDS
    ]
    choice: dict[str, Any] = {"index": 0, "finish_reason": None, "logprobs": None}
    told[-1] |= {"finish_reason": "stop"}
    return [head | {"choices": [choice | part]} for part in told]


def _response_events(whole: dict[str, Any]) -> list[Event]:
    place = {"item_id": "msg-1", "output_index": 0, "content_index": 0}
    item: dict[str, Any] = {"id": "msg-1", "type": "message", "role": "assistant"}
    item |= {"status": "in_progress", "content": []}
    part = {"type": "output_text", "text": "", "annotations": []}
    started = whole | {"status": "in_progress", "output": [], "usage": None}
    events: list[Event] = [
        {"type": "response.created", "response": started},
        {"type": "response.output_item.added", "output_index": 0, "item": item},
        {"type": "response.content_part.added", **place, "part": part},
        *(
            {"type": "response.output_text.delta", **place, "delta": word, "logprobs": []}
            for word in WORDS
        ),
        {"type": "response.output_text.done", **place, "text": TEXT, "logprobs": []},
        {"type": "response.completed", "response": whole},
    ]
    return [event | {"sequence_number": number} for number, event in enumerate(events)]


def _message_events(whole: dict[str, Any]) -> list[Event]:
    started = whole | {"content": [], "stop_reason": None}
    ended = {"stop_reason": "end_turn", "stop_sequence": None}
    text = {"type": "text", "text": ""}
    return [
        {"type": "message_start", "message": started},
        {"type": "content_block_start", "index": 0, "content_block": text},
        *(
            {
                "type": "content_block_delta",
                "index": 0,
                "delta": {"type": "text_delta", "text": word},
            }
            for word in WORDS
        ),
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": ended, "usage": whole["usage"]},
        {"type": "message_stop"},
    ]


_EVENTS = {
    "completion": _chunks,
    "chat": _chunks,
    "responses": _response_events,
    "messages": _message_events,
}
