"""What operators may say of the scheduler, in region.yaml (`gateway.scheduling`) or a gateway file.

Values with their limits, parsed once; each section makes the configuration of one core. Does not
know clusters, links or requests.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from prfaas.front_config import QueueSection
from scheduler.live.admission import AdmissionConfig, AdmissionPolicy
from scheduler.live.conversion import ConversionConfig
from scheduler.live.long_term import LongTermConfig
from scheduler.live.settings import RoutingPolicy
from scheduler.live.tenants import TenantLimit
from scheduler.routing.threshold import ThresholdConfig

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RoutingSection(_Section):
    """How the side of one request is chosen.

    "predicted": by the threshold, unless the other side's first token is predicted sooner by more
    than `margin_s` + `margin_share` of it. "threshold": by the threshold alone, as it follows the
    link. Either way a link that is down, stale or congested keeps prompts local.
    """

    policy: Literal["predicted", "threshold"] = RoutingPolicy().policy
    margin_s: Share = RoutingPolicy().margin_s
    margin_share: Share = RoutingPolicy().margin_share
    max_tail_s: Positive = RoutingPolicy().max_tail_s
    max_link_age_s: Positive = RoutingPolicy().max_link_age_s
    rising_factor: Annotated[float, Field(ge=1)] = 1.1
    congested_factor: Annotated[float, Field(ge=1)] = 1.5
    max_factor: Annotated[float, Field(ge=1)] = 16.0
    return_s: Positive = 10.0

    def routing(self) -> RoutingPolicy:
        """For the router."""
        return RoutingPolicy(
            policy=self.policy,
            margin_s=self.margin_s,
            margin_share=self.margin_share,
            max_tail_s=self.max_tail_s,
            max_link_age_s=self.max_link_age_s,
        )

    def threshold(self) -> ThresholdConfig:
        """How t follows a link."""
        return ThresholdConfig(
            rising_factor=self.rising_factor,
            congested_factor=self.congested_factor,
            max_factor=self.max_factor,
            return_s=self.return_s,
            max_age_s=self.max_link_age_s,
        )

    @model_validator(mode="after")
    def _check(self) -> RoutingSection:
        self.threshold()
        return self


class TenantSection(_Section):
    """What one tenant may have in flight, and bring per second; left out: no limit."""

    max_requests: Annotated[int, Field(gt=0)] | None = None
    max_tokens: Annotated[int, Field(gt=0)] | None = None
    tokens_per_s: Positive | None = None
    burst_tokens: Share = 0.0

    def limit(self) -> TenantLimit:
        """For the ledger of tenants."""
        return TenantLimit(
            max_requests=self.max_requests,
            max_tokens=self.max_tokens,
            tokens_per_s=self.tokens_per_s,
            burst_tokens=self.burst_tokens,
        )

    @model_validator(mode="after")
    def _check(self) -> TenantSection:
        self.limit()
        return self


class AdmissionSection(_Section):
    """Which requests are refused before they cost anything.

    `policy` "off" refuses none but those over a tenant's limit. `ttft_slo_s` left out: a long queue
    is no reason. Tenants are API keys by the name given to them in the file of keys.
    """

    policy: Literal["predicted", "present", "off"] = "predicted"
    ttft_slo_s: Positive | None = None
    max_prefill_load: Positive = 0.85
    max_decode_load: Positive = 0.97
    min_retry_s: Positive = 1.0
    max_retry_s: Positive = 60.0
    default_tenant: TenantSection = TenantSection()
    tenants: dict[str, TenantSection] = {}

    def admission(self) -> AdmissionConfig:
        """For the core. Policy "off" asks only for its bounds of a wait."""
        is_off = self.policy == "off"
        return AdmissionConfig(
            policy=AdmissionPolicy.PREDICTED if is_off else AdmissionPolicy(self.policy),
            ttft_slo_s=self.ttft_slo_s,
            max_prefill_load=self.max_prefill_load,
            max_decode_load=self.max_decode_load,
            min_retry_s=self.min_retry_s,
            max_retry_s=self.max_retry_s,
        )

    @model_validator(mode="after")
    def _check(self) -> AdmissionSection:
        self.admission()
        return self


class LongTermSection(_Section):
    """The loop that re-solves the threshold and the division of instances from measured traffic.

    "act": it sets the threshold and converts instances. "advise": it only reports. "off": neither.
    `drain_limit_s` and `dwell_s` hold for conversions that operators order, too.
    """

    mode: Literal["act", "advise", "off"] = "act"
    period_s: Positive = 300.0
    min_requests: Annotated[int, Field(ge=1)] = 200
    min_gain: Positive = 0.03
    dwell_s: Share = ConversionConfig().dwell_s
    reverse_dwell_s: Share = 1800.0
    drain_limit_s: Positive = 600.0

    def loop(self) -> LongTermConfig:
        """For the core that decides. Advice is not carried out, so that the next need not dwell."""
        is_acting = self.mode == "act"
        return LongTermConfig(
            period_s=self.period_s,
            min_requests=self.min_requests,
            min_gain=self.min_gain,
            dwell_s=self.dwell_s if is_acting else 0.0,
            reverse_dwell_s=self.reverse_dwell_s if is_acting else 0.0,
        )

    def conversion(self) -> ConversionConfig:
        """For the core that converts."""
        return ConversionConfig(drain_limit_s=self.drain_limit_s, dwell_s=self.dwell_s)

    @model_validator(mode="after")
    def _check(self) -> LongTermSection:
        self.loop()
        self.conversion()
        return self


class SchedulingConfig(_Section):
    """All of it. Everything has a default."""

    routing: RoutingSection = RoutingSection()
    queue: QueueSection = QueueSection()
    admission: AdmissionSection = AdmissionSection()
    long_term: LongTermSection = LongTermSection()
