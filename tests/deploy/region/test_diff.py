"""`prfaas region diff`: what a change of a region's file starts, stops and restarts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deploy.cli import app
from deploy.region.diff import Change, changes
from deploy.region.spec.loading import parse_region

REGION = """
name: two
gateway: {threshold_tokens: 1000}
models: [{name: m, path: org/m, max_num_batched_tokens: 512}]
clusters:
  - name: far
    kind: prefill
    nodes:
      - {name: a1, host: 10.0.0.1, instances: [{name: p}]}
      - {name: a.2, host: 10.0.0.2, instances: [{name: q}]}
  - name: home
    kind: pd
    nodes: [{name: b1, host: 10.1.0.1, instances: [{name: d}]}]
links: [{from: far, to: home}]
"""


def between(old: str, new: str) -> list[Change]:
    return changes(parse_region(old, {}), parse_region(new, {}))


def test_the_same_region_changes_nothing() -> None:
    assert between(REGION, f"# a comment\n{REGION}") == []


def test_a_setting_of_the_gateway_restarts_the_gateway() -> None:
    assert between(REGION, REGION.replace("1000", "2000")) == [
        Change("gateway", "gateway", "b1", "restart", ("gateway.threshold_tokens",))
    ]


def test_a_setting_of_an_agent_restarts_that_agent() -> None:
    new = REGION.replace("10.0.0.2,", "10.0.0.2, agent: {arena_gib: 9},")
    assert between(REGION, new) == [Change("agent.a.2", "agent", "a.2", "restart", ("arena_gib",))]


def test_an_option_of_a_model_restarts_its_engines() -> None:
    found = between(REGION, REGION.replace("512", "1024"))
    engines = {item.process: item.settings for item in found if item.kind == "engine"}
    assert set(engines) == {"p", "q", "d"}
    assert all("--max-num-batched-tokens" in settings for settings in engines.values())


def test_a_new_node_starts_and_who_must_know_it_restarts() -> None:
    new = REGION.replace(
        "  - name: home",
        "      - {name: a3, host: 10.0.0.3, instances: [{name: r}]}\n  - name: home",
    )
    found = {item.process: item for item in between(REGION, new)}
    assert {name for name, item in found.items() if item.what == "start"} == {"agent.a3", "r"}
    assert found["agent.b1"].settings == ("send_to",)
    assert found["front.far"].settings[0].startswith("instances[r]")
    assert "d" not in found
    back = {item.process: item.what for item in between(new, REGION)}
    assert (back["agent.a3"], back["r"], back["front.far"]) == ("stop", "stop", "restart")


def test_a_gateway_that_moves_takes_its_clusters_front_with_it() -> None:
    found = {item.process: item for item in between(REGION, f"{REGION}\n".replace(
        "threshold_tokens: 1000", "threshold_tokens: 1000, node: a1"))}  # fmt: skip
    assert found["front.far"].what == "stop"
    assert found["front.home"].what == "start"
    assert found["gateway"].settings[0] == "node"


class TestCommandLine:
    @pytest.fixture
    def files(self, tmp_path: Path) -> tuple[str, str]:
        old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
        old.write_text(REGION)
        new.write_text(REGION.replace("1000", "2000"))
        return str(old), str(new)

    def test_for_people(self, files: tuple[str, str]) -> None:
        told = CliRunner().invoke(app, ["region", "diff", *files])
        assert told.exit_code == 0
        assert told.stdout == "restart gateway (gateway, node b1): gateway.threshold_tokens\n"
        same = CliRunner().invoke(app, ["region", "diff", files[0], files[0]])
        assert same.stdout == "no process changes\n"

    def test_for_scripts(self, files: tuple[str, str]) -> None:
        told = CliRunner().invoke(app, ["region", "diff", *files, "--json"])
        (change,) = json.loads(told.stdout)["changes"]
        assert (change["process"], change["what"]) == ("gateway", "restart")
