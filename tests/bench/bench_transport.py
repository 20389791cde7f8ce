"""The transport against its peers: loopback and, as root, a veth pair between two namespaces.

Run: python tests/bench/bench_transport.py [--quick | --full | --smoke] [--json FILE]. Rounds are
interleaved: in each of them every peer is started, warmed up, measured at every block size and
stopped, so that one that spins while idle disturbs no other; the order turns by one from round to
round. Reported are medians and ranges over the rounds, CPU of both ends, single 64 KiB blocks
acknowledged one by one, cores used while idle, memory beyond the buffers, and the goals. All blocks
of all peers lie in a permuted order in memory, and each peer's bytes are compared once a place. A
peer that is not installed is named and left out (see README.md, also for what is not comparable).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import peer_report
from peer_certificates import make_certificates
from peer_end import KIB, MIB
from peer_report import Measured
from peers import (
    Kept,
    Peer,
    Site,
    iperf3,
    mooncake,
    mooncake_default,
    nixl_read,
    nixl_write,
    ours,
    raw,
)
from smoke import add_smoke

PLACES = ("loopback", "veth")
SMOKE_PEERS = ("ours", "ours tls", "raw x4", "iperf3 -P4", "mooncake", "nixl write")


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured. `timeout_s` is for one transfer. `num_acked`: single blocks a round,
    after a tenth as many to warm up.
    """

    rounds: int
    nbytes: int
    blocks: tuple[int, ...]
    timeout_s: float
    num_acked: int
    idle_s: float


def ours_fixed(name: str, num_connections: int, **config: Any) -> Peer:
    """Ours with nothing that adapts itself, and frames as large as loopback likes them."""
    return ours(
        name,
        num_connections=num_connections,
        frame_bytes=MIB,
        autotune=False,
        codec="none",
        **config,
    )


def loopback_peers(folder: Path, *, full: bool) -> list[Peer]:
    """Ours with numbers of connections, as it comes, and without safety; the others."""
    some = (1, 2, 4, 8, 16) if full else (1, 4, 16)
    peers = [ours_fixed(f"ours x{num}", num) for num in some]
    peers += [
        ours("ours"),
        ours("ours no checksum", checksum=False),
        ours("ours tls", tls=make_certificates(folder)),
        raw(4),
        iperf3(1),
        iperf3(4),
        mooncake(),
        nixl_write(),
        nixl_read(),
    ]
    if full:
        settings = {"UCX_TCP_SNDBUF": "4m"}
        peers += [raw(1), iperf3(8), mooncake_default(), nixl_write("nixl write 4m", **settings)]
    return peers


def veth_peers() -> list[Peer]:
    mine = [ours("ours"), ours_fixed("ours x4", 4)]
    return [*mine, raw(4), iperf3(4), mooncake(), nixl_write(), nixl_read()]


def available(peers: Sequence[Peer]) -> tuple[list[Peer], dict[str, str]]:
    """Those that can run, and why the others cannot."""
    reasons = {peer.name: peer.available() for peer in peers}
    missing = {name: reason for name, reason in reasons.items() if reason is not None}
    for name, reason in missing.items():
        say(f"{name}: left out: {reason}")
    return [peer for peer in peers if peer.name not in missing], missing


def measure(place: str, site: Site, peers: Sequence[Peer], plan: Plan) -> list[Measured]:
    """Every peer once a round."""
    found = {peer.name: Measured(peer.name, place) for peer in peers}
    with ExitStack() as stack:
        sessions = [stack.enter_context(Kept(peer, site)) for peer in peers]
        for number in range(plan.rounds if peers else 0):
            start_s = time.monotonic()
            shift = number % len(peers)
            for session in (*sessions[shift:], *sessions[:shift]):
                measured = found[session.peer.name]
                visit(session, measured, plan, is_first=number == 0)
                session.close()
                for reason in session.failures[len(measured.failures) :]:
                    say(f"  {reason}")
                measured.failures = list(session.failures)
            say(f"{place}, round {number + 1}: {time.monotonic() - start_s:.0f} s")
    return list(found.values())


