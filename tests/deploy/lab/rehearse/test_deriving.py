"""What is derived of a rehearsal file: the region, its units, what the simulator plays."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from fcfs_region import Prefiller, first_tokens_s

from deploy.lab.rehearse.columns import column, simulated
from deploy.lab.rehearse.deriving import Rehearsal
from deploy.lab.rehearse.preparing import prepare
from deploy.lab.rehearse.run import Run
from deploy.lab.rehearse.traffic import Wanted
from deploy.region.spec.region import RegionSpec
from kvmanager.config_files.units import parse_rate
from scheduler.planning.throughput import Mode
from scheduler.replay.driver import replay

EXAMPLE = Path(__file__).parents[4] / "deploy/lab/rehearse/examples/rehearsal.yaml"


def document() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    return found


def prepared(
    tmp_path: Path, whole: dict[str, Any], *compared: str, **wanted: Any
) -> tuple[Run, Rehearsal]:
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(whole))
    found = prepare(file, compared, Wanted(**wanted), tmp_path, None)
    return found, found.rehearsals[-1]


def instances(rehearsal: Rehearsal) -> dict[str, list[str]]:
    return {
        cluster["name"]: [item["role"] for item in cluster["nodes"][0]["instances"]]
        for cluster in rehearsal.region["clusters"]
    }


def without_pace(region: Any) -> Any:
    """A region whose engines are as fast as they are."""
    plain = copy.deepcopy(dict(region))
    for model in plain["models"]:
        model.pop("pace")
    for cluster in plain["clusters"]:
        for instance in cluster["nodes"][0]["instances"]:
            instance.pop("pace", None)
    return plain


def test_the_region_of_the_case_study_has_the_planners_division(tmp_path: Path) -> None:
    _, mine = prepared(tmp_path, document())
    assert mine.plan.system_rps(Mode.EXACT) == pytest.approx(1.5625)
    assert instances(mine) == {
        "compute-site": ["prefill", "prefill"],
        "home-site": ["prefill", "prefill", "decode", "decode"],
    }
    spec = RegionSpec.model_validate(without_pace(mine.region))
    assert {item.decode_slots for c in spec.clusters for item in c.instances} == {20}
    assert spec.gateway.threshold_tokens == int((mine.plan.threshold_tokens or 0) / 16) == 1558
    assert spec.gateway.hand_off_tokens == 16
    assert mine.region["models"][0]["pace"] == {
        "profile": str(tmp_path / "mine" / "h20.yaml"),
        "tokens_per_token": 16,
        "output_tokens_per_token": 4,
        "slowdown": 1.5,
    }
    paces = {item.get("pace") for item in mine.region["clusters"][0]["nodes"][0]["instances"]}
    assert paces == {str(tmp_path / "mine" / "h200.yaml")}
    # A paced engine makes its curve of these points: it is that of the plan.
    points = mine.profiles["h20"].profile.prefill.points
    curve = mine.plan.region.pd_clusters[0].prefill
    assert [p.seconds for p in points] == pytest.approx([curve(p.tokens) for p in points])


@pytest.mark.parametrize("slowdown", [1.0, 4.0])
def test_a_transfer_takes_as_long_as_in_the_plan(tmp_path: Path, slowdown: float) -> None:
    whole = document()
    whole["rehearsal"]["slowdown"] = slowdown
    _, mine = prepared(tmp_path, whole)
    tokens = mine.plan.mean_offloaded_tokens
    planned_s = float(mine.plan.region.kv.size(tokens)) / mine.plan.region.links[0].bytes_per_s
    rate = parse_rate(mine.region["links"][0]["emulate"]["rate"])
    real_s = float(mine.model.region.kv.size(tokens / 16)) / rate
    assert real_s == pytest.approx(planned_s * slowdown, rel=1e-3)
    assert mine.region["links"][0]["emulate"]["rtt"] == f"{20 * slowdown:g}ms"


def test_a_link_changes_live_as_in_the_simulation(tmp_path: Path) -> None:
    whole = document()
    whole["rehearsal"]["slowdown"] = 2.0
    change = {"at": "1min", "rate": "25Gbit"}
    link = {"from": "compute-site", "to": "home-site", "changes": [change]}
    whole["simulation"]["links"] = [link]
    _, mine = prepared(tmp_path, whole)
    (schedule,) = mine.model.schedules.values()
    first, second = schedule.rates
    assert schedule.times_s == (0.0, 120.0)
    assert first == pytest.approx(mine.model.region.links[0].bytes_per_s)
    assert second == pytest.approx(first / 2)
    link["outages"] = [{"at": "1min", "until": "2min"}]
    with pytest.raises(ValueError, match="changes rates of links only"):
        prepared(tmp_path, whole)


def test_the_simulated_column_does_not_depend_on_the_units(tmp_path: Path) -> None:
    found = {}
    for tokens, slowdown in ((4, 1.0), (4, 5.0), (8, 1.0)):
        whole = document()
        whole["rehearsal"] |= {"output_tokens_per_token": tokens, "slowdown": slowdown}
        both, mine = prepared(tmp_path, whole, load=0.6)
        work = both.workload
        outcome = replay(mine.model, work, mine.policy)
        sent = sum(outcome.egress_bytes.values())
        found[tokens, slowdown] = column(
            simulated(outcome), work.arrivals_s[-1], mine.scale, link_bytes=sent
        )
    base, slow, coarse = found.values()
    # Reports of clusters come every half second, whatever the slowdown.
    for name in ("ttft_mean_s", "ttft_p90_s", "remote_share", "link_gbps", "throughput_rps"):
        assert getattr(slow, name) == pytest.approx(getattr(base, name), rel=0.05), name
    assert slow.tpot_mean_s == pytest.approx(0.025, rel=0.02)
    # A step of 8 tokens is 0.1 s longer, and a first token waits for two to three.
    assert (coarse.ttft_mean_s or 0) - (base.ttft_mean_s or 0) == pytest.approx(0.25, abs=0.08)


def test_other_regions_get_the_same_arrivals(tmp_path: Path) -> None:
    both, naive = prepared(tmp_path, document(), "homogeneous", "naive", num_requests=50)
    mine, alone, _ = both.rehearsals
    assert instances(alone) == {"home-site": ["prefill"] * 4 + ["decode"] * 2}
    assert not alone.region["links"]
    assert instances(naive)["home-site"] == ["decode"] * 4
    assert naive.region["gateway"]["threshold_tokens"] == 0
    assert [rehearsal.name for rehearsal in both.rehearsals] == ["mine", "homogeneous", "naive"]
    assert mine.num_instances == alone.num_instances == naive.num_instances == 6
    assert len(both.workload) == 50


def test_a_policy_of_the_file_decides_what_the_gateway_is_told(tmp_path: Path) -> None:
    whole = document()
    whole["simulation"]["policy"] = "wrong"
    wrong = {"num_prefill": 1, "threshold_tokens": "40k", "rebalance_every": "1min"}
    whole["simulation"]["policies"]["wrong"] = wrong | {"margin": "2s", "admission": "predicted"}
    whole["rehearsal"]["slowdown"] = 2.0
    _, mine = prepared(tmp_path, whole)
    assert instances(mine)["home-site"] == ["prefill"] + ["decode"] * 3
    gateway = mine.region["gateway"]
    assert gateway["threshold_tokens"] == 2500
    assert gateway["scheduling"]["routing"]["margin_s"] == mine.policy.margin_s == 4.0
    assert gateway["scheduling"]["admission"] == {"policy": "predicted", "ttft_slo_s": 60.0}
    assert gateway["scheduling"]["long_term"]["mode"] == "act"
    assert mine.policy.long_term is not None
    assert mine.policy.long_term.period_s == 120.0


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("rehearsal", "tokens_per_token"), 4, "set rehearsal.tokens_per_token to 16 or more"),
        (("simulation", "prefill_jitter"), 0.1, "simulation.prefill_jitter: a rehearsal has"),
        (("simulation", "policy"), "oracle", "knows no oracle"),
        (("pd_clusters", 0, "rate_rps"), 1.0, "for one PD cluster"),
    ],
)
def test_what_cannot_be_rehearsed_is_refused(
    tmp_path: Path, path: tuple[str | int, ...], value: Any, said: str
) -> None:
    whole = document()
    place: Any = whole
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(ValueError, match=said):
        prepared(tmp_path, whole)


@pytest.mark.parametrize("compared", [(), ("homogeneous",)])
def test_at_low_load_the_simulation_is_a_queue(tmp_path: Path, compared: tuple[str, ...]) -> None:
    both, mine = prepared(tmp_path, document(), *compared, rate_rps=0.2, num_requests=300)
    work, region = both.workload, mine.model.region
    # A queue knows neither prompts that share an instance nor steps.
    ideal = replace(mine.model, max_concurrent=1, pass_tokens=None, load_steps=None)
    # Nor prompts below the threshold in the prefill cluster.
    outcome = replay(ideal, work, replace(mine.policy, margin_s=1e9))
    threshold = next(iter((mine.policy.thresholds or {}).values()), 1 << 30)
    pd = region.pd_clusters[0]
    num_prefill = mine.policy.num_prefill or 0
    places = [
        Prefiller(lambda n: float(pd.prefill(n)), takes=lambda n: n <= threshold)
    ] * num_prefill
    for cluster in region.prefill_clusters:
        # All but the fixed part is on its way while the prefill runs.
        far = Prefiller(
            lambda n, curve=cluster.prefill: float(curve(n)),
            lambda n: region.links[0].rtt_s,
            lambda n: n > threshold,
        )
        places += [far] * int(cluster.num_instances)
    expected = first_tokens_s(
        list(zip(work.arrivals_s, work.prompt_tokens, strict=True)),
        places,
        pd.batch_size * (pd.num_instances - num_prefill),
        pd.step_s,
        work.output_tokens[0],
    )
    assert outcome.summary().ttft.mean_s == pytest.approx(np.mean(expected), rel=0.05)
    assert outcome.summary().ttft.p90_s == pytest.approx(np.quantile(expected, 0.9), rel=0.05)
