"""What a region is made of, as people write it in region.yaml: value types with their limits.

Single values are checked here; whether the parts fit together is asked by `checks.check_region`,
and files are read by `loading.load_region`. Does not know processes, nor which ports are free.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
)

from deploy.gateway.config import DirectoryConfig
from deploy.gateway.scheduling.config import SchedulingConfig
from kvmanager.config_files.units import parse_duration, parse_rate, parse_size
from kvmanager.pool.placement import StatePlacement
from transport import TransportConfig

DEFAULT_DECODE_SLOTS = 256

ClusterKind = Literal["prefill", "pd"]
Eviction = Literal["lru", "lfu", "length", "cost"]
InstanceRole = Literal["prefill", "decode", "both"]


def _spelled_by(parse: Any) -> AfterValidator:
    def check(text: str) -> str:
        parse(text)
        return text

    return AfterValidator(check)


def _as_text(value: Any) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value) if is_number else value


def _size(value: Any) -> Any:
    return parse_size(value) if isinstance(value, str) else value


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{text!r} is not an address; write host:port")
    return text


Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")]
# A bare number is read as text, so that the answer is the right spelling and not a type.
Rate = Annotated[str, BeforeValidator(_as_text), _spelled_by(parse_rate)]
Duration = Annotated[str, BeforeValidator(_as_text), _spelled_by(parse_duration)]
Size = Annotated[int, BeforeValidator(_size), Field(gt=0)]
Address = Annotated[str, AfterValidator(_address)]
Port = Annotated[int, Field(ge=0, le=65535)]
"""0: any free one, chosen by `prfaas up`."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


class ModelSpec(_Part):
    """A model and how every instance serves it."""

    name: Annotated[str, Field(min_length=1, description="name that clients ask for")]
    path: Annotated[
        str,
        Field(min_length=1, description="directory, or a name on the Hugging Face hub"),
    ]
    dtype: str = "auto"
    max_model_len: Annotated[int, Field(ge=2, description="prompt plus output, tokens")] | None = (
        None
    )
    block_size: Annotated[int, Field(ge=1, description="tokens per KV block")] | None = None
    max_num_batched_tokens: (
        Annotated[int, Field(ge=1, description="tokens per step, so per prefill chunk")] | None
    ) = None
    tensor_parallel_size: Annotated[int, Field(ge=1)] = 1
    kv_space_gib: (
        Annotated[int, Field(ge=1, description="KV memory of a CPU engine; leave out on a GPU")]
        | None
    ) = None
    prefix_caching: Annotated[
        bool, Field(description="in the engines and in their nodes' arenas; false: in neither")
    ] = True
    enforce_eager: bool = False
    args: Annotated[
        tuple[str, ...], Field(description="further vLLM options; they win over the ones above")
    ] = ()
    env: Annotated[dict[str, str], Field(description="added to the engines' environment")] = {}


class RegionInstance(_Part):
    """One vLLM engine on a node."""

    name: Name
    role: Annotated[
        InstanceRole | None,
        Field(description="left out: prefill in a prefill cluster, both in a PD cluster"),
    ] = None
    model: Annotated[
        str | None, Field(description="name of a model; may be left out if there is only one")
    ] = None
    port: Annotated[Port, Field(description="of its OpenAI server; 0: any free one")] = 0
    max_concurrent: Annotated[
        int, Field(ge=1, description="prefill jobs given to it at a time")
    ] = 4
    decode_slots: (
        Annotated[
            int,
            Field(
                ge=1,
                description="requests that its engine decodes at a time, vLLM's max_num_seqs; "
                "default 256, or max_num_batched_tokens if that is less",
            ),
        ]
        | None
    ) = None
    args: tuple[str, ...] = ()
    env: dict[str, str] = {}


