"""Spans at a receiver, by gRPC and HTTP, and what a receiver that is gone costs: nothing."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from otlp_receiver import OtlpReceiver, ReceivedSpan, received
from pydantic import ValidationError

from kvmanager.config_files.traces import SampledTraces, TracesSection, open_tracer
from kvmanager.tracing.export import CLOSE_S, Tracer
from kvmanager.tracing.spans import begin
from transport import LocalError

HEADER = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"
KIND_CLIENT = 3


def opened(endpoint: str) -> Tracer:
    tracer = open_tracer(TracesSection(endpoint=endpoint), "prfaas-agent", "a1")
    assert tracer is not None
    return tracer


def record_two(tracer: Tracer) -> float:
    """A span with one below it; returns when the first began, in wall-clock seconds."""
    began_s = time.monotonic()
    wall_s = time.time()
    span = begin(tracer, "engine", HEADER, began_s, "client")
    span.past("prefill", began_s + 1.0, began_s + 2.5, {"prfaas.cached_tokens": 7, "x": "y"})
    span.end(began_s + 3.0, error="timeout", events=[("first_sent", began_s + 1.5)])
    return wall_s


def check_two(spans: list[ReceivedSpan], began_s: float) -> None:
    below, above = spans
    assert (below.name, above.name) == ("prefill", "engine")
    assert above.trace_id == below.trace_id == "ab" * 16
    assert above.parent_id == "cd" * 8
    assert below.parent_id == above.span_id
    assert (above.service, above.instance) == ("prfaas-agent", "a1")
    assert above.began_s == pytest.approx(began_s, abs=0.1)
    assert above.seconds == pytest.approx(3.0, abs=1e-6)
    assert below.seconds == pytest.approx(1.5, abs=1e-6)
    assert below.began_s - above.began_s == pytest.approx(1.0, abs=0.05)
    assert above.events["first_sent"] - above.began_s == pytest.approx(1.5, abs=1e-6)
    assert above.kind == KIND_CLIENT
    assert above.is_error
    assert above.attributes == {"error.type": "timeout"}
    assert not below.is_error
    assert below.attributes == {"prfaas.cached_tokens": 7, "x": "y"}


def test_spans_arrive_by_grpc() -> None:
    with OtlpReceiver() as receiver:
        tracer = opened(receiver.endpoint)
        began_s = record_two(tracer)
        tracer.close()
        check_two(receiver.spans, began_s)


@contextmanager
def http_receiver(spans: list[ReceivedSpan]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["Content-Length"]))
            spans.extend(received(ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/traces"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_spans_arrive_by_http_where_the_url_has_a_path() -> None:
    spans: list[ReceivedSpan] = []
    with http_receiver(spans) as endpoint:
        tracer = opened(endpoint)
        began_s = record_two(tracer)
        tracer.close()
    check_two(spans, began_s)


def test_a_request_that_is_not_sampled_leaves_no_span() -> None:
    with OtlpReceiver() as receiver:
        tracer = opened(receiver.endpoint)
        quiet = HEADER[:-2] + "00"
        span = begin(tracer, "engine", quiet, 1.0)
        span.end(2.0)
        begin(tracer, "engine", "no header", 1.0).end(2.0)
        tracer.close()
        assert span.traceparent == quiet
        assert receiver.spans == []


@pytest.fixture(params=["refuses", "says nothing"])
def broken(request: pytest.FixtureRequest) -> Iterator[str]:
    """A receiver that nobody runs, or one that takes connections and does not answer."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        if request.param == "refuses":
            server.close()
        yield f"http://127.0.0.1:{port}"


def test_a_receiver_that_is_gone_holds_nobody_up(broken: str) -> None:
    tracer = opened(broken)
    began_s = time.monotonic()
    for _ in range(10_000):
        begin(tracer, "engine", HEADER, began_s).end(began_s)
    # Ten seconds are OpenTelemetry's limit for one attempt to send: nothing of it was waited for.
    assert time.monotonic() - began_s < 8.0
    # What waits is bounded, however much was recorded.
    assert len(tracer._processor._batch_processor._queue) <= 2048
    began_s = time.monotonic()
    tracer.close()
    assert time.monotonic() - began_s < CLOSE_S + 6.0


def test_the_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "kvmanager.tracing.export")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(LocalError, match=r"traces need pip install prfaas\[traces\]"):
        open_tracer(TracesSection(endpoint="http://127.0.0.1:4317"), "prfaas-agent", "a1")


def test_nothing_is_imported_without_traces() -> None:
    code = (
        "import sys, deploy.gateway.cli, kvmanager.agent.cli, local_pd.cli, prfaas.cli;"
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert open_tracer(None, "prfaas-agent", "a1") is None


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4317", "collector", "grpc://host:4317", "http://"])
def test_what_is_no_url_is_refused(endpoint: str) -> None:
    with pytest.raises(ValidationError, match=r"is no URL of a receiver; write such as"):
        TracesSection(endpoint=endpoint)


def test_a_share_is_between_none_and_all() -> None:
    with pytest.raises(ValidationError, match="less than or equal to 1"):
        SampledTraces(endpoint="http://host:4317", sample=1.5)
