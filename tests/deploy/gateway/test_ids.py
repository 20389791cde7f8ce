"""What a request is called: request ids, traces."""

import pytest
from steps import at_once

from deploy.gateway.intake.accept import engine_headers, usable_request_id
from deploy.gateway.intake.inbound import parsing_request
from kvmanager.tracing.context import parse_traceparent

TRACE = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"


@pytest.mark.parametrize("value", [TRACE, "cc" + TRACE[2:] + "-more"])
def test_valid_traces_are_kept(value: str) -> None:
    assert parse_traceparent(value)


@pytest.mark.parametrize(
    "value",
    [
        "",
        TRACE.upper(),
        TRACE + "-more",
        "ff" + TRACE[2:],
        TRACE.replace("ab", "00"),
        TRACE.replace("cd", "00"),
        TRACE + "\n",
    ],
)
def test_broken_traces_are_not(value: str) -> None:
    assert not parse_traceparent(value)


def test_made_up_ids_are_usable() -> None:
    inbound = at_once(parsing_request("chat", b"{}", template_tokens=0))
    made = engine_headers({}, inbound)
    assert parse_traceparent(made["traceparent"])
    assert usable_request_id(made["X-Request-Id"]) == made["X-Request-Id"]
    assert usable_request_id("chat-1.2:3@x") == "chat-1.2:3@x"
    for odd in ("", None, "a b", "x" * 129, "a\nb", "ü"):
        assert usable_request_id(odd) is None
