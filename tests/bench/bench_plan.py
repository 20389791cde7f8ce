"""How fast the planner is: the case study, the grid search, the simulation, the help.

Run: python tests/bench/bench_plan.py [--json FILE] [--smoke] [--rounds N]. One process on one core;
medians over the rounds. Limits are the ones that the planner was built for.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from smoke import add_smoke

from deploy.plan.solve.case_study import case_study, case_study_region
from scheduler.planning.load.study import simulate_plan
from scheduler.planning.solve import best_plan
from scheduler.planning.threshold_search import search_thresholds, threshold_grid
from scheduler.planning.throughput import Mode

COMMAND = [str(Path(sys.executable).with_name("prfaas")), "plan"]


def timed(run: Callable[[], object], rounds: int) -> list[float]:
    """Seconds of each round."""
    seconds = []
    for _ in range(rounds):
        began_s = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began_s)
    return seconds


def started(*words: str) -> None:
    subprocess.run([*COMMAND, *words], check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the raw numbers here")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=100_000, help="simulated")
    add_smoke(parser, rounds=1, requests=1000)
    arguments = parser.parse_args()
    region = case_study_region(4, 8)
    grid = threshold_grid(region, 1000)
    plan = best_plan(region)
    rate_rps = 0.9 * plan.system_rps(Mode.EXACT)
    cases: list[tuple[str, float, Callable[[], object]]] = [
        ("case study, after imports", 1.0, lambda: [case_study(mode) for mode in Mode]),
        (
            f"search of {len(grid)} thresholds x 13 divisions",
            0.05,
            lambda: search_thresholds(region, Mode.EXACT, grid, np.linspace(0, 7.9, 13)),
        ),
        (
            f"simulation of {arguments.requests:,} requests",
            5.0e-5 * arguments.requests,
            lambda: simulate_plan(plan, rate_rps, num_requests=arguments.requests),
        ),
        ("prfaas plan --help, whole process", 0.3, lambda: started("--help")),
        ("prfaas plan solve --help, whole process", 0.3, lambda: started("solve", "--help")),
        ("prfaas plan case-study, whole process", float("nan"), lambda: started("case-study")),
    ]
    results = []
    for name, goal_s, run in cases:
        run()
        seconds = timed(run, arguments.rounds)
        median_s = statistics.median(seconds)
        goal = "" if np.isnan(goal_s) else f"   goal {1000 * goal_s:.0f} ms"
        print(f"{name:45} {1000 * median_s:9.1f} ms{goal}")
        results.append({"name": name, "goal_s": None if not goal else goal_s, "seconds": seconds})
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
