"""The processes of a region as pods: what each runs, reads and listens on, and what it needs.

They are those that `prfaas up` would start on the hosts of the same region file. Pure: it knows no
Kubernetes object.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final

from blake3 import blake3

from deploy.region.certs import Host, hosts_of
from deploy.region.launch.parts import part_with, spread_problems
from deploy.region.launch.plan import Kind, PlannedProcess, Planner
from deploy.region.launch.ports import ResolvedRegion, resolve_part
from deploy.region.launch.rundir import RunDirectory
from deploy.region.spec.region import NodeSpec, RegionInstance, RegionSpec, gateway_process
from kvmanager.agent.host_facts import GPU_VARIABLE
from kvmanager.config_files.fields import TlsSection
from kvmanager.config_files.problems import FileError, Problem
from kvmanager.config_files.security import is_loopback
from prfaas.engines.supervision.process import KILL_S
from transport import Endpoint

# Where pods find things. The region file's own paths are those of hosts.
CONFIG: Final = Path("/etc/prfaas/config")
KEYS: Final = Path("/etc/prfaas/keys")
TLS: Final = Path("/etc/prfaas/tls")
GRANTING: Final = Path("/etc/prfaas/granting")
CLIENTS: Final = Path("/etc/prfaas/clients")
STATE: Final = Path("/var/lib/prfaas")
ARENA: Final = Path("/var/lib/prfaas-arena")
SOCKETS: Final = Path("/run/prfaas")

PYTHON: Final = "python3"
_ANYWHERE: Final = ("0.0.0.0", "::")
_MAX_NAME: Final = 50
"""Kubernetes appends up to 11 characters to a StatefulSet's name, for a label of at most 63."""
_DIGEST_BYTES: Final = 3


@dataclass(frozen=True, slots=True)
class Pod:
    """One process of the region. `files` are those in `CONFIG`, by name; `ports` are by purpose."""

    process: str
    kind: Kind
    host: Host
    node: str
    cluster: str
    """"" for a gateway, which belongs to none."""
    name: str
    """The name of its objects."""
    argv: tuple[str, ...]
    env: Mapping[str, str]
    files: Mapping[str, str]
    ports: Mapping[str, int]
    grace_s: int
    start_s: float
    on_host_network: bool
    gpus: int = 0
    workers: int = 0
    """Processes of an engine that compute."""
    model: str = ""
    arena_gib: float = 0.0
    ssd_dir: Path | None = None


def pods_of(region: RegionSpec) -> list[Pod]:
    """All processes of the region, host by host. FileError for one that Kubernetes cannot run."""
    if problems := kubernetes_problems(region):
        raise FileError(f"region {region.name}", problems)
    inside = in_pods(region)
    pods = list(chain.from_iterable(_pods_of_host(inside, host) for host in hosts_of(inside)))
    names = [pod.name for pod in pods]
    if doubled := sorted({name for name in names if names.count(name) > 1}):
        message = f"several processes would be called {', '.join(doubled)}; give other names"
        raise FileError(f"region {region.name}", [Problem((), message)])
    return pods


def object_name(*parts: str) -> str:
    """A name that Kubernetes takes. Words that it does not take as they are get a digest."""
    wanted = "-".join(parts)
    name = re.sub(r"[^a-z0-9]+", "-", wanted.lower()).strip("-")
    if name[:1].isdigit():  # a Service's name begins with a letter (RFC 1035)
        name = f"r-{name}"
    if name == re.sub(r"[._]", "-", wanted) and len(name) <= _MAX_NAME:
        return name
    digest = blake3(wanted.encode()).hexdigest(_DIGEST_BYTES)
    return f"{name[: _MAX_NAME - len(digest) - 1].rstrip('-')}-{digest}"


