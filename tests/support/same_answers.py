"""What two servers answer to the same HTTP request, without what may differ from one to the other.

Ids, times and the process that answered differ always. How a stream cuts an answer into events
differs from run to run, and so do the last bits of log probabilities.
"""

import asyncio
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

LOGPROB_TOLERANCE_NATS = 1e-3
"""The window model computes in float32."""
AT_A_TIME = 8
TIMEOUT_S = 120.0
APART = ("cache_read_input_tokens", "cache_creation_input_tokens")
OF_A_PROCESS = frozenset(
    {
        *("id", "item_id", "call_id", "request_id", "response_id", "system_fingerprint"),
        *("created", "created_at", "completed_at", "metrics"),
        # Caches differ: the plain engine has none.
        *("prompt_tokens_details", "input_tokens_details", "cached_tokens"),
        *APART,
        # It counts the events before.
        "sequence_number",
    }
)
LOG_TIME = re.compile(r"\[\d\d:\d\d:\d\d\]")
"""In an error of the grammar's compiler."""
STREAM = "text/event-stream"
BROKEN_OFF = "(broken off)"
GROWING = frozenset({"text", "content", "arguments", "reasoning", "delta", "partial_json"})
"""Texts of which an event of a stream has the next piece."""


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """One POST. `name` says what is odd about it."""

    name: str
    path: str
    body: dict[str, Any] | bytes
    differs: str = ""
    """Why the gateway refuses what an engine takes; "" where both must answer the same."""

    @property
    def data(self) -> bytes:
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    status: int
    media_type: str
    route: str
    """Where the gateway had the prompt computed; "" of an engine."""
    body: Any = field(repr=False)


async def answers_of(url: str, requests: Sequence[HttpRequest]) -> dict[str, HttpAnswer]:
    """By the requests' names; AT_A_TIME requests are under way at once."""
    slots = asyncio.Semaphore(AT_A_TIME)
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(url, timeout=timeout) as session:

        async def ask(request: HttpRequest) -> HttpAnswer:
            headers = {"Content-Type": "application/json"}
            async with (
                slots,
                session.post(request.path, data=request.data, headers=headers) as response,
            ):
                try:
                    body = _read(await response.read(), response.content_type)
                except aiohttp.ClientPayloadError:
                    body = BROKEN_OFF
                route = response.headers.get("x-prfaas-route", "")
                return HttpAnswer(response.status, response.content_type, route, body)

        found = await asyncio.gather(*map(ask, requests))
    return dict(zip((request.name for request in requests), found, strict=True))


