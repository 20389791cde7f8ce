"""What a region is made of, as people write it in region.yaml: value types with their limits.

Single values are checked here; whether the parts fit together is asked by `checks.check_region`,
and files are read by `loading.load_region`. Does not know processes, nor which ports are free.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from deploy.gateway.config import ApiKeysSection, GatewaySection
from kvmanager.agent.config import AgentSection
from kvmanager.config_files.fields import Address, Port, Section, TlsSection
from kvmanager.config_files.units import parse_duration, parse_rate
from prfaas.engines.command import EngineOptions
from prfaas.engines.instance import DEFAULT_DECODE_SLOTS, DEFAULT_MAX_CONCURRENT

ClusterKind = Literal["prefill", "pd"]
InstanceRole = Literal["prefill", "decode", "both"]


def _spelled_by(parse: Any) -> AfterValidator:
    def check(text: str) -> str:
        parse(text)
        return text

    return AfterValidator(check)


def _as_text(value: Any) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value) if is_number else value


Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")]
# A bare number is read as text, so that the answer is the right spelling and not a type.
Rate = Annotated[str, BeforeValidator(_as_text), _spelled_by(parse_rate)]
Duration = Annotated[str, BeforeValidator(_as_text), _spelled_by(parse_duration)]


class ModelSpec(EngineOptions):
    """A model and how every instance serves it."""

    name: Annotated[str, Field(min_length=1)]
    """Name that clients ask for."""
    path: Annotated[str, Field(min_length=1)]
    """Directory of the weights, or a name on the Hugging Face hub."""
    prefix_caching: bool = True
    """Cache prefixes in the engines and in their nodes' arenas; false: in neither."""


class RegionInstance(Section):
    """One vLLM engine on a node."""

    name: Name
    """Name of the instance, one of its kind in the region."""
    role: InstanceRole | None = None
    """What it does. Left out: prefill in a prefill cluster, both in a PD cluster."""
    model: str | None = None
    """Name of the model that it serves; may be left out if there is only one."""
    port: Port = 0
    """Port of its OpenAI server; 0: any free one."""
    max_concurrent: Annotated[int, Field(ge=1)] = DEFAULT_MAX_CONCURRENT
    """Prefill jobs given to it at a time; vLLM batches them."""
    decode_slots: Annotated[int, Field(ge=1)] | None = None
    """Requests that its engine decodes at a time, vLLM's max_num_seqs. Left out: 256, or
    max_num_batched_tokens if that is less.
    """
    args: tuple[str, ...] = ()
    """Further vLLM options of this instance; they win over those of the model."""
    env: dict[str, str] = Field(default={})
    """Added to this engine's environment, after that of the model."""


class AgentSpec(AgentSection):
    """The node agent of a host: its shared memory, its prefix cache and its ports."""

    data_port: Port = 0
    """Port where KVCache arrives; 0: any free one."""
    control_port: Port = 0
    """Port where fronts reserve landings; 0: any free one."""
    metrics_port: Port = 0
    """Prometheus port; 0: any free one."""
    keep_arena: bool = True
    """What is cached outlives the agent, until `prfaas down`."""
    advertise: Address | None = None
    """What senders connect to, host:port. Left out: the node's host and data_port."""


