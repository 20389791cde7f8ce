"""Which two agents are meant: names in a running region, or addresses of control ports.

Reads the region's files; speaks to no agent.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from deploy.command_line import CommandFailed
from deploy.region.launch.ports import advertised_address
from deploy.region.launch.rundir import RegionState, RunDirectoryError, known_runs, read_state
from deploy.region.spec.region import ClusterSpec, NodeSpec, RegionSpec
from kvmanager.config_files.fields import tls_files
from kvmanager.config_files.problems import suggestion
from transport import Endpoint, TlsFiles


class UnknownAgent(CommandFailed):
    """No such agent; the message says what there is."""

    exit_status = 2


@dataclass(frozen=True, slots=True)
class AgentPlace:
    """An agent: what to call it, where its control port is, and where it is in a region."""

    name: str
    control: str
    cluster: ClusterSpec | None = None
    node: NodeSpec | None = None


@dataclass(frozen=True, slots=True)
class Pair:
    """A path to measure. `via`: where the sender connects, if not where the receiver says."""

    sender: AgentPlace
    receiver: AgentPlace
    tls: TlsFiles | None
    via: Endpoint | None


def find_pair(
    sender: str, receiver: str, run_dir: Path | None, base: Path, region: str | None
) -> Pair:
    """Raises UnknownAgent, RunDirectoryError."""
    # Two addresses need no region: the agents may be on any hosts.
    if is_address(sender) and is_address(receiver):
        return Pair(AgentPlace(sender, sender), AgentPlace(receiver, receiver), None, None)
    state = _running(run_dir, base, region)
    spec = RegionSpec.model_validate_json(Path(state.region_file).read_bytes())
    places = _places(spec, state)
    first, second = _find(sender, places), _find(receiver, places)
    return Pair(first, second, tls_files(spec.security.tls), _via(spec, first, second))


def is_address(text: str) -> bool:
    """Whether it is "host:port" rather than a name."""
    try:
        return Endpoint.parse(text).port > 0
    except ValueError:
        return False


def _running(run_dir: Path | None, base: Path, region: str | None) -> RegionState:
    roots = [run_dir] if run_dir else [base / region] if region else known_runs(base)
    hint = "; start one with `prfaas up`, or give control ports as host:port"
    if not roots:
        raise RunDirectoryError(f"no region runs under {base}{hint}")
    if len(roots) > 1:
        names = ", ".join(root.name for root in roots)
        raise UnknownAgent(f"several regions run; give --region, one of: {names}")
    state = read_state(roots[0])
    if state is None or not state.launcher_lives():
        raise RunDirectoryError(f"no region runs in {roots[0]}{hint}")
    return state


def _places(spec: RegionSpec, state: RegionState) -> dict[str, AgentPlace]:
    """By node, cluster (its first node) and instance; nodes win over the others."""
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
    """What KVCache from that cluster to that node connects to: a tunnel or an emulated link."""
    # An agent outside the region is reached where it advertises itself.
    if sender.cluster is None or receiver.node is None or receiver.cluster is None:
        return None
    for link in spec.links:
        if (link.source, link.to) == (sender.cluster.name, receiver.cluster.name):
            address = link.endpoints.get(receiver.node.name)
            return Endpoint.parse(address or advertised_address(receiver.node))
    return None
