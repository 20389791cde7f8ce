"""The long-term loop and admission on real engines: do they do what the simulator says they do?

    python tests/bench/bench_region.py [--json FILE] [--part shift|overload]

One PD cluster of small models on the CPU, 4 decode slots for each engine, nothing cached.

- shift: three engines and a loop with a period of 30 s. First long prompts with an answer of two
  tokens, then short ones with 100 tokens each. The loop should make a decode instance prefill, give
  it back after the shift, and no request may be lost.
- overload: one engine that prefills and one that decodes, asked for more than three times what they
  can do. With prediction-based admission as many requests should have their first token within
  4 s as the engines can decode in that time, and those refused should hear it at once.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from deploy.demo.regions import demo_region, pd_cluster_alone
from deploy.demo.scenario import text
from deploy.demo.tiny_models import build_model
from deploy.demo.tiny_specs import MODELS
from deploy.region.launcher import RunningRegion
from deploy.region.spec import RegionInstance, RegionSpec

MODEL = "mimo-v2-tiny"
DECODE_SLOTS = 4

PERIOD_S = 30
NUM_CLIENTS = 8
PHASES = ((3000, 2, 100.0), (300, 100, 160.0))
"""Mean prompt tokens, output tokens, seconds."""
SHIFT = {
    "admission": {"policy": "off"},
    "long_term": {"period_s": PERIOD_S, "min_requests": 10, "dwell_s": 0, "reverse_dwell_s": 0},
}

TTFT_SLO_S = 4.0
NUM_TO_LEARN = 8
RATE_RPS = 5.0
OVERLOAD_S = 30.0
OVERLOAD_TOKENS = (300, 1500)
OVERLOAD_OUTPUT_TOKENS = 150


@dataclass(frozen=True, slots=True)
class Answered:
    """How one request went. `ttft_s` is None for a refusal, `retry_after_s` for any other."""

    status: int
    is_whole: bool
    total_s: float
    ttft_s: float | None = None
    retry_after_s: int | None = None


class Clients:
    """Ask one region for prompts that nobody has asked for before."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.answered: list[Answered] = []
        self._url = url
        self._session = session
        self._seeds = itertools.count()

    async def ask(self, num_tokens: int, output_tokens: int) -> None:
        body = {
            "model": MODEL,
            "prompt": text(num_tokens, next(self._seeds)),
            "max_tokens": output_tokens,
            "ignore_eos": True,
            "stream": True,
        }
        started_s, ttft_s, answer = time.monotonic(), None, b""
        async with self._session.post(f"{self._url}/v1/completions", json=body) as response:
            async for part in response.content.iter_any():
                ttft_s = ttft_s or time.monotonic() - started_s
                answer += part
        total_s, is_ok = time.monotonic() - started_s, response.status == 200
        retry_after = response.headers.get("Retry-After")
        self.answered.append(
            Answered(
                response.status,
                is_ok and answer.rstrip().endswith(b"data: [DONE]"),
                total_s,
                ttft_s if is_ok else None,
                None if retry_after is None else int(retry_after),
            )
        )

    async def page(self, path: str) -> Any:
        async with self._session.get(self._url + path) as response:
            return await response.json()


def _spec(path: Path, roles: Mapping[str, Any], scheduling: dict[str, Any]) -> RegionSpec:
    spec = demo_region(MODELS[MODEL], path, prefix_caching=False, scheduling=scheduling)
    return pd_cluster_alone(
        spec,
        (
            RegionInstance(name=name, role=role, decode_slots=DECODE_SLOTS)
            for name, role in roles.items()
        ),
    )


async def _shift(clients: Clients) -> dict[str, Any]:
    """The phases one after the other; every decision of the loop."""
    started_s = time.monotonic()
    shape = PHASES[0][:2]

    async def keep_asking(lengths: random.Random) -> None:
        while True:
            mean_tokens, output_tokens = shape
            await clients.ask(int(mean_tokens * lengths.uniform(0.5, 1.5)), output_tokens)

    tasks = [asyncio.create_task(keep_asking(random.Random(n))) for n in range(NUM_CLIENTS)]
    changes: list[dict[str, Any]] = []
    try:
        for *phase, seconds in PHASES:
            shape = (phase[0], phase[1])
            print(
                f"{time.monotonic() - started_s:6.1f} s  prompts of {phase[0]} tokens", flush=True
            )
            end_s = time.monotonic() + seconds
            while time.monotonic() < end_s:
                await asyncio.sleep(1.0)
                roles = (await clients.page("/v1/pd_role"))["instances"]
                found = {item["instance"]: item["role"] for item in roles}
                if not changes or changes[-1]["roles"] != found:
                    changes.append({"at_s": time.monotonic() - started_s, "roles": found})
                    print(f"{changes[-1]['at_s']:6.1f} s  {found}", flush=True)
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    failed = [repr(end) for end in ended if not isinstance(end, asyncio.CancelledError)]
    plan = await clients.page("/prfaas/plan")
    return {"changes": changes, "decisions": plan["decisions"], "failed": failed}


