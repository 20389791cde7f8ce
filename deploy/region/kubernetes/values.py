"""The values of a region's Helm chart: what its region file does not say and a site may change.

It also makes the defaults for a region, those of a site, and the schema by which Helm checks them.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, Field
from pydantic.alias_generators import to_camel

from deploy.region.certs import Host, hosts_of
from deploy.region.kubernetes.manifests import region_labels
from deploy.region.kubernetes.pods import Pod, object_name
from deploy.region.spec.region import RegionSpec
from kvmanager.config_files.fields import Section

try:
    VERSION: Final = metadata.version("prfaas")
except metadata.PackageNotFoundError:
    VERSION = "0.0.0"  # type: ignore[misc]  # a checkout that is not installed
GPU: Final = "nvidia.com/gpu"
USER: Final = 10001
"""The user of the images."""
_AGENT_GIB: Final = 2
"""What an agent needs beside its arena."""

NAMED: Final = ("hosts", "agents", "engines", "fronts", "gateways")
"""The values whose keys are names of the region file."""

_Free = dict[str, Any]
"""A part of an object of Kubernetes, whose own schema checks it."""
PullPolicy = Literal["Always", "IfNotPresent", "Never"]
ServiceType = Literal["ClusterIP", "NodePort", "LoadBalancer"]
Name = Annotated[str, Field(min_length=1, max_length=253)]
Duration = Annotated[str, Field(pattern=r"^[0-9]+(h|m|s)([0-9]+(m|s))*$")]


class _Values(Section):
    model_config = ConfigDict(alias_generator=to_camel)


class ImageValues(_Values):
    """The images of the pods."""

    prfaas: Name = f"prfaas:{VERSION}"
    """Of gateway, fronts and agents."""
    engine: Name = f"prfaas-vllm:{VERSION}"
    """Of engines: vLLM with the connector."""
    pull_policy: PullPolicy = "IfNotPresent"
    """When the images are pulled."""
    pull_secrets: tuple[_Free, ...] = ()
    """Secrets with which they are pulled: `[{name: NAME}]`."""


class ServiceValues(_Values):
    """The Service at whose address others reach the processes of a host."""

    type: ServiceType = "ClusterIP"
    """LoadBalancer where other Kubernetes clusters have to reach it."""
    annotations: dict[str, str] = Field(default={})
    """For load balancers and for DNS."""
    load_balancer_source_ranges: tuple[str, ...] = ()
    """The only CIDRs that a load balancer lets in."""


class HostValues(_Values):
    """A host of the region file. Its agents and engines share memory: they run on one machine."""

    enabled: bool = True
    """Whether this Kubernetes cluster runs it."""
    node_selector: dict[str, str]
    """Labels of the machine that it is."""
    tolerations: tuple[_Free, ...] = ()
    """Taints that its pods tolerate, such as that of GPUs."""
    tls_secret: Name
    """The Secret with tls.crt, tls.key and ca.crt of the host."""
    service: ServiceValues = ServiceValues()
    """Where others reach it, unless it is on its machine's network."""


class ProcessValues(_Values):
    """One process."""

    resources: _Free = Field(default={})
    """Requests and limits of its container."""


class GatewayValues(ProcessValues):
    """One gateway."""

    state_volume: _Free
    """The volume of what it learns; it must be called `state`. An emptyDir lasts as long as the
    pod, a persistentVolumeClaim outlives it.
    """
    tolerations: tuple[_Free, ...] = ()
    """Taints that its pod tolerates."""
    node_selector: dict[str, str] = Field(default={})
    """Labels of the machines on which it may run."""


class EngineValues(_Values):
    """What all engines have."""

    env_from: tuple[_Free, ...] = ()
    """Sources of further environment variables, such as a Secret with HF_TOKEN."""
    model_volume: _Free = Field(default={"name": "models", "emptyDir": {}})
    """The volume of models; it must be called `models`."""
    model_path: str = "/models"
    """Where it is mounted."""
    home_volume: _Free = Field(default={"name": "home", "emptyDir": {}})
    """The volume of HOME, with caches of compilers and of the hub; it must be called `home`."""
    shm_size: str = "16Gi"
    """Most of /dev/shm of an engine, which its workers use among themselves."""
    capabilities: tuple[str, ...] = ("IPC_LOCK",)
    """Linux capabilities. IPC_LOCK lifts the limit of locked memory for a process of root; for
    others the container runtime's own limit holds.
    """


class SecretValues(_Values):
    """Names of Secrets, which the chart does not make."""

    keys: Name
    """engine.key, granting.pub and metrics.key, as far as the region file names them."""
    granting: Name
    """granting.key, for the gateway only."""
    clients: Name
    """clients: the API keys, one `TENANT KEY` a line; operator: the API key of an operator, with
    which Prometheus asks the gateway.
    """


class HostPathValues(_Values):
    """Folders of the machines that agents and engines share."""

    arena: Name
    """Where arenas are: a tmpfs."""
    sockets: Name
    """Where their unix sockets are."""


class CertManagerValues(_Values):
    """Certificates of hosts by cert-manager. Disabled: the Secrets are made by hand."""

    enabled: bool = True
    """Whether the chart has Certificates."""
    issuer: _Free = Field(default={"name": "prfaas", "kind": "Issuer"})
    """The issuerRef. All sites of a region need the same authority."""
    duration: Duration = "2160h"
    """How long they hold."""
    renew_before: Duration = "720h"
    """How long before the end they are renewed. Processes use new ones without a restart."""


