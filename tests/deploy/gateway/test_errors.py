"""Every error leaves as an OpenAI error object with its status."""

import json

import aiohttp
import pytest

from deploy.gateway.errors import (
    ApiError,
    EngineLost,
    EngineTimeout,
    api_error_for,
    in_shape,
)
from deploy.gateway.proxy.stream import forwarded_headers
from local_pd.errors import FrontUnreachable, NoInstance
from prfaas.engines.errors import EngineUnreachable, PrefillFailed
from transport.rpc import RpcError


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (ApiError(418, "teapot", "short"), 418, "teapot"),
        (EngineTimeout("d0", "silent"), 504, "engine_timeout"),
        (TimeoutError(), 504, "engine_timeout"),
        (EngineLost("d0", "gone"), 502, "engine_unavailable"),
        (EngineUnreachable("gone"), 503, "no_engine_available"),
        (NoInstance("none"), 503, "no_engine_available"),
        (FrontUnreachable("none"), 503, "no_engine_available"),
        (RpcError("UNAVAILABLE", "away"), 503, "cluster_unavailable"),
        (RpcError("TIMEOUT", "late"), 504, "cluster_timeout"),
        (RpcError("INTERNAL", "bug"), 502, "cluster_error"),
        (PrefillFailed("queue_full", "busy"), 503, "prefill_overloaded"),
        (PrefillFailed("closed", "bye"), 503, "prefill_unavailable"),
        (PrefillFailed("engine_failed", "dead"), 502, "prefill_failed"),
        (aiohttp.ClientPayloadError("short"), 502, "engine_unavailable"),
        (ConnectionResetError("reset"), 502, "engine_unavailable"),
    ],
)
def test_every_error_has_its_status(error: Exception, status: int, code: str) -> None:
    answer = api_error_for(error)
    assert (answer.status, answer.code) == (status, code)
    body = answer.body()
    assert in_shape(status, body, "openai") == body
    shown = json.loads(body)["error"]
    assert shown["message"]
    assert shown["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    assert ("Retry-After" in answer.headers) == (answer.retry_after_s is not None)


def test_an_unknown_error_shows_nothing() -> None:
    answer = api_error_for(KeyError("/secret/path"))
    assert answer.status == 500
    assert b"secret" not in answer.body()


@pytest.mark.parametrize("body", [b"", b"x", b"{}", b'{"error":"x"}', b'{"error":{}}', b"[" * 9999])
def test_what_is_not_an_openai_error(body: bytes) -> None:
    assert in_shape(500, body, "openai") is None
    assert in_shape(500, body, "anthropic") is None


def test_hop_by_hop_headers_stay_behind() -> None:
    headers = {
        "Connection": "close",
        "Transfer-Encoding": "chunked",
        "content-length": "3",
        "Content-Type": "a/b",
        "x-engine": "d0",
    }
    assert forwarded_headers(headers) == {"Content-Type": "a/b", "x-engine": "d0"}


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (502, "api_error"),
        (503, "overloaded_error"),
    ],
)
def test_anthropic_names_errors_its_own_way(status: int, kind: str) -> None:
    told = json.loads(ApiError(status, "code", "why").body("anthropic"))
    assert told == {"type": "error", "error": {"type": kind, "message": "why"}}


def test_an_engines_error_takes_the_shape_of_the_api() -> None:
    openai = ApiError(400, "x", "too long").body()
    anthropic = ApiError(400, "x", "too long").body("anthropic")
    assert in_shape(400, openai, "anthropic") == anthropic
    assert in_shape(400, anthropic, "anthropic") == anthropic
