"""Whether the parts of a region fit together. Every problem says where it is and what to write.

It sees one specification and nothing else: no files, and no ports of this machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from deploy.gateway.config import open_listeners
from deploy.region.spec.encoding import check_encoding
from deploy.region.spec.engine_flags import check_args
from deploy.region.spec.pace import check_pace
from deploy.region.spec.region import (
    ClusterSpec,
    ModelSpec,
    NodeSpec,
    RegionInstance,
    RegionSpec,
    gateway_process,
    role_of,
)
from kvmanager.config_files.problems import KeyPath, Problem, suggestion
from kvmanager.config_files.security import check_redis
from kvmanager.config_files.units import parse_rate
from scheduler.reports import decodes
from transport import Endpoint

_ANY_HOST: Final = ("0.0.0.0", "::")


def check_region(region: RegionSpec) -> list[Problem]:
    """All problems between the parts of `region`; empty if it can be started."""
    return [
        *_check_names(region),
        *_check_adapters(region),
        *check_args(region),
        *_check_staging(region),
        *_check_clusters(region),
        *check_encoding(region),
        *check_pace(region),
        *_check_gateway(region),
        *_check_links(region),
        *_check_uplinks(region),
        *_check_security(region),
        *_check_ports(region),
    ]


def _nodes(region: RegionSpec) -> Iterator[tuple[KeyPath, ClusterSpec, NodeSpec]]:
    for c, cluster in enumerate(region.clusters):
        for n, node in enumerate(cluster.nodes):
            yield ("clusters", c, "nodes", n), cluster, node


def _check_names(region: RegionSpec) -> Iterator[Problem]:
    clusters = [(("clusters", c), item.name) for c, item in enumerate(region.clusters)]
    models = [(("models", m), item.name) for m, item in enumerate(region.models)]
    nodes = [(path, node.name) for path, _, node in _nodes(region)]
    instances = [
        ((*path, "instances", i), item.name)
        for path, _, node in _nodes(region)
        for i, item in enumerate(node.instances)
    ]
    kinds: dict[str, list[tuple[KeyPath, str]]] = {
        "cluster": [(path, name) for path, name in clusters],
        "model": [(path, name) for path, name in models],
        "node": nodes,
        "instance": instances,
    }
    gateways = {"gateway", *(gateway_process(region, node) for node in region.gateway.nodes)}
    for kind, named in kinds.items():
        seen: set[str] = set()
        for path, name in named:
            if name in seen:
                message = f"a second {kind} is called {name!r}; names must differ in a region"
                yield Problem((*path, "name"), message)
            seen.add(name)
    for path, name in instances:
        # Names of processes, logs and sockets of the launcher itself.
        if name in gateways or name.startswith(("agent.", "front.", "link.")):
            message = f"{name!r} names another process of the region; choose another name"
            yield Problem((*path, "name"), message)


def _check_staging(region: RegionSpec) -> Iterator[Problem]:
    for m, model in enumerate(region.models):
        if model.staging_mib is not None and model.kv_space_gib is not None:
            message = "engines on the CPU (kv_space_gib) copy without staging memory; leave it out"
            yield Problem(("models", m, "staging_mib"), message)


def _check_adapters(region: RegionSpec) -> Iterator[Problem]:
    names = {model.name for model in region.models}
    for m, model in enumerate(region.models):
        for adapter in model.adapters:
            if adapter in names:
                message = f"another model or adapter is called {adapter!r}; clients ask by name"
                yield Problem(("models", m, "adapters", adapter), message)
            names.add(adapter)
        if model.max_lora_rank is not None and not model.adapters:
            yield Problem(("models", m, "max_lora_rank"), "there are no adapters; leave it out")


def _check_clusters(region: RegionSpec) -> Iterator[Problem]:
    if not region.pd_clusters:
        yield Problem(("clusters",), "no PD cluster; give one cluster `kind: pd`")
    for c, cluster in enumerate(region.clusters):
        roles = {role_of(instance, cluster) for instance in cluster.instances}
        if cluster.kind == "pd" and not any(map(decodes, roles)):
            message = "no instance decodes; give one `role: decode` or `role: both`"
            yield Problem(("clusters", c), message)
        if cluster.kind == "prefill" and roles == {"encode"}:
            message = "no instance prefills; leave the role of one out"
            yield Problem(("clusters", c), message)
        yield from _check_hand_off(region, ("clusters", c), cluster)
        if cluster.kind == "prefill" and cluster.spill is not None:
            message = "no request has its home in a prefill cluster; say it of a PD cluster"
            yield Problem(("clusters", c, "spill"), message)
    for path, cluster, node in _nodes(region):
        yield from _check_node(region, path, cluster, node)


def _check_hand_off(region: RegionSpec, path: KeyPath, cluster: ClusterSpec) -> Iterator[Problem]:
    at = (*path, "hand_off")
    if cluster.kind == "prefill" and cluster.hand_off != "auto":
        message = "instances of a prefill cluster hand over nothing; write it in the PD cluster"
        yield Problem(at, message)
    elif cluster.hand_off == "nixl" and len(cluster.nodes) == 1:
        message = "nixl is for hand-offs between nodes, and there is one; leave it out"
        yield Problem(at, message)
    elif cluster.hand_off == "nixl":
        for node in cluster.nodes:
            # vLLM tells others the address that it listens on.
            if node.bound_host != node.host:
                message = f"nixl needs nodes that listen on their `host`; {node.name} does not"
                yield Problem(at, message)
        yield from _check_equal_cuts(region, at, cluster)


def _check_equal_cuts(region: RegionSpec, at: KeyPath, cluster: ClusterSpec) -> Iterator[Problem]:
    # vLLM's NixlConnector moves KVCache between unequal engines in some cases only, and often one
    # way only.
    models = {model.name: model for model in region.models}
    first: dict[str, RegionInstance] = {}
    for instance in cluster.instances:
        model = models.get(instance.model or region.models[0].name)
        if model is None:
            continue
        one = first.setdefault(model.name, instance)
        for name, default in (
            ("tensor_parallel_size", model.tensor_parallel_size),
            ("block_size", model.block_size),
        ):
            value, other = (getattr(item, name) or default for item in (one, instance))
            if value != other:
                message = (
                    f"nixl needs one {name} for all instances of {model.name}: {one.name} has "
                    f"{value or 'none written'}, {instance.name} {other or 'none written'}; make "
                    "them equal, or write transport"
                )
                yield Problem(at, message)


def _check_node(
    region: RegionSpec, path: KeyPath, cluster: ClusterSpec, node: NodeSpec
) -> Iterator[Problem]:
    models = [model.name for model in region.models]
    for i, instance in enumerate(node.instances):
        at = (*path, "instances", i)
        if instance.model is None and len(models) > 1:
            message = f"say which of the models it serves: {', '.join(models)}"
            yield Problem((*at, "model"), message)
        elif instance.model is not None and instance.model not in models:
            message = f"no model is called {instance.model!r}"
            yield Problem((*at, "model"), message + suggestion(instance.model, models))
        else:
            yield from _check_slots(at, instance, region.model_of(instance))
            if cluster.hand_off == "nixl" and region.pipeline_parallel_size_of(instance) > 1:
                # vLLM's handshake reaches one connector of an engine, and both would need it.
                message = "pipeline stages and hand_off: nixl exclude each other; write 1 here"
                yield Problem((*at, "pipeline_parallel_size"), message)
        if cluster.kind == "prefill" and instance.role not in (None, "prefill", "encode"):
            message = (
                f"role {instance.role!r} in a prefill cluster; leave it out, or write prefill or "
                "encode"
            )
            yield Problem((*at, "role"), message)


def _check_slots(at: KeyPath, instance: RegionInstance, model: ModelSpec) -> Iterator[Problem]:
    slots, limit = instance.decode_slots, model.max_num_batched_tokens
    # vLLM does not start with more sequences than tokens in a step.
    if slots is not None and limit is not None and slots > limit:
        message = f"{slots} is more than max_num_batched_tokens of {model.name}, {limit}; lower it"
        yield Problem((*at, "decode_slots"), message)


def _check_gateway(region: RegionSpec) -> Iterator[Problem]:
    gateway, nodes = region.gateway, [node.name for node in region.nodes]
    named: list[tuple[KeyPath, str]]
    named = [(("gateway", "node"), name) for name in (gateway.node,) if name is not None]
    named += [(("gateway", "nodes", n), name) for n, name in enumerate(gateway.nodes)]
    for at, name in named:
        if name not in nodes:
            yield Problem(at, f"no node is called {name!r}{suggestion(name, nodes)}")
    if gateway.node is not None and gateway.nodes:
        yield Problem(("gateway", "nodes"), "write node for one gateway or nodes for several")
    if len(set(gateway.nodes)) < len(gateway.nodes):
        yield Problem(("gateway", "nodes"), "a node has one gateway; name each node once")
    if len(gateway.nodes) > 1 and gateway.shared is None:
        message = "several gateways need shared, the Redis server through which they work together"
        yield Problem(("gateway", "nodes"), message)
    for name in gateway.ports:
        if name not in gateway.nodes:
            yield Problem(("gateway", "ports", name), f"nodes has no {name!r}")
    pds = [cluster.name for cluster in region.pd_clusters]
    homes: dict[KeyPath, str] = {("homes", tenant): home for tenant, home in gateway.homes.items()}
    if gateway.home:
        homes["home",] = gateway.home
    for path, home in homes.items():
        if home not in pds:
            message = f"no PD cluster is called {home!r}{suggestion(home, pds)}"
            yield Problem(("gateway", *path), message)


def _check_links(region: RegionSpec) -> Iterator[Problem]:
    kinds = {cluster.name: cluster.kind for cluster in region.clusters}
    linked: set[tuple[str, str]] = set()
    for k, link in enumerate(region.links):
        at: KeyPath = ("links", k)
        for key, name, kind in (("from", link.source, "prefill"), ("to", link.to, "pd")):
            if name not in kinds:
                message = f"no cluster is called {name!r}{suggestion(name, kinds)}"
                yield Problem((*at, key), message)
            elif kinds[name] != kind:
                message = f"{name!r} is of kind {kinds[name]}; KVCache flows from prefill to pd"
                yield Problem((*at, key), message)
        if (link.source, link.to) in linked:
            message = f"a second link from {link.source!r} to {link.to!r}; remove one"
            yield Problem((*at, "from"), message)
        linked.add((link.source, link.to))
        if link.emulate is not None and link.endpoints:
            message = "an emulated link makes its own endpoints; remove endpoints or emulate"
            yield Problem((*at, "endpoints"), message)
        nodes = [node.name for _, cluster, node in _nodes(region) if cluster.name == link.to]
        for name in link.endpoints:
            if name not in nodes:
                message = f"{link.to!r} has no node {name!r}{suggestion(name, nodes)}"
                yield Problem((*at, "endpoints", name), message)
        if link.emulate is not None:
            yield from _check_emulation(at, link.emulate.rate)
    for name, kind in kinds.items():
        if kind == "prefill" and not region.links_from(name):
            message = f"no link from {name!r}; add `- {{from: {name}, to: NAME OF A PD CLUSTER}}`"
            yield Problem(("links",), message)


def _check_uplinks(region: RegionSpec) -> Iterator[Problem]:
    kinds = {cluster.name: cluster.kind for cluster in region.clusters}
    seen: set[tuple[str, str]] = set()
    for u, uplink in enumerate(region.uplinks):
        at: KeyPath = ("uplinks", u)
        ways = {"prefill": "egress", "pd": "ingress"}
        if uplink.cluster not in kinds:
            message = f"no cluster is called {uplink.cluster!r}{suggestion(uplink.cluster, kinds)}"
            yield Problem((*at, "cluster"), message)
        elif uplink.way != (way := ways[kinds[uplink.cluster]]):
            message = f"KVCache flows from prefill to pd: write {way} for {uplink.cluster}"
            yield Problem((*at, "way"), message)
        if (uplink.cluster, uplink.way) in seen:
            message = f"a second {uplink.way} of {uplink.cluster!r}; remove one"
            yield Problem((*at, "cluster"), message)
        seen.add((uplink.cluster, uplink.way))


def _check_emulation(at: KeyPath, rate: str) -> Iterator[Problem]:
    bytes_per_s = parse_rate(rate)
    # 1 Mbit/s; 0 stands for unlimited.
    if 0 < bytes_per_s < 125e3:
        message = f"{rate} is below 1 Mbit, too slow for any KVCache; write at least 1Mbit"
        yield Problem((*at, "emulate", "rate"), message)


def _check_security(region: RegionSpec) -> Iterator[Problem]:
    security = region.security
    if security.tls is not None and security.region_key is not None:
        message = "it signs calls where there is no TLS; remove it or `tls`"
        yield Problem(("security", "region_key"), message)
    pair = ("granting_key", "granting_keys")
    for name, other in (pair, pair[::-1]):
        if getattr(security, name) is not None and getattr(security, other) is None:
            message = f"the gateway signs and agents check: give `{other}` too"
            yield Problem(("security", name), message)
    for name in ("tls", "region_key", "granting_key"):
        if security.trusted_network and getattr(security, name) is not None:
            message = f"true contradicts `{name}`; remove one of the two"
            yield Problem(("security", "trusted_network"), message)
    gateway = region.gateway
    if gateway.api_keys_file is not None and gateway.api_keys_env is not None:
        message = "api_keys_file is given too; keep one of the two"
        yield Problem(("gateway", "api_keys_env"), message)
    urls = {("directory", "url"): gateway.directory.url}
    if gateway.shared is not None:
        urls["shared", "redis"] = gateway.shared.redis
    for (section, name), url in urls.items():
        try:
            check_redis(name, url, trusted_network=security.trusted_network)
        except ValueError as error:
            yield Problem(("gateway", section, name), str(error))
    has_keys = bool(gateway.api_keys_file or gateway.api_keys_env)
    if not (has_keys or security.trusted_network):
        mend = "give api_keys_file or api_keys_env, or set security.trusted_network"
        for name, danger in open_listeners(gateway).items():
            yield Problem(("gateway", name), f"{danger}; {mend}")
    if gateway.scheduling.admission.tenants and not has_keys:
        message = "tenants are API keys; give api_keys_file or api_keys_env, or use default_tenant"
        yield Problem(("gateway", "scheduling", "admission", "tenants"), message)
    if gateway.shared_caches and not has_keys:
        message = "tenants are API keys; give api_keys_file or api_keys_env; without, all share"
        yield Problem(("gateway", "shared_caches"), message)
    for name in ("operators", "priority_tenants", "homes"):
        if getattr(gateway, name) and not has_keys:
            message = f"{name} are names of API keys; give api_keys_file or api_keys_env"
            yield Problem(("gateway", name), message)


def _check_ports(region: RegionSpec) -> Iterator[Problem]:
    seen: list[FixedPort] = []
    for item in fixed_ports(region):
        # Loopback of two hosts are two networks.
        other = next((o for o in seen if o.machine == item.machine and o.excludes(item)), None)
        if other is not None:
            where = Problem(other.path, "").where
            message = f"port {item.port} is taken by {where}; choose another, or 0 for any"
            yield Problem(item.path, message)
        if item.port:
            seen.append(item)


@dataclass(frozen=True, slots=True)
class FixedPort:
    """A port that a process of the region listens on; 0 where any will do. `owner` is a node, a
    cluster (its front), or "" (the gateway); `machine` is the address of their host.
    """

    path: KeyPath
    owner: str
    machine: str
    host: str
    port: int

    def excludes(self, other: FixedPort) -> bool:
        """Whether one host cannot listen on both."""
        hosts = {self.host, other.host}
        return self.port == other.port and (len(hosts) == 1 or not hosts.isdisjoint(_ANY_HOST))


def gateway_machine(region: RegionSpec) -> str:
    """The address of the host of the first gateway."""
    gateway = region.gateway
    name = next(iter(gateway.nodes), gateway.node)
    named = (node.host for node in region.nodes if node.name == name)
    # A cluster without PD clusters, or an unknown name: other checks say so.
    first = (cluster.nodes[0].host for cluster in region.pd_clusters)
    return next(named, None) or next(first, gateway.host)


def fixed_ports(region: RegionSpec) -> Iterator[FixedPort]:
    """Every port of the region."""
    gateway, machine = region.gateway, gateway_machine(region)
    if not gateway.nodes:  # else it is only where `ports` of several gateways begin
        yield FixedPort(("gateway", "port"), "", machine, gateway.host, gateway.port)
    for name, port in gateway.ports.items():
        owner = gateway_process(region, name)
        machine = next((node.host for node in region.nodes if node.name == name), gateway.host)
        yield FixedPort(("gateway", "ports", name), owner, machine, gateway.host, port)
    if gateway.admin is not None:
        admin = Endpoint.parse(gateway.admin)
        yield FixedPort(("gateway", "admin"), "", machine, admin.host, admin.port)
    for c, cluster in enumerate(region.clusters):
        first = cluster.nodes[0]
        path: KeyPath = ("clusters", c, "front_port")
        yield FixedPort(path, cluster.name, first.host, first.bound_host, cluster.front_port)
        path, port = ("clusters", c, "front_metrics_port"), cluster.front_metrics_port
        yield FixedPort(path, cluster.name, first.host, region.metrics_host(first), port)
    for path, cluster, node in _nodes(region):
        for key, bound in region.agent_hosts(node).items():
            port = getattr(node.agent, key)
            yield FixedPort((*path, "agent", key), node.name, node.host, bound, port)
        engine_host = region.engine_host(node)
        for i, instance in enumerate(node.instances):
            at = (*path, "instances", i, "port")
            yield FixedPort(at, node.name, node.host, engine_host, instance.port)
            if cluster.hand_off == "nixl":
                at = (*path, "instances", i, "nixl_port")
                yield FixedPort(at, node.name, node.host, node.bound_host, instance.nixl_port)
