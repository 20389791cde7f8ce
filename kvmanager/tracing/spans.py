"""What a process does for a traced request, and when.

Times are seconds of this process's monotonic clock; they become wall-clock times when a span is
handed on. It does not know OpenTelemetry, and does nothing without a tracer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from kvmanager.tracing.context import TraceContext, parse_traceparent

if TYPE_CHECKING:  # which needs the extra `traces`
    from kvmanager.tracing.export import Tracer

SpanKind = Literal["internal", "server", "client"]
AttributeValue: TypeAlias = str | bool | int | float
Attributes: TypeAlias = Mapping[str, AttributeValue]
_NONE: Final[Attributes] = {}


class Span:
    """Something with a begin and an end that this process does for a request.

    Without a tracer, or for a request that is not sampled, nothing is recorded, and `traceparent`
    is what the request came with.
    """

    __slots__ = ("_parent_id", "_tracer", "began_s", "context", "kind", "name", "traceparent")

    def __init__(
        self,
        name: str,
        began_s: float,
        *,
        kind: SpanKind = "internal",
        traceparent: str = "",
        recorded: tuple[Tracer, TraceContext, int | None] | None = None,
    ) -> None:
        """`recorded`: who records it, its own context, and the id of the span above it (None: the
        first of its trace). Left out: nobody does.
        """
        self.name, self.began_s, self.kind = name, began_s, kind
        self._tracer: Tracer | None = None
        self.traceparent = traceparent
        """The header for what is below this span, in this process or another one."""
        if recorded is not None:
            self._tracer, self.context, self._parent_id = recorded
            self.traceparent = self.context.traceparent

    @property
    def is_recorded(self) -> bool:
        return self._tracer is not None

    def child(self, name: str, began_s: float, kind: SpanKind = "internal") -> Span:
        """Begin a span below this one."""
        if self._tracer is None:
            return Span(name, began_s, kind=kind, traceparent=self.traceparent)
        recorded = self._tracer, self.context.child(), self.context.span_id
        return Span(name, began_s, kind=kind, recorded=recorded)

    def past(
        self, name: str, began_s: float, ended_s: float, attributes: Attributes = _NONE
    ) -> None:
        """Record a span below this one that is over."""
        if self._tracer is not None:
            self.child(name, began_s).end(ended_s, attributes)

    def end(
        self,
        ended_s: float,
        attributes: Attributes = _NONE,
        *,
        error: str = "",
        events: Iterable[tuple[str, float]] = (),
    ) -> None:
        """Record this span. Call it once. `error` is a short code of what failed, never a text that
        may quote a prompt; `events` are names and times.
        """
        if self._tracer is not None:
            self._tracer.record(
                self, self._parent_id, ended_s, attributes, error=error, events=events
            )


def begin(
    tracer: Tracer | None,
    name: str,
    traceparent: str,
    began_s: float,
    kind: SpanKind = "internal",
) -> Span:
    """Begin a span below the one that a caller named in `traceparent`."""
    above = None if tracer is None else parse_traceparent(traceparent)
    if tracer is None or above is None or not above.is_sampled:
        return Span(name, began_s, kind=kind, traceparent=traceparent)
    return Span(name, began_s, kind=kind, recorded=(tracer, above.child(), above.span_id))
