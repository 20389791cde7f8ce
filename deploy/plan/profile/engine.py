"""The engine that is being profiled, over HTTP: what it serves, its counters, one timed stream.

Times are `time.perf_counter` of this process. It does not know which requests make a profile. HTTP
errors, and answers that vLLM's OpenAI server would not give, become `ProfilingError` here.
"""

from __future__ import annotations

import re
import string
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import aiohttp
import msgspec

from deploy.plan.profile.stats import TokenTimes

RUNNING: Final = "vllm:num_requests_running"
WAITING: Final = "vllm:num_requests_waiting"

_CONNECT_TIMEOUT_S: Final = 5.0
_CONTROL_TIMEOUT_S: Final = 30.0
_STREAM_TIMEOUT_S: Final = 3600.0
"""Long enough for a prefill of a million tokens on slow hardware; Ctrl-C ends any wait."""

_METRIC: Final = re.compile(r"^(vllm:[a-z0-9_]+)(?:\{[^\n]*\})? (\S+)$", re.MULTILINE)
_KV_TOKENS: Final = re.compile(r'^vllm:cache_config_info\{[^\n]*kv_cache_size_tokens="(\d+)"', re.M)

_ORDINARY_TEXT: Final = " ".join(
    first + second for first in string.ascii_lowercase for second in string.ascii_lowercase
)
"""Short words. Every tokenizer has hundreds of ordinary tokens for them, and none is special."""

Answer = TypeVar("Answer")


class ProfilingError(Exception):
    """The engine cannot be profiled. The message names its URL and, if there is one, the fix."""


class EngineBusyError(ProfilingError):
    """Another client's requests are in the engine, so our times would mean nothing."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model to measure. `max_model_len` limits prompt and output tokens of a request
    together.
    """

    name: str
    max_model_len: int
    vllm_version: str


@dataclass(frozen=True, slots=True)
class Counters:
    """The engine's metrics at one moment, summed over its data-parallel ranks.

    `kv_tokens` is the capacity of its KVCache, None if it does not say. `values` has every sample
    by name.
    """

    values: dict[str, float]
    num_ranks: int
    kv_tokens: int | None

    @property
    def num_running(self) -> int:
        return int(self.values[RUNNING])

    @property
    def num_waiting(self) -> int:
        return int(self.values.get(WAITING, 0))

    def since(self, before: Counters, name: str) -> float | None:
        """How much the counter `name` has grown; None if the engine has no such counter."""
        if name not in self.values or name not in before.values:
            return None
        return self.values[name] - before.values[name]


@dataclass(frozen=True, slots=True)
class Streamed:
    """One answer, from the first byte sent to the end of the stream, and when its tokens came."""

    started_s: float
    ended_s: float
    num_prompt_tokens: int
    tokens: TokenTimes


class _Card(msgspec.Struct):
    id: str
    parent: str | None = None
    max_model_len: int | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


class _Version(msgspec.Struct):
    version: str


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    choices: list[Any] = []
    usage: _Usage | None = None
    error: Any = None


