"""The planner against paced regions under a backlog: `bench_capacity.py --pace`.

The planner gets the profiles that pace the engines, and the lengths of the prompts in tokens of
these. Each region has the division and the threshold of its plan, which stay, and clients that
always have more prompts than its decode slots.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import aiohttp
import yaml
from capacity_files import Shape, capacity_row
from own_command import prfaas
from paced import (
    DECODE_SLOTS,
    FAST,
    LINK,
    OUTPUT_TOKENS_PER_TOKEN,
    SLOW,
    TOKENS_PER_TOKEN,
    Watch,
    paced_region,
)

from deploy.lab.demo.regions import demo_region, pd_cluster_alone
from deploy.lab.demo.scenario import text
from deploy.lab.demo.tiny_specs import TinyModel
from deploy.lab.pace.times import profile_path
from deploy.region.launch.launcher import RunningRegion
from deploy.region.spec.region import RegionInstance, RegionSpec

GOAL: Final = 0.05
CLIENTS: Final = 2 * DECODE_SLOTS
SAMPLE: Final = 24
SEED: Final = 1
DECODE_TOKENS_PER_S: Final = 40.0
"""Of a stream, in tokens of the profiles: their only decode step."""
SCHEDULING: Final = {"long_term": {"mode": "advise"}}
ALL_REMOTE: Final = SCHEDULING | {"routing": {"policy": "threshold"}}
"""By default a decode instance prefills too when that is sooner, which no plan counts on."""
SHAPES: Final = (
    Shape("PD alone", 0, 3),
    Shape("prefill cluster + PD that only decodes", 1, 1),
    Shape("prefill cluster + PD", 1, 2),
)
"""One instance of each PD cluster decodes, as the planner wants."""


def sample(arguments: argparse.Namespace) -> list[int]:
    """Tokens of prompts, evenly from the shortest to the longest, in an order without a trend."""
    least, most = arguments.tokens
    lengths = [round(least + (most - least) * (n + 0.5) / SAMPLE) for n in range(SAMPLE)]
    random.Random(SEED).shuffle(lengths)
    return lengths


def plan_of(shape: Shape, lengths: Sequence[int], output_tokens: int) -> dict[str, Any]:
    """The plan file of a shape, in tokens of the profiles."""
    sizes = [TOKENS_PER_TOKEN * length for length in lengths]
    far = {"name": "far", "instances": 1, "profile": FAST}
    near = {"name": "near", "instances": shape.num_pd_instances, "profile": SLOW}
    # As fast for the KVCache of the profiles as `LINK` for that of the model.
    link = {"from": "far", "to": "near", "rate": "100Gbit", "rtt": LINK["rtt"]}
    return {
        "traffic": {
            "lengths": {"histogram": [{"tokens": size, "weight": 1} for size in sizes]},
            "output_tokens": OUTPUT_TOKENS_PER_TOKEN * output_tokens,
        },
        "profiles": {name: {"file": str(profile_path(name))} for name in (FAST, SLOW)},
        "slo": {"tokens_per_s": DECODE_TOKENS_PER_S},
        "prefill_clusters": [far] if shape.num_prefill_clusters else [],
        "pd_clusters": [near],
        "links": [link] if shape.num_prefill_clusters else [],
        "instances": "whole",
    }


def region_of(shape: Shape, model: TinyModel, path: Path, plan: Mapping[str, Any]) -> RegionSpec:
    """The region of a shape as it was planned."""
    spec = demo_region(
        model,
        path,
        threshold_tokens=max(1, round(plan["threshold_tokens"] / TOKENS_PER_TOKEN)),
        link=LINK,
        scheduling=ALL_REMOTE if shape.num_pd_instances == 1 else SCHEDULING,
        local_prefill=shape.num_pd_instances > 1,
        prefix_caching=False,
    )
    if not shape.num_prefill_clusters:
        local = range(shape.num_pd_instances - 1)
        instances = [RegionInstance(name=f"p{number}", role="prefill") for number in local]
        spec = pd_cluster_alone(spec, [*instances, RegionInstance(name="d", role="decode")])
    return paced_region(spec)


async def backlog(
    url: str, model: str, lengths: Sequence[int], arguments: argparse.Namespace
) -> dict[str, Any]:
    """What a region completes for `CLIENTS` without a pause, once it is full. A client whose prompt
    is refused asks again when it may.
    """
    numbers = itertools.count()
    ends: list[tuple[float, int]] = []
    refused = 0
    begun_s = time.monotonic()

    async def client(session: aiohttp.ClientSession) -> None:
        nonlocal refused
        for number in numbers:
            length = lengths[number % len(lengths)]
            prompt = text(length, number)
            body = {"model": model, "prompt": prompt, "ignore_eos": True}
            body["max_tokens"] = arguments.output
            while True:
                async with session.post(f"{url}/v1/completions", json=body) as response:
                    answer = await response.read()
                if response.status != 429:
                    break
                refused += 1
                await asyncio.sleep(float(response.headers.get("Retry-After", 1)))
            if response.status != 200:
                raise RuntimeError(f"HTTP {response.status}: {answer[-200:]!r}")
            ends.append((time.monotonic() - begun_s, length))

    warm_s, seconds = arguments.warm, arguments.seconds
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout) as session, asyncio.TaskGroup() as group:
        tasks = [group.create_task(client(session)) for _ in range(CLIENTS)]
        await asyncio.sleep(warm_s + seconds)
        for task in tasks:
            task.cancel()
    completed = [length for end, length in ends if warm_s <= end < warm_s + seconds]
    return {
        "completed": len(completed),
        "measured_rps": round(len(completed) / seconds, 3),
        "refused": refused,
        "lengths": completed,
    }


async def measure(
    arguments: argparse.Namespace, model: TinyModel, path: Path, folder: Path
) -> dict[str, Any]:
    """Plan and fill the region of each shape in turn. What it completes is compared with the plan
    for just these prompts: short ones overtake, so a window has more or fewer of them than come.
    """
    lengths = sample(arguments)
    rows, verdicts = [], {}

    def solved(shape: Shape, prompts: Sequence[int]) -> dict[str, Any]:
        file = folder / "plan.yaml"
        file.write_text(yaml.safe_dump(plan_of(shape, prompts, arguments.output)))
        plan: dict[str, Any] = prfaas("plan", "solve", str(file))
        return plan

    for number, shape in enumerate(SHAPES):
        plan = solved(shape, lengths)
        (split,) = plan["splits"]
        if split["num_prefill"] != shape.num_pd_instances - 1:
            raise RuntimeError(
                f"{shape.name}: {split['num_prefill']} prefill instances are planned"
            )
        spec = region_of(shape, model, path, plan)
        print(f"{shape.name}: starting a region", file=sys.stderr, flush=True)
        async with RunningRegion(spec, folder / f"region-{number}") as region:
            watch = Watch()
            found = await backlog(region.gateway_url, model.name, lengths, arguments)
            verdicts[shape.name] = watch.verdict(region.directory.logs)
        by = "the profiles that pace the engines"
        plan = solved(shape, found.pop("lengths"))
        row = capacity_row(shape.name, by, plan, found["measured_rps"], GOAL)
        rows.append(row | found)
        print(rows[-1], file=sys.stderr, flush=True)
    settings = {"model": model.name, "lengths": lengths, "output_tokens": arguments.output}
    return {"settings": settings, "missing": {}, "rows": rows, "pace": verdicts}
