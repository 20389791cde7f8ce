"""Where the spans of traced requests go: the setting that all processes share.

It does not know spans, and imports nothing of OpenTelemetry before a tracer is opened.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from kvmanager.config_files.fields import Section
from transport.errors import LocalError

if TYPE_CHECKING:
    from kvmanager.tracing.export import Tracer


def _receiver(text: str) -> str:
    url = urlsplit(text)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ValueError(f"{text!r} is no URL of a receiver; write such as http://127.0.0.1:4317")
    return text


class TracesSection(Section):
    """The receiver of this process's spans (docs/tracing.md)."""

    endpoint: Annotated[str, AfterValidator(_receiver)]
    """URL of an OTLP receiver. It speaks gRPC, or HTTP if the URL has a path, such as
    http://127.0.0.1:4318/v1/traces.
    """

    @property
    def is_http(self) -> bool:
        """Whether the receiver speaks HTTP instead of gRPC."""
        return urlsplit(self.endpoint).path not in ("", "/")


class SampledTraces(TracesSection):
    """The receiver, and which requests are traced."""

    sample: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of the requests that are traced, 0 to 1. A request with a `traceparent` header is
    traced if that says so, whatever the share.
    """


def open_tracer(traces: TracesSection | None, service: str, instance: str) -> Tracer | None:
    """Records spans for the receiver that `traces` names; None for None. `service` and `instance`
    name this process in traces. Raises LocalError where the extra is missing.
    """
    if traces is None:
        return None
    try:
        from kvmanager.tracing.export import Tracer, exporter_to

        exporter = exporter_to(traces.endpoint, by_http=traces.is_http)
    except ModuleNotFoundError as error:
        raise LocalError("traces", "traces need pip install prfaas[traces]") from error
    return Tracer(exporter, service, instance)
