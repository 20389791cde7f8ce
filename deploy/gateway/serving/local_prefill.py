"""Refuses prompts that are meant for a prefill cluster and cannot go there (`local_prefill`).

Their prefill would otherwise run in the PD cluster, beside the decodes there. This file does not
know how a route is chosen.
"""

from __future__ import annotations

from typing import Final

from deploy.gateway.errors import ApiError
from scheduler.routing.decision import Decision, Reason
from scheduler.routing.short_term import RouteDecision

_NOT_POSSIBLE: Final = frozenset(
    {
        Reason.PREFILL_UNHEALTHY,
        Reason.KVCACHE_UNUSABLE,
        Reason.PREFILL_QUEUE_FULL,
        Reason.NO_LANDING_ROOM,
        Reason.LINK_BUSY,
        Reason.LINK_CONGESTED,
        Reason.LINK_DOWN,
        Reason.LINK_STALE,
        Reason.ADAPTER_DIFFERS,
    }
)
"""Why a prompt above the threshold cannot go to a prefill cluster."""
_FAILED: Final = frozenset(
    {
        # Without a prefill cluster no prompt is meant for one, unless an earlier route led there.
        Reason.NO_PREFILL_CLUSTER,
        Reason.RESERVE_FAILED,
        Reason.PREFILL_FAILED,
        Reason.DECODE_FAILED,
    }
)
"""Why a route to a prefill cluster came to nothing."""


def check_prefill(decision: Decision, *, was_remote: bool) -> None:
    """Raises `ApiError` 503 if `decision` prefills locally what was meant for a prefill cluster.

    `was_remote` says that an earlier route of the request led to one.
    """
    if decision.route != "local":
        return
    reason = decision.reason
    is_first = isinstance(decision, RouteDecision)
    if (reason in _NOT_POSSIBLE and (is_first or was_remote)) or (reason in _FAILED and was_remote):
        raise PrefillUnavailable(reason)


class PrefillUnavailable(ApiError):
    """The answer to a prompt that no prefill cluster can take, for this `reason`."""

    def __init__(self, reason: Reason) -> None:
        message = (
            f"The prompt is meant for a prefill cluster and cannot go there: {reason}. The PD "
            "cluster does not prefill it (scheduling.routing.local_prefill: refuse)."
        )
        super().__init__(503, "prefill_unavailable", message, retry_after_s=1)
        self.reason = reason