class NodeSpec(Section):
    """A host with one node agent and the engines beside it."""

    name: Name
    """Name of the node, one of its kind in the region."""
    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address that the others reach it by."""
    agent: AgentSpec = AgentSpec()
    """Its node agent."""
    instances: Annotated[tuple[RegionInstance, ...], Field(min_length=1)]
    """Its engines."""


class ClusterSpec(Section):
    """A prefill cluster or the local PD cluster."""

    name: Name
    """Name of the cluster, one of its kind in the region."""
    kind: ClusterKind
    """prefill: it only prefills. pd: it prefills and decodes."""
    nodes: Annotated[tuple[NodeSpec, ...], Field(min_length=1)]
    """Its hosts."""

    @property
    def instances(self) -> tuple[RegionInstance, ...]:
        return tuple(instance for node in self.nodes for instance in node.instances)


class EmulationSpec(Section):
    """A relay that makes a link of this machine behave like a long one (`prfaas up` only)."""

    rate: Annotated[Rate, Field(examples=["1Gbit", "200Mbit", "unlimited"])] = "unlimited"
    """Rate of the link with its unit, such as 1Gbit."""
    rtt: Annotated[Duration, Field(examples=["20ms"])] = "0"
    """Round-trip time with its unit, such as 20ms; half of it each way."""
    jitter: Annotated[Duration, Field(examples=["1ms"])] = "0"
    """By how much the delay varies, with its unit, such as 1ms: plus or minus."""


class LinkSpec(Section):
    """How a prefill cluster reaches the PD cluster."""

    source: Annotated[Name, Field(alias="from")]
    """Name of a prefill cluster."""
    to: Name
    """Name of the PD cluster."""
    endpoints: dict[Name, Address] = Field(default={})
    """By receiving node: the address that senders of `from` connect to, where it is not what the
    node's agent advertises (NAT, a tunnel).
    """
    emulate: EmulationSpec | None = None
    """Make the link behave like a long one. Left out: it is as it is."""

    @property
    def name(self) -> str:
        return f"{self.source}-to-{self.to}"


class GatewaySpec(GatewaySection, ApiKeysSection):
    """The region's one entry endpoint."""


class SecuritySpec(Section):
    """Either `tls`, or the word that the network between the nodes is trusted."""

    tls: TlsSection | None = None
    """Mutual TLS between agents, fronts and gateway."""
    trusted_network: bool = False
    """true: no TLS between agents, fronts and gateway."""


class RegionSpec(Section):
    """A region: the gateway, the models, the clusters and the links between them."""

    name: Name = "region"
    """Name of the region, and of the directory in which it runs."""
    gateway: GatewaySpec = GatewaySpec()
    """Its entry endpoint."""
    models: Annotated[tuple[ModelSpec, ...], Field(min_length=1)]
    """What it serves."""
    clusters: Annotated[tuple[ClusterSpec, ...], Field(min_length=1)]
    """Prefill clusters, and one PD cluster."""
    links: tuple[LinkSpec, ...] = ()
    """From each prefill cluster to the PD cluster."""
    security: SecuritySpec
    """How the processes of the region trust each other."""

    @property
    def pd_cluster(self) -> ClusterSpec:
        return next(cluster for cluster in self.clusters if cluster.kind == "pd")

    @property
    def prefill_clusters(self) -> tuple[ClusterSpec, ...]:
        return tuple(cluster for cluster in self.clusters if cluster.kind == "prefill")

    def cluster(self, name: str) -> ClusterSpec:
        """KeyError if there is none of that name."""
        for cluster in self.clusters:
            if cluster.name == name:
                return cluster
        raise KeyError(name)

    def link_from(self, cluster: str) -> LinkSpec:
        """The link of a prefill cluster to the PD cluster; KeyError if there is none."""
        for link in self.links:
            if link.source == cluster:
                return link
        raise KeyError(cluster)

    def model_of(self, instance: RegionInstance) -> ModelSpec:
        """The model an instance serves; KeyError for an unknown name."""
        if instance.model is None:
            return self.models[0]
        for model in self.models:
            if model.name == instance.model:
                return model
        raise KeyError(instance.model)

    def decode_slots_of(self, instance: RegionInstance) -> int:
        """How many requests the instance's engine decodes at a time."""
        limit = self.model_of(instance).max_num_batched_tokens or DEFAULT_DECODE_SLOTS
        return instance.decode_slots or min(DEFAULT_DECODE_SLOTS, limit)

    def caches(self, node: NodeSpec) -> bool:
        """Whether the node has a prefix cache: some model there wants one, and it has room."""
        return node.agent.cache_gib != 0 and any(
            self.model_of(instance).prefix_caching for instance in node.instances
        )


def role_of(instance: RegionInstance, cluster: ClusterSpec) -> InstanceRole:
    """The instance's role, or the one its kind of cluster implies."""
    return instance.role or ("prefill" if cluster.kind == "prefill" else "both")


def region_schema() -> dict[str, Any]:
    """JSON Schema of region.yaml for editors."""
    schema = RegionSpec.model_json_schema(by_alias=True)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema
