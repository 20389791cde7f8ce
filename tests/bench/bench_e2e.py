"""Time to first token of a prompt prefilled at one site and decoded at another: ours and NIXL's.

Run as root: python tests/bench/bench_e2e.py [--json FILE] [--gbps 0.2 1 5] [--rtt-ms 20]. Two
network namespaces are the sites; the link between them has the given rates and delay (see wan.py).
For each system in turn one prefill engine and one decode engine are started, both of the same tiny
model, and the same prompts are sent one at a time, each of them new to every cache. The client is
at the decode site. Ours goes through the gateway; NIXL's two legs are sent straight to the engines.
"alone" is the prefill engine answering by itself across the link: no hand-off at all.

With --gateway URL (and --engine URL, of its prefill engine) ours is measured alone, over a region
that runs already and the link that it has: no root, no engines of NIXL's, no choice of rates.

NIXL's settings: kv_producer and kv_consumer, the connector's default threads, UCX over TCP on the
link's device alone, UCX's locks as mutexes, and NUMA nodes hidden from its engines. On loopback 9
hand-offs of 9 came through with the last two; with neither, one of the first five hung. On a CPU
the connector pins its worker's main thread to a node's last core, the same core for both engines
here, and UCX's default locks spin. Which of the two is needed was not told apart.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from smoke import add_smoke
from wan import DEVICE, FAR, NEAR, Wan, wan

from deploy.demo.scenario import text
from deploy.demo.tiny_models import build_model
from deploy.demo.tiny_specs import MODELS, TinyModel
from deploy.region.launcher import RunningRegion
from deploy.region.plan import PlannedProcess
from deploy.region.spec import RegionSpec
from kvmanager.engines.client import EngineHttp
from kvmanager.engines.command import EngineSpec
from kvmanager.engines.supervisor import Supervisor, engine_process

MODEL = "mimo-v2-bench"
CHUNK_TOKENS = 1024
OUTPUT_TOKENS = 4
START_TIMEOUT_S = 300.0
MAX_STARTS = 4
NIXL_PORTS = {"prefill": 25600, "decode": 25700}
ENGINE_PORTS = {"prefill": 25001, "decode": 25002}

HIDE_NUMA = 'mount -t tmpfs none /sys/devices/system/node && exec "$@"'
WITHOUT_NUMA = ("sh", "-c", HIDE_NUMA, "sh")
"""Runs a command that finds no NUMA nodes; `ip netns exec` gives it mounts of its own."""

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
    """The engine that answers by itself, and what it calls the model."""

    url: str
    model: str


def word_of(line: bytes, url: str) -> str:
    """The text in a line of a stream of completions, "" in any other; RuntimeError for an error."""
    if not line.startswith(b"data:") or b"[DONE]" in line:
        return ""
    event = json.loads(line[5:])
    if "choices" not in event:
        raise RuntimeError(f"{url}: {event}")
    return str(event["choices"][0]["text"])


async def stream(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any]
) -> tuple[float, str, str]:
    """Seconds to the first token, the whole text and the request id; raises on a bad answer."""
    started_s = time.perf_counter()
    first_s = 0.0
    words = []
    wanted = {**body, "max_tokens": OUTPUT_TOKENS, "temperature": 0, "stream": True}
    async with session.post(f"{url}/v1/completions", json=wanted) as response:
        if response.status != 200:
            raise RuntimeError(f"{url}: {response.status} {await response.text()}")
        async for line in response.content:
            if word := word_of(line, url):
                first_s = first_s or time.perf_counter() - started_s
                words.append(word)
        request_id = response.headers.get("x-request-id", "")
    if not first_s:
        raise RuntimeError(f"{url}: no token came")
    return first_s, "".join(words), request_id


def engine(role: str, model: TinyModel, path: Path, **changes: Any) -> EngineSpec:
    """One of NIXL's engines, with the settings that `region_spec` gives to ours."""
    return EngineSpec(
        instance=role,
        model=str(path),
        served_name=MODEL,
        host=FAR if role == "prefill" else NEAR,
        port=ENGINE_PORTS[role],
        dtype=model.dtype,
        max_model_len=model.max_model_len,
        max_num_batched_tokens=CHUNK_TOKENS,
        kv_space_gib=1,
        enforce_eager=True,
        **changes,
    )


