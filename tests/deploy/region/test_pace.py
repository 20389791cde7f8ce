"""Paced instances: what a region's file may say, what their engines get, and how a rehearsal is
judged.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest

from deploy.lab.pace.passes import Pass, judge, read_passes
from deploy.lab.pace.times import VARIABLE, PassTimes
from deploy.region.launch.plan import Planner
from deploy.region.launch.ports import resolve_ports
from deploy.region.launch.rundir import RunDirectory
from deploy.region.spec.loading import missing_models, parse_region
from deploy.region.spec.region import RegionSpec
from kvmanager.config_files.problems import FileError

PACE: Final[dict[str, Any]] = {"profile": "h20", "tokens_per_token": 16, "slowdown": 2}
TOKENS = 4096


def region(
    tmp_path: Path,
    instances: list[dict[str, Any]],
    pace: dict[str, Any] | None = PACE,
    **model: Any,
) -> RegionSpec:
    """A PD cluster of these instances, as its file is read."""
    pd = {"name": "pd", "kind": "pd", "nodes": [{"name": "n", "instances": instances}]}
    own = {"name": "m", "path": str(tmp_path), "kv_space_gib": 1, "pace": pace}
    text = json.dumps({"models": [own | model], "clusters": [pd]})
    return parse_region(text, {}, directory=tmp_path)


def times(spec: RegionSpec, instance: str) -> PassTimes:
    """What the engine of an instance is told."""
    resolved = resolve_ports(spec, is_free=lambda _host, _port: True)
    planner = Planner(resolved, RunDirectory(Path("/run/r"), Path("/run/r/s")), {"PATH": "/bin"})
    (engine,) = (item for item in planner.processes() if item.name == instance)
    assert "deploy.lab.pace.worker.PacedWorker" in engine.process.argv
    assert "--enforce-eager" in engine.process.argv
    return PassTimes.decode(engine.process.env[VARIABLE])


def test_engines_take_the_time_of_their_profiles(tmp_path: Path) -> None:
    spec = region(
        tmp_path,
        [
            {"name": "slow", "role": "both", "decode_slots": 20},
            {"name": "fast", "role": "prefill", "pace": "h200"},
        ],
    )
    assert missing_models(spec) == []
    slow, fast = times(spec, "slow"), times(spec, "fast")
    # 32,000 tokens of the profile, which the paper measured, at half the speed.
    assert fast.pass_s([(0, 2000, True)], 0) == pytest.approx(2 * 1.84, rel=0.02)
    assert slow.pass_s([(0, 2000, True)], 0) == pytest.approx(2 * 4.94, rel=0.01)
    # Chunks of a prompt add up to it, and a token of each answer takes 16 steps.
    chunks = [fast.pass_s([(at, 500, at == 0)], 0) for at in range(0, 2000, 500)]
    assert sum(chunks) == pytest.approx(fast.pass_s([(0, 2000, True)], 0))
    assert slow.pass_s([(0, 500, True)], 20) - slow.pass_s([(0, 500, True)], 0) == pytest.approx(
        2 * 16 * 0.025
    )
    # The last few tokens of a prompt take a pass as long as a decode step.
    assert slow.pass_s([(500, 1, False)], 0) == pytest.approx(2 * 0.025)
    assert slow.pass_s([], 0) == 0


def test_a_device_holds_as_many_requests_as_its_memory(tmp_path: Path) -> None:
    pace = PACE | {"memory_gib": 80}
    spec = region(tmp_path, [{"name": "a", "decode_slots": 4}], pace, max_model_len=TOKENS)
    request = 182378824 + 17280 * 16 * TOKENS
    assert times(spec, "a").kv_requests == pytest.approx(80 * 2**30 / request)


@pytest.mark.parametrize(
    ("instance", "model", "message"),
    [
        ({"role": "decode"}, {}, "a paced instance needs it"),
        ({"role": "prefill"}, {"kv_space_gib": None}, "write its kv_space_gib"),
        ({"role": "prefill"}, {"tensor_parallel_size": 2}, "has one worker"),
        ({"role": "prefill"}, {"args": ["--speculative-config={}"]}, "is not paced; leave it out"),
        ({"role": "prefill", "pace": "h20"}, {"pace": None}, "write pace of its model too"),
    ],
)
def test_what_cannot_be_paced_is_refused_by_name(
    instance: dict[str, Any], model: dict[str, Any], message: str, tmp_path: Path
) -> None:
    other = {"name": "other", "decode_slots": 4, "role": "both"}
    with pytest.raises(FileError, match=message):
        region(tmp_path, [other, {"name": "a"} | instance], **model)


def test_a_profile_that_is_not_there_or_lacks_steps_is_named(tmp_path: Path) -> None:
    (tmp_path / "bare.yaml").write_text(
        "profile: {prefill: {points: [{tokens: 1000, seconds: 1}, {tokens: 2000, seconds: 2}]}}"
    )
    instances = [{"name": f"i{n}", "decode_slots": 4, "pace": p} for n, p in enumerate("ab")]
    instances[0]["pace"], instances[1]["pace"] = "./gone.yaml", "bare.yaml"
    problems = [str(item) for item in missing_models(region(tmp_path, instances))]
    assert len(problems) == 2
    assert "gone.yaml" in problems[0]
    assert "has no decode steps" in problems[1]


def test_a_rehearsal_is_void_if_passes_were_late_or_the_machine_busy(tmp_path: Path) -> None:
    def passes(*took: float) -> dict[str, list[Pass]]:
        lines = [
            json.dumps({"at": 1.0, "asked": 0.4, "took": s, "prefill": 0, "decode": 4})
            for s in took
        ]
        (tmp_path / "d0.jsonl").write_text("\n".join(lines))
        return read_passes(tmp_path)

    on_time = [0.4004] * 98
    assert judge(passes(*on_time, 0.45), 0.5).reasons == (
        "1.01% of the passes were late (at most 1%)",
    )
    kept = judge(passes(*on_time, 0.407, 0.45), 0.5)
    assert not kept.reasons
    assert (kept.num_passes, kept.late) == (100, 0.01)
    assert kept.off_p50 == pytest.approx(0.001)
    assert "90% busy" in judge(passes(*on_time), 0.9).reasons[0]
    assert "done any work" in judge({}, 0.1).reasons[0]
