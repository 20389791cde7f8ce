"""One client request on its way through the gateway: what all its steps share.

Holds no logic of routing or relaying; counts who still works for the request, so that its record
is settled exactly once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from deploy.gateway.intake.inbound import InboundRequest, Kind
from deploy.gateway.intake.tracing import (
    new_request_id,
    new_traceparent,
    usable_request_id,
    usable_traceparent,
)
from deploy.gateway.serving.records import RequestRecord
from scheduler.routing.decision import Decision
from scheduler.routing.prediction import Prediction
from scheduler.routing.short_term import RouteDecision

if TYPE_CHECKING:
    from deploy.gateway.metrics import GatewayMetrics

PATHS: Final[dict[Kind, str]] = {
    "completion": "/v1/completions",
    "chat": "/v1/chat/completions",
}

# What vLLM reads from headers besides the request id. Not x-data-parallel-rank: placement is ours.
_PASSED_ON: Final = ("X-Session-ID", "X-Vllm-Priority")


@dataclass(slots=True)
class Exchange:
    """A parsed request, the headers its engine requests carry, and its record."""

    inbound: InboundRequest
    headers: dict[str, str]
    record: RequestRecord
    metrics: GatewayMetrics
    started_s: float
    predicted: Prediction | None = None
    """Of the route that is being taken; None once it turned out otherwise."""
    tenant: str = ""
    was_full: bool = False
    """The decode instance was full when it was given the request, which waited inside of it."""
    admitted: Callable[[], None] | None = None
    """To be called when the request no longer counts towards its tenant's limits."""
    transfer_ids: list[str] = field(default_factory=list)
    """Of the landings that were reserved for it."""
    _num_open: int = field(default=1)

    @property
    def path(self) -> str:
        """The endpoint, the same here and at an engine."""
        return PATHS[self.inbound.kind]

    @property
    def request_id(self) -> str:
        """The id the client sees."""
        return self.record.request_id

    def elapsed_s(self) -> float:
        """Seconds since arrival."""
        return time.monotonic() - self.started_s

    def decided(self, decision: Decision) -> None:
        """A route is taken now. Only the first one's prediction counts from arrival, and only of a
        prompt that was counted: what rests on an upper bound is no prediction.
        """
        self.predicted = None
        is_counted = self.record.num_prompt_tokens is not None
        if isinstance(decision, RouteDecision) and is_counted and not self.record.first_route:
            self.predicted = decision.predicted
        self.record.decided(decision)
        self.metrics.decided(decision)

    def release_admission(self) -> None:
        """The answer is over. Idempotent."""
        admitted, self.admitted = self.admitted, None
        if admitted is not None:
            admitted()

    def hold(self) -> None:
        """Someone else will still change the record; to be paired with `let_go`."""
        self._num_open += 1

    def let_go(self) -> None:
        """One fewer; the last one settles the record."""
        self._num_open -= 1
        if self._num_open == 0:
            self.record.is_settled = True
            self.metrics.settled(self.record)


def open_exchange(
    inbound: InboundRequest,
    headers: Mapping[str, str],
    *,
    metrics: GatewayMetrics,
    started_s: float,
    tenant: str = "",
) -> Exchange:
    """Start the life of a tenant's parsed request that arrived at `started_s` (time.monotonic)."""
    request_id = (
        usable_request_id(headers.get("X-Request-Id"))
        or usable_request_id(inbound.request_id)
        or new_request_id()
    )
    traceparent = usable_traceparent(headers.get("traceparent"))
    engine_headers = {
        "Content-Type": "application/json",
        "Accept-Encoding": "identity",
        "X-Request-Id": request_id,
    }
    if traceparent and (state := headers.get("tracestate")):
        engine_headers["tracestate"] = state
    traceparent = traceparent or new_traceparent()
    engine_headers["traceparent"] = traceparent
    for name in _PASSED_ON:
        if value := headers.get(name):
            engine_headers[name] = value
    record = RequestRecord(
        request_id=request_id,
        started_s=time.time(),
        endpoint=inbound.kind,
        model=inbound.model,
        trace_id=traceparent[3:35],
        tenant=tenant,
    )
    record.parts.read_s = time.monotonic() - started_s
    return Exchange(inbound, engine_headers, record, metrics, started_s, tenant=tenant)
