"""The command itself, on one line of a small file: what is noticed, and that nothing is changed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILE = ROOT / "transport/wire/ranges.py"
TESTS = "tests/transport/wire/test_ranges.py"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_mutants_of_a_tested_line_are_killed_and_the_file_stays_as_it_is(tmp_path: Path) -> None:
    text = FILE.read_text()
    line = text.splitlines().index("        if start >= end:") + 1  # the first thing `add` does
    results = tmp_path / "results.json"
    command = [sys.executable, str(ROOT / "tests/mutation/run.py")]
    command += [f"transport/wire/ranges.py:{line}", "--tests", TESTS]
    ran = subprocess.run(
        [*command, "--json", str(results)], capture_output=True, text=True, check=True
    )
    found = {entry["after"].strip(): entry for entry in json.loads(results.read_text())}
    assert set(found) == {"if start > end:", "if start < end:"}
    assert found["if start < end:"]["status"] == "killed"
    assert found["if start < end:"]["killed_by"].startswith(f"{TESTS}::")
    assert "transport/wire/ranges.py: " in ran.stdout
    assert FILE.read_text() == text
