"""A region as one host sees it: its ports, what runs here, and the keys of this host.

It reads files of the run and speaks to no process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from deploy.region.launch.addresses import engine_tls, engine_url, front_address
from deploy.region.launch.parts import Part, UnknownPart, fronts_apart, part_of, part_with, run_name
from deploy.region.launch.ports import advertised_addresses, resolve_part
from deploy.region.launch.rundir import RunDirectory, WhichRun, default_base, find_run
from deploy.region.launch.trust import run_credentials
from deploy.region.spec.region import ClusterSpec, NodeSpec, RegionSpec
from kvmanager.config_files.security import is_loopback
from transport import Credentials, Endpoint, Role
from transport.endpoint import is_wildcard

PortKind = Literal[
    "control", "data", "link", "metrics", "engine", "nixl", "front", "gateway", "admin"
]


@dataclass(frozen=True, slots=True)
class Viewpoint:
    """`region` has all ports. `part` runs on this host; None: the host is none of the region's."""

    region: RegionSpec
    part: Part | None
    directory: RunDirectory

    @property
    def credentials(self) -> Credentials | None:
        """How this host's operator shows who he is."""
        return run_credentials(self.region, self.directory.region_key, "operator")

    @property
    def title(self) -> str:
        if self.part is None:
            return "a host outside of the region"
        return self.part.name or "this host, which runs all of it"

    def is_here(self, node: NodeSpec) -> bool:
        """Whether the node is on this host. Nodes with one address are on one host."""
        part = self.part
        if part is None:
            return False
        hosts = {item.host for item in self.region.nodes if item.name in part.nodes}
        return part.is_whole or node.host in hosts

    def runs(self, node: NodeSpec) -> bool:
        """Whether the node belongs to the part that this host starts."""
        return self.part is not None and node.name in self.part.nodes

    @property
    def has_gateway(self) -> bool:
        return self.part is not None and self.part.has_gateway


@dataclass(frozen=True, slots=True)
class RegionPort:
    """A port of the region. `needed`: something on this host connects to it, or listens there.

    `machine` is the address of the host that has it. `role` is what a certificate shown there must
    name; None where none is shown.
    """

    name: str
    kind: PortKind
    at: Endpoint
    machine: str
    is_here: bool
    needed: bool
    role: Role | None = None


def find_viewpoint(
    region: RegionSpec, *, site: str | None, node: str | None, run_dir: Path | None
) -> Viewpoint:
    """The region from this host: with `site` or `node` that part of it, else what runs here, else
    from outside. Raises UnknownPart, WhichRun for a region of one host that does not run here.
    """
    everywhere = part_with(region, "all", tuple(item.name for item in region.nodes))
    if site is None and node is None:
        try:
            root, state = find_run(run_dir, region.name)
        except WhichRun:
            if run_dir is not None or len({item.host for item in region.nodes}) == 1:
                raise
            root = default_base(os.environ) / region.name
            resolved = resolve_part(region, everywhere).region
            return Viewpoint(resolved, None, RunDirectory(root, root / "sockets"))
        region = RegionSpec.model_validate_json(Path(state.region_file).read_bytes())
        return Viewpoint(region, _part_named(region, state.part), RunDirectory(root, root))
    part = part_of(region, site=site, node=node)
    root = run_dir or default_base(os.environ) / run_name(region, part)
    return Viewpoint(resolve_part(region, part).region, part, RunDirectory(root, root))


def _part_named(region: RegionSpec, name: str) -> Part:
    if not name:
        return part_of(region)
    try:
        return part_of(region, node=name)
    except UnknownPart:
        return part_of(region, site=name)


def region_ports(view: Viewpoint) -> list[RegionPort]:
    """The ports that processes listen on, without those on loopback of other hosts."""
    kinds = (_agent_ports, _engine_ports, _nixl_ports, _front_ports, _gateway_ports)
    return [
        port
        for ports in kinds
        for port in ports(view)
        if port.is_here or port.at.host == port.machine or not is_loopback(port.at.host)
    ]


