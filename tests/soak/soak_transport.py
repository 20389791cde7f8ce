"""`make soak`: an hour of bad days for the transport, its timeouts an eighth of the defaults.

A sender process and a receiver process exchange random transfers through a `HurtfulProxy`, while
links are cut, stalled, damaged and swallowed, memory is slow, descriptors run out, transfers are
cancelled and dropped, and either process is stopped, restarted or killed. Every byte is compared by
BLAKE3. Between storms everything must come to rest: no transfer may stay open at either end.

With `SOAK_ARGS=--tls` all of it crosses mutual TLS.

Exit status 1 on any wrong byte, hang, leak, or error code that nothing done here explains.
"""

from __future__ import annotations

import argparse
import json
import logging
import queue
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from certificates import make_authority, make_node
from free_ports import free_port

from tests.soak.soak_chaos import Chaos, Hands, Schedule, endpoint_of
from tests.soak.soak_process import Event, Worker
from transport import TlsFiles
from transport.testing.proxy import HurtfulProxy

MIB = 1024 * 1024
SIZES_BYTES = [(0, 1), (1, 100), (1, 65_536), (65_536, 4 * MIB), (4 * MIB, 64 * MIB)]
SIZE_WEIGHTS = [1, 2, 5, 6, 2]
MAX_OPEN = 12
CANCELS_PER_TURN, DROPS_PER_TURN = 0.0015, 0.001
STORM_S = 40.0
REST_S = 30.0
HANG_S = 90.0
MAX_RSS_GROWTH_BYTES = 64 * MIB
PROGRESS_S = 10.0


@dataclass(slots=True)
class Transfer:
    """What is known of one transfer from both ends."""

    nbytes: int
    treatment: dict[str, Any]
    opened_s: float
    lives: tuple[int, int] = (0, 0)
    """Of the sender's and the receiver's process when it began; zeros before."""
    sent_digest: str = ""
    landed_digest: str = ""
    is_ended: bool = False
    is_complete: bool = False
    message: str = ""
    is_cancelled: bool = False
    is_dropped: bool = False


@dataclass(slots=True)
class Tally:
    """What happened, and what should not have."""

    outcomes: Counter[str] = field(default_factory=Counter)
    wrongs: list[str] = field(default_factory=list)
    landed_bytes: int = 0
    resent_bytes: int = 0
    censuses: list[dict[str, Any]] = field(default_factory=list)


