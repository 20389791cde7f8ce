"""Turns simulation.yaml into a model, a workload and policies for `scheduler.replay`.

Values that do not fit together are problems with their path, like wrong values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from deploy.plan.simulate.images import encoding_of, image_problems, planned_apart
from deploy.plan.simulate.spec import (
    POLICY_NAMES,
    LinkEventsSpec,
    PhaseSpec,
    PolicySpec,
    SimulationFile,
    SimulationSpec,
)
from deploy.plan.solve.building import PlanInput, load_plan
from deploy.plan.solve.image_building import ImagePlanInput
from deploy.plan.solve.spec import PlanSpec
from deploy.plan.trace import load_trace
from kvmanager.config_files.problems import FileError, Problem, suggestion
from scheduler.live.admission import AdmissionConfig, AdmissionPolicy
from scheduler.live.long_term.loop import LongTermConfig
from scheduler.planning.joint import JointRegion
from scheduler.planning.region_model import Link, Region, Traffic
from scheduler.planning.solve import best_plan
from scheduler.planning.throughput import Mode
from scheduler.replay.links import LinkChange, OtherTraffic, RateSchedule
from scheduler.replay.model import Policy, ReplayModel, Routing, Slo
from scheduler.replay.workload import Phase, Workload, at_homes, drawn, traced, with_media
from scheduler.routing.order_config import OrderConfig
from scheduler.routing.service import ServiceModel

HOMOGENEOUS: Final = "homogeneous"


@dataclass(frozen=True)
class Simulation:
    """A simulation file, read and built."""

    file: SimulationFile
    model: ReplayModel
    capacity_rps: float
    """The highest rate of the best plan for the file's traffic, requests/s. With homes of requests,
    it is the rate at which the least served one is full, where all have their part of the demand.
    """
    directory: Path
    images: ImagePlanInput | None = None

    def workload(self, seed: int) -> Workload:
        """The workload, the same for every policy. Raises `FileError` if a trace cannot be read."""
        spec, lengths = self.file.simulation, self.file.traffic.lengths
        if lengths.trace is not None:
            trace = lengths.trace
            file = self.directory / trace.file.expanduser()
            prompts = load_trace(file, trace.block_tokens, trace.unit)
            return traced(prompts, trace.block_tokens, spec.trace_speed)
        traffics = self._traffics()
        works = [drawn(self._phases(*one), seed + place) for place, one in enumerate(traffics)]
        if self.images is not None:
            return with_media(works[0], self.images.traffic, seed)
        return works[0] if len(works) == 1 else at_homes(works)

    def _traffics(self) -> list[tuple[Traffic, float]]:
        """The traffic of each home, and its part of all requests."""
        joint = self.model.joint
        if self.images is not None:
            return [(self.images.text, 1.0)]
        if joint is None:
            return [(self.model.region.traffic, 1.0)]
        total_rps = sum(home.rate_rps for home in joint.homes)
        return [(home.region.traffic, home.rate_rps / total_rps) for home in joint.homes]

    def policy(self, name: str) -> tuple[ReplayModel, Policy]:
        """The model and the policy of that name. KeyError if there is none."""
        spec = self.file.simulation.policies.get(name)
        model = self.model
        if name == HOMOGENEOUS:
            model = homogeneous(model)
        if spec is None:
            spec = _PRESETS[name]
        return model, _policy(name, spec, model, self.file.simulation)

    @property
    def policy_names(self) -> list[str]:
        return sorted({*POLICY_NAMES, *self.file.simulation.policies})

    @property
    def compared(self) -> list[str]:
        """What `--compare` compares: the usual policies that make sense here, and those of the
        file.
        """
        usual = ["static", "router"]
        if not self.model.region.prefill_clusters:
            usual = ["router"]
        elif self.model.joint is None:
            usual.append(HOMOGENEOUS)
        # Without a change of a link, an oracle knows no more than the router.
        if any(not schedule.is_constant for schedule in self.model.schedules.values()):
            usual.append("oracle")
        return [*usual, *(n for n in self.file.simulation.policies if n not in usual)]

    def _phases(self, traffic: Traffic, part: float) -> Iterator[Phase]:
        spec = self.file.simulation
        first = PhaseSpec(at=0.0, load=spec.load, rate_rps=self._rate(spec))
        steps = [first, *sorted(spec.phases, key=lambda phase: phase.at)]
        # A phase without a load and a rate keeps the last one.
        rate = 0.0
        for step, after in zip(steps, [*steps[1:], None], strict=True):
            if step.rate_rps is not None:
                rate = step.rate_rps
            elif step.load is not None:
                rate = step.load * self.capacity_rps
            until_s = spec.duration if after is None else min(after.at, spec.duration)
            # Two phases may begin at the same time: the later one in the file counts.
            if until_s > step.at:
                factor = step.length_factor
                yield Phase(
                    duration_s=until_s - step.at,
                    rate_rps=rate * part,
                    lengths=traffic.lengths if factor == 1 else traffic.lengths.scaled(factor),
                    output_tokens=traffic.output_tokens * step.output_factor,
                    output_sigma=spec.output_sigma,
                )

    def _rate(self, spec: SimulationSpec) -> float | None:
        if spec.load is not None:
            return None
        joint = self.model.joint
        return self.file.traffic.rate_rps if joint is None else _demand_rps(joint)


def load_simulation(path: Path, shape: type[SimulationFile] = SimulationFile) -> Simulation:
    """Read a simulation file, which `shape` may extend. `FileError` with every problem found."""
    found = load_plan(path, shape, _problems)
    file = found.spec
    assert isinstance(file, SimulationFile)
    try:
        model = _model(file, found)
        if model.joint is None:
            capacity_rps = best_plan(model.region).system_rps(Mode.EXACT)
        else:
            capacity_rps = min(model.joint.levels.values()) * _demand_rps(model.joint)
    except ValueError as error:
        raise FileError(str(path), [Problem(("simulation",), str(error))]) from error
    return Simulation(file, model, capacity_rps, path.parent, found.images)


def _demand_rps(joint: JointRegion) -> float:
    return sum(home.rate_rps for home in joint.homes)


def homogeneous(model: ReplayModel) -> ReplayModel:
    """The same number of instances, all in the PD cluster."""
    if model.joint is not None:
        raise ValueError(f"the policy {HOMOGENEOUS} is for a region with one PD cluster")
    region, pd = model.region, model.pd
    num = pd.num_instances + sum(int(c.num_instances) for c in region.prefill_clusters)
    alone = replace(
        region, prefill_clusters=(), links=(), pd_clusters=(replace(pd, num_instances=num),)
    )
    encoding = model.encoding
    if encoding is not None and encoding.num_instances:
        encoders = {pd.name: sum(encoding.num_instances.values())}
        encoding = replace(encoding, num_instances=encoders)
        alone = planned_apart(alone, encoding)
    # What is not there has no schedule and is not lost.
    lost = {name: span for name, span in model.lost.items() if name == pd.name}
    return replace(model, region=alone, schedules={}, lost=lost, encoding=encoding)


_PRESETS: Final = {
    "static": PolicySpec(routing="static", order="arrival"),
    "router": PolicySpec(),
    "oracle": PolicySpec(routing="oracle"),
    HOMOGENEOUS: PolicySpec(routing="static", order="arrival"),
}


def _policy(name: str, spec: PolicySpec, model: ReplayModel, whole: SimulationSpec) -> Policy:
    default = Policy()
    thresholds = None
    if spec.threshold_tokens is not None:
        clusters = model.region.prefill_clusters
        thresholds = {cluster.name: spec.threshold_tokens for cluster in clusters}
    loads = {
        name: value
        for name in ("max_prefill_load", "max_decode_load")
        if (value := getattr(spec, name)) is not None
    }
    admission = None
    if spec.admission != "off":
        is_default = spec.admission == "slots"
        admission = AdmissionConfig(
            policy=AdmissionPolicy.PREDICTED if is_default else AdmissionPolicy(spec.admission),
            ttft_slo_s=None if is_default else whole.objective.ttft,
            **loads,
        )
    period_s = spec.rebalance_every
    return Policy(
        name=name,
        routing=Routing(spec.routing),
        thresholds=thresholds,
        num_prefill=spec.num_prefill,
        spill=spec.spill,
        report_every_s=spec.report_every,
        hand_off_tokens=spec.hand_off_tokens,
        order=OrderConfig() if spec.order == "shortest" else None,
        margin_s=_or(spec.margin, default.margin_s),
        margin_share=_or(spec.margin_share, default.margin_share),
        home_margin_s=_or(spec.home_margin, default.home_margin_s),
        home_margin_share=_or(spec.home_margin_share, default.home_margin_share),
        admission=admission,
        long_term=None if period_s is None else LongTermConfig(period_s=period_s),
        monitor=default.monitor if spec.watch == "monitor" else None,
    )


def _or(given: float | None, default: float) -> float:
    return default if given is None else given


def _model(file: SimulationFile, found: PlanInput) -> ReplayModel:
    spec, encoding = file.simulation, encoding_of(file.simulation, found.images)
    region = planned_apart(found.region, encoding)
    schedules = {
        link.name: schedule
        for events in spec.links
        for link in region.links
        if (link.source, link.target) == (events.source, events.target)
        and (schedule := _schedule(events, link))
    }
    blocks = None
    trace = file.traffic.lengths.trace
    if spec.cache_tokens and trace is not None:
        blocks = {name: int(n / trace.block_tokens) for name, n in spec.cache_tokens.items()}
    return ReplayModel(
        region=region,
        joint=found.joint,
        lost={lost.cluster: (lost.at, lost.until) for lost in spec.lost},
        slo=Slo(ttft_s=spec.objective.ttft, tbt_s=spec.objective.tbt),
        schedules=schedules,
        # The batches of several PD clusters may differ, so each has its plan's step time.
        decode_steps=_decode_steps(file, region) if found.joint is None else (),
        cache_blocks=blocks,
        prefill_factors=spec.prefill_factors,
        prefill_jitter=spec.prefill_jitter,
        max_concurrent=spec.max_concurrent,
        pass_tokens=spec.pass_tokens,
        load_steps=spec.load_steps,
        services={
            name: ServiceModel(item.overhead, decode_s=item.decode, busy_s=item.busy)
            for name, item in spec.contention.items()
        },
        transfer_timeout_s=spec.transfer_timeout,
        encoding=encoding,
    )


def _decode_steps(file: SimulationFile, region: Region) -> tuple[tuple[int, float], ...]:
    """Decode steps up to the batch that keeps the objective. Larger batches are not run."""
    profile = file.profiles[file.pd_clusters[0].profile]
    if profile.decode is None:
        return ()
    most = region.pd_clusters[0].batch_size
    steps = sorted((step.batch_size, step.step_seconds) for step in profile.decode.steps)
    return tuple(step for step in steps if step[0] <= most)


def _schedule(events: LinkEventsSpec, link: Link) -> RateSchedule:
    changes = [
        LinkChange(
            at_s=change.at,
            bytes_per_s=change.rate,
            loss=change.loss,
            rate_factor=change.rate_factor,
        )
        for change in events.changes
    ]
    others = [
        OtherTraffic(from_s=other.at, until_s=other.until, bytes_per_s=other.rate)
        for other in events.other_traffic
    ]
    outages = [(outage.at, outage.until) for outage in events.outages]
    return RateSchedule.of(link.bytes_per_s, changes, others, outages)


def _problems(spec: PlanSpec) -> Iterable[Problem]:
    assert isinstance(spec, SimulationFile)
    whole = spec.simulation
    links = {(link.source, link.target): i for i, link in enumerate(spec.links)}
    for i, events in enumerate(whole.links):
        if (events.source, events.target) not in links:
            known = ", ".join(f"{a} to {b}" for a, b in links) or "none"
            message = (
                f"the plan has no link from {events.source} to {events.target}; it has {known}"
            )
            yield Problem(("simulation", "links", i), message)
    names = [c.name for c in (*spec.prefill_clusters, *spec.pd_clusters)]
    for key in ("cache_tokens", "prefill_factors", "contention", "encode_instances"):
        for name in getattr(whole, key):
            if name not in names:
                message = f"no cluster {name!r}{suggestion(name, names)}"
                yield Problem(("simulation", key, name), message)
    yield from _traffic_problems(spec)
    known_policies = [*POLICY_NAMES, *whole.policies]
    if whole.policy not in known_policies:
        message = f"no policy {whole.policy!r}{suggestion(whole.policy, known_policies)}"
        yield Problem(("simulation", "policy"), message)
    for i, lost in enumerate(whole.lost):
        if lost.cluster not in names:
            message = f"no cluster {lost.cluster!r}{suggestion(lost.cluster, names)}"
            yield Problem(("simulation", "lost", i, "cluster"), message)
    yield from image_problems(spec)
    if spec.models:
        message = "a simulation plays one model; links and uplinks may be given less rate instead"
        yield Problem(("models",), message)
    if len(spec.pd_clusters) != 1 and not spec.has_homes:
        message = "give each PD cluster the rate_rps of the requests whose home it is"
        yield Problem(("pd_clusters",), message)


def _traffic_problems(spec: SimulationFile) -> Iterator[Problem]:
    whole, is_traced = spec.simulation, spec.traffic.lengths.trace is not None
    has_rate = spec.traffic.rate_rps is not None or spec.has_homes
    if is_traced and spec.has_homes:
        message = "does not go with homes of requests: it does not say whose requests they are"
        yield Problem(("traffic", "lengths", "trace"), message)
    if not is_traced and whole.load is None and not has_rate:
        message = "is missing: give a share of the highest rate, or traffic.rate_rps"
        yield Problem(("simulation", "load"), message)
    if whole.cache_tokens and not is_traced:
        message = "needs a trace (traffic.lengths.trace): only it says which prompts share prefixes"
        yield Problem(("simulation", "cache_tokens"), message)
    if is_traced:
        for key in ("phases", "load"):
            if getattr(whole, key):
                message = "does not go with a trace; change trace_speed"
                yield Problem(("simulation", key), message)
    for i, phase in enumerate(whole.phases):
        if phase.at >= whole.duration:
            message = f"begins at {phase.at:g} s, after the end at {whole.duration:g} s"
            yield Problem(("simulation", "phases", i, "at"), message)


def traffic_of(region: Region, length_factor: float, output_factor: float) -> Traffic:
    """The region's traffic with its mean lengths multiplied by the factors."""
    traffic = region.traffic
    return Traffic(
        traffic.lengths.scaled(length_factor),
        traffic.output_tokens * output_factor,
        traffic.input_tokens * length_factor,
    )
