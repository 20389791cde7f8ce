"""The addresses of a region's pods and who may connect to them: Services and NetworkPolicies."""

from __future__ import annotations

import ipaddress
from collections.abc import Container, Iterator, Sequence
from typing import Final

from pydantic.alias_generators import to_snake

from deploy.region.certs import Host, is_address
from deploy.region.kubernetes.manifests import (
    Keys,
    Manifest,
    Object,
    Value,
    enabled,
    host_labels,
    made,
    port_name,
    process_labels,
    region_labels,
)
from deploy.region.kubernetes.pods import Pod, object_name
from deploy.region.kubernetes.values import NetworkPolicyValues
from deploy.region.spec.region import RegionSpec

METRICS_LABEL: Final = "prfaas/metrics"
_SERVICE: Final = ("v1", "Service")
_POLICY: Final = ("networking.k8s.io/v1", "NetworkPolicy")
_ENABLED: Final[tuple[Keys, ...]] = (("networkPolicies", "enabled"),)
_CALLERS: Final[dict[tuple[str, str], tuple[str, ...]]] = {
    ("agent", "data"): ("agent",),
    ("agent", "control"): ("gateway", "front"),
    ("engine", "engine"): ("gateway", "front"),
    ("front", "front"): ("gateway",),
}
"""The kinds of processes that call a port of a process."""
METRICS: Final = (
    ("agent", "metrics"),
    ("front", "metrics"),
    ("engine", "engine"),
    ("gateway", "http"),
    ("gateway", "admin"),
)
"""The ports that may show metrics."""


def services(region: RegionSpec, pods: Sequence[Pod], value: Value) -> Iterator[Manifest]:
    """A Service at the address of each host, one for its metrics, and one for the gateways."""
    for host in dict.fromkeys(pod.host for pod in pods):
        own = [pod for pod in pods if pod.host == host and pod.kind != "gateway"]
        labels, when = host_labels(region, host.folder), enabled(host.folder)
        called = [port for pod in own for port in _ports(pod, _CALLERS)]
        if any(not pod.on_host_network for pod in own):
            # Each port leads to the pod that has a port of this name. A process that is not ready
            # must be found as well: its front says what it serves, not Kubernetes.
            spec = {
                "selector": labels,
                "ports": [_port(port) for port in called],
                "publishNotReadyAddresses": True,
            }
            name = _service_name(region, host)
            yield _service(name, labels, spec, value, ("hosts", host.folder, "service"), when)
        shown = [port for pod in own for port in _ports(pod, METRICS)]
        spec = {
            "clusterIP": "None",
            "selector": labels,
            "ports": [_port(port) for port in shown],
            "publishNotReadyAddresses": True,
        }
        name = metrics_service(region, host)
        yield made(
            "services.yaml", _SERVICE, name, labels | {METRICS_LABEL: "true"}, {"spec": spec}, when
        )
    yield from _gateway_services(region, pods, value)


def _gateway_services(region: RegionSpec, pods: Sequence[Pod], value: Value) -> Iterator[Manifest]:
    gateways = [pod for pod in pods if pod.kind == "gateway"]
    labels = region_labels(region, "gateway")
    when = tuple(path for pod in gateways for path in enabled(pod.host.folder))

    def spec(use: str) -> Object:
        numbers = dict.fromkeys(pod.ports[use] for pod in gateways)
        return {"selector": labels, "ports": [_port(port) for port in numbers]}

    name = object_name(region.name, "gateway")
    metrics = labels | {METRICS_LABEL: "true"}
    if region.gateway.admin is None:
        yield _service(name, metrics, spec("http"), value, ("gatewayService",), when)
        return
    yield _service(name, labels, spec("http"), value, ("gatewayService",), when)
    # The operators' pages are for this Kubernetes cluster, never for a load balancer of clients.
    name = object_name(region.name, "gateway", "admin")
    rest = {"spec": {"clusterIP": "None"} | spec("admin")}
    yield made("services.yaml", _SERVICE, name, metrics, rest, when)


def _service(
    name: str, labels: dict[str, str], spec: Object, value: Value, at: Keys, when: tuple[Keys, ...]
) -> Manifest:
    told = {
        "type": value(*at, "type"),
        "loadBalancerSourceRanges": value(*at, "loadBalancerSourceRanges"),
    }
    annotations = value(*at, "annotations")
    rest = {"spec": told | spec}
    return made("services.yaml", _SERVICE, name, labels, rest, when, annotations=annotations)


def metrics_service(region: RegionSpec, host: Host) -> str:
    """The name of the Service without an address that lists the pods of a host."""
    return object_name(region.name, host.folder, "metrics")


