"""Configuration file of a stand-alone cluster front (`prfaas prefill`, `prfaas pd`), in YAML.

What both kinds of front are told. It does not know region files; a launcher writes one of these for
each front it starts.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Self

from pydantic import Field, model_validator

from kvmanager.config_files.fields import (
    ListenAddress,
    Port,
    Seconds,
    filled_from,
)
from kvmanager.config_files.security import SecuritySection, check_listeners
from prfaas.engines.instances import InstancesConfig, InstanceSpec
from transport import Role

EXPECTED = "a front's file is a mapping with the keys name and instances"


@filled_from(InstancesConfig)
class FrontConfig(SecuritySection):
    """One front, without what only one kind of front knows."""

    name: str = Field(min_length=1)
    """Name of the cluster."""
    listen: ListenAddress = "127.0.0.1:7200"
    """Its gRPC address, host:port; port 0: any free one."""
    metrics_port: Port = 0
    """Prometheus port; 0: none."""
    instances: tuple[InstanceSpec, ...] = Field(min_length=1)
    """The engines of the cluster."""
    drained_hold_s: Seconds
    log_dir: Path
    engine_key_file: Path | None
    role: ClassVar[Role]
    """What a front of this kind is to others."""

    @model_validator(mode="after")
    def _check_security(self) -> Self:
        credentials = self.credentials(self.role)
        check_listeners({"listen": self.listen}, credentials, trusted_network=self.trusted_network)
        return self

    def instances_config(self, *, poll_load: bool = False) -> InstancesConfig:
        """What the instances are told; with `poll_load` the engines' metrics are read."""
        return InstancesConfig(
            log_dir=self.log_dir,
            engine_key_file=self.engine_key_file,
            credentials=self.credentials(self.role),
            poll_load=poll_load,
            drained_hold_s=self.drained_hold_s,
        )
