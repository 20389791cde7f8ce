"""Objects of operators that a cluster may have: cert-manager, the Prometheus operator, KEDA."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from deploy.region.certs import Host, is_address
from deploy.region.kubernetes.manifests import (
    Manifest,
    Object,
    Value,
    enabled,
    host_labels,
    made,
    pod_labels,
    port_name,
    region_labels,
)
from deploy.region.kubernetes.network import METRICS, METRICS_LABEL
from deploy.region.kubernetes.pods import Pod, object_name
from deploy.region.spec.region import RegionSpec

WANTED: Final = "prfaas_plan_wanted_instances"
"""The metric of the gateway that leads; by cluster, role and model_name."""


def certificates(region: RegionSpec, pods: Sequence[Pod], value: Value) -> Iterator[Manifest]:
    """A certificate for each host, with the names that `prfaas certs` gives it."""
    if region.security.tls is None:
        return
    for host in dict.fromkeys(pod.host for pod in pods):
        labels, name = host_labels(region, host.folder), object_name(region.name, host.folder)
        when = (("certManager", "enabled"),), enabled(host.folder)
        spec = {
            "secretName": value("hosts", host.folder, "tlsSecret"),
            "issuerRef": value("certManager", "issuer"),
            "duration": value("certManager", "duration"),
            "renewBefore": value("certManager", "renewBefore"),
            "privateKey": {
                "algorithm": "ECDSA",
                "size": 256,
                "encoding": "PKCS8",
                "rotationPolicy": "Always",
            },
            # The processes of a host are both clients and servers.
            "usages": ["digital signature", "server auth", "client auth"],
            **_alternative_names(host),
        }
        kind = ("cert-manager.io/v1", "Certificate")
        yield made("certificates.yaml", kind, name, labels, {"spec": spec}, *when)


def _alternative_names(host: Host) -> Object:
    addresses = [text for text in host.addresses if is_address(text)]
    names: Object = {
        "ipAddresses": addresses,
        "dnsNames": [text for text in host.addresses if text not in addresses],
        "uris": [str(one) for one in host.identities],
    }
    return {key: found for key, found in names.items() if found}


def monitors(region: RegionSpec, pods: Sequence[Pod], value: Value) -> Iterator[Manifest]:
    """A ServiceMonitor for each host and one for the gateways."""
    for host in dict.fromkeys(pod.host for pod in pods):
        endpoints = [
            _endpoint(region, pod, port, value)
            for pod in pods
            for use, port in pod.ports.items()
            if pod.host == host and pod.kind != "gateway" and (pod.kind, use) in METRICS
        ]
        name, labels = object_name(region.name, host.folder), host_labels(region, host.folder)
        yield _monitor(name, labels, endpoints, value, enabled(host.folder))
    gateways = [pod for pod in pods if pod.kind == "gateway"]
    use = "http" if region.gateway.admin is None else "admin"
    endpoints = [
        _gateway_endpoint(region, port, value)
        for port in sorted({pod.ports[use] for pod in gateways})
    ]
    when = tuple(path for pod in gateways for path in enabled(pod.host.folder))
    name, labels = object_name(region.name, "gateway"), region_labels(region, "gateway")
    yield _monitor(name, labels, endpoints, value, when)


def _monitor(
    name: str,
    labels: dict[str, str],
    endpoints: list[Object],
    value: Value,
    when: tuple[tuple[str, ...], ...],
) -> Manifest:
    kind = ("monitoring.coreos.com/v1", "ServiceMonitor")
    selector = {"matchLabels": labels | {METRICS_LABEL: "true"}}
    rest = {"spec": {"selector": selector, "endpoints": endpoints}}
    is_wanted = (("serviceMonitors", "enabled"),)
    own = value("serviceMonitors", "labels")
    return made("monitoring.yaml", kind, name, own, rest, is_wanted, when)


def _endpoint(region: RegionSpec, pod: Pod, port: int, value: Value) -> Object:
    """How Prometheus asks a process. Its targets have the labels of `render --prometheus`."""
    labels = {"job": f"prfaas-{pod.kind}", "region": region.name, "instance": pod.process}
    labels |= {"node": pod.node}
    if pod.kind != "front":  # a front's metrics name the cluster themselves
        labels |= {"cluster": pod.cluster}
    endpoint = _asked(port, value) | {
        "relabelings": [
            {"targetLabel": name, "replacement": text, "action": "replace"}
            for name, text in labels.items()
        ]
    }
    key = "engine.key" if pod.kind == "engine" else "metrics.key"
    if pod.kind == "engine" or region.security.metrics_key is not None:
        endpoint["authorization"] = _bearer(value("secrets", "keys"), key)
    if pod.kind == "engine" and region.security.tls is not None:
        secret = value("hosts", pod.host.folder, "tlsSecret")
        endpoint |= {
            "scheme": "https",
            "tlsConfig": {
                "ca": {"secret": {"name": secret, "key": "ca.crt"}},
                "cert": {"secret": {"name": secret, "key": "tls.crt"}},
                "keySecret": {"name": secret, "key": "tls.key"},
                # Prometheus asks pods at their addresses, which no certificate has.
                "serverName": pod.host.addresses[0],
            },
        }
    return endpoint


def _gateway_endpoint(region: RegionSpec, port: int, value: Value) -> Object:
    process = "__meta_kubernetes_pod_label_prfaas_process"
    labels = {"job": "prfaas-gateway", "region": region.name}
    relabelings: list[Object] = [
        {"targetLabel": name, "replacement": text, "action": "replace"}
        for name, text in labels.items()
    ]
    relabelings.append({"targetLabel": "instance", "sourceLabels": [process], "action": "replace"})
    endpoint = _asked(port, value) | {"relabelings": relabelings}
    if region.gateway.api_keys_file is not None or region.gateway.api_keys_env is not None:
        endpoint["authorization"] = _bearer(value("secrets", "clients"), "operator")
    return endpoint


def _asked(port: int, value: Value) -> Object:
    interval = value("serviceMonitors", "interval")
    return {"port": port_name(port), "path": "/metrics", "interval": interval}


def _bearer(secret: str, key: str) -> Object:
    return {"type": "Bearer", "credentials": {"name": secret, "key": key}}


def scaled_engines(region: RegionSpec, pods: Sequence[Pod]) -> Mapping[str, int]:
    """The engines that may be stopped while the planner wants fewer: in prefill clusters all but
    the first of each model. The number is that of engines before it.

    The engines of PD clusters stay: stopping one would end the answers that it decodes. So do those
    that encode, because the planner's number does not count them.
    """
    kinds = {cluster.name: cluster.kind for cluster in region.clusters}
    engines = (item for cluster in region.clusters for item in cluster.instances)
    encoding = {item.name for item in engines if item.role == "encode"}
    seen: Counter[tuple[str, str]] = Counter()
    found = {}
    for pod in pods:
        if pod.process in encoding:
            continue
        if pod.kind == "engine" and kinds[pod.cluster] == "prefill":
            if before := seen[pod.cluster, pod.model]:
                found[pod.process] = before
            seen[pod.cluster, pod.model] += 1
    return found


def scalers(region: RegionSpec, pods: Sequence[Pod], value: Value) -> Iterator[Manifest]:
    """A ScaledObject for each of `scaled_engines`: it runs while more are wanted than before it."""
    scaled = scaled_engines(region, pods)
    for pod in pods:
        if pod.process not in scaled:
            continue
        wanted = {"cluster": pod.cluster, "role": "prefill", "model_name": pod.model}
        labels = ",".join(f"{name}={json.dumps(text)}" for name, text in wanted.items())
        # 1 or 0: KEDA starts and stops, and its HPA never has more than one to choose.
        query = f"max({WANTED}{{{labels}}}) > bool {scaled[pod.process]}"
        trigger = {
            "type": "prometheus",
            "metadata": {
                "serverAddress": value("keda", "prometheus"),
                "query": query,
                "threshold": "1",
                "activationThreshold": "0",
                # Without an answer nothing is known, and `fallback` says what to do then.
                "ignoreNullValues": "false",
            },
        }
        spec = {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": pod.name},
            "minReplicaCount": 0,
            "maxReplicaCount": 1,
            "pollingInterval": value("keda", "pollingS"),
            "cooldownPeriod": value("keda", "cooldownS"),
            "fallback": {"failureThreshold": 3, "replicas": 1},
            "triggers": [trigger],
        }
        kind, own = ("keda.sh/v1alpha1", "ScaledObject"), pod_labels(region, pod)
        when = (("keda", "enabled"),), enabled(pod.host.folder)
        yield made("scaling.yaml", kind, pod.name, own, {"spec": spec}, *when)