def _service_name(region: RegionSpec, host: Host) -> str:
    """A name of this Kubernetes cluster, `NAME` or `NAME.NAMESPACE.svc`, is that of the Service."""
    first, _, rest = host.addresses[0].partition(".")
    is_name = first.isascii() and first[:1].isalpha()
    if is_name and (not rest or ".svc" in f".{rest}."):
        return first
    return object_name(region.name, host.folder)


def _ports(pod: Pod, uses: Container[tuple[str, str]]) -> list[int]:
    return [port for use, port in pod.ports.items() if (pod.kind, use) in uses]


def _port(port: int) -> Object:
    return {"name": port_name(port), "port": port, "targetPort": port_name(port)}


def unreachable(pods: Sequence[Pod], policies: NetworkPolicyValues) -> Iterator[str]:
    """Sentences about callers that the policies do not let in."""
    if not policies.enabled:
        return
    if len({pod.cluster for pod in pods if pod.cluster}) > 1:
        for name in ("agentsElsewhere", "gatewaysElsewhere"):
            if not getattr(policies, to_snake(name)):
                yield (
                    f"networkPolicies.{name} is empty: pods of other Kubernetes clusters are "
                    "refused; name them there, if the region has any"
                )
    if all(pod.on_host_network for pod in pods if pod.kind != "gateway"):
        return
    named = {pod.node: pod.host.addresses[0] for pod in pods if pod.on_host_network}
    for node, address in named.items():
        if not is_address(address):
            yield (
                f"processes of node {node} are on their machine's network, where policies know "
                f"addresses only, and its host is {address}: they are refused by nodes with "
                "`listen: 0.0.0.0`; write an IP address, or `listen: 0.0.0.0`"
            )


def policies(region: RegionSpec, pods: Sequence[Pod], value: Value) -> Iterator[Manifest]:
    """Pods let in whom the region file makes call them, and whom the values name."""
    for pod in pods:
        # Kubernetes knows no policies for processes on a machine's own network.
        if pod.on_host_network:
            continue
        when = (*_ENABLED,), enabled(pod.host.folder)
        inside = [
            {"from": _peers(region, pods, kinds), "ports": [_tcp(pod.ports[use])]}
            for (kind_of, use), kinds in _CALLERS.items()
            if kind_of == pod.kind and use in pod.ports
        ]
        if pod.kind == "gateway":
            clients = value("networkPolicies", "clients")
            inside = [{"from": clients, "ports": [_tcp(pod.ports["http"])]}]
        yield _policy(region, pod, "", inside, *when)
        shown = _ports(pod, METRICS)
        yield _extra(region, pod, "monitoring", "monitoring", shown, value)
        if pod.kind == "agent":
            data = [pod.ports["data"]]
            yield _extra(region, pod, "agents", "agentsElsewhere", data, value)
        asked = [pod.ports[use] for use in ("control", "front", "engine") if use in pod.ports]
        if asked:
            yield _extra(region, pod, "gateways", "gatewaysElsewhere", asked, value)


def _extra(
    region: RegionSpec, pod: Pod, word: str, setting: str, ports: list[int], value: Value
) -> Manifest:
    # Its own object, since a rule for no peers at all would let everybody in.
    path = ("networkPolicies", setting)
    rule = {"from": value(*path), "ports": [_tcp(port) for port in ports]}
    return _policy(region, pod, word, [rule], _ENABLED, enabled(pod.host.folder), (path,))


def _policy(
    region: RegionSpec, pod: Pod, word: str, ingress: list[Object], *when: tuple[Keys, ...]
) -> Manifest:
    labels = process_labels(region, pod)
    spec = {
        "podSelector": {"matchLabels": labels},
        "policyTypes": ["Ingress"],
        "ingress": ingress,
    }
    name = object_name(pod.name, word) if word else pod.name
    return made("networkpolicies.yaml", _POLICY, name, labels, {"spec": spec}, *when)


def _peers(region: RegionSpec, pods: Sequence[Pod], kinds: Sequence[str]) -> list[Object]:
    peers: list[Object] = [
        {"podSelector": {"matchLabels": region_labels(region, kind)}} for kind in kinds
    ]
    # Processes on a machine's own network come from its address, and no labels are seen.
    addresses = dict.fromkeys(
        pod.host.addresses[0] for pod in pods if pod.on_host_network and pod.kind in kinds
    )
    blocks = [str(ipaddress.ip_network(text)) for text in addresses if is_address(text)]
    return [*peers, *({"ipBlock": {"cidr": block}} for block in blocks)]


def _tcp(port: int) -> Object:
    return {"protocol": "TCP", "port": port}
