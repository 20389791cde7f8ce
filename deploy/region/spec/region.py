"""The parts of a region as people write them in region.yaml: value types with their limits.

Single values are checked here. `checks.check_region` checks whether the parts fit together, and
`loading.load_region` reads files. This file knows no processes, and not which ports are free.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from deploy.gateway.api_keys import ApiKeysSection
from deploy.gateway.config import GatewaySection, SharedUplink
from deploy.lab.pace.times import PaceSpec
from kvmanager.agent.config import AgentSection
from kvmanager.config_files.fields import (
    Address,
    Addresses,
    Host,
    ListenHost,
    Port,
    SecretTexts,
    Section,
    TlsSection,
    Tokens,
)
from kvmanager.config_files.security import is_loopback
from kvmanager.config_files.traces import SampledTraces, TracesSection
from kvmanager.config_files.units import parse_duration, parse_rate
from kvmanager.logs import LogFormat, LogLevel
from local_pd.handoff import HandOffWay
from prfaas.engines.command import EngineOptions
from prfaas.engines.instance import DEFAULT_DECODE_SLOTS, DEFAULT_MAX_CONCURRENT
from scheduler.reports import Role
from scheduler.routing.spill import Spill

ClusterKind = Literal["prefill", "pd"]


def _spelled_by(parse: Any) -> AfterValidator:
    def check(text: str) -> str:
        parse(text)
        return text

    return AfterValidator(check)


def _as_text(value: Any) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value) if is_number else value


Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")]
# A bare number is read as text, so that the error shows the right spelling instead of a type.
Rate = Annotated[str, BeforeValidator(_as_text), _spelled_by(parse_rate)]
Duration = Annotated[str, BeforeValidator(_as_text), _spelled_by(parse_duration)]


class ModelSpec(EngineOptions):
    """A model, and how every instance serves it."""

    name: Annotated[str, Field(min_length=1)]
    """The name that clients ask for."""
    path: Annotated[str, Field(min_length=1)]
    """The directory of the weights, or a name on the Hugging Face hub."""
    prefix_caching: bool = True
    """Whether prefixes are cached in the engines and in their nodes' arenas; false: in neither."""
    pace: PaceSpec | None = None
    """The device whose time all instances take, for a rehearsal on the CPU. Left out: their own."""


class RegionInstance(Section):
    """One vLLM engine on a node."""

    name: Name
    """The name of the instance; no other instance of the region may have it."""
    role: Role | None = None
    """The role of the instance. encode: it encodes images and other media for those that prefill in
    its cluster. Left out: prefill in a prefill cluster, both in a PD cluster.
    """
    whole_model: bool = False
    """With the role encode: it loads the language model as well, so that `prfaas role` and the
    long-term loop may give it another role. false: it loads the encoder alone.
    """
    encodes: bool = False
    """With the role decode or both: it also encodes for those that prefill in its cluster."""
    model: str | None = None
    """The name of the model that it serves. It may be left out if there is only one."""
    port: Port = 0
    """The port of its OpenAI server, which only the region's processes may use; 0: any free one."""
    nixl_port: Port = 0
    """The port at which NixlConnectors of other engines ask for its memory, in a cluster with
    `hand_off: nixl`; 0: any free one.
    """
    max_concurrent: Annotated[int, Field(ge=1)] = DEFAULT_MAX_CONCURRENT
    """How many prefill jobs it gets at a time at most. It gets a further one only while those that
    it has do not fill a step of its engine (max_num_batched_tokens, or 8,192).
    """
    decode_slots: Annotated[int, Field(ge=1)] | None = None
    """How many requests its engine decodes at a time, vLLM's max_num_seqs. Left out: 256, or
    max_num_batched_tokens if that is less.
    """
    tensor_parallel_size: Annotated[int, Field(ge=1)] | None = None
    """GPUs of each layer of this instance, where they are other than those of its model."""
    pipeline_parallel_size: Annotated[int, Field(ge=1)] | None = None
    """Pipeline stages of this instance, where they are other than those of its model."""
    block_size: Tokens | None = None
    """Tokens of one of its KV blocks, where they are other than those of its model."""
    pace: Annotated[str, Field(min_length=1)] | None = None
    """The profile of its device, where that is another one than the `pace` of its model says."""
    args: tuple[str, ...] = ()
    """Further vLLM options of this instance. They win over those of the model."""
    env: SecretTexts = Field(default={})
    """Added to the environment of this engine, after that of the model. Without
    CUDA_VISIBLE_DEVICES, or VLLM_CPU_OMP_THREADS_BIND for an engine on the CPU, `prfaas up` divides
    the GPUs and cores of the host among its engines.
    """

    @property
    def encodes_only(self) -> bool:
        """Whether its engine loads the model's encoder alone."""
        return self.role == "encode" and not self.whole_model


