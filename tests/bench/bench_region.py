"""The long-term loop and admission on real engines: do they do what the simulator says they do?

    python tests/bench/bench_region.py [--json FILE] [--part shift|overload]
    python tests/bench/bench_region.py --smoke --gateway URL

One PD cluster of small models on the CPU, 4 decode slots for each engine, nothing cached.

- shift: three engines and a loop with a period of 30 s. First long prompts with an answer of two
  tokens, then short ones with 100 tokens each. The loop should make a decode instance prefill, give
  it back after the shift, and no request may be lost.
- overload: one engine that prefills and one that decodes, asked for more than three times what they
  can do. With prediction-based admission as many requests should have their first token within
  4 s as the engines can decode in that time, and those refused should hear it at once.

With --gateway both ask a region that runs already, a PD cluster whose own policies apply.
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from running_region import served_model
from smoke import add_smoke

from deploy.lab.demo.regions import demo_region, pd_cluster_alone
from deploy.lab.demo.scenario import text
from deploy.lab.demo.tiny_models import build_model
from deploy.lab.demo.tiny_specs import MODELS
from deploy.region.launch.launcher import RunningRegion
from deploy.region.spec.region import RegionInstance, RegionSpec

MODEL = "mimo-v2-tiny"
DECODE_SLOTS = 4

PERIOD_S = 30
SHIFT = {
    "admission": {"policy": "off"},
    "long_term": {"period_s": PERIOD_S, "min_requests": 10, "dwell_s": 0, "reverse_dwell_s": 0},
}

TTFT_SLO_S = 4.0
POLICIES = ("off", "predicted")
GIVEN_POLICY = "of the region"
"""Where a region runs already."""
PARTS = ("shift", "overload")


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much both parts ask for."""

    num_clients: int = 8
    phases: tuple[tuple[int, int, float], ...] = ((3000, 2, 100.0), (300, 100, 160.0))
    """Mean prompt tokens, output tokens, seconds."""
    num_to_learn: int = 8
    rate_rps: float = 5.0
    overload_s: float = 30.0
    overload_tokens: tuple[int, int] = (300, 1500)
    overload_output_tokens: int = 150


