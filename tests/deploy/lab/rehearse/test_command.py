"""`prfaas rehearse` without engines: what it refuses, and what it makes of answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from deploy.cli import app
from deploy.lab.rehearse import run as rehearse_run
from deploy.lab.rehearse.columns import REMOTE, Served
from deploy.lab.rehearse.deriving import Rehearsal
from deploy.lab.rehearse.run import Run

EXAMPLE = Path(__file__).parents[4] / "deploy/lab/rehearse/examples/rehearsal.yaml"


def run(*words: str | Path, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["rehearse", *(str(word) for word in words)])
    assert result.exit_code == status, result.output
    return result.output


@pytest.fixture
def region(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A region that answers each prompt after as many seconds as it has thousands of real tokens.
    `took` is the time of a pass that should take 0.1 s, `busy` that of the machine.
    """
    told: dict[str, Any] = {"took": 0.1001, "busy": 0.4, "fate": "ok"}

    async def live(
        rehearsal: Rehearsal, run: Run, directory: Path, console: Any
    ) -> tuple[list[Served], float]:
        passes = directory / "run/logs/pace"
        passes.mkdir(parents=True)
        line = {"at": 1.0, "asked": 0.1, "took": told["took"], "prefill": 0, "decode": 1}
        (passes / "d0.jsonl").write_text((json.dumps(line) + "\n") * 200)
        work, limit = run.workload, rehearsal.region["gateway"]["threshold_tokens"]
        rows = enumerate(zip(work.arrivals_s, work.prompt_tokens, strict=True))
        return [
            Served(
                index=i,
                at_s=at_s,
                prompt_tokens=tokens,
                output_tokens=256,
                fate=told["fate"] if i == 3 else "ok",
                remote=bool(rehearsal.model.region.prefill_clusters) and tokens > limit,
                route=REMOTE if tokens > limit else "local hand_off",
                ttft_s=tokens / 1000,
                tpot_s=0.15,
                end_s=at_s + tokens / 1000 + 255 * 0.15,
                predicted_ttft_s=tokens / 900,
                transfer_bytes=4096 * tokens,
            )
            for i, (at_s, tokens) in rows
        ], told["busy"]

    monkeypatch.setattr(rehearse_run, "_live", live)
    return told


def test_the_example_is_printed() -> None:
    assert run("--example") == EXAMPLE.read_text()


def test_three_columns_for_the_same_arrivals(region: dict[str, Any]) -> None:
    result = CliRunner().invoke(app, ["rehearse", str(EXAMPLE), "--requests", "40", "--json"])
    found = json.loads(result.stdout)
    mine = found["regions"]["rehearsal"]
    assert mine["plan"]["throughput_rps"] == pytest.approx(1.5625)
    assert mine["plan"]["offered_rps"] == mine["live"]["offered_rps"]
    assert mine["simulated"]["completed"] == mine["live"]["completed"] == 40
    assert mine["simulated"]["tpot_mean_s"] == pytest.approx(mine["live"]["tpot_mean_s"], rel=0.02)
    assert mine["live"]["prediction_p50"] == pytest.approx(1 / 9, abs=0.01)
    # Of local hand-offs nothing crosses the link, and real bytes stand for those of the plan.
    assert 0 < mine["live"]["link_gib"] < 1.2 * mine["simulated"]["link_gib"]
    assert sum(mine["live"]["routes"].values()) == 40
    assert mine["pace"]["num_passes"] == 200


def test_a_comparison_becomes_a_page_a_picture_and_raw_results(
    region: dict[str, Any], tmp_path: Path
) -> None:
    words = ["--requests", "20", "--compare", "homogeneous", "--compare", "naive"]
    files = [tmp_path / "r.html", tmp_path / "p.png"]
    told = run(
        *(EXAMPLE, *words, "--report", files[0], "--plot", files[1], "--keep", tmp_path / "raw")
    )
    assert "pace kept: 200 passes" in told
    assert "rehearsal against homogeneous, plan: 1.74 times the requests/s" in told
    page = files[0].read_text()
    assert "<svg" in page
    assert "<h2>naive</h2>" in page
    assert files[1].read_bytes().startswith(b"\x89PNG")
    lines = (tmp_path / "raw/homogeneous/live.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["route"] == "local hand_off"
    assert len(lines) == 20
    kept = sorted(path.name for path in (tmp_path / "raw/rehearsal").iterdir())
    assert kept == ["live.jsonl", "pace", "region.yaml", "simulated.jsonl"]
    run(EXAMPLE, "--requests", "20", "--report", tmp_path / "r.md")
    assert "| requests/s answered (plan: at most) | 1.563 |" in (tmp_path / "r.md").read_text()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"took": 0.11}, "VOID: 100.00% of the passes were late"),
        ({"busy": 0.9}, "VOID: the machine was 90% busy"),
        ({"fate": "failed"}, "pace kept"),
    ],
)
def test_what_does_not_count_fails(region: dict[str, Any], change: Any, said: str) -> None:
    region |= change
    assert said in run(EXAMPLE, "--requests", "20", status=1)


def test_a_backlog_is_simulated_as_it_was_sent(region: dict[str, Any], tmp_path: Path) -> None:
    run(EXAMPLE, "--clients", "10", "--duration", "1min", "--keep", tmp_path, status=0)
    rows = {
        name: [
            json.loads(line) for line in (tmp_path / "rehearsal" / name).read_text().splitlines()
        ]
        for name in ("live.jsonl", "simulated.jsonl")
    }
    sent, played = ([row["at_s"] for row in some] for some in rows.values())
    assert sent == played


def test_wrong_words_and_files_cost_no_start(tmp_path: Path) -> None:
    assert "`prfaas rehearse --example` prints one" in run(status=2)
    assert "give one of --load, --rate and --clients" in run(
        EXAMPLE, "--load", "0.5", "--rate", "1", status=2
    )
    assert "--duration" in run(EXAMPLE, "--duration", "fast", status=2)
    assert "name must end in .html or .md" in run(EXAMPLE, "--report", "r.pdf", status=2)
    assert "no policy 'naif'" in run(EXAMPLE, "--compare", "naif", status=2)
    assert "for a region.yaml" in " ".join(run(EXAMPLE, "--lengths", "2k", status=2).split())
    assert "cannot be read" in run(tmp_path / "none.yaml", status=2)
    whole = yaml.safe_load(EXAMPLE.read_text())
    whole["rehearsal"]["pace"] = 4
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(whole))
    assert "rehearsal.pace" in run(tmp_path / "r.yaml", status=2)
    (tmp_path / "region.yaml").write_text("clusters: []\n")
    assert "give --trace or --lengths" in run(tmp_path / "region.yaml", status=2)
