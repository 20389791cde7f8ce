"""How fast the replay is, and what the ready-made studies find, against their goals.

Run: python tests/bench/bench_simulate.py [--json FILE] [--smoke] [--rounds N] [--requests N]
[--scale N] [--only NAME ...] [--trace FILE]. One process on one core.

`speed`: requests a second of computing, by policy, in CPU time; the median round is printed. The
case study's region at 80% load; the goal is 20,000 requests/s with the router deciding. The other
names are those of `prfaas simulate study`; with --trace the study `overload` plays that trace
besides.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from smoke import add_smoke

from deploy.plan.simulate.studies import STUDIES, overload
from deploy.plan.simulate.study import Study
from deploy.plan.solve.case_study import case_study_region
from deploy.plan.trace import load_trace
from kvmanager.config_files.units import GBIT_PER_S
from scheduler.live.admission import AdmissionConfig
from scheduler.planning.solve import best_plan
from scheduler.planning.throughput import Mode
from scheduler.replay.driver import replay
from scheduler.replay.links import LinkChange, RateSchedule
from scheduler.replay.model import Policy, ReplayModel, Routing
from scheduler.replay.workload import Phase, Workload, drawn

GOAL_RPS: Final = 20_000.0
LOAD: Final = 0.8
SPEED: Final = "speed"


def speed_cases(num_requests: int) -> tuple[Workload, dict[str, tuple[ReplayModel, Policy]]]:
    """The traffic, and what is timed."""
    region = case_study_region(4, 8)
    region = replace(region, links=(replace(region.links[0], rtt_s=0.02),))
    rate_rps = LOAD * best_plan(region).system_rps(Mode.EXACT)
    span_s = num_requests / rate_rps
    phase = Phase(
        duration_s=span_s,
        rate_rps=rate_rps,
        lengths=region.traffic.lengths,
        output_tokens=region.traffic.output_tokens,
    )
    still = ReplayModel(region=region)
    full = 100 * GBIT_PER_S
    changes = [LinkChange(at_s=span_s / 2, bytes_per_s=full / 2)]
    moving = replace(still, schedules={region.links[0].name: RateSchedule.of(full, changes)})
    return drawn([phase], 1), {
        "static threshold": (still, Policy(routing=Routing.STATIC, order=None)),
        "router": (still, Policy()),
        "router, first come first served": (still, Policy(order=None)),
        "router and admission": (still, Policy(admission=AdmissionConfig(ttft_slo_s=30))),
        "router, link monitored 4 times a second": (moving, Policy()),
    }


def speed(rounds: int, num_requests: int) -> list[dict[str, Any]]:
    """Time every case."""
    workload, cases = speed_cases(num_requests)
    results = []
    for name, (model, policy) in cases.items():
        replay(model, workload, policy)
        rates = []
        for _ in range(rounds):
            began_s = time.process_time()
            replay(model, workload, policy)
            rates.append(len(workload) / (time.process_time() - began_s))
        median = statistics.median(rates)
        goal = f"   goal {GOAL_RPS:,.0f}" if name == "router" else ""
        print(f"{name:42} {median:9,.0f} requests/s   most {max(rates):9,.0f}{goal}", flush=True)
        results.append({"name": name, "requests_per_s": rates})
    return results


def told(name: str, study: Study, seconds: float) -> dict[str, Any]:
    """Print what a study found; the same as raw numbers."""
    print(f"\n{name} ({seconds:.0f} s)")
    for goal in study.goals:
        verdict = "met   " if goal.met else "MISSED"
        print(f"  {verdict} {goal.name}: {goal.found:.4g} ({goal.wanted})", flush=True)
    goals = [
        {"name": g.name, "wanted": g.wanted, "found": g.found, "met": g.met} for g in study.goals
    ]
    return {"rows": list(study.rows), "goals": goals, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the raw numbers here")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--scale", type=float, default=1.0, help="length of the studies")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=[SPEED, *STUDIES], default=[SPEED, *STUDIES])
    parser.add_argument("--trace", type=Path, help="for overload: a trace, at double speed")
    add_smoke(parser, rounds=1, requests=500, scale=0.01)
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    if SPEED in arguments.only:
        found[SPEED] = speed(arguments.rounds, arguments.requests)
    studies = {name: study for name, study in STUDIES.items() if name in arguments.only}
    if arguments.trace and "overload" in studies:
        studies["overload with a trace"] = partial(overload, prompts=load_trace(arguments.trace))
    for name, study in studies.items():
        began_s = time.process_time()
        result = study(arguments.seed, arguments.scale)
        found[name] = told(name, result, time.process_time() - began_s)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1, default=float))


if __name__ == "__main__":
    main()
