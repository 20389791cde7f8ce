"""`prfaas plan solve` for prompts with images: arrangements and goals."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from deploy.plan.cli import plan_app
from deploy.plan.solve.building import load_plan
from scheduler.planning.lengths import mean_tokens

EXAMPLE = Path(__file__).parents[3] / "deploy" / "plan" / "examples" / "images.yaml"
ARRANGEMENTS = ["EP+D", "ED+P", "E+P+D", "EPD"]


def run(*words: str, status: int = 0) -> str:
    result = CliRunner().invoke(plan_app, list(words))
    assert result.exit_code == status, result.output
    return result.output


def changed(tmp_path: Path, **changes: Any) -> str:
    """The example with keys replaced; a key of a section is `images__share`. None removes one."""
    whole = yaml.safe_load(EXAMPLE.read_text())
    for path, value in changes.items():
        *sections, key = path.split("__")
        here = whole
        for name in sections:
            here = here[name]
        if value is None:
            del here[key]
        else:
            here[key] = value
    file = tmp_path / "plan.yaml"
    file.write_text(yaml.safe_dump(whole))
    return str(file)


def solved(file: str, status: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        run("solve", file, "--json", "--requests", "2000", status=status)
    )
    return found


def small(**more: Any) -> dict[str, Any]:
    """A cluster of 3 instances, whose search is short."""
    one = {"name": "home-site", "instances": 3, "profile": "h800", "decode_memory": "56GB"}
    return {"pd_clusters": [one], "traffic__rate_rps": 10, **more}


def test_every_arrangement_has_a_goodput_and_what_is_missed_above(tmp_path: Path) -> None:
    found = solved(changed(tmp_path, **small()))["images"]
    rows = found["arrangements"]
    assert [row["arrangement"] for row in rows] == ARRANGEMENTS
    best = max(rows, key=lambda row: row["goodput_rps"])
    assert found["best"] == best["arrangement"]
    for row in rows:
        assert sum(row["division"].values()) == 3
        assert 0 < row["goodput_rps"] <= 1.1 * row["bound_rps"]
        assert row["ttft_p90_s"] <= 0.5
        assert row["missed_above"] in ("TTFT", "TPOT", "throughput")
    assert found["per_image"]["embedding_bytes"] == 576 * 8192
    assert found["links"] == []


def test_a_rate_out_of_reach_is_a_missed_goal(tmp_path: Path) -> None:
    file = changed(tmp_path, **small(traffic__rate_rps=80))
    goal = solved(file, status=1)["goals"]["images"]
    assert not goal["met"]
    assert "times the instances" in goal["advice"]
    text = " ".join(run("solve", file, "--requests", "2000", status=1).split())
    assert "within both objectives: NOT met" in text


def test_objectives_that_cannot_be_kept_say_so(tmp_path: Path) -> None:
    file = changed(tmp_path, **small(slo={"ttft_p90": "15ms", "tokens_per_s": 20}))
    found = solved(file, status=1)
    assert {row["goodput_rps"] for row in found["images"]["arrangements"]} == {0}
    assert "even at a low rate" in found["goals"]["images"]["advice"]


def test_a_remote_cluster_prefills_some_and_the_link_has_a_rule(tmp_path: Path) -> None:
    file = changed(
        tmp_path,
        **small(),
        prefill_clusters=[{"name": "far", "instances": 2, "profile": "h800"}],
        links=[{"from": "far", "to": "home-site", "rate": "100Gbit"}],
    )
    found = solved(file)["images"]
    assert found["offload_fraction"] > 0
    (link,) = found["links"]
    assert (link["travels"], link["reason"]) == ("pixels", "fewer_bytes")
    assert "over far to home-site: pixels" in run("solve", file, "--requests", "2000")


def test_images_lengthen_prompts_and_prefills() -> None:
    found = load_plan(EXAMPLE)
    assert found.images is not None
    text = mean_tokens(found.images.traffic.text)
    whole = mean_tokens(found.region.traffic.lengths)
    assert whole - text == pytest.approx(0.8 * 1.5 * 576, rel=0.01)
    plain_s = 0.017 + 2.27e-5 * 1000 + 4.4e-10 * 1000**2
    encode_s = 0.8 * 0.9 * (0.0009 + 2.4e-6 * 1.5 * 576)
    assert float(found.region.pd_clusters[0].prefill(1000)) == pytest.approx(plain_s + encode_s)


def test_the_profile_file_and_the_config_fill_what_is_left_out(tmp_path: Path) -> None:
    profile = {
        "profile": {
            "prefill": {"points": [{"tokens": n, "seconds": n / 1e4} for n in (100, 500, 1000)]},
            "decode": {"steps": [{"batch_size": 8, "step_seconds": 0.02}]},
            "encode": {
                "points": [{"tokens": 576, "seconds": 0.01}, {"tokens": 1152, "seconds": 0.016}]
            },
        }
    }
    (tmp_path / "profile.yaml").write_text(yaml.safe_dump(profile))
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "torch_dtype": "float16",
        "vision_config": {"hidden_size": 1024},
        "text_config": {
            "model_type": "llama",
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "head_dim": 128,
        },
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    file = changed(
        tmp_path,
        profiles={"h800": {"file": "profile.yaml", "fit": "interpolate"}},
        kv_cache={"model_config_file": "config.json"},
        images__embedding_bytes_per_token=None,
    )
    found = load_plan(Path(file)).images
    assert found is not None
    assert found.model.sizes.embedding_token_bytes == 8192
    assert found.model.profile.encode.seconds(576) == pytest.approx(0.01)
