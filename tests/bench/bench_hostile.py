"""True traffic through a gateway and the transport while attackers hold sockets and send garbage.

Run: python tests/bench/bench_hostile.py [--json FILE] [--smoke] [--ways tls key] [--rounds N].
Gateway, two node agents, engines and attackers are processes of their own on loopback. Engines are
stand-ins that compute nothing (hostile_engines.py). The KVCache of an offloaded prompt goes, with
the gateway's grants, from one agent to the other and is compared byte for byte. Requests come at
fixed times and count from when they are due, so that one that waits hides no other. README.md
describes the conditions, and what becomes of the CPU that attackers share.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from attacked_agents import Way
from echo_engine import Client, UnwantedHead
from free_ports import free_port
from gateway_process import child
from hostile_attackers import Plan as Attack
from hostile_region import HOSTILE_KEY, Region
from hostile_report import CONDITIONS, LEFT_BOUND, PATHS, Condition, Phase, Watched, goals, tables
from smoke import add_smoke

HERE: Final = Path(__file__).resolve().parent
WAYS: Final[tuple[Way, ...]] = ("tls", "key")
ROUTES: Final = {"short": b"x-prfaas-route: local", "offloaded": b"x-prfaas-route: prefill_cluster"}
PATIENCE_S: Final = 30.0
"""For an answer, and after a phase for descriptors to be closed."""
LET_IN_S: Final = 60.0
"""For the first KVCache of an agent that has just been started."""
LOOK_S: Final = 0.25
MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured. `per_s`: true requests by path; the rest is for the attackers."""

    rounds: int
    seconds: float
    per_s: Mapping[str, float]
    num_held: int
    connections_per_s: float


@contextmanager
def attacking(attack: Attack, did: dict[str, dict[str, int]]) -> Iterator[None]:
    """Attackers, from when all have begun until the end; `did` then says what each attack did."""
    argv = [sys.executable, str(HERE / "hostile_attackers.py"), json.dumps(asdict(attack))]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            if not process.stdout.readline():
                raise RuntimeError("the attackers did not start")
            yield
            process.terminate()
            did.update(json.loads(process.stdout.readline()))
            process.wait(PATIENCE_S)
        finally:
            process.kill()


@dataclass(slots=True)
class Watch:
    """Looks at processes now and then, and keeps the most of each."""

    processes: Mapping[str, psutil.Process]
    most: dict[str, tuple[float, int, int]] = field(default_factory=dict)
    """MiB, descriptors and threads by process."""

    async def look(self) -> None:
        """Until cancelled."""
        while True:
            for name, process in self.processes.items():
                rss_mib, fds, threads = self.most.get(name, (0.0, 0, 0))
                self.most[name] = (
                    max(rss_mib, process.memory_info().rss / MIB),
                    max(fds, process.num_fds()),
                    max(threads, process.num_threads()),
                )
            await asyncio.sleep(LOOK_S)

    def cpu_s(self) -> dict[str, float]:
        """The CPU that each has used since its start."""
        return {name: sum(one.cpu_times()[:2]) for name, one in self.processes.items()}


