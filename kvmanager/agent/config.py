"""The configuration of a node agent, parsed and checked once and then frozen.

A file gives it as YAML with the names of these fields. It does not know command lines.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from kvmanager.arena import DEFAULT_BLOCK_BYTES
from kvmanager.config_files.fields import (
    GIB,
    Address,
    Bytes,
    CoreFields,
    Gib,
    GibOrZero,
    ListenAddress,
    Port,
    Seconds,
    SecondsOrZero,
    Section,
    address,
    filled_from,
    host,
)
from kvmanager.config_files.security import (
    BOTH_GIVEN,
    GrantsSection,
    MetricsSection,
    RegionKeySection,
    check_listeners,
    credentials_of,
    exposure,
)
from kvmanager.config_files.traces import TracesSection
from kvmanager.config_files.yaml_files import read_settings
from kvmanager.pool.placement import StatePlacement
from kvmanager.transfers.shared import TableLimits
from netmon.detector import DetectorConfig
from transport import Credentials, Endpoint, LinkPath, TlsFiles, TransportConfig
from transport.endpoint import is_wildcard
from transport.grants import GrantFile

Eviction = Literal["lru", "lfu", "length", "cost"]
"""The policies of `kvmanager.pool.eviction`."""
KvEvents = Annotated[str, Field(pattern=r"^(tcp|ipc)://[^,]+(,(tcp|ipc)://[^,]+)?$")]


class AgentSection(Section):
    """The settings of a node agent that a region's file has as well."""

    arena_dir: Path = Path("/dev/shm")
    """Directory of the file that is the arena's shared memory."""
    arena_gib: Gib = 1.0
    """Shared memory for KVCache, GiB or such as 512MiB."""
    landing_gib: Gib | None = None
    """Most of the arena for KVCache on its way in, GiB or such as 512MiB; the rest is for KVCache
    on its way out. Left out: all of it.
    """
    tenant_landing_gib: Gib | None = None
    """Most memory for the landings of one tenant, GiB or such as 512MiB. Left out: no limit."""
    cache_gib: GibOrZero | None = None
    """Most of the arena for the prefix cache, which gives way to transfers, GiB or such as 512MiB.
    Left out: all that transfers do not use; 0: no prefix cache.
    """
    embedding_gib: GibOrZero | None = None
    """Most of the arena for the outputs of image encoders, GiB or such as 512MiB. Transfers do not
    displace them. Left out: an eighth of the arena; 0: none are kept.
    """
    eviction: Eviction = "lru"
    """Which cached prefix goes first when the cache is full: the least recently used (lru), the
    least often used (lfu), the one at the end of the longest prompt (length), or the cheapest to
    prefill again (cost).
    """
    placement: Annotated[StatePlacement, CoreFields(StatePlacement)] = Field(
        default_factory=StatePlacement
    )
    """At which block boundaries of a prompt windows and recurrent states are cached."""
    ssd_dir: Path | None = None
    """A directory of this agent alone for a second tier of the prefix cache. Left out: none."""
    ssd_gib: Gib | None = None
    """Most bytes in `ssd_dir`, GiB or such as 500GB. Where the disk is full before, copies that
    went unused for longest give way to newer ones there.
    """
    link_probes: bool = True
    """Whether idle links are measured with small probes now and then, which take at most 0.1% of
    their rate.
    """
    transport: Annotated[TransportConfig, CoreFields(TransportConfig, without={"tls"})] = Field(
        default_factory=TransportConfig
    )
    """Tuning of the TCP transport."""

    @field_validator("landing_gib", "cache_gib", "embedding_gib")
    @classmethod
    def _check_share(cls, value: float | None, info: ValidationInfo) -> float | None:
        arena_gib = info.data.get("arena_gib")
        if value is not None and arena_gib is not None and value > arena_gib:
            raise ValueError(
                f"{value:g} is more than the arena of {arena_gib:g} GiB; lower it or raise "
                "arena_gib"
            )
        return value

    @model_validator(mode="after")
    def _check_ssd(self) -> Self:
        if (self.ssd_dir is None) != (self.ssd_gib is None):
            missing = "ssd_gib" if self.ssd_gib is None else "ssd_dir"
            raise ValueError(f"ssd_dir and ssd_gib go together; give {missing} too")
        return self


