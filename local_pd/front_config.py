"""Configuration file of a stand-alone local PD cluster front (`prfaas pd`), in YAML.

Does not know how requests are placed or leases are kept.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from kvmanager.config_files.fields import Seconds, Section, filled_from, settings_of
from local_pd.embedded import PdClusterConfig
from local_pd.handoff import HandOffWay
from prfaas.engines.front_config import FrontConfig
from prfaas.engines.instances import InstancesConfig
from prfaas.front_config import EncodingSection
from scheduler.encoding.values import EncodeConfig
from transport import Role


@filled_from(PdClusterConfig)
class PdPlacement(Section):
    """How a PD cluster's front holds landings and chooses instances."""

    lease_s: Seconds
    affinity_slack: Annotated[int, Field(ge=0)]
    hand_off: HandOffWay

    def cluster_config(
        self, instances: InstancesConfig, encode: EncodeConfig, *, keep_leases: bool
    ) -> PdClusterConfig:
        """The cluster's settings. With `keep_leases` it renews its landings' leases by itself."""
        return settings_of(
            self, PdClusterConfig, instances=instances, encode=encode, keep_leases=keep_leases
        )


class PdFrontConfig(FrontConfig, PdPlacement):
    """The file of `prfaas pd`."""

    role: ClassVar[Role] = "pd-front"

    encoding: EncodingSection = EncodingSection.of()
    """How instances encode images and other media for others."""
