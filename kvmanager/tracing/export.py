"""Sends spans to an OpenTelemetry receiver (OTLP). Needs the extra `traces`.

Spans are complete when they come here, with ids that were drawn when they began. So they are made
as the SDK's processors and exporters get them, without the SDK's own tracers, which take 8 times
as long for each. The variables of OpenTelemetry's specification apply: `OTEL_BSP_MAX_QUEUE_SIZE`
bounds the queue, `OTEL_EXPORTER_OTLP_*` give headers, time limits and certificates, and
`OTEL_RESOURCE_ATTRIBUTES` more attributes of this process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Final

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from kvmanager.program_version import program_version
from kvmanager.tracing.spans import Attributes, Span

CLOSE_S: Final = 2.0
"""How long the end of a process waits for the receiver to take the last spans, seconds."""
BATCH: Final = 64
"""Spans in one message. While a message is written the event loop of the process does not get the
interpreter, which takes OpenTelemetry's 512 spans longer than a loop may stand still.
"""
_KINDS: Final = {
    "internal": SpanKind.INTERNAL,
    "server": SpanKind.SERVER,
    "client": SpanKind.CLIENT,
}
_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)
_FINE: Final = Status(StatusCode.UNSET)
_FAILED: Final = Status(StatusCode.ERROR)


class Tracer:
    """Records the spans of this process. A thread sends them; what it cannot send in time is lost
    once the queue (`OTEL_BSP_MAX_QUEUE_SIZE`) is full.
    """

    def __init__(self, exporter: SpanExporter, service: str, instance: str) -> None:
        """`service` and `instance` name this process in traces."""
        self._exporter = exporter
        self._processor = BatchSpanProcessor(exporter, max_export_batch_size=BATCH)
        names = {"service.name": service, "service.instance.id": instance}
        self._resource = Resource.create(names | {"service.version": program_version()})
        self._scope = InstrumentationScope("prfaas", program_version())

    def record(
        self,
        span: Span,
        parent_id: int | None,
        ended_s: float,
        attributes: Attributes,
        *,
        error: str,
        events: Iterable[tuple[str, float]],
    ) -> None:
        """Queue a span that is over. Any thread; never waits."""
        # Wall-clock time can be set; so it is not kept, but taken from the monotonic one here.
        wall_ns = time.time_ns() - time.monotonic_ns()
        context, above = span.context, None
        if parent_id is not None:
            above = SpanContext(context.trace_id, parent_id, True, _SAMPLED)
        made = ReadableSpan(
            span.name,
            SpanContext(context.trace_id, context.span_id, False, _SAMPLED),
            above,
            self._resource,
            {**attributes, "error.type": error} if error else attributes,
            [Event(name, timestamp=wall_ns + int(at_s * 1e9)) for name, at_s in events],
            kind=_KINDS[span.kind],
            status=_FAILED if error else _FINE,
            start_time=wall_ns + int(span.began_s * 1e9),
            # A part may be measured as a little negative by two threads' readings of a clock.
            end_time=wall_ns + int(max(span.began_s, ended_s) * 1e9),
            instrumentation_scope=self._scope,
        )
        self._processor.on_end(made)

    def flush(self) -> None:
        """Send what waits. Blocks as long as the receiver does."""
        self._processor.force_flush()

    def close(self) -> None:
        """Send what waits, for `CLOSE_S` at most. Blocks; record nothing afterwards."""
        # Ends the sending, and the pauses before it is tried again.
        giving_up = threading.Timer(CLOSE_S, self._exporter.shutdown)
        giving_up.daemon = True
        giving_up.start()
        self._processor.shutdown()  # type: ignore[no-untyped-call]  # of the SDK
        giving_up.cancel()


def exporter_to(endpoint: str, *, by_http: bool) -> SpanExporter:
    """Sends to an OTLP receiver, by HTTP or gRPC."""
    # The exporters load slowly, so only the one in use is imported.
    if by_http:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (
            OTLPSpanExporter as HttpExporter,
        )

        return HttpExporter(endpoint)
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (
        OTLPSpanExporter as GrpcExporter,
    )

    return GrpcExporter(endpoint)
