"""Turns plan.yaml into the region that the planner works on.

Values that do not fit together are problems with their path, like wrong values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from deploy.plan.model_config import config_file, read_config
from deploy.plan.solve.image_building import (
    ImagePlanInput,
    encode_line,
    media_traffic,
    stage_model,
    stage_slo,
    with_encoding,
    with_images,
)
from deploy.plan.solve.name_checks import name_problems
from deploy.plan.solve.served import kv_size_of, traced_traffic
from deploy.plan.solve.spec import (
    ImagesSpec,
    KvSpec,
    PlanPdClusterSpec,
    PlanSpec,
    ProfileSpec,
    TraceSpec,
    TrafficSpec,
)
from deploy.plan.trace import load_trace
from deploy.profile_file import (
    DecodeStep,
    EngineProfileFile,
    KvCacheSize,
    MeasuredEncode,
    PrefillPoint,
)
from kvmanager.config_files.problems import FileError, KeyPath, Problem, suggestion
from kvmanager.config_files.yaml_files import parse_yaml, read_text
from kvmanager.hf_config import embedding_token_bytes, read_model_kv
from scheduler.encoding.line import EncodeLine
from scheduler.planning.curves import Curve, FittedCurve, fit_quadratic, interpolate
from scheduler.planning.joint import JointRegion
from scheduler.planning.lengths import EmpiricalLengths, Lengths, LogNormalLengths, mean_tokens
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
    "pd_clusters, links, uplinks, models, images, slo"
)
_ONE_CLUSTER = "are planned for one PD cluster without homes of requests; the file has {} of them"


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
    images: ImagePlanInput | None = None


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
    return PlanInput(
        spec, built.region, built.fits, built.traffic_with_cache, built.joint, built.images
    )


class _Builder:
    """Builds what it can and notes what is wrong. `region` is whole if `problems` is empty."""

    def __init__(self, spec: PlanSpec, directory: Path) -> None:
        self.problems: list[Problem] = []
        self.fits: dict[str, FittedCurve] = {}
        self.traffic_with_cache: Callable[[float], Traffic] | None = None
        self._spec = spec
        self._directory = directory
        self._prefills: dict[str, Curve] = {}
        self._plain_prefills: dict[str, Curve] = {}
        """The prefill times without what images add."""
        self._encoders: dict[str, EncodeLine] = {}
        self._text: Traffic | None = None
        """The traffic without its images."""
        self.images: ImagePlanInput | None = None
        self._measured_kv: list[KvCacheSize] = []
        self._steps: dict[str, Sequence[DecodeStep]] = {}
        for name, profile in spec.profiles.items():
            self._tried(("profiles", name), partial(self._read_profile, name, profile))
        self.problems += name_problems(spec)
        self.joint: JointRegion | None = None
        self._kv_sizes: dict[str, KvSize | None] = {
            "": self._tried(("kv_cache",), partial(self._kv, spec.kv_cache))
        }
        self._traffics: dict[str, Traffic | None] = {
            "": self._tried(("traffic", "lengths"), partial(self._traffic, spec.traffic))
        }
        self._text = self._traffics[""]
        if spec.images is not None and self._text is not None:
            self._traffics[""] = with_images(self._text, spec.images)
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
            if spec.images is not None:
                self._build_images(spec.images)

    def _build_images(self, images: ImagesSpec) -> None:
        """The instances to arrange. Without problems before, `region` has one PD cluster."""
        spec, slo = self._spec, stage_slo(self._spec.slo)
        if spec.has_homes or len(spec.pd_clusters) != 1:
            self._note(("images",), _ONE_CLUSTER.format(len(spec.pd_clusters)))
            return
        if slo is None:
            missing = "ttft_p90" if spec.slo.ttft_p90 is None else "tokens_per_s"
            self._note(("slo", missing), "is missing: `images` need an objective of both")
            return
        cluster = spec.pd_clusters[0]
        steps, line = self._steps.get(cluster.profile), self._encoders.get(cluster.profile)
        token_bytes = self._tried(("images",), partial(self._embedding_bytes, images))
        profiles = {c.name: c.profile for c in (*spec.prefill_clusters, *spec.pd_clusters)}
        # What is missing was noted where it is.
        if not steps or line is None or not token_bytes or self._text is None:
            return
        if not self._encoders.keys() >= set(profiles.values()):
            return
        self.images = ImagePlanInput(
            cluster.name,
            cluster.instances,
            stage_model(
                self._plain_prefills[cluster.profile],
                line,
                steps,
                self.region,
                token_bytes,
                cluster,
                images,
                slo,
            ),
            media_traffic(self._text, images),
            images,
            self._text,
            {name: self._plain_prefills[profile] for name, profile in profiles.items()},
            {name: self._encoders[profile] for name, profile in profiles.items()},
        )

    def _embedding_bytes(self, images: ImagesSpec) -> float:
        kv = self._spec.kv_cache
        found = images.embedding_bytes_per_token
        if found is None and kv is not None and kv.model_config_file is not None:
            config = read_config(config_file(self._path(kv.model_config_file)))
            found = embedding_token_bytes(config, kv.dtype)
        if not found:
            raise ValueError(
                "embedding_bytes_per_token is missing, and no config.json of a model that takes "
                "images says it: give the model's hidden size times the bytes of a value"
            )
        return found

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
        encode: MeasuredEncode | None = None
        if profile.file is not None:
            measured = EngineProfileFile.load(self._path(profile.file)).profile
            self._fit(name, measured.prefill.points, profile.fit)
            encode = measured.encode
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
        if self._spec.images is not None and name in self._prefills:
            line = self._encoders[name] = encode_line(profile.encode, encode)
            self._plain_prefills[name] = self._prefills[name]
            # Where a prompt is prefilled, its images are encoded, too.
            self._prefills[name] = with_encoding(self._prefills[name], line, self._spec.images)

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
        # A plan rests on lengths alone, so it does not matter which unit the times have.
        prompts = load_trace(self._path(trace.file), trace.block_tokens, trace.unit or "ms")
        self.traffic_with_cache = partial(
            traced_traffic, prompts, trace.block_tokens, output_tokens
        )
        return traced_traffic(prompts, trace.block_tokens, output_tokens, trace.cache_tokens)
