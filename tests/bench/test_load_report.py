"""What `bench_load.py` asks for and makes of what the client found, without engines."""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import pytest
from bench_load import begun, rates_of, routed, verdicts
from e2e_systems import BY_THRESHOLD, ENGINE_PORTS
from engine_cores import CannotRunError, cores_of
from load_client import Run, Traffic, client, found, rate_runs, words_of, write_inputs
from load_systems import pd_alone, two_clusters

from deploy.lab.demo.tiny_specs import MODELS

TRAFFIC = Traffic(100, 300, 8, slo_ttft_ms=1000, slo_tpot_ms=50)
MODEL = MODELS["mimo-v2-tiny"]


def row(system: str, rate: float, ttft_s: float, goodput_rps: float) -> dict[str, Any]:
    times = {"ttft_p50_s": ttft_s, "ttft_p99_s": 2 * ttft_s, "tpot_p50_s": 0.02}
    return {
        "system": system,
        "request_rate": rate,
        "completed": 10,
        "goodput_rps": goodput_rps,
        **times,
    }


def options(folder: Path, **changes: Any) -> argparse.Namespace:
    values: dict[str, Any] = {
        "model": MODEL.name,
        "seconds": 10.0,
        "tokens": (100, 300),
        "output": 8,
        "slo_ms": (1000.0, 50.0),
        "loads": [0.5, 1.0],
        "rates": None,
        "add": True,
        "json": folder / "load.json",
    }
    return argparse.Namespace(**(values | changes))


def test_a_rate_has_as_many_prompts_as_arrive_in_its_time_but_not_too_few() -> None:
    runs = rate_runs([0.1, 2.0], 30)
    assert [(run.num_prompts, run.rate_rps) for run in runs] == [(10, 0.1), (60, 2.0)]
    assert len({run.seed for run in runs}) == 2, "each run has prompts of its own"


def test_the_client_gets_the_prompts_whose_lengths_are_drawn(tmp_path: Path) -> None:
    run = Run("r", seed=3, num_prompts=5)
    write_inputs(TRAFFIC, run, tmp_path)
    lines = (tmp_path / "r.jsonl").read_text().splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    assert [len(prompt) for prompt in prompts] == TRAFFIC.lengths(5, 3)
    assert len(set(prompts)) == 5
    assert all(100 <= len(prompt) <= 300 for prompt in prompts)
    words = words_of("http://x", "m", TRAFFIC, run, tmp_path)
    assert words[words.index("--dataset-path") + 1] == str(tmp_path / "r.jsonl")
    assert words[words.index("--request-rate") + 1] == "inf"
    assert "--max-concurrency" not in words


async def ask_with(program: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> dict[str, Any]:
    """What a client whose program is this one finds."""
    monkeypatch.setattr("load_client.CLIENT", program)
    async with client(folder) as by:
        return await by.ask("http://x", "m", TRAFFIC, Run("r", seed=1, num_prompts=2))


async def test_the_client_is_told_its_words_and_leaves_its_result_in_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = """
import json, pathlib, sys
words = json.loads(sys.stdin.readline())
place = pathlib.Path(words[words.index("--result-dir") + 1], "r.json")
place.write_text(json.dumps({"completed": 0, "failed": 2, "duration": 1.5}))
print("chatter")
print("END OF RUN", flush=True)
"""
    assert await ask_with(program, monkeypatch, tmp_path) == {
        "completed": 0,
        "failed": 2,
        "duration_s": 1.5,
    }


async def test_a_client_that_fails_is_quoted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError, match="ended in r: no such model"):
        await ask_with("print('no such model')", monkeypatch, tmp_path)


def test_what_the_client_found_is_kept_in_seconds() -> None:
    keys = (f"p{p}_{name}_ms" for p in (50, 90, 99) for name in ("ttft", "tpot", "e2el"))
    result = dict.fromkeys(keys, 250.0)
    counts = {"completed": 3, "failed": 1, "duration": 2.0}
    rates = {"request_throughput": 1.5, "request_goodput": 1.0}
    kept = found({**result, **counts, **rates})
    assert (kept["ttft_p99_s"], kept["goodput_rps"], kept["failed"]) == (0.25, 1.0, 1)
    assert found(counts | {"completed": 0}) == {"completed": 0, "failed": 1, "duration_s": 2.0}


