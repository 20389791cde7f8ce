"""Configuration file of a stand-alone cluster front (`prfaas prefill`, `prfaas pd`), in YAML.

It does not know region files; a launcher writes one of these for each front it starts.
"""

from pathlib import Path
from typing import TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvmanager.tls_section import TlsSection
from prfaas.engines.instances import InstanceSpec


class FrontConfigError(ValueError):
    """The file cannot be read or does not describe a front; the message names file and path."""


class FrontConfig(BaseModel):
    """One front. `listen` is its gRPC address; `metrics_port` 0 means no metrics server. What only
    one kind of front knows (queue bounds; leases and affinity) the other one does not look at;
    `prfaas.front_config` adds the order of the queue. An instance that has drained is given work
    again after `drained_hold_s` without a word of whoever drained it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1)
    listen: str = "127.0.0.1:7200"
    metrics_port: int = Field(default=0, ge=0, le=65535)
    instances: tuple[InstanceSpec, ...] = Field(min_length=1)
    max_queued: int = Field(default=64, ge=0)
    max_wait_s: float = Field(default=120.0, gt=0)
    lease_s: float = Field(default=30.0, gt=0)
    affinity_slack: int = Field(default=4, ge=0)
    drained_hold_s: float = Field(default=60.0, gt=0)
    log_dir: Path = Path("logs")
    tls: TlsSection | None = None


ConfigT = TypeVar("ConfigT", bound=FrontConfig)


def load_front_config(path: Path, kind: type[ConfigT]) -> ConfigT:
    """Read and check `path` as the configuration of a `kind` of front. Raises FrontConfigError."""
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise FrontConfigError(f"{path}: {error}") from error
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        lines = [
            f"{path}: {'.'.join(str(part) for part in item['loc']) or '(file)'}: {item['msg']}"
            for item in error.errors()
        ]
        raise FrontConfigError("\n".join(lines)) from error
