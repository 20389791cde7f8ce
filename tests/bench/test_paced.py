"""Paced engines in benches: what they are told, and when a run is void. Without engines."""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import capacity_paced
import pytest
import yaml
from capacity_files import Shape
from e2e_systems import engine, region_spec
from load_systems import pd_alone
from own_command import prfaas
from paced import Watch, add_pace, is_void, paced_engine, paced_region, parsed

from deploy.lab.demo.tiny_specs import MODELS
from deploy.lab.pace.times import VARIABLE, PassTimes
from deploy.region.spec.pace import paced_options

MODEL = MODELS["mimo-v2-tiny"]


def options(monkeypatch: pytest.MonkeyPatch, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gateway")
    parser.add_argument("--output", type=int, default=64)
    add_pace(parser, output=16)
    monkeypatch.setattr("sys.argv", ["bench", *words])
    return parsed(parser)


def test_pace_gives_other_sizes_and_needs_engines_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert options(monkeypatch).output == 64
    assert options(monkeypatch, "--pace").output == 16
    assert options(monkeypatch, "--pace", "--output", "8").output == 8
    with pytest.raises(SystemExit):
        options(monkeypatch, "--pace", "--gateway", "http://g")
    assert "leave out --gateway" in capsys.readouterr().err


def test_engines_of_regions_and_of_peers_have_the_same_pace(tmp_path: Path) -> None:
    path = Path("/model")
    told: dict[str, list[tuple[Any, ...]]] = {}
    two = paced_region(region_spec(MODEL, path), fast=["prefill"])
    for spec in (two, paced_region(pd_alone(MODEL, path), fast=["prefill"])):
        for node in spec.nodes:
            for item in node.instances:
                got = paced_options(spec, item, tmp_path)
                told.setdefault(item.name, []).append((got["args"], got["env"]))
    for role in told:
        peer = paced_engine(engine(role, MODEL, path, host="127.0.0.1"), tmp_path)
        told[role].append((peer.args, peer.env))
    times = {}
    for role, all_told in told.items():
        assert len({args for args, _ in all_told}) == 1
        paces = [PassTimes.decode(dict(env)[VARIABLE]) for _, env in all_told]
        assert len({(pace.curve, pace.steps, pace.tokens_per_token) for pace in paces}) == 1
        times[role] = paces[0].pass_s([(0, 2000, True)], 0)
    assert times == {
        "prefill": pytest.approx(1.84, rel=0.02),
        "decode": pytest.approx(4.94, rel=0.01),
    }


def test_a_run_is_void_by_what_it_did_since_the_watch_began(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paced.psutil.cpu_percent", lambda: 40.0)
    (tmp_path / "logs" / "pace").mkdir(parents=True)
    one = {"asked": 0.4, "prefill": 0, "decode": 4}
    watch = Watch()
    passes = [one | {"at": time.time() - 60, "took": 9.0}, one | {"at": time.time(), "took": 0.4}]
    log = tmp_path / "logs" / "pace" / "d.jsonl"
    log.write_text("\n".join(map(json.dumps, passes)))
    kept = watch.verdict(tmp_path)
    assert (kept["num_passes"], kept["late"], kept["busy"]) == (1, 0.0, 0.4)
    assert not is_void({"m": kept})
    monkeypatch.setattr("paced.psutil.cpu_percent", lambda: 95.0)
    assert is_void({"m": watch.verdict(tmp_path)})
    assert "VOID: m: the machine was 95% busy" in capsys.readouterr().err


@pytest.mark.parametrize("shape", capacity_paced.SHAPES, ids=lambda shape: shape.name)
def test_a_region_under_a_backlog_is_as_it_was_planned(shape: Shape, tmp_path: Path) -> None:
    lengths = capacity_paced.sample(argparse.Namespace(tokens=(250, 2500)))
    assert sum(lengths) / len(lengths) == pytest.approx(1375, rel=0.001)
    file = tmp_path / "plan.yaml"
    file.write_text(yaml.safe_dump(capacity_paced.plan_of(shape, lengths, 32)))
    plan = prfaas("plan", "solve", str(file))
    assert 0.5 < plan["throughput_rps"] < 1.1
    spec = capacity_paced.region_of(shape, MODEL, Path("/model"), plan)
    roles = [item.role for item in spec.pd_clusters[0].nodes[0].instances]
    assert roles.count("prefill") == plan["splits"][0]["num_prefill"]
    assert roles.count("decode") == plan["splits"][0]["num_decode"]
