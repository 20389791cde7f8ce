"""`prfaas simulate`: files right and wrong, policies side by side, pictures, studies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from deploy.cli import app
from deploy.plan.simulate.building import load_simulation
from deploy.plan.simulate.cli import simulate_app
from deploy.plan.simulate.studies import STUDIES

EXAMPLE = Path(__file__).parents[3] / "deploy/plan/simulate/examples/simulation.yaml"


def run(*words: str | Path, status: int = 0) -> str:
    result = CliRunner().invoke(simulate_app, [str(word) for word in words])
    assert result.exit_code == status, result.output
    return result.output


def document() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    return found


def written(tmp_path: Path, whole: dict[str, Any]) -> Path:
    path = tmp_path / "simulation.yaml"
    path.write_text(yaml.safe_dump(whole))
    return path


def changed(tmp_path: Path, **changes: Any) -> Path:
    """The example, two minutes of it, with other keys of `simulation`; None removes one."""
    whole = document()
    link = {"from": "compute-site", "to": "home-site"}
    events = link | {"changes": [{"at": "60s", "rate": "5Gbit"}]}
    simulation = whole["simulation"] | {"duration": "2min", "links": [events]} | changes
    whole["simulation"] = {key: value for key, value in simulation.items() if value is not None}
    return written(tmp_path, whole)


def numbers(*words: str | Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(*words, "--json"))
    return found


def test_the_example_is_printed_and_reads() -> None:
    assert run("example") == EXAMPLE.read_text()
    found = load_simulation(EXAMPLE)
    assert found.capacity_rps == pytest.approx(3.185, abs=0.005)
    assert found.compared == ["static", "router", "homogeneous", "oracle", "guarded"]


def test_a_file_is_played_with_its_policy(tmp_path: Path) -> None:
    path = changed(tmp_path)
    table = run(path)
    assert "guarded" in table
    assert "TTFT P90, s" in table
    found = numbers(path)
    assert list(found["policies"]) == ["guarded"]
    row = found["policies"]["guarded"]
    assert row["requests"] == pytest.approx(0.8 * 3.185 * 120, rel=0.15)
    assert row["done"] + row["refused"] == row["requests"]
    assert found == numbers(path)
    assert found != numbers(path, "--seed", "2")


def test_policies_are_compared(tmp_path: Path) -> None:
    path = changed(tmp_path)
    found = numbers(path, "--compare", "--series", "--warm-up", "0.1")["policies"]
    assert set(found) == {"guarded", "static", "router", "homogeneous", "oracle"}
    assert found["homogeneous"]["egress_gbps"] == 0
    assert len(set(map(len, found["router"]["series"].values()))) == 1
    assert list(numbers(path, "--policy", "oracle")["policies"]) == ["oracle"]


def test_pictures_are_written(tmp_path: Path) -> None:
    path = changed(tmp_path)
    both = ("--policy", "router", "--policy", "static")
    for name, policies in (("out.png", both), ("out.svg", both[:2])):
        run(path, *policies, "--plot", tmp_path / name)
        assert (tmp_path / name).stat().st_size > 10_000
    missing = tmp_path / "none" / "out.png"
    assert "there is no directory" in run(path, "--plot", missing, status=2)
    assert "must end in .png" in run(path, "--plot", tmp_path / "out.pdf", status=2)


def test_a_policy_by_reports_decides_for_the_places_that_are_simulated(tmp_path: Path) -> None:
    policies = {
        "seen": {"routing": "router"},
        "told": {"routing": "router", "report_every": "0.5s"},
    }
    simulation = {"duration": "4min", "load": 1.0, "policies": policies}
    path = written(tmp_path, document() | {"simulation": simulation})
    seen, told = (numbers(path, "--policy", name)["policies"][name] for name in policies)
    assert told["ttft_p90_s"] == pytest.approx(seen["ttft_p90_s"], rel=0.1)
    assert told["remote_share"] == pytest.approx(seen["remote_share"], abs=0.05)
    assert told["prediction_error"] < 0.25


def test_an_overhead_is_learnt_and_predicted(tmp_path: Path) -> None:
    contention = {name: {"overhead": "3s"} for name in ("home-site", "compute-site")}
    simulation = {"duration": "5min", "load": 0.6, "policy": "router", "contention": contention}
    path = written(tmp_path, document() | {"simulation": simulation})
    assert numbers(path)["policies"]["router"]["prediction_error"] < 0.05


def chats(num: int, block_tokens: int, start: float, ms: float) -> str:
    """A trace of `num` prompts of 4,000 tokens, one a second in times of `ms` milliseconds each."""
    ids = [list(range(100 * i, 100 * i + -(-4000 // block_tokens))) for i in range(num)]
    lines = [
        {
            "timestamp": start + i * 1000 / ms,
            "input_length": 4000,
            "output_length": 9,
            "hash_ids": x,
        }
        for i, x in enumerate(ids)
    ]
    return "\n".join(map(json.dumps, lines))


@pytest.mark.parametrize(
    ("text", "trace", "told"),
    [
        (chats(120, 512, 0, 1), {}, ""),
        (chats(120, 512, 1_764_288_000_000, 1), {}, ""),
        (chats(120, 512, 1_764_288_000, 1000), {"unit": "s"}, ""),
        (chats(120, 512, 0, 1000), {}, "1,008 requests per second if its timestamps are millisec"),
        (chats(120, 64, 0, 1), {"block_tokens": 64}, ""),
        (chats(120, 64, 0, 1), {}, "8 blocks of 512 tokens, and hash_ids has 63; block_tokens: 64"),
        (
            chats(120, 512, 0, 1),
            {"block_tokens": 64},
            "63 blocks of 64 tokens, and hash_ids has 8;",
        ),
        ('{"timestamp": 0, "x": ' + "[" * 9999, {}, "not a trace line"),
    ],
)
def test_a_trace_is_played_as_it_was_or_refused(
    tmp_path: Path, text: str, trace: dict[str, Any], told: str
) -> None:
    (tmp_path / "trace.jsonl").write_text(text)
    whole = document()
    whole["traffic"] = {"lengths": {"trace": {"file": "trace.jsonl"} | trace}}
    path = written(tmp_path, whole | {"simulation": {"policy": "router"}})
    if told:
        assert told in run(path, status=2)
    else:
        found = numbers(path)["policies"]["router"]
        assert (found["requests"], round(found["offered_rps"])) == (120, 1)


def test_a_trace_is_played_with_caches(tmp_path: Path) -> None:
    lines = [
        {
            "timestamp": 2000 * i,
            "input_length": 5000 + 512 * (i % 4),
            "output_length": 50,
            "hash_ids": [*range(9), *(100 * i + j for j in range(1 + i % 4))],
        }
        for i in range(40)
    ]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    whole = document()
    whole["traffic"] = {"lengths": {"trace": {"file": "trace.jsonl"}}}
    simulation = {"policy": "router", "trace_speed": 2.0}
    cold = numbers(written(tmp_path, whole | {"simulation": simulation}))["policies"]["router"]
    simulation |= {"cache_tokens": {"home-site": "100k", "compute-site": "100k"}}
    warm = numbers(written(tmp_path, whole | {"simulation": simulation}))["policies"]["router"]
    assert cold["requests"] == warm["requests"] == 40
    assert warm["ttft_p50_s"] < 0.8 * cold["ttft_p50_s"]


def test_phases_change_the_traffic(tmp_path: Path) -> None:
    phases = [{"at": "1min", "rate_rps": 0.5, "length_factor": 0.1, "output_factor": 0.1}]
    path = changed(tmp_path, phases=phases, links=[], policy="router", duration="4min")
    simulation = load_simulation(path)
    nums_late = [sum(at >= 60 for at in simulation.workload(seed).arrivals_s) for seed in range(40)]
    assert sum(nums_late) / 40 == pytest.approx(90, rel=0.05)
    work = simulation.workload(1)
    late = [i for i, at in enumerate(work.arrivals_s) if at >= 60]
    assert {work.output_tokens[i] for i in late} == {102}
    assert max(work.prompt_tokens[i] for i in late) <= 13_108


@pytest.mark.parametrize(
    ("changes", "path", "message"),
    [
        ({"polcy": "router"}, "simulation.polcy", "did you mean 'policy'"),
        ({"policy": "routr"}, "simulation.policy", "did you mean 'router'"),
        ({"load": None}, "simulation.load", "traffic.rate_rps"),
        ({"load": -1}, "simulation.load", "greater than 0"),
        ({"cache_tokens": {"home-site": 5}}, "simulation.cache_tokens", "needs a trace"),
        (
            {"prefill_factors": {"hom-site": 2}},
            "simulation.prefill_factors.hom-site",
            "did you mean",
        ),
        ({"contention": {"hom-site": {}}}, "simulation.contention.hom-site", "did you mean"),
        ({"links": [{"from": "a", "to": "b"}]}, "simulation.links[0]", "compute-site to home-site"),
        ({"phases": [{"at": "1min", "load": 1, "rate_rps": 1}]}, "phases[0]", "not both"),
        ({"phases": [{"at": "3min", "load": 1}]}, "simulation.phases[0].at", "after the end"),
        ({"duration": "soon"}, "simulation.duration", "is not a time"),
    ],
)
def test_mistakes_are_named_with_their_place_and_the_fix(
    tmp_path: Path, changes: dict[str, Any], path: str, message: str
) -> None:
    text = run(changed(tmp_path, **changes), status=2)
    assert path in text
    assert message in text


def test_other_mistakes(tmp_path: Path) -> None:
    path = changed(tmp_path)
    assert "did you mean 'router'" in run(path, "--policy", "routr", status=2)
    assert "cannot be read" in run(tmp_path / "none.yaml", status=2)
    assert "did you mean 'overload'" in run("study", "overlode", status=2)
    assert "--trace is for" in run("study", "shift", "--trace", path, status=2)
    assert "not a trace line" in run("study", "overload", "--trace", path, status=2)
    whole = document()
    whole["pd_clusters"] = whole["pd_clusters"] * 2
    assert "whose home it is" in run(written(tmp_path, whole), status=2)
    crowded = changed(tmp_path, policy="all", policies={"all": {"num_prefill": 8}})
    assert "all 8 instances of home-site prefill" in run(crowded, status=2)


def image_document(**simulation: Any) -> dict[str, Any]:
    """The example with images, whose encoding takes long."""
    plan = EXAMPLE.parents[2] / "examples/images.yaml"
    whole: dict[str, Any] = yaml.safe_load(plan.read_text())
    whole["traffic"]["rate_rps"] = 20
    whole["profiles"]["h800"]["encode"] = {"fixed_s": 0.02, "s_per_token": 1e-4}
    whole["simulation"] = {"duration": "20s", **simulation}
    return whole


def test_images_are_played(tmp_path: Path) -> None:
    found = {}
    for num in (0, 6):
        stage = {"encode_instances": {"home-site": num}} if num else {}
        path = written(tmp_path, image_document(**stage))
        found[num] = numbers(path)["policies"]["router"]
        assert found[num] == numbers(path)["policies"]["router"]
    alone, apart = found[0], found[6]
    assert alone["requests"] == apart["requests"] == apart["done"]
    assert alone["images_encoded_apart"] == 0 < alone["images_found"] < alone["images_left"]
    assert apart["images_encoded_apart"] > 10 * apart["images_left"]
    assert 0 < apart["encode_mean_s"] < alone["encode_mean_s"]
    assert apart["ttft_mean_s"] < alone["ttft_mean_s"]
    table = run(path)
    assert "images encoded apart" in table
    assert "delay by images" in table


def test_text_has_no_rows_of_images(tmp_path: Path) -> None:
    whole = image_document()
    del whole["images"]
    path = written(tmp_path, whole)
    assert not any("image" in key or "encode" in key for key in numbers(path)["policies"]["router"])
    assert "images" not in run(path)


def test_images_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    wrong = image_document(
        encode_instances={"home-sit": 1}, policies={"long": {"rebalance_every": "10s"}}
    )
    text = " ".join(run(written(tmp_path, wrong), status=2).split())
    assert "no cluster 'home-sit'; did you mean 'home-site'" in text
    assert "does not go with images" in text
    text_only = image_document(encode_instances={"home-site": 1})
    del text_only["images"]
    text = " ".join(run(written(tmp_path, text_only), status=2).split())
    assert "needs images" in text


def test_studies_say_which_goals_were_met() -> None:
    table = CliRunner().invoke(simulate_app, ["study", "congestion", "--scale", "0.03"])
    assert table.exit_code in (0, 1)
    assert "goodput of the router over the oracle's" in table.output
    assert ("MISSED" in table.output) == (table.exit_code == 1)
    found = CliRunner().invoke(simulate_app, ["study", "overload", "--scale", "0.02", "--json"])
    report = json.loads(found.output)
    assert {row["admission"] for row in report["rows"]} == {"predicted", "present", "at_decode"}
    assert {tuple(goal) for goal in report["goals"]} == {("name", "wanted", "found", "met")}


def test_a_short_day_without_conversions() -> None:
    study = STUDIES["steady"](1, 0.02)
    assert [goal.met for goal in study.goals] == [True]


def test_the_command_is_part_of_prfaas() -> None:
    text = CliRunner().invoke(app, ["simulate", "--help"]).output
    assert "virtual time" in text
    assert "study" in text


def test_several_pd_clusters_are_played_with_their_homes(tmp_path: Path) -> None:
    path = tmp_path / "sites.yaml"
    whole = yaml.safe_load(run("example", "--sites"))
    whole["simulation"] |= {
        "duration": "3min",
        "lost": [{"cluster": "north", "at": "1min", "until": "2min"}],
    }
    path.write_text(yaml.safe_dump(whole))
    found = json.loads(run(path, "--policy", "router", "--policy", "at-home", "--json"))
    router, at_home = found["policies"]["router"], found["policies"]["at-home"]
    assert [row["home"] for row in router["homes"]] == ["east", "west"]
    assert sum(row["requests"] for row in router["homes"]) == router["requests"]
    assert at_home["spilled_share"] == 0
    assert (router["lost"], at_home["lost"]) == (0, 0)
    assert "decoded elsewhere" in " ".join(run(path, "--compare").split())
    whole["simulation"]["lost"][0]["cluster"] = "nort"
    assert "did you mean 'north'" in run(written(tmp_path, whole), status=2)


def test_a_loss_is_followed(tmp_path: Path) -> None:
    text = run("study", "loss", "--scale", "0.3", "--json")
    study = json.loads(text)
    assert {goal["met"] for goal in study["goals"]} == {True}
    by_spill = {(row["lost"], row["spill"]): row for row in study["rows"]}
    assert by_spill["east", "overflow"]["good_share"] > by_spill["east", "never"]["good_share"]


def test_images_are_studied_beside_the_paper() -> None:
    study = STUDIES["images"](1, 0.1)
    assert len(study.rows) == 10
    for row in study.rows:
        assert row["best"] in ("EP+D", "ED+P", "E+P+D")
        assert row["plain_rps"] > 0
        assert sum(int(char) for char in row["E+P+D_instances"] if char.isdigit()) == 8
    names = " ".join(goal.name for goal in study.goals)
    for words in ("disaggregated over", "over neither", "migration's share", "MME"):
        assert words in names
    # The steps of the ablation and what migration costs do not depend on the length of the runs.
    assert [goal.met for goal in study.goals[:2]] == [True, True]
    assert [goal.met for goal in study.goals[-3:]] == [True, True, True]
