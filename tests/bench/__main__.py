"""`make bench`: run the measurements, all or those named, and keep their raw numbers.

BENCH_ARGS="gateway --seconds 5" hands the rest to one of them, BENCH_ARGS="--smoke" runs all at
their smallest size. Results go to bench-results/.
"""

import subprocess
import sys
from pathlib import Path

BENCHES = (
    "transport",
    "lanes",
    "wan",
    "sharing",
    "codecs",
    "crossover",
    "gateway",
    "plan",
    "decision",
    "scale",
    "prediction",
    "region",
    "simulate",
    "kv",
    "copier",
    "loops",
    "handoff",
    "hostile",
    "e2e",
    "load",
    "capacity",
)
NEED_ENGINES = ("prediction", "region", "e2e", "load", "capacity")
"""Start regions of real engines. Their smoke runs ask one that the engine tests have running."""
SMOKE = "--smoke"
RESULTS = Path("bench-results")


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
        print(f"== {name}", flush=True)
        command = [sys.executable, str(script), "--json", str(kept), *extra]
        if subprocess.run(command, check=False).returncode:
            failed.append(name)
        elif kept.exists():
            print(f"raw numbers: {kept}\n", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
