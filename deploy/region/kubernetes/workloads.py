"""What runs the processes of a region: DaemonSets, StatefulSets, Deployments, and their files.

Each process has objects of its own, since each has a file, ports and devices of its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Final

from blake3 import blake3

from deploy.gateway.reload import LIVE, LIVE_ADMISSION
from deploy.region.kubernetes.manifests import (
    Manifest,
    Object,
    Value,
    enabled,
    made,
    pod_labels,
    port_name,
    process_labels,
    region_labels,
)
from deploy.region.kubernetes.network import metrics_service
from deploy.region.kubernetes.operators import scaled_engines
from deploy.region.kubernetes.pods import (
    ARENA,
    CLIENTS,
    CONFIG,
    GRANTING,
    KEYS,
    SOCKETS,
    STATE,
    TLS,
    Pod,
    object_name,
)
from deploy.region.spec.region import RegionSpec

_SECRET_MODE: Final = 0o440
"""Keys are for the group of the pod; a process refuses keys that others may read."""
_PERIOD_S: Final = 10
_HOME: Final = "/home/prfaas"
_KINDS: Final = {
    "agent": "DaemonSet",
    "engine": "StatefulSet",
    "front": "StatefulSet",
    "gateway": "Deployment",
}
_HARDENED: Final = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def workloads(region: RegionSpec, pods: Sequence[Pod], value: Value) -> Iterator[Manifest]:
    """The objects that run the processes, and those with their files."""
    scaled = scaled_engines(region, pods)
    for pod in pods:
        template, labels = f"{pod.kind}s.yaml", pod_labels(region, pod)
        when = enabled(pod.host.folder)
        if pod.files:
            kind, data = _files(region, pod)
            yield made(template, ("v1", kind), pod.name, labels, data, when)
        spec: Object = {
            # No more than tells pods apart: a selector can never be changed.
            "selector": {"matchLabels": process_labels(region, pod)},
            "template": {"metadata": _metadata(pod, labels), "spec": _pod(region, pod, value)},
        }
        if pod.kind != "agent" and pod.process not in scaled:
            spec["replicas"] = 1
        if pod.kind in ("engine", "front"):
            spec["serviceName"] = metrics_service(region, pod.host)
        if pod.kind == "gateway":
            # A second one would have the same name for the others, and the same file of state.
            spec["strategy"] = {"type": "Recreate"}
        yield made(template, ("apps/v1", _KINDS[pod.kind]), pod.name, labels, {"spec": spec}, when)
    yield _budget(region, pods)


def _metadata(pod: Pod, labels: dict[str, str]) -> Object:
    """With a digest of what the process reads only when it starts: else `helm upgrade` would leave
    it on its old settings.
    """
    if not pod.files:
        return {"labels": labels}
    (document,) = map(json.loads, pod.files.values())
    # Fronts and agents follow these; an agent does without the events of an engine that joins.
    for name in ("instances", "send_to", "kv_events"):
        document.pop(name, None)
    if pod.kind == "gateway":
        for source in (*document["pd"], *document["prefill"]):
            source.pop("instances", None)
        for name in LIVE:
            document["gateway"].pop(name, None)
        for name in LIVE_ADMISSION:
            document["gateway"]["scheduling"]["admission"].pop(name, None)
    digest = blake3(json.dumps(document, sort_keys=True).encode()).hexdigest()
    return {"labels": labels, "annotations": {"checksum/config": digest}}


def _budget(region: RegionSpec, pods: Sequence[Pod]) -> Manifest:
    """Drains of machines take one gateway of the region at a time."""
    labels = region_labels(region, "gateway")
    hosts = dict.fromkeys(pod.host.folder for pod in pods if pod.kind == "gateway")
    when = tuple(path for host in hosts for path in enabled(host))
    kind, name = ("policy/v1", "PodDisruptionBudget"), object_name(region.name, "gateway")
    spec = {"maxUnavailable": 1, "selector": {"matchLabels": labels}}
    return made("gateways.yaml", kind, name, labels, {"spec": spec}, when)


def _files(region: RegionSpec, pod: Pod) -> tuple[str, Object]:
    """The kind of object that holds the files of a process, and its data."""
    gateway = region.gateway
    # The address of a Redis server may have a password.
    if pod.kind == "gateway" and (gateway.shared is not None or gateway.directory.kind == "redis"):
        return "Secret", {"stringData": dict(pod.files)}
    return "ConfigMap", {"data": dict(pod.files)}


def _pod(region: RegionSpec, pod: Pod, value: Value) -> Object:
    host = pod.host.folder
    mounts = _mounts(region, pod, value)
    spec: Object = {
        "automountServiceAccountToken": False,
        # Kubernetes would add variables for every Service, and engines read those named VLLM_*.
        "enableServiceLinks": False,
        "imagePullSecrets": value("image", "pullSecrets"),
        "securityContext": value("podSecurity"),
        "terminationGracePeriodSeconds": pod.grace_s,
        "tolerations": value("hosts", host, "tolerations"),
        "nodeSelector": value("hosts", host, "nodeSelector"),
        "containers": [_container(region, pod, value, mounts)],
        "volumes": [volume for volume, _ in mounts],
    }
    if pod.kind == "gateway":
        for name in ("tolerations", "nodeSelector"):
            spec[name] = value("gateways", pod.process, name)
    elif pod.kind == "front" and not pod.on_host_network:
        # Others find it by its host's Service, so it need not run on that machine.
        spec["nodeSelector"] = {}
    if pod.on_host_network:
        spec |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    if pod.kind == "agent":
        spec["initContainers"] = [_owner_of_folders(pod, value)]
    return spec


def _container(
    region: RegionSpec, pod: Pod, value: Value, mounts: list[tuple[Object, Object]]
) -> Object:
    env = dict(pod.env)
    if pod.kind == "engine":
        # Compilers and the hub's client keep things there, and its user has no entry in passwd.
        env = {"HOME": _HOME, "USER": "prfaas"} | env
    variables: list[Object] = [
        {"name": name, "value": _literal(text)} for name, text in env.items()
    ]
    container: Object = {
        "name": pod.kind,
        "image": value("image", "engine" if pod.kind == "engine" else "prfaas"),
        "imagePullPolicy": value("image", "pullPolicy"),
        "command": [_literal(word) for word in pod.argv],
        "env": variables,
        "ports": [{"name": port_name(port), "containerPort": port} for port in pod.ports.values()],
        "resources": value(f"{pod.kind}s", pod.process, "resources"),
        "securityContext": _HARDENED | {"readOnlyRootFilesystem": True},
        "volumeMounts": [mount for _, mount in mounts],
    }
    variable = region.gateway.api_keys_env
    if pod.kind == "gateway" and variable is not None:
        source = {"secretKeyRef": {"name": value("secrets", "clients"), "key": "clients"}}
        variables.append({"name": variable, "valueFrom": source})
    if pod.kind == "engine":
        capabilities = {"drop": ["ALL"], "add": value("engine", "capabilities")}
        container["envFrom"] = value("engine", "envFrom")
        container["securityContext"] = _HARDENED | {"capabilities": capabilities}
    return container | _probes(pod)


def _literal(text: str) -> str:
    """Kubernetes replaces `$(NAME)` in commands and variables."""
    return text.replace("$(", "$$(")


def _probes(pod: Pod) -> Object:
    if pod.kind == "engine":
        # Its pages ask for a key that probes do not have. Its server listens once the model is
        # loaded and ends when the engine fails; its front asks it for its health.
        probe = {"tcpSocket": {"port": port_name(pod.ports["engine"])}, "periodSeconds": _PERIOD_S}
        start = probe | {"failureThreshold": math.ceil(pod.start_s / _PERIOD_S)}
        return {"startupProbe": start, "livenessProbe": probe, "readinessProbe": probe}
    port = port_name(pod.ports["http" if pod.kind == "gateway" else "metrics"])
    live = {"httpGet": {"path": "/livez", "port": port}, "timeoutSeconds": 5}
    tries = math.ceil(pod.start_s / 5)
    return {
        "startupProbe": live | {"periodSeconds": 5, "failureThreshold": tries},
        "livenessProbe": live | {"periodSeconds": _PERIOD_S, "failureThreshold": 3},
        "readinessProbe": {
            "httpGet": {"path": "/readyz", "port": port},
            "periodSeconds": 2,
            "timeoutSeconds": 2,
        },
    }


def _owner_of_folders(pod: Pod, value: Value) -> Object:
    """Gives the shared folders to the user of agents and engines; the kubelet makes them root's."""
    folders = [mount for _, mount in _shared(pod, value)]
    paths = [mount["mountPath"] for mount in folders]
    return {
        "name": "folders",
        "image": value("image", "prfaas"),
        "imagePullPolicy": value("image", "pullPolicy"),
        "command": ["sh", "-c", 'chown "$OWNER" "$@" && chmod 700 "$@"', "folders", *paths],
        "env": [{"name": "OWNER", "value": value("owner")}],
        "securityContext": {
            "runAsNonRoot": False,
            "runAsUser": 0,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"], "add": ["CHOWN", "FOWNER"]},
        },
        "volumeMounts": folders,
    }