SMOKE = Sizes(
    num_clients=2,
    phases=((400, 2, 2.0), (100, 8, 2.0)),
    num_to_learn=1,
    rate_rps=3.0,
    overload_s=2.0,
    overload_tokens=(50, 300),
    overload_output_tokens=8,
)


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

    def __init__(self, url: str, session: aiohttp.ClientSession, model: str, sizes: Sizes) -> None:
        self.answered: list[Answered] = []
        self.sizes = sizes
        self._model = model
        self._url = url
        self._session = session
        self._seeds = itertools.count()

    async def ask(self, num_tokens: int, output_tokens: int) -> None:
        body = {
            "model": self._model,
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
    phases = clients.sizes.phases
    shape = phases[0][:2]

    async def keep_asking(lengths: random.Random) -> None:
        while True:
            mean_tokens, output_tokens = shape
            await clients.ask(int(mean_tokens * lengths.uniform(0.5, 1.5)), output_tokens)

    tasks = [
        asyncio.create_task(keep_asking(random.Random(n))) for n in range(clients.sizes.num_clients)
    ]
    changes: list[dict[str, Any]] = []
    try:
        for *phase, seconds in phases:
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
    """Poisson arrivals, after a few requests one by one to learn times from."""
    draws, sizes = random.Random(7), clients.sizes

    def shape() -> tuple[int, int]:
        return draws.randint(*sizes.overload_tokens), sizes.overload_output_tokens

    for _ in range(sizes.num_to_learn):
        await clients.ask(*shape())
    clients.answered.clear()
    tasks, end_s = [], time.monotonic() + sizes.overload_s
    while time.monotonic() < end_s:
        tasks.append(asyncio.create_task(clients.ask(*shape())))
        await asyncio.sleep(draws.expovariate(sizes.rate_rps))
    started_s = time.monotonic() - sizes.overload_s
    await asyncio.gather(*tasks)
    return {"took_s": time.monotonic() - started_s}


Found = tuple[dict[str, Any], list[Answered]]
Run = Callable[[Callable[[Clients], Any], Mapping[str, Any], dict[str, Any]], Found]
"""Runs a part on a region with these roles and this scheduling."""


async def _ask(part: Callable[[Clients], Any], url: str, model: str, sizes: Sizes) -> Found:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        clients = Clients(url, session, model, sizes)
        found = await part(clients)
    return found | {"answered": [asdict(item) for item in clients.answered]}, clients.answered


async def _on_its_own_region(
    part: Callable[[Clients], Any], spec_of: Callable[[Path], RegionSpec], sizes: Sizes
) -> Found:
    with tempfile.TemporaryDirectory() as directory:
        path = build_model(MODELS[MODEL], Path(directory))
        print("starting a region", flush=True)
        async with RunningRegion(spec_of(path), Path(directory) / "region") as region:
            return await _ask(part, region.gateway_url, MODEL, sizes)


async def _on_a_running_region(part: Callable[[Clients], Any], url: str, sizes: Sizes) -> Found:
    return await _ask(part, url, await served_model(url), sizes)


def _measure_shift(run: Run) -> dict[str, Any]:
    roles = {"p0": "prefill", "d0": "decode", "d1": "decode"}
    found, answered = run(_shift, roles, SHIFT)
    num_whole = sum(item.is_whole for item in answered)
    num_changes = len(found["changes"]) - 1
    print(
        f"shift: {num_changes} conversions by the loop's own decision; "
        f"{num_whole} of {len(answered)} answers whole, {len(found['failed'])} clients failed\n"
    )
    return found


def _measure_overload(run: Run, sizes: Sizes, policies: Sequence[str]) -> dict[str, Any]:
    roles = {"p0": "prefill", "d0": "decode"}
    results = {}
    for policy in policies:
        admission = {"policy": policy, "ttft_slo_s": TTFT_SLO_S}
        scheduling = {"admission": admission, "long_term": {"mode": "off"}}
        found, answered = run(_overload, roles, scheduling)
        ttfts = sorted(item.ttft_s for item in answered if item.ttft_s is not None)
        refusals = [item.total_s for item in answered if item.status == 429]
        in_time = sum(ttft_s <= TTFT_SLO_S for ttft_s in ttfts)
        capacity = len(ttfts) / found["took_s"] * sizes.overload_s
        if not ttfts:
            raise SystemExit(f"overload, policy {policy}: none of {len(answered)} was answered")
        told = f", refused in {statistics.median(refusals) * 1e3:.0f} ms" if refusals else ""
        print(
            f"overload, policy {policy}: {len(answered)} sent, {len(ttfts)} answered, "
            f"{in_time} within {TTFT_SLO_S:g} s, median TTFT {statistics.median(ttfts):.2f} s, "
            f"P90 {ttfts[int(0.9 * (len(ttfts) - 1))]:.2f} s{told}; "
            f"{capacity:.0f} answers in {sizes.overload_s:g} s at the rate they ended\n"
        )
        results[policy] = found
    return results


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write raw numbers here")
    parser.add_argument("--part", choices=PARTS, action="append", help="default: both")
    parser.add_argument("--gateway", metavar="URL", help="of a region that runs: ask that one")
    add_smoke(parser)
    args = parser.parse_args()
    sizes = SMOKE if args.smoke else Sizes()

    def run(
        part: Callable[[Clients], Any], roles: Mapping[str, Any], scheduling: dict[str, Any]
    ) -> Found:
        if args.gateway:
            return asyncio.run(_on_a_running_region(part, args.gateway, sizes))
        return asyncio.run(
            _on_its_own_region(part, lambda path: _spec(path, roles, scheduling), sizes)
        )

    parts = {
        "shift": lambda: _measure_shift(run),
        "overload": lambda: _measure_overload(
            run, sizes, [GIVEN_POLICY] if args.gateway else POLICIES
        ),
    }
    results = {name: parts[name]() for name in args.part or PARTS}
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
