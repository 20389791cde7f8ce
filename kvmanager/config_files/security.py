"""How a process shows who it is, and what it may listen on: the settings that all processes share.

It opens no file and no port. A process beyond loopback needs TLS or the region's key; the word
`trusted_network` stands for neither, and `exposure` says what that leaves open.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from kvmanager.config_files.fields import ListenHost, Section, TlsSection, tls_files
from transport import Credentials, Endpoint, Identity, RegionKey, Role, TlsFiles
from transport.grants import GrantFile

BOTH_GIVEN: Final = "region_key: it signs calls where there is no TLS; remove it or the TLS files"
PeerName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")]


class RegionKeySection(Section):
    """The key that the processes of a region share, and this process's name."""

    file: Path
    """File of keys, one a line as 64 hex digits, readable by its owner or group only. The first
    signs, all are accepted; it is read again when it changes.
    """
    region: PeerName
    """Name of the region; calls of another one are refused."""
    name: PeerName
    """Name of this process, in refusals and logs."""


class GrantsSection(Section):
    """Keys of grants (docs/security.md): PEM files with keys of Ed25519, read again when they
    change.
    """

    file: Path
    """The gateway: its private key, readable by its owner or group only. Agents: the public keys of
    the region's gateways, one or more.
    """
    region: PeerName
    """Name of the region; grants of another one are refused."""

    @property
    def grant_file(self) -> GrantFile:
        return GrantFile(self.file, self.region)


class SecuritySection(Section):
    """How a process and its peers know each other: `tls`, `region_key`, or neither on loopback."""

    tls: TlsSection | None = None
    """Mutual TLS with the other processes of the region. Left out: none."""
    region_key: RegionKeySection | None = None
    """Signs calls where there is no TLS. Left out: none."""
    trusted_network: bool = False
    """Whether every process that reaches this one's ports may call everything."""

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if self.tls is not None and self.region_key is not None:
            raise ValueError(BOTH_GIVEN)
        return self

    def credentials(self, role: Role) -> Credentials | None:
        """The credentials that a process of this role shows; None if it has none."""
        return credentials_of(tls_files(self.tls), self.region_key, role)

    def exposure(self, role: Role) -> str | None:
        """For the log of a process that starts; None: nothing is open."""
        return exposure(self.credentials(role), trusted_network=self.trusted_network)


class MetricsSection(Section):
    """Where a process shows its metrics, and to whom."""

    metrics_host: ListenHost = "127.0.0.1"
    """Address of the Prometheus port. One that other hosts reach needs `metrics_key_file` or
    `trusted_network`.
    """
    metrics_key_file: Path | None = None
    """File with the key that this port demands (`Authorization: Bearer KEY`), readable by its owner
    or group only; it is read again when it changes. Left out: none.
    """

    def check_metrics(self, *, trusted_network: bool) -> None:
        """ValueError if everybody on the network could read the metrics."""
        is_guarded = self.metrics_key_file is not None or trusted_network
        if not (is_guarded or is_loopback(self.metrics_host)):
            raise ValueError(
                f"metrics_host: {self.metrics_host} is reachable from other hosts and everybody "
                "could read the metrics; give metrics_key_file, or set trusted_network"
            )


def credentials_of(
    tls: TlsFiles | None, key: RegionKeySection | None, role: Role
) -> Credentials | None:
    """TLS if there is any, else the region's key."""
    if tls is not None or key is None:
        return tls
    return RegionKey(key.file, Identity(key.region, role, key.name))


def check_listeners(
    listeners: Mapping[str, str], credentials: Credentials | None, *, trusted_network: bool
) -> None:
    """ValueError that names the setting whose address others reach, if anybody may call there."""
    if credentials is not None or trusted_network:
        return
    for name, address in listeners.items():
        if not is_loopback(Endpoint.parse(address).host):
            raise ValueError(
                f"{name}: {address} is reachable from other hosts and everybody could call it; "
                "give TLS or region_key, or set trusted_network"
            )


def check_redis(setting: str, url: str, *, trusted_network: bool) -> None:
    """ValueError if what is cached, and the password, would cross a network in clear."""
    parts = urlsplit(url)
    if parts.scheme == "redis" and not (
        trusted_network or is_loopback(parts.hostname or "localhost")
    ):
        raise ValueError(
            f"{setting}: {parts.hostname} is another host and redis:// is not encrypted; write "
            "rediss://, or set trusted_network"
        )


def exposure(credentials: Credentials | None, *, trusted_network: bool) -> str | None:
    """The rights of anybody on the network, for logs and pages; None if there are none of note."""
    if isinstance(credentials, RegionKey):
        return (
            "region_key without TLS: calls are signed, but whoever listens on the network reads "
            "KVCache, and the tokens of transfers with which to send in another's place"
        )
    if credentials is None and trusted_network:
        return (
            "trusted_network: whoever reaches the ports of this process may read and plant the "
            "KVCache of all tenants and make agents connect to any address"
        )
    return None


def is_loopback(host: str) -> bool:
    """Whether only this host can reach what listens there."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