def _agent_ports(view: Viewpoint) -> Iterator[RegionPort]:
    region = view.region
    # Agents copy prefixes that are asked for often to each other, in any direction.
    has_agents = view.part is not None
    for node in region.nodes:
        name, here = f"agent {node.name}", view.is_here(node)
        control = Endpoint(node.host, node.agent.control_port)
        yield RegionPort(f"{name}, control", "control", control, node.host, here, True, "agent")
        for number, address in enumerate(advertised_addresses(node)):
            title = f"{name}, data" if number == 0 else f"{name}, data at {address}"
            at = Endpoint.parse(address)
            yield RegionPort(title, "data", at, node.host, here, has_agents, "agent")
        for link in region.links:
            if node.name in link.endpoints:
                at = Endpoint.parse(link.endpoints[node.name])
                sends = any(map(view.runs, region.cluster(link.source).nodes))
                title = f"link {link.name} to {node.name}"
                yield RegionPort(title, "link", at, node.host, here, here or sends, "agent")
        host = region.metrics_host(node)
        at = Endpoint(node.host if host == node.bound_host else host, node.agent.metrics_port)
        yield RegionPort(f"{name}, metrics", "metrics", at, node.host, here, view.runs(node))


def _engine_ports(view: Viewpoint) -> Iterator[RegionPort]:
    region = view.region
    for cluster in region.clusters:
        asks = _has_front(view, cluster) or (cluster.kind == "pd" and view.has_gateway)
        for node in cluster.nodes:
            role: Role | None = None if engine_tls(region, node) is None else "agent"
            for item in node.instances:
                address = engine_url(region, node, item).partition("://")[2]
                at, here = Endpoint.parse(address), view.is_here(node)
                needed = asks or view.runs(node)
                yield RegionPort(f"engine {item.name}", "engine", at, node.host, here, needed, role)


def _nixl_ports(view: Viewpoint) -> Iterator[RegionPort]:
    for cluster in view.region.clusters:
        if cluster.hand_off != "nixl":
            continue
        # Any engine of the cluster may decode what another one has prefilled.
        needed = any(map(view.runs, cluster.nodes))
        for node in cluster.nodes:
            for item in node.instances:
                name, at = f"engine {item.name}, NIXL", Endpoint(node.host, item.nixl_port)
                yield RegionPort(name, "nixl", at, node.host, view.is_here(node), needed)


def _front_ports(view: Viewpoint) -> Iterator[RegionPort]:
    region = view.region
    if view.part is not None and view.part.is_whole:
        return  # all fronts are inside the gateway
    for cluster in fronts_apart(region):
        first = cluster.nodes[0]
        at, here = Endpoint.parse(front_address(cluster)), view.is_here(first)
        role: Role = "prefill-front" if cluster.kind == "prefill" else "pd-front"
        needed = _has_front(view, cluster) or view.has_gateway
        yield RegionPort(f"front {cluster.name}", "front", at, first.host, here, needed, role)
        host, name = region.metrics_host(first), f"front {cluster.name}, metrics"
        at = Endpoint(first.host if host == first.bound_host else host, cluster.front_metrics_port)
        yield RegionPort(name, "metrics", at, first.host, here, _has_front(view, cluster))


def _gateway_ports(view: Viewpoint) -> Iterator[RegionPort]:
    gateway = view.region.gateway
    for node in view.region.gateway_nodes:
        here = view.part is not None and node.name in view.part.gateways
        port = gateway.ports.get(node.name, gateway.port)
        name = gateway_title(view.region, node)
        listening: dict[PortKind, tuple[str, Endpoint]] = {
            "gateway": (name, Endpoint(gateway.host, port))
        }
        if gateway.admin is not None:
            listening["admin"] = (admin_title(name), Endpoint.parse(gateway.admin))
        for kind, (title, at) in listening.items():
            if is_wildcard(at.host):  # a wildcard address is for listening only
                at = Endpoint(node.host, at.port)
            yield RegionPort(title, kind, at, node.host, here, here)


def gateway_title(region: RegionSpec, node: NodeSpec) -> str:
    """The name of a node's gateway in checks."""
    return "gateway" if len(region.gateway_nodes) == 1 else f"gateway {node.name}"


def admin_title(gateway: str) -> str:
    """The name in checks of the port of a gateway at which operators see its pages."""
    return f"{gateway}, pages for operators"


def _has_front(view: Viewpoint, cluster: ClusterSpec) -> bool:
    """Whether the cluster's front runs here."""
    if view.part is None:
        return False
    if view.part.is_whole or cluster not in fronts_apart(view.region):
        return view.part.has_gateway
    return cluster.name in view.part.fronts
