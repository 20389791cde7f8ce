"""The file of a stand-alone gateway (`prfaas gateway`): its limits and the clusters it fronts.

Each cluster's front either runs embedded in the gateway's process (`instances`) or elsewhere
(`front`: its gRPC address). This file does not know region files; a launcher writes one of these.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import BeforeValidator, Field, model_validator

from deploy.gateway.api_keys import ApiKey, ApiKeysSection, load_api_keys, parse_api_keys
from deploy.gateway.cache.region_caches import RegionCaches
from deploy.gateway.config import GatewayConfig, SharedUplink, with_api_keys
from deploy.gateway.links.linked_cluster import LinkedPrefillCluster
from deploy.gateway.links.region_links import RegionLinks
from kvmanager.agent.shared_clients import AgentClients
from kvmanager.config_files.fields import Address, Section, filled_from
from kvmanager.config_files.problems import FileError, Problem, suggestion
from kvmanager.config_files.security import GrantsSection, SecuritySection, check_redis
from kvmanager.config_files.traces import SampledTraces, open_tracer
from kvmanager.config_files.yaml_files import read_settings
from kvmanager.directory.embedded import EmbeddedDirectory
from kvmanager.directory.reader import DirectoryReader
from kvmanager.directory.remote import RemoteDirectory
from local_pd.embedded import EmbeddedPdCluster
from local_pd.front_config import PdPlacement
from local_pd.remote import RemotePdCluster
from prfaas.embedded import EmbeddedPrefillCluster, PrefillClusterConfig
from prfaas.engines.access import EngineAccess
from prfaas.engines.departures import Departures, follow_changes
from prfaas.engines.discovery.following import follow_discovery
from prfaas.engines.discovery.found import DiscoverySection
from prfaas.engines.instance import InstanceSpecs
from prfaas.engines.instances import InstancesConfig
from prfaas.engines.members import MemberChanges
from prfaas.front_config import QueueBounds
from prfaas.remote import RemotePrefillCluster
from scheduler.routing.spill import Spill
from transport import LocalError
from transport.grants import Granter
from transport.tasks import start_task

logger = logging.getLogger("prfaas.deploy.gateway")

if TYPE_CHECKING:
    from deploy.gateway.sharing.redis_region import RegionInRedis
    from kvmanager.tracing.export import Tracer

_NO_URL = "is no URL such as rediss://:PASSWORD@redis.example:6379"
EXPECTED = "a gateway's file is a mapping with the keys gateway, pd and prefill"


class _Source(Section):
    name: Annotated[str, Field(min_length=1)]
    """The name of the cluster."""
    front: Address | None = None
    """host:port of a front that runs elsewhere, instead of `instances`."""
    instances: InstanceSpecs = ()
    """The engines of the cluster. Its front then runs in the gateway's process."""

    discover: DiscoverySection | None = None
    """Where more engines are found, instead of `instances` or beside them."""

    @model_validator(mode="after")
    def _either(self) -> _Source:
        if bool(self.front) == bool(self.instances or self.discover):
            raise ValueError("write either front (host:port) or instances (or discover)")
        return self


class PrefillSource(_Source, QueueBounds):
    """A prefill cluster and the name of the link that its KVCache takes.

    A front elsewhere has its own `max_queued` and `max_wait_s`.
    """

    link: str | dict[str, str] = ""
    """The name of the link to the PD cluster. With several: a mapping of the PD clusters that it
    sends KVCache to, to the names of the links there. Left out: it sends to all.
    """
    endpoints: dict[Address, Address] = Field(default={})
    """Which address this cluster's senders connect to, by the address that a receiving agent
    advertises, where the two differ (a tunnel, an emulated link).
    """


