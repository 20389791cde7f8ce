"""Time to first token of a prompt prefilled at one site and decoded at another: ours and NIXL's.

Run as root: python tests/bench/bench_e2e.py [--json FILE] [--gbps 0.2 1 5] [--rtt-ms 20]. Two
network namespaces are the sites; the link between them has the given rates and delay (see wan.py).
For each system in turn one prefill engine and one decode engine are started, both of the same tiny
model, and the same prompts are sent one at a time, each of them new to every cache. The client is
at the decode site. Ours goes through the gateway; NIXL's two legs are sent straight to the engines.
"alone" is the prefill engine answering by itself across the link: no hand-off at all.

With --gateway URL (and --engine URL, of its prefill engine) ours is measured alone, over a region
that runs already and the link that it has: no root, no engines of NIXL's, no choice of rates.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from e2e_systems import MODEL, SYSTEMS, ask_region, engine_access, stream, url_of
from running_region import served_model
from smoke import add_smoke
from wan import Wan, wan

from deploy.lab.demo.scenario import text
from deploy.lab.demo.tiny_models import build_model
from deploy.lab.demo.tiny_specs import MODELS
from prfaas.engines.access import EngineAccess

MAX_STARTS = 4

Ask = Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class Measured:
    """One prompt; `gbps` 0: on a prefill engine alone. `wire_bytes` and `prefill_s` are known of
    ours only. With an `error` there is nothing else.
    """

    system: str
    gbps: float
    num_tokens: int
    prompt: str
    ttft_s: float = 0.0
    text: str = ""
    wire_bytes: int = 0
    prefill_s: float = 0.0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Alone:
    """The engine that answers by itself, what it calls the model, and what it demands."""

    url: str
    model: str
    access: EngineAccess


class Link(Protocol):
    def set_rate(self, gbps: float) -> None: ...


class FixedLink:
    """The link of a region that runs: it keeps the rate that it has."""

    def set_rate(self, gbps: float) -> None:
        """Nothing happens."""


async def measure_running(
    arguments: argparse.Namespace, url: str, engine_url: str | None, model: str
) -> list[Measured]:
    """Ours over the region behind this gateway; alone on the engine, if one is named."""
    async with aiohttp.ClientSession() as session:
        todo = prompts(arguments.gbps, arguments.tokens, arguments.repeats, "prfaas", 0)
        if engine_url is None:
            todo = [item for item in todo if item.gbps]

        async def ask(prompt: str) -> tuple[float, str, int, float]:
            return await ask_region(session, url, model, prompt)

        if not await _warm_up("prfaas", ask, arguments.warm_ups):
            return []
        alone = Alone(engine_url or "", model, EngineAccess(arguments.engine_key))
        return await _measure_one(FixedLink(), "prfaas", todo, ask, alone)


async def measure(arguments: argparse.Namespace, link: Wan) -> list[Measured]:
    """Every system, rate and length; progress on stderr. A system that fails is started anew."""
    model = MODELS[MODEL]
    measured: list[Measured] = []
    with tempfile.TemporaryDirectory(prefix="prfaas-bench-") as folder:
        path = build_model(model, Path(folder))
        for round_number in range(arguments.rounds):
            for name in arguments.systems:
                todo = prompts(
                    arguments.gbps, arguments.tokens, arguments.repeats, name, round_number
                )
                starts = 0
                while todo and starts < MAX_STARTS:
                    starts += 1
                    _say(f"round {round_number + 1}: starting {name}")
                    link.set_rate(10.0)
                    logs = Path(arguments.logs or folder) / f"{name}-{round_number}-{starts}"
                    logs.mkdir(parents=True, exist_ok=True)
                    async with SYSTEMS[name](link, model, path, logs) as ask:
                        if await _warm_up(name, ask, arguments.warm_ups):
                            alone = Alone(url_of("prefill"), MODEL, engine_access(name, logs))
                            measured += await _measure_one(link, name, todo, ask, alone)
    return measured


async def _warm_up(name: str, ask: Ask, num: int) -> bool:
    """Prompts that are not counted; whether they were answered."""
    try:
        for attempt in range(num):
            await ask(text(2000, seed=90_000_000 + attempt))
    except (RuntimeError, aiohttp.ClientError) as error:
        _say(f"  {name}, warm-up failed: {error}")
        return False
    return True


def prompts(
    rates_gbps: Sequence[float], lengths: Sequence[int], repeats: int, name: str, round_number: int
) -> list[Measured]:
    """What to ask, in order: over the link at each rate, then the prefill engine alone."""
    asked = []
    for gbps in (*rates_gbps, 0.0):
        for num_tokens in lengths:
            for repeat in range(repeats):
                seed = num_tokens + 100_000 * repeat + 10_000_000 * round_number
                prompt = text(num_tokens, seed=seed + int(1e9 * gbps) % 999_983)
                asked.append(Measured(name, gbps, num_tokens, prompt))
    return asked


async def _measure_one(
    link: Link, name: str, todo: list[Measured], ask: Ask, alone: Alone
) -> list[Measured]:
    """Take from `todo` until it is empty or an answer fails."""
    measured: list[Measured] = []
    async with aiohttp.ClientSession() as session:
        while todo:
            item = todo.pop(0)
            link.set_rate(item.gbps or 10.0)
            try:
                if item.gbps:
                    ttft_s, words, nbytes, prefill_s = await ask(item.prompt)
                    item = replace(
                        item, ttft_s=ttft_s, text=words, wire_bytes=nbytes, prefill_s=prefill_s
                    )
                else:
                    prompt = f"alone {item.prompt}"[: item.num_tokens]
                    body = {"model": alone.model, "prompt": prompt}
                    headers = alone.access.headers
                    ttft_s, _, _ = await stream(session, alone.url, body, headers)
                    item = replace(item, ttft_s=ttft_s)
            except (RuntimeError, aiohttp.ClientError) as error:
                item = replace(item, error=str(error) or repr(error))
            measured.append(item)
            where = f"{item.gbps:g} Gbit/s" if item.gbps else "alone"
            took = f"failed: {item.error[:200]}" if item.error else f"{1e3 * item.ttft_s:.0f} ms"
            _say(f"  {name}, {where}, {item.num_tokens} tokens: {took}")
            if item.error:
                break
    return measured


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def summarise(measured: list[Measured]) -> dict[str, Any]:
    """Medians by rate and length, their ratio, and whether both gave the same text."""
    by_cell: dict[tuple[str, float, int], list[Measured]] = {}
    for item in measured:
        by_cell.setdefault((item.system, item.gbps, item.num_tokens), []).append(item)
    cells = []
    for gbps, num_tokens in sorted({(m.gbps, m.num_tokens) for m in measured if m.gbps}):
        cell: dict[str, Any] = {"gbps": gbps, "num_tokens": num_tokens}
        texts: dict[str, dict[str, str]] = {}
        for name in SYSTEMS:
            tried = by_cell.get((name, gbps, num_tokens), [])
            good = [item for item in tried if not item.error]
            alone = by_cell.get((name, 0.0, num_tokens), [])
            texts[name] = {item.prompt: item.text for item in good}
            cell |= {
                f"{name}_ttft_ms": _median_ms(good),
                f"alone_{name}_ms": _median_ms([item for item in alone if not item.error]),
                f"{name}_failed": len(tried) - len(good),
            }
        ours, theirs = cell["prfaas_ttft_ms"], cell["nixl_ttft_ms"]
        cell["ratio"] = round(ours / theirs, 3) if ours and theirs else None
        both = texts["prfaas"].keys() & texts["nixl"].keys()
        equal = sum(texts["prfaas"][prompt] == texts["nixl"][prompt] for prompt in both)
        cell["same_text"] = f"{equal}/{len(both)}"
        emitted = [
            8e-9 * item.wire_bytes / item.prefill_s
            for item in by_cell.get(("prfaas", gbps, num_tokens), [])
            if item.prefill_s
        ]
        cell["emitted_gbps"] = round(statistics.median(emitted), 3) if emitted else None
        cells.append(cell)
    ratios: dict[float, float] = {}
    for gbps in sorted({cell["gbps"] for cell in cells}):
        found = [cell["ratio"] for cell in cells if cell["gbps"] == gbps and cell["ratio"]]
        if found:
            ratios[gbps] = round(statistics.median(found), 3)
    return {"cells": cells, "median_ratio_by_gbps": ratios}


def _median_ms(items: list[Measured]) -> float | None:
    return round(1e3 * statistics.median(item.ttft_s for item in items), 1) if items else None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gbps", type=float, nargs="+", default=[0.2, 1.0, 5.0])
    parser.add_argument("--rtt-ms", type=float, default=20.0)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2000, 4000, 8000])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=1, help="every system once a round")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--warm-ups", type=int, default=3, help="prompts that are not counted")
    parser.add_argument("--logs", type=Path, help="keep the logs here")
    parser.add_argument("--gateway", metavar="URL", help="of a region that runs: only that one")
    parser.add_argument("--engine", metavar="URL", help="its prefill engine, asked alone as well")
    parser.add_argument("--engine-key", type=Path, metavar="FILE", help="the key of its engines")
    add_smoke(parser, gbps=[1.0], tokens=[600], repeats=1, warm_ups=1)
    parser.add_argument("--json", type=Path, help="write the result and the raw numbers here")
    arguments = parser.parse_args()
    missing: dict[str, str] = {}
    model = MODEL
    if arguments.gateway:
        missing["nixl"] = "left out: it needs namespaces and engines of its own"
        _say(f"nixl {missing['nixl']}")
        model = asyncio.run(served_model(arguments.gateway))
        measured = asyncio.run(
            measure_running(arguments, arguments.gateway, arguments.engine, model)
        )
    else:
        with wan(rtt_s=arguments.rtt_ms / 1e3) as link:
            measured = asyncio.run(measure(arguments, link))
    result = summarise(measured) | {
        "rtt_ms": arguments.rtt_ms,
        "missing": missing,
        "model": model,
        "cpus": os.cpu_count(),
        "raw": [{**asdict(item), "prompt": len(item.prompt)} for item in measured],
    }
    columns = (
        *("gbps", "num_tokens", "prfaas_ttft_ms", "nixl_ttft_ms", "ratio", "alone_prfaas_ms"),
        *("alone_nixl_ms", "emitted_gbps", "same_text", "prfaas_failed", "nixl_failed"),
    )
    print("  ".join(columns))
    for cell in result["cells"]:
        print("  ".join(f"{cell.get(column, '-')!s:>{len(column)}}" for column in columns))
    for gbps, ratio in result["median_ratio_by_gbps"].items():
        print(f"{gbps:g} Gbit/s: median ratio {ratio} (goal at 1 Gbit/s: at most 0.75)")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
