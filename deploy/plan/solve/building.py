"""Turns plan.yaml into the region that the planner works on.

Values that do not fit together are problems with their path, like wrong values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from deploy.plan.model_config import config_file, read_config
from deploy.plan.profile.file import (
    DecodeStep,
    EngineProfileFile,
    KvCacheSize,
    PrefillPoint,
)
from deploy.plan.solve.spec import (
    KvSpec,
    PlanPdClusterSpec,
    PlanSpec,
    ProfileSpec,
    TraceSpec,
    TrafficSpec,
)
from deploy.plan.trace import load_trace
from kvmanager.config_files.problems import FileError, KeyPath, Problem, suggestion
from kvmanager.config_files.yaml_files import parse_yaml, read_text
from kvmanager.hf_config import ModelKv, read_model_kv
from scheduler.planning.curves import Curve, FittedCurve, fit_quadratic, interpolate
from scheduler.planning.joint import JointRegion
from scheduler.planning.lengths import EmpiricalLengths, Lengths, LogNormalLengths, mean_tokens
from scheduler.planning.prefix_reuse import TracePrompt, cached_tokens
from scheduler.planning.region_model import (
    Home,
    KvSize,
    Link,
    PdClusterModel,
    PrefillClusterModel,
    Region,
    Traffic,
    Uplink,
)

Built = TypeVar("Built")

EXPECTED = (
    "a plan file is a mapping with the keys traffic, kv_cache, profiles, prefill_clusters, "
    "pd_clusters, links, uplinks, models, slo"
)


@dataclass(frozen=True)
class PlanInput:
    """A plan file, read and built."""

    spec: PlanSpec
    region: Region
    fits: dict[str, FittedCurve]
    """The prefill curves that were made from points, by profile name."""
    traffic_with_cache: Callable[[float], Traffic] | None
    """The trace's traffic with a prefix cache of this many tokens; None without a trace."""
    joint: JointRegion | None = None
    """The homes of requests, where the file has them. `region` has the first model without them."""


def load_plan(
    path: Path,
    model: type[PlanSpec] = PlanSpec,
    more: Callable[[PlanSpec], Iterable[Problem]] = lambda spec: (),
) -> PlanInput:
    """Read a plan file. `FileError` with every problem found. Its paths are relative to it.

    `model` may extend a plan file, and `more` may find further problems in it.
    """
    builders: list[_Builder] = []

    def check(spec: PlanSpec) -> Sequence[Problem]:
        builder = _Builder(spec, path.parent)
        builders.append(builder)
        return [*builder.problems, *more(spec)]

    spec = parse_yaml(read_text(path), model, source=str(path), expected=EXPECTED, check=check)
    # `parse_yaml` calls `check` once the single values are right, so a builder exists here.
    built = builders[-1]
    return PlanInput(spec, built.region, built.fits, built.traffic_with_cache, built.joint)


