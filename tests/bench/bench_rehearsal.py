"""The paper's case study on real engines at the pace of GPUs: live, simulated and planned.

    python tests/bench/bench_rehearsal.py [--rates 0.74 1.09] [--json FILE] [--add] [--take FILE]

`prfaas rehearse` plays the shipped example (2 H200 and 4 H20 instances, half of the paper's link)
and what it is compared with at each rate below 95% of their planned capacity: the same number of
H20 instances alone (homogeneous), and all prefill on the H200 (naive). Void runs are played once
more. The simulator then plays more rates, for the curves. --add keeps the runs that the result has
already; --take adds what `prfaas rehearse --json` printed before.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from smoke import add_smoke

from deploy.lab.rehearse.columns import column, simulated
from deploy.lab.rehearse.preparing import prepare
from deploy.lab.rehearse.traffic import Wanted
from scheduler.planning.throughput import Mode
from scheduler.replay.driver import replay

EXAMPLE: Final = Path(__file__).resolve().parents[2] / "deploy/lab/rehearse/examples/rehearsal.yaml"
COMPARED: Final = ("homogeneous", "naive")
MOST_LOAD: Final = 0.95
CURVE: Final = (0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95)
"""Loads of the simulated curves, shares of each region's planned capacity."""


def rows_of(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The regions of what a rehearsal printed."""
    keys = ("plan", "simulated", "live", "pace", "num_prefill", "threshold_tokens", "scale")
    return [
        {"region": name if name in COMPARED else "PrfaaS-PD"} | {key: one[key] for key in keys}
        for name, one in document["regions"].items()
    ]


def rehearse(file: Path, rate: float, requests: int, compared: Sequence[str]) -> dict[str, Any]:
    """What `prfaas rehearse` prints. SystemExit if it fails for another reason than its pace."""
    words = [sys.executable, "-m", "deploy.cli", "rehearse", str(file)]
    words += ["--rate", str(rate), "--requests", str(requests)]
    words += ["--again", "--json"]
    for name in compared:
        words += ["--compare", name]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
    if not done.stdout:
        raise SystemExit(f"rehearsal at {rate} requests/s failed with status {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def curves(file: Path, compared: Sequence[str], requests: int) -> list[dict[str, Any]]:
    """The simulated columns of each region over its load, and its planned capacity."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        regions = prepare(file, compared, Wanted(), Path(folder), None).rehearsals
        for place, region in enumerate(regions):
            capacity = region.plan.system_rps(Mode.EXACT)
            name = compared[place - 1] if place else "PrfaaS-PD"
            for load in CURVE:
                wanted = Wanted(rate_rps=load * capacity, num_requests=requests)
                run = prepare(file, compared, wanted, Path(folder), None)
                outcome = replay(region.model, run.workload, region.policy, seed=wanted.seed)
                served = column(simulated(outcome), run.workload.arrivals_s[-1], region.scale)
                found.append(
                    {"region": name, "capacity_rps": capacity, "rate": load * capacity}
                    | served.document()
                )
    return found


def smaller(folder: Path) -> Path:
    """The example with half of its instances, so that three engines are enough."""
    whole = yaml.safe_load(EXAMPLE.read_text())
    whole["prefill_clusters"][0]["instances"] = 1
    whole["pd_clusters"][0]["instances"] = 2
    whole["links"][0]["rate"] = "25Gbit"
    whole["rehearsal"]["slowdown"] = 1.0
    file = folder / "smaller.yaml"
    file.write_text(yaml.safe_dump(whole))
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", type=float, nargs="*", default=[0.74, 1.09], help="requests/s")
    parser.add_argument("--requests", type=int, default=300, help="of each run")
    parser.add_argument("--curve", type=int, default=1500, help="requests of a simulated point")
    parser.add_argument("--regions", type=int, default=3, help="the first 1, 2 or 3 of them")
    parser.add_argument("--add", action="store_true", help="keep the runs of --json")
    parser.add_argument("--take", type=Path, nargs="*", default=[], help="earlier rehearsals")
    parser.add_argument("--json", type=Path, help="write the raw numbers here")
    add_smoke(parser, rates=[0.4], requests=40, curve=100, regions=1)
    arguments = parser.parse_args()
    compared = COMPARED[: arguments.regions - 1]
    rows: list[dict[str, Any]] = []
    if arguments.add:
        rows = json.loads(arguments.json.read_text())["rows"]
    for file in arguments.take:
        rows += rows_of(json.loads(file.read_text()))
    with tempfile.TemporaryDirectory() as folder:
        file = smaller(Path(folder)) if arguments.smoke else EXAMPLE
        curve = curves(file, compared, arguments.curve)
        capacity = {row["region"]: row["capacity_rps"] for row in curve}
        for rate in arguments.rates:
            names = [name for name in compared if rate < MOST_LOAD * capacity[name]]
            rows += rows_of(rehearse(file, rate, arguments.requests, names))
    kept = {"rows": rows, "curve": curve}
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(kept, indent=1))
    for row in rows:
        live, said = row["live"], row["simulated"]
        state = f"VOID: {'; '.join(row['pace']['reasons'])}" if row["pace"]["reasons"] else "paced"
        print(
            f"{row['region']:12} {live['offered_rps']:.2f} requests/s: TTFT P90 live "
            f"{live['ttft_p90_s']:.2f} s, simulated {said['ttft_p90_s']:.2f} s; {state}"
        )
    if any(row["pace"]["reasons"] or row["live"]["failed"] for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