class ProfiledEngine:
    """One vLLM engine at `url`. `session` is shared and owned by the caller."""

    def __init__(self, url: str, session: aiohttp.ClientSession, api_key: str = "") -> None:
        self.url = base_url(url)
        self._session = session
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    async def served_model(self, wanted: str = "") -> ServedModel:
        """The model called `wanted`, or the only one. Raises ProfilingError."""
        raw = await self._read("GET", "/v1/models")
        cards = self._decoded("/v1/models", raw, _Cards).data
        base = [card.id for card in cards if card.parent is None]
        if not wanted and len(base) != 1:
            raise ProfilingError(f"{self.url} serves {_names(base)}: choose one with --model")
        name = wanted or base[0]
        card = next((card for card in cards if card.id == name), None)
        if card is None:
            names = _names([card.id for card in cards])
            raise ProfilingError(f"{self.url} does not serve {name}; --model can be: {names}")
        # Adapters have no length of their own, so the length of their base model counts.
        lengths = [item.max_model_len for item in (card, *cards) if item.max_model_len]
        if not lengths:
            raise ProfilingError(
                f"{self.url}/v1/models has no max_model_len: --url must be a vLLM engine itself, "
                "not a gateway or a proxy in front of one"
            )
        return ServedModel(name, lengths[0], await self._version())

    async def counters(self) -> Counters:
        """The engine's present metrics. Raises ProfilingError if it has none."""
        text = (await self._read("GET", "/metrics")).decode("utf-8", "replace")
        counters = parse_counters(text)
        if counters is None:
            raise ProfilingError(
                f"{self.url}/metrics has no {RUNNING}, so whether the engine is idle cannot be "
                "seen: start it without --disable-log-stats, and give an engine's URL, not a "
                "gateway's"
            )
        return counters

    async def ordinary_tokens(self, model: str) -> tuple[int, ...]:
        """Distinct token ids of ordinary text of the model; empty if the engine does not
        tokenize.
        """
        body = {"model": model, "prompt": _ORDINARY_TEXT, "add_special_tokens": False}
        async with self._request("POST", "/tokenize", body=msgspec.json.encode(body)) as response:
            if response.status != 200:
                return ()
            raw = await response.read()
        return tuple(sorted(set(self._decoded("/tokenize", raw, _Tokens).tokens)))

    async def stream(
        self, model: str, prompt: Sequence[int], *, output_tokens: int, cache_salt: str
    ) -> Streamed:
        """Stream exactly `output_tokens` tokens after `prompt`, of which nothing is cached.

        Cancelling closes the connection, and the engine then drops the request. Raises
        ProfilingError, also if the engine counts other tokens than it was asked for.
        """
        body = msgspec.json.encode(
            {
                "model": model,
                "prompt": prompt,
                "max_tokens": output_tokens,
                # The answer must not end early, whatever the model says.
                "min_tokens": output_tokens,
                "ignore_eos": True,
                "temperature": 0.0,
                "cache_salt": cache_salt,
                "stream": True,
                # Several tokens may come in one event, and only the usage says how many.
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            }
        )
        streamed = await self._streamed("/v1/completions", body)
        asked, got = (len(prompt), output_tokens), streamed.tokens.num_tokens[-1]
        if asked != (streamed.num_prompt_tokens, got):
            raise ProfilingError(
                f"{self.url}: asked for {output_tokens} tokens after a prompt of {len(prompt)}, "
                f"got {got} after {streamed.num_prompt_tokens}"
            )
        return streamed

    async def chat(
        self, model: str, text: str, image_uris: Sequence[str], *, cache_salt: str
    ) -> Streamed:
        """Stream one token after a chat of this text and these images. Raises ProfilingError, also
        if the model takes no images, or not so many.
        """
        images = [{"type": "image_url", "image_url": {"url": uri}} for uri in image_uris]
        body = msgspec.json.encode(
            {
                "model": model,
                "messages": [
                    {"role": "user", "content": [*images, {"type": "text", "text": text}]}
                ],
                "max_tokens": 1,
                "temperature": 0.0,
                "cache_salt": cache_salt,
                "stream": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            }
        )
        return await self._streamed("/v1/chat/completions", body)

    async def _streamed(self, path: str, body: bytes) -> Streamed:
        pieces: list[tuple[float, bytes]] = []
        # Parsed after the end: parsing during the stream would delay the times of later pieces.
        started_s = time.perf_counter()
        async with self._request("POST", path, body=body, timeout_s=_STREAM_TIMEOUT_S) as response:
            await self._check(response, path)
            async for piece in response.content.iter_any():
                pieces.append((time.perf_counter(), piece))
        return self._parsed(path, started_s, pieces)

    def _parsed(self, path: str, started_s: float, pieces: list[tuple[float, bytes]]) -> Streamed:
        num_tokens_at: dict[float, int] = {}
        num_prompt_tokens = num_tokens = 0
        for now_s, data in _events(pieces):
            if data == b"[DONE]":
                # An engine without continuous usage has streamed, but counted nothing.
                if not num_tokens:
                    break
                times = TokenTimes(tuple(num_tokens_at), tuple(num_tokens_at.values()))
                return Streamed(started_s, now_s, num_prompt_tokens, times)
            event = self._decoded(path, data, _Event)
            if event.error is not None:
                raise ProfilingError(f"{self.url}{path}: {_error_text(data)}")
            if event.usage is None:
                continue
            num_prompt_tokens = event.usage.prompt_tokens
            if event.usage.completion_tokens > num_tokens:
                # Tokens that arrive in the same piece share its time, and the last count wins.
                num_tokens = num_tokens_at[now_s] = event.usage.completion_tokens
        raise ProfilingError(
            f"{self.url}{path}: the stream ended early or counted no tokens; "
            "does the engine still run?"
        )

    async def _version(self) -> str:
        async with self._request("GET", "/version") as response:
            if response.status != 200:
                return "unknown"
            raw = await response.read()
        return self._decoded("/version", raw, _Version).version

    async def _read(self, method: str, path: str) -> bytes:
        async with self._request(method, path) as response:
            await self._check(response, path)
            return await response.read()

    async def _check(self, response: aiohttp.ClientResponse, path: str) -> None:
        if response.status == 200:
            return
        if response.status in (401, 403):
            raise ProfilingError(
                f"{self.url}{path} refuses the API key (HTTP {response.status}): give the "
                "engine's with --api-key or VLLM_API_KEY"
            )
        text = _error_text(await response.read())
        hint = ""
        # Any HTTP server answers, but only an engine has these pages.
        if response.status == 404 and path in ("/metrics", "/v1/models"):
            hint = "; --url takes the base URL of a vLLM engine, such as http://127.0.0.1:8000"
        raise ProfilingError(f"{self.url}{path}: HTTP {response.status}: {text}{hint}")

    def _decoded(self, path: str, raw: bytes, answer: type[Answer]) -> Answer:
        try:
            return msgspec.json.decode(raw, type=answer)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ProfilingError(
                f"{self.url}{path}: not an answer of vLLM's: {error}; "
                "is --url the base URL of a vLLM engine?"
            ) from error

    @asynccontextmanager
    async def _request(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        timeout_s: float = _CONTROL_TIMEOUT_S,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        headers = self._headers | ({"Content-Type": "application/json"} if body else {})
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_TIMEOUT_S)
        try:
            async with self._session.request(
                method, self.url + path, data=body, headers=headers, timeout=timeout
            ) as response:
                yield response
        # A ClientError too, so it comes first: nothing listens, which needs other advice.
        except aiohttp.ClientConnectorError as error:
            raise ProfilingError(
                f"no engine answers at {self.url}: {error}; is it running, and is --url right?"
            ) from error
        except (aiohttp.ClientError, ValueError) as error:
            text = str(error) or type(error).__name__
            raise ProfilingError(f"{self.url}{path}: {text}") from error
        except TimeoutError as error:
            raise ProfilingError(f"{self.url}{path}: no answer within {timeout_s:g} s") from error