class _Builder:
    """Builds what it can and notes what is wrong. `region` is whole if `problems` is empty."""

    def __init__(self, spec: PlanSpec, directory: Path) -> None:
        self.problems: list[Problem] = []
        self.fits: dict[str, FittedCurve] = {}
        self.traffic_with_cache: Callable[[float], Traffic] | None = None
        self._spec = spec
        self._directory = directory
        self._prefills: dict[str, Curve] = {}
        self._measured_kv: list[KvCacheSize] = []
        self._steps: dict[str, Sequence[DecodeStep]] = {}
        for name, profile in spec.profiles.items():
            self._tried(("profiles", name), partial(self._read_profile, name, profile))
        self._check_names()
        self.joint: JointRegion | None = None
        self._kv_sizes: dict[str, KvSize | None] = {
            "": self._tried(("kv_cache",), partial(self._kv, spec.kv_cache))
        }
        self._traffics: dict[str, Traffic | None] = {
            "": self._tried(("traffic", "lengths"), partial(self._traffic, spec.traffic))
        }
        for name, served in spec.models.items():
            path: KeyPath = ("models", name)
            kv_cache = partial(self._kv, served.kv_cache)
            self._kv_sizes[name] = self._tried((*path, "kv_cache"), kv_cache)
            traffic = partial(self._traffic, served.traffic)
            self._traffics[name] = self._tried((*path, "traffic", "lengths"), traffic)
        self._clusters: list[tuple[str, PrefillClusterModel]] = [
            (c.model, PrefillClusterModel(c.name, c.instances, curve, c.price_per_instance_hour))
            for i, c in enumerate(spec.prefill_clusters)
            if (curve := self._prefill(c.profile, "prefill_clusters", i)) is not None
        ]
        pd_clusters = [self._pd_cluster(c, i) for i, c in enumerate(spec.pd_clusters)]
        self._links = tuple(
            Link(k.source, k.target, k.rate, k.rtt, k.price_per_gb) for k in spec.links
        )
        for i, cluster in enumerate(spec.pd_clusters):
            self._check_memory(cluster, i)
        if spec.has_homes:
            homes = [self._home(pd, i) for i, pd in enumerate(pd_clusters)]
            self.joint = JointRegion(
                tuple(home for home in homes if home is not None),
                tuple(Uplink(up.cluster, up.way, up.rate) for up in spec.uplinks),
                spec.instances == "whole",
            )
        own_kv, own_traffic = self._kv_sizes[""], self._traffics[""]
        if own_kv is not None and own_traffic is not None:
            self.region = Region(
                tuple(cluster for model, cluster in self._clusters if not model),
                tuple(
                    pd
                    for pd, cluster in zip(pd_clusters, spec.pd_clusters, strict=True)
                    if pd is not None and not cluster.model
                ),
                self._links,
                own_kv,
                own_traffic,
            )

    def _home(self, pd: PdClusterModel | None, index: int) -> Home | None:
        """The home of requests in one PD cluster; None if something of it is wrong."""
        spec = self._spec.pd_clusters[index]
        path: KeyPath = ("pd_clusters", index)
        if spec.model and spec.model not in self._spec.models:
            hint = suggestion(spec.model, self._spec.models)
            self._note((*path, "model"), f"no model named {spec.model!r}{hint}")
            return None
        served = self._spec.models[spec.model].traffic if spec.model else self._spec.traffic
        traffic = self._traffics[spec.model]
        if spec.traffic is not None:
            served = spec.traffic
            build = partial(self._traffic, served)
            traffic = self._tried((*path, "traffic", "lengths"), build)
        rate_rps = spec.rate_rps or (spec.traffic.rate_rps if spec.traffic else None)
        if rate_rps is None and sum(c.model == spec.model for c in self._spec.pd_clusters) == 1:
            # The demand of one home alone decides nothing.
            rate_rps = served.rate_rps or 1.0
        if rate_rps is None:
            self._note(
                (*path, "rate_rps"), "is missing: say how many requests have their home here"
            )
        kv = self._kv_sizes[spec.model]
        if pd is None or kv is None or traffic is None or rate_rps is None:
            return None
        links = tuple(link for link in self._links if link.target == pd.name)
        linked = {link.source for link in links}
        sources = tuple(c for model, c in self._clusters if model == spec.model)
        sources = tuple(c for c in sources if c.name in linked)
        return Home(Region(sources, (pd,), links, kv, traffic), rate_rps, spec.model)

    def _tried(self, path: KeyPath, build: Callable[[], Built]) -> Built | None:
        """The result of `build`; None if it raises, which becomes a problem at `path`."""
        try:
            return build()
        except (ValueError, FileError) as error:  # CurveError and ConfigError are ValueErrors
            self._note(path, str(error))
        return None

    def _note(self, path: KeyPath, message: str) -> None:
        self.problems.append(Problem(path, message))

    def _path(self, path: Path) -> Path:
        return self._directory / path.expanduser()

    # Profiles.

    def _read_profile(self, name: str, profile: ProfileSpec) -> None:
        if profile.file is not None:
            measured = EngineProfileFile.load(self._path(profile.file)).profile
            self._fit(name, measured.prefill.points, profile.fit)
            if measured.kv_cache is not None:
                self._measured_kv.append(measured.kv_cache)
            if measured.decode is not None:
                self._steps[name] = measured.decode.steps
        elif profile.prefill is not None:
            if profile.prefill.coefficients is not None:
                c = profile.prefill.coefficients
                self._prefills[name] = Curve.quadratic(c.constant_s, c.s_per_token, c.s_per_token2)
            else:
                self._fit(name, profile.prefill.points or (), profile.prefill.fit)
        if profile.decode is not None:
            self._steps[name] = profile.decode.steps

    def _fit(self, name: str, points: Sequence[PrefillPoint], method: str) -> None:
        pairs = [(float(point.tokens), point.seconds) for point in points]
        fitted = fit_quadratic(pairs) if method == "quadratic" else interpolate(pairs)
        self.fits[name] = fitted
        self._prefills[name] = fitted.curve

    def _prefill(self, profile: str, *path: str | int) -> Curve | None:
        if profile not in self._spec.profiles:
            hint = suggestion(profile, self._spec.profiles)
            self._note((*path, "profile"), f"no profile named {profile!r}{hint}")
        return self._prefills.get(profile)

    # Clusters.

    def _pd_cluster(self, cluster: PlanPdClusterSpec, index: int) -> PdClusterModel | None:
        curve = self._prefill(cluster.profile, "pd_clusters", index)
        if curve is None:
            return None
        steps = self._steps.get(cluster.profile, ())
        path: KeyPath = ("pd_clusters", index, "profile")
        if not steps:
            self._note(path, f"profile {cluster.profile!r} has no decode steps; add decode.steps")
            return None
        wanted = self._spec.slo.tokens_per_s
        # A step measured to be exactly the objective may differ from it in the last digits.
        fast = [s for s in steps if wanted is None or s.step_seconds <= 1 / wanted * (1 + 1e-9)]
        if not fast:
            best = min(steps, key=lambda step: step.step_seconds)
            self._note(
                ("slo", "tokens_per_s"),
                f"{wanted:g} tokens/s need steps of {1000 / (wanted or 1):.4g} ms; the fastest of "
                f"profile {cluster.profile!r} takes {best.step_seconds * 1000:.4g} ms "
                f"(batch {best.batch_size}): ask for at most {1 / best.step_seconds:.4g} tokens/s, "
                "or measure smaller batches",
            )
            return None
        step = max(fast, key=lambda step: step.batch_size)
        return PdClusterModel(
            cluster.name,
            cluster.instances,
            curve,
            step.batch_size,
            step.step_seconds,
            cluster.price_per_instance_hour,
            cluster.decode_memory,
        )

    def _check_names(self) -> None:
        spec = self._spec
        sources = {cluster.name for cluster in spec.prefill_clusters}
        targets = {cluster.name for cluster in spec.pd_clusters}
        seen: set[tuple[str, str]] = set()
        kinds: dict[str, str] = {}
        for key, clusters in (
            ("prefill_clusters", spec.prefill_clusters),
            ("pd_clusters", spec.pd_clusters),
        ):
            for i, cluster in enumerate(clusters):
                names = cluster.name, cluster.model
                if names in seen or kinds.setdefault(cluster.name, key) != key:
                    self._note((key, i, "name"), f"{cluster.name!r} is used twice")
                seen.add(names)
        for i, up in enumerate(spec.uplinks):
            if up.cluster not in (sources if up.way == "egress" else targets):
                kind = "prefill" if up.way == "egress" else "PD"
                self._note(("uplinks", i, "cluster"), f"no {kind} cluster {up.cluster!r}")
        if not any(cluster.instances for cluster in spec.pd_clusters):
            self._note(("pd_clusters",), "no instance decodes: give one cluster at least 1")
        linked: set[tuple[str, str]] = set()
        for i, link in enumerate(spec.links):
            if link.source not in sources:
                hint = suggestion(link.source, sources)
                self._note(("links", i, "from"), f"no prefill cluster {link.source!r}{hint}")
            if link.target not in targets:
                hint = suggestion(link.target, targets)
                self._note(("links", i, "to"), f"no PD cluster {link.target!r}{hint}")
            if (link.source, link.target) in linked:
                self._note(("links", i), f"a second link from {link.source} to {link.target}")
            linked.add((link.source, link.target))
        for i, cluster in enumerate(spec.prefill_clusters):
            if not any(source == cluster.name for source, _ in linked):
                self._note(
                    ("prefill_clusters", i), f"{cluster.name!r} has no link: add one from it"
                )

    def _check_memory(self, cluster: PlanPdClusterSpec, index: int) -> None:
        kv, traffic = self._kv_sizes.get(cluster.model), self._traffics.get(cluster.model)
        room_bytes = cluster.decode_memory
        if kv is None or traffic is None or room_bytes is None:
            return
        longest = traffic.lengths.max_tokens
        largest_bytes = float(kv.size(longest))
        # A prompt that fits into no instance would hold up the queue for ever.
        if room_bytes < largest_bytes:
            self._note(
                ("pd_clusters", index, "decode_memory"),
                f"{room_bytes:.4g} bytes: the KVCache of the longest prompt, {longest:,.0f} "
                f"tokens, has {largest_bytes:.4g}",
            )

    # What is served.

    def _kv(self, kv: KvSpec | None) -> KvSize:
        if kv is None:
            return self._kv_of_profiles()
        if kv.model_config_file is None:
            fixed, per_token = kv.fixed_bytes or 0.0, kv.bytes_per_token or 0.0
            return KvSize(Curve.quadratic(fixed, per_token), fixed)
        config = read_config(config_file(self._path(kv.model_config_file)))
        return kv_size_of(read_model_kv(config, dtype=kv.dtype))

    def _kv_of_profiles(self) -> KvSize:
        sizes = set(self._measured_kv)
        if len(sizes) != 1:
            found = "profiles disagree on it" if sizes else "no profile file has it"
            raise ValueError(
                f"is missing, and {found}: give fixed_bytes and bytes_per_token "
                "(`prfaas plan kv` prints them)"
            )
        size = sizes.pop()
        return KvSize(Curve.quadratic(size.fixed_bytes, size.bytes_per_token), size.fixed_bytes)

    def _traffic(self, traffic: TrafficSpec) -> Traffic:
        lengths = traffic.lengths
        if lengths.trace is not None:
            return self._traced(lengths.trace, traffic.output_tokens)
        whole: Lengths
        if lengths.log_normal is not None:
            n = lengths.log_normal
            whole = LogNormalLengths(n.mu, n.sigma, n.min_tokens, n.max_tokens)
        else:
            bins = lengths.histogram or ()
            whole = EmpiricalLengths.of([b.tokens for b in bins], [b.weight for b in bins])
        # The same share of every prompt is cached, so all lengths shrink by the same factor.
        uncached = whole.scaled(1 - traffic.hit_ratio)
        return Traffic(uncached, traffic.output_tokens or 1.0, mean_tokens(whole))

    def _traced(self, trace: TraceSpec, output_tokens: float | None) -> Traffic:
        prompts = load_trace(self._path(trace.file))
        self.traffic_with_cache = partial(
            traced_traffic, prompts, trace.block_tokens, output_tokens
        )
        return traced_traffic(prompts, trace.block_tokens, output_tokens, trace.cache_tokens)