class PdSource(_Source, PdPlacement):
    """A local PD cluster. A front elsewhere has its own `affinity_slack` and `lease_s`."""

    has_prefill_instances: bool = False
    """Whether a front elsewhere has instances that prefill."""
    spill: Spill = "overflow"
    """When another PD cluster may decode a request whose home this one is. never: it never does.
    overflow: when this one cannot serve it, would refuse it, or would be clearly later than the
    other. nearest: also when it is a little later; of the clusters that are about as soon, the
    nearest decodes.
    """


def _as_list(value: object) -> object:
    return value if isinstance(value, list | tuple) else [value]


@filled_from(InstancesConfig)
class GatewayFile(ApiKeysSection, SecuritySection):
    """Everything that `prfaas gateway` needs."""

    gateway: GatewayConfig
    """The gateway itself."""
    pd: Annotated[tuple[PdSource, ...], Field(min_length=1), BeforeValidator(_as_list)]
    """The local PD clusters. One of them may stand here without a list."""
    prefill: tuple[PrefillSource, ...] = ()
    """The prefill clusters."""
    uplinks: tuple[SharedUplink, ...] = ()
    """Bandwidth that links share, which plans divide among them."""
    granting_key: GrantsSection | None = None
    """Signs for node agents that ask for grants (`granting_keys`). Left out: nothing is signed."""
    log_dir: Path
    engine_key_file: Path | None
    traces: SampledTraces | None = None
    """Where the spans of requests go (docs/tracing.md). Left out: nowhere."""
    operator_key_file: Path | None = None
    """File with one more operator's key, which `prfaas up` makes for its run. Left out: none."""

    @model_validator(mode="after")
    def _check(self) -> GatewayFile:
        names = [source.name for source in (*self.pd, *self.prefill)]
        if len(set(names)) != len(names):
            raise ValueError(f"pd and prefill: two clusters have the same name: {names}")
        pds = [source.name for source in self.pd]
        for source in self.prefill:
            if source.link == {}:
                raise ValueError(f"prefill: {source.name} has no link; name one, or leave it out")
            for name in source.link if isinstance(source.link, dict) else ():
                if name not in pds:
                    known = suggestion(name, pds)
                    message = f"{source.name} has no PD cluster {name!r} to send to{known}"
                    raise ValueError(f"prefill: {message}")
        for uplink in self.uplinks:
            if uplink.cluster not in names:
                known = suggestion(uplink.cluster, names)
                raise ValueError(f"uplinks: no cluster is called {uplink.cluster!r}{known}")
        for name in filter(None, (self.gateway.home, *self.gateway.homes.values())):
            if name not in pds:
                raise ValueError(f"home: no PD cluster is called {name!r}{suggestion(name, pds)}")
        # Several processes need `shared`, too.
        if self.gateway.shared is not None:
            sources: tuple[_Source, ...] = (*self.pd, *self.prefill)
            for place in sources:
                if place.front is None:
                    raise ValueError(
                        f"gateway.shared: {place.name} has its front inside, and each gateway would"
                        " place work as if it were alone; run `prfaas pd` or `prfaas prefill` and"
                        " write front: HOST:PORT, or leave `shared` out"
                    )
        if self.api_keys_file and self.api_keys_env:
            raise ValueError("write api_keys_file or api_keys_env, not both")
        url = self.gateway.directory.url
        check_redis("gateway.directory.url", url, trusted_network=self.trusted_network)
        if self.gateway.shared is not None:
            url = self.gateway.shared.redis
            check_redis("gateway.shared.redis", url, trusted_network=self.trusted_network)
        return self

    def links(self) -> Iterator[tuple[str, str, str]]:
        """Each link that KVCache takes: the prefill cluster, the PD cluster, and its name."""
        for source in self.prefill:
            named = source.link
            if not isinstance(named, dict):
                named = dict.fromkeys((pd.name for pd in self.pd), named)
            for pd, name in named.items():
                yield source.name, pd, name

    def instances_config(self, *, poll_load: bool = False) -> InstancesConfig:
        """The configuration of the instances of embedded fronts."""
        return InstancesConfig(
            log_dir=self.log_dir,
            engine_key_file=self.engine_key_file,
            credentials=self.credentials("gateway"),
            poll_load=poll_load,
        )

    def engine_access(self) -> EngineAccess:
        """How to ask the engines of all clusters. Raises FileError when a file cannot be used."""
        try:
            return self.instances_config().engine_access()
        except LocalError as error:
            problem = Problem(("engine_key_file",), error.message)
            raise FileError("the gateway's file", [problem]) from error


