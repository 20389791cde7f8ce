"""A region.yaml with paced instances is rehearsed as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.lab.rehearse.preparing import prepare
from deploy.lab.rehearse.traffic import Prompts, Wanted
from scheduler.planning.throughput import Mode

EXAMPLE = Path(__file__).parents[4] / "deploy/lab/rehearse/examples/rehearsal.yaml"
PROMPTS = Prompts(lengths=[2000, 8000, 60000])


def region(tmp_path: Path, **changes: Any) -> Path:
    """The region.yaml of the example, whose profiles are the shipped ones."""
    run = prepare(EXAMPLE, (), Wanted(), tmp_path, None)
    document: dict[str, Any] = {**run.rehearsals[0].region, **changes}
    document["models"][0]["pace"]["profile"] = "h20"
    for instance in document["clusters"][0]["nodes"][0]["instances"]:
        instance["pace"] = "h200"
    file = tmp_path / "region.yaml"
    file.write_text(yaml.safe_dump(document))
    return file


def test_a_region_file_is_planned_and_simulated_as_it_is(tmp_path: Path) -> None:
    run = prepare(region(tmp_path), (), Wanted(prompts=PROMPTS, load=0.5), tmp_path, None)
    (mine,) = run.rehearsals
    assert mine.plan.num_prefill == {"home-site": 2}
    assert mine.plan.system_rps(Mode.EXACT) == pytest.approx(1.5625)
    assert mine.plan.offload_fraction == pytest.approx(1 / 3)
    assert (mine.plan.threshold_tokens or 0) // 16 == mine.policy.thresholds["compute-site"]
    assert mine.model.decode_steps == ((20, pytest.approx(0.15)),)
    assert mine.model.region.links[0].bytes_per_s == pytest.approx(442.1e6 / 8, rel=1e-3)
    assert set(run.workload.prompt_tokens) == {125, 500, 3750}
    assert set(run.workload.output_tokens) == {256}
    assert len(run.workload) / run.workload.arrivals_s[-1] == pytest.approx(0.52, rel=0.2)


def test_a_region_that_is_not_paced_says_so(tmp_path: Path) -> None:
    file = region(tmp_path)
    document = yaml.safe_load(file.read_text())
    del document["models"][0]["pace"]
    for instance in document["clusters"][0]["nodes"][0]["instances"]:
        del instance["pace"]
    file.write_text(yaml.safe_dump(document))
    with pytest.raises(ValueError, match="is not paced: write its `pace`"):
        prepare(file, (), Wanted(prompts=PROMPTS), tmp_path, None)