def _has_port(text: str) -> bool:
    """Whether it is "host:port" or "[v6]:port" rather than a bare host or IPv6 address."""
    return "]:" in text or text.count(":") == 1


def _advertised(text: str) -> str:
    return address(text) if _has_port(text) else host(text.strip("[]"))


@filled_from(TableLimits)
class AgentConfig(AgentSection, MetricsSection):
    """Everything tunable of one node agent."""

    listen: ListenAddress = "127.0.0.1:7100"
    """Address at which senders connect to land KVCache here, host:port; port 0: any free one."""
    control: ListenAddress = "127.0.0.1:7101"
    """Address of the control plane's gRPC, host:port; port 0: any free one."""
    socket: Path = Path("/tmp/prfaas-agent.sock")
    """Unix socket for the engines of this host."""
    advertise: Annotated[str, AfterValidator(_advertised)] | None = None
    """Address that senders are told to connect to, "host" or "host:port"; default: `listen`."""
    send_to: tuple[Address, ...] | None = None
    """The only addresses that this agent connects to, to send KVCache and probes, host:port,
    whoever asks for it. Left out: any, and with `granting_keys` those that grants name.
    """
    routes: dict[Address, Annotated[tuple[Address, ...], Field(min_length=1)]] = Field(default={})
    """All addresses of receivers that have several, host:port, by the one that they advertise. The
    connections to a receiver are spread over its addresses; while one is down they take the others.
    """
    detours: dict[Address, str] = Field(default={})
    """The host whose certificate a receiver shows behind an address of a tunnel or relay, host:port
    of that. Left out: the certificate names the host that is connected to.
    """
    sources: tuple[str, ...] = ()
    """Addresses of this host to pair with those of `routes`: connections to the second address of a
    receiver leave from the second one here. Left out: the kernel chooses.
    """
    block_bytes: Bytes = DEFAULT_BLOCK_BYTES
    """Bytes of one block of the arena, or such as 64KiB."""
    prefault: bool = True
    """Whether the whole arena is mapped at the start instead of page by page at first use."""
    arena_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$")] | None = None
    """With a name the arena and its index stay when the agent ends, and the next agent of this name
    takes them over with the prefixes cached in them.
    """
    kv_events: dict[str, KvEvents] = Field(default={})
    """For each engine instance, the endpoint of its KV events as this host reaches it, and behind a
    comma the endpoint that replays missed events (`kvmanager.agent.engines.events`).
    """
    ssd_wait_s: SecondsOrZero = 0.5
    """How long a prompt waits for cached parts that are only on SSD, seconds or such as 500ms; then
    it is served without them.
    """
    max_lease_s: Seconds
    drain_s: Seconds
    link_sample_interval_s: Seconds = 0.2
    """Time between two samples of a link that has transfers, seconds or such as 200ms; idle links
    are sampled less often.
    """
    link_detector: Annotated[DetectorConfig, CoreFields(DetectorConfig)] = Field(
        default_factory=DetectorConfig
    )
    """The bounds from which on a link counts as congested."""
    metrics_port: Port | None = None
    """Prometheus port at `metrics_host`; none when absent."""
    tls_dir: Path | None = None
    """Directory with tls.crt, tls.key and ca.crt, as cert-manager writes them, instead of the three
    separate files. Either way, new connections use files that were replaced on disk.
    """
    tls_cert: Path | None = None
    """PEM certificate of this node."""
    tls_key: Path | None = None
    """PEM key of this node."""
    tls_ca: Path | None = None
    """PEM certificate of the authority that signed all nodes."""
    digest: bool = False
    """Whether a BLAKE3 digest of every transfer is compared at its end, in addition to the
    checksums of its frames. Not possible with codec "fp8", which changes the bytes.
    """
    region_key: RegionKeySection | None = None
    """Signs calls where there is no TLS. Left out: none."""
    granting_keys: GrantsSection | None = None
    """Public keys of the gateways that grant that KVCache is sent from here and lands here. Left
    out: no grant is needed.
    """
    traces: TracesSection | None = None
    """Where the spans of transfers go (docs/tracing.md). Left out: nowhere."""
    trusted_network: bool = False
    """Whether every process that reaches this one's ports may call everything."""

    @model_validator(mode="after")
    def _check_cache(self) -> Self:
        if self.cache_gib == 0 and (self.ssd_dir is not None or self.arena_name is not None):
            raise ValueError("cache_gib is 0: without a prefix cache there is nothing to keep")
        return self

    @model_validator(mode="after")
    def _check_digest(self) -> Self:
        if self.digest and self.is_lossy:
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
        if self.tls is not None and self.region_key is not None:
            raise ValueError(BOTH_GIVEN)
        listeners = {name: getattr(self, name) for name in ("listen", "control")}
        check_listeners(listeners, self.credentials, trusted_network=self.trusted_network)
        self.check_metrics(trusted_network=self.trusted_network)
        if self.advertise is None and is_wildcard(Endpoint.parse(self.listen).host):
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
    def is_lossy(self) -> bool:
        """Whether KVCache that lands here may have lost precision on its way."""
        return self.transport.codec == "fp8"

    @property
    def credentials(self) -> Credentials | None:
        """The credentials that this agent shows and asks for; None if it has none."""
        return credentials_of(self.tls, self.region_key, "agent")

    @property
    def exposures(self) -> list[str]:
        """The rights that anybody on the network has, for logs and answers about health."""
        shared = exposure(self.credentials, trusted_network=self.trusted_network)
        found = [] if shared is None else [shared]
        if self.granting_keys is None:
            where = "any address" if self.send_to is None else "the addresses of send_to"
            found.append(
                "granting_keys are not given: whoever may call as a gateway or a front may have "
                f"the KVCache of all tenants sent to {where}, and cache KVCache under any key"
            )
        return found

    @property
    def grant_file(self) -> GrantFile | None:
        return None if self.granting_keys is None else self.granting_keys.grant_file

    @property
    def destinations(self) -> frozenset[Endpoint] | None:
        """Where this agent may send; None: anywhere."""
        return None if self.send_to is None else frozenset(map(Endpoint.parse, self.send_to))

    @property
    def hosts(self) -> dict[Endpoint, str]:
        """The hosts of `detours`."""
        return {Endpoint.parse(address): host for address, host in self.detours.items()}

    @property
    def paths(self) -> dict[Endpoint, list[LinkPath]]:
        """The ways to the receivers of `routes`."""
        sources = self.sources or ("",)
        return {
            Endpoint.parse(known): [
                LinkPath(Endpoint.parse(there[i % len(there)]), sources[i % len(sources)])
                for i in range(max(len(there), len(sources)))
            ]
            for known, there in self.routes.items()
        }

    @property
    def transport_config(self) -> TransportConfig:
        return dataclasses.replace(self.transport, tls=self.tls)

    @property
    def num_blocks(self) -> int:
        return max(1, int(self.arena_gib * GIB) // self.block_bytes)

    @property
    def num_cache_blocks(self) -> int | None:
        """Most arena blocks for the prefix cache; None: all that transfers leave."""
        return None if self.cache_gib is None else int(self.cache_gib * GIB) // self.block_bytes

    @property
    def num_embedding_blocks(self) -> int:
        """Most arena blocks for embeddings of images."""
        gib = self.arena_gib / 8 if self.embedding_gib is None else self.embedding_gib
        return int(gib * GIB) // self.block_bytes

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
        return Endpoint(self.advertise, real.port)


def load(path: Path | None, options: dict[str, Any]) -> AgentConfig:
    """The file's settings, with those of `options` that are not None on top; `FileError`."""
    expected = "an agent's file is a mapping of settings, such as arena_gib: 8"
    return read_settings(path, AgentConfig, expected=expected, options=options)
