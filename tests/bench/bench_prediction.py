"""How close the TTFT predicted at routing is to the measured one, on a region of real engines.

    python tests/bench/bench_prediction.py [--json FILE] [--model qwen3-next-tiny] [--capacity 4.2]
    python tests/bench/bench_prediction.py --pace [--model mimo-v2-tiny]
    python tests/bench/bench_prediction.py --smoke --gateway URL

A demo region (a prefill cluster and a PD cluster of one engine each, each engine on a core of its
own where there are two, an emulated link) starts with nothing learnt, and with default settings
except for the threshold, which lets both routes be used. Clients stream prompts of mixed lengths,
all of them new to every cache, at random moments:

    first      the first 30 requests, at 40% of capacity
    30%, 60%, 80%
    longer     prompts three times as long, at 50% of capacity, from 30 s after the change on
    link       a tenth of the rate and three times the round trip, from 30 s after the change on

Then the records say what was predicted when each was routed. Capacity is what a region of its own
completes in a closed loop, unless --capacity gives it (requests/s). Goal for each phase but the
first, and each route: median |predicted / measured - 1| at most 15%, and P90 at most 40%. With
--gateway a region that runs already is asked, which may know its engines well.

With --pace engines take the time of GPUs, the PD cluster has a prefill instance as well, and the
planner says what capacity is. Goal then: at most 10% and 30%, of the first requests 15% and 40%.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from paced import LINK as PACED_LINK
from paced import Watch, add_pace, is_void, paced_region, parsed
from running_region import served_model
from smoke import add_smoke

from deploy.lab.demo.regions import demo_region
from deploy.lab.demo.run import DEFAULT_MODELS
from deploy.lab.demo.scenario import text
from deploy.lab.demo.tiny_models import build_model
from deploy.lab.demo.tiny_specs import MODELS
from deploy.lab.rehearse.run import calibrated
from deploy.region.launch.launcher import RunningRegion
from deploy.region.launch.plan import PlannedProcess
from deploy.region.spec.region import RegionSpec

OUTPUT_TOKENS = 16
THRESHOLD_TOKENS = 500
LENGTHS = (150, 300, 500, 800, 1200, 1800)
LONGER = 3
LOOSE_GOALS, GOALS = (0.15, 0.40), (0.10, 0.30)
"""Largest median and P90 error: of engines that share cores, of paced ones."""
SCHEDULING = {"long_term": {"mode": "advise"}}
LINK, SLOWER_LINK = {"rate": "1Gbit", "rtt": "20ms"}, {"rate": "100Mbit", "rtt": "60ms"}
PACED_SLOWER_LINK = {"rate": "80Mbit", "rtt": "60ms"}
PACED_LENGTHS = (250, 400, 620, 900, 1400, 2450)
"""At most 7,500 tokens where they are longer. No last chunk is so short that this CPU takes longer
for it than a GPU.
"""
PACED_THRESHOLD_TOKENS, PACED_CAPACITY_RPS = 950, 1.29
"""What `prfaas plan solve` says of these lengths, a prefill instance of each profile and a decode
instance.
"""
CLOSED_LOOP = 6
"""Clients that ask one request after the other while capacity is measured."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Traffic of one kind. It ends after `seconds` or `num_requests`, whichever is first.

    Requests of the first `settle_s` are sent, but not counted. `lengths` are in tokens.
    """

    name: str
    rate: float
    lengths: tuple[int, ...] = LENGTHS
    seconds: float = 30.0
    settle_s: float = 0.0
    num_requests: int = 1 << 30


def phases(capacity: float, lengths: tuple[int, ...] = LENGTHS) -> list[Phase]:
    """The phases of a region that completes `capacity` requests/s of these lengths."""
    longer = tuple(LONGER * length for length in lengths)
    return [
        Phase("first", 0.4 * capacity, lengths, num_requests=30, seconds=60.0),
        *(Phase(f"{share:.0%}", share * capacity, lengths) for share in (0.3, 0.6, 0.8)),
        Phase("longer", 0.5 / LONGER * capacity, longer, seconds=65.0, settle_s=30.0),
        Phase("link", 0.5 * capacity, lengths, seconds=65.0, settle_s=30.0),
    ]


SMOKE = (Phase("smoke", 1.4, (200, 400, 800), seconds=4.0),)


async def ask(
    session: aiohttp.ClientSession, url: str, model: str, request_id: str, lengths: Sequence[int]
) -> None:
    """Stream one prompt. SystemExit if it fails."""
    draws = random.Random(request_id)
    num_tokens = draws.choice(lengths) + draws.randrange(100)
    body = {
        "model": model,
        "prompt": text(num_tokens, draws.getrandbits(32)),
        "max_tokens": OUTPUT_TOKENS,
        "stream": True,
    }
    headers = {"X-Request-Id": request_id}
    async with session.post(f"{url}/v1/completions", json=body, headers=headers) as response:
        answer = await response.read()
    if response.status != 200 or not answer.rstrip().endswith(b"[DONE]"):
        raise SystemExit(f"{request_id} failed: HTTP {response.status}, {answer[-200:]!r}")


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300))


async def drive(
    url: str, model: str, traffic: Sequence[Phase], begins: Callable[[Phase], None]
) -> list[dict[str, Any]]:
    """Ask a region; the records of all requests, in the order in which they were sent, each with
    its `phase`, "" for one that is not counted. `begins` is called at the begin of each phase.
    """
    gaps = random.Random(1)
    sent: dict[str, str] = {}
    async with _session() as session:
        tasks = []
        for phase in traffic:
            begins(phase)
            begun_s, num_before = time.monotonic(), len(sent)
            while (spent_s := time.monotonic() - begun_s) < phase.seconds:
                if len(sent) - num_before >= phase.num_requests:
                    break
                request_id = f"prediction-{len(sent)}"
                sent[request_id] = phase.name if spent_s >= phase.settle_s else ""
                asking = ask(session, url, model, request_id, phase.lengths)
                tasks.append(asyncio.create_task(asking))
                await asyncio.sleep(gaps.expovariate(phase.rate))
            print(f"{phase.name}: {len(sent) - num_before} requests", flush=True)
        await asyncio.gather(*tasks)
        async with session.get(f"{url}/prfaas/requests?limit=1000") as response:
            records = {item["request_id"]: item for item in (await response.json())["requests"]}
    return [records[name] | {"phase": phase} for name, phase in sent.items() if name in records]


async def measured_capacity(url: str, model: str, seconds: float = 20.0) -> float:
    """The requests/s that `CLOSED_LOOP` clients complete, in the second half of the time."""
    ends: list[float] = []
    begun_s = time.monotonic()

    async def client(name: int) -> None:
        while time.monotonic() < begun_s + seconds:
            await ask(session, url, model, f"capacity-{name}-{len(ends)}", LENGTHS)
            ends.append(time.monotonic() - begun_s)

    async with _session() as session:
        await asyncio.gather(*map(client, range(CLOSED_LOOP)))
    return sum(seconds / 2 <= end < seconds for end in ends) / (seconds / 2)


def rows(records: Sequence[dict[str, Any]], *, pace: bool = False) -> list[dict[str, Any]]:
    """By phase and target, the errors of those that went the way that was predicted."""
    found = []
    targets = sorted({record["target"] for record in records})
    for phase in dict.fromkeys(record["phase"] for record in records if record["phase"]):
        for target in ("all", *targets):
            errors = sorted(
                abs(record["predicted_ttft_s"] / record["ttft_s"] - 1)
                for record in records
                if record["phase"] == phase
                and target in ("all", record["target"])
                and record["predicted_ttft_s"]
                and not record["num_retries"]
            )
            if errors:
                median, p90 = statistics.median(errors), errors[int(0.9 * (len(errors) - 1))]
                goals = GOALS if pace and phase != "first" else LOOSE_GOALS
                found.append(
                    {
                        "phase": phase,
                        "target": target,
                        "requests": len(errors),
                        "median_error": median,
                        "p90_error": p90,
                        "met": median <= goals[0] and p90 <= goals[1],
                    }
                )
    return found


def region_spec(model: str, path: Path, recordings: Path | None, *, pace: bool) -> RegionSpec:
    """The region that is measured. With `recordings`, its gateway records its events there."""
    spec = demo_region(
        MODELS[model],
        path,
        threshold_tokens=PACED_THRESHOLD_TOKENS if pace else THRESHOLD_TOKENS,
        scheduling=SCHEDULING,
        local_prefill=pace,
        link=PACED_LINK if pace else LINK,
    )
    if pace:
        spec = paced_region(spec)
    if recordings is None:
        return spec
    raw = spec.model_dump(mode="json", by_alias=True, exclude_unset=True)
    raw["gateway"]["recorder"] = {"dir": str(recordings / model), "keep": "1GiB"}
    return RegionSpec.model_validate(raw)


def pinned() -> Callable[[PlannedProcess], PlannedProcess]:
    """Binds each engine to a core of its own while there are cores."""
    cores = sorted(os.sched_getaffinity(0))

    def adapt(planned: PlannedProcess) -> PlannedProcess:
        if planned.kind != "engine" or not cores:
            return planned
        argv = ("taskset", "-c", str(cores.pop(0)), *planned.process.argv)
        return replace(planned, process=replace(planned.process, argv=argv))

    return adapt


@asynccontextmanager
async def running(
    model: str, recordings: Path | None = None, *, pace: bool = False
) -> AsyncIterator[RunningRegion]:
    """A region of its own with nothing learnt."""
    with tempfile.TemporaryDirectory() as directory:
        path = build_model(MODELS[model], Path(directory))
        spec = region_spec(model, path, recordings, pace=pace)
        print("starting a region", flush=True)
        # Paced engines wait for most of their time: two of them may share a core.
        adapt = (lambda planned: planned) if pace else pinned()
        async with RunningRegion(spec, Path(directory) / "region", adapt=adapt) as region:
            yield region


async def _measure(arguments: argparse.Namespace, model: str) -> dict[str, Any]:
    capacity, scale, pace = arguments.capacity, arguments.scale, arguments.pace
    if capacity is None:
        async with running(model) as region:
            capacity = await measured_capacity(region.gateway_url, model)
    print(f"{model}: capacity {capacity:.2f} requests/s", flush=True)
    async with running(model, arguments.recordings, pace=pace) as region:

        def begins(phase: Phase) -> None:
            if phase.name == "link":
                region.relay().configure(**(PACED_SLOWER_LINK if pace else SLOWER_LINK))

        traffic = [
            replace(phase, seconds=scale * phase.seconds, settle_s=scale * phase.settle_s)
            for phase in phases(capacity, PACED_LENGTHS if pace else LENGTHS)
        ]
        if pace:
            async with _session() as session:
                await calibrated(session, region.gateway_url, region.region)
        watch = Watch()
        records = await drive(region.gateway_url, model, traffic, begins)
        found = result(model, records, pace=pace) | {"capacity_per_s": capacity}
        return found | ({"pace": watch.verdict(region.directory.logs)} if pace else {})


async def _measure_running(url: str, traffic: Sequence[Phase]) -> dict[str, Any]:
    """On the region behind this gateway, with its first model."""
    model = await served_model(url)
    return result(model, await drive(url, model, traffic, lambda phase: None))


def result(model: str, records: Sequence[dict[str, Any]], *, pace: bool = False) -> dict[str, Any]:
    """What is kept of one model: the errors, and all records."""
    return {"model": model, "rows": rows(records, pace=pace), "records": list(records)}


def _show(one: dict[str, Any]) -> None:
    print(f"{one['model']}\n{'phase':>8} {'target':>12} {'requests':>9} {'median':>8} {'p90':>8}")
    for row in one["rows"]:
        print(
            f"{row['phase']:>8} {row['target']:>12} {row['requests']:>9} "
            f"{row['median_error']:>8.1%} {row['p90_error']:>8.1%} {'' if row['met'] else 'MISSED'}"
        )
    if not one["rows"]:
        print("no TTFT was predicted")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write raw numbers here")
    parser.add_argument(
        "--model", choices=sorted(MODELS), action="append", help="default: the demo's two"
    )
    parser.add_argument("--capacity", type=float, help="requests/s, instead of measuring it")
    parser.add_argument("--scale", type=float, default=1.0, help="of all times of the phases")
    parser.add_argument("--recordings", type=Path, help="let the gateway record its events here")
    parser.add_argument("--gateway", metavar="URL", help="of a region that runs: ask that one")
    add_smoke(parser)
    add_pace(parser, capacity=PACED_CAPACITY_RPS, scale=2.0)
    args = parsed(parser)
    if args.gateway:
        traffic = SMOKE if args.smoke else phases(args.capacity or 1.0)
        results = [asyncio.run(_measure_running(args.gateway, traffic))]
    else:
        results = [asyncio.run(_measure(args, model)) for model in args.model or DEFAULT_MODELS]
    for one in results:
        _show(one)
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1))
    return int(is_void({one["model"]: one["pace"] for one in results if "pace" in one}))


if __name__ == "__main__":
    sys.exit(main())
