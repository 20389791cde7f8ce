"""A rehearsal of a region.yaml whose instances are paced: the plan and the simulation follow it.

The file has everything in real units; plan and report are in those of its profiles.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deploy.lab.pace.times import prefill_curve, profile_path
from deploy.lab.rehearse.deriving import AS_ENGINES_HERE, Rehearsal, policy_of
from deploy.lab.rehearse.scale import Scale
from deploy.lab.rehearse.traffic import Prompts
from deploy.plan.model_config import config_file, read_config
from deploy.plan.solve.served import kv_size_of
from deploy.profile_file import EngineProfile, EngineProfileFile
from deploy.region.spec.region import ClusterSpec, ModelSpec, RegionSpec, role_of
from kvmanager.config_files.units import parse_duration, parse_rate
from kvmanager.hf_config import read_model_kv
from scheduler.planning.region_model import Link, PdClusterModel, PrefillClusterModel, Region
from scheduler.planning.threshold_search import threshold_plan
from scheduler.replay.model import ReplayModel


def rehearsal_of_region(
    region: RegionSpec, document: dict[str, Any], prompts: Prompts
) -> Rehearsal:
    """The rehearsal of a region, whose file is `document`. ValueError for what cannot be
    rehearsed, `FileError` for a profile.
    """
    model, pace = region.models[0], region.models[0].pace
    if len(region.models) > 1 or len(region.pd_clusters) > 1 or len(region.prefill_clusters) > 1:
        raise ValueError("a rehearsal is for one model, one PD cluster and one prefill cluster")
    if pace is None:
        raise ValueError(f"model {model.name} is not paced: write its `pace` (docs/rehearsal.md)")
    if model.max_model_len is None:
        raise ValueError(f"model {model.name}: write its max_model_len, the room for a prompt")
    scale = Scale(pace.tokens_per_token, pace.output_tokens, pace.slowdown)
    kv = kv_size_of(read_model_kv(read_config(config_file(Path(model.path)))))
    pd_spec = region.pd_clusters[0]
    roles = [role_of(instance, pd_spec) for instance in pd_spec.instances]
    if set(roles) - {"prefill", "decode"}:
        raise ValueError(f"instances of {pd_spec.name}: give each the role prefill or decode")
    profile = _profile(pd_spec, pace.profile)
    if profile.decode is None:
        raise ValueError(f"the profile of {pd_spec.name} has no decode steps")
    slots = region.decode_slots_of(pd_spec.instances[0])
    steps = tuple((step.batch_size, step.step_seconds) for step in profile.decode.steps)
    step_s = next((s for n, s in steps if n >= slots), steps[-1][1])
    pd = PdClusterModel(pd_spec.name, len(roles), prefill_curve(profile), slots, step_s)
    plan_region = Region(
        tuple(
            PrefillClusterModel(c.name, len(c.instances), prefill_curve(_profile(c, pace.profile)))
            for c in region.prefill_clusters
        ),
        (pd,),
        tuple(_link(region, scale)),
        scale.kv_of_profile(kv),
        prompts.traffic(),
    )
    threshold = float(region.gateway.threshold_tokens * scale.tokens)
    plan = threshold_plan(plan_region, threshold, float(roles.count("prefill")))
    return Rehearsal(
        name=region.name,
        plan=plan,
        scale=scale,
        model=ReplayModel(
            region=scale.region(plan_region, kv),
            decode_steps=tuple((n, s * scale.step) for n, s in steps if n <= slots),
            **AS_ENGINES_HERE | _chunks(model),
        ),
        policy=policy_of(region.name, region.gateway, plan, scale),
        region=document,
        loaded=region,
        max_model_len=model.max_model_len,
        profiles={},
    )


def _chunks(model: ModelSpec) -> dict[str, int]:
    tokens = model.max_num_batched_tokens
    return {} if tokens is None else {"pass_tokens": tokens}


def _profile(cluster: ClusterSpec, of_model: str) -> EngineProfile:
    """The profile that all instances of a cluster have."""
    names = {instance.pace or of_model for instance in cluster.instances}
    if len(names) > 1:
        raise ValueError(
            f"instances of {cluster.name} have the profiles {', '.join(sorted(names))}: those of "
            "one cluster must be alike"
        )
    return EngineProfileFile.load(profile_path(names.pop())).profile


def _link(region: RegionSpec, scale: Scale) -> list[Link]:
    found = []
    for link in region.links:
        emulated = link.emulate
        rate = 0.0 if emulated is None else parse_rate(emulated.rate)
        if emulated is None or not rate:
            raise ValueError(f"link {link.name}: give it an emulated rate, which the plan needs")
        rtt_s = parse_duration(emulated.rtt) / scale.slowdown
        found.append(Link(link.source, link.to, rate * scale.slowdown, rtt_s))
    return found
