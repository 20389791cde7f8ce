"""What goes wrong at the gateway, as error objects of the APIs, and the one table that maps errors.

    ApiError            an answer for the client: status, type, code, message
    EngineLost          an engine broke off before its answer began; another engine may answer
      EngineTimeout     the engine kept silent for too long; there is no time for another try

Foreign errors (cluster fronts, RPC, aiohttp) become `ApiError` in `api_error_for` and nowhere else.
This file does not know which request an error belongs to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal, NamedTuple

import aiohttp
import msgspec

from local_pd.errors import PdError
from prfaas.engines.errors import EngineError, EngineRefused, PrefillFailed
from transport.rpc import RpcError

JSON_TYPE: Final = "application/json"

ErrorShape = Literal["openai", "anthropic"]
"""How an API words errors: {"error": {...}} or {"type": "error", "error": {...}}."""


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong. `code` is a stable word for programs; engines put their status there.
    `param` is the request field at fault.
    """

    message: str
    type: str
    param: str | None
    code: str | int | None


class ErrorAnswer(msgspec.Struct, frozen=True):
    """An OpenAI error object."""

    error: ErrorDetail


class AnthropicErrorDetail(msgspec.Struct, frozen=True):
    """What went wrong, as Anthropic's API says it."""

    type: str
    message: str


class AnthropicErrorAnswer(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    """An error object of Anthropic's API."""

    error: AnthropicErrorDetail


class ApiError(Exception):
    """An HTTP answer that is an error object of OpenAI's or Anthropic's API.

    `code` is a stable word for programs, `param` the request field at fault, and `retry_after_s`
    becomes the Retry-After header.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def headers(self) -> dict[str, str]:
        """Response headers that belong to this error."""
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return headers

    def body(self, shape: ErrorShape = "openai") -> bytes:
        """The error object as JSON. Anthropic's has no place for `code` and `param`."""
        if shape == "anthropic":
            return _anthropic_body(self.status, self.message)
        error = ErrorDetail(
            message=self.message,
            type=_TYPE_OF_STATUS.get(self.status, _default_type(self.status)),
            param=self.param,
            code=self.code,
        )
        return msgspec.json.encode(ErrorAnswer(error))


class EngineLost(Exception):
    """An engine was unreachable or broke off before the first byte of its answer."""

    def __init__(self, instance: str, message: str) -> None:
        super().__init__(f"instance {instance}: {message}")
        self.instance = instance
        self.message = message


class EngineTimeout(EngineLost):
    """An engine kept silent for longer than the configured limit."""


# The types of OpenAI's API; other statuses follow from their first digit.
_TYPE_OF_STATUS: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


def _default_type(status: int) -> str:
    return "invalid_request_error" if status < 500 else "server_error"


# The types of Anthropic's API (https://platform.claude.com/docs/en/api/errors).
_ANTHROPIC_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def _anthropic_body(status: int, message: str) -> bytes:
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return msgspec.json.encode(AnthropicErrorAnswer(AnthropicErrorDetail(kind, message)))


class _Row(NamedTuple):
    applies: Callable[[BaseException], bool]
    status: int
    code: str
    retry_after_s: int | None = None


def _is(*types: type[BaseException]) -> Callable[[BaseException], bool]:
    return lambda error: isinstance(error, types)


def _rpc(*codes: str) -> Callable[[BaseException], bool]:
    return lambda error: isinstance(error, RpcError) and error.code in codes


def _prefill(*codes: str) -> Callable[[BaseException], bool]:
    return lambda error: isinstance(error, PrefillFailed) and error.code in codes


_TABLE: Final = (
    _Row(_is(EngineTimeout, TimeoutError), 504, "engine_timeout"),
    _Row(_is(EngineLost), 502, "engine_unavailable", 1),
    _Row(_is(EngineRefused), 502, "engine_refused"),
    _Row(_is(EngineError, PdError), 503, "no_engine_available", 1),
    _Row(_rpc("NO_ROOM", "UNAVAILABLE"), 503, "cluster_unavailable", 1),
    _Row(_rpc("TIMEOUT"), 504, "cluster_timeout"),
    _Row(_is(RpcError), 502, "cluster_error"),
    _Row(_prefill("queue_full", "queue_timeout", "outbox_no_room"), 503, "prefill_overloaded", 1),
    _Row(_prefill("no_instance", "closed", "unreachable"), 503, "prefill_unavailable", 1),
    _Row(_is(PrefillFailed), 502, "prefill_failed"),
    _Row(_is(aiohttp.ClientError, OSError), 502, "engine_unavailable", 1),
)
"""The first row that applies wins. An error in no row is a bug of the gateway and answers 500."""


def api_error_for(error: BaseException) -> ApiError:
    """The answer that a client gets for `error`. It shows nothing of unknown errors."""
    if isinstance(error, ApiError):
        return error
    for row in _TABLE:
        if row.applies(error):
            message = str(error) or type(error).__name__
            return ApiError(row.status, row.code, message, retry_after_s=row.retry_after_s)
    return ApiError(500, "internal_error", "The gateway failed to serve this request.")


def in_shape(status: int, body: bytes, shape: ErrorShape) -> bytes | None:
    """An engine's error as the API words errors; None if it is no error object of either API."""
    try:
        found = msgspec.json.decode(body, type=_EngineErrorBody)
    except (msgspec.MsgspecError, RecursionError):
        return None
    # Engines word what they refuse before they look at the path as OpenAI does.
    if shape == "anthropic" and found.type != "error":
        return _anthropic_body(status, found.error.message)
    return body


def refused_image(status: int, body: bytes) -> ApiError | None:
    """The error that an engine means if it says with a server error that an image has too many
    pixels. vLLM 0.32 does so beyond 178,956,970 of them, where Pillow refuses to open it.
    """
    if status != 500 or b"decompression bomb" not in body:
        return None
    message = "An image has more pixels than engines unpack. Send a smaller one."
    return ApiError(400, "media_pixels", message)


class _ErrorBody(msgspec.Struct):
    message: str


class _EngineErrorBody(msgspec.Struct):
    error: _ErrorBody
    type: str | None = None
