"""Time to first token of a prompt prefilled at one site and decoded at another: ours and NIXL's.

Run as root: python tests/bench/bench_e2e.py [--json FILE] [--gbps 0.2 1 5] [--rtt-ms 20]. Two
network namespaces are the sites; the link between them has the given rates and delay (see wan.py).
For each system in turn one prefill engine and one decode engine are started, both of the same tiny
model and each on cores of its own, and the same prompts are sent one at a time, each of them new to
every cache. The client is at the decode site. Ours goes through the gateway; NIXL's two legs are
sent straight to the engines.

Each prompt is followed by another one of its length that the prefill engine answers by itself,
asked at its own site: no link and no hand-off. The ratio of the two, less one round trip, is what a
system adds. Goal: at most 1.15 for ours at 1 Gbit/s.

With --pace engines take the time of GPUs, and no core is set apart. A step of the decode engine
stands for 4 and takes 0.1 s then, one of which is in each TTFT of a system and in no own one.

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
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from e2e_systems import (
    MODEL,
    SYSTEMS,
    Answer,
    ask_engine,
    ask_region,
    engine_access,
    url_of,
)
from paced import Watch, add_pace, is_void, parsed
from running_region import served_model
from smoke import add_smoke
from wan import Wan, wan

from deploy.lab.demo.scenario import text
from deploy.lab.demo.tiny_models import build_model
from deploy.lab.demo.tiny_specs import MODELS
from prfaas.engines.access import EngineAccess

MAX_STARTS = 4
OWN_RATIO_GOAL = 1.15

Ask = Callable[[str], Awaitable[Answer]]
AskOwn = Callable[[str], Awaitable[float]]
"""The prefill engine's own TTFT of a prompt."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One prompt, and `own_s`: the prefill engine's own TTFT of the next one, 0 if not asked.
    `wire_bytes` and all parts but the prefill are known of ours only. With an `error` there is
    nothing else.
    """

    system: str
    gbps: float
    num_tokens: int
    prompt: str
    ttft_s: float = 0.0
    own_s: float = 0.0
    text: str = ""
    wire_bytes: int = 0
    parts: Mapping[str, float] = field(default_factory=dict)
    error: str = ""


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
        headers = EngineAccess(arguments.engine_key).headers

        async def ask(prompt: str) -> Answer:
            return await ask_region(session, url, model, prompt)

        async def ask_own(prompt: str) -> float:
            return await ask_engine(engine_url, model, prompt, headers) if engine_url else 0.0

        if not await _warm_up("prfaas", ask, ask_own, arguments.warm_ups):
            return []
        return await _measure_one(FixedLink(), "prfaas", todo, ask, ask_own)


async def measure(
    arguments: argparse.Namespace, link: Wan
) -> tuple[list[Measured], dict[str, dict[str, Any]]]:
    """Every system, rate and length, and how paced engines kept their pace, by start; progress on
    stderr. A system that fails is started anew.
    """
    model = MODELS[MODEL]
    measured: list[Measured] = []
    verdicts = {}
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
                    async with SYSTEMS[name](link, model, path, logs, pace=arguments.pace) as ask:
                        headers = engine_access(name, logs).headers
                        url = url_of("prefill")
                        ask_own = partial(ask_engine, url, MODEL, headers=headers, site=link.far)
                        if await _warm_up(name, ask, ask_own, arguments.warm_ups):
                            watch = Watch()
                            measured += await _measure_one(link, name, todo, ask, ask_own)
                            if arguments.pace:
                                verdicts[logs.name] = watch.verdict(logs)
    return measured, verdicts


async def _warm_up(name: str, ask: Ask, ask_own: AskOwn, num: int) -> bool:
    """Prompts that are not counted; whether they were answered."""
    try:
        for attempt in range(num):
            await ask(text(2000, seed=90_000_000 + attempt))
            await ask_own(text(2000, seed=80_000_000 + attempt))
    except (RuntimeError, aiohttp.ClientError) as error:
        _say(f"  {name}, warm-up failed: {error}")
        return False
    return True


def prompts(
    rates_gbps: Sequence[float], lengths: Sequence[int], repeats: int, name: str, round_number: int
) -> list[Measured]:
    """What to ask, in order. Lengths take turns, so that what changes with time changes all."""
    asked = []
    for gbps in rates_gbps:
        for repeat in range(repeats):
            for num_tokens in lengths:
                seed = num_tokens + 100_000 * repeat + 10_000_000 * round_number
                prompt = text(num_tokens, seed=seed + int(1e9 * gbps) % 999_983)
                asked.append(Measured(name, gbps, num_tokens, prompt))
    return asked


async def _measure_one(
    link: Link, name: str, todo: list[Measured], ask: Ask, ask_own: AskOwn
) -> list[Measured]:
    """Take from `todo` until it is empty or an answer fails."""
    measured: list[Measured] = []
    while todo:
        item = todo.pop(0)
        link.set_rate(item.gbps)
        try:
            answer = await ask(item.prompt)
            own_s = await ask_own(f"alone {item.prompt}"[: item.num_tokens])
            item = replace(
                item,
                ttft_s=answer.ttft_s,
                own_s=own_s,
                text=answer.text,
                wire_bytes=answer.wire_bytes,
                parts=answer.parts,
            )
        except (RuntimeError, aiohttp.ClientError) as error:
            item = replace(item, error=str(error) or repr(error))
        measured.append(item)
        took = f"{1e3 * item.ttft_s:.0f} ms, own {1e3 * item.own_s:.0f} ms"
        told = f"failed: {item.error[:200]}" if item.error else took
        _say(f"  {name}, {item.gbps:g} Gbit/s, {item.num_tokens} tokens: {told}")
        if item.error:
            break
    return measured


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def summarise(measured: list[Measured], rtt_s: float) -> dict[str, Any]:
    """Medians by rate and length, their ratios, and whether both gave the same text."""
    cells = []
    for gbps, num_tokens in sorted({(m.gbps, m.num_tokens) for m in measured}):
        here = [m for m in measured if (m.gbps, m.num_tokens) == (gbps, num_tokens)]
        cell: dict[str, Any] = {"gbps": gbps, "num_tokens": num_tokens}
        texts: dict[str, dict[str, str]] = {}
        for name in SYSTEMS:
            tried = [item for item in here if item.system == name]
            good = [item for item in tried if not item.error]
            pairs = [item for item in good if item.own_s]
            texts[name] = {item.prompt: item.text for item in good}
            cell |= {
                f"{name}_ttft_ms": _median([1e3 * item.ttft_s for item in good], 1),
                f"own_{name}_ms": _median([1e3 * item.own_s for item in pairs], 1),
                f"own_{name}_ratio": _median([own_ratio(item, rtt_s) for item in pairs], 3),
                f"{name}_failed": len(tried) - len(good),
            }
        ours, theirs = cell["prfaas_ttft_ms"], cell["nixl_ttft_ms"]
        cell["ratio"] = round(ours / theirs, 3) if ours and theirs else None
        both = texts["prfaas"].keys() & texts["nixl"].keys()
        equal = sum(texts["prfaas"][prompt] == texts["nixl"][prompt] for prompt in both)
        cell["same_text"] = f"{equal}/{len(both)}"
        emitted = [
            8e-9 * item.wire_bytes / item.parts["prefill_s"]
            for item in here
            if item.system == "prfaas" and item.parts.get("prefill_s")
        ]
        cell["emitted_gbps"] = _median(emitted, 3)
        cells.append(cell)
    ratios: dict[float, float] = {}
    for gbps in sorted({cell["gbps"] for cell in cells}):
        found = [cell["ratio"] for cell in cells if cell["gbps"] == gbps and cell["ratio"]]
        if found:
            ratios[gbps] = round(statistics.median(found), 3)
    return {"cells": cells, "median_ratio_by_gbps": ratios}


def own_ratio(item: Measured, rtt_s: float) -> float:
    """The TTFT, less the round trip that the link costs, over the prefill engine's own."""
    return (item.ttft_s - rtt_s) / item.own_s


