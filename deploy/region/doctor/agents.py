"""Finds the two agents to measure: names in a running region, or addresses of control ports.

It reads the region's files and speaks to no agent.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from deploy.command_line import CommandFailed, ExitCode
from deploy.region.launch.ports import advertised_address
from deploy.region.launch.rundir import RegionState, find_run
from deploy.region.launch.trust import credentials_in
from deploy.region.spec.region import ClusterSpec, NodeSpec, RegionSpec
from kvmanager.config_files.problems import suggestion
from transport import Credentials, Endpoint


class UnknownAgent(CommandFailed):
    """There is no such agent; the message says which there are."""

    exit_status = ExitCode.USAGE


@dataclass(frozen=True, slots=True)
class AgentPlace:
    """An agent: its name for people, its control port, and its place in a region."""

    name: str
    control: str
    cluster: ClusterSpec | None = None
    node: NodeSpec | None = None


@dataclass(frozen=True, slots=True)
class Pair:
    """A path to measure. `via` is the address to connect to, if not the one that B advertises."""

    sender: AgentPlace
    receiver: AgentPlace
    credentials: Credentials | None
    via: Endpoint | None


def find_pair(
    sender: str,
    receiver: str,
    run_dir: Path | None = None,
    region: str | None = None,
    *,
    base: Path | None = None,
) -> Pair:
    """The agents that `sender` and `receiver` name.

    The other arguments choose the region, like those of `find_run`. Raises UnknownAgent, WhichRun,
    RunDirectoryError.
    """
    # Two addresses need no region: the agents may be on any hosts.
    if is_address(sender) and is_address(receiver) and run_dir is None and region is None:
        return Pair(AgentPlace(sender, sender), AgentPlace(receiver, receiver), None, None)
    hint = "give control ports as host:port"
    _, state = find_run(run_dir, region, base=base, hint=hint)
    spec = RegionSpec.model_validate_json(Path(state.region_file).read_bytes())
    places = _places(spec, state)
    first, second = _find(sender, places), _find(receiver, places)
    return Pair(first, second, credentials_in(state), _via(spec, first, second))


def is_address(text: str) -> bool:
    """Whether it is "host:port" rather than a name."""
    try:
        return Endpoint.parse(text).port > 0
    except ValueError:
        return False


def _places(spec: RegionSpec, state: RegionState) -> dict[str, AgentPlace]:
    """The agents by node, by cluster (its first node) and by instance. Nodes win over the
    others.
    """
    places: dict[str, AgentPlace] = {}
    for cluster in spec.clusters:
        for node in cluster.nodes:
            place = AgentPlace(node.name, state.agents[node.name], cluster, node)
            # A cluster stands for its first node.
            places.setdefault(cluster.name, place)
            places |= {instance.name: place for instance in node.instances}
    return places | {place.name: place for place in list(places.values())}


def _find(name: str, places: dict[str, AgentPlace]) -> AgentPlace:
    if is_address(name):
        return AgentPlace(name, name)
    place = places.get(name)
    if place is None:
        raise UnknownAgent(f"no node, cluster or instance {name!r}{suggestion(name, places)}")
    return place


def _via(spec: RegionSpec, sender: AgentPlace, receiver: AgentPlace) -> Endpoint | None:
    """The address to which KVCache from that cluster to that node goes: a tunnel or an
    emulated link.
    """
    # An agent outside the region is reached at the address that it advertises.
    if sender.cluster is None or receiver.node is None or receiver.cluster is None:
        return None
    for link in spec.links:
        if (link.source, link.to) == (sender.cluster.name, receiver.cluster.name):
            address = link.endpoints.get(receiver.node.name)
            return Endpoint.parse(address or advertised_address(receiver.node))
    return None
