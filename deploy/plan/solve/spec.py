"""plan.yaml: what a user says about hardware, links, traffic and prices.

It has shapes and single values only. `deploy.plan.solve.building` turns a specification into a
region.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from deploy.plan.trace import TimeUnit
from deploy.profile_file import DecodeStep, EncodePoint, PrefillPoint
from kvmanager.config_files.fields import NotNegative, Positive, Section, spelled
from kvmanager.config_files.units import parse_duration, parse_rate, parse_size, parse_tokens


def _rate(value: Any) -> Any:
    """The rate with its unit. A number alone could be bits or bytes."""
    return parse_rate(str(value))


def _duration(value: Any) -> Any:
    return parse_duration(str(value))


Tokens = Annotated[Positive, spelled(parse_tokens)]
Bytes = Annotated[NotNegative, spelled(parse_size)]
BytesPerS = Annotated[Positive, BeforeValidator(_rate)]
Seconds = Annotated[NotNegative, BeforeValidator(_duration)]
Span = Annotated[Positive, BeforeValidator(_duration)]
CacheTokens = Annotated[NotNegative, spelled(parse_tokens)]
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$"
Name = Annotated[str, Field(pattern=NAME_PATTERN)]
Count = Annotated[int, Field(ge=0)]


class LogNormalSpec(Section):
    """ln(length) has mean `mu` and standard deviation `sigma`. The distribution is truncated to the
    given lengths and renormalised.
    """

    mu: float
    sigma: Annotated[float, Field(gt=0)]
    min_tokens: Tokens = 1.0
    max_tokens: Tokens


class Bin(Section):
    """Prompts of one length, and how many there are of them, in any unit."""

    tokens: Tokens
    weight: Annotated[float, Field(gt=0)]


class TraceSpec(Section):
    """A request trace: JSON lines of timestamp, input_length, output_length, hash_ids.

    `block_tokens` is the size of the blocks that `hash_ids` names. `unit` is ms or s; left out: ms,
    and a trace that would be too fast then is refused. `cache_tokens` is the size of the prefix
    cache, which decides what of each prompt is cached. 0: no cache; left out: a cache that never
    evicts.
    """

    file: Path
    block_tokens: Annotated[int, Field(ge=1)] = 512
    cache_tokens: CacheTokens | None = None
    unit: TimeUnit | None = None


def _exactly_one(part: BaseModel, *names: str) -> None:
    given = [name for name in names if getattr(part, name) is not None]
    if len(given) != 1:
        raise ValueError(f"give one of {', '.join(names)}; here: {', '.join(given) or 'none'}")


class LengthsSpec(Section):
    """Lengths of whole prompts, as a distribution, a histogram or a trace."""

    log_normal: LogNormalSpec | None = None
    histogram: Annotated[tuple[Bin, ...], Field(min_length=1)] | None = None
    trace: TraceSpec | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        _exactly_one(self, "log_normal", "histogram", "trace")
        return self


class TrafficSpec(Section):
    """What arrives. `hit_ratio` is the cached share of every prompt."""

    lengths: LengthsSpec
    output_tokens: Annotated[float, Field(gt=0)] | None = None
    """The mean output length. It may be left out with a trace."""
    hit_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.0
    rate_rps: Annotated[float, Field(gt=0)] | None = None
    """The load you expect. Left out: only the highest possible load is computed."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.lengths.trace is None and self.output_tokens is None:
            raise ValueError("output_tokens is missing; only a trace brings its own")
        if self.lengths.trace is not None and self.hit_ratio:
            raise ValueError("hit_ratio does not go with a trace: cache_tokens decides its hits")
        return self


class KvSpec(Section):
    """KVCache of one request: a fixed part and a part per token, or a Hugging Face config.json."""

    fixed_bytes: Bytes | None = None
    bytes_per_token: Bytes | None = None
    model_config_file: Path | None = None
    dtype: str = "auto"

    @model_validator(mode="after")
    def _one(self) -> Self:
        sizes = (self.fixed_bytes, self.bytes_per_token)
        if (self.model_config_file is None) == (sizes == (None, None)) or (
            self.model_config_file is None and None in sizes
        ):
            raise ValueError("give fixed_bytes and bytes_per_token, or model_config_file")
        return self


class CoefficientsSpec(Section):
    """T(l) = constant_s + s_per_token * l + s_per_token2 * l^2."""

    constant_s: Annotated[float, Field(ge=0)]
    s_per_token: Annotated[float, Field(ge=0)]
    s_per_token2: Annotated[float, Field(ge=0)] = 0.0


class PrefillSpec(Section):
    """Prefill time over the uncached length: measured points, or coefficients."""

    points: Annotated[tuple[PrefillPoint, ...], Field(min_length=1)] | None = None
    fit: Literal["quadratic", "interpolate"] = "quadratic"
    coefficients: CoefficientsSpec | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        _exactly_one(self, "points", "coefficients")
        return self


class DecodeSpec(Section):
    """Step times at batch sizes. The SLO selects the largest batch that keeps it."""

    steps: Annotated[tuple[DecodeStep, ...], Field(min_length=1)]