def visit(session: Kept, measured: Measured, plan: Plan, *, is_first: bool) -> None:
    """One peer's part of a round."""
    if is_first:
        measured.is_verified = session.verify(64 * KIB, plan.nbytes, plan.timeout_s)
    else:
        session.transfer(plan.nbytes, 64 * KIB, plan.timeout_s)
    for block_bytes in plan.blocks:
        sample = session.transfer(plan.nbytes, block_bytes, plan.timeout_s)
        measured.samples.setdefault(block_bytes, []).append(sample)
    session.acked_block_us(64 * KIB, plan.num_acked // 10, plan.timeout_s)
    measured.acked_us += session.acked_block_us(64 * KIB, plan.num_acked, plan.timeout_s) or []
    if is_first:
        measured.idle = session.idle_cpu(plan.idle_s)
        measured.rss_mib = session.rss_mib()


def site_and_peers(
    place: str, stack: ExitStack, nbytes: int, *, full: bool
) -> tuple[Site, list[Peer]]:
    """What to run where, until the stack closes; OSError if this place cannot be made."""
    if place == "loopback":
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="prfaas-bench-"))
        return Site(nbytes_max=nbytes), loopback_peers(Path(folder), full=full)
    from wan import DEVICE, FAR, veth

    sites = stack.enter_context(veth())
    site = Site(
        near_prefix=sites.at_site(sites.near, []),
        far_prefix=sites.at_site(sites.far, []),
        far_host=FAR,
        nbytes_max=nbytes,
        env={"UCX_NET_DEVICES": DEVICE},
    )
    return site, veth_peers()


def run(arguments: argparse.Namespace, plan: Plan) -> tuple[list[Measured], dict[str, str]]:
    """What was found, and why places and peers were left out."""
    found: list[Measured] = []
    missing: dict[str, str] = {}
    for place in arguments.places:
        with ExitStack() as stack:
            try:
                site, peers = site_and_peers(place, stack, plan.nbytes, full=arguments.full)
            except OSError as error:
                missing[place] = str(error)
                say(f"{place}: left out: {error}")
                continue
            wanted = [peer for peer in peers if peer.name in (arguments.peers or [peer.name])]
            ready, left_out = available(wanted)
            missing |= left_out
            found += measure(place, site, ready, plan)
    return found, missing


def report(found: Sequence[Measured], kept: Path | None) -> None:
    """Tables and goals on the terminal, the picture beside the raw numbers."""
    for place in dict.fromkeys(measured.place for measured in found):
        print(f"\n{place}\n{peer_report.table(found, place)}\n")
        for goal in peer_report.goals(found, place):
            print(goal.line())
    if kept is not None and any(measured.samples for measured in found):
        picture = kept.with_suffix(".png")
        peer_report.plot(found, picture)
        print(f"\npicture: {picture}")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def parse() -> tuple[argparse.Namespace, Plan]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="the default: at most 5 minutes")
    size.add_argument("--full", action="store_true", help="every block size and setting")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, help="of one transfer: 128, or 512 with --full")
    parser.add_argument("--blocks-kib", type=int, nargs="+", help="instead of the usual sizes")
    parser.add_argument("--peers", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--places", nargs="+", choices=PLACES, default=list(PLACES))
    parser.add_argument("--json", type=Path, help="write the result here, and a .png beside it")
    add_smoke(parser, rounds=1, mib=4, peers=list(SMOKE_PEERS))
    arguments = parser.parse_args()
    usual = (16, 64, 256, 1024, 4096) if arguments.full else (16, 64, 1024)
    return arguments, Plan(
        rounds=arguments.rounds,
        nbytes=(arguments.mib or (512 if arguments.full else 128)) * MIB,
        blocks=tuple(KIB * kib for kib in arguments.blocks_kib or usual),
        timeout_s=60.0 if arguments.full else 20.0,
        num_acked=20 if arguments.smoke else 200,
        idle_s=0.1 if arguments.smoke else 1.0,
    )


def main() -> None:
    arguments, plan = parse()
    found, missing = run(arguments, plan)
    report(found, arguments.json)
    if arguments.json is None:
        return
    result = {
        "plan": {**asdict(plan), "places": arguments.places, "cpus": os.cpu_count()},
        "missing": missing,
        "goals": {
            place: [
                {**asdict(goal), "met": goal.is_met} for goal in peer_report.goals(found, place)
            ]
            for place in arguments.places
        },
        "measured": [measured.as_json() for measured in found],
    }
    arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
