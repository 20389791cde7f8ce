"""How far one agent goes, and where a host needs more processes: connections against processes.

Run: python tests/bench/bench_lanes.py [--smoke] [--json FILE]. Loopback, checksums on, blocks of
64 KiB in frames of 256 KiB, 1 MiB and 2 MiB, for numbers of connections of one pair of processes,
and for several pairs at once. CPU time of both ends is split into the kernel's copies and the sums,
which run without the GIL, and Python, which holds it (`peer_parts`).

Printed beside it is what follows for a large host, if nothing but cores and the GIL sets limits:
the rate at which one process's Python fills its GIL, and the cores of one end for 40 Gbit/s. A
machine with few cores cannot show how threads wait for each other's GIL, so half of that rate is
what to plan with.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from peer_end import KIB, MIB, SIDES, Side
from peers import Peer, Sample, Session, Site
from smoke import add_smoke

BLOCK_BYTES = 64 * KIB
GIB = 1024 * MIB
PLANNED_GBIT_PER_S = 40.0
TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Case:
    frame_kib: int
    num_connections: int
    num_pairs: int


@dataclass(frozen=True, slots=True)
class End:
    """CPU seconds per GiB of one end, of all processes together."""

    kernel: float
    checksum: float
    python: float

    @property
    def total(self) -> float:
        return self.kernel + self.checksum + self.python

    @property
    def gil_gbit_per_s(self) -> float:
        """The rate at which Python takes all of one process's GIL."""
        return 8e-9 * GIB / self.python if self.python > 0 else float("inf")

    @property
    def planned_cores(self) -> float:
        """Cores for PLANNED_GBIT_PER_S."""
        return self.total * PLANNED_GBIT_PER_S / (8e-9 * GIB)


@dataclass(frozen=True, slots=True)
class Found:
    case: Case
    gbit_per_s: float
    sender: End
    receiver: End


def measure(case: Case, nbytes: int, rounds: int) -> Found:
    """Every pair moves `nbytes` in each round, all at once."""
    options = {
        "num_connections": case.num_connections,
        "frame_bytes": case.frame_kib * KIB,
        "autotune": False,
        "codec": "none",
    }
    peer = Peer("ours", "parts", options)
    pairs = [Session(peer, Site(nbytes_max=nbytes)) for _ in range(case.num_pairs)]
    try:
        _move(pairs, nbytes)
        before = _parts(pairs)
        moved = [_move(pairs, nbytes) for _ in range(rounds)]
        after = _parts(pairs)
    finally:
        for pair in pairs:
            pair.close()
    rates = [sum(sample.gbit_per_s for sample in samples) for samples in moved]
    spent_s: dict[Side, float] = {
        "sender": sum(sample.cpu_sender_s for samples in moved for sample in samples),
        "receiver": sum(sample.cpu_receiver_s for samples in moved for sample in samples),
    }
    num_gib = nbytes * len(pairs) * rounds / GIB
    ends = {}
    for side in SIDES:
        kernel, checksum = (
            (after[side][part] - before[side][part]) / num_gib for part in ("kernel", "checksum")
        )
        python = max(0.0, spent_s[side] / num_gib - kernel - checksum)
        ends[side] = End(kernel, checksum, python)
    return Found(case, statistics.median(rates), ends["sender"], ends["receiver"])


def _move(pairs: list[Session], nbytes: int) -> list[Sample]:
    found: list[Sample] = []

    def move(pair: Session) -> None:
        found.append(pair.transfer(nbytes, BLOCK_BYTES, TIMEOUT_S))

    threads = [threading.Thread(target=move, args=(pair,)) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(found) != len(pairs):
        raise RuntimeError("a transfer failed")
    return found


def _parts(pairs: list[Session]) -> dict[Side, dict[str, float]]:
    found: dict[Side, dict[str, float]] = {}
    for side in SIDES:
        told = [pair.hello(side)["parts"] for pair in pairs]
        found[side] = {part: sum(one[part] for one in told) for part in told[0]}
    return found


def table(found: list[Found]) -> str:
    lines = [
        "frame  conns  pairs  Gbit/s   sender: kernel/sum/Python s/GiB   receiver: the same"
        f"    GIL full at Gbit/s   cores for {PLANNED_GBIT_PER_S:g}"
    ]
    for one in found:
        case, ends = one.case, (one.sender, one.receiver)
        parts = [f"{end.kernel:.3f}/{end.checksum:.3f}/{end.python:.3f}" for end in ends]
        gil = "/".join(f"{end.gil_gbit_per_s:.0f}" for end in ends)
        cores = "/".join(f"{end.planned_cores:.1f}" for end in ends)
        lines.append(
            f"{case.frame_kib:>4}K{case.num_connections:>7}{case.num_pairs:>7}"
            f"{one.gbit_per_s:>8.1f}{parts[0]:>33}{parts[1]:>22}{gil:>20}{cores:>17}"
        )
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=256, help="of one transfer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--frames-kib", type=int, nargs="+", default=[256, 1024, 2048])
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 2, 8])
    parser.add_argument("--pairs", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--json", type=Path, help="write the result here")
    add_smoke(parser, mib=4, rounds=1, frames_kib=[1024], connections=[2], pairs=[1, 2])
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    first = arguments.frames_kib[0], arguments.connections[0]
    cases = [
        Case(frame_kib, num_connections, 1)
        for frame_kib in arguments.frames_kib
        for num_connections in arguments.connections
    ]
    cases += [Case(max(arguments.frames_kib), first[1], pairs) for pairs in arguments.pairs[1:]]
    found = [
        measure(case, arguments.mib * MIB // case.num_pairs, arguments.rounds) for case in cases
    ]
    print(table(found))
    if arguments.json is not None:
        rows = [
            {
                **asdict(one),
                "gil_gbit_per_s": {
                    "sender": one.sender.gil_gbit_per_s,
                    "receiver": one.receiver.gil_gbit_per_s,
                },
            }
            for one in found
        ]
        result = {"cpus": os.cpu_count(), "block_bytes": BLOCK_BYTES, "found": rows}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
