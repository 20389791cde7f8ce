"""What benches make of their samples: ratios of pairs, goals met and missed, and what is void."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from bench_capacity import ttft_row
from bench_e2e import Measured as Lone
from bench_e2e import summarise
from bench_load import begun, rates_of, verdicts
from capacity_files import SHAPES, Turn, capacity_row, simulation_file, trace_of
from e2e_systems import BY_THRESHOLD, ENGINE_PORTS
from hostile_report import Condition, Phase, Watched, slowdown
from hostile_report import goals as hostile_goals
from load_systems import pd_alone, two_clusters
from wan_report import PAYLOAD_SHARE, Cell, Goal, Measured, Results, Section
from wan_report import goals as wan_goals

from deploy.lab.demo.tiny_specs import MODELS
from deploy.plan.simulate.building import load_simulation
from scheduler.replay.driver import replay

MODEL = MODELS["mimo-v2-tiny"]
PROFILE = {
    "profile": {
        "prefill": {"points": [{"tokens": 128, "seconds": 0.05}, {"tokens": 2048, "seconds": 0.5}]},
        "decode": {"steps": [{"batch_size": 1, "step_seconds": 0.02}]},
        "kv_cache": {"fixed_bytes": 0, "bytes_per_token": 2048},
    }
}
SERVICE = {"overhead_s": 0.05, "prefill": 1.1, "decode_s": 0.01, "busy_s": 0.02, "render": 1.0}


# Long links.


def moved(
    peer: str,
    seconds: float | None,
    *,
    section: Section = "goodput",
    point: str = "5g/20ms",
    wmem_mib: int | None = None,
) -> Measured:
    """125 MB, one Gbit, in that time; None: it failed."""
    return Measured(Cell(section, point, "bbr", wmem_mib), peer, 0, 125_000_000, seconds)


def wan(*measurements: Measured) -> dict[str, Goal]:
    return {goal.name: goal for goal in wan_goals(Results(measurements))}


def test_goodput_is_held_against_the_best_streams_and_the_best_setting_of_each_peer() -> None:
    streams = [moved("iperf3 x1", seconds) for seconds in (0.1, 1.0, 1.0)]
    streams += [moved("iperf3 x8", seconds) for seconds in (0.2, 0.2, 1.0)]
    runs = [moved("ours", 0.25), *streams, moved("nixl", 2.0), moved("nixl default", 0.5)]
    goals = wan(*runs, moved("mooncake", None), moved("ours", 9.0, wmem_mib=32))
    limit = goals["5g/20ms bbr: ours / best iperf3"]
    assert limit.found == pytest.approx(4.0 / (5 * PAYLOAD_SHARE)), "no link carries its whole rate"
    assert limit.is_met is False
    assert goals["5g/20ms bbr: ours / nixl"].found == pytest.approx(2.0)
    # A peer that failed is not measured, and a raised send buffer has no goal.
    assert goals["5g/20ms bbr: ours / mooncake"].is_met is None
    assert not any("wmem" in name for name in goals)


def test_caps_layers_and_bursts_have_goals_of_their_own() -> None:
    runs = [moved("ours", 0.5, section="cap", point="2g/20ms/cap 300m")]
    runs += [moved("ours", 0.2 + 0.001 * n, section="layer") for n in range(24)]
    runs += [moved("ours", 0.4, section="burst"), moved("ours", 0.2, section="burst_warm")]
    cap, layer, burst = wan(*runs).values()
    assert (cap.is_met, layer.is_met, burst.is_met) == (True, True, False)
    assert [goal.found for goal in (cap, layer, burst)] == pytest.approx([1.0, 222, 2.0])


# A lone prompt, beside one that the prefill engine answers itself.


def test_the_ratio_to_the_own_ttft_is_of_pairs() -> None:
    """A slow minute slows both of a pair."""
    pairs = [(0.24, 0.2), (0.5, 0.4), (0.9, 0.8)]
    one = Lone("prfaas", 1.0, 2000, "prompt", ttft_s=0.0, text="abc")
    ours = [replace(one, ttft_s=ttft_s, own_s=own_s) for ttft_s, own_s in pairs]
    theirs = replace(one, system="nixl", ttft_s=1.0)
    (cell,) = summarise([*ours, theirs, replace(theirs, error="hung")], rtt_s=0.02)["cells"]
    assert (cell["own_prfaas_ratio"], cell["own_nixl_ratio"]) == (1.1, None)
    assert (cell["prfaas_failed"], cell["nixl_failed"]) == (0, 1)
    assert (cell["prfaas_ttft_ms"], cell["nixl_ttft_ms"], cell["ratio"]) == (500.0, 1000.0, 0.5)


# Systems under the same load.


def row(system: str, rate: float, ttft_s: float, goodput_rps: float) -> dict[str, Any]:
    times = {"ttft_p50_s": ttft_s, "ttft_p99_s": 2 * ttft_s, "tpot_p50_s": 0.02}
    found = {"system": system, "request_rate": rate, "completed": 10, "goodput_rps": goodput_rps}
    return found | times


def options(folder: Path, **changes: Any) -> argparse.Namespace:
    values: dict[str, Any] = {"model": MODEL.name, "seconds": 10.0, "output": 8, "add": True}
    values |= {"tokens": (100, 300), "slo_ms": (1000.0, 50.0), "loads": [0.5, 1.0], "rates": None}
    return argparse.Namespace(**(values | {"json": folder / "load.json"} | changes))


def test_ours_is_held_against_nixl_and_the_pd_cluster_at_the_same_rate() -> None:
    rows = [row("prfaas", 1.0, 0.4, 0.9), row("nixl", 1.0, 1.0, 0.5)]
    rows += [row("nixl", 2.0, 1.0, 0.5), row("prfaas-pd", 1.0, 0.3, 1.0)]
    assert {one["what"]: (one["found"], one["met"]) for one in verdicts(rows)} == {
        "ttft_p50_s over nixl's": (0.4, True),
        "ttft_p99_s over nixl's": (0.4, True),
        "tpot_p50_s over nixl's": (1.0, False),
        "goodput_rps": (0.9, False),
    }
    assert verdicts(rows[1:]) == []


def test_every_system_gets_the_same_rates_engines_and_settings(tmp_path: Path) -> None:
    kept = {"capacity": [{"system": "nixl", "throughput_rps": 2.0}]}
    assert rates_of(options(tmp_path), "nixl", kept) == [1.0, 2.0]
    kept["capacity"].append({"system": "prfaas", "throughput_rps": 4.0})
    assert rates_of(options(tmp_path), "nixl", kept) == [2.0, 4.0]
    path = Path("/model")
    both, remote = (two_clusters(MODEL, path, routing) for routing in ({}, BY_THRESHOLD))
    assert both.gateway.scheduling.routing.policy != "threshold"
    assert remote.gateway.scheduling.routing.policy == "threshold"
    for spec in (both, remote, pd_alone(MODEL, path)):
        ports = sorted(item.port for node in spec.nodes for item in node.instances)
        assert ports == [ENGINE_PORTS["prefill"], ENGINE_PORTS["decode"]]
        assert spec.models == both.models
    fresh = begun(options(tmp_path))
    (tmp_path / "load.json").write_text(json.dumps(fresh | {"rows": [row("nixl", 1.0, 1.0, 1.0)]}))
    assert len(begun(options(tmp_path))["rows"]) == 1
    with pytest.raises(ValueError, match="has other settings"):
        begun(options(tmp_path, output=16))


# Planner and simulator against what was measured.


def test_a_recording_and_its_conversations_are_played_with_their_shared_prefixes(
    tmp_path: Path,
) -> None:
    profile, trace, file = (tmp_path / name for name in ("p.yaml", "t.jsonl", "s.yaml"))
    profile.write_text(yaml.safe_dump(PROFILE))
    turns = [Turn(0, 100, 0.1), Turn(1, 90, 0.1), Turn(0, 200, 0.1)]
    arrivals = [(7.0, 90), (5.0, 100), (9.0, 200)]
    lines = trace_of(arrivals, turns, output_tokens=8, block_tokens=32)
    assert [line["timestamp"] for line in lines] == [0.0, 2000.0, 4000.0]
    first, other, last = (line["hash_ids"] for line in lines)
    # Three whole blocks of the first turn; another conversation shares nothing.
    assert first[:3] == last[:3]
    assert not {*other} & {*first, *last}
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    told = simulation_file(SHAPES[1], profile, trace, 32, 20.0, SERVICE, 0.01)
    file.write_text(yaml.safe_dump(told))
    simulation = load_simulation(file)
    outcome = replay(simulation.model, simulation.workload(1), simulation.policy("remote")[1])
    assert outcome.summary(0.0).num_done == 3
    with pytest.raises(ValueError, match="a prompt of 91 tokens that nobody sent"):
        trace_of([(1.0, 91)], turns, output_tokens=8, block_tokens=32)


def test_predictions_are_held_against_what_was_measured() -> None:
    answer = {"throughput_rps": 2.2, "binding": "prefill"}
    capacity = capacity_row(SHAPES[0].name, "traffic", answer, 2.0)
    assert (capacity["by"], capacity["error"], capacity["met"]) == ("traffic", 0.1, False)
    assert "met" not in capacity_row(SHAPES[0].name, "traffic", answer, None)
    turns = [Turn(0, 100, seconds) for seconds in (0.1, 0.4, 0.2)]
    assert ttft_row(turns, 50, 0.23)["met"]
    assert (ttft_row(turns, 90, 0.3)["error"], ttft_row(turns, 90, 0.3)["met"]) == (-0.25, False)


# True requests among attackers.


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


def missed(*attacked: Phase) -> list[str]:
    """The goals that these miss beside quiet phases with a p99 of 20 ms."""
    quiet = phase("idle", 0.01), phase("elsewhere", 0.02)
    phases = [one for last in attacked for one in (*quiet, last)]
    return [goal.name for goal in hostile_goals(phases) if not goal.is_met]


def test_attacked_requests_are_held_against_the_same_attackers_elsewhere() -> None:
    slow = [phase("attacked", p99_s) for p99_s in (0.03, 0.04, 0.9)]
    quiet = [phase("idle", 0.01), phase("elsewhere", 0.02)] * 3
    assert slowdown([*quiet, *slow], "short", "elsewhere") == pytest.approx(2.0)
    assert missed(*slow) == []
    failed = {"short": ["ConnectionError: closed"], "offloaded": []}
    assert missed(phase("attacked", 0.02, failed=failed)) == ["tls: true requests that failed"]
    assert missed(phase("attacked", 0.02, let_in_s=None)) == ["tls: true requests that failed"]
    few, many = ({"short": [], "offloaded": ["local"] * number} for number in (1, 2))
    assert missed(phase("attacked", 0.02, rerouted=few)) == []
    assert missed(phase("attacked", 0.02, rerouted=many)) == [
        "tls: share of offloaded prompts that went local, over quiet"
    ]
    grown = {"gateway": Watched(170.0, 900, 9, 2.5)}
    last = phase("attacked", 0.02, processes=grown, left={"gateway": 9})
    assert missed(phase("attacked", 0.02), last) == [
        "tls: memory of the gateway, over quiet, MiB",
        "tls: memory of the gateway, last round over first, MiB",
        "tls: descriptors left at the gateway",
    ]
