"""What `prfaas plan solve` finds for a region whose requests have their homes in PD clusters.

`JointRegion` gives each home its share of prefill clusters, links and uplinks. The share is planned
and studied like a region of its own (`solving.solve`). This file adds what the shares are, and how
full everything is that homes share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deploy.plan.solve.solving import Goals, Solution, solve
from kvmanager.config_files.units import GBIT_PER_S
from scheduler.planning.joint import JointRegion
from scheduler.planning.load.study import NUM_REQUESTS
from scheduler.planning.plan import Plan
from scheduler.planning.region_model import Home, HomeKey, Uplink
from scheduler.planning.threshold_search import sources_of
from scheduler.planning.throughput import Mode


@dataclass(frozen=True)
class JointSolution:
    """The plan of each home on its share, and everything that is reported about all of them."""

    joint: JointRegion
    homes: Mapping[HomeKey, Solution]
    document: dict[str, Any]


def solve_joint(
    joint: JointRegion,
    ttft_p90_s: float | None = None,
    *,
    currency: str = "USD",
    num_requests: int = NUM_REQUESTS,
    seed: int = 1,
) -> JointSolution:
    """The best plans. Goals are the demand of each home, and the TTFT at that demand.

    Raises `plan.NoRouteError` if a home cannot be served.
    """
    homes = {
        home.key: solve(
            joint.shares[home.key],
            Goals(home.rate_rps, ttft_p90_s),
            whole=joint.whole,
            currency=currency,
            num_requests=num_requests,
            seed=seed,
        )
        for home in joint.homes
    }
    rows = [_home(home, homes[home.key]) for home in joint.homes]
    document = {
        "least_level": min(row["level"] for row in rows),
        "homes": rows,
        "shared": _shared(joint, {key: found.plan for key, found in homes.items()}),
    }
    return JointSolution(joint, homes, document)


def all_met(document: Mapping[str, Any]) -> bool:
    """Whether every goal of every home is met."""
    return all(goal["met"] for row in document["homes"] for goal in row["plan"]["goals"].values())


def _home(home: Home, solution: Solution) -> dict[str, Any]:
    rps = solution.plan.system_rps(Mode.EXACT)
    return {
        "model": home.model,
        "pd_cluster": home.key[1],
        "demanded_rps": home.rate_rps,
        "throughput_rps": rps,
        "level": rps / home.rate_rps,
        "pairs": _pairs(home, solution.plan),
        "plan": solution.document,
    }


def _pairs(home: Home, plan: Plan) -> list[dict[str, Any]]:
    """The threshold of each prefill cluster for this home, and what of it the home has."""
    thresholds = plan.thresholds()
    sends = plan.link_bytes_per_s(Mode.EXACT, plan.system_rps(Mode.EXACT))
    whole = {cluster.name: cluster.num_instances for cluster in home.region.prefill_clusters}
    return [
        {
            "prefill_cluster": source.name,
            "instances": source.num_instances,
            "of_instances": whole[source.name],
            "rate_gbps": link.bytes_per_s / GBIT_PER_S,
            "sends_gbps": sends[link.name] / GBIT_PER_S,
            "threshold_tokens": thresholds[source.name],
        }
        for source, link in sources_of(plan.region)
    ]


def _shared(joint: JointRegion, plans: Mapping[HomeKey, Plan]) -> list[dict[str, Any]]:
    """How full every prefill cluster, link and uplink is with all homes at their highest rates."""
    used: dict[tuple[str, str], float] = {}
    capacity: dict[tuple[str, str], float] = {}
    for home in joint.homes:
        plan = plans[home.key]
        rps = plan.system_rps(Mode.EXACT)
        at_model = f" ({home.model})" if home.model else ""
        names = {c.name: f"{c.name}{at_model}" for c in home.region.prefill_clusters}
        capacity |= {
            ("prefill", names[c.name]): c.num_instances for c in home.region.prefill_clusters
        }
        capacity |= {("link", link.name): link.bytes_per_s for link in home.region.links}
        capacity |= {("uplink", up.name): up.bytes_per_s for up in joint.uplinks}
        for part in plan.resources(Mode.EXACT):
            if part.kind == "link":
                keys = [("link", part.name), *_uplinks(joint.uplinks, home, part.name)]
            elif part.name in names:
                keys = [("prefill", names[part.name])]
            else:
                continue  # The PD cluster belongs to the home alone.
            used |= {key: used.get(key, 0.0) + part.need * rps for key in keys}
    rows = []
    for (kind, name), size in capacity.items():
        amount = used.get((kind, name), 0.0)
        scale = 1.0 if kind == "prefill" else GBIT_PER_S
        rows.append(
            {
                "kind": kind,
                "name": name,
                "unit": "instances" if kind == "prefill" else "Gbit/s",
                "size": size / scale,
                "used": amount / scale,
                "utilisation": amount / size if size else 0.0,
            }
        )
    return rows


def _uplinks(uplinks: tuple[Uplink, ...], home: Home, link: str) -> list[tuple[str, str]]:
    (found,) = (k for k in home.region.links if k.name == link)
    return [("uplink", up.name) for up in uplinks if up.carries(found)]
