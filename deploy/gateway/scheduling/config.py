"""Settings of the scheduler in region.yaml (`gateway.scheduling`) or a gateway file.

These are values with their limits, parsed once. Each section makes the configuration of a core,
which has the defaults and says what they mean. It does not know clusters, links or requests.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from kvmanager.config_files.fields import (
    CoreFields,
    NotNegative,
    Positive,
    Seconds,
    SecondsOrZero,
    Section,
    filled_from,
    settings_of,
)
from prfaas.front_config import EncodingSection, QueueSection
from scheduler.live.admission import AdmissionConfig, AdmissionPolicy
from scheduler.live.long_term.conversion import ConversionConfig
from scheduler.live.long_term.loop import LongTermConfig
from scheduler.live.settings import LiveSettings, RoutingPolicy
from scheduler.live.tenants import TenantLimit
from scheduler.routing.threshold import ThresholdConfig

AdmissionMode = Literal["predicted", "present", "off"]
Factor = Annotated[float, Field(ge=1)]


@filled_from(RoutingPolicy, ThresholdConfig)
class RoutingSection(Section):
    """How the side of one request is chosen. A link that is down, stale or congested keeps prompts
    local.
    """

    policy: Literal["predicted", "threshold"]
    local_prefill: Literal["allow", "refuse"] = "allow"
    """What becomes of a prompt that is meant for a prefill cluster and cannot go there. allow: the
    PD cluster prefills it. refuse: it is answered with 503 and Retry-After.
    """
    margin_s: SecondsOrZero
    margin_share: NotNegative
    home_margin_s: SecondsOrZero
    home_margin_share: NotNegative
    stream_weight: NotNegative
    max_tail_s: Seconds
    max_link_age_s: Seconds
    rising_factor: Factor
    congested_factor: Factor
    max_factor: Factor
    return_s: Seconds

    def routing(self) -> RoutingPolicy:
        """The configuration of the router."""
        return settings_of(self, RoutingPolicy)

    def threshold(self) -> ThresholdConfig:
        """The configuration of how the threshold follows a link."""
        return settings_of(self, ThresholdConfig, max_age_s=self.max_link_age_s)

    @model_validator(mode="after")
    def _check(self) -> RoutingSection:
        self.threshold()
        return self


@filled_from(AdmissionConfig, LiveSettings)
class AdmissionSection(Section):
    """Which requests are refused before they cost anything."""

    policy: AdmissionMode
    """Which load refuses a request: the load predicted for the time when it would decode
    (predicted), the load now (present), or none, so that only limits of tenants do (off).
    """
    ttft_slo_s: Seconds | None
    max_prefill_load: Positive
    max_decode_load: Positive
    min_retry_s: Seconds
    max_retry_s: Seconds
    default_tenant: Annotated[TenantLimit, CoreFields(TenantLimit)]
    tenants: dict[str, Annotated[TenantLimit, CoreFields(TenantLimit)]]

    def admission(self) -> AdmissionConfig:
        """The configuration of admission. With policy "off", only its bounds of Retry-After
        are used.
        """
        policy = AdmissionPolicy.PREDICTED if self.policy == "off" else AdmissionPolicy(self.policy)
        return settings_of(self, AdmissionConfig, policy=policy)

    @model_validator(mode="after")
    def _check(self) -> AdmissionSection:
        self.admission()
        return self


@filled_from(LongTermConfig, ConversionConfig)
class LongTermSection(Section):
    """The loop that re-solves the threshold and the division of instances from measured traffic."""

    mode: Literal["act", "advise", "off"] = "act"
    """act: it sets the threshold and converts instances. advise: it only reports. off: neither."""
    period_s: Seconds
    min_requests: Annotated[int, Field(ge=1)]
    min_gain: Positive
    dwell_s: SecondsOrZero
    reverse_dwell_s: SecondsOrZero
    drain_limit_s: Seconds

    def loop(self) -> LongTermConfig:
        """The configuration of the loop. Advice is not carried out, so the next needs no dwell
        time.
        """
        if self.mode == "act":
            return settings_of(self, LongTermConfig)
        return settings_of(self, LongTermConfig, dwell_s=0.0, reverse_dwell_s=0.0)

    def conversion(self) -> ConversionConfig:
        """The configuration of conversions."""
        return settings_of(self, ConversionConfig)

    @model_validator(mode="after")
    def _check(self) -> LongTermSection:
        self.loop()
        self.conversion()
        return self


class CalibrationSection(Section):
    """A few prefills on idle instances of which nothing is known, so that the first predictions
    rest on measured times.
    """

    mode: Literal["on", "off"] = "on"
    """on: what joins is timed while it has nothing to do. off: only requests teach."""
    limit_s: Seconds = 5.0
    """The longest that an instance computes for it, seconds."""


class SchedulingConfig(Section):
    """All settings of scheduling. Every setting has a default."""

    calibration: CalibrationSection = CalibrationSection()
    """Times of a few prefills on idle instances of which nothing is known."""

    routing: RoutingSection = RoutingSection.of()
    """How the side of one request is chosen."""
    queue: QueueSection = QueueSection.of()
    """The order in which prefill jobs wait."""
    encoding: EncodingSection = EncodingSection.of()
    """How instances encode images and other media for others, where a cluster has such ones."""
    admission: AdmissionSection = AdmissionSection.of()
    """Which requests are refused before they cost anything."""
    long_term: LongTermSection = LongTermSection.of()
    """How the threshold and the roles of instances follow measured traffic."""