@dataclass(frozen=True, slots=True)
class Clusters:
    """The fronts that a gateway talks to. The caller that built them starts and closes them."""

    pds: Sequence[EmbeddedPdCluster | RemotePdCluster]
    prefill: Mapping[str, LinkedPrefillCluster]
    discover: Mapping[str, DiscoverySection] = field(default_factory=dict)
    """Where fronts inside the gateway find instances, by cluster."""
    following: set[asyncio.Task[None]] = field(default_factory=set)

    async def start(self) -> None:
        """Start all fronts; embedded ones return after their first probes."""
        for front in (*self.prefill.values(), *self.pds):
            await front.start()
        for cluster, section in self.discover.items():
            if (departures := self._departures(cluster)) is not None:
                work = follow_discovery(section, departures)
                start_task(work, f"discovery of {cluster}", self.following)

    def change_members(self, cluster: str, changes: MemberChanges) -> None:
        """Let instances of a front inside the gateway join and leave."""
        if (departures := self._departures(cluster)) is not None:
            for message in follow_changes(departures, changes).values():
                logger.warning("%s", message)

    def _departures(self, cluster: str) -> Departures | None:
        """None for a front elsewhere."""
        pds = {front.name: front for front in self.pds}
        front = pds.get(cluster) or self.prefill[cluster].cluster
        if isinstance(front, EmbeddedPdCluster | EmbeddedPrefillCluster):
            return front.departures
        return None

    async def close(self) -> None:
        """Close all fronts."""
        for task in self.following:
            task.cancel()
        for front in (*self.prefill.values(), *self.pds):
            await front.close()


def load_gateway_file(path: Path, environ: Mapping[str, str] = os.environ) -> GatewayFile:
    """Read and check `path`, API keys included. Raises `FileError`."""
    loaded = read_settings(path, GatewayFile, expected=EXPECTED)
    try:
        gateway = with_api_keys(loaded.gateway, _api_keys(loaded, environ))
    except (OSError, ValueError) as error:
        raise FileError(str(path), [Problem((), str(error))]) from error
    return loaded.model_copy(update={"gateway": gateway})


def build_granter(file: GatewayFile) -> Granter | None:
    """The signer of grants for node agents; None without a key. Raises `FileError`."""
    if file.granting_key is None:
        return None
    try:
        return Granter(file.granting_key.grant_file)
    except LocalError as error:
        problem = Problem(("granting_key", "file"), error.message)
        raise FileError("the gateway's file", [problem]) from error


def build_tracer(file: GatewayFile) -> Tracer | None:
    """Records the gateway's spans; None if nobody wants them. Raises `FileError`."""
    instance = "" if file.gateway.shared is None else file.gateway.shared.name
    try:
        return open_tracer(file.traces, "prfaas-gateway", instance or "gateway")
    except LocalError as error:
        problem = Problem(("traces",), error.message)
        raise FileError("the gateway's file", [problem]) from error


def build_clusters(
    file: GatewayFile, granter: Granter | None = None, tracer: Tracer | None = None
) -> Clusters:
    """The fronts `file` names, not started. Call it on the event loop that will use them. Fronts
    inside the gateway record their spans with `tracer`.
    """
    return Clusters(
        pds=[_pd(file, source, tracer) for source in file.pd],
        prefill={
            source.name: LinkedPrefillCluster(
                _prefill(file, source, tracer), source.endpoints, granter
            )
            for source in file.prefill
        },
        discover={
            source.name: source.discover
            for source in (*file.pd, *file.prefill)
            if source.discover is not None
        },
    )