class EncodeSpec(Section):
    """Time of an encoder pass over the tokens of its media: measured points, or a line."""

    points: Annotated[tuple[EncodePoint, ...], Field(min_length=1)] | None = None
    fixed_s: NotNegative | None = None
    s_per_token: NotNegative | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        line = (self.fixed_s, self.s_per_token)
        if (self.points is None) == (line == (None, None)) or (
            self.points is None and None in line
        ):
            raise ValueError("give points, or fixed_s and s_per_token")
        return self


class ProfileSpec(Section):
    """One instance of some hardware: a file from `prfaas plan profile`, or the numbers."""

    file: Path | None = None
    fit: Literal["quadratic", "interpolate"] = "quadratic"
    """How the points in `file` become a curve."""
    prefill: PrefillSpec | None = None
    decode: DecodeSpec | None = None
    encode: EncodeSpec | None = None
    """Needed with `images`, unless `file` has it."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        _exactly_one(self, "file", "prefill")
        return self


class PlanClusterSpec(Section):
    """Equal instances at one site."""

    name: Name
    instances: Count
    profile: str
    price_per_instance_hour: NotNegative = 0.0
    model: Annotated[str, Field(pattern=NAME_PATTERN + "|^$")] = ""
    """The key in `models` of what the instances serve; "": the model of `traffic`. A cluster that
    serves several models is given once for each.
    """


class PlanPdClusterSpec(PlanClusterSpec):
    """`decode_memory` is the KVCache that one decode instance has room for, bytes.

    Requests have their home in a PD cluster if `rate_rps` or `traffic` is given. `traffic` is for
    requests of other lengths than the model's.
    """

    decode_memory: Bytes | None = None
    rate_rps: Annotated[float, Field(gt=0)] | None = None
    traffic: TrafficSpec | None = None


class PlanLinkSpec(Section):
    """A link from a prefill cluster to a PD cluster. `price_per_gb` is for 10^9 bytes."""

    source: Annotated[str, Field(alias="from")]
    target: Annotated[str, Field(alias="to")]
    rate: BytesPerS
    rtt: Seconds = 0.0
    price_per_gb: NotNegative = 0.0


class UplinkSpec(Section):
    """Bandwidth that all links from a cluster share (egress), or all links to it (ingress)."""

    cluster: str
    way: Literal["egress", "ingress"]
    rate: BytesPerS


class PlannedModelSpec(Section):
    """A further model: its traffic, and the KVCache of its requests."""

    traffic: TrafficSpec
    kv_cache: KvSpec


class SloSpec(Section):
    """`tokens_per_s` is the decode speed of each request, `ttft_p90` the time for 90% of first
    tokens.
    """

    tokens_per_s: Annotated[float, Field(gt=0)] | None = None
    ttft_p90: Span | None = None


class MoveSpec(Section):
    """How instances of one cluster pull embeddings and KVCache from each other."""

    rate: BytesPerS
    latency: Seconds = 0.0


class ImagesSpec(Section):
    """Images, or other media, in the requests of `traffic`, whose lengths are those of the text."""

    share: Annotated[float, Field(gt=0, le=1)]
    """The share of requests with images."""
    per_request: Annotated[float, Field(ge=1)] = 1.0
    """Images of a request that has any, in the mean."""
    tokens: Annotated[int, Field(ge=1), spelled(parse_tokens)]
    """Tokens of one image in the prompt."""
    pixel_bytes: Annotated[Positive, spelled(parse_size)]
    """One image as clients send it."""
    embedding_bytes_per_token: Annotated[Positive, spelled(parse_size)] | None = None
    """It may be left out if `kv_cache` has a model_config_file."""
    repeats: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The share of images that were sent lately, so that their embeddings are there."""
    move: MoveSpec
    batching: Literal["engine", "stage_level", "prefill_first"] = "engine"
    """engine: as vLLM; stage_level: Algorithm 1 of HydraInfer; prefill_first: vLLM's engine V0."""


class PlanSpec(Section):
    """A whole plan file."""

    traffic: TrafficSpec
    kv_cache: KvSpec | None = None
    """It may be left out if a profile file has it."""
    profiles: Annotated[dict[str, ProfileSpec], Field(min_length=1)]
    prefill_clusters: tuple[PlanClusterSpec, ...] = ()
    pd_clusters: Annotated[tuple[PlanPdClusterSpec, ...], Field(min_length=1)]
    links: tuple[PlanLinkSpec, ...] = ()
    uplinks: tuple[UplinkSpec, ...] = ()
    models: dict[Name, PlannedModelSpec] = Field(default={})
    """Further models beside that of `traffic` and `kv_cache`."""
    images: ImagesSpec | None = None
    slo: SloSpec = SloSpec()
    instances: Literal["whole", "shared"] = "whole"
    """whole: an instance prefills or decodes; shared: it may divide its time."""
    currency: str = "USD"

    @property
    def has_homes(self) -> bool:
        """Whether requests belong to PD clusters. Otherwise any PD cluster decodes any request."""
        own = any(pd.rate_rps or pd.traffic for pd in self.pd_clusters)
        return own or bool(self.uplinks or self.models)