async def ask(region: Region, path: str) -> None:
    """One true request on a connection of its own. Raises OSError, TimeoutError, RuntimeError."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(PATIENCE_S):
        made = await loop.create_connection(
            lambda: Client(region.requests[path], ROUTES[path]), "127.0.0.1", region.port
        )
        try:
            await made[1].ask()
        finally:
            made[1].close()


async def first_kvcache_s(region: Region) -> float | None:
    """Seconds until a prompt is served with KVCache from the sender; None: too many."""
    started_s = time.monotonic()
    while time.monotonic() - started_s < LET_IN_S:
        with contextlib.suppress(OSError, TimeoutError, RuntimeError):
            await ask(region, "offloaded")
            return time.monotonic() - started_s
        await asyncio.sleep(0.1)
    return None


async def traffic(region: Region, plan: Plan) -> dict[str, Any]:
    """The fields of a `Phase` that tell of true requests and of the processes."""
    let_in_s = await first_kvcache_s(region)
    watch = Watch(region.processes())
    looking, before_s = asyncio.create_task(watch.look()), watch.cpu_s()
    taken_s: dict[str, list[float]] = {path: [] for path in PATHS}
    failed: dict[str, list[str]] = {path: [] for path in PATHS}
    rerouted: dict[str, list[str]] = {path: [] for path in PATHS}

    async def at(path: str, due_s: float) -> None:
        await asyncio.sleep(due_s - time.monotonic())
        try:
            await ask(region, path)
        except UnwantedHead as error:
            rerouted[path].append(str(error)[:300])
        except (OSError, TimeoutError, RuntimeError) as error:
            failed[path].append(f"{type(error).__name__}: {error}"[:300])
        else:
            taken_s[path].append(time.monotonic() - due_s)

    start_s = time.monotonic() + 0.1
    due = [
        at(path, start_s + number / per_s)
        for path, per_s in plan.per_s.items()
        for number in range(round(plan.seconds * per_s))
    ]
    await asyncio.gather(*due)
    looking.cancel()
    await asyncio.gather(looking, return_exceptions=True)
    spent_s = {name: after_s - before_s[name] for name, after_s in watch.cpu_s().items()}
    processes = {name: Watched(*seen, spent_s[name]) for name, seen in watch.most.items()}
    return {
        "let_in_s": let_in_s,
        "taken_s": taken_s,
        "failed": failed,
        "rerouted": rerouted,
        "processes": processes,
    }


def descriptors(region: Region) -> dict[str, int]:
    """How many each process has open; not of the sender, which is started again."""
    processes = region.processes()
    return {name: processes[name].num_fds() for name in ("gateway", "receiving agent")}


def descriptors_left(region: Region, before: Mapping[str, int]) -> dict[str, int]:
    """Descriptors beyond `before`, once they are few or patience is over."""
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        left = {name: count - before[name] for name, count in descriptors(region).items()}
        if max(left.values()) <= LEFT_BOUND or time.monotonic() > deadline_s:
            return left
        time.sleep(0.2)


def phase(region: Region, way: Way, condition: Condition, attack: Attack, plan: Plan) -> Phase:
    """One stretch of true traffic; the attackers come first and the sender starts among them."""
    before, did = descriptors(region), dict[str, dict[str, int]]()
    with contextlib.nullcontext() if condition == "idle" else attacking(attack, did):
        region.restart_sender()
        found = uvloop.run(traffic(region, plan))
    left = descriptors_left(region, before)
    return Phase(way=way, condition=condition, left=left, attacks=did, **found)


def measure(way: Way, plan: Plan, folder: Path) -> list[Phase]:
    """All rounds with one way of knowing each other."""
    found = []
    decoys = free_port(), free_port(), (free_port(), free_port())
    ports = [str(port) for port in (*decoys[:2], *decoys[2])]
    argv = [sys.executable, str(HERE / "hostile_attackers.py"), "--decoys", *ports]
    with Region(folder, way) as region, child(argv, lambda: True):
        uvloop.run(first_kvcache_s(region))
        for number in range(plan.rounds):
            for condition in CONDITIONS:
                targets = region.targets() if condition == "attacked" else decoys
                attack = Attack(*targets, HOSTILE_KEY, plan.num_held, plan.connections_per_s)
                one = phase(region, way, condition, attack, plan)
                found.append(one)
                p99s = ", ".join(f"{p} {1e3 * one.quantile_s(p, 0.99):.0f}" for p in PATHS)
                what = f"p99 ms {p99s}; {one.num_failed} failed"
                say(f"{way}, round {number + 1}, {condition}: {what}")
                reasons = [*one.failed.values(), *one.rerouted.values()]
                for reason in {reason for found_here in reasons for reason in found_here}:
                    say(f"  {reason}")
    return found


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the raw numbers here")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=15.0, help="of true traffic, a phase")
    parser.add_argument("--short-per-s", type=float, default=20.0, help="true requests")
    parser.add_argument("--offloaded-per-s", type=float, default=8.0, help="true requests")
    parser.add_argument("--held", type=int, default=1024, help="sockets that attackers hold")
    parser.add_argument("--attack-rate", type=float, default=256.0, help="new connections a second")
    add_smoke(parser, ways=["tls"], rounds=1, seconds=1.0, held=64, attack_rate=32.0)
    args = parser.parse_args()
    per_s = {"short": args.short_per_s, "offloaded": args.offloaded_per_s}
    plan = Plan(args.rounds, args.seconds, per_s, args.held, args.attack_rate)
    found: list[Phase] = []
    for way in args.ways:
        with tempfile.TemporaryDirectory(prefix="prfaas-hostile-") as folder:
            found += measure(way, plan, Path(folder))
    print(tables(found))
    if args.json:
        kept = {
            "plan": asdict(plan) | {"cpus": psutil.cpu_count()},
            "goals": [asdict(goal) for goal in goals(found)],
            "phases": [asdict(one) for one in found],
        }
        args.json.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
