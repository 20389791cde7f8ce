"""Trace contexts as headers, and which requests a share of all is."""

import pytest

from kvmanager.tracing.context import TraceContext, new_trace, parse_traceparent
from kvmanager.tracing.spans import Span, begin

HEADER = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"


def test_a_header_is_read_and_written() -> None:
    context = parse_traceparent(HEADER)
    assert context == TraceContext(int("ab" * 16, 16), int("cd" * 8, 16), True)
    assert context.traceparent == HEADER


@pytest.mark.parametrize(("flags", "is_sampled"), [("00", False), ("02", False), ("03", True)])
def test_only_the_last_flag_says_that_it_is_sampled(flags: str, is_sampled: bool) -> None:
    context = parse_traceparent(HEADER[:-2] + flags)
    assert context is not None
    assert context.is_sampled is is_sampled


def test_a_child_has_another_id_in_the_same_trace() -> None:
    above = new_trace(1.0)
    below = above.child()
    assert below.trace_id == above.trace_id
    assert below.is_sampled
    assert below.span_id != above.span_id
    assert parse_traceparent(below.traceparent) == below


@pytest.mark.parametrize("sample", [0.0, 0.25, 1.0])
def test_a_share_of_new_traces_is_sampled(sample: float) -> None:
    num_sampled = sum(new_trace(sample).is_sampled for _ in range(4000))
    assert num_sampled == pytest.approx(4000 * sample, abs=200 if 0 < sample < 1 else 0)


def test_without_a_tracer_the_callers_header_goes_on() -> None:
    span = begin(None, "queue", HEADER, 1.0)
    assert not span.is_recorded
    assert span.child("below", 2.0).traceparent == span.traceparent == HEADER
    span.past("below", 1.0, 2.0)
    span.end(3.0, error="failed")
    assert Span("none", 0.0).traceparent == ""
