"""The region.yaml of a rehearsal, and the profile files that it names. Pure: it writes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from deploy.gateway.config import GatewaySection
from deploy.gateway.scheduling.config import SchedulingConfig
from deploy.lab.demo.regions import rank_environment
from deploy.lab.demo.tiny_specs import MODELS
from deploy.lab.rehearse.scale import Scale
from deploy.lab.rehearse.spec import RehearsalFile
from deploy.plan.simulate.spec import PolicySpec, SimulationSpec
from deploy.profile_file import (
    DecodeStep,
    EngineProfile,
    EngineProfileFile,
    KvCacheSize,
    MeasuredDecode,
    MeasuredPrefill,
    PrefillPoint,
)
from kvmanager.config_files.units import format_rate
from scheduler.planning.curves import Curve
from scheduler.planning.plan import Plan
from scheduler.planning.region_model import Region

CHUNK_TOKENS: Final = 1024
"""The most real tokens of one pass of an engine."""
AGENT: Final = {"arena_gib": 0.75, "landing_gib": 0.5}
Steps = tuple[tuple[int, float], ...]
"""(batch, seconds of a decode step), ascending."""


@dataclass(frozen=True, slots=True)
class Folders:
    """Where the tiny model is, and where the files of the profiles go."""

    model: Path
    profiles: Path


def scheduling_settings(spec: PolicySpec, whole: SimulationSpec, scale: Scale) -> dict[str, Any]:
    """The gateway's settings for a policy. What is in seconds or tokens of the profiles becomes
    real, defaults included.
    """
    default, slow = SchedulingConfig(), scale.slowdown
    routing: dict[str, Any] = {
        "margin_s": (default.routing.margin_s if spec.margin is None else spec.margin) * slow,
        "home_margin_s": slow
        * (default.routing.home_margin_s if spec.home_margin is None else spec.home_margin),
    }
    if spec.routing == "static":
        routing["policy"] = "threshold"
    shares = {"margin_share": spec.margin_share, "home_margin_share": spec.home_margin_share}
    routing |= {key: value for key, value in shares.items() if value is not None}
    queue = default.queue
    found: dict[str, Any] = {
        "routing": routing,
        # The gateway times prompts of some real tokens, which are more in the profiles' world.
        "calibration": {"limit_s": default.calibration.limit_s * scale.tokens * slow},
        "queue": {
            "ageing_tokens_per_s": queue.ageing_tokens_per_s / scale.step,
            "patience_s": queue.patience_s * slow,
            "buckets": [
                {"share": bucket.share}
                | ({"up_to_tokens": n // scale.tokens} if (n := bucket.up_to_tokens) else {})
                for bucket in queue.buckets
            ],
        },
        # A rehearsal is of this division and threshold, unless the file says that they change.
        "long_term": {"mode": "off"},
    }
    if spec.rebalance_every is not None:
        loop = default.long_term
        found["long_term"] = {
            "mode": "act",
            "period_s": spec.rebalance_every * slow,
            "dwell_s": loop.dwell_s * slow,
            "reverse_dwell_s": loop.reverse_dwell_s * slow,
        }
    if "admission" in spec.model_fields_set:
        found["admission"] = {"policy": spec.admission}
        if spec.admission != "off":
            found["admission"]["ttft_slo_s"] = whole.objective.ttft * slow
        for key in ("max_prefill_load", "max_decode_load"):
            if (load := getattr(spec, key)) is not None:
                found["admission"][key] = load
    return found


def gateway_settings(plan: Plan, scale: Scale, scheduling: dict[str, Any]) -> dict[str, Any]:
    """The `gateway` of region.yaml, which follows the plan's threshold."""
    default = GatewaySection()
    longest = plan.region.traffic.lengths.max_tokens
    threshold = min(plan.thresholds().values(), default=longest)
    return {
        "port": 0,
        "threshold_tokens": int(threshold / scale.tokens),
        "hand_off_tokens": max(1, default.hand_off_tokens // scale.tokens),
        # Admission refuses what is too much, not this.
        "max_in_flight": 4096,
        "scheduling": scheduling,
        "timeouts": {"engine_silence_s": default.timeouts.engine_silence_s * scale.slowdown},
    }


def region_document(
    file: RehearsalFile, plan: Plan, real: Region, gateway: dict[str, Any], folders: Folders
) -> dict[str, Any]:
    """The region.yaml: one node for each cluster, paced engines, links emulated as in `real`."""
    tiny, pd = MODELS[file.rehearsal.model], plan.region.pd_clusters[0]
    profiles = profiles_of(file)
    num_prefill = round(plan.num_prefill[pd.name])

    def cluster(name: str, kind: str, node: str, roles: dict[str, str]) -> dict[str, Any]:
        paced = {}
        if profiles[name] != profiles[pd.name]:
            paced = {"pace": str(folders.profiles / f"{profiles[name]}.yaml")}
        instances = [
            {"name": instance, "role": role, "decode_slots": pd.batch_size, **paced}
            for instance, role in roles.items()
        ]
        return {
            "name": name,
            "kind": kind,
            "nodes": [{"name": node, "agent": dict(AGENT), "instances": instances}],
        }

    clusters = [
        cluster(c.name, "prefill", "a1", {f"f{i}": "prefill" for i in range(int(c.num_instances))})
        for c in plan.region.prefill_clusters
    ]
    local = {f"p{i}": "prefill" for i in range(num_prefill)}
    local |= {f"d{i}": "decode" for i in range(pd.num_instances - num_prefill)}
    clusters.append(cluster(pd.name, "pd", "b1", local))
    model = {
        "name": tiny.name,
        "path": str(folders.model),
        "dtype": tiny.dtype,
        "max_model_len": tiny.max_model_len,
        "max_num_batched_tokens": CHUNK_TOKENS,
        "kv_space_gib": 1,
        # Only a trace has prompts that share prefixes.
        "prefix_caching": bool(file.simulation.cache_tokens),
        "enforce_eager": True,
        "args": list(tiny.engine_args),
        "env": rank_environment() | {"OMP_NUM_THREADS": "1"},
        "pace": {
            "profile": str(folders.profiles / f"{profiles[pd.name]}.yaml"),
            "tokens_per_token": file.rehearsal.tokens_per_token,
            "output_tokens_per_token": file.rehearsal.output_tokens_per_token,
            "slowdown": file.rehearsal.slowdown,
        },
    }
    links = [
        {
            "from": link.source,
            "to": link.target,
            "emulate": {
                "rate": format_rate(link.bytes_per_s),
                "rtt": f"{link.rtt_s * 1000:.6g}ms",
            },
        }
        for link in real.links
    ]
    return {
        "name": "rehearsal",
        "gateway": gateway,
        "models": [model],
        "clusters": clusters,
        "links": links,
    }


def profiles_of(file: RehearsalFile) -> dict[str, str]:
    """The name of the profile of each cluster."""
    return {c.name: c.profile for c in (*file.prefill_clusters, *file.pd_clusters)}


def profile_files(
    file: RehearsalFile, region: Region, steps: Steps
) -> dict[str, EngineProfileFile]:
    """A profile file for each profile of the region's clusters, by its name. `steps` are those of
    the PD cluster.
    """
    longest = int(region.traffic.lengths.max_tokens)
    fixed, at_1000 = (float(region.kv.size(tokens)) for tokens in (0.0, 1000.0))
    kv = KvCacheSize(fixed_bytes=round(fixed), bytes_per_token=round((at_1000 - fixed) / 1000))
    # Those of prefill clusters, too: the last token of a prompt may have a pass of its own.
    decode = MeasuredDecode(steps=tuple(DecodeStep(batch_size=n, step_seconds=s) for n, s in steps))
    return {
        profiles_of(file)[cluster.name]: EngineProfileFile(
            profile=EngineProfile(
                prefill=MeasuredPrefill(points=_points(cluster.prefill, longest)),
                decode=decode,
                kv_cache=kv,
            )
        )
        for cluster in region.clusters
    }


def _points(curve: Curve, longest: int) -> tuple[PrefillPoint, ...]:
    """Points of a curve from which it can be made again."""
    tokens = {max(1, longest * part // 8) for part in (1, 2, 4, 8)} | {1}
    tokens |= {int(start) for start in curve.starts if start >= 1}
    return tuple(PrefillPoint(tokens=n, seconds=float(curve(n))) for n in sorted(tokens))
