"""A plan on real engines at the pace of its profiles: live as it was planned and simulated."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from bench_smoke import run_smoke


@pytest.mark.timeout(600)
def test_the_case_study_runs_as_it_was_simulated(tmp_path: Path) -> None:
    # A void rehearsal is played once more.
    measure = partial(run_smoke, "rehearsal", timeout_s=580.0)
    measure(tmp_path)
    (row,) = json.loads((tmp_path / "rehearsal.json").read_text())["rows"]
    simulated, live = row["simulated"], row["live"]
    assert (live["completed"], live["failed"], live["refused"]) == (40, 0, 0)
    # An engine that decodes keeps the step of its device.
    assert live["tpot_mean_s"] == pytest.approx(0.025, rel=0.05)
    assert 0 < live["remote_share"] < 1
    assert live["link_gib"] == pytest.approx(simulated["link_gib"], rel=0.25)
    assert live["ttft_p50_s"] == pytest.approx(simulated["ttft_p50_s"], rel=0.25)
