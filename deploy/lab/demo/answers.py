"""Sends demo requests to an OpenAI endpoint and keeps the answers with token ids and times.

It does not know which endpoint it talks to: the region's gateway or a plain engine.
"""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import aiohttp

from deploy.lab.demo.scenario import DemoRequest

REQUEST_TIMEOUT_S = 300.0


@dataclass(slots=True)
class Answer:
    """One answer. `error` is empty if the answer is whole. Times are seconds since the request was
    sent.

    `margins` are, where logprobs were asked for, the nats by which each token beat the second best.
    `cached_tokens` is the number of cached prompt tokens in the answer's usage, None if it has
    none. `served` has the gateway's `x-prfaas-...` headers.
    """

    status: int = 0
    token_ids: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    cached_tokens: int | None = None
    ttft_s: float = 0.0
    total_s: float = 0.0
    request_id: str = ""
    served: dict[str, str] = field(default_factory=dict)
    error: str = ""


async def ask_all(
    url: str,
    model: str,
    requests: Sequence[DemoRequest],
    on_answer: Callable[[DemoRequest, Answer], None],
) -> dict[str, Answer]:
    """Send wave after wave. Returns answers by request name. Never raises for a failed request."""
    answers: dict[str, Answer] = {}

    async def ask_one(request: DemoRequest) -> None:
        answers[request.name] = answer = await ask(session, url, model, request)
        on_answer(request, answer)

    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        for _, wave in groupby(requests, key=lambda request: request.wave):
            await asyncio.gather(*(ask_one(request) for request in wave))
    return answers


async def ask(
    session: aiohttp.ClientSession,
    url: str,
    model: str,
    request: DemoRequest,
    *,
    with_logprobs: bool = False,
) -> Answer:
    """Send one request. Failures are in the answer's `error`."""
    answer = Answer()
    body = request.body(model, with_logprobs=with_logprobs)
    started_s = time.monotonic()
    try:
        async with session.post(url + request.endpoint, json=body) as response:
            answer.status = response.status
            answer.request_id = response.headers.get("x-request-id", "")
            answer.served = {
                name.lower(): value
                for name, value in response.headers.items()
                if name.lower().startswith("x-prfaas-")
            }
            if response.status != 200:
                answer.error = (await response.text())[:300]
            elif request.stream:
                await _read_stream(response, answer, started_s)
            else:
                _take(answer, await response.json())
                answer.ttft_s = time.monotonic() - started_s
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.total_s = time.monotonic() - started_s
    return answer


async def _read_stream(response: aiohttp.ClientResponse, answer: Answer, started_s: float) -> None:
    async for line in response.content:
        data = line.removeprefix(b"data:").strip()
        if not line.startswith(b"data:") or not data:
            continue
        if data == b"[DONE]":
            return
        event = json.loads(data)
        # The status is sent before the first token, so a later error comes as an event.
        if "error" in event:
            raise ValueError(f"error event: {event['error']}")
        had_tokens = bool(answer.token_ids)
        _take(answer, event)
        if answer.token_ids and not had_tokens:
            answer.ttft_s = time.monotonic() - started_s
    # A connection that closes early must not look like a short answer.
    raise ValueError("the stream ended without [DONE]")


def _take(answer: Answer, payload: dict[str, Any]) -> None:
    for choice in payload.get("choices", ()):
        answer.token_ids += choice.get("token_ids") or ()
        answer.margins += margins_of(choice.get("logprobs") or {})
    if usage := payload.get("usage"):
        answer.num_prompt_tokens = usage["prompt_tokens"]
        answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")


def margins_of(logprobs: dict[str, Any]) -> list[float]:
    """The best less the second best logprob of each token, from a completion's or a chat's
    answer.
    """
    if "content" in logprobs:
        tops = [[t["logprob"] for t in token["top_logprobs"]] for token in logprobs["content"]]
    else:
        tops = [list(token.values()) for token in logprobs.get("top_logprobs") or ()]
    ranked = [sorted(top, reverse=True) for top in tops]
    return [top[0] - top[1] if len(top) > 1 else 0.0 for top in ranked]
