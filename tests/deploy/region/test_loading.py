"""Region files: what is accepted, and that each error says where and what to write."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from deploy.region.spec.checks import check_region
from deploy.region.spec.loading import (
    load_region,
    missing_models,
    missing_packages,
    parse_region,
)
from deploy.region.spec.region import RegionInstance, RegionSpec, region_schema, role_of
from kvmanager.config_files.problems import FileError

EXAMPLE = Path(__file__).parents[3] / "deploy" / "region" / "examples" / "demo.yaml"
VARIABLES = {"MODEL": "/models/tiny"}


def with_change(old: str, new: str) -> str:
    text = EXAMPLE.read_text()
    assert old in text
    return text.replace(old, new, 1)


def problems_of(text: str) -> dict[str, str]:
    with pytest.raises(FileError) as caught:
        parse_region(text, VARIABLES)
    return {problem.where: problem.message for problem in caught.value.problems}


def test_the_example_is_right() -> None:
    region = load_region(EXAMPLE, VARIABLES)
    assert region.pd_clusters[0].name == "pd-b"
    assert [cluster.name for cluster in region.prefill_clusters] == ["prefill-a"]
    assert region.models[0].path == "/models/tiny"
    assert region.models[0].dtype == "auto"
    (link,) = region.links_from("prefill-a")
    assert link.name == "prefill-a-to-pd-b"
    assert link.emulate is not None
    assert link.emulate.rtt == "20ms"
    roles = [role_of(item, c) for c in region.clusters for item in c.instances]
    assert roles == ["prefill", "prefill", "decode"]


@pytest.mark.parametrize(
    ("old", "new", "where", "message"),
    [
        ("agent: {a", "agnt: {a", "clusters[0].nodes[0].agnt", "did you mean 'agent'"),
        ("rate: 1Gbit", "rate: 1Gib", "links[0].emulate.rate", "write 1Gbit"),
        ("rtt: 20ms", "rtt: 20", "links[0].emulate.rtt", "write 20ms"),
        ("rate: 1Gbit", "rate: 1kbit", "links[0].emulate.rate", "at least 1Mbit"),
        ("kind: pd", "kind: dp", "clusters[1].kind", "'prefill' or 'pd'"),
        ("kind: pd", "kind: prefill", "clusters", "no PD cluster"),
        ("kind: prefill", "kind: prefill\n    spill: never",
         "clusters[0].spill", "of a PD cluster"),
        ("kind: pd", "kind: pd\n    spill: always", "clusters[1].spill", "'never', 'overflow'"),
        ("links:", "uplinks: [{cluster: pd-b, way: egress, rate: 1Gbit}]\nlinks:",
         "uplinks[0].way", "write ingress for pd-b"),
        ("links:", "uplinks: [{cluster: pd-c, way: ingress, rate: 1Gbit}]\nlinks:",
         "uplinks[0].cluster", "did you mean 'pd-b'"),
        ("port: 8000", "port: 8000\n  home: pd-c", "gateway.home", "did you mean 'pd-b'"),
        ("port: 8000", "port: 8000\n  homes: {acme: prefill-a}",
         "gateway.homes.acme", "known here: pd-b"),
        ("port: 8000", "port: 8000\n  homes: {acme: pd-b}", "gateway.homes", "give api_keys_file"),
        ("port: 8000", "port: 80000", "gateway.port", "80000: Input should be less"),
        ("from: prefill-a", "from: prefil-a", "links[0].from", "did you mean 'prefill-a'"),
        ("to: pd-b", "to: prefill-a", "links[0].to", "flows from prefill to pd"),
        ("name: b1-decode", "name: b1-prefill", "clusters[1].nodes[0].instances[1].name", "second"),
        ("name: b1-decode", "name: b1 d", "clusters[1].nodes[0].instances[1].name", "use letters"),
        ("name: b1-decode", "name: gateway", "clusters[1].nodes[0].instances[1].name", "another"),
        ("role: decode", "role: prefill", "clusters[1]", "no instance decodes"),
        ("kind: prefill", "kind: prefill\n    hand_off: nixl", "clusters[0].hand_off",
         "write it in the PD cluster"),
        ("kind: pd", "kind: pd\n    hand_off: nixl", "clusters[1].hand_off", "there is one"),
        ("kind: pd", "kind: pd\n    hand_off: rdma", "clusters[1].hand_off", "nixl"),
        ("landing_gib: 0.75", "landing_gib: 2", "clusters[1].nodes[0].agent.landing_gib", "arena"),
        ("port: 8000", "port: 8000\n  directory: {kind: redis, url: 'redis://:secret@far:6379'}",
         "gateway.directory.url", "far is another host and redis:// is not encrypted"),
        ("port: 8000", "port: 8000\n  shared: {redis: 'redis://:secret@far:6379'}",
         "gateway.shared.redis", "far is another host and redis:// is not encrypted"),
        ("port: 8000", "port: 8000\n  shared: {}", "gateway", "shared needs redis"),
        ("host: 127.0.0.1\n  port", "host: 0.0.0.0\n  port", "gateway.host", "give api_keys_file"),
        ("links:", "security: {region_key: k, tls: {cert: c, key: k, ca: a}}\nlinks:",
         "security.region_key", "remove it or `tls`"),
        ("links:", "security: {trusted_network: true, region_key: k}\nlinks:",
         "security.trusted_network", "contradicts `region_key`"),
        ("links:", "security: {trusted_network: true, tls: {cert: c, key: k, ca: a}}\nlinks:",
         "security.trusted_network", "contradicts `tls`"),
        ("links:", "security: {granting_key: k}\nlinks:",
         "security.granting_key", "give `granting_keys` too"),
        ("links:", "security: {granting_keys: p}\nlinks:",
         "security.granting_keys", "give `granting_key` too"),
        ("links:", "security: {trusted_network: true, granting_key: k, granting_keys: p}\nlinks:",
         "security.trusted_network", "contradicts `granting_key`"),
        ("max_model_len: 8192", "max_model_len: one", "models[0].max_model_len", "write 32Ki"),
        ("max_model_len: 8192", "max_model_len: 8192\n    staging_mib: 0",
         "models[0].staging_mib", "greater than or equal to 1"),
        ("max_model_len: 8192", "max_model_len: 8192\n    staging_mib: 20000",
         "models[0].staging_mib", "less than or equal to 16384"),
        ("max_model_len: 8192", "max_model_len: 8192\n    staging_mib: 64",
         "models[0].staging_mib", "copy without staging memory"),
        ("name: a1-prefill", "name: a1-prefill\n            model: dmo",
         "clusters[0].nodes[0].instances[0].model", "did you mean 'demo'"),
        ("name: a1-prefill", "name: a1-prefill\n            role: decode",
         "clusters[0].nodes[0].instances[0].role", "leave it out"),
        ("name: a1-prefill", "name: a1-prefill\n            args: [--max-num-seqs=8]",
         "clusters[0].nodes[0].instances[0].args", "write decode_slots instead"),
        ("name: a1-prefill", "name: a1-prefill\n            args: ['--lora-modules=poet=/a']",
         "clusters[0].nodes[0].instances[0].args", "made of the model's adapters"),
        ("max_model_len: 8192", "max_model_len: 8192\n    args: [--enable-lora]",
         "models[0].args", "made of the model's adapters"),
        ("max_model_len: 8192", "max_model_len: 8192\n    args: [--max_cpu_loras, '1']",
         "models[0].args", "--max-cpu-loras: it is made of the model's adapters"),
        ("name: a1-prefill", "name: a1-prefill\n            args: [--max-loras=1]",
         "clusters[0].nodes[0].instances[0].args", "--max-loras: it is made of the model"),
        ("max_model_len: 8192", "max_model_len: 8192\n    adapters: {demo: ./poet}",
         "models[0].adapters.demo", "another model or adapter is called 'demo'"),
        ("max_model_len: 8192", "max_model_len: 8192\n    adapters: {poet: ''}",
         "models[0].adapters.poet", "at least 1"),
        ("max_model_len: 8192", "max_model_len: 8192\n    max_lora_rank: 64",
         "models[0].max_lora_rank", "there are no adapters"),
        ("port: 8000", "port: 8000\n  max_body_bytes: huge",
         "gateway.max_body_bytes", "such as 16MiB"),
        ("port: 8000", "port: 8000\n  max_body_bytes: 100MiB",
         "gateway.max_body_bytes", "larger one than 48"),
        ("arena_gib: 0.5", "arena_gib: 0.5, advertise: here",
         "clusters[0].nodes[0].agent.advertise", "host:port"),
        ("arena_gib: 0.5", "arena_gib: 0.5, advertise: ['h:1', here]",
         "clusters[0].nodes[0].agent.advertise", "'here' is not host:port"),
        ("arena_gib: 0.5", "arena_gib: 0.5, transport: {speed: 1}",
         "clusters[0].nodes[0].agent.transport.speed", "num_connections"),
        ("arena_gib: 0.5", "arena_gib: 0.5, cache_gib: 0.6",
         "clusters[0].nodes[0].agent.cache_gib", "raise arena_gib"),
        ("arena_gib: 0.5", "arena_gib: 0.5, ssd_dir: /ssd",
         "clusters[0].nodes[0].agent", "give ssd_gib too"),
        ("arena_gib: 0.5", "arena_gib: 0.5, ssd_gib: 1",
         "clusters[0].nodes[0].agent", "give ssd_dir too"),
        ("arena_gib: 0.5", "arena_gib: 0.5, eviction: fifo",
         "clusters[0].nodes[0].agent.eviction", "'lru'"),
        ("arena_gib: 0.5", "arena_gib: 0.5, placement: {often: true}",
         "clusters[0].nodes[0].agent.placement.often", "every_tokens"),
        ("arena_gib: 0.5", "arena_gib: 0.5, placement: {ends: 2}",
         "clusters[0].nodes[0].agent.placement.ends", "boolean"),
        ("port: 8000", "port: 8000\n  directory: {kind: redis}",
         "gateway.directory", "needs url"),
        ("port: 8000", "port: 8000\n  shared_caches: {team: [acme]}",
         "gateway.shared_caches", "give api_keys_file"),
        ("port: 8000", "port: 8000\n  scheduling: {admission: {tenants: {acme: {max_tokens: 1}}}}",
         "gateway.scheduling.admission.tenants", "give api_keys_file"),
        ("port: 8000", "port: 8000\n  operators: [ops]", "gateway.operators", "give api_keys_file"),
        ("port: 8000", "port: 8000\n  priority_tenants: [acme]",
         "gateway.priority_tenants", "give api_keys_file"),
        ("port: 8000", "port: 8000\n  admin: 0.0.0.0:8001", "gateway.admin", "change roles"),
        ("port: 8000", "port: 8000\n  admin: 127.0.0.1:8000", "gateway.admin", "taken by gateway"),
        ("arena_gib: 0.5", "arena_gib: 0.5, data_port: 8000",
         "clusters[0].nodes[0].agent.data_port", "taken by gateway.port"),
        ("to: pd-b", "to: pd-b\n    endpoints: {b2: 'h:1'}",
         "links[0].endpoints.b2", "known here: b1"),
        ("to: pd-b", "to: pd-b\n    endpoints: {b1: 'h:1'}", "links[0].endpoints", "emulate"),
    ],
)  # fmt: skip
def test_errors_name_path_and_fix(old: str, new: str, where: str, message: str) -> None:
    problems = problems_of(with_change(old, new))
    assert where in problems
    assert re.search(message, problems[where]), problems[where]


def test_decode_slots_fit_into_a_step() -> None:
    stepped = with_change("max_num_batched_tokens: 1024", "max_num_batched_tokens: 64")
    region = parse_region(stepped, VARIABLES)
    assert [region.decode_slots_of(item) for item in region.pd_clusters[0].instances] == [64, 64]
    problems = problems_of(stepped.replace("role: decode", "role: decode, decode_slots: 65"))
    message = problems["clusters[1].nodes[0].instances[1].decode_slots"]
    assert message.startswith("65 is more than max_num_batched_tokens of demo, 64")


def test_two_links_between_the_same_clusters_are_a_mistake() -> None:
    link = "  - from: prefill-a\n    to: pd-b\n"
    problems = problems_of(EXAMPLE.read_text().rstrip() + "\n" + link)
    assert "a second link from 'prefill-a' to 'pd-b'" in problems["links[1].from"]


def test_a_missing_link_is_asked_for() -> None:
    text = EXAMPLE.read_text()
    problems = problems_of(text[: text.index("links:")])
    assert "{from: prefill-a, to: " in problems["links"]


def test_all_problems_come_at_once_with_lines() -> None:
    text = with_change("rate: 1Gbit", "rate: fast").replace("dtype:", "dtpye:")
    with pytest.raises(FileError) as caught:
        parse_region(text, VARIABLES, source="region.yaml")
    first, *rest = str(caught.value).splitlines()
    assert first == "region.yaml: 2 problems"
    assert len(rest) == 2
    lines = {problem.where: problem.line for problem in caught.value.problems}
    expected = {"models[0].dtpye": "dtpye:", "links[0].emulate.rate": "emulate:"}
    for where, words in expected.items():
        (number,) = [
            n for n, line in enumerate(text.splitlines(), 1) if line.strip().startswith(words)
        ]
        assert lines[where] == number


def test_variables_are_filled_in() -> None:
    text = with_change("port: 8000", "port: ${PORT:-8123}")
    assert parse_region(text, VARIABLES).gateway.port == 8123
    assert parse_region(text, VARIABLES | {"PORT": "9000"}).gateway.port == 9000
    with pytest.raises(FileError, match=r"models\[0\].path.*MODEL is not set"):
        parse_region(text, {})


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "local-model").mkdir()
    text = with_change("path: ${MODEL}", "path: ./weights").replace(
        "port: 8000", "port: 8000\n  api_keys_file: keys"
    )
    path = tmp_path / "region.yaml"
    path.write_text(text)
    region = load_region(path, {})
    assert region.models[0].path == str(tmp_path / "weights")
    assert region.gateway.api_keys_file == tmp_path / "keys"
    path.write_text(with_change("path: ${MODEL}", "path: local-model"))
    assert load_region(path, {}).models[0].path == str(tmp_path / "local-model")
    path.write_text(with_change("path: ${MODEL}", "path: Org/model-on-the-hub"))
    assert load_region(path, {}).models[0].path == "Org/model-on-the-hub"


def test_broken_files_are_explained(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="cannot be read"):
        load_region(tmp_path / "nothing.yaml", {})
    with pytest.raises(FileError, match=r"line 2.*not valid YAML"):
        parse_region("a: 1\nb: [", {})
    with pytest.raises(FileError, match="is a mapping"):
        parse_region("- a\n", {})


def test_a_region_without_prefill_cluster_is_allowed() -> None:
    region = parse_region(EXAMPLE.read_text(), VARIABLES)
    alone = region.model_copy(update={"clusters": region.pd_clusters, "links": ()})
    assert check_region(alone) == []


def test_json_round_trip() -> None:
    region = load_region(EXAMPLE, VARIABLES)
    text = region.model_dump_json(by_alias=True)
    assert RegionSpec.model_validate_json(text) == region


def test_the_schema_describes_the_file() -> None:
    schema = json.loads(json.dumps(region_schema()))
    assert set(schema["required"]) == {"models", "clusters"}
    link = schema["$defs"]["LinkSpec"]
    assert set(link["required"]) == {"from", "to"}
    assert link["additionalProperties"] is False


def test_every_field_of_the_schema_is_described() -> None:
    schema = region_schema()
    fields = {
        f"{name}.{key}": field
        for name, section in {"RegionSpec": schema, **schema["$defs"]}.items()
        for key, field in section["properties"].items()
    }
    assert len(fields) > 100
    assert [name for name, field in fields.items() if not field.get("description")] == []


def test_quantities_may_have_units() -> None:
    text = with_change("arena_gib: 0.5", "arena_gib: 512MiB, transport: {idle_timeout_s: 20s}")
    text = text.replace("threshold_tokens: 512", "threshold_tokens: 8k")
    region = parse_region(text, VARIABLES)
    agent = region.clusters[0].nodes[0].agent
    assert (agent.arena_gib, agent.transport.idle_timeout_s) == (0.5, 20.0)
    assert region.gateway.threshold_tokens == 8000
    assert RegionSpec.model_validate_json(region.model_dump_json(by_alias=True)) == region


def test_nixl_is_asked_for_where_its_engines_start(monkeypatch: pytest.MonkeyPatch) -> None:
    region = load_region(EXAMPLE, VARIABLES)
    assert missing_packages(region) == []
    prefill, pd = region.clusters
    pd = pd.model_copy(update={"hand_off": "nixl"})
    region = region.model_copy(update={"clusters": (prefill, pd)})
    monkeypatch.setattr("deploy.region.spec.loading.find_spec", lambda name: None)
    (problem,) = missing_packages(region, ["b1"])
    assert problem.where == "clusters[1].hand_off"
    assert "pip install nixl" in problem.message
    assert missing_packages(region, ["a1"]) == []
    monkeypatch.setattr("deploy.region.spec.loading.find_spec", lambda name: name)
    assert missing_packages(region) == []


def test_nixl_needs_nodes_that_are_reached_where_they_listen() -> None:
    prefill, pd = load_region(EXAMPLE, VARIABLES).clusters
    (node,) = pd.nodes
    other = node.model_copy(
        update={
            "name": "b2",
            "listen": "0.0.0.0",
            "instances": (RegionInstance(name="b2-decode", role="decode"),),
        }
    )
    pd = pd.model_copy(update={"nodes": (node, other), "hand_off": "nixl"})
    region = load_region(EXAMPLE, VARIABLES).model_copy(update={"clusters": (prefill, pd)})
    (problem,) = [item for item in check_region(region) if "hand_off" in item.where]
    assert "b2 does not" in problem.message


def with_nixl(*instances: RegionInstance, **model: int) -> list[str]:
    """What is said of `hand_off` where the PD cluster has a second node with these instances."""
    region = load_region(EXAMPLE, VARIABLES)
    prefill, pd = region.clusters
    (node,) = pd.nodes
    other = node.model_copy(update={"name": "b2", "instances": instances})
    pd = pd.model_copy(update={"nodes": (node, other), "hand_off": "nixl"})
    models = (region.models[0].model_copy(update=model),)
    region = region.model_copy(update={"clusters": (prefill, pd), "models": models})
    return [item.message for item in check_region(region) if "hand_off" in item.where]


def test_nixl_needs_instances_of_a_model_that_are_cut_the_same() -> None:
    equal = RegionInstance(name="b2-decode", role="decode", tensor_parallel_size=1, block_size=16)
    assert with_nixl(equal, block_size=16) == []
    wider = RegionInstance(name="b2-wide", tensor_parallel_size=2, block_size=32)
    assert with_nixl(wider, block_size=16) == [
        f"nixl needs one {name} for all instances of demo: b1-prefill has {value}, "
        f"b2-wide {other}; make them equal, or write transport"
        for name, value, other in (("tensor_parallel_size", 1, 2), ("block_size", 16, 32))
    ]
    (problem,) = with_nixl(equal)
    assert "b1-prefill has none written, b2-decode 16" in problem
    assert with_nixl(RegionInstance(name="b2", model="unknown", block_size=16)) == []


def test_nixl_is_not_for_pipeline_stages() -> None:
    prefill, pd = load_region(EXAMPLE, VARIABLES).clusters
    (node,) = pd.nodes
    staged = RegionInstance(name="b2-decode", role="decode", pipeline_parallel_size=2)
    other = node.model_copy(update={"name": "b2", "instances": (staged,)})
    pd = pd.model_copy(update={"nodes": (node, other), "hand_off": "nixl"})
    region = load_region(EXAMPLE, VARIABLES).model_copy(update={"clusters": (prefill, pd)})
    (problem,) = check_region(region)
    assert problem.where == "clusters[1].nodes[1].instances[0].pipeline_parallel_size"
    assert "exclude each other" in problem.message


def test_a_model_that_is_not_here_is_named(tmp_path: Path) -> None:
    (problem,) = missing_models(load_region(EXAMPLE, VARIABLES))
    assert problem.where == "models[0].path"
    assert "/models/tiny" in problem.message
    assert missing_models(load_region(EXAMPLE, {"MODEL": str(tmp_path)})) == []
    assert missing_models(load_region(EXAMPLE, {"MODEL": "org/name-on-a-hub"})) == []


def with_adapters(path: str, options: str = "") -> str:
    return with_change("max_model_len: 8192", f"adapters: {{poet: {path}}}\n{options}")


def test_an_adapters_path_is_relative_to_the_file_unless_it_is_on_a_hub(tmp_path: Path) -> None:
    for written, path in (("./poet", str(tmp_path / "poet")), ("org/poet", "org/poet")):
        region = parse_region(with_adapters(written), VARIABLES, directory=tmp_path)
        assert region.models[0].adapters == {"poet": path}


def test_an_adapter_that_engines_would_not_load_is_named(tmp_path: Path) -> None:
    def problem(options: str = "") -> tuple[str, str]:
        text = with_adapters(str(tmp_path / "poet"), options)
        found = missing_models(parse_region(text, {"MODEL": str(tmp_path)}))
        return ("", "") if not found else (found[0].where, found[0].message)

    assert problem()[0] == "models[0].adapters.poet"
    assert "poet here; a relative path starts at" in problem()[1]
    (tmp_path / "poet").mkdir()
    assert problem() == ("", ""), "the engine says what else is wrong with it"
    config = tmp_path / "poet" / "adapter_config.json"
    for settings in ({"r": 16}, {"r": "x"}, {}, {"r": 8, "rank_pattern": None}):
        config.write_text(json.dumps(settings))
        assert problem() == ("", "")
    config.write_text(json.dumps({"r": 8, "rank_pattern": {"q_proj": 20}}))
    assert problem() == ("models[0].adapters.poet", "its rank is 20; write max_lora_rank: 32")
    assert problem("    max_lora_rank: 32\n") == ("", "")
    config.write_text(json.dumps({"r": 1024}))
    assert problem()[1] == "its rank is 1024; vLLM serves none"
