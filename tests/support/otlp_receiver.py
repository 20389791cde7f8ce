"""An OpenTelemetry receiver: takes spans by gRPC on loopback and keeps them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self

import grpc
from eventually import eventually
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.common.v1.common_pb2 import KeyValue


@dataclass(frozen=True, slots=True)
class ReceivedSpan:
    """A span as it came. Times are seconds since 1970, ids hex."""

    name: str
    service: str
    instance: str
    trace_id: str
    span_id: str
    parent_id: str
    began_s: float
    ended_s: float
    kind: int
    is_error: bool
    attributes: dict[str, Any]
    events: dict[str, float]

    @property
    def seconds(self) -> float:
        return self.ended_s - self.began_s


class OtlpReceiver(TraceServiceServicer):
    """A context manager; `endpoint` is for exporters."""

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self._server: Any = None
        self.endpoint = ""

    def __enter__(self) -> Self:
        self._server = grpc.server(ThreadPoolExecutor(2))
        add_TraceServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()
        self.endpoint = f"http://127.0.0.1:{port}"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None).wait()

    def Export(
        self, request: ExportTraceServiceRequest, context: object
    ) -> ExportTraceServiceResponse:
        self.spans += received(request)
        return ExportTraceServiceResponse()

    def of_trace(self, trace_id: str) -> list[ReceivedSpan]:
        """Its spans so far."""
        return [span for span in self.spans if span.trace_id == trace_id]

    async def trace(
        self, trace_id: str, wanted: Iterable[str], timeout_s: float = 30.0
    ) -> list[ReceivedSpan]:
        """The spans of a trace, once those with the names `wanted` are among them. A name that is
        there twice is wanted twice.
        """
        names = Counter(wanted)
        await eventually(
            lambda: names - Counter(span.name for span in self.of_trace(trace_id)),
            lambda missing: not missing,
            timeout_s=timeout_s,
        )
        return self.of_trace(trace_id)


def received(request: ExportTraceServiceRequest) -> list[ReceivedSpan]:
    """The spans of one message."""
    found = []
    for batch in request.resource_spans:
        resource = _attributes(batch.resource.attributes)
        for scope in batch.scope_spans:
            for span in scope.spans:
                found.append(
                    ReceivedSpan(
                        name=span.name,
                        service=resource.get("service.name", ""),
                        instance=resource.get("service.instance.id", ""),
                        trace_id=span.trace_id.hex(),
                        span_id=span.span_id.hex(),
                        parent_id=span.parent_span_id.hex(),
                        began_s=span.start_time_unix_nano / 1e9,
                        ended_s=span.end_time_unix_nano / 1e9,
                        kind=span.kind,
                        is_error=span.status.code == 2,
                        attributes=_attributes(span.attributes),
                        events={event.name: event.time_unix_nano / 1e9 for event in span.events},
                    )
                )
    return found


def _attributes(pairs: Iterable[KeyValue]) -> dict[str, Any]:
    read: dict[str, Callable[[Any], Any]] = {
        "string_value": lambda value: value.string_value,
        "bool_value": lambda value: value.bool_value,
        "int_value": lambda value: value.int_value,
        "double_value": lambda value: value.double_value,
    }
    return {
        pair.key: read[kind](pair.value)
        for pair in pairs
        if (kind := pair.value.WhichOneof("value")) in read
    }


def check_tree(spans: list[ReceivedSpan], slack_s: float) -> ReceivedSpan:
    """Assert that the spans are one tree whose children lie inside their parents, with `slack_s` at
    each end for clocks that are read one after the other. Returns the first span.
    """
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans), "two spans have one id"
    (root,) = (span for span in spans if span.parent_id not in by_id)
    for span in spans:
        assert span.began_s <= span.ended_s
        if span is root:
            continue
        above = by_id[span.parent_id]
        what = f"{span.name} of {span.service} in {above.name} of {above.service}"
        assert above.began_s - slack_s <= span.began_s, f"{what} begins before it"
        assert span.ended_s <= above.ended_s + slack_s, f"{what} ends after it"
    return root