def traced_traffic(
    prompts: Sequence[TracePrompt],
    block_tokens: int,
    output_tokens: float | None,
    cache_tokens: float | None,
) -> Traffic:
    """A trace as traffic. `output_tokens` None: the trace's mean; `cache_tokens` None: no limit."""
    blocks = None if cache_tokens is None else int(cache_tokens / block_tokens)
    cached = cached_tokens(prompts, block_tokens, blocks)
    uncached = [p.input_tokens - c for p, c in zip(prompts, cached, strict=True)]
    return Traffic(
        EmpiricalLengths.of(uncached),
        output_tokens or sum(p.output_tokens for p in prompts) / len(prompts),
        sum(p.input_tokens for p in prompts) / len(prompts),
    )


def kv_size_of(model: ModelKv) -> KvSize:
    """The KVCache of a model as a curve: windows stop growing at their length."""
    # Between the ends of two windows the size is a straight line, so two points give each piece.
    knots = sorted({0.0, *(float(layer.window_tokens) for layer in model.layers)})
    pieces = []
    for start in knots:
        base = model.bytes_for(int(start))
        slope = model.bytes_for(int(start) + 1) - base
        pieces.append((base - slope * start, slope, 0.0))
    return KvSize(Curve(np.array(pieces), np.array(knots)), model.fixed_bytes)
