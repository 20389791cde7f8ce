"""simulation.yaml: a plan file with a `simulation` key, which says what happens over time.

It has shapes and single values only. `deploy.plan.simulate.building` turns a specification into a
replay.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator

from deploy.plan.solve.spec import BytesPerS, CacheTokens, Name, PlanSpec, Seconds, Span
from kvmanager.config_files.fields import Positive, Section, Tokens
from prfaas.engines.instance import DEFAULT_MAX_CONCURRENT
from scheduler.live.settings import HAND_OFF_TOKENS, REPORT_EVERY_S
from scheduler.routing.spill import Spill
from scheduler.stages.profile import MOST_TOKENS

POLICY_NAMES: Final = ("static", "router", "oracle", "homogeneous")
"""Policies that are always there. The file may change them and add others."""


class PhaseSpec(Section):
    """The traffic from `at` on. `load` is a share of the plan's highest rate."""

    at: Seconds
    load: Positive | None = None
    rate_rps: Positive | None = None
    length_factor: Positive = 1.0
    output_factor: Positive = 1.0

    @model_validator(mode="after")
    def _one(self) -> Self:
        if self.load is not None and self.rate_rps is not None:
            raise ValueError("give load or rate_rps, not both")
        return self


class ChangeSpec(Section):
    """A link has this rate or this loss from `at` on. What is left out stays as it was."""

    at: Seconds
    rate: BytesPerS | None = None
    loss: Annotated[float, Field(ge=0, lt=1)] | None = None
    rate_factor: Annotated[float, Field(gt=0, le=1)] | None = None


class SpanSpec(Section):
    """The time from `at` until `until`."""

    at: Seconds
    until: Seconds

    @model_validator(mode="after")
    def _ascend(self) -> Self:
        if self.until <= self.at:
            raise ValueError(f"until {self.until:g} s is not after at {self.at:g} s")
        return self


class OtherTrafficSpec(SpanSpec):
    """Other senders use this rate of the link meanwhile."""

    rate: BytesPerS


class LinkEventsSpec(Section):
    """What happens to one link of the plan."""

    source: Annotated[str, Field(alias="from")]
    target: Annotated[str, Field(alias="to")]
    changes: tuple[ChangeSpec, ...] = ()
    outages: tuple[SpanSpec, ...] = ()
    other_traffic: tuple[OtherTrafficSpec, ...] = ()


class LostClusterSpec(SpanSpec):
    """A cluster is lost meanwhile, with all that it has under way."""

    cluster: str


class ObjectiveSpec(Section):
    """What a request must keep to count: time to first token, mean time per further token."""

    ttft: Span = 30.0
    tbt: Span = 0.1


class PolicySpec(Section):
    """What decides. Without `threshold_tokens` and `num_prefill`, the best plan's values are
    used.
    """

    routing: Literal["static", "router", "oracle"] = "router"
    order: Literal["shortest", "arrival"] = "shortest"
    """The order of prefills that wait in a prefill cluster."""
    threshold_tokens: CacheTokens | None = None
    num_prefill: Annotated[int, Field(ge=0)] | None = None
    spill: Spill = "overflow"
    """When another PD cluster than its home decodes a request."""
    margin: Span | None = None
    margin_share: Annotated[float, Field(ge=0)] | None = None
    home_margin: Span | None = None
    home_margin_share: Annotated[float, Field(ge=0)] | None = None
    admission: Literal["off", "slots", "predicted", "present", "at_decode"] = "slots"
    """Which requests are refused. slots: those for which no decode slot is predicted to be free, as
    in a gateway without `ttft_slo_s`. The others refuse for `objective.ttft` as well.
    """
    max_prefill_load: Positive | None = None
    max_decode_load: Positive | None = None
    rebalance_every: Span | None = None
    """The period of the long timescale. Left out: the threshold and roles stay."""
    report_every: Span = REPORT_EVERY_S
    """How often clusters report to the gateway."""
    hand_off_tokens: Tokens = HAND_OFF_TOKENS
    """Prompts with at most so many uncached tokens are served whole by an instance that decodes."""
    watch: Literal["monitor", "direct"] = "monitor"
    """How changes of links are seen: by the link monitor, or as they are."""


class ContentionSpec(Section):
    """How much later first tokens of a cluster's prefills come than their parts say, as `service`
    of a gateway's /prfaas/scheduling says.
    """

    overhead: Span = 0.0
    """For every request: rendering, reserving, HTTP, the hand-over to the engine that decodes."""
    decode: Span = 0.0
    """For each request in a decoding engine's batch."""
    busy: Span = 0.0
    """While all instances of other clusters prefill."""


class SimulationSpec(Section):
    """What happens, to which traffic, and who decides."""

    duration: Span = 1800.0
    """The duration of drawn traffic. A trace has its own."""
    load: Positive | None = None
    """A share of the plan's highest rate. Left out: traffic.rate_rps."""
    output_sigma: Annotated[float, Field(ge=0)] = 0.0
    """The spread of output lengths: the standard deviation of their logarithm."""
    trace_speed: Positive = 1.0
    phases: tuple[PhaseSpec, ...] = ()
    links: tuple[LinkEventsSpec, ...] = ()
    lost: tuple[LostClusterSpec, ...] = ()
    cache_tokens: dict[Name, CacheTokens] = Field(default={})
    """The size of the prefix cache by cluster; needs a trace."""
    objective: ObjectiveSpec = ObjectiveSpec()
    prefill_factors: dict[Name, Positive] = Field(default={})
    """Real over profiled prefill time, by cluster."""
    contention: dict[Name, ContentionSpec] = Field(default={})
    """The time that is beyond the parts of a TTFT, by cluster. Left out, there is none."""
    encode_instances: dict[Name, Annotated[int, Field(ge=1)]] = Field(default={})
    """Instances that only encode, by cluster, beside its other instances; needs `images`."""
    max_concurrent: Annotated[int, Field(ge=1)] = DEFAULT_MAX_CONCURRENT
    """The most prefills that an instance is given at a time. It computes them one by one."""
    pass_tokens: Tokens = MOST_TOKENS
    """The most prompt tokens of a forward pass: vLLM's `max_num_batched_tokens`. The end of one
    prompt and the begin of the next share a pass."""
    load_steps: Annotated[int, Field(ge=0)] = 1
    """The decode steps that an engine begins between the end of the step in which KVCache lands and
    the first step of its request. vLLM loads KVCache during one."""
    prefill_jitter: Annotated[float, Field(ge=0, le=2)] = 0.0
    transfer_timeout: Span = 30.0
    policy: str = "router"
    """The policy that runs when the command names none."""
    policies: dict[Name, PolicySpec] = Field(default={})


class SimulationFile(PlanSpec):
    """A whole simulation file."""

    simulation: SimulationSpec = SimulationSpec()
