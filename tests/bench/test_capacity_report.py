"""What `bench_capacity.py` writes for others, and makes of their answers, without engines."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer
from bench_capacity import (
    LOADED,
    Talks,
    capacities_of,
    converse,
    loaded_profile,
    ttft_row,
    why_missing,
)
from capacity_files import (
    SHAPES,
    Shape,
    Turn,
    capacity_row,
    plan_file,
    recorded_arrivals,
    simulation_file,
    trace_of,
)

from deploy.plan.simulate.building import load_simulation
from deploy.plan.solve.building import load_plan
from deploy.plan.solve.spec import PlanSpec
from deploy.plan.trace import load_trace
from deploy.profile_file import EngineProfileFile
from scheduler.planning.prefix_reuse import cached_tokens
from scheduler.planning.solve import best_plan
from scheduler.planning.throughput import Mode
from scheduler.replay.driver import replay

SERVICE = {"overhead_s": 0.05, "prefill": 1.1, "decode_s": 0.01, "busy_s": 0.02, "render": 1.0}
PROFILE = {
    "profile": {
        "prefill": {"points": [{"tokens": 128, "seconds": 0.05}, {"tokens": 2048, "seconds": 0.5}]},
        "decode": {"steps": [{"batch_size": 1, "step_seconds": 0.02}]},
        "kv_cache": {"fixed_bytes": 0, "bytes_per_token": 2048},
    }
}


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "profile.yaml"
    path.write_text(yaml.safe_dump(PROFILE))
    return path


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_the_planner_takes_the_file_of_every_shape(
    shape: Shape, profile: Path, tmp_path: Path
) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text(yaml.safe_dump(plan_file(shape, profile, [500, 1000], 16, 20.0)))
    region = load_plan(file, PlanSpec).region
    assert best_plan(region).system_rps(Mode.EXACT) > 0


def test_a_recording_and_its_conversations_become_a_trace_with_shared_prefixes(
    profile: Path, tmp_path: Path
) -> None:
    turns = [Turn(0, 100, 0.1), Turn(1, 90, 0.1), Turn(0, 200, 0.1)]
    arrivals = [(7.0, 90), (5.0, 100), (9.0, 200)]
    lines = trace_of(arrivals, turns, output_tokens=8, block_tokens=32)
    assert [line["timestamp"] for line in lines] == [0.0, 2000.0, 4000.0]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    # Three whole blocks of the first turn; another conversation shares nothing.
    assert cached_tokens(load_trace(trace, 32), 32, None) == [0, 0, 96]
    file = tmp_path / "simulation.yaml"
    file.write_text(
        yaml.safe_dump(simulation_file(SHAPES[1], profile, trace, 32, 20.0, SERVICE, 0.01))
    )
    simulation = load_simulation(file)
    outcome = replay(simulation.model, simulation.workload(1), simulation.policy("remote")[1])
    found = outcome.summary(0.0)
    assert (found.num_done, found.num_remote) == (3, 3)


async def test_each_turn_of_a_conversation_goes_on_with_all_before_it() -> None:
    asked: list[dict[str, Any]] = []

    async def complete(request: web.Request) -> web.Response:
        asked.append(await request.json())
        event = json.dumps({"choices": [{"text": "answer"}]})
        return web.Response(text=f"data: {event}\n\ndata: [DONE]\n\n")

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    server = TestServer(app)
    await server.start_server()
    try:
        talks = Talks(2, 3, (40, 50), (10, 20), output_tokens=6, mean_pause_s=0.001)
        turns = await converse(str(server.make_url("")).rstrip("/"), "m", talks)
    finally:
        await server.close()
    assert [turn.num_tokens for turn in turns] == [len(body["prompt"]) for body in asked]
    assert {body["max_tokens"] for body in asked} == {6}
    for number in range(2):
        both = zip(turns, asked, strict=True)
        mine = [bytes(body["prompt"]).decode() for turn, body in both if turn.talk == number]
        assert len(mine) == 3
        for before, after in pairwise(mine):
            assert after.startswith(before + "answer")


def test_a_recorded_prompt_that_nobody_sent_is_refused() -> None:
    with pytest.raises(ValueError, match="a prompt of 91 tokens that nobody sent"):
        trace_of([(1.0, 91)], [Turn(0, 90, 0.1)], output_tokens=8, block_tokens=32)


def test_a_recorder_that_has_written_nothing_has_no_arrivals(tmp_path: Path) -> None:
    assert recorded_arrivals(tmp_path / "none") == []


def test_predictions_are_held_against_what_was_measured() -> None:
    answer = {"throughput_rps": 2.2, "binding": "prefill"}
    row = capacity_row(SHAPES[0].name, "traffic", answer, 2.0)
    assert (row["by"], row["error"], row["met"]) == ("traffic", 0.1, False)
    assert capacity_row(SHAPES[0].name, "traffic", answer, 2.1)["met"]
    assert "met" not in capacity_row(SHAPES[0].name, "traffic", answer, None)
    turns = [Turn(0, 100, seconds) for seconds in (0.1, 0.4, 0.2)]
    assert ttft_row(turns, 50, 0.23)["met"]
    assert (ttft_row(turns, 90, 0.3)["error"], ttft_row(turns, 90, 0.3)["met"]) == (-0.25, False)


def test_a_profile_under_load_is_that_of_one_shape(tmp_path: Path) -> None:
    load, file = tmp_path / "load.json", tmp_path / "loaded.yaml"
    rows = [{"system": "prfaas", "throughput_rps": 1.5, "profile": None}]
    load.write_text(json.dumps({"capacity": rows}))
    assert capacities_of(load) == rows
    assert capacities_of(None) == []
    assert not loaded_profile(rows, file)
    rows.append({"system": LOADED.measured_as, "profile": PROFILE["profile"]})
    assert loaded_profile(rows, file)
    assert EngineProfileFile.load(file).profile.prefill.points[1].tokens == 2048


def test_a_shape_that_was_not_measured_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench_capacity.cores_here", lambda: [0, 1])
    assert why_missing({"name": SHAPES[0].name}) == "prfaas-pd is not in --load"
    assert why_missing({"name": SHAPES[3].name}) == "2 cores cannot give 3 engines one each"
