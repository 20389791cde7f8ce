"""Results are kept with the run that they come from, and read again."""

import json
from pathlib import Path

import pytest
import report_prediction
from raw_cases import MACHINE, RUN, keep, prediction
from report_raw import RawError, read, read_all, take, text_of


def test_a_result_is_taken_with_its_run(tmp_path: Path) -> None:
    keep(tmp_path, "wan", {"raw": []})
    file = take("wan", tmp_path, "wan-lossless", tmp_path / "raw", {})
    assert file == tmp_path / "raw" / "wan-lossless.json"
    raw = read(file)
    assert (raw.name, raw.bench, raw.results) == ("wan-lossless", "wan", {"raw": []})
    assert (raw.command, raw.date, raw.commit, raw.machine) == tuple(RUN.values())
    assert raw.where() == "2 CPUs (A CPU), 23.5 GiB, Linux 6.18, Python 3.11.7"


def test_parts_of_a_bench_are_read_together(tmp_path: Path) -> None:
    keep(tmp_path, "wan", 1)
    keep(tmp_path, "load", 2)
    for name, kept_as in (("wan", "wan-b"), ("wan", "wan-a"), ("load", "load")):
        take(name, tmp_path, kept_as, tmp_path / "raw", {})
    found = read_all(tmp_path / "raw")
    assert {bench: [raw.name for raw in raws] for bench, raws in found.items()} == {
        "load": ["load"],
        "wan": ["wan-a", "wan-b"],
    }


def test_no_folder_has_no_results(tmp_path: Path) -> None:
    assert read_all(tmp_path / "raw") == {}


def test_a_result_without_its_run_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "wan.json").write_text("{}")
    with pytest.raises(RawError, match=r"wan\.run\.json is missing: `make bench` writes it"):
        take("wan", tmp_path, "wan", tmp_path / "raw", {})
    assert not (tmp_path / "raw").exists()


def test_results_are_not_kept_under_the_name_of_another_bench(tmp_path: Path) -> None:
    keep(tmp_path, "wan", {})
    with pytest.raises(RawError, match=r"results of wan are kept as wan\[-PART\]"):
        take("wan", tmp_path, "wander", tmp_path / "raw", {})
    assert read_all(tmp_path / "raw") == {}


def test_what_cannot_be_kept_leaves_what_was_kept(tmp_path: Path) -> None:
    keep(tmp_path, "wan", {"raw": []})
    file = take("wan", tmp_path, "wan", tmp_path / "raw", {})
    before = file.read_text()
    run = {"bench": "wan", **RUN, "machine": {"cpu": "A CPU"}}
    (tmp_path / "wan.run.json").write_text(json.dumps(run))
    with pytest.raises(RawError, match="lacks cpus, memory_gib, kernel, python"):
        take("wan", tmp_path, "wan", tmp_path / "raw", {})
    assert file.read_text() == before


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "is no JSON"),
        ("[]", "an object with bench, command"),
        (json.dumps({"bench": "wan", "machine": MACHINE}), "lacks command, date, commit, results"),
    ],
)
def test_a_broken_file_is_named(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "wan.json").write_text(text)
    with pytest.raises(RawError, match=rf"wan\.json.*{reason}"):
        read_all(tmp_path)


def test_what_fits_on_a_line_has_one() -> None:
    rows = [{"peer": "ours", "seconds": [1.5, None]}, {"peer": "µ" * 90, "error": "e" * 90}]
    text = text_of({"raw": rows})
    assert json.loads(text) == {"raw": rows}
    assert '\n  {"peer": "ours", "seconds": [1.5, null]},\n' in text
    assert max(map(len, text.splitlines())) < 160


def test_what_a_bench_keeps_can_be_trimmed(tmp_path: Path) -> None:
    keep(tmp_path, "prediction", prediction())
    trims = {"prediction": report_prediction.trimmed, "wan": len}
    raw = read(take("prediction", tmp_path, "prediction", tmp_path / "raw", trims))
    assert raw.results[0]["rows"] == prediction()[0]["rows"]
    assert raw.results[0]["records"][0] == {
        "phase": None,
        "target": "local",
        "num_prompt_tokens": None,
        "ttft_s": 1.0,
        "predicted_ttft_s": 1.1,
        "num_retries": 0,
    }
