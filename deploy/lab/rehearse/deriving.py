"""What a rehearsal is: a plan, the same region in real units for simulation, its region.yaml.

Pure. It starts nothing and writes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from deploy.gateway.config import GatewaySection
from deploy.lab.demo.tiny_specs import MODELS
from deploy.lab.rehearse.region_file import (
    CHUNK_TOKENS,
    Folders,
    gateway_settings,
    profile_files,
    region_document,
    scheduling_settings,
)
from deploy.lab.rehearse.scale import Scale
from deploy.lab.rehearse.spec import RehearsalFile
from deploy.plan.simulate.building import Simulation
from deploy.plan.simulate.spec import PolicySpec
from deploy.plan.solve.served import kv_size_of
from deploy.profile_file import EngineProfileFile
from deploy.region.spec.region import RegionSpec
from kvmanager.hf_config import read_model_kv
from prfaas.engines.instance import DEFAULT_MAX_CONCURRENT
from scheduler.planning.lengths import mean_tokens
from scheduler.planning.plan import Plan
from scheduler.planning.region_model import KvSize
from scheduler.planning.solve import is_pair
from scheduler.replay.model import Policy, ReplayModel, Routing, Slo
from scheduler.replay.starting import starting_plan

AS_ENGINES_HERE: Final[dict[str, Any]] = {
    "max_concurrent": DEFAULT_MAX_CONCURRENT,
    "pass_tokens": CHUNK_TOKENS,
    # vLLM on the CPU schedules a pass when the one before has ended.
    "load_steps": 1,
}
"""How engines of a rehearsal take prompts and KVCache, for `ReplayModel`."""


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """One region to rehearse. `plan` is in the units of the profiles; `model`, `policy` and
    `region` are in real units.
    """

    name: str
    plan: Plan
    scale: Scale
    model: ReplayModel
    policy: Policy
    region: Mapping[str, Any]
    """The region.yaml."""
    loaded: RegionSpec | None = None
    """It, where it was a file and need not be written."""
    max_model_len: int
    profiles: Mapping[str, EngineProfileFile]
    """The profile files that `region` names, by their names without `.yaml`."""

    @property
    def num_instances(self) -> int:
        return sum(int(cluster.num_instances) for cluster in self.plan.region.clusters)


def rehearsal_of(simulation: Simulation, name: str, folders: Folders) -> Rehearsal:
    """The region of a rehearsal file under the policy `name`. ValueError for what cannot be
    rehearsed.
    """
    file = simulation.file
    assert isinstance(file, RehearsalFile)
    _refuse(simulation, file, name)
    spec = _policy(file, name)
    replayed, chosen = simulation.policy(name)
    plan = starting_plan(replayed, chosen)
    tiny, pd = MODELS[file.rehearsal.model], replayed.pd
    kv = kv_size_of(read_model_kv(dict(tiny.config), dtype=tiny.dtype))
    scale = _scale(file, plan, kv)
    steps = simulation.model.decode_steps or ((pd.batch_size, pd.step_s),)
    real, slo = scale.region(replayed.region, kv), replayed.slo
    gateway = gateway_settings(plan, scale, scheduling_settings(spec, file.simulation, scale))
    model = replace(
        replayed,
        region=real,
        schedules={link: scale.schedule(one) for link, one in replayed.schedules.items()},
        slo=Slo(ttft_s=slo.ttft_s * scale.slowdown, tbt_s=slo.tbt_s * scale.step),
        decode_steps=tuple((batch, step_s * scale.step) for batch, step_s in steps),
        transfer_timeout_s=replayed.transfer_timeout_s * scale.slowdown,
        **AS_ENGINES_HERE,
    )
    return Rehearsal(
        name=name,
        plan=plan,
        scale=scale,
        model=model,
        policy=policy_of(name, GatewaySection.model_validate(gateway), plan, scale),
        region=region_document(file, plan, real, gateway, folders),
        max_model_len=tiny.max_model_len,
        profiles=profile_files(file, replayed.region, steps),
    )


def policy_of(name: str, gateway: GatewaySection, plan: Plan, scale: Scale) -> Policy:
    """The policy of a gateway with these settings, for the simulator."""
    settings = gateway.scheduling
    limits = settings.routing.routing()
    thresholds = {
        cluster: float(int(tokens / scale.tokens)) for cluster, tokens in plan.thresholds().items()
    }
    num_prefill = round(plan.num_prefill[plan.region.pd_clusters[0].name])
    return Policy(
        name=name,
        routing=Routing.STATIC if limits.policy == "threshold" else Routing.ROUTER,
        thresholds=thresholds,
        num_prefill=num_prefill,
        order=settings.queue.order(),
        margin_s=limits.margin_s,
        margin_share=limits.margin_share,
        home_margin_s=limits.home_margin_s,
        home_margin_share=limits.home_margin_share,
        threshold=settings.routing.threshold(),
        admission=None if settings.admission.policy == "off" else settings.admission.admission(),
        long_term=settings.long_term.loop() if settings.long_term.mode == "act" else None,
        conversion=settings.long_term.conversion(),
        hand_off_tokens=gateway.hand_off_tokens,
        report_every_s=gateway.report_interval_s,
    )


def _policy(file: RehearsalFile, name: str) -> PolicySpec:
    """The file's policy. Those that are always there are a gateway's, `static` but for routing."""
    usual = PolicySpec(routing="static") if name == "static" else PolicySpec()
    return file.simulation.policies.get(name, usual)


def _refuse(simulation: Simulation, file: RehearsalFile, name: str) -> None:
    """ValueError for what no region of paced engines here can play."""
    region = simulation.model.region
    if simulation.images is not None or simulation.model.joint is not None or not is_pair(region):
        raise ValueError(
            "a rehearsal is for one PD cluster, at most one prefill cluster, and text: leave out "
            "further clusters, homes of requests and images"
        )
    known = simulation.policy_names
    if name not in known:
        raise ValueError(f"no policy {name!r}; the file has {', '.join(known)}")
    spec = _policy(file, name)
    if name == "oracle" or spec.routing == "oracle" or spec.order == "arrival":
        raise ValueError(f"policy {name}: a gateway knows no oracle and no order by arrival")
    own = ("lost", "contention", "prefill_factors", "prefill_jitter")
    for key in own:
        if getattr(file.simulation, key):
            raise ValueError(
                f"simulation.{key}: a rehearsal has nothing that would do this live; leave it out"
            )
    for link in file.simulation.links:
        if link.outages or link.other_traffic or any(change.loss for change in link.changes):
            raise ValueError("simulation.links: a rehearsal changes rates of links only")


def _scale(file: RehearsalFile, plan: Plan, kv: KvSize) -> Scale:
    """The units. A real byte stands for so many that the mean prompt that is prefilled remotely
    takes as long on the link as in the plan.
    """
    tokens = plan.mean_offloaded_tokens or mean_tokens(plan.region.traffic.lengths)
    spec = file.rehearsal
    real = float(kv.size(tokens / spec.tokens_per_token))
    link_bytes = float(plan.region.kv.size(tokens)) / real
    return Scale(spec.tokens_per_token, spec.output_tokens_per_token, spec.slowdown, link_bytes)