class AgentSpec(AgentSection):
    """The node agent of a host: its shared memory, its prefix cache and its ports."""

    data_port: Port = 0
    """The port at which KVCache arrives; 0: any free one."""
    control_port: Port = 0
    """The port at which fronts reserve landings; 0: any free one."""
    metrics_port: Port = 0
    """The Prometheus port, at the node's host with `security.metrics_key` or on a trusted network,
    else on loopback; 0: any free one.
    """
    keep_arena: bool = True
    """Whether what is cached outlives the agent, until `prfaas down`."""
    advertise: Addresses | None = None
    """The host:port that senders connect to, or a list for a host with several addresses: the
    connections of a link are spread over them, and leave from the sender's own address at the same
    place in its list. The first is the one by which the agent is known. With a list the data port
    listens on all addresses, unless the node has `listen`. Left out: the node's host and data_port.
    """

    @property
    def advertised(self) -> tuple[str, ...]:
        """All addresses of `advertise`; none where it is left out."""
        found = self.advertise or ()
        return (found,) if isinstance(found, str) else found


class NodeSpec(Section):
    """A host with one node agent and the engines beside it."""

    name: Name
    """The name of the node; no other node of the region may have it."""
    host: Host = "127.0.0.1"
    """The name or address at which the others, and its own processes, reach it; IPv6 without
    brackets. Each address of a name is listened on, and tried.
    """
    listen: ListenHost | None = None
    """The address that its processes listen on, where that is another one: behind NAT, or in a
    container; 0.0.0.0 for all of IPv4, and :: for all. Left out: `host`.
    """
    agent: AgentSpec = AgentSpec()
    """Its node agent."""
    instances: Annotated[tuple[RegionInstance, ...], Field(min_length=1)]
    """Its engines."""

    @property
    def bound_host(self) -> str:
        return self.listen or self.host

    @property
    def data_host(self) -> str:
        """The address that its data port listens on."""
        several = len(self.agent.advertised) > 1
        return self.listen or ("::" if several else self.host)


class ClusterSpec(Section):
    """A prefill cluster or a local PD cluster."""

    name: Name
    """The name of the cluster; no other cluster of the region may have it."""
    kind: ClusterKind
    """prefill: it only prefills. pd: it prefills and decodes."""
    nodes: Annotated[tuple[NodeSpec, ...], Field(min_length=1)]
    """Its hosts."""
    spill: Spill | None = None
    """In a PD cluster: when another one may decode requests whose home it is. never: it never does.
    overflow (if this is left out): when this one cannot serve a request, would refuse it, or would
    be clearly later than the other. nearest: also when it is a little later; of the clusters that
    are about as soon, the nearest decodes.
    """
    front_port: Port = 0
    """The gRPC port of its front on its first node, where the gateway runs in another cluster and
    every host starts its own part; 0: 7200, or the next free one.
    """
    front_metrics_port: Port = 0
    """The Prometheus port of that front, at the address of its first node's agent's metrics; 0:
    7210, or the next free one.
    """
    hand_off: HandOffWay = "auto"
    """How KVCache gets from a prefill to a decode instance of a PD cluster. auto: within a node
    through the arena that both share, between nodes through prfaas' transport. transport: through
    that within nodes, too. nixl: between nodes by vLLM's NixlConnector, over RDMA where there is
    some; it neither encrypts nor authenticates, and engines need the Python package nixl.
    """

    @property
    def instances(self) -> tuple[RegionInstance, ...]:
        return tuple(instance for node in self.nodes for instance in node.instances)


class EmulationSpec(Section):
    """A relay that makes a link on this machine behave like a long one (`prfaas up` only)."""

    rate: Annotated[Rate, Field(examples=["1Gbit", "200Mbit", "unlimited"])] = "unlimited"
    """The rate of the link with its unit, such as 1Gbit."""
    rtt: Annotated[Duration, Field(examples=["20ms"])] = "0"
    """The round-trip time with its unit, such as 20ms. Half of it applies each way."""
    jitter: Annotated[Duration, Field(examples=["1ms"])] = "0"
    """How far the delay varies in either direction, with its unit, such as 1ms."""


