"""What `prfaas plan solve` and `sweep` find, as plain values: the JSON that tables and plots show.

Keys have their units. Rates are requests/s of the whole region.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from kvmanager.config_files.units import GBIT_PER_S
from scheduler.planning.load.study import (
    LOADS,
    NUM_REQUESTS,
    LoadPoint,
    highest_load_within,
    study_load,
)
from scheduler.planning.plan import NoRouteError, Plan, Resource
from scheduler.planning.region_model import Region, Traffic
from scheduler.planning.solve import best_plan
from scheduler.planning.threshold_search import (
    best_threshold_plan,
    search_thresholds,
    threshold_grid,
)
from scheduler.planning.throughput import Mode

KIND_WORDS: Final = {
    "prefill": "prefill instances of",
    "link": "the link",
    "decode": "decode instances of",
}


@dataclass(frozen=True)
class Goals:
    """What the user wants of a plan besides throughput; None: no goal."""

    rate_rps: float | None = None
    ttft_p90_s: float | None = None


@dataclass(frozen=True)
class Solution:
    """A plan and everything that is reported about it."""

    plan: Plan
    paper_plan: Plan
    """The best plan in the paper's mode. It differs little."""
    loads: Sequence[LoadPoint]
    document: dict[str, Any]


def solve(
    region: Region,
    goals: Goals,
    *,
    whole: bool = True,
    currency: str = "USD",
    num_requests: int = NUM_REQUESTS,
    seed: int = 1,
) -> Solution:
    """The best plan, what it sustains, costs and means for first tokens, and whether it is enough.

    Raises `plan.NoRouteError` if nothing can be served.
    """
    plan = best_plan(region, whole=whole)
    if plan.system_rps(Mode.EXACT) <= 0:
        raise NoRouteError(
            "nothing can be served: a PD cluster without a prefill cluster needs 2 instances, one "
            "to prefill and one to decode (or `instances: shared`)"
        )
    paper_plan = _paper_plan(plan, whole=whole)
    loads = study_load(plan, LOADS, num_requests=num_requests, seed=seed)
    capacity_rps = plan.system_rps(Mode.EXACT)
    empty = plan.empty_ttft()
    document: dict[str, Any] = {
        "throughput_rps": capacity_rps,
        "binding": binding_words(plan),
        **_outline(plan),
        "paper_mode": {
            "throughput_rps": paper_plan.system_rps(Mode.PAPER),
            **_outline(paper_plan),
        },
        "routes": _routes(plan),
        "parts": [_part(part, capacity_rps) for part in plan.resources(Mode.EXACT)],
        "ttft_empty": {"mean_s": empty.mean_s, "p90_s": empty.p90_s},
        "ttft_under_load": [load_row(point) for point in loads],
        "without_prefill_clusters": _alone(region, capacity_rps, whole=whole),
        "cost": cost_of(plan, goals.rate_rps or capacity_rps, currency),
        "goals": _goals(plan, goals, num_requests=num_requests, seed=seed),
    }
    return Solution(plan, paper_plan, loads, document)


def _paper_plan(plan: Plan, *, whole: bool) -> Plan:
    """The best plan in the paper's mode, whose formulas are for one threshold."""
    if plan.threshold_tokens is None:
        return plan
    return best_threshold_plan(plan.region, Mode.PAPER, whole=whole)


def binding_words(plan: Plan) -> str:
    """What is full first, in words."""
    parts = [f"{KIND_WORDS[part.kind]} {part.name}" for part in plan.bottlenecks(Mode.EXACT)]
    *most, last = parts
    subject = f"{', '.join(most)} and {last}" if most else last
    # The words of a link are in the singular, those of instances in the plural.
    verb = "are" if most or last.startswith(("prefill", "decode")) else "is"
    return f"{subject} {verb} full first, at {plan.system_rps(Mode.EXACT):.3g} requests/s"


def cost_of(plan: Plan, rate_rps: float, currency: str) -> dict[str, Any]:
    """The cost at a rate. Tokens are those of whole prompts and of outputs."""
    per_hour = plan.cost_per_hour(rate_rps)
    traffic = plan.region.traffic
    output_millions = rate_rps * 3600 * traffic.output_tokens / 1e6
    all_millions = rate_rps * 3600 * (traffic.output_tokens + traffic.input_tokens) / 1e6
    return {
        "currency": currency,
        "rate_rps": rate_rps,
        "per_hour": per_hour,
        "per_million_tokens": per_hour / all_millions if all_millions else None,
        "per_million_output_tokens": per_hour / output_millions if output_millions else None,
    }


def load_row(point: LoadPoint) -> dict[str, float]:
    """One line of TTFT under load."""
    return {
        "load": point.load,
        "rate_rps": point.rate_rps,
        "ttft_mean_s": point.ttft.mean_s,
        "ttft_p50_s": point.ttft.p50_s,
        "ttft_p90_s": point.ttft.p90_s,
        "ttft_p99_s": point.ttft.p99_s,
        "queue_p90_s": point.queue.p90_s,
        "transfer_tail_p90_s": point.tail.p90_s,
        "slot_wait_p90_s": point.slot_wait.p90_s,
    }


