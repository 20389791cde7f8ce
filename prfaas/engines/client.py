"""HTTP client of one vLLM OpenAI server: health, one prefill, load.

It does not know transfers, agents or clusters, and passes `kv_transfer_params` on unread. It turns
errors of aiohttp into EngineUnreachable and EngineRefused.
"""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import aiohttp
import msgspec

from kvmanager.token_ids import TokenIds, in_turns, writing
from prfaas.engines.access import EngineAccess
from prfaas.engines.errors import EngineRefused, EngineUnreachable
from prfaas.jobs import ChatApi

_RUNNING: Final = "vllm:num_requests_running"
_WAITING: Final = "vllm:num_requests_waiting"
_BY_REASON: Final = "vllm:num_requests_waiting_by_reason"
_KV_USAGE: Final = "vllm:kv_cache_usage_perc"
_SAMPLE: Final = re.compile(
    rf"^({_RUNNING}|{_WAITING}|{_BY_REASON}|{_KV_USAGE})(\{{[^\n]*\}})? ([0-9.eE+-]+)$",
    re.MULTILINE,
)
_DEFERRED: Final = 'reason="deferred"'
_ONE_TOKEN_OF_A_CHAT: Final = {
    "max_tokens": 1,
    "max_completion_tokens": 1,
    "min_tokens": 0,
    "n": 1,
    "stream": False,
    "stream_options": None,
    "logprobs": False,
    "top_logprobs": None,
    "response_format": None,
    "structured_outputs": None,
    "tool_choice": "none",
}
"""What a client's chat is overridden with (vLLM's `ChatCompletionRequest`). A tool that the client
demands would make the engine read the answer. Few models put any of this into the prompt; then its
digest differs, nothing is sent, and the engine that decodes prefills.
"""
_ONE_TOKEN_OF_A_RESPONSE: Final = {
    "max_output_tokens": 1,
    "stream": False,
    "stream_options": None,
    "store": False,
    "include": None,
    "top_logprobs": 0,
    "text": None,
    "structured_outputs": None,
    "tool_choice": "none",
}
"""The same of vLLM's `ResponsesRequest`."""
_SURE: Final = 100.0
"""The most that vLLM adds to the score of a token that is wanted."""
_KV_BLOCKS: Final = re.compile(
    r'^vllm:cache_config_info\{[^\n]*\bnum_gpu_blocks="([0-9]+)"', re.MULTILINE
)


