"""How long passes of paced engines take, and how a rehearsal is judged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deploy.lab.pace.passes import Pass, judge, read_passes
from deploy.lab.pace.times import PaceSpec, PassTimes


def test_passes_take_the_time_of_their_profile() -> None:
    fast, slow = (
        PassTimes.of(PaceSpec(profile=name, tokens_per_token=16, slowdown=2), None, Path())
        for name in ("h200", "h20")
    )
    # 32,000 tokens of the profile, which the paper measured, at half the speed.
    assert fast.pass_s([(0, 2000, True)], 0) == pytest.approx(2 * 1.84, rel=0.02)
    assert slow.pass_s([(0, 2000, True)], 0) == pytest.approx(2 * 4.94, rel=0.01)
    # Chunks of a prompt add up to it, and a token of each answer takes 16 steps.
    chunks = [fast.pass_s([(at, 500, at == 0)], 0) for at in range(0, 2000, 500)]
    assert sum(chunks) == pytest.approx(fast.pass_s([(0, 2000, True)], 0))
    prefill_s = slow.pass_s([(0, 500, True)], 0)
    assert slow.pass_s([(0, 500, True)], 20) - prefill_s == pytest.approx(2 * 16 * 0.025)
    # The last few tokens of a prompt take a pass as long as a decode step.
    assert slow.pass_s([(500, 1, False)], 0) == pytest.approx(2 * 0.025)
    assert slow.pass_s([], 0) == 0


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
