"""Kept arenas of a region: what they are called, which nodes have one, how they go."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.region.launch.arenas import arena_name, discard_arenas, kept_arenas
from deploy.region.spec.loading import parse_region
from deploy.region.spec.region import AgentSpec, NodeSpec, RegionSpec
from kvmanager.agent.config import AgentConfig
from kvmanager.arena import Arena

EXAMPLE = Path(__file__).parents[3] / "deploy" / "region" / "examples" / "demo.yaml"
ROOT = Path("/run/demo")


def region(arena_dir: Path = Path("/dev/shm"), **agent: object) -> RegionSpec:
    """The example with these settings for every agent."""
    parsed = parse_region(EXAMPLE.read_text(), {"MODEL": "/models/tiny"})
    changes = {"arena_dir": arena_dir, "arena_gib": 0.001, "landing_gib": None} | agent

    def changed(node: NodeSpec) -> NodeSpec:
        settings = node.agent.model_dump() | changes
        return node.model_copy(update={"agent": AgentSpec.model_validate(settings)})

    clusters = tuple(
        cluster.model_copy(update={"nodes": tuple(map(changed, cluster.nodes))})
        for cluster in parsed.clusters
    )
    return parsed.model_copy(update={"clusters": clusters})


def names(spec: RegionSpec, root: Path = ROOT) -> list[str]:
    return [name for _, name in kept_arenas(spec, root)]


def test_names_tell_regions_nodes_and_runs_apart() -> None:
    spec = region()
    first, second = names(spec)
    assert first.startswith("demo-a1-")
    assert second.startswith("demo-b1-")
    assert names(spec) == [first, second]
    assert not set(names(spec)) & set(names(spec, Path("/run/other")))
    assert not set(names(spec)) & set(names(spec.model_copy(update={"name": "demo2"})))


def test_the_longest_names_are_not_too_long_for_an_agent() -> None:
    spec = region().model_copy(update={"name": "r" * 63})
    node = spec.clusters[0].nodes[0].model_copy(update={"name": "n." + "x" * 61})
    name = arena_name(spec, node, ROOT)
    assert name is not None
    assert AgentConfig(arena_name=name).arena_name == name


@pytest.mark.parametrize("agent", [{"keep_arena": False}, {"cache_gib": 0}])
def test_a_node_may_keep_nothing(agent: dict[str, object]) -> None:
    assert names(region(**agent)) == []


def test_without_prefix_caching_there_is_nothing_to_keep() -> None:
    spec = region()
    models = tuple(model.model_copy(update={"prefix_caching": False}) for model in spec.models)
    assert names(spec.model_copy(update={"models": models})) == []


def test_arenas_are_discarded_unless_an_agent_holds_them(tmp_path: Path) -> None:
    spec = region(tmp_path)
    first, second = names(spec)
    left = Arena.create(tmp_path, 1, name=first)
    left.close(keep=True)
    held = Arena.create(tmp_path, 1, name=second)
    removed = discard_arenas(spec, ROOT)
    assert removed == [left.path]
    assert not left.path.exists()
    assert held.path.exists()
    held.close(keep=True)
    assert discard_arenas(spec, ROOT) == [held.path]
    assert discard_arenas(spec, ROOT) == []