class AgentSpec(_Part):
    """The node agent of a host: its shared memory, its prefix cache and its ports."""

    data_port: Annotated[Port, Field(description="KVCache arrives here")] = 0
    control_port: Annotated[Port, Field(description="fronts reserve landings here")] = 0
    metrics_port: Annotated[Port, Field(description="Prometheus")] = 0
    arena_gib: Annotated[float, Field(gt=0, description="shared memory for KVCache, GiB")] = 1.0
    landing_gib: (
        Annotated[float, Field(gt=0, description="of that for landings at most; default all")]
        | None
    ) = None
    arena_dir: Annotated[Path, Field(description="where the arena's file lies")] = Path("/dev/shm")
    keep_arena: Annotated[
        bool, Field(description="what is cached outlives the agent, until `prfaas down`")
    ] = True
    cache_gib: (
        Annotated[
            float,
            Field(ge=0, description="of the arena for the prefix cache at most; default all"),
        ]
        | None
    ) = None
    eviction: Annotated[Eviction, Field(description="what goes first when the cache is full")] = (
        "lru"
    )
    placement: Annotated[
        dict[str, bool | int],
        Field(description="which boundaries keep states: ends, branches, every_tokens, ..."),
    ] = {}
    ssd_dir: (
        Annotated[Path, Field(description="second tier of the cache; the node's own directory")]
        | None
    ) = None
    ssd_gib: Annotated[float, Field(gt=0, description="of that at most")] | None = None
    link_probes: Annotated[
        bool, Field(description="measure idle links now and then with up to 0.1% of their rate")
    ] = True
    advertise: (
        Annotated[Address, Field(description="what senders connect to, if not host:data_port")]
        | None
    ) = None

    transport: Annotated[
        dict[str, int | float | str | None],
        Field(description="tuning of the TCP transport: num_connections, idle_timeout_s, ..."),
    ] = {}

    @field_validator("transport")
    @classmethod
    def _check_transport(
        cls, value: dict[str, int | float | str | None]
    ) -> dict[str, int | float | str | None]:
        fields: dict[str, Any] = dict(value)
        known = {field.name for field in dataclasses.fields(TransportConfig)} - {"tls"}
        if unknown := sorted(fields.keys() - known):
            raise ValueError(f"unknown {', '.join(unknown)}; known: {', '.join(sorted(known))}")
        TransportConfig(**fields)
        return value

    @field_validator("placement")
    @classmethod
    def _check_placement(cls, value: dict[str, bool | int]) -> dict[str, bool | int]:
        known = StatePlacement.__struct_fields__
        if unknown := sorted(value.keys() - set(known)):
            raise ValueError(f"unknown {', '.join(unknown)}; known: {', '.join(sorted(known))}")
        try:
            msgspec.convert(value, StatePlacement)
        except msgspec.ValidationError as error:
            raise ValueError(str(error)) from None
        return value


class NodeSpec(_Part):
    """A host with one node agent and the engines beside it."""

    name: Name
    host: Annotated[str, Field(min_length=1, description="address that the others reach it by")] = (
        "127.0.0.1"
    )
    agent: AgentSpec = AgentSpec()
    instances: Annotated[tuple[RegionInstance, ...], Field(min_length=1)]


class ClusterSpec(_Part):
    """A prefill cluster or the local PD cluster."""

    name: Name
    kind: ClusterKind
    nodes: Annotated[tuple[NodeSpec, ...], Field(min_length=1)]

    @property
    def instances(self) -> tuple[RegionInstance, ...]:
        return tuple(instance for node in self.nodes for instance in node.instances)


class EmulationSpec(_Part):
    """A relay that makes a link of this machine behave like a long one (`prfaas up` only)."""

    rate: Annotated[Rate, Field(examples=["1Gbit", "200Mbit", "unlimited"])] = "unlimited"
    rtt: Annotated[Duration, Field(examples=["20ms"], description="half of it each way")] = "0"
    jitter: Annotated[Duration, Field(examples=["1ms"], description="plus or minus")] = "0"


class LinkSpec(_Part):
    """How a prefill cluster reaches the PD cluster."""

    source: Annotated[Name, Field(alias="from", description="a prefill cluster")]
    to: Annotated[Name, Field(description="the PD cluster")]
    endpoints: Annotated[
        dict[Name, Address],
        Field(
            description="by receiving node: the address that senders of `from` connect to, where"
            " it is not what the node's agent advertises (NAT, a tunnel)"
        ),
    ] = {}
    emulate: EmulationSpec | None = None

    @property
    def name(self) -> str:
        return f"{self.source}-to-{self.to}"


class GatewaySpec(_Part):
    """The region's one entry endpoint."""

    host: str = "127.0.0.1"
    port: Port = 8000
    threshold_tokens: Annotated[
        int,
        Field(ge=0, description="at first: prompts with more uncached go to a prefill cluster"),
    ] = 1024
    directory: Annotated[
        DirectoryConfig, Field(description="who knows what is cached where; default: the gateway")
    ] = DirectoryConfig()
    scheduling: Annotated[
        SchedulingConfig,
        Field(description="how requests are routed, queued and refused, and roles changed"),
    ] = SchedulingConfig()
    api_keys_file: Annotated[Path, Field(description="a line: KEY or NAME KEY")] | None = None
    api_keys_env: (
        Annotated[str, Field(description="environment variable with keys: [NAME=]KEY,...")] | None
    ) = None
    operators: Annotated[
        tuple[str, ...],
        Field(description="names of the API keys that may change roles; none: all may"),
    ] = ()
    max_body_bytes: Annotated[
        Size, Field(description="of a request; a number or 32MiB", examples=["32MiB"])
    ] = 32 << 20


class TlsSpec(_Part):
    """Mutual TLS between nodes: this side's certificate and key, and the CA of all."""

    cert: Path
    key: Path
    ca: Path


class SecuritySpec(_Part):
    """Either `tls`, or the word that the network between the nodes is trusted."""

    tls: TlsSpec | None = None
    trusted_network: Annotated[
        bool, Field(description="true: no TLS between agents, fronts and gateway")
    ] = False


class RegionSpec(_Part):
    """A region: the gateway, the models, the clusters and the links between them."""

    name: Name = "region"
    gateway: GatewaySpec = GatewaySpec()
    models: Annotated[tuple[ModelSpec, ...], Field(min_length=1)]
    clusters: Annotated[tuple[ClusterSpec, ...], Field(min_length=1)]
    links: tuple[LinkSpec, ...] = ()
    security: SecuritySpec

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
