"""The changes of its file that a running region follows: nodes, instances, limits of tenants.

Pure but for the search for free ports. It starts nothing and does not know processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from deploy.gateway.reload import with_live
from deploy.region.launch.parts import Part
from deploy.region.launch.ports import ResolvedRegion, can_listen, resolve_part, resolve_ports
from deploy.region.spec.region import ClusterSpec, NodeSpec, RegionSpec
from kvmanager.config_files.problems import FileError, Problem


def with_members(running: RegionSpec, wanted: RegionSpec) -> RegionSpec:
    """`running` with the nodes and instances that `wanted` names, and its live settings. Nodes and
    instances that both name stay as they run. Raises ValueError for settings that do not fit the
    others.
    """
    named = {cluster.name: cluster for cluster in wanted.clusters}
    return running.model_copy(
        update={
            "gateway": with_live(running.gateway, wanted.gateway),
            "clusters": tuple(
                _with_nodes(cluster, named.get(cluster.name, cluster))
                for cluster in running.clusters
            ),
        }
    )


def member_problems(running: RegionSpec, after: RegionSpec, part: Part) -> Iterator[Problem]:
    """The changes in `after` that no region can follow while it runs."""
    for index, (before, cluster) in enumerate(zip(running.clusters, after.clusters, strict=True)):
        path = ("clusters", index, "nodes")
        first = before.nodes[0].name
        if not part.is_whole and cluster.nodes[0].name != first:
            message = f"the front of {cluster.name} runs on {first}, which must stay the first node"
            yield Problem(path, message)
        new = {node.name for node in cluster.nodes} - {node.name for node in before.nodes}
        for link in running.links:
            if new and link.emulate is not None and link.to == cluster.name:
                message = (
                    f"{', '.join(sorted(new))} would receive over the emulated link {link.name}"
                )
                yield Problem(path, f"{message}: that needs a restart")


def resolve_again(
    after: RegionSpec,
    running: ResolvedRegion,
    part: Part,
    is_free: Callable[[str, int], bool] = can_listen,
) -> ResolvedRegion:
    """`after` with ports. What runs keeps its own. FileError where every host works ports out of
    the file, and those of a node that stays would be others.
    """
    if not part.is_whole:
        resolved = resolve_part(after, part)
        known = {node.name: node for node in running.region.nodes}
        for node in resolved.region.nodes:
            before = known.get(node.name, node)
            ports, kept = (
                {item.name: (item.port, item.nixl_port) for item in each.instances}
                for each in (node, before)
            )
            moved = any(ports.get(name, own) != own for name, own in kept.items())
            if moved or before.agent != node.agent:
                message = "its ports would change; give it the ports that it has, in the file"
                raise FileError(f"region {after.name}", [Problem(("nodes", node.name), message)])
        return resolved
    own = running.region.gateway
    gateway = after.gateway.model_copy(
        update={"port": own.port, "ports": own.ports, "admin": own.admin}
    )
    region = with_members(running.region, after).model_copy(update={"gateway": gateway})
    resolved = resolve_ports(region, is_free)
    return ResolvedRegion(resolved.region, running.relays, part)


def _with_nodes(running: ClusterSpec, wanted: ClusterSpec) -> ClusterSpec:
    known = {node.name: node for node in running.nodes}
    nodes = (_with_instances(known.get(node.name, node), node) for node in wanted.nodes)
    return running.model_copy(update={"nodes": tuple(nodes)})


def _with_instances(running: NodeSpec, wanted: NodeSpec) -> NodeSpec:
    known = {item.name: item for item in running.instances}
    instances = tuple(known.get(item.name, item) for item in wanted.instances)
    return running.model_copy(update={"instances": instances})
