"""Plan, simulation and live run of the same arrivals as columns of the same numbers. Pure.

All three become lists of `Served`, in real units, and one function adds them up and gives the
result in the units of the profiles. The plan has only what it can know.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec
import numpy as np

from deploy.lab.rehearse.deriving import Rehearsal
from deploy.lab.rehearse.scale import Scale
from kvmanager.config_files.units import GBIT_PER_S
from scheduler.planning.throughput import Mode
from scheduler.replay.jobs import Fate
from scheduler.replay.results import Outcome, Percentiles
from scheduler.routing.decision import HAND_OFF, ONE_ENGINE

REMOTE: Final = "prefill_cluster"
"""The route to a prefill cluster, as the gateway names it."""
Fates = Literal["ok", "refused", "failed"]


class Served(msgspec.Struct, kw_only=True):
    """One request and what became of it, in real units. `at_s` counts from the first arrival on.

    `reason` is why it went where it did, or what failed. `num_refusals` counts the times that it
    was refused before. `transfer_bytes` is the KVCache that went from the engine that prefilled to
    the one that decoded. It is also a line of a kept run.
    """

    index: int
    at_s: float
    prompt_tokens: int
    output_tokens: int
    fate: Fates
    status: int = 0
    remote: bool = False
    route: str = ""
    reason: str = ""
    ttft_s: float | None = None
    tpot_s: float | None = None
    end_s: float | None = None
    predicted_ttft_s: float | None = None
    transfer_bytes: int = 0
    cached_tokens: int = 0
    num_refusals: int = 0


@dataclass(frozen=True, kw_only=True)
class Column:
    """One way to know how a region serves these arrivals, in the units of the profiles. None: it
    does not say.
    """

    throughput_rps: float | None = None
    """The plan: the most it can be."""
    offered_rps: float | None = None
    completed: int | None = None
    refused: int | None = None
    failed: int | None = None
    ttft_mean_s: float | None = None
    ttft_p50_s: float | None = None
    ttft_p90_s: float | None = None
    ttft_p99_s: float | None = None
    tpot_mean_s: float | None = None
    remote_share: float | None = None
    link_gib: float | None = None
    link_gbps: float | None = None
    cached_tokens: int | None = None
    prediction_p50: float | None = None
    """Median of |predicted - measured| / measured TTFT."""
    prediction_p90: float | None = None
    routes: dict[str, int] | None = None

    def document(self) -> dict[str, Any]:
        """It as plain values, without what is not known."""
        known = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: value for name, value in known.items() if value is not None}


def plan_column(rehearsal: Rehearsal, num_requests: int, span_s: float) -> Column:
    """What `prfaas plan solve` says of `num_requests` within `span_s` real seconds: its highest
    throughput, and TTFT without any queue.
    """
    plan, pd = rehearsal.plan, rehearsal.plan.region.pd_clusters[0]
    capacity, ttft = plan.system_rps(Mode.EXACT), plan.empty_ttft()
    profile_s = span_s / rehearsal.scale.slowdown
    rate = num_requests / profile_s
    sent_per_s = sum(plan.link_bytes_per_s(Mode.EXACT, min(rate, capacity)).values())
    return Column(
        throughput_rps=capacity,
        offered_rps=rate,
        ttft_mean_s=ttft.mean_s,
        ttft_p90_s=ttft.p90_s,
        tpot_mean_s=pd.step_s,
        remote_share=plan.offload_fraction,
        link_gib=sent_per_s * profile_s / 2**30,
        link_gbps=sent_per_s / GBIT_PER_S,
    )


def simulated(outcome: Outcome) -> list[Served]:
    """The requests of a replay. Bytes of a link are known of all together only."""
    return [
        Served(
            index=job.index,
            at_s=job.arrival_s,
            prompt_tokens=job.num_tokens,
            output_tokens=job.output_tokens,
            fate=_FATES[job.fate],
            remote=job.place > 0,
            route=REMOTE if job.place else f"local {ONE_ENGINE if job.is_whole else HAND_OFF}",
            ttft_s=job.slot_s + job.step_s - job.arrival_s if job.fate is Fate.DONE else None,
            tpot_s=_tpot_s(job.slot_s + job.step_s, job.done_s, job.output_tokens),
            end_s=job.done_s if job.fate is Fate.DONE else None,
            predicted_ttft_s=None if job.predicted is None else job.predicted.ttft_s,
            cached_tokens=job.cached_tokens,
        )
        for job in outcome.jobs
    ]


_FATES: dict[Fate, Fates] = {
    Fate.OPEN: "failed",
    Fate.DONE: "ok",
    Fate.REFUSED: "refused",
    Fate.REFUSED_LATE: "refused",
    Fate.LOST: "failed",
}


def _tpot_s(first_s: float, done_s: float, output_tokens: int) -> float | None:
    found = (done_s - first_s) / (output_tokens - 1) if output_tokens > 1 else None
    return None if found is None or np.isnan(found) else found


def column(
    served: Sequence[Served],
    span_s: float,
    scale: Scale,
    *,
    link_bytes: float | None = None,
    until_s: float = math.inf,
) -> Column:
    """The sums over all requests, which arrived within `span_s` real seconds. `link_bytes`: real
    bytes over all links, where the requests do not say. The throughput is that before `until_s`.
    """
    done = [one for one in served if one.fate == "ok"]
    refusals = sum(one.num_refusals + (one.fate == "refused") for one in served)
    ttft = Percentiles.of(np.array([one.ttft_s for one in done if one.ttft_s is not None]))
    tpots = [one.tpot_s for one in done if one.tpot_s is not None]
    errors = [
        abs(one.predicted_ttft_s - one.ttft_s) / one.ttft_s
        for one in done
        if one.predicted_ttft_s and one.ttft_s
    ]
    # Bytes of a local hand-off cross no link.
    by_request = sum(one.transfer_bytes for one in served if one.remote)
    sent = by_request if link_bytes is None else link_bytes
    sent *= scale.link_bytes
    slow = scale.slowdown
    return Column(
        throughput_rps=throughput([one.end_s or 0.0 for one in done], until_s) * slow,
        offered_rps=len(served) / span_s * slow,
        completed=len(done),
        refused=refusals,
        failed=sum(one.fate == "failed" for one in served),
        ttft_mean_s=_known(ttft.mean_s / slow),
        ttft_p50_s=_known(ttft.p50_s / slow),
        ttft_p90_s=_known(ttft.p90_s / slow),
        ttft_p99_s=_known(ttft.p99_s / slow),
        tpot_mean_s=sum(tpots) / len(tpots) / scale.step if tpots else None,
        remote_share=sum(one.remote for one in done) / max(1, len(done)),
        link_gib=sent / 2**30,
        link_gbps=sent / (span_s / slow) / GBIT_PER_S,
        cached_tokens=sum(one.cached_tokens for one in done) * scale.tokens,
        prediction_p50=float(np.quantile(errors, 0.5)) if errors else None,
        prediction_p90=float(np.quantile(errors, 0.9)) if errors else None,
        routes=dict(sorted(Counter(one.route for one in done).items())),
    )


def throughput(ends_s: Sequence[float], until_s: float = math.inf) -> float:
    """Answers per second from the end of the first one to that of the last one by `until_s`."""
    ends = sorted(end for end in ends_s if end <= until_s)
    if len(ends) < 2 or ends[0] == ends[-1]:
        return 0.0
    return (len(ends) - 1) / (ends[-1] - ends[0])


def _known(value: float) -> float | None:
    return None if np.isnan(value) else value