def _outline(plan: Plan) -> dict[str, Any]:
    return {
        "threshold_tokens": plan.threshold_tokens,
        "offload_fraction": plan.offload_fraction,
        "mean_offloaded_tokens": plan.mean_offloaded_tokens,
        "splits": [
            {
                "pd_cluster": pd.name,
                "num_prefill": plan.num_prefill[pd.name],
                "num_decode": pd.num_instances - plan.num_prefill[pd.name],
            }
            for pd in plan.region.pd_clusters
        ],
    }


def _routes(plan: Plan) -> list[dict[str, Any]]:
    return [
        {
            "prefill_at": route.source.name,
            "decode_at": route.target.name,
            "share": plan.share(index),
            "mean_tokens": plan.mean_tokens(index),
            "lengths": [
                {"above_tokens": low, "up_to_tokens": high} for low, high in plan.lengths_of(index)
            ],
        }
        for index, route in enumerate(plan.routes)
    ]


def _part(part: Resource, rate_rps: float) -> dict[str, Any]:
    """One part at the highest rate: how full it is, and how much more it could take."""
    used = part.need * rate_rps / part.capacity if part.capacity else 0.0
    row: dict[str, Any] = {
        "kind": part.kind,
        "name": part.name,
        "theta_rps": part.theta_rps,
        "utilisation": used,
        "headroom": 1 / used - 1 if used > 0 else None,
    }
    if part.kind == "link":
        row |= {
            "rate_gbps": part.capacity / GBIT_PER_S,
            "egress_gbps": part.need * rate_rps / GBIT_PER_S,
        }
    else:
        row["instances"] = part.capacity
    return row


def without_prefill_clusters(region: Region) -> Region:
    """The region with its PD clusters alone."""
    return replace(region, prefill_clusters=(), links=())


def _alone(region: Region, capacity_rps: float, *, whole: bool) -> dict[str, Any] | None:
    """The plan of the PD clusters alone; None if the region has only PD clusters."""
    if not region.prefill_clusters:
        return None
    alone = best_plan(without_prefill_clusters(region), whole=whole)
    rps = alone.system_rps(Mode.EXACT)
    return {"throughput_rps": rps, "ratio": capacity_rps / rps if rps else None, **_outline(alone)}


def _goals(plan: Plan, goals: Goals, *, num_requests: int, seed: int) -> dict[str, Any]:
    """For each goal, whether it is met, and otherwise what would meet it."""
    found: dict[str, Any] = {}
    capacity_rps = plan.system_rps(Mode.EXACT)
    if goals.rate_rps is not None:
        met = goals.rate_rps <= capacity_rps
        found["rate"] = {
            "wanted_rps": goals.rate_rps,
            "met": met,
            "load": goals.rate_rps / capacity_rps if capacity_rps else None,
            "advice": "" if met else _advice(plan, goals.rate_rps),
        }
    if goals.ttft_p90_s is not None:
        load = highest_load_within(plan, goals.ttft_p90_s, num_requests=num_requests, seed=seed)
        wanted = goals.rate_rps if goals.rate_rps is not None else 0.0
        found["ttft_p90"] = {
            "wanted_s": goals.ttft_p90_s,
            "met": load > 0 and wanted <= load * capacity_rps,
            "highest_load": load,
            "highest_rate_rps": load * capacity_rps,
            "advice": _ttft_advice(plan, goals, load),
        }
    return found


def _advice(plan: Plan, rate_rps: float) -> str:
    """What to add where, so that every part carries this rate with the present routes."""
    words = []
    for part in plan.resources(Mode.EXACT):
        missing = part.need * rate_rps - part.capacity
        if missing <= 0:
            continue
        if part.kind == "link":
            words.append(f"{part.need * rate_rps / GBIT_PER_S:.3g} Gbit/s on {part.name}")
        else:
            words.append(
                # Rounding must not ask for one instance more.
                f"{int(np.ceil(missing - 1e-9))} more {part.kind} instances of {part.name}"
            )
    return (
        f"{rate_rps:.3g} requests/s need " + " and ".join(words) + " (with these routes)"
        if words
        else ""
    )


def _ttft_advice(plan: Plan, goals: Goals, load: float) -> str:
    wanted = goals.ttft_p90_s or 0.0
    if load == 0:
        empty = plan.empty_ttft().p90_s
        return (
            f"even without any queue the 90% first token takes about {empty:.3g} s, more than the "
            f"{wanted:.3g} s asked for: faster prefill hardware or shorter prompts are needed"
        )
    rps = load * plan.system_rps(Mode.EXACT)
    if goals.rate_rps is not None and goals.rate_rps > rps:
        return (
            f"90% of first tokens come within {wanted:.3g} s up to {rps:.3g} requests/s only: "
            f"give about {goals.rate_rps / rps:.3g} times the instances, or allow more time"
        )
    return ""


# ---- the search itself