@asynccontextmanager
async def nixl(link: Wan, model: TinyModel, path: Path, logs: Path) -> AsyncIterator[Any]:
    """Two engines with vLLM's NixlConnector, UCX over TCP."""
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        supervisors = []
        for role, kv_role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
            config = {
                "kv_connector": "NixlConnector",
                "kv_role": kv_role,
                "kv_buffer_device": "cpu",
            }
            spec = engine(
                role,
                model,
                path,
                args=(*model.engine_args, "--kv-transfer-config", json.dumps(config)),
                env={
                    "UCX_TLS": "tcp",
                    "UCX_NET_DEVICES": DEVICE,
                    "UCX_USE_MT_MUTEX": "y",
                    "UCX_KEEPALIVE_INTERVAL": "inf",  # starved cores are not lost peers
                    "VLLM_NIXL_SIDE_CHANNEL_HOST": FAR if role == "prefill" else NEAR,
                    "VLLM_NIXL_SIDE_CHANNEL_PORT": str(NIXL_PORTS[role]),
                },
            )
            process = engine_process(spec, logs)
            site = link.far if role == "prefill" else link.near
            argv = link.at_site(site, [*WITHOUT_NUMA, *process.argv])
            process = replace(process, argv=argv)
            supervisor = Supervisor(process, EngineHttp(spec.url, session).health)
            supervisor.start()
            stack.push_async_callback(supervisor.stop)
            supervisors.append(supervisor)
        for supervisor in supervisors:
            await supervisor.wait_healthy(START_TIMEOUT_S, None)

        async def ask(prompt: str) -> tuple[float, str, int, float]:
            started_s = time.perf_counter()
            body: dict[str, Any] = {"model": MODEL, "prompt": prompt}
            asked = {"do_remote_decode": True, "do_remote_prefill": False}
            first_leg = {**body, "max_tokens": 1, "temperature": 0, "kv_transfer_params": asked}
            async with session.post(
                f"{_url('prefill')}/v1/completions", json=first_leg
            ) as response:
                answer = await response.json()
            params = answer["kv_transfer_params"]
            prefill_s = time.perf_counter() - started_s
            second_leg = {**body, "kv_transfer_params": params}
            first_s, words, _ = await stream(session, _url("decode"), second_leg)
            return prefill_s + first_s, words, 0, prefill_s

        yield ask


async def ask_region(
    session: aiohttp.ClientSession, url: str, model: str, prompt: str
) -> tuple[float, str, int, float]:
    """TTFT, text, bytes on the wire and seconds of prefill of a prompt that a region offloads;
    RuntimeError if it does not.
    """
    first_s, words, request_id = await stream(session, url, {"model": model, "prompt": prompt})
    record = await _record(session, url, request_id)
    return first_s, words, record["transfer_bytes"], record["parts"]["prefill_s"]


@asynccontextmanager
async def prfaas(link: Wan, model: TinyModel, path: Path, logs: Path) -> AsyncIterator[Any]:
    """A region of a prefill cluster at the far site and a PD cluster and the gateway here."""

    def at_its_site(planned: PlannedProcess) -> PlannedProcess:
        if planned.name not in ("agent.far", "prefill"):
            return planned
        argv = link.at_site(link.far, planned.process.argv)
        return replace(planned, process=replace(planned.process, argv=argv))

    async with (
        aiohttp.ClientSession() as session,
        RunningRegion(region_spec(model, path), logs / "region", adapt=at_its_site) as region,
    ):

        async def ask(prompt: str) -> tuple[float, str, int, float]:
            return await ask_region(session, region.gateway_url, MODEL, prompt)

        yield ask


async def _record(
    session: aiohttp.ClientSession, gateway_url: str, request_id: str
) -> dict[str, Any]:
    """The request's record, once its prefill leg is in it; RuntimeError if it was not offloaded."""
    for _ in range(100):
        async with session.get(f"{gateway_url}/prfaas/requests/{request_id}") as response:
            answer = await response.json()
        for record in answer.get("requests", ()):
            if record["is_settled"] and record["parts"]["prefill_s"] is not None:
                return dict(record)
        await asyncio.sleep(0.02)
    raise RuntimeError(f"not prefilled at the other site: {answer}")


