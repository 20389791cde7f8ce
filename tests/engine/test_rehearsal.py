"""A plan on real engines at the pace of its profiles: three columns for the same arrivals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

NUM_REQUESTS = 40


def small_case_study() -> dict[str, Any]:
    """The shipped example with half of its instances, so that three engines are enough."""
    command = [sys.executable, "-m", "deploy.cli", "rehearse", "--example"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    whole: dict[str, Any] = yaml.safe_load(text)
    whole["prefill_clusters"][0]["instances"] = 1
    whole["pd_clusters"][0]["instances"] = 2
    whole["links"][0]["rate"] = "25Gbit"
    return whole


def rehearse(file: Path) -> dict[str, Any]:
    """What a rehearsal printed. It is played once more if it was void."""
    options = ["--rate", "0.4", "--requests", str(NUM_REQUESTS), "--json", "--again"]
    command = [sys.executable, "-m", "deploy.cli", "rehearse", str(file), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    (played,) = json.loads(done.stdout)["regions"].values()
    return dict(played)


@pytest.mark.timeout(600)
def test_a_plan_runs_as_it_was_planned_and_simulated(tmp_path: Path) -> None:
    file = tmp_path / "case.yaml"
    file.write_text(yaml.safe_dump(small_case_study()))
    played = rehearse(file)
    simulated, live = played["simulated"], played["live"]
    assert (live["completed"], live["failed"], live["refused"]) == (NUM_REQUESTS, 0, 0)
    # An engine that decodes keeps the step of its device.
    assert live["tpot_mean_s"] == pytest.approx(0.025, rel=0.05)
    assert 0 < live["remote_share"] < 1
    assert live["link_gib"] == pytest.approx(simulated["link_gib"], rel=0.25)
    assert live["ttft_p50_s"] == pytest.approx(simulated["ttft_p50_s"], rel=0.25)
