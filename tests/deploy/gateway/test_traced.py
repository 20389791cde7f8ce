"""Which requests are traced, and what the span of one says."""

import sys
from collections.abc import Iterator

import pytest
from otlp_receiver import OtlpReceiver
from steps import at_once

from deploy.gateway.file import GatewayFile, build_tracer
from deploy.gateway.intake.inbound import InboundRequest, parsing_request
from deploy.gateway.intake.traced import RequestTraces
from deploy.gateway.serving.record_views import span_attributes
from deploy.gateway.serving.records import RequestRecord
from kvmanager.config_files.problems import FileError
from kvmanager.config_files.traces import TracesSection, open_tracer
from kvmanager.tracing.context import parse_traceparent
from kvmanager.tracing.export import Tracer

DRAWN = "00-" + "12" * 16 + "-" + "34" * 8 + "-01"
CLIENTS = "00-" + "ab" * 16 + "-" + "cd" * 8


@pytest.fixture
def tracer() -> Iterator[Tracer]:
    with OtlpReceiver() as receiver:
        made = open_tracer(TracesSection(endpoint=receiver.endpoint), "prfaas-gateway", "g")
        assert made is not None
        yield made
        made.close()


@pytest.fixture
def inbound() -> InboundRequest:
    return at_once(parsing_request("chat", b'{"model": "m"}', template_tokens=0))


def test_without_a_tracer_others_get_the_drawn_context(inbound: InboundRequest) -> None:
    span = RequestTraces().begin(inbound, {}, DRAWN, 1.0)
    assert not span.is_recorded
    assert span.traceparent == DRAWN


@pytest.mark.parametrize("sample", [0.0, 1.0])
def test_a_share_of_the_requests_is_traced(
    tracer: Tracer, inbound: InboundRequest, sample: float
) -> None:
    span = RequestTraces(tracer, sample).begin(inbound, {}, DRAWN, 1.0)
    assert span.is_recorded is bool(sample)
    # The header says it to everybody else, engines included.
    context = parse_traceparent(span.traceparent)
    assert context is not None
    assert context.is_sampled is bool(sample)


@pytest.mark.parametrize("sample", [0.0, 1.0])
def test_a_client_that_traces_decides(
    tracer: Tracer, inbound: InboundRequest, sample: float
) -> None:
    traces = RequestTraces(tracer, sample)
    wanted, unwanted = f"{CLIENTS}-01", f"{CLIENTS}-00"
    span = traces.begin(inbound, {"traceparent": wanted}, wanted, 1.0)
    assert span.is_recorded
    assert span.name == "chat m"
    assert span.traceparent.split("-")[1] == "ab" * 16
    assert span.traceparent.split("-")[2] != "cd" * 8
    quiet = traces.begin(inbound, {"traceparent": unwanted}, unwanted, 1.0)
    assert not quiet.is_recorded
    assert quiet.traceparent == unwanted


def test_a_gateway_without_the_extra_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = {"name": "d0", "url": "http://127.0.0.1:1", "agent": "127.0.0.1:1", "model": "m"}
    file = GatewayFile.model_validate(
        {
            "gateway": {"models": [{"name": "m"}]},
            "pd": {"name": "home", "instances": [engine]},
            "log_dir": "/tmp",
            "traces": {"endpoint": "http://127.0.0.1:4317"},
        }
    )
    monkeypatch.delitem(sys.modules, "kvmanager.tracing.export")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(FileError, match=r"traces: traces need pip install prfaas\[traces\]"):
        build_tracer(file)


def test_a_span_says_what_is_known_and_nothing_else() -> None:
    record = RequestRecord(request_id="r1", started_s=1.0, endpoint="completion", model="m")
    said = span_attributes(record)
    assert said["gen_ai.operation.name"] == "text_completion"
    assert "gen_ai.usage.input_tokens" not in said
    assert "gen_ai.response.time_to_first_chunk" not in said
    assert "prfaas.tenant" not in said
    record.num_prompt_tokens, record.tenant = 12, "acme"
    record.parts.read_s = 0.25
    record.first_byte(1.5, is_stream=True)
    said = span_attributes(record)
    assert said["gen_ai.usage.input_tokens"] == 12
    assert said["gen_ai.response.time_to_first_chunk"] == 1.5
    assert (said["prfaas.tenant"], said["prfaas.ttft.read"]) == ("acme", 0.25)
    parts = [value for name, value in said.items() if name.startswith("prfaas.ttft.")]
    assert sum(parts) == pytest.approx(said["prfaas.ttft"])