class NetworkPolicyValues(_Values):
    """Who may connect to pods. Pods on their machine's network are beyond these policies."""

    enabled: bool = True
    """Whether the chart has NetworkPolicies."""
    clients: tuple[_Free, ...] = ()
    """Peers that may use the gateway; empty: everybody."""
    monitoring: tuple[_Free, ...] = ()
    """Peers that may read metrics; empty: nobody."""
    agents_elsewhere: tuple[_Free, ...] = ()
    """Peers in other Kubernetes clusters that send KVCache here; machines on whose own network
    agents are need no mention.
    """
    gateways_elsewhere: tuple[_Free, ...] = ()
    """Peers there, gateways, that may ask agents, fronts and engines; empty: none."""


class MonitorValues(_Values):
    """ServiceMonitors of the Prometheus operator."""

    enabled: bool = False
    """Whether the chart has them."""
    labels: dict[str, str]
    """Their labels; add that by which the operator chooses them."""
    interval: Duration = "15s"
    """How often Prometheus asks."""


class KedaValues(_Values):
    """ScaledObjects of KEDA: they start and stop prefill engines as the planner wants them."""

    enabled: bool = False
    """Whether the chart has them."""
    prometheus: str = "http://prometheus-operated.monitoring.svc:9090"
    """The Prometheus server that has the metrics of the gateway."""
    cooldown_s: Annotated[int, Field(ge=0)] = 600
    """How long an engine is not wanted before it is stopped, seconds."""
    polling_s: Annotated[int, Field(ge=1)] = 30
    """How often KEDA asks, seconds."""


class ChartValues(_Values):
    """The values of the chart of one region."""

    image: ImageValues = ImageValues()
    """The images."""
    pod_security: _Free = Field(
        default={
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        }
    )
    """The securityContext of all pods. Agents and engines must be one user."""
    owner: str = f"{USER}:{USER}"
    """The user and group of that, to whom folders of machines are given."""
    hosts: dict[str, HostValues]
    """By the first node of each host."""
    agents: dict[str, ProcessValues]
    """By process."""
    engines: dict[str, ProcessValues]
    """By instance."""
    fronts: dict[str, ProcessValues]
    """By process."""
    gateways: dict[str, GatewayValues]
    """By process."""
    gateway_service: ServiceValues = ServiceValues()
    """The Service to which clients come."""
    engine: EngineValues = EngineValues()
    """What all engines have."""
    secrets: SecretValues
    """Keys."""
    host_paths: HostPathValues
    """Shared memory and sockets."""
    cert_manager: CertManagerValues = CertManagerValues()
    """Certificates."""
    network_policies: NetworkPolicyValues = NetworkPolicyValues()
    """Who may connect."""
    service_monitors: MonitorValues
    """Metrics."""
    keda: KedaValues = KedaValues()
    """Scaling."""


def default_values(region: RegionSpec, pods: Sequence[Pod]) -> ChartValues:
    """The values of a region whose hosts are all in one Kubernetes cluster."""
    resources = {pod.process: ProcessValues(resources=_resources(pod)) for pod in pods}

    def of(kind: str) -> dict[str, ProcessValues]:
        return {pod.process: resources[pod.process] for pod in pods if pod.kind == kind}

    gateways = {
        pod.process: GatewayValues(
            resources=_resources(pod), state_volume={"name": "state", "emptyDir": {}}
        )
        for pod in pods
        if pod.kind == "gateway"
    }
    secrets = {name: object_name(region.name, name) for name in ("keys", "granting", "clients")}
    return ChartValues(
        hosts={host.folder: _host(region, host) for host in hosts_of(region)},
        agents=of("agent"),
        engines=of("engine"),
        fronts=of("front"),
        gateways=gateways,
        secrets=SecretValues(**secrets),
        service_monitors=MonitorValues(labels=region_labels(region)),
        host_paths=HostPathValues(
            arena=f"/dev/shm/prfaas-{region.name}", sockets=f"/run/prfaas/{region.name}"
        ),
    )


def site_values(region: RegionSpec, cluster: str) -> dict[str, object]:
    """What a values file for the Kubernetes cluster of one cluster of the region says: which hosts
    are there.
    """
    here = {node.name for node in region.cluster(cluster).nodes}
    return {
        "hosts": {
            host.folder: {"enabled": not here.isdisjoint(host.nodes)} for host in hosts_of(region)
        }
    }


def chart_schema(values: ChartValues) -> dict[str, Any]:
    """The JSON Schema of the values; other hosts and processes than these are errors."""
    schema = ChartValues.model_json_schema(by_alias=True)
    for name in NAMED:
        known = sorted(getattr(values, name))
        schema["properties"][name]["propertyNames"] = {"enum": known}
    for section, name, volume in (
        ("EngineValues", "modelVolume", "models"),
        ("EngineValues", "homeVolume", "home"),
        ("GatewayValues", "stateVolume", "state"),
    ):
        told = schema["$defs"][section]["properties"][name]
        told |= {"properties": {"name": {"const": volume}}, "required": ["name"]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | schema


def _host(region: RegionSpec, host: Host) -> HostValues:
    name = object_name(region.name, host.folder)
    return HostValues(node_selector={"prfaas/host": name}, tls_secret=f"{name}-tls")


def _resources(pod: Pod) -> dict[str, Any]:
    if pod.kind == "engine":
        if pod.gpus:
            return {"limits": {GPU: pod.gpus}}
        return {"requests": {"cpu": pod.workers}}
    if pod.kind == "agent":
        # The pages of the arena count as the agent's, who allocates them.
        gib = _AGENT_GIB + pod.arena_gib
        return {"requests": {"cpu": 2, "memory": f"{round(gib * 1024)}Mi"}}
    return {"requests": {"cpu": 1, "memory": "1Gi"}}