def region_spec(model: TinyModel, path: Path) -> RegionSpec:
    agent = {"arena_gib": 0.5}
    spec = {
        "name": "bench",
        # By the threshold alone: predictions would keep prompts here while engines are unknown.
        "gateway": {
            "port": 0,
            "threshold_tokens": 100,
            "scheduling": {"routing": {"policy": "threshold"}},
        },
        "models": [
            {
                "name": MODEL,
                "path": str(path),
                "dtype": model.dtype,
                "max_model_len": model.max_model_len,
                "max_num_batched_tokens": CHUNK_TOKENS,
                "kv_space_gib": 1,
                "prefix_caching": False,
                "enforce_eager": True,
                "args": model.engine_args,
            }
        ],
        "clusters": [
            {
                "name": "far",
                "kind": "prefill",
                "nodes": [
                    {
                        "name": "far",
                        "host": FAR,
                        "agent": agent,
                        "instances": [{"name": "prefill", "port": ENGINE_PORTS["prefill"]}],
                    }
                ],
            },
            {
                "name": "near",
                "kind": "pd",
                "nodes": [
                    {
                        "name": "near",
                        "host": NEAR,
                        "agent": agent,
                        "instances": [{"name": "decode", "port": ENGINE_PORTS["decode"]}],
                    }
                ],
            },
        ],
        "links": [{"from": "far", "to": "near"}],
        "security": {"trusted_network": True},
    }
    return RegionSpec.model_validate(spec)


def _url(role: str) -> str:
    return f"http://{FAR if role == 'prefill' else NEAR}:{ENGINE_PORTS[role]}"


SYSTEMS = {"prfaas": prfaas, "nixl": nixl}


class Link(Protocol):
    def set_rate(self, gbps: float) -> None: ...


class FixedLink:
    """The link of a region that runs: it keeps the rate that it has."""

    def set_rate(self, gbps: float) -> None:
        """Nothing happens."""


async def measure_running(
    arguments: argparse.Namespace, url: str, engine_url: str | None
) -> list[Measured]:
    """Ours over the region behind this gateway; alone on the engine, if one is named."""
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{url}/v1/models") as response:
            model = (await response.json())["data"][0]["id"]
        todo = prompts(arguments.gbps, arguments.tokens, arguments.repeats, "prfaas", 0)
        if engine_url is None:
            todo = [item for item in todo if item.gbps]

        async def ask(prompt: str) -> tuple[float, str, int, float]:
            return await ask_region(session, url, model, prompt)

        if not await _warm_up("prfaas", ask, arguments.warm_ups):
            return []
        alone = Alone(engine_url or "", model)
        return await _measure_one(FixedLink(), "prfaas", todo, ask, alone)


async def measure(arguments: argparse.Namespace, link: Wan) -> list[Measured]:
    """Every system, rate and length; progress on stderr. A system that fails is started anew."""
    model = MODELS[MODEL]
    alone = Alone(_url("prefill"), MODEL)
    measured: list[Measured] = []
    with tempfile.TemporaryDirectory(prefix="prfaas-bench-") as folder:
        path = build_model(model, Path(folder)).path
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
                    ttft_s, _, _ = await stream(session, alone.url, body)
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
    add_smoke(parser, gbps=[1.0], tokens=[600], repeats=1, warm_ups=1)
    parser.add_argument("--json", type=Path, help="write the result and the raw numbers here")
    arguments = parser.parse_args()
    missing: dict[str, str] = {}
    if arguments.gateway:
        missing["nixl"] = "left out: it needs namespaces and engines of its own"
        _say(f"nixl {missing['nixl']}")
        measured = asyncio.run(measure_running(arguments, arguments.gateway, arguments.engine))
    else:
        with wan(rtt_s=arguments.rtt_ms / 1e3) as link:
            measured = asyncio.run(measure(arguments, link))
    result = summarise(measured) | {
        "rtt_ms": arguments.rtt_ms,
        "missing": missing,
        "model": MODEL,
        "cpus": os.cpu_count(),
        "raw": [{**asdict(item), "prompt": len(item.prompt)} for item in measured],
    }
    columns = ("gbps", "num_tokens", "prfaas_ttft_ms", "nixl_ttft_ms", "ratio", "alone_prfaas_ms")
    columns += ("alone_nixl_ms", "emitted_gbps", "same_text", "prfaas_failed", "nixl_failed")
    print("  ".join(columns))
    for cell in result["cells"]:
        print("  ".join(f"{cell.get(column, '-')!s:>{len(column)}}" for column in columns))
    for gbps, ratio in result["median_ratio_by_gbps"].items():
        print(f"{gbps:g} Gbit/s: median ratio {ratio} (goal at 1 Gbit/s: at most 0.75)")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