def differences(one: Any, other: Any, place: str = "") -> Iterator[str]:
    """Each place where two decoded bodies differ beyond rounding, with both values."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted(one.keys() | other.keys()):
            yield from differences(
                one.get(key, "(none)"), other.get(key, "(none)"), f"{place}.{key}"
            )
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for index, (mine, yours) in enumerate(zip(one, other, strict=True)):
            yield from differences(mine, yours, f"{place}[{index}]")
    elif isinstance(one, float) and isinstance(other, float):
        if abs(one - other) > LOGPROB_TOLERANCE_NATS:
            yield f"{place}: {one} and {other}"
    elif one != other or type(one) is not type(other):
        yield f"{place}: {one!r} and {other!r}"


def unlike(
    requests: Sequence[HttpRequest],
    plain: Mapping[str, HttpAnswer],
    gateway: Mapping[str, HttpAnswer],
) -> list[str]:
    """What the gateway answers otherwise than a plain engine, but for what docs/api.md tells."""
    return [
        f"{one.name}: {' | '.join(found)} <- {one.data[:200]!r}"
        for one in requests
        if (found := list(_unlike(one, _early(plain[one.name]), gateway[one.name])))
    ]


def _unlike(request: HttpRequest, plain: HttpAnswer, gateway: HttpAnswer) -> Iterator[str]:
    if request.differs:
        yield from differences(400, gateway.status, "status")
    elif plain.body == BROKEN_OFF:
        # The engine failed at its own answer. The gateway had sent nothing yet, so it can say so.
        yield from differences(502, gateway.status, "status")
    else:
        yield from differences(plain.status, gateway.status, "status")
        yield from differences(plain.media_type, gateway.media_type, "media type")
        if gateway.status < 400:
            yield from differences(plain.body, gateway.body)
            return
    if gateway.status >= 400:
        yield from _unlike_errors(request, plain.body, gateway.body)


def _unlike_errors(request: HttpRequest, plain: Any, gateway: Any) -> Iterator[str]:
    """An error has the shape of its API, and the words of an engine if that has refused it."""
    is_messages = request.path.startswith("/v1/messages")
    keys = {"type", "message"} if is_messages else {"message", "type", "param", "code"}
    yield from differences(sorted(keys), sorted(gateway["error"]), "keys")
    # Those that the gateway makes have a word as their code; an engine's have the status.
    if is_messages:
        # vLLM answers what its models refuse in OpenAI's shape at this path, too.
        yield from differences("error", gateway["type"], "type")
    elif isinstance(gateway["error"]["code"], int):
        yield from differences(plain["error"], gateway["error"])


def _early(answer: HttpAnswer) -> HttpAnswer:
    """An error at the beginning of a stream as the status that a gateway makes of it, which sends
    nothing before the first token.
    """
    if answer.media_type != STREAM or answer.body == BROKEN_OFF:
        return answer
    first = answer.body["*"][:1]
    if answer.body["choices"] or not first or "error" not in first[0]:
        return answer
    status = first[0]["error"]["code"]
    return HttpAnswer(status, "application/json", answer.route, {"error": first[0]["error"]})


def _read(body: bytes, media_type: str) -> Any:
    if media_type == STREAM:
        return _joined(list(_events(body)))
    try:
        return _without_names(json.loads(body))
    except ValueError:
        return body


def _without_names(value: Any) -> Any:
    if isinstance(value, dict):
        # Anthropic's usage counts what a cache had, or now has, apart from the rest.
        if apart := sum(value.get(name) or 0 for name in APART):
            value = value | {"input_tokens": value["input_tokens"] + apart}
        return {key: _without_names(item) for key, item in value.items() if key not in OF_A_PROCESS}
    if isinstance(value, str):
        return LOG_TIME.sub("[time]", value)
    return [_without_names(item) for item in value] if isinstance(value, list) else value


def _events(body: bytes) -> Iterator[Any]:
    for block in body.decode().replace("\r\n", "\n").split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        name = "".join(line[6:].strip() for line in lines if line.startswith("event:"))
        data = "\n".join(line[5:].strip() for line in lines if line.startswith("data:"))
        if not lines:
            continue
        value = data if data == "[DONE]" else _without_names(json.loads(data))
        yield {"event": name, "data": value} if name else value


def _joined(events: list[Any]) -> Any:
    """The events of a stream as if each choice, or text, had come in one event."""
    choices: dict[int, Any] = {}
    chunk: Any = {}
    others: list[Any] = []
    for event in events:
        if isinstance(event, dict) and isinstance(event.get("choices"), list):
            for choice in event.pop("choices"):
                place = choice["index"]
                choices[place] = _together(choices.get(place), choice)
            chunk = _together(chunk, event)
        elif others and _is_next_piece(others[-1], event):
            others[-1] = _together(others[-1], event)
        else:
            others.append(event)
    return {"chunk": chunk, "choices": [choices[place] for place in sorted(choices)], "*": others}


def _is_next_piece(before: Any, event: Any) -> bool:
    if not (isinstance(before, dict) and isinstance(event, dict)):
        return False
    return event.get("event", "") == before.get("event") and "delta" in event["data"]


def _together(before: Any, after: Any, key: str = "") -> Any:
    if after is None or before is None:
        return before if after is None else after
    if isinstance(before, dict) and isinstance(after, dict):
        return before | {
            name: _together(before.get(name), value, name) for name, value in after.items()
        }
    if isinstance(before, list) and isinstance(after, list):
        if key != "tool_calls":
            return [*before, *after]
        calls = {call["index"]: call for call in before}
        for call in after:
            calls[call["index"]] = _together(calls.get(call["index"]), call)
        return [calls[place] for place in sorted(calls)]
    return before + after if key in GROWING else after
