"""What operators may say of the scheduler, in region.yaml (`gateway.scheduling`) or a gateway file.

Values with their limits, parsed once; each section makes the configuration of one core, whose
defaults are its own. Does not know clusters, links or requests.
"""

from __future__ import annotations

from typing import Annotated, Literal, cast

from pydantic import Field, model_validator

from kvmanager.config_files.fields import (
    CoreFields,
    NotNegative,
    Positive,
    Seconds,
    SecondsOrZero,
    Section,
    settings_of,
)
from prfaas.front_config import QueueSection
from scheduler.live.admission import AdmissionConfig, AdmissionPolicy
from scheduler.live.conversion import ConversionConfig
from scheduler.live.long_term import LongTermConfig
from scheduler.live.settings import RoutingPolicy
from scheduler.live.tenants import TenantLimit
from scheduler.routing.threshold import ThresholdConfig

_ROUTING = RoutingPolicy()
_THRESHOLD = ThresholdConfig()
_ADMISSION = AdmissionConfig()
_LOOP = LongTermConfig()
_CONVERSION = ConversionConfig()

AdmissionMode = Literal["predicted", "present", "off"]
Factor = Annotated[float, Field(ge=1)]


class RoutingSection(Section):
    """How the side of one request is chosen. A link that is down, stale or congested keeps prompts
    local.
    """

    policy: Literal["predicted", "threshold"] = _ROUTING.policy
    """predicted: by the threshold, unless the other side's first token is predicted sooner by more
    than the margin. threshold: by the threshold alone, as it follows the link.
    """
    margin_s: SecondsOrZero = _ROUTING.margin_s
    """How much sooner the other side's first token must be, seconds or such as 500ms; added to
    `margin_share`.
    """
    margin_share: NotNegative = _ROUTING.margin_share
    """How much sooner the other side's first token must be, as a share of its predicted time; added
    to `margin_s`.
    """
    max_tail_s: Seconds = _ROUTING.max_tail_s
    """A link that would take longer after the prefill keeps the prompt local, seconds or 20s."""
    max_link_age_s: Seconds = _ROUTING.max_link_age_s
    """A link that nobody has reported for so long keeps prompts local, seconds or such as 5s."""
    rising_factor: Factor = _THRESHOLD.rising_factor
    """What the threshold is multiplied by while a link is about to be congested."""
    congested_factor: Factor = _THRESHOLD.congested_factor
    """What the threshold is multiplied by while a link is congested."""
    max_factor: Factor = _THRESHOLD.max_factor
    """Most that the threshold is multiplied by, whatever the link does."""
    return_s: Seconds = _THRESHOLD.return_s
    """Time constant with which the threshold falls back when a link is well again, seconds."""

    def routing(self) -> RoutingPolicy:
        """For the router."""
        return settings_of(self, RoutingPolicy)

    def threshold(self) -> ThresholdConfig:
        """How t follows a link."""
        return settings_of(self, ThresholdConfig, max_age_s=self.max_link_age_s)

    @model_validator(mode="after")
    def _check(self) -> RoutingSection:
        self.threshold()
        return self


class AdmissionSection(Section):
    """Which requests are refused before they cost anything."""

    policy: AdmissionMode = cast(AdmissionMode, _ADMISSION.policy.value)
    """By the load predicted for the time when the request would decode (predicted), by the load now
    (present), or none but those over a tenant's limit (off).
    """
    ttft_slo_s: Seconds | None = _ADMISSION.ttft_slo_s
    """A request is refused if its first token is predicted later, seconds or such as 30s. Left out:
    a long queue is no reason.
    """
    max_prefill_load: Positive = _ADMISSION.max_prefill_load
    """Share of `ttft_slo_s` within which the first token must be predicted; the rest is for shorter
    prompts that come later and overtake.
    """
    max_decode_load: Positive = _ADMISSION.max_decode_load
    """Share of the decode slots and of their memory that may be taken; above 1 requests wait."""
    min_retry_s: Seconds = _ADMISSION.min_retry_s
    """Least Retry-After of a refusal, seconds."""
    max_retry_s: Seconds = _ADMISSION.max_retry_s
    """Greatest Retry-After of a refusal, seconds or such as 1min."""
    default_tenant: Annotated[TenantLimit, CoreFields(TenantLimit)] = Field(
        default_factory=TenantLimit
    )
    """Limits of each tenant that `tenants` does not name."""
    tenants: dict[str, Annotated[TenantLimit, CoreFields(TenantLimit)]] = Field(default={})
    """Limits by tenant: API keys by the name given to them in the file of keys."""

    def admission(self) -> AdmissionConfig:
        """For the core. Policy "off" asks only for its bounds of a wait."""
        policy = AdmissionPolicy.PREDICTED if self.policy == "off" else AdmissionPolicy(self.policy)
        return settings_of(self, AdmissionConfig, policy=policy)

    @model_validator(mode="after")
    def _check(self) -> AdmissionSection:
        self.admission()
        return self


class LongTermSection(Section):
    """The loop that re-solves the threshold and the division of instances from measured traffic."""

    mode: Literal["act", "advise", "off"] = "act"
    """act: it sets the threshold and converts instances. advise: it only reports. off: neither."""
    period_s: Seconds = _LOOP.period_s
    """Between two solutions, seconds or such as 5min."""
    min_requests: Annotated[int, Field(ge=1)] = _LOOP.min_requests
    """Requests that must have been measured before anything changes."""
    min_gain: Positive = _LOOP.min_gain
    """Throughput that conversions must gain altogether, as a share of the present."""
    dwell_s: SecondsOrZero = _LOOP.dwell_s
    """Least time from one conversion of a cluster to its next, seconds or such as 4min; also for
    conversions that operators order.
    """
    reverse_dwell_s: SecondsOrZero = _LOOP.reverse_dwell_s
    """Least time from a conversion to one in the other direction, seconds or such as 30min."""
    drain_limit_s: Seconds = _CONVERSION.drain_limit_s
    """A drain that takes longer is given up, seconds or such as 10min: the longest decodes must
    fit. Also for conversions that operators order.
    """

    def loop(self) -> LongTermConfig:
        """For the core that decides. Advice is not carried out, so that the next need not dwell."""
        if self.mode == "act":
            return settings_of(self, LongTermConfig)
        return settings_of(self, LongTermConfig, dwell_s=0.0, reverse_dwell_s=0.0)

    def conversion(self) -> ConversionConfig:
        """For the core that converts."""
        return settings_of(self, ConversionConfig)

    @model_validator(mode="after")
    def _check(self) -> LongTermSection:
        self.loop()
        self.conversion()
        return self


class SchedulingConfig(Section):
    """All of it. Everything has a default."""

    routing: RoutingSection = RoutingSection()
    """How the side of one request is chosen."""
    queue: QueueSection = QueueSection()
    """The order in which prefill jobs wait."""
    admission: AdmissionSection = AdmissionSection()
    """Which requests are refused before they cost anything."""
    long_term: LongTermSection = LongTermSection()
    """How the threshold and the roles of instances follow measured traffic."""
