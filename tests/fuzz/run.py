"""`make fuzz`: each fuzz target for a time, with seeds made here; stops at the first crash.

Run: python tests/fuzz/run.py [--seconds S] [TARGET ...]. An input that breaks a promise is kept in
tests/fuzz/corpus-found/ and printed; repeat it with `python tests/fuzz/fuzz_TARGET.py FILE`.
"""

from __future__ import annotations

import argparse
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
FOUND = HERE / "corpus-found"
TARGETS = ("frames", "receiver_session", "sender_session")
NUM_SEEDS = 40
MAX_INPUT_BYTES = 1024


def write_seeds(folder: Path) -> None:
    """Scripts of any length; what they mean is decided by the code under test's frame types."""
    rng = random.Random(1)
    for index in range(NUM_SEEDS):
        num_bytes = MAX_INPUT_BYTES * (index + 1) // NUM_SEEDS
        (folder / f"seed-{index:02}").write_bytes(rng.randbytes(num_bytes))


def fuzz(target: str, seconds: int) -> int:
    """Exit status of the fuzzer: 0 when nothing was found."""
    FOUND.mkdir(exist_ok=True)
    known = set(FOUND.iterdir())
    with tempfile.TemporaryDirectory(prefix="prfaas-fuzz-") as corpus:
        write_seeds(Path(corpus))
        command = [
            sys.executable,
            str(HERE / f"fuzz_{target}.py"),
            f"-max_total_time={seconds}",
            f"-max_len={MAX_INPUT_BYTES}",
            "-timeout=20",
            "-rss_limit_mb=1024",
            "-print_final_stats=1",
            f"-artifact_prefix={FOUND}/{target}-",
            corpus,
        ]
        status = _run(command)
    for path in sorted(set(FOUND.iterdir()) - known):
        print(f"\nfound: {path}\n{path.read_bytes().hex()}")
    return status


def _run(command: list[str]) -> int:
    """The command's exit status; its lines are shown without those about each new input."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    with process:
        for line in process.stdout:
            if not re.match(r"#\d+\s+(NEW|REDUCE)|\"|#{6}", line):
                print(line, end="", flush=True)
    return process.returncode


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Fuzz both ends of the transport.")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}")
    parser.add_argument("--seconds", type=int, default=60, help="for each target (60)")
    options = parser.parse_args(argv)
    unknown = [target for target in options.targets if target not in TARGETS]
    if unknown:
        parser.error(f"no such target: {', '.join(unknown)}")
    for target in options.targets or TARGETS:
        print(f"== {target}, {options.seconds} s", flush=True)
        status = fuzz(target, options.seconds)
        if status:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
