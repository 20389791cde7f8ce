"""The addresses at which processes and people reach the processes of a region. Pure."""

from __future__ import annotations

from deploy.region.spec.region import ClusterSpec, NodeSpec, RegionInstance, RegionSpec
from kvmanager.config_files.fields import TlsSection
from kvmanager.config_files.security import is_loopback
from transport import Endpoint
from transport.endpoint import is_wildcard


def front_address(cluster: ClusterSpec) -> str:
    """Where the gateway reaches the cluster's front that is a process of its own."""
    return str(Endpoint(cluster.nodes[0].host, cluster.front_port))


def gateway_url(region: RegionSpec, node: str = "") -> str:
    """Where clients on this machine find the gateway of a node ("": the first one)."""
    gateway = region.gateway
    return _local_url(Endpoint(gateway.host, gateway.ports.get(node, gateway.port)))


def admin_url(region: RegionSpec, node: str = "") -> str:
    """Where operators on this machine find that gateway's pages."""
    admin = region.gateway.admin
    return gateway_url(region, node) if admin is None else _local_url(Endpoint.parse(admin))


def _local_url(at: Endpoint) -> str:
    # A wildcard address is for listening only. "::" takes IPv4 as well, and IPv6 may be missing.
    host = "127.0.0.1" if is_wildcard(at.host) else at.host
    return f"http://{Endpoint(host, at.port)}"


def engine_tls(region: RegionSpec, node: NodeSpec) -> TlsSection | None:
    """The certificates of the node's engines, which need none on loopback."""
    return None if is_loopback(region.engine_host(node)) else region.security.tls


def engine_url(region: RegionSpec, node: NodeSpec, instance: RegionInstance) -> str:
    """Where fronts and gateway ask the instance's engine."""
    scheme = "http" if engine_tls(region, node) is None else "https"
    bound = region.engine_host(node)
    host = node.host if bound == node.bound_host else bound
    return f"{scheme}://{Endpoint(host, instance.port)}"
