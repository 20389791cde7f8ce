"""How close the TTFT predicted at routing is to the measured one, on a region of real engines.

    python tests/bench/bench_prediction.py [--json FILE] [--minutes 3] [--model qwen3-next-tiny]
    python tests/bench/bench_prediction.py --smoke --gateway URL

A demo region (a prefill cluster, a PD cluster with a prefill and a decode instance, an emulated
link) starts with nothing learnt. Clients stream prompts of mixed lengths, all of them new to every
cache, at random moments, so that some wait for others; then the records say what was predicted when
each was routed. The first third of the requests is warm-up. Goal: median |predicted / measured - 1|
under 15%. With --gateway a region that runs already is asked, which may know its engines well.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from running_region import served_model
from smoke import add_smoke

from deploy.lab.demo.regions import demo_region
from deploy.lab.demo.scenario import text
from deploy.lab.demo.tiny_models import build_model
from deploy.lab.demo.tiny_specs import MODELS
from deploy.region.launch.launcher import RunningRegion

OUTPUT_TOKENS = 16
THRESHOLD_TOKENS = 1000
WARM_UP = 1 / 3
GOAL = 0.15
SCHEDULING = {"long_term": {"mode": "advise"}}


@dataclass(frozen=True, slots=True)
class Traffic:
    """`mean_gap_s` between requests is long: three engines share the cores of a small machine,
    which no profile knows.
    """

    seconds: float
    lengths: tuple[int, ...] = (200, 400, 800, 1500, 3000, 5000)
    mean_gap_s: float = 4.0


SMOKE = Traffic(seconds=4.0, lengths=(200, 400, 800), mean_gap_s=0.7)


async def _ask(
    session: aiohttp.ClientSession, url: str, model: str, request_id: str, lengths: Sequence[int]
) -> None:
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


async def drive(url: str, model: str, traffic: Traffic) -> list[dict[str, Any]]:
    """Ask a region; the records of all requests, in the order in which they were sent."""
    gaps = random.Random(1)
    ids: list[str] = []
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        tasks = []
        end_s = time.monotonic() + traffic.seconds
        while time.monotonic() < end_s:
            ids.append(f"prediction-{len(ids)}")
            asking = _ask(session, url, model, ids[-1], traffic.lengths)
            tasks.append(asyncio.create_task(asking))
            print(f"\r{len(ids)} requests", end="", flush=True)
            await asyncio.sleep(gaps.expovariate(1 / traffic.mean_gap_s))
        await asyncio.gather(*tasks)
        print()
        async with session.get(f"{url}/prfaas/requests?limit=1000") as response:
            records = {item["request_id"]: item for item in (await response.json())["requests"]}
    return [records[request_id] for request_id in ids]


def _sides(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """By target, those that went the way that was predicted."""
    rows = []
    targets = sorted({record["target"] for record in records})
    for target in ("all", *targets):
        errors = [
            abs(record["predicted_ttft_s"] / record["ttft_s"] - 1)
            for record in records
            if target in ("all", record["target"])
            and record["predicted_ttft_s"]
            and not record["num_retries"]
        ]
        if errors:
            rows.append(
                {
                    "target": target,
                    "requests": len(errors),
                    "median_error": statistics.median(errors),
                    "p90_error": sorted(errors)[int(0.9 * (len(errors) - 1))],
                }
            )
    return rows


async def _measure(model: str, traffic: Traffic) -> dict[str, Any]:
    """On a region of its own."""
    with tempfile.TemporaryDirectory() as directory:
        path = build_model(MODELS[model], Path(directory))
        spec = demo_region(
            MODELS[model], path, threshold_tokens=THRESHOLD_TOKENS, scheduling=SCHEDULING
        )
        print("starting a region", flush=True)
        async with RunningRegion(spec, Path(directory) / "region") as region:
            return result(model, await drive(region.gateway_url, model, traffic))


async def _measure_running(url: str, traffic: Traffic) -> dict[str, Any]:
    """On the region behind this gateway, with its first model."""
    model = await served_model(url)
    return result(model, await drive(url, model, traffic))


def result(model: str, records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What is kept of one model: the errors after the warm-up, and all records."""
    warm = records[round(WARM_UP * len(records)) :]
    return {"model": model, "rows": _sides(warm), "records": list(records)}


def _show(one: dict[str, Any]) -> None:
    print(f"{one['model']}\n{'target':>12} {'requests':>9} {'median':>8} {'p90':>8}")
    for row in one["rows"]:
        print(
            f"{row['target']:>12} {row['requests']:>9} {row['median_error']:>8.1%} "
            f"{row['p90_error']:>8.1%}"
        )
    if one["rows"]:
        found = one["rows"][0]["median_error"]
        print(f"goal: median under {GOAL:.0%}: {'met' if found < GOAL else 'MISSED'}\n")
    else:
        print("no TTFT was predicted\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write raw numbers here")
    parser.add_argument("--minutes", type=float, default=3.0, help="of traffic, per model")
    parser.add_argument("--model", choices=sorted(MODELS), action="append", help="default: both")
    parser.add_argument("--gateway", metavar="URL", help="of a region that runs: ask that one")
    add_smoke(parser)
    args = parser.parse_args()
    traffic = SMOKE if args.smoke else Traffic(seconds=60 * args.minutes)
    if args.gateway:
        results = [asyncio.run(_measure_running(args.gateway, traffic))]
    else:
        models = args.model or sorted(MODELS)
        results = [asyncio.run(_measure(model, traffic)) for model in models]
    for one in results:
        _show(one)
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
