"""Configuration file of a stand-alone cluster front (`prfaas prefill`, `prfaas pd`), in YAML.

What both kinds of front are told. It does not know region files; a launcher writes one of these for
each front it starts.
"""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from kvmanager.config_files.fields import (
    CoreFields,
    ListenAddress,
    Port,
    Seconds,
    Section,
    TlsSection,
    filled_from,
    settings_of,
    tls_files,
)
from prfaas.engines.health import ProbeTiming
from prfaas.engines.instance import InstanceSpec
from prfaas.engines.instances import InstancesConfig

EXPECTED = "a front's file is a mapping with the keys name and instances"


@filled_from(InstancesConfig)
class FrontConfig(Section):
    """One front, without what only one kind of front knows."""

    name: str = Field(min_length=1)
    """Name of the cluster."""
    listen: ListenAddress = "127.0.0.1:7200"
    """Its gRPC address, host:port; port 0: any free one."""
    metrics_port: Port = 0
    """Prometheus port; 0: none."""
    instances: tuple[InstanceSpec, ...] = Field(min_length=1)
    """The engines of the cluster."""
    probes: Annotated[ProbeTiming, CoreFields(ProbeTiming)]
    drained_hold_s: Seconds
    log_dir: Path
    tls: TlsSection | None = None
    """Mutual TLS with agents and gateways; left out: none."""

    def instances_config(self, *, poll_load: bool = False) -> InstancesConfig:
        """What the instances are told; with `poll_load` the engines' metrics are read."""
        return settings_of(self, InstancesConfig, tls=tls_files(self.tls), poll_load=poll_load)