def in_pods(region: RegionSpec) -> RegionSpec:
    """The region with the paths of pods: secrets, arenas and what is written are mounted there."""
    security, gateway = region.security, region.gateway
    paths = {
        "engine_key": KEYS / "engine.key",
        "metrics_key": KEYS / "metrics.key",
        "granting_keys": KEYS / "granting.pub",
        "granting_key": GRANTING / "granting.key",
    }
    told: dict[str, object] = {
        name: path for name, path in paths.items() if getattr(security, name) is not None
    }
    if security.tls is not None:
        # The names that cert-manager gives.
        told["tls"] = TlsSection(cert=TLS / "tls.crt", key=TLS / "tls.key", ca=TLS / "ca.crt")
    for_gateway: dict[str, object] = {"state": STATE / "gateway.learned"}
    if gateway.api_keys_file is not None:
        for_gateway["api_keys_file"] = CLIENTS / "clients"
    if gateway.recorder is not None:
        recorder = gateway.recorder.model_copy(update={"dir": STATE / "recordings"})
        for_gateway["recorder"] = recorder
    clusters = []
    for cluster in region.clusters:
        nodes = (
            node.model_copy(update={"agent": node.agent.model_copy(update={"arena_dir": ARENA})})
            for node in cluster.nodes
        )
        clusters.append(cluster.model_copy(update={"nodes": tuple(nodes)}))
    return region.model_copy(
        update={
            "security": security.model_copy(update=told),
            "gateway": gateway.model_copy(update=for_gateway),
            "clusters": tuple(clusters),
        }
    )


def kubernetes_problems(region: RegionSpec) -> list[Problem]:
    """What keeps Kubernetes from running the region."""
    return [*spread_problems(region), *_problems(region)]


def _problems(region: RegionSpec) -> Iterator[Problem]:
    security, gateway = region.security, region.gateway
    if security.tls is None and not security.trusted_network:
        message = "engines and fronts are pods of their own, so engines need TLS; give tls"
        yield Problem(("security",), message)
    if security.metrics_key is None and not security.trusted_network:
        message = "name the file: probes and Prometheus ask for metrics and health from outside"
        yield Problem(("security", "metrics_key"), message)
    if is_loopback(gateway.host):
        message = "nobody reaches loopback of a pod; write 0.0.0.0"
        yield Problem(("gateway", "host"), message)
    if gateway.admin is not None and is_loopback(Endpoint.parse(gateway.admin).host):
        message = "nobody reaches loopback of a pod; write 0.0.0.0:8001, or leave it out"
        yield Problem(("gateway", "admin"), message)
    for k, link in enumerate(region.links):
        if link.emulate is not None:
            message = "emulated links are for one machine; leave it out"
            yield Problem(("links", k, "emulate"), message)
    for m, model in enumerate(region.models):
        yield from _device_problems(("models", m, "env"), model.env)
    for c, cluster in enumerate(region.clusters):
        for n, node in enumerate(cluster.nodes):
            at = ("clusters", c, "nodes", n)
            if is_loopback(node.host):
                yield Problem((*at, "host"), "other pods do not reach loopback; give a name")
            if node.listen is not None and node.listen not in _ANYWHERE:
                message = "a pod's address is not known before it runs; write 0.0.0.0"
                yield Problem((*at, "listen"), message)
            for i, item in enumerate(node.instances):
                yield from _device_problems((*at, "instances", i, "env"), item.env)


def _device_problems(at: tuple[str | int, ...], env: Mapping[str, str]) -> Iterator[Problem]:
    if GPU_VARIABLE in env:
        message = "the device plugin chooses the GPUs of a pod; leave it out"
        yield Problem((*at, GPU_VARIABLE), message)


def _pods_of_host(region: RegionSpec, host: Host) -> Iterator[Pod]:
    resolved = resolve_part(region, part_with(region, host.folder, host.nodes))
    planner = Planner(resolved, RunDirectory(CONFIG, SOCKETS), {})
    files = {path.name: text for path, text in planner.files().items()}
    for item in planner.processes():
        yield _pod(resolved, host, item, files)


