"""Free and taken TCP ports of this machine, and a region in which every port is chosen.

It knows the local network stack and the specification, and starts nothing.
"""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Final

import psutil

from deploy.region.launch.parts import Part, fronts_apart, whole
from deploy.region.spec.checks import FixedPort, fixed_ports, gateway_machine
from deploy.region.spec.region import (
    AgentSpec,
    ClusterSpec,
    EmulationSpec,
    LinkSpec,
    NodeSpec,
    RegionSpec,
    gateway_process,
)
from kvmanager.config_files.problems import Problem
from transport import Endpoint
from transport.addresses import listen

# Below the range from which Linux takes the ports of outgoing connections, so that no such
# connection takes a chosen port before its owner has started.
_FIRST_PORT, _LAST_PORT = 20000, 32000

# Where each kind of process listens if every host starts its own part and the file says nothing:
# this port of the host, or the next one that is free according to the file.
AGENT_DATA_PORT: Final = 7100
AGENT_CONTROL_PORT: Final = 7101
AGENT_METRICS_PORT: Final = 7102
FRONT_PORT: Final = 7200
FRONT_METRICS_PORT: Final = 7210
ENGINE_PORT: Final = 7400
NIXL_PORT: Final = 7600
RELAY_PORT: Final = 7900
GATEWAY_PORT: Final = 8000
ADMIN_PORT: Final = 8001


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
    """A region with all ports chosen, and the part of it to start. Its links name the relays as
    endpoints.
    """

    region: RegionSpec
    relays: tuple[RelayPlan, ...]
    part: Part


def taken_ports(region: RegionSpec, part: Part | None = None) -> list[Problem]:
    """The fixed ports of the part, else of all of `region`, that are in use or given twice, and
    hosts that are not this machine.
    """
    part = part or whole(region)
    gateways = [gateway_process(region, name) for name in part.gateways]
    owners = {*part.nodes, *part.fronts, *gateways, *([""] if part.has_gateway else [])}
    problems: dict[str, Problem] = {}
    seen: list[FixedPort] = []
    for item in fixed_ports(region):
        if item.owner not in owners:
            continue
        message = ""
        try:
            _listen_and_close(item.host, item.port)
        except OSError as error:
            message = _why_not(item.host, item.port, error)
        if item.port and any(map(item.excludes, seen)):
            message = f"port {item.port} of {item.host} is given twice; choose another"
        seen.append(item)
        if message:
            problems.setdefault(message, Problem(item.path, message))
    return list(problems.values())


def can_listen(host: str, port: int) -> bool:
    """Whether this machine lets us listen there now."""
    try:
        _listen_and_close(host, port)
    except OSError:
        return False
    return True


def _listen_and_close(host: str, port: int) -> None:
    # As processes listen, so that both find the same ports free.
    for sock in listen(Endpoint(host, port)):
        sock.close()


def resolve_ports(
    region: RegionSpec, is_free: Callable[[str, int], bool] = can_listen
) -> ResolvedRegion:
    """The whole region, with a free port of this machine wherever it says 0, and one for every
    relay that it needs.

    OSError if no port is left. Another process may still take a port before its owner starts.
    """
    used = {item.port for item in fixed_ports(region) if item.port}
    chooser = random.Random()
    # At random, so that two regions that start together hardly choose the same ports.

    def choose(machine: str, host: str, first: int) -> int:
        for _ in range(1000):
            port = chooser.randint(_FIRST_PORT, _LAST_PORT)
            if port not in used and is_free(host, port):
                used.add(port)
                return port
        raise OSError(f"no free port on {host} between {_FIRST_PORT} and {_LAST_PORT}")

    return _resolved(region, whole(region), choose)


def resolve_part(region: RegionSpec, part: Part) -> ResolvedRegion:
    """The region with the ports that every host works out from the same file."""
    used = {(item.machine, item.port) for item in fixed_ports(region)}

    def choose(machine: str, host: str, first: int) -> int:
        port = next(port for port in count(first) if (machine, port) not in used)
        used.add((machine, port))
        return port

    return _resolved(region, part, choose)


def advertised_address(node: NodeSpec) -> str:
    """The address at which the node's agent says that it receives KVCache."""
    return advertised_addresses(node)[0]


def advertised_addresses(node: NodeSpec) -> tuple[str, ...]:
    """All addresses at which the node's agent receives KVCache."""
    return node.agent.advertised or (str(Endpoint(node.host, node.agent.data_port)),)