def agent_clients(file: GatewayFile, granter: Granter | None = None) -> AgentClients:
    """The gateway's ways to node agents, shared by its caches and links."""
    return AgentClients(file.credentials("gateway"), granter)


def build_caches(file: GatewayFile, agents: AgentClients) -> RegionCaches:
    """The gateway's view of what is cached, as `file` says. Raises `FileError`."""
    directory = file.gateway.directory
    if directory.target is not None:
        remote = RemoteDirectory(directory.target, file.credentials("gateway"))
        return RegionCaches(remote, agents.open)
    if directory.kind == "redis":
        return RegionCaches(_redis_directory(directory.url), agents.open)
    embedded = EmbeddedDirectory(agents.open)
    return RegionCaches(embedded, agents.open, embedded.follow)


def build_region(file: GatewayFile) -> RegionInRedis | None:
    """What the gateways of the region share, as `file` says; None for the only one. Raises
    `FileError`.
    """
    gateway = file.gateway
    if gateway.shared is None:
        return None
    try:
        # The redis client is an extra that only its users install.
        from deploy.gateway.sharing.redis_region import region_at

        return region_at(gateway.shared_url, gateway.shared.region)
    except ModuleNotFoundError:
        message = "it needs the redis client: pip install prfaas[redis]"
        problem = Problem(("gateway", "shared"), message)
    except ValueError:  # its text may have a part of the password
        problem = Problem(("gateway", "shared", "redis"), _NO_URL)
    raise FileError("the gateway's file", [problem])


def build_links(file: GatewayFile, agents: AgentClients) -> RegionLinks:
    """The gateway's view of the links between the clusters of `file`."""
    return RegionLinks(
        agents.open,
        names={(source, target): name for source, target, name in file.links()},
        detours={source.name: source.endpoints for source in file.prefill},
    )


def _redis_directory(url: str) -> DirectoryReader:
    try:
        # The redis client is an extra that only its users install.
        from kvmanager.directory.redis_store import RedisDirectory

        return RedisDirectory.at(url)
    except ModuleNotFoundError:
        message = "kind redis needs the redis client: pip install prfaas[redis]"
        problem = Problem(("gateway", "directory"), message)
    except ValueError:
        problem = Problem(("gateway", "directory", "url"), _NO_URL)
    raise FileError("the gateway's file", [problem])


def _pd(
    file: GatewayFile, source: PdSource, tracer: Tracer | None
) -> EmbeddedPdCluster | RemotePdCluster:
    if source.front:
        return RemotePdCluster(
            source.name,
            source.front,
            has_prefill_instances=source.has_prefill_instances,
            credentials=file.credentials("gateway"),
        )
    instances = file.instances_config(poll_load=True)
    encode = file.gateway.scheduling.encoding.encode_config()
    config = source.cluster_config(instances, encode, keep_leases=True)
    return EmbeddedPdCluster(source.name, source.instances, config, tracer=tracer)


def _prefill(
    file: GatewayFile, source: PrefillSource, tracer: Tracer | None
) -> EmbeddedPrefillCluster | RemotePrefillCluster:
    if source.front:
        return RemotePrefillCluster(source.name, source.front, file.credentials("gateway"))
    config = PrefillClusterConfig(
        queue=source.queue_config(file.gateway.scheduling.queue.order()),
        instances=file.instances_config(),
        encode=file.gateway.scheduling.encoding.encode_config(),
    )
    return EmbeddedPrefillCluster(source.name, source.instances, config, tracer=tracer)


def _api_keys(file: GatewayFile, environ: Mapping[str, str]) -> tuple[ApiKey, ...]:
    if file.api_keys_file is not None:
        return load_api_keys(file.api_keys_file)
    if not file.api_keys_env:
        return file.gateway.api_keys
    variable = file.api_keys_env
    return parse_api_keys(environ.get(variable, ""), f"api_keys_env: {variable}")