def _median(values: list[float], digits: int) -> float | None:
    return round(statistics.median(values), digits) if values else None


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
    parser.add_argument(
        "--engine", metavar="URL", help="its prefill engine, asked by itself as well"
    )
    parser.add_argument("--engine-key", type=Path, metavar="FILE", help="the key of its engines")
    add_smoke(parser, gbps=[1.0], tokens=[600], repeats=1, warm_ups=1)
    add_pace(parser, gbps=[1.0], tokens=[2000, 4000, 6000])
    parser.add_argument("--json", type=Path, help="write the result and the raw numbers here")
    arguments = parsed(parser)
    missing: dict[str, str] = {}
    verdicts: dict[str, dict[str, Any]] = {}
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
            measured, verdicts = asyncio.run(measure(arguments, link))
    # Nobody knows here how long the link of a region is that runs already.
    rtt_ms = 0.0 if arguments.gateway else arguments.rtt_ms
    result = summarise(measured, rtt_ms / 1e3) | {
        "rtt_ms": rtt_ms,
        "own_ratio_goal": OWN_RATIO_GOAL,
        "missing": missing,
        "model": model,
        "cpus": os.cpu_count(),
        "raw": [{**asdict(item), "prompt": len(item.prompt)} for item in measured],
        **({"pace": verdicts} if arguments.pace else {}),
    }
    columns = (
        *("gbps", "num_tokens", "prfaas_ttft_ms", "own_prfaas_ms", "own_prfaas_ratio"),
        *("nixl_ttft_ms", "own_nixl_ms", "own_nixl_ratio", "ratio", "emitted_gbps", "same_text"),
        *("prfaas_failed", "nixl_failed"),
    )
    print("  ".join(columns))
    for cell in result["cells"]:
        print("  ".join(f"{cell.get(column, '-')!s:>{len(column)}}" for column in columns))
    for gbps, ratio in result["median_ratio_by_gbps"].items():
        print(f"{gbps:g} Gbit/s: median ratio {ratio} (goal at 1 Gbit/s: at most 0.75)")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    if is_void(verdicts):
        sys.exit(1)


if __name__ == "__main__":
    main()
