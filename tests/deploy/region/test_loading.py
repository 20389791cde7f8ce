"""Region files: what is read of right ones, and their schema. `tests/golden` has wrong ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deploy.region.spec.checks import check_region
from deploy.region.spec.loading import (
    load_region,
    missing_models,
    missing_packages,
    parse_region,
)
from deploy.region.spec.region import RegionSpec, region_schema
from kvmanager.config_files.problems import FileError

EXAMPLE = Path(__file__).parents[3] / "deploy" / "region" / "examples" / "demo.yaml"
VARIABLES = {"MODEL": "/models/tiny"}


def with_change(old: str, new: str) -> str:
    text = EXAMPLE.read_text()
    assert old in text
    return text.replace(old, new, 1)


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


def test_a_region_without_prefill_cluster_is_allowed() -> None:
    region = parse_region(EXAMPLE.read_text(), VARIABLES)
    alone = region.model_copy(update={"clusters": region.pd_clusters, "links": ()})
    assert check_region(alone) == []


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


def test_what_an_engine_says_itself_is_no_problem_of_the_file(tmp_path: Path) -> None:
    poet = tmp_path / "poet"

    def problems(options: str = "", model: str = str(tmp_path)) -> list[str]:
        text = with_change("max_model_len: 8192", f"adapters: {{poet: {poet}}}\n{options}")
        region = parse_region(text, {"MODEL": model})
        return [f"{item.where}: {item.message}" for item in missing_models(region)]

    poet.mkdir()
    assert problems() == problems(model="org/name-on-a-hub") == []
    for settings in ({"r": 16}, {"r": "x"}, {}, {"r": 8, "rank_pattern": None}):
        (poet / "adapter_config.json").write_text(json.dumps(settings))
        assert problems() == []
    (poet / "adapter_config.json").write_text(json.dumps({"r": 8, "rank_pattern": {"q_proj": 20}}))
    said = "models[0].adapters.poet: its rank is"
    assert problems() == [f"{said} 20; write max_lora_rank: 32"]
    assert problems("    max_lora_rank: 32\n") == []
    (poet / "adapter_config.json").write_text(json.dumps({"r": 1024}))
    assert problems() == [f"{said} 1024; vLLM serves none"]


@pytest.mark.parametrize(
    "host", ["localhost", "GPU_Node-A.example", "10.0.0.7", "FD00:0::2", "xn--bcher-kva.example"]
)
def test_names_and_addresses_are_hosts(host: str) -> None:
    at = f"[{host}]:7100" if ":" in host else f"{host}:7100"
    node = f'host: "{host}"\n        listen: "{host}"\n        agent: {{advertise: "{at}", arena_'
    text = with_change("host: 127.0.0.1", f'host: "{host}"\n  api_keys_env: KEYS')
    parse_region(text.replace("agent: {arena_", node, 1), VARIABLES)  # refuses what is none