def _mounts(region: RegionSpec, pod: Pod, value: Value) -> list[tuple[Object, Object]]:
    """Pairs of a volume and where the process has it."""
    security, pairs = region.security, list[tuple[Object, Object]]()
    if pod.files:
        kind, _ = _files(region, pod)
        source: Object = {"configMap": {"name": pod.name}}
        if kind == "Secret":
            source = {"secret": {"secretName": pod.name, "defaultMode": _SECRET_MODE}}
        pairs.append(_mount("config", source, str(CONFIG)))
    pairs.append(_secret("keys", value("secrets", "keys"), str(KEYS)))
    if security.tls is not None:
        name = value("hosts", pod.host.folder, "tlsSecret")
        pairs.append(_secret("tls", name, str(TLS)))
    if pod.kind in ("agent", "engine"):
        pairs += _shared(pod, value)
    if pod.kind == "gateway":
        pairs.append((value("gateways", pod.process, "stateVolume"), _at("state", str(STATE))))
        if security.granting_key is not None:
            pairs.append(_secret("granting", value("secrets", "granting"), str(GRANTING)))
        if region.gateway.api_keys_file is not None:
            pairs.append(_secret("clients", value("secrets", "clients"), str(CLIENTS)))
    if pod.kind == "engine":
        size = {"medium": "Memory", "sizeLimit": value("engine", "shmSize")}
        pairs += [
            (value("engine", "modelVolume"), _at("models", value("engine", "modelPath"))),
            (value("engine", "homeVolume"), _at("home", _HOME)),
            _mount("shm", {"emptyDir": size}, "/dev/shm"),
        ]
    pairs.append(_mount("tmp", {"emptyDir": {}}, "/tmp"))
    return pairs


def _shared(pod: Pod, value: Value) -> list[tuple[Object, Object]]:
    """The folders of the machine that its agents and engines share."""
    pairs = [
        _mount("arena", _folder(value("hostPaths", "arena")), str(ARENA)),
        _mount("sockets", _folder(value("hostPaths", "sockets")), str(SOCKETS)),
    ]
    if pod.ssd_dir is not None:
        pairs.append(_mount("ssd", _folder(str(pod.ssd_dir)), str(pod.ssd_dir)))
    return pairs


def _folder(path: str) -> Object:
    return {"hostPath": {"path": path, "type": "DirectoryOrCreate"}}


def _secret(name: str, secret: str, path: str) -> tuple[Object, Object]:
    source = {"secret": {"secretName": secret, "defaultMode": _SECRET_MODE}}
    volume, mount = _mount(name, source, path)
    return volume, mount | {"readOnly": True}


def _mount(name: str, source: Object, path: str) -> tuple[Object, Object]:
    return {"name": name} | source, _at(name, path)


def _at(name: str, path: str) -> Object:
    return {"name": name, "mountPath": path}