class EnginePrefill(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's answer to a prefill: tokens in the prompt, how many of them were cached, and what
    its connector says to the engine that is to decode ({}: nothing, as ours).
    """

    num_prompt_tokens: int
    cached_tokens: int
    kv_transfer_params: dict[str, Any] = {}


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Requests in the engine, from its metrics. Of the `num_waiting`, `num_deferred` wait not for
    room but for something to arrive, such as their KVCache. `kv_usage` is the share (0..1) of its
    `num_kv_blocks` in use; 0 blocks: the metrics do not tell.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_deferred: int = 0
    kv_usage: float = 0.0
    num_kv_blocks: int = 0


class _TokenDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    """The second two are those of a response."""

    prompt_tokens: int = 0
    prompt_tokens_details: _TokenDetails | None = None
    input_tokens: int = 0
    input_tokens_details: _TokenDetails | None = None


class _Completion(msgspec.Struct):
    usage: _Usage
    kv_transfer_params: dict[str, Any] | None = None


class EngineHttp:
    """One engine at `base_url`. `session` is shared and owned by the caller, `access` says what the
    engine demands.
    """

    def __init__(
        self, base_url: str, session: aiohttp.ClientSession, access: EngineAccess | None = None
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._session = session
        self._access = access or EngineAccess()

    async def health(self, timeout_s: float = 5.0) -> bool:
        """Whether the engine serves: its HTTP server answers and its core lives. Never raises."""
        try:
            async with self._request("GET", "/health", timeout_s) as response:
                return response.status == 200
        except EngineUnreachable:
            return False

    async def load(self, timeout_s: float = 5.0) -> EngineLoad:
        """Requests running and waiting. Raises EngineUnreachable, EngineRefused."""
        async with self._request("GET", "/metrics", timeout_s) as response:
            text = (await _body(response)).decode("utf-8", "replace")
        return parse_load(text)

    async def prefill(
        self,
        request_id: str,
        prompt: TokenIds | bytes,
        kv_transfer_params: dict[str, Any],
        *,
        api: ChatApi = "chat",
        model: str = "",
        cache_salt: str | None = None,
        traceparent: str = "",
        next_token: int | None = None,
        timeout_s: float = 600.0,
    ) -> EnginePrefill:
        """Run a prompt with one output token, which nobody reads. `next_token`: the only one that
        it may be. `prompt` is token ids, or the body of a request to the `api`.

        Cancelling the awaiting task closes the connection, which makes the engine abort the
        request. Raises EngineUnreachable, EngineRefused.
        """
        body: dict[str, Any]
        if isinstance(prompt, TokenIds):
            path = "/v1/completions"
            # Written in turns: a prompt of a million tokens would hold up the event loop.
            body = {"prompt": msgspec.Raw(await in_turns(writing(prompt))), "max_tokens": 1}
            body |= _only(next_token)
        elif api == "responses":
            path = "/v1/responses"
            body = _undecoded(prompt) | _ONE_TOKEN_OF_A_RESPONSE
            if next_token is not None:
                body["logit_bias"] = {str(next_token): _SURE}
        else:
            path = "/v1/chat/completions"
            body = _undecoded(prompt) | _ONE_TOKEN_OF_A_CHAT | _only(next_token)
        body |= {
            "temperature": 0.0,
            "request_id": request_id,
            "kv_transfer_params": kv_transfer_params,
        }
        if model:
            body["model"] = model
        if cache_salt:
            body["cache_salt"] = cache_salt
        headers = {"Content-Type": "application/json"}
        if traceparent:
            headers["traceparent"] = traceparent
        data = msgspec.json.encode(body)
        async with self._request("POST", path, timeout_s, data=data, headers=headers) as response:
            raw = await _body(response)
        try:
            answer = msgspec.json.decode(raw, type=_Completion)
        except msgspec.MsgspecError as error:
            # Not an answer of vLLM's, so it tells nothing about the request: the same as no answer.
            raise EngineUnreachable(f"{self.base_url}: unexpected answer: {error}") from error
        usage = answer.usage
        details = usage.prompt_tokens_details or usage.input_tokens_details
        return EnginePrefill(
            num_prompt_tokens=usage.prompt_tokens or usage.input_tokens,
            cached_tokens=(details.cached_tokens or 0) if details is not None else 0,
            kv_transfer_params=answer.kv_transfer_params or {},
        )

    @asynccontextmanager
    async def _request(
        self,
        method: str,
        path: str,
        timeout_s: float,
        *,
        data: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        url = f"{self.base_url}{path}"
        # Connecting has a bound of its own: `timeout_s` allows for a prefill of minutes, and a host
        # that is down answers a connection attempt with nothing at all.
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(5.0, timeout_s))
        try:
            async with self._session.request(
                method,
                url,
                data=data,
                headers={**self._access.headers, **(headers or {})},
                timeout=timeout,
                ssl=self._access.tls(),
            ) as response:
                yield response
        except aiohttp.ClientError as error:
            raise EngineUnreachable(f"{url}: {str(error) or type(error).__name__}") from error
        except TimeoutError as error:
            raise EngineUnreachable(f"{url}: no answer within {timeout_s:g} s") from error


def _undecoded(body: bytes) -> dict[str, Any]:
    """The fields of a client's body, whose media may have megabytes."""
    return msgspec.json.decode(body, type=dict[str, msgspec.Raw])


def _only(token: int | None) -> dict[str, list[int]]:
    return {} if token is None else {"allowed_token_ids": [token]}


async def _body(response: aiohttp.ClientResponse) -> bytes:
    raw = await response.read()
    if response.status != 200:
        raise EngineRefused(response.status, raw, response.content_type)
    return raw


def parse_load(metrics_text: str) -> EngineLoad:
    """Sum the gauges of all of an engine's ranks; `kv_usage` is the fullest rank's."""
    counts = {_RUNNING: 0.0, _WAITING: 0.0, _BY_REASON: 0.0}
    kv_usage = 0.0
    for name, labels, value in _SAMPLE.findall(metrics_text):
        if name == _KV_USAGE:
            kv_usage = max(kv_usage, float(value))
        elif name != _BY_REASON or _DEFERRED in labels:
            counts[name] += float(value)
    return EngineLoad(
        num_running=int(counts[_RUNNING]),
        num_waiting=int(counts[_WAITING]),
        num_deferred=int(counts[_BY_REASON]),
        kv_usage=kv_usage,
        # Every rank publishes the same engine-wide count, so a sum would be too high.
        num_kv_blocks=max(map(int, _KV_BLOCKS.findall(metrics_text)), default=0),
    )


def open_session(max_connections: int = 0) -> aiohttp.ClientSession:
    """A session for engines: no connection limit unless given, no cookies, no proxy settings.

    To be called on a running event loop and closed by the caller.
    """
    # The engine's server drops a connection after 5 s without use; ours must let go first, or a
    # request could be written into a connection that is being closed.
    connector = aiohttp.TCPConnector(limit=max_connections, keepalive_timeout=3.0)
    return aiohttp.ClientSession(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None),
        trust_env=False,
    )