class LinkSpec(Section):
    """How a prefill cluster reaches a PD cluster."""

    source: Annotated[Name, Field(alias="from")]
    """The name of a prefill cluster."""
    to: Name
    """The name of a PD cluster. A prefill cluster may have links to several."""
    endpoints: dict[Name, Address] = Field(default={})
    """The address that senders of `from` connect to, by receiving node, where it is not the address
    that the node's agent advertises (NAT, a tunnel).
    """
    emulate: EmulationSpec | None = None
    """Makes the link behave like a long one. Left out: the link stays as it is."""

    @property
    def name(self) -> str:
        return f"{self.source}-to-{self.to}"


class GatewaySpec(GatewaySection, ApiKeysSection):
    """The only entry endpoint of the region."""

    node: Name | None = None
    """The node on whose host it runs, where every host starts its own part. Left out: the first
    node of the first PD cluster.
    """
    nodes: tuple[Name, ...] = ()
    """The nodes on whose hosts gateways run, instead of `node`, if there are several. They need
    `shared`.
    """
    ports: dict[Name, Port] = Field(default={})
    """The port of each of several gateways, by its node. Left out: `port`, and for others on the
    same host the next free one.
    """


class SecuritySpec(Section):
    """How processes trust each other: `tls`, the region's key, or the statement that everybody on
    the network is trusted.
    """

    tls: TlsSection | None = None
    """Mutual TLS between agents, fronts and gateway. The certificate names all of them
    (docs/security.md). Left out: calls are signed with the region's key.
    """
    region_key: Path | None = None
    """File of the region's key (docs/security.md). Left out: `prfaas up` makes one for its run."""
    engine_key: Path | None = None
    """File with the key that engines demand, the same on every host. Left out: `prfaas up` makes
    one for its run.
    """
    granting_key: Path | None = None
    """File of the private key with which the gateway signs grants (docs/security.md), on its host
    only; needs `granting_keys`. Left out: `prfaas up` makes a pair for its run.
    """
    granting_keys: Path | None = None
    """File of the public keys with which agents check grants, that of `granting_key` among them."""
    metrics_key: Path | None = None
    """File with the key that who reads metrics of node agents must show (docs/security.md). Left
    out: they are shown on loopback only, to everybody there.
    """
    trusted_network: bool = False
    """true: neither; every process that reaches the ports of another may call everything."""


class LogsSpec(Section):
    """How the processes of the region log; engines too."""

    format: LogFormat = "text"
    """Lines for people (`text`), or a JSON object each (`json`)."""
    level: LogLevel = "info"
    """The least level of a line."""


