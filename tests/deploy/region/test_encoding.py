"""Instances that encode images apart: what a region's file may say, and what their engines get."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from deploy.region.launch.plan import Planner
from deploy.region.launch.ports import resolve_ports
from deploy.region.launch.process_files import gateway_file
from deploy.region.launch.rundir import RunDirectory
from deploy.region.spec.checks import check_region
from deploy.region.spec.region import RegionSpec

Rows = list[dict[str, Any]]


def region(
    pd: Rows, prefill: Rows | None = None, *, agent: dict[str, Any] | None = None, **model: Any
) -> RegionSpec:
    """Two clusters of one node each with these instances."""

    def cluster(kind: str, rows: Rows) -> dict[str, Any]:
        node = {"name": f"{kind}-node", "instances": rows, "agent": agent or {}}
        return {"name": kind, "kind": kind, "nodes": [node]}

    far = prefill or [{"name": "far"}]
    return RegionSpec.model_validate(
        {
            "models": [{"name": "m", "path": "/models/m", "kv_space_gib": 1} | model],
            "clusters": [cluster("pd", pd), cluster("prefill", far)],
            "links": [{"from": "prefill", "to": "pd"}],
        }
    )


def planner(spec: RegionSpec) -> Planner:
    root = Path("/run/demo")
    resolved = resolve_ports(spec, is_free=lambda _host, _port: True)
    return Planner(resolved, RunDirectory(root, root / "sockets"), {"PATH": "/bin"})


def engines(spec: RegionSpec) -> dict[str, list[str]]:
    """The command lines of all engines."""
    made = planner(spec).processes()
    return {item.name: list(item.process.argv) for item in made if item.kind == "engine"}


def encoder_roles(spec: RegionSpec) -> dict[str, str | None]:
    """The `ec_role` that each engine is started with."""
    found: dict[str, str | None] = {}
    for name, argv in engines(spec).items():
        found[name] = None
        if "--ec-transfer-config" in argv:
            config = json.loads(argv[argv.index("--ec-transfer-config") + 1])
            assert config["ec_connector_extra_config"]["instance"] == name
            found[name] = config["ec_role"]
    return found


def problems(spec: RegionSpec) -> dict[str, str]:
    return {problem.where: problem.message for problem in check_region(spec)}


ENCODE, PREFILL, DECODE = (
    {"name": role[0], "role": role} for role in ("encode", "prefill", "decode")
)
THREE = [ENCODE, PREFILL, DECODE]


def test_without_an_instance_that_encodes_no_engine_changes() -> None:
    assert encoder_roles(region([PREFILL, DECODE])) == {"p": None, "d": None, "far": None}


def test_the_engines_of_a_cluster_share_embeddings_with_the_one_that_encodes() -> None:
    spec = region(THREE, prefix_caching=True, adapters={"poet": "/poet"}, weights="w1")
    assert problems(spec) == {}
    assert encoder_roles(spec) == {"e": "ec_producer", "p": "ec_both", "d": "ec_both", "far": None}
    argv = engines(spec)["e"]
    assert "--no-enable-prefix-caching" in argv
    assert not {"--kv-transfer-config", "--kv-events-config", "--enable-lora"} & set(argv)
    config = json.loads(argv[argv.index("--ec-transfer-config") + 1])
    assert config["ec_connector_extra_config"]["weights"] == "w1"
    assert "--kv-transfer-config" in engines(spec)["p"]


def test_a_whole_model_and_one_that_decodes_encode_for_others_too() -> None:
    whole = region([ENCODE | {"whole_model": True}, PREFILL, DECODE])
    assert set(encoder_roles(whole).values()) == {"ec_both", None}
    assert "--kv-transfer-config" in engines(whole)["e"]
    also = region([PREFILL, DECODE | {"encodes": True}])
    assert encoder_roles(also) == {"p": "ec_both", "d": "ec_both", "far": None}
    assert problems(whole) == problems(also) == {}


def test_a_prefill_cluster_encodes_for_itself() -> None:
    spec = region([DECODE], [{"name": "far"}, {"name": "eye", "role": "encode"}])
    assert problems(spec) == {}
    assert encoder_roles(spec) == {"d": None, "far": "ec_both", "eye": "ec_producer"}


def test_only_engines_of_the_same_model_share() -> None:
    rows = [ENCODE | {"model": "m"}, DECODE | {"model": "m"}, {"name": "n", "model": "n"}]
    spec = region(rows, [{"name": "far", "model": "n"}])
    other = spec.models[0].model_copy(update={"name": "n"})
    spec = spec.model_copy(update={"models": (*spec.models, other)})
    assert problems(spec) == {}
    assert encoder_roles(spec) == {"e": "ec_producer", "d": "ec_both", "n": None, "far": None}


def test_an_engine_for_text_alone_shares_nothing() -> None:
    rows = [ENCODE, PREFILL, DECODE | {"args": ["--language_model_only"]}]
    assert encoder_roles(region(rows))["d"] is None


def test_a_node_that_only_encodes_keeps_no_prefixes() -> None:
    node = {"name": "eyes", "instances": [ENCODE]}
    spec = region([PREFILL, DECODE])
    first = spec.clusters[0]
    nodes = (*first.nodes, type(first.nodes[0]).model_validate(node))
    spec = spec.model_copy(
        update={"clusters": (first.model_copy(update={"nodes": nodes}), spec.clusters[1])}
    )
    assert problems(spec) == {}
    files = planner(spec).files()
    agents = {path.name: json.loads(text) for path, text in files.items() if "agent." in path.name}
    assert agents["agent.eyes.json"]["cache_gib"] == 0
    assert "e" not in agents["agent.pd-node.json"]["kv_events"]
    assert set(agents["agent.pd-node.json"]["kv_events"]) == {"p", "d"}


def test_fronts_know_what_their_instances_can_become() -> None:
    rows = [ENCODE | {"whole_model": True}, PREFILL, DECODE | {"encodes": True}]
    made = planner(region(rows, [{"name": "far"}, {"name": "eye", "role": "encode"}]))
    file = gateway_file(made.resolved, made.directory)
    found = {item.name: item for source in (*file.pd, *file.prefill) for item in source.instances}
    assert found["e"].roles == found["d"].roles == ("encode", "prefill", "decode")
    assert found["d"].encodes
    assert (found["eye"].role, found["eye"].roles) == ("encode", ("encode",))
    assert found["far"].encoder_role == "ec_both"


@pytest.mark.parametrize(
    ("spec", "where", "message"),
    [
        (region([ENCODE, PREFILL]), "clusters[0]", "no instance decodes"),
        (region([DECODE], [ENCODE]), "clusters[1]", "no instance prefills"),
        (region([DECODE], [{"name": "far", "role": "both"}]),
         "clusters[1].nodes[0].instances[0].role", "write prefill or encode"),
        (region([PREFILL | {"whole_model": True}, DECODE]),
         "clusters[0].nodes[0].instances[0].whole_model", "has the whole model anyway"),
        (region([DECODE], [{"name": "far"}, ENCODE | {"whole_model": True}]),
         "clusters[1].nodes[0].instances[1].whole_model", "stay as they are"),
        (region([PREFILL | {"encodes": True}, DECODE]),
         "clusters[0].nodes[0].instances[0].encodes", "role prefill encodes anyway"),
        (region([DECODE], [{"name": "far", "encodes": True}]),
         "clusters[1].nodes[0].instances[0].encodes", "encode what they prefill"),
        (region([ENCODE | {"args": ["--language-model-only"]}, DECODE]),
         "clusters[0].nodes[0].instances[0].args", "and e is to encode; remove one"),
        (region([ENCODE, DECODE], pipeline_parallel_size=2),
         "clusters[0].nodes[0].instances[0].pipeline_parallel_size", "write .* 1 here"),
        (region([ENCODE, DECODE], agent={"embedding_gib": 0}),
         "clusters[0].nodes[0].agent.embedding_gib", "e, d would share them"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named_with_its_mend(
    spec: RegionSpec, where: str, message: str
) -> None:
    found = problems(spec)
    assert where in found
    assert re.search(message, found[where]), found[where]


def test_an_encoder_that_nobody_uses_is_named() -> None:
    rows = [ENCODE | {"model": "m"}, DECODE | {"model": "n"}]
    spec = region(rows, [{"name": "far", "model": "n"}])
    other = spec.models[0].model_copy(update={"name": "n"})
    found = problems(spec.model_copy(update={"models": (*spec.models, other)}))
    assert "nobody takes what e encodes" in found["clusters[0].nodes[0].instances[0].role"]
    wrong = region([ENCODE | {"model": "typo"}, DECODE], agent={"embedding_gib": 0})
    assert set(problems(wrong)) == {"clusters[0].nodes[0].instances[0].model"}