def search_table(region: Region) -> list[dict[str, float]]:
    """The best threshold and throughput of each division of a pair's PD cluster (exact)."""
    grid = threshold_grid(region)
    found = search_thresholds(
        region, Mode.EXACT, grid, np.arange(region.pd_clusters[0].num_instances)
    )
    best = found.system_rps.argmax(axis=0)
    return [
        {
            "num_prefill": int(n),
            "num_decode": int(region.pd_clusters[0].num_instances - n),
            "threshold_tokens": float(grid[row]),
            "throughput_rps": float(found.system_rps[row, column]),
        }
        for column, (n, row) in enumerate(zip(found.num_prefill, best, strict=True))
    ]


# ---- sweeps

SWEEPABLE: Final = {
    "link_gbps": "rate of every link, Gbit/s",
    "hit_ratio": "cached share of every prompt, 0 to below 1 (replaces the file's)",
    "cache_tokens": "size of the prefix cache that a trace meets, tokens",
    "output_tokens": "mean output length, tokens",
    "prefill_instances": "instances of every prefill cluster",
    "pd_instances": "instances of every PD cluster",
}


@dataclass(frozen=True)
class Today:
    """The region that a sweep starts from, and how its traffic was made."""

    region: Region
    hit_ratio: float = 0.0
    """The hit ratio that its lengths contain."""
    traffic_with_cache: Callable[[float], Traffic] | None = None
    """For a trace: its traffic with a prefix cache of this many tokens."""

    def changed(self, values: Mapping[str, float]) -> Region:
        """The region with these quantities replaced.

        Raises ValueError for a quantity that cannot be swept here, or an impossible value.
        """
        region = self.region
        for key, value in values.items():
            if not (value >= 0 and np.isfinite(value)):
                raise ValueError(f"{key}={value:g} cannot be: it must not be negative")
            region = self._with(region, key, value)
        return region

    def _with(self, region: Region, key: str, value: float) -> Region:
        traffic = region.traffic
        match key:
            case "link_gbps":
                _need(value > 0, key, value, "above 0")
                links = tuple(replace(k, bytes_per_s=value * GBIT_PER_S) for k in region.links)
                return replace(region, links=links)
            case "hit_ratio":
                _need(self.traffic_with_cache is None, key, value, "absent: sweep cache_tokens")
                _need(value < 1, key, value, "below 1")
                # The lengths already contain the file's ratio.
                lengths = traffic.lengths.scaled((1 - value) / (1 - self.hit_ratio))
                return replace(region, traffic=replace(traffic, lengths=lengths))
            case "cache_tokens":
                if self.traffic_with_cache is None:
                    raise ValueError("cache_tokens needs a trace; sweep hit_ratio instead")
                found = self.traffic_with_cache(value)
                # The trace brings its own mean output, and a sweep may have changed this region's.
                found = replace(found, output_tokens=traffic.output_tokens)
                return replace(region, traffic=found)
            case "output_tokens":
                _need(value > 0, key, value, "above 0")
                return replace(region, traffic=replace(traffic, output_tokens=value))
            case "prefill_instances":
                remote = tuple(
                    replace(c, num_instances=int(value)) for c in region.prefill_clusters
                )
                return replace(region, prefill_clusters=remote)
            case "pd_instances":
                _need(value >= 1, key, value, "1 or more")
                local = tuple(replace(c, num_instances=int(value)) for c in region.pd_clusters)
                return replace(region, pd_clusters=local)
        raise ValueError(f"{key!r} cannot be swept; choose from {', '.join(SWEEPABLE)}")


def _need(holds: bool, key: str, value: float, what: str) -> None:
    if not holds:
        raise ValueError(f"{key}={value:g} cannot be: it must be {what}")


def sweep(
    today: Today, over: Mapping[str, Sequence[float]], *, whole: bool = True
) -> list[dict[str, Any]]:
    """Solve again at every combination, and compare with what today's plan would do there.

    `frozen_rps` is the throughput with today's routes and division. It is None if the number of
    local instances changed, so that today's division does not apply. Raises ValueError as
    `Today.changed`.
    """
    plan_of_today = best_plan(today.region, whole=whole)
    rows = []
    for values in itertools.product(*over.values()):
        point = dict(zip(over, values, strict=True))
        there = today.changed(point)
        plan = best_plan(there, whole=whole)
        rps = plan.system_rps(Mode.EXACT)
        # Today's division may need instances that this point does not have.
        frozen = (
            None if "pd_instances" in point else plan_of_today.kept_in(there).system_rps(Mode.EXACT)
        )
        alone = best_plan(without_prefill_clusters(there), whole=whole)
        rows.append(
            {
                **point,
                "throughput_rps": rps,
                "paper_mode_rps": _paper_plan(plan, whole=whole).system_rps(Mode.PAPER),
                "frozen_rps": frozen,
                "frozen_loss": None if frozen is None or rps == 0 else 1 - frozen / rps,
                "without_prefill_clusters_rps": alone.system_rps(Mode.EXACT),
                "binding": binding_words(plan),
                **_outline(plan),
            }
        )
    return rows
