"""What an agent says of one path, for tests of links between clusters."""

from __future__ import annotations

from typing import Any

from netmon.estimate import LinkCondition, LinkEstimate, PathReport


def path_report(
    endpoint: str = "b1:7100",
    condition: str = "clear",
    *,
    available: float = 0.0,
    full_age_s: float | None = None,
    age_s: float | None = None,
    **fields: Any,
) -> PathReport:
    """`fields` are those of the estimate, but for the transfers and the size of a probe."""
    of_report = {
        name: fields.pop(name) for name in ("num_transfers", "probe_bytes") if name in fields
    }
    estimate = LinkEstimate(
        available_bytes_per_s=available,
        full_age_s=full_age_s,
        age_s=full_age_s if age_s is None else age_s,
        is_up=condition != "down",
        **({"sample_age_s": 0.1} | fields),
    )
    return PathReport(
        endpoint=endpoint,
        condition=LinkCondition(condition),
        reason=f"because of {endpoint}",
        condition_s=1.0,
        reference_bytes_per_s=available,
        estimate=estimate,
        **of_report,
    )
