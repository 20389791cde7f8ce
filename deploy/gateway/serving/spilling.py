"""Finds another PD cluster for a request when engines or fronts of its home fail.

The scheduler chooses the PD cluster by what reports say. Here are the failures that no report has
yet: a front that does not answer, or that has no engine left for the request. This file does not
know how a route is taken.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Set

import msgspec

from deploy.gateway.errors import ApiError
from deploy.gateway.intake.homes import HOME_HEADER, may_have
from deploy.gateway.serving.exchange import Exchange, Services
from local_pd.errors import PdError
from scheduler.routing.decision import Decision, Reason, fall_back
from scheduler.routing.short_term import RouteDecision
from scheduler.routing.spill import PdReason

logger = logging.getLogger("prfaas.deploy.gateway")


def may_serve(services: Services, exchange: Exchange) -> list[str]:
    """The PD clusters that may serve a request, its home first."""
    home, model = exchange.record.home, exchange.inbound.model
    if services.spill[home] == "never":
        return [home]
    reports = services.reports().items()
    others = (name for name, report in reports if may_have(report, model))
    return [home, *(name for name in others if name != home)]


def check_left(services: Services, exchange: Exchange, lost: Set[str], error: PdError) -> None:
    """Raises `error`, or an `ApiError` that says more, if no PD cluster but those in `lost` may
    serve a request.
    """
    if set(may_serve(services, exchange)) - lost:
        return
    home = exchange.record.home
    if services.spill[home] != "never" or len(services.pds) == 1:
        raise error
    message = (
        f"{error}. The requests of {home} stay there (spill: never); name another PD cluster "
        f"with the header {HOME_HEADER}."
    )
    raise ApiError(503, "home_unavailable", message, retry_after_s=1) from error


def spill_reason(exchange: Exchange, decision: Decision) -> str:
    """Why another PD cluster than a request's home decodes; "" where it is its home. Call it
    before the exchange notes the decision.
    """
    record = exchange.record
    if decision.pd == record.home:
        return ""
    if isinstance(decision, RouteDecision) and decision.pd_reason is not PdReason.HOME:
        return decision.pd_reason.value
    # The rest of a route that failed stays in its PD cluster, for the same reason.
    return record.spill if decision.pd == record.cluster else PdReason.HOME_UNABLE.value


class LostPds:
    """The PD clusters that had no engine for one request."""

    def __init__(self, services: Services, exchange: Exchange) -> None:
        self._services = services
        self._exchange = exchange
        self.names: set[str] = set()

    def may_leave(self, pd: str) -> bool:
        """Whether another PD cluster may serve the request."""
        return bool(set(may_serve(self._services, self._exchange)) - self.names - {pd})

    def elsewhere(
        self, failed: Decision, error: PdError, route: Callable[[], RouteDecision]
    ) -> Decision:
        """The decision that follows `error` in the PD cluster of the `failed` one. `route` gives a
        route without the clusters in `names`. Raises if no cluster is left.
        """
        self.names.add(failed.pd)
        check_left(self._services, self._exchange, self.names, error)
        logger.warning("%s: not in %s: %s", self._exchange.request_id, failed.pd, error)
        found = route()
        if found.pd in self.names:
            # No report speaks for another cluster, but its front may know better.
            left = (p for p in may_serve(self._services, self._exchange) if p not in self.names)
            return fall_back(msgspec.structs.replace(found, pd=next(left)), Reason.DECODE_FAILED)
        # A prompt that was not counted has no KVCache that could move.
        is_counted = self._exchange.record.num_prompt_tokens is not None
        return found if is_counted else fall_back(found, found.reason)
