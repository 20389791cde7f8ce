"""`prfaas simulate`: what engines do with the requests that they get, as vLLM does it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from deploy.plan.simulate.cli import simulate_app

EXAMPLE = Path(__file__).parents[3] / "deploy/plan/simulate/examples/simulation.yaml"
ALL = {"routing": "router", "admission": "off"}


def played(tmp_path: Path, step_s: float = 0.025, **simulation: Any) -> dict[str, Any]:
    """The row of the example's region, with other keys of `simulation`, for five minutes."""
    whole = yaml.safe_load(EXAMPLE.read_text())
    steps = [{"batch_size": 20, "step_seconds": step_s}]
    whole["profiles"]["h20"]["decode"]["steps"] = steps
    whole["traffic"]["output_tokens"] = round(25.6 / step_s)
    # The case study's answers take as long, and are made in larger steps.
    policies = {"all": ALL | simulation.pop("policy", {})}
    base = {"duration": "5min", "load": 0.8, "policy": "all", "policies": policies}
    whole["simulation"] = base | simulation
    whole["slo"] = {"tokens_per_s": 1 / step_s}
    path = tmp_path / "simulation.yaml"
    path.write_text(yaml.safe_dump(whole))
    result = CliRunner().invoke(simulate_app, [str(path), "--json"])
    assert result.exit_code == 0, result.output
    row: dict[str, Any] = json.loads(result.output)["policies"]["all"]
    return row


def test_first_tokens_wait_for_the_steps_that_engines_have_begun(tmp_path: Path) -> None:
    """The running step ends first, then those during which KVCache is loaded."""
    none, one, three = (played(tmp_path, 0.4, load_steps=num) for num in (0, 1, 3))
    assert one["ttft_mean_s"] - none["ttft_mean_s"] == pytest.approx(0.4, abs=0.1)
    assert three["ttft_mean_s"] - none["ttft_mean_s"] == pytest.approx(1.2, abs=0.2)
    fine = played(tmp_path, 0.025, load_steps=0)
    # Half a step until the next one begins, and that one.
    assert none["ttft_mean_s"] - fine["ttft_mean_s"] == pytest.approx(1.5 * 0.375, abs=0.1)


def test_what_is_given_early_cannot_be_passed_by_shorter_prompts(tmp_path: Path) -> None:
    """In a queue, the shortest prompt is first. Inside of an instance, the first one is."""
    queued, given = (played(tmp_path, load=0.95, max_concurrent=num) for num in (1, 64))
    assert queued["ttft_p50_s"] < given["ttft_p50_s"]


def test_prompts_that_share_passes_end_together(tmp_path: Path) -> None:
    alone, shared = (played(tmp_path, load=0.95, pass_tokens=num) for num in ("1k", "128k"))
    assert 1.1 * alone["ttft_p50_s"] < shared["ttft_p50_s"]


def test_prompts_on_engines_that_decode_hold_up_answers(tmp_path: Path) -> None:
    # Short prompts stay at home unless that is much later.
    at_home = {"margin": "1s", "margin_share": 0.45}
    handed, whole = (
        played(tmp_path, load=0.5, policy={"hand_off_tokens": tokens} | at_home)
        for tokens in ("256", "8k")
    )
    assert handed["one_engine_share"] < 0.01
    # 18% of the lengths are below 8k. Some of them go where they hold up nobody.
    assert 0.05 < whole["one_engine_share"] < 0.18
    assert whole["tbt_p99_ms"] > 1.05 * handed["tbt_p99_ms"]
    assert whole["done"] == whole["requests"]


def test_a_gateway_refuses_what_would_find_no_slot(tmp_path: Path) -> None:
    open_to_all = played(tmp_path, load=2.0)
    guarded = played(tmp_path, load=2.0, policy={"admission": "slots"})
    assert open_to_all["refused"] == 0 < guarded["refused"]
    assert guarded["ttft_p90_s"] < open_to_all["ttft_p90_s"]
