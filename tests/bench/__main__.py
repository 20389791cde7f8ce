"""`make bench`: run the measurements, all or those named, and keep their raw numbers.

BENCH_ARGS="gateway --seconds 5" hands the rest to one of them, BENCH_ARGS="--smoke" runs all at
their smallest size. Results go to bench-results/: NAME.json, and in NAME.run.json when they were
measured, with which command, on which machine and commit. `make report` reads both.
"""

import json
import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

BENCHES = (
    "transport",
    "wan",
    "gateway",
    "handoff",
    "copier",
    "hostile",
    "prediction",
    "region",
    "e2e",
    "load",
    "capacity",
    "rehearsal",
)
NEED_ENGINES = ("prediction", "region", "e2e", "load", "capacity", "rehearsal")
"""Start regions of real engines. Their smoke runs ask one that the engine tests have running, but
for the last, which starts a paced one."""
SMOKE = "--smoke"
RESULTS = Path("bench-results")


def run_record(name: str, extra: list[str]) -> dict[str, Any]:
    """What one has to know of a run to judge its numbers, or to measure them again."""
    return {
        "bench": name,
        "command": f'make bench BENCH_ARGS="{shlex.join([name, *extra])}"',
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": _commit(),
        "machine": {
            "cpu": _cpu_model(),
            "cpus": os.cpu_count(),
            "memory_gib": round(
                os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1
            ),
            "kernel": platform.release(),
            "python": platform.python_version(),
        },
    }


def _commit() -> str:
    """With a + where the tree differs from it; empty outside of a git repository."""
    command = ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
    try:
        return subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL).strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _cpu_model() -> str:
    """As the kernel names it, which it does not on every architecture."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()


def main(argv: list[str]) -> int:
    names, extra = argv[:1], argv[1:]
    if not argv or argv == [SMOKE]:
        names = [name for name in BENCHES if not argv or name not in NEED_ENGINES]
        extra = argv
    unknown = [name for name in names if name not in BENCHES]
    if unknown or "--help" in names:
        print(f"usage: make bench BENCH_ARGS='[{'|'.join(BENCHES)}] [its options, or --help]'")
        return 2
    RESULTS.mkdir(exist_ok=True)
    failed = []
    for name in names:
        script = Path(__file__).with_name(f"bench_{name}.py")
        # What a smoke run keeps says nothing: it must not take the place of a measurement.
        kept = RESULTS / (f"smoke-{name}.json" if SMOKE in extra else f"{name}.json")
        record = kept.with_suffix(".run.json")
        # The record of an earlier run must not describe what a failed one leaves behind.
        record.unlink(missing_ok=True)
        run = run_record(name, extra)
        print(f"== {name}", flush=True)
        command = [sys.executable, str(script), "--json", str(kept), *extra]
        if subprocess.run(command, check=False).returncode:
            failed.append(name)
        elif kept.exists():
            record.write_text(json.dumps(run, indent=1) + "\n")
            print(f"raw numbers: {kept}\n", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
