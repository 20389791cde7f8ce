"""What a request is called: request ids, traces."""

import pytest

from deploy.gateway.intake.tracing import (
    new_request_id,
    new_traceparent,
    usable_request_id,
    usable_traceparent,
)

TRACE = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"


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
