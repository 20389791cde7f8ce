"""Which requests the gateway traces, and the first span of each.

It does not know where spans go.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deploy.gateway.intake.endpoints import ENDPOINTS
from deploy.gateway.intake.inbound import InboundRequest
from kvmanager.tracing.context import new_trace, parse_traceparent
from kvmanager.tracing.spans import Span, begin

if TYPE_CHECKING:  # which needs the extra `traces`
    from kvmanager.tracing.export import Tracer


@dataclass(frozen=True, slots=True)
class RequestTraces:
    """Begins the spans of requests. Without `tracer` nothing is recorded."""

    tracer: Tracer | None = None
    sample: float = 1.0
    """Share of the requests that are traced, 0..1, of those whose client does not say."""

    def begin(
        self,
        inbound: InboundRequest,
        client_headers: Mapping[str, str],
        traceparent: str,
        began_s: float,
    ) -> Span:
        """The span of a request that arrived at `began_s`. `traceparent` is what others get where
        nothing is recorded.
        """
        if self.tracer is None:
            return Span("", began_s, traceparent=traceparent)
        # A name for each model, and not for each request: backends list traces by it.
        name = f"{ENDPOINTS[inbound.kind].operation} {inbound.model}"
        if parse_traceparent(client_headers.get("traceparent", "")) is not None:
            return begin(self.tracer, name, traceparent, began_s, "server")
        context = new_trace(self.sample)
        if not context.is_sampled:
            return Span(name, began_s, traceparent=context.traceparent)
        return Span(name, began_s, kind="server", recorded=(self.tracer, context, None))