class Soak:
    """The parent of both processes: makes transfers, judges how they end."""

    def __init__(self, seed: int, log: Path, tls: TlsFiles | None = None) -> None:
        self.dice = random.Random(seed)
        self.tally = Tally()
        self._events: queue.Queue[Event] = queue.Queue()
        self.sender = Worker("sender", self._events, log, tls)
        self.receiver = Worker("receiver", self._events, log, tls)
        # Killed and started again, it needs its port again.
        self.receiver.port = free_port()
        self.receiver.start()
        self.proxy = HurtfulProxy(endpoint_of(self.receiver))
        self.sender.port = self.proxy.endpoint.port
        self.sender.start()
        self._schedule = Schedule()
        hands = Hands(self.proxy, self.sender, self.receiver, self._schedule, self._restart)
        self.chaos = Chaos(hands, random.Random(seed + 1))
        self._transfers: dict[str, Transfer] = {}
        self._num_made = 0
        self._expected_gone: set[tuple[str, int]] = set()
        self._wanted_open = 4
        self._begin_s = self._printed_s = time.monotonic()

    def run(self, seconds: float) -> None:
        """Storms and rests in turn, and an orderly end."""
        end_s = self._begin_s + seconds
        self._rest()
        while (now_s := time.monotonic()) < end_s and not self._is_hopeless:
            self._storm(min(end_s, now_s + STORM_S))
            self._rest()
        self._restart(self.sender, True, None)
        self._restart(self.receiver, True, None)
        self._judge_growth()

    @property
    def _is_hopeless(self) -> bool:
        return len(self.tally.wrongs) >= 20

    def close(self) -> None:
        for worker in (self.sender, self.receiver):
            worker.signal(signal.SIGCONT)
            worker.kill()
        self.proxy.close()

    def _wrong(self, what: str) -> None:
        at_s = time.monotonic() - self._begin_s
        self.tally.wrongs.append(f"at {at_s:.1f} s: {what}")
        print(f"WRONG {self.tally.wrongs[-1]}", flush=True)

    # Storm and rest.

    def _storm(self, until_s: float) -> None:
        while (now_s := time.monotonic()) < until_s and not self._is_hopeless:
            self.chaos.step(now_s)
            self._keep_open(now_s)
            self._turn(0.02)

    def _rest(self) -> None:
        """Let everything end that was begun; nothing may be left open at either end."""
        begin_s = time.monotonic()
        while self._schedule or self._open():
            self._turn(0.02)
            if time.monotonic() - begin_s > HANG_S:
                names = [name[-8:] for name in self._open()]
                self._wrong(f"{len(names)} transfers do not end: {', '.join(names[:5])}")
                self._transfers.clear()
                break
        self.proxy.heal()
        quiet_s = time.monotonic()
        while (busy := self._take_census()) and time.monotonic() - quiet_s < REST_S:
            self._drain(0.3)
        if busy:
            self._wrong(f"did not come to rest: {busy}")
        self._probe()
        for name, transfer in self._transfers.items():
            if transfer.is_complete and not transfer.landed_digest:
                self._wrong(f"{name[-8:]} was acknowledged but never landed")
        self._transfers.clear()

    def _probe(self) -> None:
        """With nothing in its way a transfer must succeed at once."""
        begin_s = time.monotonic()
        probe = self._begin(begin_s)
        while not probe.is_ended and time.monotonic() - begin_s < REST_S:
            self._turn(0.02)
        if not probe.is_complete:
            self._wrong(
                f"a transfer of {probe.nbytes} bytes on a healthy link failed: {probe.message}"
            )
            probe.is_ended = True

    def _take_census(self) -> str:
        """Ask both processes what they hold; says what is not at rest."""
        known = len(self.tally.censuses)
        self.sender.tell("census")
        self.receiver.tell("census")
        deadline_s = time.monotonic() + 10
        while len(self.tally.censuses) < known + 2:
            if time.monotonic() > deadline_s:
                return "a process does not answer"
            self._turn(0.02)
        busy = [entry for entry in self.tally.censuses[known:] if entry["num_open"]]
        if busy:
            del self.tally.censuses[known:]
        return ", ".join(f"{entry['num_open']} open at the {entry['role']}" for entry in busy)

    def _drain(self, for_s: float) -> None:
        until_s = time.monotonic() + for_s
        while time.monotonic() < until_s:
            self._turn(0.05)

    def _turn(self, timeout_s: float) -> None:
        now_s = time.monotonic()
        self._schedule.run(now_s)
        if now_s - self._printed_s >= PROGRESS_S:
            self._printed_s = now_s
            print(self._progress(now_s), flush=True)
        try:
            self._judge(*self._events.get(timeout=timeout_s))
            while True:
                self._judge(*self._events.get_nowait())
        except queue.Empty:
            return

    # What is done.

    def _open(self) -> list[str]:
        return [name for name, transfer in self._transfers.items() if not transfer.is_ended]

    def _keep_open(self, now_s: float) -> None:
        if self.dice.random() < 0.01:
            self._wanted_open = self.dice.randint(1, MAX_OPEN)
        if not self.sender.is_alive:
            return
        opened = [(name, self._transfers[name]) for name in self._open()]
        for name, transfer in opened:
            if self.dice.random() < CANCELS_PER_TURN and not transfer.is_cancelled:
                transfer.is_cancelled = True
                self.sender.tell("cancel", id=name)
            if self.dice.random() < DROPS_PER_TURN and not transfer.is_dropped:
                transfer.is_dropped = True
                self.receiver.tell("drop", id=name)
            if now_s - transfer.opened_s > HANG_S:
                self._wrong(f"{name[-8:]} of {transfer.nbytes} bytes is open for {HANG_S:g} s")
                transfer.is_ended = True
        if len(opened) < self._wanted_open:
            self._begin(now_s)

    def _begin(self, now_s: float) -> Transfer:
        self._num_made += 1
        name = self._num_made.to_bytes(16, "big").hex()
        least, most = self.dice.choices(SIZES_BYTES, SIZE_WEIGHTS)[0]
        nbytes = self.dice.randrange(least, most)
        priority = self.dice.choice([0, 0, 1])
        treatment = {"seed": self.dice.getrandbits(32), "priority": priority}
        transfer = self._transfers[name] = Transfer(nbytes, treatment, now_s)
        self.receiver.tell("expect", id=name, nbytes=nbytes)
        return transfer

    def _open_expected(self, name: str, transfer: Transfer) -> None:
        """The receiver knows of it now; it may say so again after a restart."""
        if transfer.lives != (0, 0):
            return
        transfer.lives = (self.sender.life, self.receiver.life)
        if self.sender.is_alive:
            self.sender.tell("open", id=name, nbytes=transfer.nbytes, **transfer.treatment)
        else:
            transfer.is_ended = True
            self.tally.outcomes["never begun"] += 1

    def _restart(self, worker: Worker, is_graceful: bool, after_s: float | None) -> None:
        """End a process, kindly or not; without `after_s` it stays away."""
        if not worker.is_alive:
            return
        worker.signal(signal.SIGCONT)
        self._expected_gone.add((worker.role, worker.life))
        if not is_graceful:
            worker.kill()
        elif not worker.quit():
            self._wrong(f"the {worker.role} did not close in order")
        self._drain(0.05)  # what it said last
        if worker.role == "sender":
            for name in self._open():
                transfer = self._transfers[name]
                if transfer.lives[0] == worker.life:
                    if is_graceful:
                        self._wrong(f"{name[-8:]} was not told that the sender closed")
                    transfer.is_ended = True
                    self.tally.outcomes["sender killed"] += 1
        if after_s is not None:
            self._schedule.at(time.monotonic() + after_s, lambda: self._start(worker))

    def _start(self, worker: Worker) -> None:
        worker.start()
        if worker.role == "receiver":
            for name in self._open():
                worker.tell("expect", id=name, nbytes=self._transfers[name].nbytes)

    # How it is judged.

    def _judge(self, role: str, life: int, event: dict[str, Any]) -> None:
        kind = event["event"]
        if event.get("held"):
            self._wrong(f"memory of {event['id']} was held after its end at the {role}")
        if kind == "gone" and (role, life) not in self._expected_gone:
            self._expected_gone.add((role, life))
            self._wrong(f"the {role} died")
        elif kind == "quit" and (event["leaks"] or event["num_open"]):
            self._wrong(f"the {role} left {event['num_open']} open and {event['leaks'][:4]}")
        elif kind == "census":
            self.tally.censuses.append({"role": role, "life": life, **event})
        elif "id" in event and event["id"] in self._transfers:
            self._judge_transfer(kind, event, self._transfers[event["id"]])

    def _judge_transfer(self, kind: str, event: dict[str, Any], transfer: Transfer) -> None:
        name = event["id"][-8:]
        if kind == "expected":
            self._open_expected(event["id"], transfer)
        elif kind == "opened":
            transfer.sent_digest = event["digest"]
        elif kind == "landed":
            transfer.landed_digest = event["digest"]
            self.tally.landed_bytes += transfer.nbytes
        elif kind == "ended":
            transfer.is_ended = True
            transfer.is_complete = not event["code"]
            transfer.message = event["message"]
            self.tally.outcomes[event["code"] or "complete"] += 1
            self.tally.resent_bytes += event["resent_bytes"]
            self.receiver.tell("forget", id=event["id"])
            if not self._is_explained(event["code"], transfer):
                self._wrong(f"{name} ended with {event['code']}: {event['message']}")
        if transfer.landed_digest and transfer.sent_digest not in ("", transfer.landed_digest):
            self._wrong(f"{name}: {transfer.nbytes} bytes landed that were not sent")

    def _is_explained(self, code: str, transfer: Transfer) -> bool:
        is_restarted = transfer.lives[1] != self.receiver.life or not self.receiver.is_alive
        return {
            "": True,
            "idle": True,
            "unreachable": True,
            "no_room": True,
            "busy": True,
            "cancelled": transfer.is_cancelled,
            "dropped": transfer.is_dropped,
            "receiver_restarted": is_restarted,
            "closed": is_restarted or not self.sender.is_alive,
        }.get(code, False)

    def _judge_growth(self) -> None:
        for role in ("sender", "receiver"):
            sizes = [entry["rss_bytes"] for entry in self.tally.censuses if entry["role"] == role]
            # One large reading may be memory about to be given back; two in a row have grown.
            kept = max(map(min, pairwise(sizes)), default=0)
            if sizes and kept - sizes[0] > MAX_RSS_GROWTH_BYTES:
                mib = [size // MIB for size in sizes]
                self._wrong(f"the {role} grew: {mib} MiB at its rests")

    def _progress(self, now_s: float) -> str:
        tally = self.tally
        failed = sum(count for code, count in tally.outcomes.items() if code != "complete")
        return (
            f"{now_s - self._begin_s:5.0f} s  {tally.outcomes['complete']} complete, "
            f"{failed} ended otherwise, {len(self._open())} open, "
            f"{tally.landed_bytes / MIB:.0f} MiB landed, {sum(self.chaos.num_faults.values())} "
            f"faults, {len(tally.wrongs)} wrong"
        )

    def summary(self, seed: int) -> dict[str, Any]:
        tally = self.tally
        return {
            "seed": seed,
            "seconds": round(time.monotonic() - self._begin_s, 1),
            "transfers": self._num_made,
            "outcomes": dict(tally.outcomes.most_common()),
            "faults": dict(self.chaos.num_faults.most_common()),
            "lives": {"sender": self.sender.life, "receiver": self.receiver.life},
            "landed_mib": round(tally.landed_bytes / MIB),
            "resent_mib": round(tally.resent_bytes / MIB),
            "censuses": tally.censuses,
            "wrongs": tally.wrongs,
        }


def print_summary(summary: dict[str, Any]) -> None:
    keys = ("seed", "seconds", "transfers", "landed_mib", "resent_mib", "lives")
    rows = [(key, summary[key]) for key in keys]
    rows += [(f"ended: {code}", count) for code, count in summary["outcomes"].items()]
    rows += [(f"fault: {name}", count) for name, count in summary["faults"].items()]
    for census in summary["censuses"][-2:]:
        held = f"{census['rss_bytes'] // MIB} MiB, {census['num_descriptors']} descriptors"
        rows.append((f"last rest: {census['role']}", f"{held}, {census['num_threads']} threads"))
    for key, value in rows:
        print(f"  {key:<28} {value}")
    print(f"{len(summary['wrongs'])} wrong" if summary["wrongs"] else "nothing wrong")
    for wrong in summary["wrongs"]:
        print(f"  {wrong}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, prog="make soak SOAK_ARGS=...")
    parser.add_argument("--minutes", type=float, default=8.0, help="at most 10")
    parser.add_argument("--seed", type=int, default=None, help="draw the same faults again")
    parser.add_argument("--tls", action="store_true", help="over mutual TLS")
    parser.add_argument("--json", type=Path, help="keep the summary here")
    args = parser.parse_args()
    if not 0 < args.minutes <= 10:
        parser.error("--minutes must be more than 0 and at most 10")
    seed = random.SystemRandom().randrange(1 << 32) if args.seed is None else args.seed
    log = Path(tempfile.mkdtemp(prefix="prfaas-soak-")) / "processes.log"
    print(f"seed {seed}; the processes log to {log}", flush=True)
    logging.basicConfig(filename=log, level=logging.INFO, format="%(asctime)s soak %(message)s")
    tls = make_node(log.parent, "node", make_authority(log.parent, "ca")) if args.tls else None
    soak = Soak(seed, log, tls)
    try:
        soak.run(args.minutes * 60)
    except KeyboardInterrupt:
        print("interrupted")
        return 130
    finally:
        soak.close()
    if "Traceback" in log.read_text(errors="replace"):
        soak.tally.wrongs.append(f"an unexpected exception, see {log}")
    summary = soak.summary(seed)
    print_summary(summary)
    if args.json is not None:
        args.json.write_text(json.dumps(summary, indent=1) + "\n")
    return 1 if summary["wrongs"] else 0


if __name__ == "__main__":
    sys.exit(main())
