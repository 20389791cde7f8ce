"""Who asks, and what a request is called: API keys, request ids, traces."""

import pytest

from deploy.gateway.auth import KeyRing
from deploy.gateway.errors import (
    ApiError,
)
from deploy.gateway.tracing import (
    new_request_id,
    new_traceparent,
    usable_request_id,
    usable_traceparent,
)

TRACE = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"


def test_without_keys_everything_is_let_in() -> None:
    KeyRing([]).check(None)


@pytest.mark.parametrize("header", ["Bearer a", "bearer  a ", "BEARER b"])
def test_keys_that_are_known(header: str) -> None:
    KeyRing(["a", "b"]).check(header)


@pytest.mark.parametrize(
    "header", [None, "", "a", "Basic a", "Bearer", "Bearer c", "Bearer \udcff"]
)
def test_keys_that_are_not(header: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        KeyRing(["a", "b"]).check(header)
    assert caught.value.status == 401


@pytest.mark.parametrize("value", [TRACE, "cc" + TRACE[2:] + "-more"])
def test_valid_traces_are_kept(value: str) -> None:
    assert usable_traceparent(value) == value


@pytest.mark.parametrize(
    "value",
    [
        None,
        "",
        TRACE.upper(),
        TRACE + "-more",
        "ff" + TRACE[2:],
        TRACE.replace("ab", "00"),
        TRACE.replace("cd", "00"),
        TRACE + "\n",
    ],
)
def test_broken_traces_are_not(value: str | None) -> None:
    assert usable_traceparent(value) is None


def test_made_up_ids_are_usable() -> None:
    assert usable_traceparent(made := new_traceparent()) == made
    assert usable_request_id(made_id := new_request_id()) == made_id
    assert usable_request_id("chat-1.2:3@x") == "chat-1.2:3@x"
    for odd in ("", None, "a b", "x" * 129, "a\nb", "ü"):
        assert usable_request_id(odd) is None
