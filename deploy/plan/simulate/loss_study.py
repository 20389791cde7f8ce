"""The study `loss`: a site is lost for a while. How long until requests and plans follow?

Three PD clusters and two prefill clusters with links between all of them; a PD cluster or a prefill
cluster is lost. A second region has one PD cluster and a long-term loop, whose plan is to leave the
lost prefill cluster out, and to take it in again when it is back.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np

from deploy.plan.simulate.study import PERIOD_S, Goal, Study
from deploy.plan.solve.case_study import (
    DECODE_SLOTS,
    H20_PREFILL,
    H200_PREFILL,
    KV,
    STEP_S,
    case_study_region,
)
from kvmanager.config_files.units import GBIT_PER_S
from scheduler.live.long_term.loop import LongTermConfig
from scheduler.planning.joint import JointRegion
from scheduler.planning.region_model import (
    Home,
    Link,
    PdClusterModel,
    PrefillClusterModel,
    Region,
    Uplink,
)
from scheduler.planning.solve import best_plan
from scheduler.planning.throughput import Mode
from scheduler.replay.driver import replay
from scheduler.replay.jobs import Fate
from scheduler.replay.model import Policy, ReplayModel, Slo
from scheduler.replay.results import Outcome
from scheduler.replay.workload import Phase, at_homes, drawn
from scheduler.routing.spill import Spill

LOAD: Final = 0.4
"""The demand as a share of the highest rate: what is left of the region can serve it."""
BIN_S: Final = 10.0
"""The time over which requests within the objective are counted."""
SPILLS: Final[tuple[Spill, ...]] = ("never", "overflow")


def loss(seed: int, scale: float) -> Study:
    """Requests within the objective while a cluster is away, and when the plan follows."""
    from_s, until_s, end_s = 600 * scale, 1200 * scale, 1800 * scale
    joint, region = _sites()
    rows: list[dict[str, Any]] = []
    goals: list[Goal] = []
    pictures: dict[str, Outcome] = {}
    level = LOAD * min(joint.levels.values())
    works = [
        drawn([_phase(home.region, level * home.rate_rps, end_s)], seed + place)
        for place, home in enumerate(joint.homes)
    ]
    for lost in ("north", "east"):
        model = ReplayModel(region=region, joint=joint, lost={lost: (from_s, until_s)}, slo=_SLO)
        for spill in SPILLS:
            outcome = replay(model, at_homes(works), Policy(name=spill, spill=spill), seed=seed)
            during = outcome.summary(from_s, until_s)
            under_way = _under_way(outcome, from_s)
            rows.append(
                {
                    "lost": lost,
                    "spill": spill,
                    "good_share": during.good_share,
                    "lost_requests": during.num_lost + _num_lost_before(outcome, from_s),
                    "under_way": under_way,
                    "fell_back": _num_fell_back(outcome),
                    "recovered_s": _recovered_s(outcome, from_s),
                }
            )
            if spill == "overflow":
                goals += _goals(rows[-1])
                pictures[f"{lost} is lost"] = outcome
    plan_row, plan_goals, pictured = _plan_follows(seed, from_s, until_s, end_s)
    pictures["plan"] = pictured
    return Study([*rows, plan_row], [*goals, *plan_goals], pictures)


_SLO: Final = Slo(ttft_s=30.0, tbt_s=2 * STEP_S)


def _sites() -> tuple[JointRegion, Region]:
    traffic = case_study_region(4, 8).traffic
    sources = tuple(PrefillClusterModel(name, 4, H200_PREFILL) for name in ("north", "south"))
    pds = [
        PdClusterModel(name, 8, H20_PREFILL, DECODE_SLOTS, STEP_S)
        for name in ("east", "west", "mid")
    ]
    regions = [
        Region(
            sources,
            (pd,),
            tuple(Link(source.name, pd.name, 50 * GBIT_PER_S, 0.02) for source in sources),
            KV,
            traffic,
        )
        for pd in pds
    ]
    joint = JointRegion(
        tuple(Home(region, 2.0) for region in regions),
        (Uplink("north", "egress", 100 * GBIT_PER_S),),
    )
    links = tuple(link for region in regions for link in region.links)
    return joint, Region(sources, tuple(pds), links, KV, traffic)


def _phase(region: Region, rate_rps: float, duration_s: float) -> Phase:
    traffic = region.traffic
    return Phase(
        duration_s=duration_s,
        rate_rps=rate_rps,
        lengths=traffic.lengths,
        output_tokens=traffic.output_tokens,
    )


def _goals(row: dict[str, Any]) -> list[Goal]:
    lost, recovered_s = row["lost"], row["recovered_s"]
    goals = [
        Goal(
            f"{lost} is lost: seconds until 90% keep the objective",
            "at most 120",
            recovered_s,
            recovered_s <= 120,
        ),
    ]
    # Nothing decodes in a prefill cluster, so no request need be lost with it.
    limit = row["under_way"] if lost == "east" else 0
    found = row["lost_requests"]
    goals.append(
        Goal(f"{lost} is lost: requests lost with it", f"at most {limit}", found, found <= limit)
    )
    return goals


def _under_way(outcome: Outcome, at_s: float) -> int:
    """The requests that were to decode in the first PD cluster at that time."""
    return sum(
        job.pd == 0 and job.arrival_s <= at_s and not job.done_s <= at_s for job in outcome.jobs
    )


def _num_lost_before(outcome: Outcome, at_s: float) -> int:
    return sum(job.fate is Fate.LOST and job.arrival_s < at_s for job in outcome.jobs)


def _num_fell_back(outcome: Outcome) -> int:
    return sum(job.fell_back for job in outcome.jobs)


def _recovered_s(outcome: Outcome, lost_s: float) -> float:
    """The seconds after the loss from which on 90% of the requests that arrive keep the objective,
    as they do until the last one.
    """
    edges = np.arange(lost_s, outcome.span_s, BIN_S).tolist()
    bad = [at_s for at_s in edges if outcome.summary(at_s, at_s + BIN_S).good_share < 0.9]
    return float(bad[-1]) + BIN_S - lost_s if bad else 0.0


def _plan_follows(
    seed: int, from_s: float, until_s: float, end_s: float
) -> tuple[dict[str, Any], list[Goal], Outcome]:
    """When the thresholds of a region with a long-term loop leave a lost prefill cluster out."""
    base = case_study_region(4, 8)
    far, link = base.prefill_clusters[0], base.links[0]
    region = replace(
        base,
        prefill_clusters=(replace(far, name="north"), replace(far, name="south")),
        links=tuple(replace(link, source=name) for name in ("north", "south")),
    )
    rate_rps = LOAD * best_plan(region).system_rps(Mode.EXACT)
    model = ReplayModel(region=region, lost={"north": (from_s, until_s)}, slo=_SLO)
    period_s = min(PERIOD_S, from_s / 2)
    policy = Policy(name="plan", long_term=LongTermConfig(period_s=period_s))
    outcome = replay(model, drawn([_phase(region, rate_rps, end_s)], seed), policy, seed=seed)
    at_s, south = np.array(outcome.series.at_s), outcome.series.array("threshold:south")
    during = (at_s > from_s) & (at_s <= until_s)
    before = south[at_s <= from_s][-1]
    followed = at_s[during & (south != before)]
    after_s = float(followed[0] - from_s) if len(followed) else float("nan")
    row = {
        "lost": "north",
        "spill": "one PD cluster",
        "good_share": outcome.summary(from_s, until_s).good_share,
        "lost_requests": outcome.summary().num_lost,
        "under_way": 0,
        "fell_back": _num_fell_back(outcome),
        "recovered_s": _recovered_s(outcome, from_s),
        "plan_followed_s": after_s,
    }
    # An instance counts as away after half a period, so a plan may need one period and a half.
    limit_s = 2 * period_s
    title = "north is lost: seconds until the plan's thresholds follow"
    goal = Goal(title, f"at most {limit_s:g}", after_s, after_s <= limit_s)
    return row, [goal], outcome
