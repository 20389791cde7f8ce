"""What a stand-alone directory is told at its start: parsed and checked once, then frozen.

It does not know command lines; the file form is YAML with the same names as these fields.
"""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)

from kvmanager.directory.messages import NodeName
from kvmanager.tls_section import TlsSection
from transport import Endpoint

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class DirectoryConfigError(ValueError):
    """A configuration that cannot work; the message names the field and what helps."""


class DirectoryConfig(BaseModel):
    """One directory process. Addresses are "host:port"; port 0 picks a free one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    listen: str = "127.0.0.1:7300"
    """gRPC of service `prfaas.Directory`."""
    agents: dict[str, str] = Field(min_length=1)
    """Whom to follow: "cluster/node" -> the agent's control address."""
    redis: SecretStr | None = None
    """Keep what is known in the Redis server at this URL, for gateways to read there, instead of
    serving it.
    """
    forget_s: Seconds = 60.0
    """An agent that has not answered for so long is taken to hold nothing."""
    metrics_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Prometheus port on the host of `listen`; 0: none."""
    tls: TlsSection | None = None
    trusted_network: bool = False
    """Serve other hosts without TLS."""

    @field_validator("listen")
    @classmethod
    def _check_listen(cls, value: str) -> str:
        Endpoint.parse(value)
        return value

    @field_validator("agents")
    @classmethod
    def _check_agents(cls, value: dict[str, str]) -> dict[str, str]:
        for name, address in value.items():
            _node_name(name)
            Endpoint.parse(address)
        return value

    @model_validator(mode="after")
    def _check_security(self) -> Self:
        serves = self.redis is None and not _is_loopback(Endpoint.parse(self.listen).host)
        if serves and self.tls is None and not self.trusted_network:
            raise ValueError(
                f"listen: {self.listen} is reachable from other hosts without TLS; give tls, or "
                "set trusted_network"
            )
        return self

    @property
    def targets(self) -> dict[NodeName, str]:
        return {_node_name(name): address for name, address in self.agents.items()}


def load(path: Path | None, overrides: dict[str, Any]) -> DirectoryConfig:
    """The file's settings, with those of `overrides` that are not None on top.

    Raises `DirectoryConfigError`.
    """
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8")) if path is not None else {}
    except (OSError, yaml.YAMLError) as error:
        raise DirectoryConfigError(f"{path}: {error}") from error
    if not isinstance(settings or {}, dict):
        raise DirectoryConfigError(f"{path}: a mapping of settings is wanted")
    given = {name: value for name, value in overrides.items() if value is not None}
    try:
        return DirectoryConfig.model_validate((settings or {}) | given)
    except ValidationError as error:
        problems = [
            f"{'.'.join(map(str, problem['loc'])) or 'settings'}: {problem['msg']}"
            for problem in error.errors()
        ]
        raise DirectoryConfigError("; ".join(problems)) from error


def _node_name(text: str) -> NodeName:
    cluster, slash, node = text.partition("/")
    if not (cluster and slash and node):
        raise ValueError(f"{text!r} is not cluster/node")
    return NodeName(cluster, node)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