def test_routes_and_prediction_errors_come_from_the_records() -> None:
    def record(route: str, predicted_s: float | None, num_retries: int = 0) -> dict[str, Any]:
        return {
            "route": route,
            "predicted_ttft_s": predicted_s,
            "ttft_s": 0.4,
            "num_retries": num_retries,
        }

    records = [
        record("local", 0.5),
        record("prefill_cluster", None),
        record("local", 9.0, num_retries=1),
        record("prefill_cluster", 0.4),
    ]
    assert routed(records) == {
        "remote_share": 0.5,
        "remote_ttft_p50_s": 0.4,
        "local_ttft_p50_s": 0.4,
        "prediction_error_p50": 0.125,
        "prediction_error_p90": 0.0,
    }
    assert routed([]) == {}


def test_ours_is_held_against_nixl_and_the_pd_cluster_at_the_same_rate() -> None:
    rows = [
        row("prfaas", 1.0, 0.4, 0.9),
        row("nixl", 1.0, 1.0, 0.5),
        row("nixl", 2.0, 1.0, 0.5),
        row("prfaas-pd", 1.0, 0.3, 1.0),
    ]
    told = {one["what"]: (one["found"], one["met"]) for one in verdicts(rows)}
    assert told == {
        "ttft_p50_s over nixl's": (0.4, True),
        "ttft_p99_s over nixl's": (0.4, True),
        "tpot_p50_s over nixl's": (1.0, False),
        "goodput_rps": (0.9, False),
    }
    assert verdicts(rows[1:]) == []


def test_every_system_gets_the_rates_of_our_capacity(tmp_path: Path) -> None:
    kept = {"capacity": [{"system": "nixl", "throughput_rps": 2.0}]}
    assert rates_of(options(tmp_path), "nixl", kept) == [1.0, 2.0]
    kept["capacity"].append({"system": "prfaas", "throughput_rps": 4.0})
    assert rates_of(options(tmp_path), "nixl", kept) == [2.0, 4.0]
    assert rates_of(options(tmp_path, rates=[3.0]), "nixl", kept) == [3.0]


def test_parts_are_added_to_earlier_ones_of_the_same_settings_only(tmp_path: Path) -> None:
    fresh = begun(options(tmp_path))
    assert (fresh["rows"], fresh["missing"]) == ([], {})
    (tmp_path / "load.json").write_text(json.dumps(fresh | {"rows": [row("nixl", 1.0, 1.0, 1.0)]}))
    assert len(begun(options(tmp_path))["rows"]) == 1
    assert begun(options(tmp_path, add=False))["rows"] == []
    with pytest.raises(ValueError, match="has other settings"):
        begun(options(tmp_path, output=16))


def test_engines_get_equal_shares_of_the_cores() -> None:
    assert cores_of(2, [0, 1, 2, 3, 4]) == ["0,1", "2,3"]
    with pytest.raises(CannotRunError, match="1 cores cannot give 2 engines one each"):
        cores_of(2, [0])


def test_systems_of_ours_have_the_same_two_engines() -> None:
    region = two_clusters(MODEL, Path("/model"), {})
    assert region.gateway.scheduling.routing.policy != "threshold"
    remote = two_clusters(MODEL, Path("/model"), BY_THRESHOLD)
    assert remote.gateway.scheduling.routing.policy == "threshold"
    alone = pd_alone(MODEL, Path("/model"))
    for spec in (region, remote, alone):
        ports = sorted(item.port for node in spec.nodes for item in node.instances)
        assert ports == [ENGINE_PORTS["prefill"], ENGINE_PORTS["decode"]]
        assert spec.models == region.models
    assert [item.role for item in alone.pd_clusters[0].instances] == ["prefill", "decode"]
    assert not alone.links
    assert math.isinf(Run("saturation", 0, 4).rate_rps)