def _pod(
    resolved: ResolvedRegion, host: Host, item: PlannedProcess, files: Mapping[str, str]
) -> Pod:
    region = resolved.region
    word = "" if item.name.startswith(item.kind) else item.kind
    told = {
        "process": item.name,
        "kind": item.kind,
        "host": host,
        "name": object_name(region.name, *filter(None, (word, item.name))),
        "argv": (PYTHON, *item.process.argv[1:]),
        "env": _environment(region, item),
        "files": _files(item, files),
        "start_s": item.start_s,
        "grace_s": math.ceil(item.process.term_grace_s + KILL_S),
    }
    if item.kind == "gateway":
        return Pod(**told, **_gateway(region, item))  # type: ignore[arg-type]
    if item.kind == "front":
        cluster = region.cluster(item.name.removeprefix("front."))
        ports = {"front": cluster.front_port, "metrics": cluster.front_metrics_port}
        node = cluster.nodes[0]
        more: dict[str, object] = {"cluster": cluster.name, "ports": ports}
    else:
        node, instance = _placed(region, item)
        cluster = next(cluster for cluster in region.clusters if node in cluster.nodes)
        more = {"cluster": cluster.name}
        more |= _agent(node) if instance is None else _engine(region, instance)
    more |= {"node": node.name, "on_host_network": node.listen is None}
    return Pod(**told, **more)  # type: ignore[arg-type]


def _placed(region: RegionSpec, item: PlannedProcess) -> tuple[NodeSpec, RegionInstance | None]:
    """The node of an agent or engine, and the engine's instance."""
    for node in region.nodes:
        if item.kind == "agent" and item.name == f"agent.{node.name}":
            return node, None
        for instance in node.instances:
            if item.kind == "engine" and instance.name == item.name:
                return node, instance
    raise KeyError(item.name)


def _agent(node: NodeSpec) -> dict[str, object]:
    agent = node.agent
    ports = {
        "data": agent.data_port,
        "control": agent.control_port,
        "metrics": agent.metrics_port,
    }
    return {"ports": ports, "arena_gib": agent.arena_gib, "ssd_dir": agent.ssd_dir}


def _engine(region: RegionSpec, instance: RegionInstance) -> dict[str, object]:
    model, workers = region.model_of(instance), region.num_workers_of(instance)
    ports = {"engine": instance.port}
    if instance.nixl_port:
        ports["nixl"] = instance.nixl_port
    gpus = workers if model.kv_space_gib is None else 0
    return {"ports": ports, "gpus": gpus, "workers": workers, "model": model.name}


def _gateway(region: RegionSpec, item: PlannedProcess) -> dict[str, object]:
    gateway = region.gateway
    node = next(n for n in region.gateway_nodes if gateway_process(region, n.name) == item.name)
    ports = {"http": gateway.ports.get(node.name, gateway.port)}
    if gateway.admin is not None:
        ports["admin"] = Endpoint.parse(gateway.admin).port
    # Clients come to its Service and nobody else calls it, so it needs no host's network.
    return {"node": node.name, "cluster": "", "ports": ports, "on_host_network": False}


def _environment(region: RegionSpec, item: PlannedProcess) -> dict[str, str]:
    """Without the search path of this machine's checkout: images have the packages installed."""
    env = dict(item.process.env)
    own: dict[str, str] = {}
    if item.kind == "engine":
        _, instance = _placed(region, item)
        assert instance is not None
        own = region.model_of(instance).env | instance.env
    if "PYTHONPATH" not in own:
        env.pop("PYTHONPATH", None)
    return env


def _files(item: PlannedProcess, files: Mapping[str, str]) -> dict[str, str]:
    argv = list(item.process.argv)
    if "--config" not in argv:
        return {}
    name = Path(argv[argv.index("--config") + 1]).name
    document = json.loads(files[name])
    # Only a launcher makes the operator's key: operators have API keys here.
    document.pop("operator_key_file", None)
    return {name: json.dumps(document, indent=1)}
