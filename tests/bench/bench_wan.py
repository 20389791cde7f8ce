"""KV blocks over an emulated wide-area link: our transport, Mooncake, NIXL and plain TCP.

Run as root: python tests/bench/bench_wan.py [--full | --smoke] [--wmem-mib 0 32]. The sites and the
link are those of wan.py; every peer is two processes, one at each site (see peers.py). Measured:

goodput  whole acknowledged transfers of 256 KiB blocks (--block-kib) on paths of a given rate, RTT
         and loss; the sites' default congestion control is bbr or cubic, ours asks for bbr by
         itself.
cap      the same where no TCP connection gets more than 300 Mbit/s of 2 Gbit/s.
layer    16 MiB of 64 KiB blocks at a time, each acknowledged before the next.
burst    16 MiB after 10 s of silence, against the same without the silence.

Peers take turns in every round; the tables have medians, the JSON every transfer and what the link
lost, dropped and delivered late in it. A transfer counts from the call that begins it to the
acknowledgement of its last byte, so that it pays for its start, its tail and a round trip.
iperf3's streams are the limit: they count what the receiver read after their first second, so they
pay for none of these, but never more than the link carries.
Sessions are new at every path: what TCP learnt of one is wrong on another. A peer's first
transfers there are not counted. NIXL spins a core at each site while it is open, so it is opened
anew for each of its turns. The default takes about 8 minutes and asks other peers only for goodput;
--full takes more than an hour.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import wan as emulated
from peer_end import KIB, MIB
from peers import Kept, Peer, Sample, Site, mooncake, nixl_write, ours
from smoke import add_smoke
from wan import DEVICE, FAR, Wan, iperf3_stream, wan
from wan_report import Cell, Measured, Results, Section, goals, plot, tables

LAYER_BLOCK_BYTES = 64 * KIB
LAYER_BYTES = 16 * MIB
FIRST_BYTES = 4 * MIB
"""The first transfers of a session: one opens connections, one tells how much goes in time."""
MAX_WARM_TRANSFERS = 6
MAX_TRANSFER_BYTES = 768 * MIB
"""Also what each end of a peer holds; touching it is most of the time that opening takes."""
TIMEOUT_S = 90.0
SETTLE_S = 0.3
"""After a stream: what it left in its sockets must not meet the next transfer."""
SPINNING = ("nixl",)
"""Kinds of peers that use a core while they are idle."""

SECTIONS = ("goodput", "cap", "layer", "burst")
Point = tuple[emulated.Path, str]


def _point(rate_gbit_per_s: float, rtt_ms: float, loss_percent: float = 0.0) -> emulated.Path:
    return emulated.Path(1e9 * rate_gbit_per_s, rtt_ms / 1e3, loss=loss_percent / 100)


QUICK: tuple[Point, ...] = (
    (_point(1, 10), "bbr"),
    (_point(1, 40, 0.1), "bbr"),
    (_point(1, 40, 0.1), "cubic"),
    (_point(2, 20), "bbr"),
    (_point(5, 20), "bbr"),
)
FULL: tuple[Point, ...] = tuple(
    (path, congestion)
    for path in (
        *(_point(1, rtt, loss) for rtt in (10, 40, 100) for loss in (0, 0.01, 0.1, 1)),
        _point(2, 20),
        _point(5, 20),
    )
    for congestion in ("bbr", "cubic")
)
CAPPED: Point = (emulated.Path(2e9, 0.020, flow_cap_bit_per_s=3e8), "bbr")
LAYERED: Point = (_point(1, 40, 0.1), "bbr")
BURST: Point = (_point(1, 40), "bbr")


class Bench:
    """Runs peers over the link and keeps what they did."""

    def __init__(self, link: Wan, arguments: argparse.Namespace) -> None:
        self.measured: list[Measured] = []
        self._link = link
        self._repeats: int = arguments.repeats
        self._block_bytes: int = KIB * arguments.block_kib
        self._target_s: float = arguments.seconds
        self._streams: list[int] = arguments.streams if shutil.which("iperf3") else []
        self._num_layers: int = arguments.layers
        self._num_warm_layers: int = arguments.warm_layers
        self._idle_s: float = arguments.idle_seconds

    def run(self, arguments: argparse.Namespace, wmem_mib: int | None) -> None:
        """Every chosen section at one limit of the send buffers."""
        peers = _peers(arguments.peers)
        few = peers if arguments.full else [peer for peer in peers if peer.kind == "ours"]
        if "goodput" in arguments.sections:
            for point in FULL if arguments.full else QUICK:
                path, congestion = point
                is_asked = not arguments.points or str(path) in arguments.points
                if is_asked and congestion in arguments.congestion:
                    self._goodput("goodput", point, wmem_mib, peers)
        if "cap" in arguments.sections:
            self._goodput("cap", CAPPED, wmem_mib, few)
        if "layer" in arguments.sections:
            self._layers(wmem_mib, few)
        if "burst" in arguments.sections:
            self._bursts(wmem_mib, few)

    def _goodput(
        self, section: Section, point: Point, wmem_mib: int | None, peers: Sequence[Peer]
    ) -> None:
        cell = self._set(section, point, wmem_mib)
        whole = int(point[0].rate_bit_per_s / 8 * self._target_s) // MIB * MIB
        nbytes_max = max(LAYER_BYTES, min(MAX_TRANSFER_BYTES, whole))
        sizes: dict[str, int] = {}
        with self._sessions(peers, nbytes_max) as sessions:
            for round_number in range(self._repeats):
                for session in sessions:
                    name = session.peer.name
                    if name not in sizes:
                        sizes[name] = self._warm(session, nbytes_max)
                    elif session.peer.kind in SPINNING:
                        session.transfer(
                            min(sizes[name], 8 * FIRST_BYTES), self._block_bytes, TIMEOUT_S
                        )
                    self._transfer(cell, session, round_number, sizes[name], self._block_bytes)
                    if session.peer.kind in SPINNING:
                        session.close()
                for num_connections in self._streams:
                    self._stream(cell, round_number, num_connections)

    def _layers(self, wmem_mib: int | None, peers: Sequence[Peer]) -> None:
        cell = self._set("layer", LAYERED, wmem_mib)
        with self._sessions(peers, LAYER_BYTES) as sessions:
            for round_number in range(self._repeats):
                for session in sessions:
                    for _ in range(self._num_warm_layers):
                        session.transfer(LAYER_BYTES, LAYER_BLOCK_BYTES, TIMEOUT_S)
                    for _ in range(self._num_layers // self._repeats):
                        self._transfer(cell, session, round_number, LAYER_BYTES, LAYER_BLOCK_BYTES)
                    if session.peer.kind in SPINNING:
                        session.close()

    def _bursts(self, wmem_mib: int | None, peers: Sequence[Peer]) -> None:
        burst = self._set("burst", BURST, wmem_mib)
        warm = replace(burst, section="burst_warm")
        for peer in peers:
            with self._sessions([peer], LAYER_BYTES) as sessions:
                for session in sessions:
                    for _ in range(self._num_warm_layers):
                        session.transfer(LAYER_BYTES, LAYER_BLOCK_BYTES, TIMEOUT_S)
                    for round_number in range(self._repeats):
                        for _ in range(min(5, self._num_layers)):
                            self._transfer(
                                warm, session, round_number, LAYER_BYTES, LAYER_BLOCK_BYTES
                            )
                        session.idle_cpu(self._idle_s)
                        self._transfer(burst, session, round_number, LAYER_BYTES, LAYER_BLOCK_BYTES)

    def _set(self, section: Section, point: Point, wmem_mib: int | None) -> Cell:
        path, congestion = point
        self._link.set_path(path)
        self._link.set_congestion_control(congestion)
        cell = Cell(section, str(path), congestion, wmem_mib)
        _say(f"{section}: {cell}")
        return cell

    @contextmanager
    def _sessions(self, peers: Sequence[Peer], nbytes_max: int) -> Iterator[list[Kept]]:
        link = self._link
        site = Site(
            link.at_site(link.near, []),
            link.at_site(link.far, []),
            FAR,
            nbytes_max,
            {"UCX_NET_DEVICES": DEVICE},
        )
        with ExitStack() as stack:
            yield [stack.enter_context(Kept(peer, site)) for peer in peers]

    def _warm(self, session: Kept, nbytes_max: int) -> int:
        """Open the session and move more and more until a transfer takes nearly as long as asked:
        short ones tell of TCP's start, not of the path. How many bytes do.
        """
        nbytes = FIRST_BYTES
        # How long the first takes is mostly the opening of connections, over a long link.
        session.transfer(nbytes, self._block_bytes, TIMEOUT_S)
        for _ in range(MAX_WARM_TRANSFERS):
            sample = session.transfer(nbytes, self._block_bytes, TIMEOUT_S)
            if sample is None or sample.seconds > 0.7 * self._target_s or nbytes == nbytes_max:
                break
            wanted = 1.3 * sample.gbit_per_s * 1e9 / 8 * self._target_s
            nbytes = min(nbytes_max, max(2 * nbytes, int(wanted) // MIB * MIB))
        return nbytes

    def _transfer(
        self, cell: Cell, session: Kept, round_number: int, nbytes: int, block_bytes: int
    ) -> None:
        self._link.set_path(self._link.path)  # its counters start again
        sample = session.transfer(nbytes, block_bytes, TIMEOUT_S)
        error = session.failures[-1] if sample is None and session.failures else ""
        self._keep(cell, session.peer.name, round_number, sample, nbytes, error)

    def _stream(self, cell: Cell, round_number: int, num_connections: int) -> None:
        self._link.set_path(self._link.path)
        name, seconds = f"iperf3 x{num_connections}", max(2.0, self._target_s - 1.0)
        try:
            gbit_per_s, _ = iperf3_stream(self._link, num_connections, seconds)
        except subprocess.SubprocessError as error:
            self._keep(cell, name, round_number, None, 0, str(error))
        else:
            sample = Sample(int(gbit_per_s * 1e9 / 8 * seconds), seconds, 0.0, 0.0)
            self._keep(cell, name, round_number, sample, sample.nbytes)
        time.sleep(SETTLE_S)

    def _keep(
        self,
        cell: Cell,
        peer: str,
        round_number: int,
        sample: Sample | None,
        nbytes: int,
        error: str = "",
    ) -> None:
        found = self._link.counters()["to_far"]
        num_segments = max(1, found["segments"])
        has_cpu = sample is not None and sample.cpu_sender_s + sample.cpu_receiver_s > 0
        measured = Measured(
            cell=cell,
            peer=peer,
            round_number=round_number,
            nbytes=nbytes,
            seconds=sample.seconds if sample else None,
            cpu_s_per_gib=sample.cpu_s_per_gib if sample and has_cpu else None,
            lost_share=found["lost_segments"] / num_segments,
            dropped_share=found["dropped_segments"] / num_segments,
            late_share=found["late_packets"] / max(1, found["packets_out"]),
            error=error,
        )
        self.measured.append(measured)
        rate = measured.gbit_per_s
        took = f"failed: {error[:200]}" if rate is None else f"{rate:.3f} Gbit/s"
        seconds = f" in {measured.seconds:.3f} s" if measured.seconds else ""
        _say(f"  {peer}, round {round_number + 1}: {took}{seconds}")


def _peers(names: Sequence[str]) -> list[Peer]:
    """The chosen ones that run here; says which do not."""
    known = {
        "ours": ours(),
        "mooncake": mooncake(),
        "nixl": nixl_write("nixl", UCX_TCP_SNDBUF="4m"),
        "nixl-default": nixl_write("nixl default"),
    }
    usable = []
    for name in names:
        if (reason := known[name].available()) is not None:
            _say(f"without {name}: {reason}")
        else:
            usable.append(known[name])
    return usable


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    depth = parser.add_mutually_exclusive_group()
    depth.add_argument("--quick", action="store_true", help="five paths (the default)")
    depth.add_argument("--full", action="store_true", help="every path, every peer everywhere")
    parser.add_argument("--repeats", type=int, default=3, help="rounds; tables have medians")
    parser.add_argument("--seconds", type=float, default=3.0, help="what a transfer should take")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--points", nargs="+", help="only these, such as 5g/20ms 1g/40ms/0.1%%")
    controls = ["bbr", "cubic"]
    parser.add_argument(
        "--congestion", nargs="+", choices=controls, default=controls, help="of goodput's paths"
    )
    peers = ["ours", "mooncake", "nixl"]
    parser.add_argument("--peers", nargs="+", choices=[*peers, "nixl-default"], default=peers)
    parser.add_argument("--streams", type=int, nargs="+", help="connections of iperf3's runs")
    parser.add_argument("--block-kib", type=int, default=256, help="blocks of goodput")
    parser.add_argument("--layers", type=int, default=24, help="timed, in all rounds together")
    parser.add_argument("--warm-layers", type=int, default=8, help="before them")
    parser.add_argument("--idle-seconds", type=float, default=10.0, help="before a burst")
    parser.add_argument(
        "--wmem-mib",
        type=int,
        nargs="+",
        default=[0],
        help="everything with each of these as the most for a send buffer; 0: the host's own",
    )
    parser.add_argument("--json", type=Path, default=Path("bench-results/wan.json"))
    smallest = {"repeats": 1, "seconds": 0.2, "streams": [2], "points": ["1g/10ms"]}
    add_smoke(parser, **smallest, layers=1, warm_layers=1, idle_seconds=0.2)
    arguments = parser.parse_args()
    if arguments.streams is None:
        arguments.streams = [1, 4, 8, 16] if arguments.full else [8, 16]
    if shutil.which("iperf3") is None:
        _say("without iperf3: it is not installed, so nothing tells the path's limit")
    return arguments


def _stop(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def main() -> None:
    arguments = _parse()
    signal.signal(signal.SIGTERM, _stop)
    measured: list[Measured] = []
    missing: dict[str, str] = {}
    status = 0
    with ExitStack() as stack:
        try:
            link = stack.enter_context(wan())
        except OSError as error:
            # A smoke run leaves out what this machine cannot have; any other has nothing to say.
            missing["link"] = str(error)
            _say(f"no emulated link, so nothing is measured: {error}")
            status = 0 if arguments.smoke else 1
        else:
            bench = Bench(link, arguments)
            measured = bench.measured
            try:
                _run(bench, link, arguments)
            except KeyboardInterrupt:
                _say("stopped: what follows is what was measured so far")
                status = 130
    if measured or missing:
        results = Results(measured)
        print(tables(results))
        _keep_results(results, measured, missing, arguments.json)
    sys.exit(status)


def _run(bench: Bench, link: Wan, arguments: argparse.Namespace) -> None:
    # The sites are new and have the host's own, to which nothing takes them back: it goes first.
    for wmem_mib in sorted(arguments.wmem_mib):
        if wmem_mib:
            link.set_send_buffer_max(wmem_mib * MIB)
        bench.run(arguments, wmem_mib or None)


def _keep_results(
    results: Results, measured: Sequence[Measured], missing: dict[str, str], file: Path
) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    kept = {
        "cpus": os.cpu_count(),
        "kernel": platform.release(),
        "missing": missing,
        "goals": [{**asdict(goal), "is_met": goal.is_met} for goal in goals(results)],
        "raw": [{**asdict(one), "gbit_per_s": one.gbit_per_s} for one in measured],
    }
    file.write_text(json.dumps(kept, indent=1) + "\n")
    if not results.cells("goodput", "cap"):
        return
    try:
        plot(results, file.with_suffix(".png"))
    except ImportError as error:
        _say(f"without a picture: {error}")


if __name__ == "__main__":
    main()
