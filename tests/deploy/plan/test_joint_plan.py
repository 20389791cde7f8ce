"""`prfaas plan solve` with homes of requests: several PD clusters, uplinks and models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from deploy.plan.cli import plan_app

EXAMPLES = Path(__file__).parents[3] / "deploy" / "plan" / "examples"
FEW = ("--requests", "1000")


def run(*words: str, status: int = 0) -> str:
    result = CliRunner().invoke(plan_app, list(words))
    assert result.exit_code == status, result.output
    return result.output


def written(tmp_path: Path, document: dict[str, Any]) -> str:
    path = tmp_path / "sites.yaml"
    path.write_text(yaml.safe_dump(document))
    return str(path)


def example() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(run("example", "--sites"))
    return document


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """The JSON of the example."""
    path = str(EXAMPLES / "sites.yaml")
    document: dict[str, Any] = json.loads(run("solve", path, "--json", *FEW))
    return document


def test_every_home_has_a_plan_and_every_pair_a_threshold(found: dict[str, Any]) -> None:
    homes = {(row["model"], row["pd_cluster"]): row for row in found["homes"]}
    assert list(homes) == [("", "east"), ("", "west"), ("coder", "west")]
    assert found["least_level"] == pytest.approx(min(row["level"] for row in homes.values()))
    assert found["least_level"] > 1
    thresholds = {
        (pair["prefill_cluster"], name): pair["threshold_tokens"]
        for name, row in homes.items()
        for pair in row["pairs"]
    }
    assert thresholds["north", ("", "west")] == thresholds["south", ("", "west")]
    assert thresholds["north", ("", "east")] < thresholds["north", ("", "west")]
    assert all(goal["met"] for row in homes.values() for goal in row["plan"]["goals"].values())


def test_what_homes_share_is_given_out_once(found: dict[str, Any]) -> None:
    shared = {(part["kind"], part["name"]): part for part in found["shared"]}
    assert all(part["utilisation"] <= 1.001 for part in shared.values())
    assert shared["uplink", "west ingress"]["utilisation"] > 0.95
    crossing = [shared["link", name]["used"] for name in ("north to west", "south to west")]
    assert shared["uplink", "west ingress"]["used"] == pytest.approx(sum(crossing))
    north = [p for row in found["homes"] for p in row["pairs"] if p["prefill_cluster"] == "north"]
    assert sum(pair["instances"] for pair in north) == pytest.approx(6)


def test_the_page_has_every_home(tmp_path: Path) -> None:
    page, picture = tmp_path / "sites.html", tmp_path / "sites.png"
    for path in (page, picture):
        run("solve", str(EXAMPLES / "sites.yaml"), *FEW, "--plot", str(path))
    html = page.read_text()
    assert html.count("<svg") == 4
    assert "<h2>west (coder)</h2>" in html
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_demand_out_of_reach_is_a_missed_goal(tmp_path: Path) -> None:
    document = example()
    document["pd_clusters"][0]["rate_rps"] = 9.0
    text = " ".join(run("solve", written(tmp_path, document), *FEW, status=1).split())
    assert "east: NOT met" in text


def test_the_only_pd_cluster_has_the_plan_of_a_file_without_homes(tmp_path: Path) -> None:
    document = yaml.safe_load((EXAMPLES / "case-study.yaml").read_text())
    plain = json.loads(run("solve", written(tmp_path, document), "--json", *FEW))
    document["pd_clusters"][0]["rate_rps"] = 2.8
    joint = json.loads(run("solve", written(tmp_path, document), "--json", *FEW))
    (home,) = joint["homes"]
    assert home["throughput_rps"] == plain["throughput_rps"]
    assert home["plan"]["threshold_tokens"] == plain["threshold_tokens"]
    assert home["plan"]["splits"] == plain["splits"]
