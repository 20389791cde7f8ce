"""What a stand-alone directory is told at its start: parsed and checked once, then frozen.

It does not know command lines; the file form is YAML with the same names as these fields.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from pydantic import Field, SecretStr, field_validator, model_validator

from kvmanager.config_files.fields import Address, ListenAddress, Port, Seconds
from kvmanager.config_files.security import (
    MetricsSection,
    SecuritySection,
    check_listeners,
    check_redis,
)
from kvmanager.config_files.yaml_files import read_settings
from kvmanager.directory.messages import FORGET_S, NodeName


class DirectoryConfig(SecuritySection, MetricsSection):
    """One directory process."""

    listen: ListenAddress = "127.0.0.1:7300"
    """Address of gRPC service `prfaas.Directory`, host:port; port 0: any free one."""
    agents: dict[str, Address] = Field(min_length=1)
    """The agents to follow: "cluster/node" -> the agent's control address."""
    redis: SecretStr | None = None
    """URL of a Redis server to fill instead of serving gRPC; gateways then read from it."""
    forget_s: Seconds = FORGET_S
    """An agent that has not answered for this long counts as holding nothing, seconds."""
    metrics_port: Port = 0
    """Prometheus port at `metrics_host`; 0: none."""

    @field_validator("agents")
    @classmethod
    def _check_agents(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
            _node_name(name)
        return value

    @model_validator(mode="after")
    def _check_security(self) -> Self:
        listeners = {"listen": self.listen} if self.redis is None else {}
        credentials = self.credentials("directory")
        check_listeners(listeners, credentials, trusted_network=self.trusted_network)
        self.check_metrics(trusted_network=self.trusted_network)
        if self.redis is not None:
            url = self.redis.get_secret_value()
            check_redis("redis", url, trusted_network=self.trusted_network)
        return self

    @property
    def targets(self) -> dict[NodeName, str]:
        return {_node_name(name): address for name, address in self.agents.items()}


def load(path: Path | None, options: dict[str, Any]) -> DirectoryConfig:
    """The file's settings, with those of `options` that are not None on top; `FileError`."""
    expected = "a directory's file is a mapping with the key agents: {CLUSTER/NODE: host:port}"
    return read_settings(path, DirectoryConfig, expected=expected, options=options)


def _node_name(text: str) -> NodeName:
    cluster, slash, node = text.partition("/")
    if not (cluster and slash and node):
        raise ValueError(f"{text!r} is not cluster/node")
    return NodeName(cluster, node)