def base_url(url: str) -> str:
    """`url` without a final slash or `/v1`. Raises ProfilingError if it is no HTTP URL."""
    base = url.rstrip("/").removesuffix("/v1").rstrip("/")
    if not re.match(r"https?://[^/\s]", base):
        raise ProfilingError(f"{url!r} is no URL of an engine; write http://127.0.0.1:8000")
    return base


def parse_counters(metrics_text: str) -> Counters | None:
    """The values of vLLM's `/metrics`; None if the page does not count running requests."""
    values: dict[str, float] = {}
    num_ranks = 0
    for name, text in _METRIC.findall(metrics_text):
        values[name] = values.get(name, 0.0) + float(text)
        num_ranks += name == RUNNING
    if not num_ranks:
        return None
    kv_tokens = [int(text) for text in _KV_TOKENS.findall(metrics_text)]
    return Counters(values, num_ranks, sum(kv_tokens) or None)


def _events(pieces: list[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """The data of server-sent events, each with the time of the piece that completed it."""
    rest = b""
    for now_s, piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield now_s, line.removeprefix(b"data:").strip()


def _error_text(raw: bytes) -> str:
    """The message in an OpenAI error object, or else the start of the body."""
    try:
        error = msgspec.json.decode(raw)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (msgspec.MsgspecError, KeyError, TypeError):
        return raw[:300].decode("utf-8", "replace")


def _names(names: Sequence[str]) -> str:
    return ", ".join(names) or "no model"