class RegionSpec(Section):
    """A region: the gateway, the models, the clusters and the links between them."""

    name: Name = "region"
    """The name of the region, and of the directory in which it runs."""
    gateway: GatewaySpec = GatewaySpec()
    """Its entry endpoint."""
    models: Annotated[tuple[ModelSpec, ...], Field(min_length=1)]
    """The models that it serves."""
    clusters: Annotated[tuple[ClusterSpec, ...], Field(min_length=1)]
    """Prefill clusters and PD clusters, at least one of these."""
    links: tuple[LinkSpec, ...] = ()
    """The links from prefill clusters to the PD clusters that they prefill for."""
    uplinks: tuple[SharedUplink, ...] = ()
    """Bandwidth that all links from a prefill cluster share, or all links to a PD cluster. The
    long-term loop plans with no more.
    """
    security: SecuritySpec = SecuritySpec()
    """How the processes of the region trust each other."""
    traces: SampledTraces | None = None
    """Where gateways, fronts, agents and engines send the spans of requests (docs/tracing.md). Left
    out: nowhere.
    """
    logs: LogsSpec = LogsSpec()
    """How they log."""

    @property
    def pd_clusters(self) -> tuple[ClusterSpec, ...]:
        return tuple(cluster for cluster in self.clusters if cluster.kind == "pd")

    @property
    def prefill_clusters(self) -> tuple[ClusterSpec, ...]:
        return tuple(cluster for cluster in self.clusters if cluster.kind == "prefill")

    @property
    def nodes(self) -> tuple[NodeSpec, ...]:
        return tuple(node for cluster in self.clusters for node in cluster.nodes)

    @property
    def gateway_nodes(self) -> tuple[NodeSpec, ...]:
        """The nodes on whose hosts gateways run. StopIteration for an unknown name."""
        gateway = self.gateway
        names = gateway.nodes or (gateway.node or self.pd_clusters[0].nodes[0].name,)
        return tuple(next(node for node in self.nodes if node.name == name) for name in names)

    @property
    def gateway_node(self) -> NodeSpec:
        """The first of `gateway_nodes`."""
        return self.gateway_nodes[0]

    def cluster(self, name: str) -> ClusterSpec:
        """The cluster of this name. KeyError if there is none."""
        for cluster in self.clusters:
            if cluster.name == name:
                return cluster
        raise KeyError(name)

    def cluster_with(self, node: NodeSpec) -> ClusterSpec:
        """The cluster that has this node. StopIteration if none has."""
        return next(
            cluster
            for cluster in self.clusters
            if any(item.name == node.name for item in cluster.nodes)
        )

    def home_at(self, node: str) -> str:
        """The PD cluster of requests that name none, at the gateway of a node: the one that the
        file says, else the one that has the node, else the first.
        """
        beside = (c.name for c in self.pd_clusters if node in {item.name for item in c.nodes})
        return self.gateway.home or next(beside, self.pd_clusters[0].name)

    def links_from(self, cluster: str) -> tuple[LinkSpec, ...]:
        """The links of a prefill cluster to PD clusters."""
        return tuple(link for link in self.links if link.source == cluster)

    def model_of(self, instance: RegionInstance) -> ModelSpec:
        """The model that an instance serves. KeyError for an unknown name."""
        if instance.model is None:
            return self.models[0]
        for model in self.models:
            if model.name == instance.model:
                return model
        raise KeyError(instance.model)

    def tensor_parallel_size_of(self, instance: RegionInstance) -> int:
        """How many GPUs share each layer of the instance."""
        return instance.tensor_parallel_size or self.model_of(instance).tensor_parallel_size

    def pipeline_parallel_size_of(self, instance: RegionInstance) -> int:
        """How many stages divide the layers of the instance."""
        return instance.pipeline_parallel_size or self.model_of(instance).pipeline_parallel_size

    def pace_of(self, instance: RegionInstance) -> PaceSpec | None:
        """The device whose time the instance takes; None: its own."""
        pace = self.model_of(instance).pace
        if pace is None or instance.pace is None:
            return pace
        return pace.model_copy(update={"profile": instance.pace})

    def num_workers_of(self, instance: RegionInstance) -> int:
        """How many GPUs, or worker processes on the CPU, the instance has."""
        return self.pipeline_parallel_size_of(instance) * self.tensor_parallel_size_of(instance)

    def decode_slots_of(self, instance: RegionInstance) -> int:
        """How many requests the instance's engine decodes at a time."""
        # vLLM refuses more sequences than tokens in a step.
        limit = self.model_of(instance).max_num_batched_tokens or DEFAULT_DECODE_SLOTS
        return instance.decode_slots or min(DEFAULT_DECODE_SLOTS, limit)

    def engine_host(self, node: NodeSpec) -> str:
        """The address that the node's engines listen on. Prompts and the engines' key cross a
        network with TLS, or where it is trusted; all processes of `prfaas up` are on one host.
        """
        is_safe = self.security.tls is not None or self.security.trusted_network
        return node.bound_host if is_safe or is_loopback(node.bound_host) else "127.0.0.1"

    def metrics_host(self, node: NodeSpec) -> str:
        """The address of the metrics of the node's agent, which name models and tenants."""
        security = self.security
        is_guarded = security.metrics_key is not None or security.trusted_network
        return node.bound_host if is_guarded or is_loopback(node.bound_host) else "127.0.0.1"

    def agent_hosts(self, node: NodeSpec) -> dict[str, str]:
        """The addresses that the node's agent listens on, by the settings of their ports."""
        return {
            "data_port": node.data_host,
            "control_port": node.bound_host,
            "metrics_port": self.metrics_host(node),
        }

    @property
    def receiver(self) -> TracesSection | None:
        """Where processes send spans that do not decide which requests are traced."""
        return None if self.traces is None else TracesSection(endpoint=self.traces.endpoint)

    def caches(self, node: NodeSpec) -> bool:
        """Whether the node has a prefix cache: a model there wants one, and there is room for
        it.
        """
        return node.agent.cache_gib != 0 and any(
            self.model_of(instance).prefix_caching and not instance.encodes_only
            for instance in node.instances
        )


def gateway_process(region: RegionSpec, node: str) -> str:
    """The name of the process of a gateway, which runs on the host of this node."""
    return f"gateway.{node}" if len(region.gateway.nodes) > 1 else "gateway"


def role_of(instance: RegionInstance, cluster: ClusterSpec) -> Role:
    """The instance's role, or the one that its kind of cluster implies."""
    return instance.role or ("prefill" if cluster.kind == "prefill" else "both")


def spill_of(cluster: ClusterSpec) -> Spill:
    """The rule of a PD cluster for the requests whose home it is."""
    return cluster.spill or "overflow"


def region_schema() -> dict[str, Any]:
    """The JSON Schema of region.yaml, for editors."""
    schema = RegionSpec.model_json_schema(by_alias=True)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema
