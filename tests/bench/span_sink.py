"""An OpenTelemetry receiver that throws spans away: python span_sink.py PORT."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)


class SpanSink(TraceServiceServicer):
    """Answers every message."""

    def Export(
        self, request: ExportTraceServiceRequest, context: object
    ) -> ExportTraceServiceResponse:
        return ExportTraceServiceResponse()


def main() -> None:
    """Serve until killed."""
    server = grpc.server(ThreadPoolExecutor(2))
    add_TraceServiceServicer_to_server(SpanSink(), server)  # type: ignore[no-untyped-call]
    server.add_insecure_port(f"127.0.0.1:{sys.argv[1]}")
    server.start()
    server.wait_for_termination()


if __name__ == "__main__":
    main()
