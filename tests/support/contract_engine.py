"""An engine's answers in the shapes of OpenAI's API, for tests with clients that check shapes."""

import json
from typing import Any

from aiohttp import web
from gateway_region import token_ids

WORDS = ("Hello", " from", " the", " region")


async def reply(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Answer a completion or a chat completion; 400 for a body that vLLM refuses as well."""
    try:
        num_prompt_tokens = len(token_ids(body))
    except (AttributeError, KeyError, TypeError, ValueError):
        return _refused("prompt or messages have a wrong type")
    is_chat = request.path.startswith("/v1/chat")
    if body.get("stream") is not True:
        return web.json_response(_whole(body, num_prompt_tokens, is_chat))
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    for chunk in _chunks(body, is_chat):
        await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    return response


async def render_reply(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Answer with the ids of a prompt; 400 for a body that vLLM refuses as well."""
    try:
        ids = token_ids(body)
    except (AttributeError, KeyError, TypeError, ValueError):
        return _refused("prompt or messages have a wrong type")
    rendered = {"token_ids": ids, "features": None, "sampling_params": {"n": 1}}
    is_chat = request.path.startswith("/v1/chat")
    return web.json_response(rendered if is_chat else [rendered])


def _refused(message: str) -> web.Response:
    # The code of vLLM's error objects is the HTTP status.
    error = {"message": message, "type": "BadRequestError", "param": None, "code": 400}
    return web.json_response({"error": error}, status=400)


def _whole(body: dict[str, Any], num_prompt_tokens: int, is_chat: bool) -> dict[str, Any]:
    content = "".join(WORDS)
    if (body.get("response_format") or {}).get("type") == "json_schema":
        content = json.dumps({"city": "Paris"})
    choice: dict[str, Any] = {"index": 0, "finish_reason": "stop", "logprobs": None}
    if not is_chat:
        choice["text"] = content
    elif body.get("tools"):
        called = {"name": "weather", "arguments": json.dumps({"city": "Paris"})}
        call = {"id": "call-1", "type": "function", "function": called}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        choice |= {"message": message, "finish_reason": "tool_calls"}
    else:
        choice["message"] = {"role": "assistant", "content": content}
    num_output_tokens = len(WORDS)
    return {
        "id": "answer-1",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": 1,
        "model": body.get("model") or "tiny",
        "choices": [choice],
        "usage": {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_output_tokens,
            "total_tokens": num_prompt_tokens + num_output_tokens,
        },
    }


def _chunks(body: dict[str, Any], is_chat: bool) -> list[dict[str, Any]]:
    head = {
        "id": "answer-1",
        "object": "chat.completion.chunk" if is_chat else "text_completion",
        "created": 1,
        "model": body.get("model") or "tiny",
    }
    return [
        head
        | {
            "choices": [
                {"index": 0, "finish_reason": None, "logprobs": None}
                | ({"delta": {"role": "assistant", "content": word}} if is_chat else {"text": word})
            ]
        }
        for word in WORDS
    ]
