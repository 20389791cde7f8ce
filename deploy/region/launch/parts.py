"""The part of a region that one `prfaas up` starts, where several hosts have the same file.

Every host works out from the file alone what runs where. So nothing here looks at a machine, except
`missing_files`, which looks for the files that the part reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from deploy.command_line import CommandFailed, ExitCode
from deploy.region.spec.region import ClusterSpec, NodeSpec, RegionSpec
from kvmanager.config_files.problems import KeyPath, Problem, suggestion

_INIT: Final = "`prfaas certs init DIR FILE` makes it"


class UnknownPart(CommandFailed):
    """The region has no such cluster or node; the message says which there are."""

    exit_status = ExitCode.USAGE


@dataclass(frozen=True, slots=True)
class Part:
    """The part of one launcher: agents and engines of `nodes`, fronts of the clusters `fronts`.

    Without a `name` it is the whole region on one machine. A gateway that shares nothing has all
    fronts inside.
    """

    name: str
    nodes: tuple[str, ...]
    fronts: tuple[str, ...] = ()
    gateways: tuple[str, ...] = ()
    """The nodes of the gateways that run here."""

    @property
    def has_gateway(self) -> bool:
        return bool(self.gateways)

    @property
    def is_whole(self) -> bool:
        return not self.name

    @property
    def may_leave(self) -> bool:
        """Whether it may leave a region that runs: nothing else needs a process of it."""
        return not (self.is_whole or self.fronts or self.gateways)


def whole(region: RegionSpec) -> Part:
    """The region on one machine."""
    nodes = tuple(node.name for node in region.nodes)
    gateways = tuple(node.name for node in region.gateway_nodes)
    shares = region.gateway.shared is not None
    fronts = tuple(cluster.name for cluster in region.clusters) if shares else ()
    return Part("", nodes, fronts, gateways)


def part_of(region: RegionSpec, *, site: str | None = None, node: str | None = None) -> Part:
    """The part of a site, which is a cluster, or of one node; the whole region without either.

    Raises UnknownPart.
    """
    if site is not None and node is not None:
        raise UnknownPart("give --site or --node, not both")
    if site is not None:
        names = [cluster.name for cluster in region.clusters]
        if site not in names:
            raise UnknownPart(f"--site: no cluster is called {site!r}{suggestion(site, names)}")
        return part_with(region, site, tuple(item.name for item in region.cluster(site).nodes))
    if node is not None:
        names = [item.name for item in region.nodes]
        if node not in names:
            raise UnknownPart(f"--node: no node is called {node!r}{suggestion(node, names)}")
        return part_with(region, node, (node,))
    return whole(region)


def part_with(region: RegionSpec, name: str, nodes: tuple[str, ...]) -> Part:
    """The part of a host with these nodes."""
    fronts = tuple(c.name for c in fronts_apart(region) if c.nodes[0].name in nodes)
    gateways = tuple(node.name for node in region.gateway_nodes if node.name in nodes)
    return Part(name, nodes, fronts, gateways)


def fronts_apart(region: RegionSpec) -> tuple[ClusterSpec, ...]:
    """The clusters whose fronts are processes of their own, each on its cluster's first node.

    A region's only gateway has the front of its own cluster inside, as it has all of them on one
    machine. Gateways, or processes of one, that share the region's work would each place work as if
    they were alone.
    """
    if region.gateway.shared is not None:
        return region.clusters
    return tuple(c for c in region.clusters if region.gateway_node not in c.nodes)


def run_name(region: RegionSpec, part: Part) -> str:
    """The name of the directory in which the part runs."""
    return region.name if part.is_whole else f"{region.name}.{part.name}"


def part_problems(region: RegionSpec, part: Part) -> list[Problem]:
    """The problems that keep this host from starting its part. It looks for files."""
    gateways = region.gateway_nodes
    hosts = {node.host for node in gateways if part.name} or {""}
    if region.gateway.admin is not None and len(hosts) < len(gateways):
        message = "gateways of one machine cannot share it; leave it out, or give each a host"
        return [Problem(("gateway", "admin"), message)]
    if part.is_whole:
        return []
    return spread_problems(region) or list(missing_files(region, part))


def spread_problems(region: RegionSpec) -> list[Problem]:
    """The problems that keep several hosts from starting parts of the region."""
    return [*_unnamed_keys(region)] or [*_unreachable_engines(region)]


def missing_files(region: RegionSpec, part: Part) -> Iterator[Problem]:
    """The files that the part reads and this machine does not have."""
    security = region.security
    files: dict[KeyPath, Path | None] = {
        ("region_key",): security.region_key,
        ("engine_key",): security.engine_key,
        ("granting_keys",): security.granting_keys,
        ("metrics_key",): security.metrics_key,
        ("granting_key",): security.granting_key if part.has_gateway else None,
    }
    if security.tls is not None:
        files |= {("tls", name): path for name, path in security.tls}
    for path, file in files.items():
        if file is not None and not file.is_file():
            yield Problem(("security", *path), f"there is no {file} on this host; {_INIT}")


def _unnamed_keys(region: RegionSpec) -> Iterator[Problem]:
    """Hosts that each made keys of their own for their run would not know each other."""
    security = region.security
    if not (security.tls or security.region_key or security.trusted_network):
        message = "name tls (or region_key) files that all hosts have; `prfaas certs init DIR FILE`"
        yield Problem(("security",), f"{message} makes them")
    needed = ["engine_key"]
    if not security.trusted_network:
        needed += ["granting_key", "granting_keys"]
    for name in needed:
        if getattr(security, name) is None:
            message = f"name the file, since hosts cannot make it each for itself; {_INIT}"
            yield Problem(("security", name), message)


def _unreachable_engines(region: RegionSpec) -> Iterator[Problem]:
    for c, cluster in enumerate(region.clusters):
        asking = [_front_node(region, cluster)]
        if cluster.kind == "pd":
            asking += region.gateway_nodes  # they stream their answers
        for n, node in enumerate(cluster.nodes):
            if region.engine_host(node) == node.bound_host:
                continue
            for other in asking:
                if other.host != node.host:
                    message = (
                        f"without TLS its engines listen on loopback only, and {other.name} "
                        f"({other.host}) has to ask them; give security.tls"
                    )
                    yield Problem(("clusters", c, "nodes", n, "host"), message)
                    break


def _front_node(region: RegionSpec, cluster: ClusterSpec) -> NodeSpec:
    if cluster in fronts_apart(region):
        return cluster.nodes[0]
    return region.gateway_nodes[0]
