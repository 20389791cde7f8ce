"""The scheduler of one gateway as a region grows: cost of a decision, state, traffic, lost sites.

Run: python tests/bench/bench_scale.py [--json FILE] [--smoke] [--sizes CLUSTERS:NODES:RPS ...]
[--seconds N].
`scheduler.replay` plays each region in virtual time. What decides is the object that a gateway
runs, and it sees the region through reports, as a gateway does: one a second from each cluster.
Every call of it is timed, in CPU time. Two fifths of the clusters are prefill clusters; each PD
cluster has links to four of them. At half of the time a prefill cluster and a PD cluster are lost.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from smoke import add_smoke

from deploy.plan.solve.case_study import (
    DECODE_SLOTS,
    H20_PREFILL,
    H200_PREFILL,
    KV,
    LENGTHS,
    OUTPUT_TOKENS,
    STEP_S,
)
from kvmanager.config_files.units import GBIT_PER_S
from scheduler.live.core import LiveScheduler
from scheduler.planning.joint import JointRegion
from scheduler.planning.lengths import EmpiricalLengths, mean_tokens
from scheduler.planning.region_model import (
    Home,
    Link,
    PdClusterModel,
    PrefillClusterModel,
    Region,
    Traffic,
    Uplink,
)
from scheduler.replay.driver import replay
from scheduler.replay.model import Policy, ReplayModel
from scheduler.replay.recording import entry_frame, header_of, scheduler_of
from scheduler.replay.results import Outcome
from scheduler.replay.workload import Phase, at_homes, drawn

SIZES: Final = ("5:40:10", "25:500:125", "100:2000:500")
GOAL_US: Final = 200.0
LINKS_PER_PD: Final = 4
REPORT_EVERY_S: Final = 1.0
FRAMED: Final = 20
"""One of so many events is framed as the flight recorder would write it."""


@dataclass
class Times:
    """What the scheduler was told and asked, with the CPU time that it took."""

    ns: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    frame_bytes: list[int] = field(default_factory=list)
    report_bytes: int = 0
    num_reports: int = 0
    routed: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """The times of decisions for each cluster, prefill or PD."""
    live: LiveScheduler | None = None
    num_events: int = 0


@contextmanager
def timed() -> Iterator[Times]:
    """Times every call of `LiveScheduler.take`."""
    found, take = Times(), LiveScheduler.take

    def taking(live: LiveScheduler, event: Any, now_s: float) -> Any:
        began_ns = time.thread_time_ns()
        answer = take(live, event, now_s)
        spent_ns = time.thread_time_ns() - began_ns
        name = type(event).__name__
        found.live = live
        found.ns[name].append(spent_ns)
        found.num_events += 1
        if name == "ReportHeard":
            found.num_reports += 1
            found.report_bytes += len(msgspec.msgpack.encode(event.report))
        else:
            if found.num_events % FRAMED == 0:
                found.frame_bytes.append(len(entry_frame(event, answer, now_s)))
            if name == "RouteAsked":
                found.routed[answer.pd].append(now_s)
                found.routed[answer.target].append(now_s)
        return answer

    LiveScheduler.take = taking  # type: ignore[method-assign, assignment]
    try:
        yield found
    finally:
        LiveScheduler.take = take  # type: ignore[method-assign]


def region_of(num_clusters: int, num_nodes: int, rate_rps: float) -> JointRegion:
    """A region with so many nodes, each an instance, and the case study's hardware and traffic."""
    num_sources = max(1, round(0.4 * num_clusters))
    num_pds = num_clusters - num_sources
    each = max(2, num_nodes // num_clusters)
    drawn_lengths = LENGTHS.quantile((np.arange(2000) + 0.5) / 2000)
    lengths = EmpiricalLengths.of(drawn_lengths)
    traffic = Traffic(lengths, OUTPUT_TOKENS, mean_tokens(lengths))
    sources = [PrefillClusterModel(f"prefill-{i}", each, H200_PREFILL) for i in range(num_sources)]
    homes = []
    for i in range(num_pds):
        # Neighbours share most of their prefill clusters, and no cluster is apart from the others.
        first = i * num_sources // num_pds
        near = [sources[(first + k) % num_sources] for k in range(min(LINKS_PER_PD, num_sources))]
        pd = PdClusterModel(f"pd-{i}", each, H20_PREFILL, DECODE_SLOTS, STEP_S)
        links = tuple(Link(c.name, pd.name, 100 * GBIT_PER_S, 0.02) for c in near)
        homes.append(Home(Region(tuple(near), (pd,), links, KV, traffic), rate_rps / num_pds))
    uplinks = tuple(Uplink(c.name, "egress", 200 * GBIT_PER_S) for c in sources)
    return JointRegion(tuple(homes), uplinks)


def model_of(joint: JointRegion, **fields: Any) -> ReplayModel:
    """The region as a replay takes it."""
    sources = {c.name: c for home in joint.homes for c in home.region.prefill_clusters}
    region = replace(
        joint.homes[0].region,
        prefill_clusters=tuple(sources.values()),
        pd_clusters=tuple(home.region.pd_clusters[0] for home in joint.homes),
        links=tuple(link for home in joint.homes for link in home.region.links),
    )
    return ReplayModel(region=region, joint=joint, **fields)


def plan_s(joint: JointRegion) -> float:
    """The CPU time of all shares and plans, as the long-term loop works them out."""
    began_s = time.process_time()
    _ = joint.plans
    return time.process_time() - began_s


def without(joint: JointRegion, source: str) -> JointRegion:
    """The region after a prefill cluster was lost."""
    homes = []
    for home in joint.homes:
        region = home.region
        kept = tuple(c for c in region.prefill_clusters if c.name != source)
        links = tuple(link for link in region.links if link.source != source)
        homes.append(replace(home, region=replace(region, prefill_clusters=kept, links=links)))
    return JointRegion(tuple(homes), joint.uplinks)


def state_bytes(live: LiveScheduler) -> int:
    """The memory of the scheduler's state: that of a copy, made as of a recording."""
    header = header_of(live, "", 0.0).packed()
    gc.collect()
    tracemalloc.start()
    copy = scheduler_of(header)
    gc.collect()
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del copy
    return used


def measured(num_clusters: int, num_nodes: int, rate_rps: float, seconds: float) -> dict[str, Any]:
    """One size of region."""
    joint = region_of(num_clusters, num_nodes, rate_rps)
    planned_s = plan_s(joint)
    again = without(joint, "prefill-0")
    replanned_s = plan_s(again) if again.homes[0].region.prefill_clusters else None
    # Between two reports.
    lost_s = seconds / 2 + REPORT_EVERY_S / 2
    lost = dict.fromkeys(("prefill-0", "pd-0"), (lost_s, seconds))
    model = model_of(joint, lost=lost)
    traffic = joint.homes[0].region.traffic
    works = [
        drawn(
            [
                Phase(
                    duration_s=seconds,
                    rate_rps=home.rate_rps,
                    lengths=traffic.lengths,
                    output_tokens=traffic.output_tokens,
                )
            ],
            seed,
        )
        for seed, home in enumerate(joint.homes)
    ]
    policy = Policy(report_every_s=REPORT_EVERY_S)
    with timed() as times:
        outcome = replay(model, at_homes(works), policy)
    assert times.live is not None
    return {
        "clusters": num_clusters,
        "nodes": num_nodes,
        "rate_rps": rate_rps,
        "seconds": seconds,
        "levels": sorted(joint.levels.values()),
        "plan_cpu_s": planned_s,
        "replan_cpu_s": replanned_s,
        "state_bytes": state_bytes(times.live),
        "report_bytes_per_s": times.report_bytes / times.num_reports * num_clusters,
        "loss": loss_of(times, outcome, lost_s),
        **costs_of(times, len(outcome.jobs), rate_rps),
    }


def costs_of(times: Times, num_requests: int, rate_rps: float) -> dict[str, Any]:
    """CPU time of a decision, of all that a request brings, and of a report."""
    route_us = [ns / 1000 for ns in times.ns["RouteAsked"]]
    reports_us = [ns / 1000 for ns in times.ns["ReportHeard"]]
    others = [name for name in times.ns if name != "ReportHeard"]
    request_us = sum(sum(times.ns[name]) for name in others) / 1000 / num_requests
    per_request = sum(len(times.ns[name]) for name in others) / num_requests
    return {
        "decision_us": {
            "mean": statistics.fmean(route_us),
            "p50": float(np.quantile(route_us, 0.5)),
            "p99": float(np.quantile(route_us, 0.99)),
        },
        "report_us": statistics.fmean(reports_us),
        "request_us": request_us,
        "events_per_request": per_request,
        "event_bytes_per_s": statistics.fmean(times.frame_bytes) * per_request * rate_rps,
        "by_event_us": {
            name: sum(spent) / 1000 / num_requests for name, spent in sorted(times.ns.items())
        },
        "decisions_per_s": 1e6 / statistics.fmean(route_us),
        "requests_per_s_of_a_core": 1e6 / request_us,
    }


def loss_of(times: Times, outcome: Outcome, lost_s: float) -> dict[str, Any]:
    """How long after the loss requests were still given to the clusters, and what came of it."""
    found: dict[str, Any] = {}
    for name in ("prefill-0", "pd-0"):
        late = [at_s for at_s in times.routed[name] if at_s > lost_s]
        found[name] = {
            "decisions_after_loss": len(late),
            "until_s": max(late) - lost_s if late else 0.0,
        }
    before, after = outcome.summary(lost_s / 2, lost_s), outcome.summary(lost_s)
    found["lost_requests"] = outcome.summary().num_lost
    found["ttft_p90_before_s"], found["ttft_p90_after_s"] = before.ttft.p90_s, after.ttft.p90_s
    return found


def show(row: dict[str, Any]) -> None:
    decision, loss = row["decision_us"], row["loss"]
    print(
        f"{row['clusters']} clusters, {row['nodes']} nodes, {row['rate_rps']:g} requests/s\n"
        f"  decision      mean {decision['mean']:.0f} us, median {decision['p50']:.0f}, "
        f"p99 {decision['p99']:.0f}; goal {GOAL_US:.0f}; "
        f"{row['decisions_per_s']:,.0f}/s of a core\n"
        f"  request       {row['request_us']:.0f} us for {row['events_per_request']:.1f} events: "
        f"{row['requests_per_s_of_a_core']:,.0f} requests/s fill a core\n"
        f"  report        {row['report_us']:.0f} us\n"
        f"  state         {row['state_bytes'] / 1e6:.1f} MB\n"
        f"  reports       {row['report_bytes_per_s'] / 1e3:,.0f} kB/s, "
        f"recorded events {row['event_bytes_per_s'] / 1e3:,.0f} kB/s\n"
        f"  plan          {row['plan_cpu_s']:.1f} CPU s; without a prefill cluster "
        f"{row['replan_cpu_s'] or 0:.1f}\n"
        f"  loss          last decision for the prefill cluster {_late(loss['prefill-0'])}, "
        f"for the PD cluster {_late(loss['pd-0'])}; {loss['lost_requests']} requests lost; "
        f"P90 TTFT {loss['ttft_p90_before_s']:.1f} s before, {loss['ttft_p90_after_s']:.1f} s after"
    )


def _late(found: dict[str, Any]) -> str:
    return f"{found['until_s']:.1f} s after ({found['decisions_after_loss']} in vain)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the raw numbers here")
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="CLUSTERS:NODES:RPS")
    parser.add_argument("--seconds", type=float, default=60.0, help="virtual time of each size")
    add_smoke(parser, sizes=("5:40:8",), seconds=20.0)
    arguments = parser.parse_args()
    results = []
    for size in arguments.sizes:
        num_clusters, num_nodes, rate_rps = size.split(":")
        row = measured(int(num_clusters), int(num_nodes), float(rate_rps), arguments.seconds)
        show(row)
        results.append(row)
    if arguments.json:
        arguments.json.write_text(json.dumps({"goal_us": GOAL_US, "sizes": results}, indent=1))


if __name__ == "__main__":
    main()
