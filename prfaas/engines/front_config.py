"""Configuration file of a stand-alone cluster front (`prfaas prefill`, `prfaas pd`), in YAML.

It holds the settings that both kinds of front share, and does not know region files: a launcher
writes one such file for each front it starts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from kvmanager.config_files.fields import (
    CoreFields,
    ListenAddress,
    Port,
    Seconds,
    filled_from,
    settings_of,
)
from kvmanager.config_files.security import MetricsSection, SecuritySection, check_listeners
from kvmanager.config_files.traces import TracesSection
from prfaas.engines.discovery.found import DiscoverySection
from prfaas.engines.health import ProbeTiming
from prfaas.engines.instance import InstanceSpecs
from prfaas.engines.instances import InstancesConfig
from transport import Role

EXPECTED = "a front's file is a mapping with the keys name and instances"


@filled_from(InstancesConfig)
class FrontConfig(SecuritySection, MetricsSection):
    """The settings that both kinds of front share."""

    name: str = Field(min_length=1)
    """Name of the cluster."""
    listen: ListenAddress = "127.0.0.1:7200"
    """Address of its gRPC server, host:port; port 0: any free port."""
    metrics_port: Port = 0
    """Prometheus port at `metrics_host`; 0: none."""
    instances: InstanceSpecs = ()
    """The engines of the cluster."""
    discover: DiscoverySection | None = None
    """Where more engines are found, instead of `instances` or beside them."""
    probes: Annotated[ProbeTiming, CoreFields(ProbeTiming)]
    drained_hold_s: Seconds
    drain_s: Seconds = 30.0
    """The wait for jobs that run when the front stops, seconds. New ones are refused meanwhile."""
    log_dir: Path
    engine_key_file: Path | None
    traces: TracesSection | None = None
    """Where the spans of requests go (docs/tracing.md). Left out: nowhere."""
    role: ClassVar[Role]
    """The role that a front of this kind has for other processes."""

    @model_validator(mode="after")
    def _check_security(self) -> Self:
        if not self.instances and self.discover is None:
            raise ValueError("write instances, or discover")
        credentials = self.credentials(self.role)
        check_listeners({"listen": self.listen}, credentials, trusted_network=self.trusted_network)
        self.check_metrics(trusted_network=self.trusted_network)
        return self

    def instances_config(self, *, poll_load: bool = False) -> InstancesConfig:
        """The settings of the instances; with `poll_load` the engines' metrics are read."""
        credentials = self.credentials(self.role)
        return settings_of(self, InstancesConfig, credentials=credentials, poll_load=poll_load)
