"""The goals of the bench among attackers, from made-up measurements."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from hostile_report import CONDITIONS, Condition, Phase, Watched, goals, slowdown, tables


def phase(condition: Condition, p99_s: float, **changes: object) -> Phase:
    """100 answers, of which the two slowest took `p99_s`."""
    fields: dict[str, object] = {
        "let_in_s": 1.0,
        "taken_s": {path: [0.01] * 98 + [p99_s] * 2 for path in ("short", "offloaded")},
        "failed": {"short": [], "offloaded": []},
        "rerouted": {"short": [], "offloaded": []},
        "processes": {"gateway": Watched(100.0, 40, 9, 2.5)},
        "left": {"gateway": 0},
        "attacks": {"data: silent": {"num_begun": 3, "num_ended": 1}},
    }
    return Phase(way="tls", condition=condition, **(fields | changes))  # type: ignore[arg-type]


def rounds(*attacked: Phase) -> list[Phase]:
    """Quiet phases with a p99 of 20 ms, or 10 without attackers, beside each of these."""
    quiet = phase("idle", 0.01), phase("elsewhere", 0.02)
    return [one for last in attacked for one in (*quiet, last)]


def missed(phases: list[Phase]) -> list[str]:
    return [goal.name for goal in goals(phases) if not goal.is_met]


def test_what_the_goal_compares_with_has_the_same_attackers() -> None:
    phases = rounds(*(phase("attacked", p99_s) for p99_s in (0.03, 0.04, 0.9)))
    assert slowdown(phases, "short", "elsewhere") == pytest.approx(2.0)
    assert slowdown(phases, "short", "idle") == pytest.approx(4.0)
    assert missed(phases) == []


def test_a_request_that_failed_and_a_sender_that_was_kept_out_count() -> None:
    failed = {"short": ["ConnectionError: closed"], "offloaded": []}
    phases = rounds(phase("attacked", 0.02, failed=failed), phase("attacked", 0.02, let_in_s=None))
    (found,) = (goal for goal in goals(phases) if not goal.is_met)
    assert (found.name, found.found) == ("tls: true requests that failed", 2)


def test_a_prompt_that_takes_another_route_is_no_failure_but_few_may() -> None:
    few, many = ({"short": [], "offloaded": ["local"] * number} for number in (1, 2))
    assert missed(rounds(phase("attacked", 0.02, rerouted=few))) == []
    assert missed(rounds(phase("attacked", 0.02, rerouted=many))) == [
        "tls: share of offloaded prompts that went local, over quiet"
    ]


def test_without_any_answer_the_goal_is_missed() -> None:
    nothing: dict[str, list[float]] = {"short": [], "offloaded": []}
    phases = rounds(phase("attacked", 0.0, taken_s=nothing))
    assert missed(phases) == ["tls: p99 of short, x quiet", "tls: p99 of offloaded, x quiet"]


def test_memory_and_descriptors_that_stay_are_found() -> None:
    grown = {"gateway": Watched(170.0, 900, 9, 2.5)}
    phases = rounds(
        phase("attacked", 0.02), phase("attacked", 0.02, processes=grown, left={"gateway": 9})
    )
    assert missed(phases) == [
        "tls: memory of the gateway, over quiet, MiB",
        "tls: memory of the gateway, last round over first, MiB",
        "tls: descriptors left at the gateway",
    ]


def test_tables_have_every_condition() -> None:
    lines = tables(rounds(phase("attacked", 0.02)))
    for condition in CONDITIONS:
        assert lines.count(condition) >= 3
