"""What a node agent is told at its start: parsed and checked once, then frozen.

It does not know command lines; the file form is YAML with the same names as these fields.
"""

from __future__ import annotations

import dataclasses
import ipaddress
from pathlib import Path
from typing import Annotated, Any, Final, Self

import msgspec
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from kvmanager.arena import DEFAULT_BLOCK_BYTES
from kvmanager.pool.eviction import eviction_policy
from kvmanager.pool.placement import StatePlacement
from kvmanager.transfers.table import TableLimits
from netmon.detector import DetectorConfig
from netmon.monitor import MonitorConfig
from transport import Endpoint, TlsFiles, TransportConfig

GIB: Final = 1 << 30

Gib = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
KvEvents = Annotated[str, Field(pattern=r"^(tcp|ipc)://[^,]+(,(tcp|ipc)://[^,]+)?$")]

_TRANSPORT_FIELDS: Final = {
    field.name for field in dataclasses.fields(TransportConfig) if field.name != "tls"
}


class ConfigError(ValueError):
    """A configuration that cannot work; the message names the field and what helps."""


class AgentConfig(BaseModel):
    """Everything tunable of one node agent. Addresses are "host:port"; port 0 picks a free one."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    listen: str = "127.0.0.1:7100"
    """Where senders connect to land KVCache here."""
    control: str = "127.0.0.1:7101"
    """gRPC of the control plane."""
    socket: Path = Path("/tmp/prfaas-agent.sock")
    """Unix socket for the engines of this host."""
    advertise: str | None = None
    """What senders are told to connect to, "host" or "host:port"; default: `listen`."""
    arena_dir: Path = Path("/dev/shm")
    arena_gib: Gib = 1.0
    block_bytes: int = DEFAULT_BLOCK_BYTES
    prefault: bool = True
    """Allocate the whole arena at the start."""
    landing_gib: Gib | None = None
    """Most memory for landings; the rest of the arena is then left to outboxes."""
    tenant_landing_gib: Gib | None = None
    cache_gib: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Most memory for the prefix cache, which gives way to transfers; default: all that they leave.
    0: no prefix cache.
    """
    eviction: str = "lru"
    """What the prefix cache drops first: a policy of `kvmanager.pool.eviction`."""
    placement: StatePlacement = StatePlacement()
    """Which boundaries of a prompt keep windows and recurrent states; a mapping of the fields of
    `kvmanager.pool.placement.StatePlacement`.
    """
    arena_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$")] | None = None
    """With a name the arena and its index stay when the agent ends, and the next agent of this name
    takes them over with what is cached.
    """
    ssd_dir: Path | None = None
    """A directory of this agent alone for a second tier of the prefix cache."""
    ssd_gib: Gib | None = None
    """Most bytes in `ssd_dir`."""
    kv_events: dict[str, KvEvents] = {}
    """By engine instance, where it publishes what its own prefix cache holds, as this host reaches
    it; behind a comma where it replays what was missed (`kvmanager.agent.engines.events`).
    """
    ssd_wait_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.5
    """How long a prompt waits for what is on SSD only; then it is served without."""
    max_lease_s: Seconds = 3600.0
    drain_s: Seconds = 30.0
    """How long memory of a failed transfer waits for an engine that does not let go of it."""
    link_sample_interval_s: Seconds = 0.2
    """Between two looks at a link that has transfers; idle ones are looked at less often."""
    link_probes: bool = False
    """Let links be measured that nobody uses and of which little is known: a gateway sends a small
    probe now and then.
    """
    link_detector: dict[str, float | tuple[float, float]] = {}
    """When a link counts as congested: fields of `netmon.detector.DetectorConfig`."""
    metrics_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Prometheus port on the host of `control`; none when absent."""
    tls_dir: Path | None = None
    """Directory with tls.crt, tls.key and ca.crt, as cert-manager writes them; instead of the
    three separate files. Either way new connections use files that were replaced on disk.
    """
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_ca: Path | None = None
    digest: bool = False
    """Compare a BLAKE3 digest of every transfer at its end, beside the checksums of its frames. Not
    with codec "fp8", which does not keep the bytes that the digest is of.
    """
    trusted_network: bool = False
    """Speak to other hosts without TLS."""
    transport: dict[str, int | float | str | bool | None] = {}
    """Fields of `transport.TransportConfig`."""

    @field_validator("listen", "control")
    @classmethod
    def _check_address(cls, value: str) -> str:
        Endpoint.parse(value)
        return value

    @field_validator("transport")
    @classmethod
    def _check_transport(cls, value: dict[str, Any]) -> dict[str, Any]:
        unknown = sorted(value.keys() - _TRANSPORT_FIELDS)
        if unknown:
            raise ValueError(
                f"unknown {', '.join(unknown)}; known: {', '.join(sorted(_TRANSPORT_FIELDS))}"
            )
        TransportConfig(**value)
        return value

    @field_validator("link_detector")
    @classmethod
    def _check_detector(cls, value: dict[str, Any]) -> dict[str, Any]:
        _detector_config(value)
        return value

    @field_validator("eviction")
    @classmethod
    def _check_eviction(cls, value: str) -> str:
        eviction_policy(value)
        return value

    @field_validator("placement", mode="before")
    @classmethod
    def _parse_placement(cls, value: Any) -> StatePlacement:
        if isinstance(value, StatePlacement):
            return value
        try:
            fields = yaml.safe_load(value) if isinstance(value, str) else value
        except yaml.YAMLError:
            fields = None
        if not isinstance(fields, dict):
            raise ValueError(f"{value!r} is no mapping; such as {{ends: true, every_tokens: 4096}}")
        if unknown := sorted(fields.keys() - set(StatePlacement.__struct_fields__)):
            known = ", ".join(sorted(StatePlacement.__struct_fields__))
            raise ValueError(f"unknown {', '.join(map(str, unknown))}; known: {known}")
        try:
            return msgspec.convert(fields, StatePlacement)
        except msgspec.ValidationError as error:
            raise ValueError(str(error)) from error

    @model_validator(mode="after")
    def _check_cache(self) -> Self:
        if (self.ssd_dir is None) != (self.ssd_gib is None):
            raise ValueError("ssd_dir and ssd_gib belong together: where, and how much at most")
        if self.cache_gib == 0 and (self.ssd_dir is not None or self.arena_name is not None):
            raise ValueError("cache_gib is 0: without a prefix cache there is nothing to keep")
        return self

    @model_validator(mode="after")
    def _check_digest(self) -> Self:
        if self.digest and self.transport.get("codec") == "fp8":
            raise ValueError(
                "digest: it is of the original bytes, which transport.codec fp8 does not keep: "
                "every transfer would fail; turn digest off or use a lossless codec"
            )
        return self

    @model_validator(mode="after")
    def _check_security(self) -> Self:
        files = (self.tls_cert, self.tls_key, self.tls_ca)
        if any(files) and self.tls_dir is not None:
            raise ValueError("give tls_dir, or tls_cert, tls_key and tls_ca, not both")
        if any(files) and not all(files):
            raise ValueError("tls_cert, tls_key and tls_ca belong together: give all or none")
        if self.tls is None and not self.trusted_network:
            for name in ("listen", "control"):
                if not _is_loopback(Endpoint.parse(getattr(self, name)).host):
                    raise ValueError(
                        f"{name}: {getattr(self, name)} is reachable from other hosts without "
                        "TLS; give tls_dir or tls_cert, tls_key and tls_ca, or set trusted_network"
                    )
        if self.advertise is None and Endpoint.parse(self.listen).host in ("0.0.0.0", "::"):
            raise ValueError(
                "advertise: needed when listen is a wildcard address; name the host or address "
                "that senders can reach"
            )
        return self

    @property
    def tls(self) -> TlsFiles | None:
        if self.tls_dir is not None:
            return TlsFiles.in_directory(self.tls_dir)
        if self.tls_cert is None or self.tls_key is None or self.tls_ca is None:
            return None
        return TlsFiles(self.tls_cert, self.tls_key, self.tls_ca)

    @property
    def transport_config(self) -> TransportConfig:
        fields: dict[str, Any] = dict(self.transport)
        return TransportConfig(tls=self.tls, **fields)

    @property
    def monitor_config(self) -> MonitorConfig:
        return MonitorConfig(detector=_detector_config(self.link_detector))

    @property
    def num_blocks(self) -> int:
        return max(1, int(self.arena_gib * GIB) // self.block_bytes)

    @property
    def num_cache_blocks(self) -> int | None:
        """Most arena blocks for the prefix cache; None: all that transfers leave."""
        return None if self.cache_gib is None else int(self.cache_gib * GIB) // self.block_bytes

    @property
    def limits(self) -> TableLimits:
        def in_bytes(gib: float | None) -> int | None:
            return None if gib is None else int(gib * GIB)

        return TableLimits(
            landing_bytes=in_bytes(self.landing_gib),
            tenant_landing_bytes=in_bytes(self.tenant_landing_gib),
            max_lease_s=self.max_lease_s,
            drain_s=self.drain_s,
        )

    def advertised(self, real: Endpoint) -> Endpoint:
        """What Reserve answers, given where the receiver really listens."""
        if self.advertise is None:
            return real
        if _has_port(self.advertise):
            return Endpoint.parse(self.advertise)
        return Endpoint(self.advertise.strip("[]"), real.port)


def load(path: Path | None, overrides: dict[str, Any]) -> AgentConfig:
    """The file's settings, with those of `overrides` that are not None on top; ConfigError."""
    try:
        settings = yaml.safe_load(path.read_text()) if path is not None else {}
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if settings is None:
        settings = {}
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: a mapping of settings is wanted")
    settings |= {name: value for name, value in overrides.items() if value is not None}
    try:
        return AgentConfig.model_validate(settings)
    except ValidationError as error:
        problems = [
            f"{'.'.join(map(str, problem['loc'])) or 'settings'}: {problem['msg']}"
            for problem in error.errors()
        ]
        raise ConfigError("; ".join(problems)) from error


def _detector_config(fields: dict[str, Any]) -> DetectorConfig:
    """Raises ValueError."""
    known = dataclasses.asdict(DetectorConfig())
    if unknown := sorted(fields.keys() - known.keys()):
        raise ValueError(f"unknown {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    for name, value in fields.items():
        if isinstance(value, tuple) != isinstance(known[name], tuple):
            wanted = "a pair of bounds" if isinstance(known[name], tuple) else "one number"
            raise ValueError(f"{name}: {wanted} is wanted, not {value}")
    return DetectorConfig(**fields)


def _has_port(text: str) -> bool:
    """Whether it is "host:port" or "[v6]:port" rather than a bare host or IPv6 address."""
    return "]:" in text or text.count(":") == 1


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
