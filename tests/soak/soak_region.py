"""`make soak-region`: ten minutes of coming and going in a region of real processes.

Gateway, fronts, directory, agents and emulated links run with the security that `prfaas up` gives
them; engines are stand-ins without a model that check every byte of KVCache that they load. Tenants
and their API keys come and go, prompts of many salts are asked, links are cut, agents are killed.
Between storms the region comes to rest, and what its processes hold is compared: descriptors,
memory, and tables as far as metrics and pages show them.

Exit status 1 when anything grows, an answer is wrong, or a request fails that no kill explains.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from deploy.region.launch.running import RegionStartFailed
from tests.soak.growth import LEAST_RESTS, MIB, WARM_UP, Sample, after, grown, line
from tests.soak.region_clients import NUM_TENANTS, Clients, write_keys
from tests.soak.region_processes import KILLED, MODEL, THRESHOLD_TOKENS, SoakRegion

STORM_S = 12.0
LEAST_STORM_S = 3.0
REST_S = 120.0
"""A region that does not come to rest for so long, hangs."""
SETTLED_S = 5.0
"""Least time of a rest: connections kept for the next request are closed after 3 s."""
SAMPLE_S = 2.0
LOOK_S = 0.5
LEAST_STORMS = 4
"""Descriptors that the first two opened may stay open."""
HOPELESS = 20
"""So many wrongs end a run."""
MEAN_FAULT_S = 2.0
TENANTS_EVERY_S = 2.0
TENANTS_AT_A_TIME = 2
RESTART_S = 120.0


class Soak:
    """Storms and rests, and what they show."""

    def __init__(self, region: SoakRegion, clients: Clients, seed: int) -> None:
        self.samples: dict[str, list[Sample]] = {}
        self.faults: Counter[str] = Counter()
        self.begin_s = time.monotonic()
        self.end_s = self.begin_s
        self._region = region
        self._clients = clients
        self._dice = random.Random(seed)
        self._num_storms = 0

    async def run(self, seconds: float) -> None:
        storm_s = min(STORM_S, max(LEAST_STORM_S, seconds / 2 / LEAST_STORMS))
        await self._clients.change_tenants(NUM_TENANTS)
        self.begin_s = time.monotonic()
        while len(self.wrongs) < HOPELESS and (
            self._num_storms < LEAST_STORMS or time.monotonic() < self.begin_s + seconds
        ):
            await self._storm(storm_s)
            await self._rest()
            print(self._progress(), flush=True)
        self.end_s = time.monotonic()
        self._judge()

    @property
    def wrongs(self) -> list[str]:
        return self._clients.wrongs

    async def _storm(self, for_s: float) -> None:
        self._num_storms += 1
        end_s = time.monotonic() + for_s
        async with asyncio.TaskGroup() as group:
            group.create_task(self._clients.ask_until(end_s))
            group.create_task(self._keep_changing_tenants(end_s))
            group.create_task(self._keep_cutting(end_s))
            group.create_task(self._keep_sampling(end_s))
            group.create_task(self._kill(end_s - for_s / 2))

    async def _keep_changing_tenants(self, end_s: float) -> None:
        while time.monotonic() < end_s:
            await self._clients.change_tenants(TENANTS_AT_A_TIME)
            self.faults["tenants changed"] += 1
            await asyncio.sleep(TENANTS_EVERY_S)

    async def _keep_cutting(self, end_s: float) -> None:
        while time.monotonic() < end_s:
            relay = self._region.running.relay(node=self._dice.choice(("b1", "b2")))
            for_s = self._dice.uniform(0.1, 1.0)
            fault = self._dice.choice(("reset", "cut", "stall"))
            match fault:
                case "reset":
                    await asyncio.to_thread(relay.reset)
                case "cut":
                    await asyncio.to_thread(relay.cut, for_s=for_s)
                case "stall":
                    await asyncio.to_thread(relay.stall, for_s=for_s)
            self.faults[f"link: {fault}"] += 1
            await asyncio.sleep(self._dice.expovariate(1 / MEAN_FAULT_S))

    async def _kill(self, at_s: float) -> None:
        """Kill one agent in the middle of the storm, and let it come back."""
        await asyncio.sleep(max(0.0, at_s - time.monotonic()))
        agent = self._region.agent(KILLED[self._num_storms % len(KILLED)])
        self._clients.killed_s = time.monotonic()
        # Restarts by its supervisor would come later and later.
        await agent.kill(restart=False)
        self.faults[f"{agent.name} killed"] += 1
        await asyncio.sleep(self._dice.uniform(0.0, 2.0))
        agent.start()
        await agent.wait_restarted(RESTART_S)

    async def _rest(self) -> None:
        """Wait until nothing is held for anybody and nothing changes, and take samples of that."""
        deadline_s = time.monotonic() + REST_S
        await asyncio.sleep(SETTLED_S)
        try:
            await self._region.running.wait_settled(REST_S)
        except RegionStartFailed as error:
            self._clients.wrong(str(error))
        while True:
            trouble = await self._region.unrest()
            await asyncio.sleep(LOOK_S)  # the connections of these questions are closed by then
            before = self._region.num_descriptors()
            await asyncio.sleep(LOOK_S)
            found = await self._region.samples(is_at_rest=True)
            changed = [name for name in found if found[name].num_descriptors != before.get(name)]
            trouble = trouble or await self._region.unrest()
            if not trouble and not changed:
                return self._keep(found)
            if time.monotonic() > deadline_s:
                trouble = trouble or f"descriptors of {', '.join(changed)} change"
                return self._clients.wrong(f"no rest within {REST_S:g} s: {trouble}")

    async def _keep_sampling(self, end_s: float) -> None:
        while time.monotonic() < end_s:
            await asyncio.sleep(SAMPLE_S)
            self._keep(await self._region.samples(is_at_rest=False))

    def _keep(self, found: dict[str, Sample]) -> None:
        for name, sample in found.items():
            self.samples.setdefault(name, []).append(sample)

    def _judge(self) -> None:
        for name, samples in self.samples.items():
            if self._region.is_killed_at_times(name):
                continue
            if len({sample.pid for sample in samples}) > 1:
                self._clients.wrong(f"{name} was started again, and nobody had killed it")
                continue
            for what in grown(name, samples, self.begin_s, self.end_s):
                self._clients.wrong(what)
        answered = self._clients.outcomes
        if not answered["local"] or not answered["prefill_cluster"]:
            self._clients.wrong(f"not every route was taken: {dict(answered)}")

    def _progress(self) -> str:
        samples = [found[-1] for found in self.samples.values()]
        answered = sum(self._clients.outcomes.values())
        return (
            f"{time.monotonic() - self.begin_s:5.0f} s  {answered} answered, "
            f"{self._clients.num_tenants} tenants, {sum(self.faults.values())} faults; at rest "
            f"{sum(sample.num_descriptors for sample in samples)} descriptors, "
            f"{sum(sample.memory_bytes for sample in samples) / MIB:.0f} MiB; "
            f"{len(self.wrongs)} wrong"
        )

    def summary(self, seed: int) -> dict[str, Any]:
        return {
            "seed": seed,
            "seconds": round(self.end_s - self.begin_s, 1),
            "outcomes": dict(self._clients.outcomes.most_common()),
            "tenants": self._clients.num_tenants,
            "faults": dict(self.faults.most_common()),
            "processes": {
                name: row(samples, self.begin_s, self.end_s)
                for name, samples in self.samples.items()
            },
            "wrongs": self.wrongs,
            "samples": {
                name: [asdict(sample) for sample in samples]
                for name, samples in self.samples.items()
            },
        }


def row(samples: list[Sample], begin_s: float, end_s: float) -> dict[str, Any]:
    """Resources of one process at the first rest that counts and at the last, and growth. A
    process that was killed is only counted.
    """
    rests = after(samples, WARM_UP, begin_s, end_s)
    found: dict[str, Any] = {
        "starts": len({sample.pid for sample in samples}),
        "most_descriptors": max(sample.num_descriptors for sample in samples),
        "threads": samples[-1].num_threads,
        "rss_mib": round(samples[-1].rss_bytes / MIB, 1),
    }
    if not rests:
        return found
    first, last = rests[0], rests[-1]
    found |= {
        "descriptors": [first.num_descriptors, last.num_descriptors],
        "memory_mib": [round(item.memory_bytes / MIB, 1) for item in (first, last)],
        "tables": {name: [first.tables.get(name), last.tables[name]] for name in last.tables},
    }
    half = after(samples, 0.5, begin_s, end_s)
    if len(half) >= LEAST_RESTS / 2 and found["starts"] == 1:
        memory = line([(sample.at_s, sample.memory_bytes) for sample in half])
        found["growth_mib"] = round(memory.growth / MIB, 2)
    return found


def print_summary(summary: dict[str, Any]) -> None:
    for key in ("seed", "seconds", "tenants"):
        print(f"  {key:<28} {summary[key]}")
    for kind in ("outcomes", "faults"):
        for name, count in summary[kind].items():
            print(f"  {name:<28} {count}")
    print(
        f"\n  {'process':<26} {'descriptors':>12} {'most':>5} {'threads':>7} {'RSS':>6} "
        f"{'own memory, MiB':>17} {'last half':>9}"
    )
    for name, found in summary["processes"].items():
        numbers, memory = (
            "->".join(str(value) for value in found.get(key, ()))
            for key in ("descriptors", "memory_mib")
        )
        growth = f"{found['growth_mib']:+.2f}" if "growth_mib" in found else ""
        times = f" (x{found['starts']})" if found["starts"] > 1 else ""
        print(
            f"  {name + times:<26} {numbers:>12} {found['most_descriptors']:>5} "
            f"{found['threads']:>7} {found['rss_mib']:>6.0f} {memory:>17} {growth:>9}"
        )
        for table, sizes in found.get("tables", {}).items():
            print(f"    {table:<24} {sizes[0]:>12g} -> {sizes[1]:g}")
    print(f"{len(summary['wrongs'])} wrong" if summary["wrongs"] else "nothing wrong")
    for wrong in summary["wrongs"]:
        print(f"  {wrong}")


async def run(minutes: float, seed: int, folder: Path) -> dict[str, Any]:
    keys_file = folder / "keys"
    write_keys(keys_file, [])
    async with SoakRegion(folder, keys_file) as region:
        print(f"a region runs: prompts of more than {THRESHOLD_TOKENS} tokens cross its links")
        url = region.running.gateway_url
        clients = Clients(url, MODEL, keys_file, random.Random(seed + 1))
        try:
            soak = Soak(region, clients, seed)
            await soak.run(minutes * 60)
        finally:
            await clients.close()
        return soak.summary(seed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, prog="make soak-region SOAK_ARGS=...")
    parser.add_argument("--minutes", type=float, default=10.0, help="0.4 or more")
    parser.add_argument("--seed", type=int, default=None, help="draw the same prompts again")
    parser.add_argument("--json", type=Path, help="keep all samples here")
    args = parser.parse_args()
    if args.minutes < 0.4:
        parser.error("--minutes must be 0.4 or more")
    seed = random.SystemRandom().randrange(1 << 32) if args.seed is None else args.seed
    folder = Path(tempfile.mkdtemp(prefix="prfaas-soak-"))
    print(f"seed {seed}; the processes log to {folder / 'run' / 'logs'}", flush=True)
    try:
        summary = asyncio.run(run(args.minutes, seed, folder))
    except KeyboardInterrupt:
        print("interrupted")
        return 130
    print_summary(summary)
    if args.json is not None:
        args.json.write_text(json.dumps(summary, indent=1) + "\n")
    return 1 if summary["wrongs"] else 0


if __name__ == "__main__":
    sys.exit(main())
