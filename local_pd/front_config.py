"""Configuration file of a stand-alone local PD cluster front (`prfaas pd`), in YAML.

Does not know how requests are placed or leases are kept.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from kvmanager.config_files.fields import Seconds
from local_pd.embedded import PdClusterConfig
from prfaas.engines.front_config import FrontConfig

_CLUSTER = PdClusterConfig()


class PdFrontConfig(FrontConfig):
    """The file of `prfaas pd`."""

    lease_s: Seconds = _CLUSTER.lease_s
    """How long memory for a landing is kept without a renewal, seconds or such as 30s."""
    affinity_slack: Annotated[int, Field(ge=0)] = _CLUSTER.affinity_slack
    """How many more requests than the least loaded instance one may have that is preferred for
    what its node has cached.
    """
