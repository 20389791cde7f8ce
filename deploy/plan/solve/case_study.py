"""The paper's case study (Prefill-as-a-Service, section 4): its inputs, its results, and ours.

The paper prints the traffic, the cluster sizes, the link and four points of the H200's prefill. It
does not print the H20's prefill, the decode speed and the exact KVCache size. The values for these
are derived from its Tables 5 and 6, and marked as derived.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvmanager.config_files.units import GBIT_PER_S
from scheduler.planning.curves import Curve
from scheduler.planning.lengths import LogNormalLengths, mean_tokens
from scheduler.planning.plan import Plan
from scheduler.planning.region_model import (
    KvSize,
    Link,
    PdClusterModel,
    PrefillClusterModel,
    Region,
    Traffic,
)
from scheduler.planning.threshold_search import best_threshold_plan, threshold_plan
from scheduler.planning.throughput import Mode

MIB: Final = 2**20

LENGTHS: Final = LogNormalLengths(9.90, 1.00, 128, 131072)
OUTPUT_TOKENS: Final = 1024
LINK_GBPS: Final = 100.0

H200_PREFILL: Final = Curve.quadratic(0.39180, 4.2061e-5, 9.937e-11)
"""Derived: a curve near Table 5's four points that gives Table 6; seconds over tokens."""
H20_PREFILL: Final = Curve.quadratic(0.4488, 1.3177e-4, 2.7035e-10)
"""Derived from Table 6; seconds over tokens."""
KV: Final = KvSize(Curve.quadratic(173.93 * MIB, 17280), 173.93 * MIB)
"""Derived from Table 5: 15 MLA layers of 576 values of 2 bytes, and a fixed recurrent state. The
sizes that it prints for 1K, 8K, 32K and 128K are those of 1,024, 8,192, 32,000 and 130,000 tokens.
"""
DECODE_SLOTS: Final = 20
STEP_S: Final = 0.025
"""The SLO of 40 tokens/s, in seconds per token. The 20 slots of an instance are derived from Table
6.
"""


@dataclass(frozen=True)
class Deployment:
    """One column of Table 6: what it is, what the paper prints, and the plan found here."""

    key: str
    title: str
    printed: dict[str, float]
    plan: Plan


def case_study_region(num_prfaas: int, num_local: int, link_gbps: float = LINK_GBPS) -> Region:
    """H200 prefill instances (0: no such cluster), H20 local instances, and the link."""
    remote = (PrefillClusterModel("h200", num_prfaas, H200_PREFILL),) if num_prfaas else ()
    links = (Link("h200", "h20", link_gbps * GBIT_PER_S),) if num_prfaas else ()
    return Region(
        remote,
        (PdClusterModel("h20", num_local, H20_PREFILL, DECODE_SLOTS, STEP_S),),
        links,
        KV,
        Traffic(LENGTHS, OUTPUT_TOKENS, mean_tokens(LENGTHS)),
    )


def deployments(mode: Mode) -> list[Deployment]:
    """The three deployments of Table 6, each with its best plan in this mode."""
    # With 8 GPUs an instance: 32 H200 and 64 H20 GPUs, and 96 H20 GPUs for the baseline (4.1).
    both = case_study_region(4, 8)
    alone = case_study_region(0, 12)
    return [
        Deployment(
            "prfaas_pd",
            "PrfaaS-PD",
            {
                "threshold_tokens": 19_400,
                "num_prfaas": 4,
                "num_prefill": 3,
                "num_decode": 5,
                "offload_fraction": 0.496,
                "theta_prfaas_rps": 1.61,
                "theta_prefill_rps": 1.64,
                "theta_decode_rps": 3.91,
                "throughput_rps": 3.24,
                "ttft_mean_s": 2.22,
                "ttft_p90_s": 3.51,
                "egress_gbps": 13.0,
                "ratio_vs_homogeneous": 1.54,
            },
            best_threshold_plan(both, mode),
        ),
        Deployment(
            "homogeneous_pd",
            "homogeneous PD",
            {
                "num_prefill": 9,
                "num_decode": 3,
                "theta_prefill_rps": 2.11,
                "theta_decode_rps": 2.35,
                "throughput_rps": 2.11,
                "ttft_mean_s": 4.44,
                "ttft_p90_s": 9.73,
                "ratio_vs_homogeneous": 1.0,
            },
            best_threshold_plan(alone, mode),
        ),
        Deployment(
            "naive_heterogeneous",
            "naive heterogeneous",
            {
                "num_prfaas": 4,
                "num_decode": 8,
                "theta_prfaas_rps": 2.45,
                "theta_decode_rps": 6.25,
                "throughput_rps": 2.45,
                "ttft_mean_s": 1.74,
                "ttft_p90_s": 3.51,
                "ratio_vs_homogeneous": 1.16,
            },
            # Naive: every prompt is offloaded, and all local instances decode.
            threshold_plan(both, 0.0, 0.0),
        ),
    ]


def figures(plan: Plan, mode: Mode, homogeneous_rps: float) -> dict[str, float | int | None]:
    """The numbers of Table 6 for one plan; None where a deployment has no such part.

    `egress_gbps` is the mean over the link when the prefill cluster runs at its own capacity.
    """
    parts = {(part.kind, part.name): part for part in plan.resources(mode)}
    remote = parts.get(("prefill", "h200"))
    link = parts.get(("link", "h200 to h20"))
    local, decode = parts[("prefill", "h20")], parts[("decode", "h20")]
    throughput = plan.system_rps(mode)
    ttft = plan.empty_ttft()
    theta_remote = egress_gbps = None
    if remote is not None and link is not None:
        # Equation 3: prefill and egress are parts of their own here.
        theta_remote = min(remote.theta_rps, link.theta_rps)
        per_offloaded = link.need / link.share if link.share else 0.0
        egress_gbps = theta_remote * per_offloaded / GBIT_PER_S
    return {
        "threshold_tokens": plan.threshold_tokens if remote is not None else None,
        "num_prfaas": int(remote.capacity) if remote is not None else 0,
        "num_prefill": int(local.capacity),
        "num_decode": int(decode.capacity),
        "offload_fraction": plan.offload_fraction,
        "mean_offloaded_tokens": plan.mean_offloaded_tokens,
        "theta_prfaas_rps": theta_remote,
        "theta_prefill_rps": local.theta_rps if local.capacity else None,
        "theta_decode_rps": decode.capacity * DECODE_SLOTS / (STEP_S * OUTPUT_TOKENS),
        "throughput_rps": throughput,
        "ttft_mean_s": ttft.mean_s,
        "ttft_p90_s": ttft.p90_s,
        "egress_gbps": egress_gbps,
        "ratio_vs_homogeneous": throughput / homogeneous_rps,
    }


def case_study(mode: Mode) -> dict[str, dict[str, float | int | None]]:
    """`figures` of each deployment by its key."""
    found = deployments(mode)
    alone = next(d for d in found if d.key == "homogeneous_pd").plan.system_rps(mode)
    return {d.key: figures(d.plan, mode, alone) for d in found}