# The address of a machine, the address to listen on there, and the first port to try.
_Choose = Callable[[str, str, int], int]


def _resolved(region: RegionSpec, part: Part, choose: _Choose) -> ResolvedRegion:
    gateway = region.gateway
    if gateway.nodes:
        ports = _gateway_ports(region, part, choose)
        gateway = gateway.model_copy(update={"ports": ports, "port": next(iter(ports.values()))})
    else:
        port = gateway.port or choose(gateway_machine(region), gateway.host, GATEWAY_PORT)
        gateway = gateway.model_copy(update={"port": port})
    if gateway.admin is not None:
        at = Endpoint.parse(gateway.admin)
        admin = str(
            Endpoint(at.host, at.port or choose(gateway_machine(region), at.host, ADMIN_PORT))
        )
        gateway = gateway.model_copy(update={"admin": admin})
    clusters = tuple(_resolve_cluster(region, cluster, choose) for cluster in region.clusters)
    region = region.model_copy(update={"gateway": gateway, "clusters": clusters})
    if part.fronts or not part.is_whole:
        region = _with_front_ports(region, choose)
    relays: list[RelayPlan] = []
    links = tuple(_resolve_link(link, region, choose, relays) for link in region.links)
    return ResolvedRegion(region.model_copy(update={"links": links}), tuple(relays), part)


def _gateway_ports(region: RegionSpec, part: Part, choose: _Choose) -> dict[str, int]:
    """The port of each of several gateways, by its node."""
    gateway, hosts = region.gateway, [node.host for node in region.gateway_nodes]
    found = {}
    for number, node in enumerate(region.gateway_nodes):
        # Hosts that start their own parts have to find the same port, each for itself.
        port = (gateway.port or GATEWAY_PORT) + hosts[:number].count(node.host)
        if part.is_whole:
            port = gateway.port if number == 0 else 0
        port = gateway.ports.get(node.name) or port
        found[node.name] = port or choose(node.host, gateway.host, GATEWAY_PORT)
    return found


def _with_front_ports(region: RegionSpec, choose: _Choose) -> RegionSpec:
    apart = fronts_apart(region)
    clusters = []
    for cluster in region.clusters:
        if cluster in apart:
            first = cluster.nodes[0]
            told = {
                "front_port": cluster.front_port or choose(first.host, first.host, FRONT_PORT),
                "front_metrics_port": cluster.front_metrics_port
                or choose(first.host, region.metrics_host(first), FRONT_METRICS_PORT),
            }
            cluster = cluster.model_copy(update=told)
        clusters.append(cluster)
    return region.model_copy(update={"clusters": tuple(clusters)})


def _resolve_cluster(region: RegionSpec, cluster: ClusterSpec, choose: _Choose) -> ClusterSpec:
    firsts = {
        "data_port": AGENT_DATA_PORT,
        "control_port": AGENT_CONTROL_PORT,
        "metrics_port": AGENT_METRICS_PORT,
    }
    nodes = []
    for node in cluster.nodes:
        chosen = {
            key: getattr(node.agent, key) or choose(node.host, bound, firsts[key])
            for key, bound in region.agent_hosts(node).items()
        }
        agent: AgentSpec = node.agent.model_copy(update=chosen)
        host, engine_host = node.host, region.engine_host(node)
        instances = tuple(
            item.model_copy(update={"port": item.port or choose(host, engine_host, ENGINE_PORT)})
            for item in node.instances
        )
        if cluster.hand_off == "nixl":
            instances = tuple(
                item.model_copy(
                    update={"nixl_port": item.nixl_port or choose(host, node.bound_host, NIXL_PORT)}
                )
                for item in instances
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
        port = choose(node.host, node.bound_host, RELAY_PORT)
        listen, target = str(Endpoint(node.bound_host, port)), advertised_address(node)
        relays.append(RelayPlan(link.name, node.name, listen, target, link.emulate))
        endpoints[node.name] = str(Endpoint(node.host, port))
    return link.model_copy(update={"endpoints": endpoints, "emulate": None})


def _why_not(host: str, port: int, error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return f"the host {host!r} has no address: {error.strerror}"
    if port == 0 or error.errno != errno.EADDRINUSE:
        return (
            f"this machine cannot listen on {host}: {error.strerror}; `prfaas up` starts everything"
            " here, so hosts must be this machine's addresses; --site or --node starts a part"
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
