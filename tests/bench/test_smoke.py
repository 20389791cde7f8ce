"""Every bench still runs, at its smallest size, and keeps all its rows."""

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from bench_smoke import BENCHES as FOLDER
from bench_smoke import CHECKS, run_smoke

_spec = importlib.util.spec_from_file_location("bench_driver", FOLDER / "__main__.py")
assert _spec is not None
assert _spec.loader is not None
driver = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(driver)

WITHOUT_ENGINES = [name for name in driver.BENCHES if name not in driver.NEED_ENGINES]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", WITHOUT_ENGINES)
def test_a_bench_runs_and_keeps_every_row(name: str, tmp_path: Path) -> None:
    run_smoke(name, tmp_path)


def test_every_bench_is_run_by_a_test() -> None:
    scripts = {file.stem.removeprefix("bench_") for file in FOLDER.glob("bench_*.py")}
    assert scripts == set(driver.BENCHES) == CHECKS.keys()
    engine_tests = [file.read_text() for file in (FOLDER.parent / "engine").rglob("test_*.py")]
    for name in driver.NEED_ENGINES:
        assert any(f'run_smoke, "{name}"' in text for text in engine_tests), name


def test_a_run_says_what_one_needs_to_measure_again() -> None:
    record = driver.run_record("transport", ["--rounds", "3", "--peers", "nixl write"])
    assert record["command"] == (
        """make bench BENCH_ARGS="transport --rounds 3 --peers 'nixl write'\""""
    )
    assert record.keys() == {"bench", "command", "date", "commit", "machine"}
    assert record["machine"]["cpus"] >= 1
    assert all(record["machine"].values()), record["machine"]


@pytest.mark.parametrize(("status", "has_record"), [(0, True), (1, False)])
def test_only_a_bench_that_ended_well_has_a_record(
    status: int, has_record: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wan.json").write_text("[]")
    record = tmp_path / "wan.run.json"
    record.write_text("of an earlier run")
    monkeypatch.setattr(driver, "RESULTS", tmp_path)
    monkeypatch.setattr(driver, "run_record", lambda name, extra: {"bench": name})
    ended = SimpleNamespace(returncode=status)
    monkeypatch.setattr(driver.subprocess, "run", lambda *_, **__: ended)
    assert driver.main(["wan"]) == status
    assert record.exists() is has_record
    if has_record:
        assert json.loads(record.read_text()) == {"bench": "wan"}
