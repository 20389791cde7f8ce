"""Free and taken TCP ports of this machine, and a region in which every port is chosen.

It knows the local network stack and the specification, and starts nothing.
"""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from deploy.region.spec.checks import fixed_ports
from deploy.region.spec.region import (
    AgentSpec,
    ClusterSpec,
    EmulationSpec,
    LinkSpec,
    NodeSpec,
    RegionSpec,
)
from kvmanager.config_files.problems import Problem
from transport import Endpoint

# Below the range from which Linux takes the ports of outgoing connections, so that no such
# connection takes a chosen port before its owner has started.
_FIRST_PORT, _LAST_PORT = 20000, 32000


@dataclass(frozen=True, slots=True)
class RelayPlan:
    """A relay to start. It passes connections to `listen` on to `target` over the emulated link."""

    link: str
    node: str
    listen: str
    target: str
    emulate: EmulationSpec

    @property
    def name(self) -> str:
        return f"link.{self.link}.{self.node}"


@dataclass(frozen=True, slots=True)
class ResolvedRegion:
    """A region with all ports chosen. Its links name the relays as endpoints."""

    region: RegionSpec
    relays: tuple[RelayPlan, ...]


def taken_ports(region: RegionSpec) -> list[Problem]:
    """The fixed ports of `region` that are in use, and hosts that are not this machine."""
    problems: dict[str, Problem] = {}
    for path, host, port in fixed_ports(region):
        try:
            with _bind(host, port):
                pass
        except OSError as error:
            message = _why_not(host, port, error)
            problems.setdefault(message, Problem(path, message))
    return list(problems.values())


def can_listen(host: str, port: int) -> bool:
    """Whether this machine lets us listen there now."""
    try:
        with _bind(host, port):
            return True
    except OSError:
        return False


def resolve_ports(
    region: RegionSpec, is_free: Callable[[str, int], bool] = can_listen
) -> ResolvedRegion:
    """Choose a free port wherever `region` says 0, and one for every relay that it needs.

    OSError if no port is left. Another process may still take a port before its owner starts.
    """
    used = {port for _, _, port in fixed_ports(region) if port}
    chooser = random.Random()
    # At random, so that two regions that start together hardly choose the same ports.

    def choose(host: str, wanted: int) -> int:
        if wanted:
            return wanted
        for _ in range(1000):
            port = chooser.randint(_FIRST_PORT, _LAST_PORT)
            if port not in used and is_free(host, port):
                used.add(port)
                return port
        raise OSError(f"no free port on {host} between {_FIRST_PORT} and {_LAST_PORT}")

    gateway = region.gateway
    gateway = gateway.model_copy(update={"port": choose(gateway.host, gateway.port)})
    if gateway.admin is not None:
        at = Endpoint.parse(gateway.admin)
        admin = str(Endpoint(at.host, choose(at.host, at.port)))
        gateway = gateway.model_copy(update={"admin": admin})
    clusters = tuple(_resolve_cluster(region, cluster, choose) for cluster in region.clusters)
    region = region.model_copy(update={"gateway": gateway, "clusters": clusters})
    relays: list[RelayPlan] = []
    links = tuple(_resolve_link(link, region, choose, relays) for link in region.links)
    return ResolvedRegion(region.model_copy(update={"links": links}), tuple(relays))


def advertised_address(node: NodeSpec) -> str:
    """The address at which the node's agent says that it receives KVCache."""
    return node.agent.advertise or str(Endpoint(node.host, node.agent.data_port))


_Choose = Callable[[str, int], int]


def _resolve_cluster(region: RegionSpec, cluster: ClusterSpec, choose: _Choose) -> ClusterSpec:
    nodes = []
    for node in cluster.nodes:
        hosts = dict.fromkeys(("data_port", "control_port"), node.host)
        hosts["metrics_port"] = region.metrics_host(node)
        chosen = {key: choose(host, getattr(node.agent, key)) for key, host in hosts.items()}
        agent: AgentSpec = node.agent.model_copy(update=chosen)
        instances = tuple(
            item.model_copy(update={"port": choose(region.engine_host(node), item.port)})
            for item in node.instances
        )
        nodes.append(node.model_copy(update={"agent": agent, "instances": instances}))
    return cluster.model_copy(update={"nodes": tuple(nodes)})


def _resolve_link(
    link: LinkSpec, region: RegionSpec, choose: _Choose, relays: list[RelayPlan]
) -> LinkSpec:
    if link.emulate is None:
        return link
    endpoints = {}
    for node in region.cluster(link.to).nodes:
        listen = str(Endpoint(node.host, choose(node.host, 0)))
        target = advertised_address(node)
        relays.append(RelayPlan(link.name, node.name, listen, target, link.emulate))
        endpoints[node.name] = listen
    return link.model_copy(update={"endpoints": endpoints, "emulate": None})


def _bind(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family, kind, protocol)
    try:
        # Connections in TIME_WAIT do not count as taken, since the owner will listen in the same
        # way.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(1)
    except OSError:
        sock.close()
        raise
    return sock


def _why_not(host: str, port: int, error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return f"the host {host!r} has no address: {error.strerror}"
    if port == 0 or error.errno != errno.EADDRINUSE:
        return (
            f"this machine cannot listen on {host}: {error.strerror}; `prfaas up` starts everything"
            " on one machine, so hosts must be its own addresses"
        )
    return f"port {port} is in use{_owner(port)}; stop that, choose another port, or 0 for any"


def _owner(port: int) -> str:
    try:
        # Without privileges other users' processes are hidden. The message then names no owner.
        for connection in psutil.net_connections("tcp"):
            address = connection.laddr
            if connection.status != psutil.CONN_LISTEN or not address or not connection.pid:
                continue
            if address.port == port:
                return f" by {psutil.Process(connection.pid).name()} (pid {connection.pid})"
    except (psutil.Error, OSError):
        pass
    return ""
