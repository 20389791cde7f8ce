"""The place of a process in a trace: W3C Trace Context (https://www.w3.org/TR/trace-context/).

Pure, apart from random numbers. It does not know spans or where they go.
"""

from __future__ import annotations

import random
import re
from typing import Final

import msgspec

_TRACEPARENT: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_RATIO_MASK: Final = (1 << 64) - 1


class TraceContext(msgspec.Struct, frozen=True):
    """A span in a trace. `is_sampled`: whoever takes part records what it does for it."""

    trace_id: int
    span_id: int
    is_sampled: bool

    @property
    def traceparent(self) -> str:
        """The header for those whose spans are to be this one's children."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{self.is_sampled:02x}"

    def child(self) -> TraceContext:
        """The context of a new span below this one."""
        return TraceContext(self.trace_id, _id(64), self.is_sampled)


def parse_traceparent(value: str) -> TraceContext | None:
    """The context in a `traceparent` header; None unless the header is valid."""
    match = _TRACEPARENT.fullmatch(value)
    if match is None:
        return None
    version, trace_id, span_id, flags, rest = match.groups()
    # Version ff is invalid, and only versions above 00 may have more fields.
    if version == "ff" or (version == "00" and rest is not None):
        return None
    context = TraceContext(int(trace_id, 16), int(span_id, 16), bool(int(flags, 16) & 1))
    return context if context.trace_id and context.span_id else None


def new_trace(sample: float) -> TraceContext:
    """The first span of a new trace, which is sampled with the probability `sample` (0..1).

    The decision follows from the trace id as in OpenTelemetry's `TraceIdRatioBased`.
    """
    trace_id = _id(128)
    is_sampled = (trace_id & _RATIO_MASK) < round(sample * (_RATIO_MASK + 1))
    return TraceContext(trace_id, _id(64), is_sampled)


def _id(num_bits: int) -> int:
    """A random id, which is never 0: that is invalid."""
    # The module's generator is seeded anew in a forked process, so processes draw different ids.
    return random.getrandbits(num_bits) or 1