async def _overload(clients: Clients) -> dict[str, Any]:
    """Poisson arrivals at `RATE_RPS`, after a few requests one by one to learn times from."""
    draws = random.Random(7)

    def shape() -> tuple[int, int]:
        return draws.randint(*OVERLOAD_TOKENS), OVERLOAD_OUTPUT_TOKENS

    for _ in range(NUM_TO_LEARN):
        await clients.ask(*shape())
    clients.answered.clear()
    tasks, end_s = [], time.monotonic() + OVERLOAD_S
    while time.monotonic() < end_s:
        tasks.append(asyncio.create_task(clients.ask(*shape())))
        await asyncio.sleep(draws.expovariate(RATE_RPS))
    started_s = time.monotonic() - OVERLOAD_S
    await asyncio.gather(*tasks)
    return {"took_s": time.monotonic() - started_s}


async def _run(
    part: Any, roles: Mapping[str, Any], scheduling: dict[str, Any]
) -> tuple[dict[str, Any], list[Answered]]:
    with tempfile.TemporaryDirectory() as directory:
        path = build_model(MODELS[MODEL], Path(directory)).path
        print("starting a region", flush=True)
        spec = _spec(path, roles, scheduling)
        timeout = aiohttp.ClientTimeout(total=600)
        async with (
            RunningRegion(spec, Path(directory) / "region") as region,
            aiohttp.ClientSession(timeout=timeout) as session,
        ):
            clients = Clients(region.gateway_url, session)
            found = await part(clients)
    return found | {"answered": [asdict(item) for item in clients.answered]}, clients.answered


def _measure_shift() -> dict[str, Any]:
    roles = {"p0": "prefill", "d0": "decode", "d1": "decode"}
    found, answered = asyncio.run(_run(_shift, roles, SHIFT))
    num_whole = sum(item.is_whole for item in answered)
    num_changes = len(found["changes"]) - 1
    print(
        f"shift: {num_changes} conversions by the loop's own decision; "
        f"{num_whole} of {len(answered)} answers whole, {len(found['failed'])} clients failed\n"
    )
    return found


def _measure_overload() -> dict[str, Any]:
    roles = {"p0": "prefill", "d0": "decode"}
    results = {}
    for policy in ("off", "predicted"):
        admission = {"policy": policy, "ttft_slo_s": TTFT_SLO_S}
        scheduling = {"admission": admission, "long_term": {"mode": "off"}}
        found, answered = asyncio.run(_run(_overload, roles, scheduling))
        ttfts = sorted(item.ttft_s for item in answered if item.ttft_s is not None)
        refusals = [item.total_s for item in answered if item.status == 429]
        in_time = sum(ttft_s <= TTFT_SLO_S for ttft_s in ttfts)
        capacity = len(ttfts) / found["took_s"] * OVERLOAD_S
        told = f", refused in {statistics.median(refusals) * 1e3:.0f} ms" if refusals else ""
        print(
            f"overload, policy {policy}: {len(answered)} sent, {len(ttfts)} answered, "
            f"{in_time} within {TTFT_SLO_S:g} s, median TTFT {statistics.median(ttfts):.2f} s, "
            f"P90 {ttfts[int(0.9 * (len(ttfts) - 1))]:.2f} s{told}; "
            f"{capacity:.0f} answers in {OVERLOAD_S:g} s at the rate they ended\n"
        )
        results[policy] = found
    return results


def main() -> int:
    parts = {"shift": _measure_shift, "overload": _measure_overload}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write raw numbers here")
    parser.add_argument("--part", choices=sorted(parts), action="append", help="default: both")
    args = parser.parse_args()
    results = {name: parts[name]() for name in args.part or parts}
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
