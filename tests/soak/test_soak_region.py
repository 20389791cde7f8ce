"""The soak of a region still runs, finds leaks, and keeps what docs and people read."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from growth import MIB, Sample, grown

SOAK = Path(__file__).with_name("soak_region.py")
KILLED_S = 280.0
"""The limit for a machine that does much else. Alone it takes less than a minute."""
RUN_S = 600.0


def rests(num: int, **growth: float) -> list[Sample]:
    """So many over `RUN_S`, what is held growing by `growth` from the first to the last."""

    def held(name: str, first: float, index: int) -> int:
        return round(first + growth.get(name, 0.0) * index / (num - 1))

    return [
        Sample(
            at_s=RUN_S * index / (num - 1),
            pid=1,
            is_at_rest=True,
            rss_bytes=0,
            # Every other reading is a little higher.
            memory_bytes=held("memory", 60 * MIB, index) + index % 2 * MIB // 2,
            num_descriptors=held("descriptors", 30, index),
            num_threads=1,
            tables={"series": held("series", 100, index)},
        )
        for index in range(num)
    ]


def test_what_is_flat_passes() -> None:
    assert grown("agent", rests(30), 0.0, RUN_S) == []
    assert grown("agent", rests(30, memory=3 * MIB, series=20), 0.0, RUN_S) == []


@pytest.mark.parametrize(
    ("growth", "told"),
    [
        ({"descriptors": 2}, "descriptors after the warm-up"),
        ({"memory": 6 * MIB}, "MiB in the last half"),
        ({"series": 60}, "series +4"),
    ],
)
def test_what_grows_is_named(growth: dict[str, float], told: str) -> None:
    (found,) = grown("agent", rests(30, **growth), 0.0, RUN_S)
    assert found.startswith("agent: ")
    assert told in found


def test_a_short_run_judges_descriptors_only() -> None:
    assert grown("agent", rests(4, memory=60 * MIB, series=900), 0.0, RUN_S) == []
    (found,) = grown("agent", rests(4, descriptors=3), 0.0, RUN_S)
    assert found == "agent: 33 descriptors at the end, at most 31 in the first half"


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_short_soak_finds_nothing_wrong(tmp_path: Path) -> None:
    kept = tmp_path / "soak.json"
    done = subprocess.run(
        [sys.executable, str(SOAK), "--minutes", "0.4", "--json", str(kept)],
        capture_output=True,
        text=True,
        timeout=KILLED_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-4000:]}"
    summary = json.loads(kept.read_text())
    assert summary["wrongs"] == []
    assert summary["outcomes"]["prefill_cluster"] > 0
    processes = summary["processes"]
    assert {"gateway", "directory", "pd-front", "prefill-front", "agent.a1"} <= processes.keys()
    assert processes["agent.a2"]["starts"] > 1
    assert processes["gateway"]["tables"]["series"][1] > 0
