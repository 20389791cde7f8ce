"""What the planner and the simulator promise, against the region that they describe.

    python tests/bench/bench_capacity.py [--load FILE] [--json FILE]
    python tests/bench/bench_capacity.py --pace [--json FILE]
    python tests/bench/bench_capacity.py --smoke --gateway URL --engine URL --engine-key FILE
        --recording DIR

`prfaas plan profile` measures one engine with the cores that it has in `bench_load.py`, while a
second one, as there, works on the other cores: they share the memory and, where a core has two
threads, its units.
`prfaas plan solve` then predicts the capacity of the shapes in `capacity_files.py`; what was
measured comes from the raw numbers of `bench_load.py` (--load), which must have the same settings.
They also have profiles of engines under a full load (`prfaas plan profile-live`), of which that of
one shape, `LOADED`, predicts the others. Goal: within 10%.

Conversations are held with a region whose flight recorder is on, once to let its gateway learn how
the engines serve, and once to measure. `prfaas simulate` plays what was recorded, with what was
learnt before. Goal: P50 and P90 TTFT within 15%.

With --pace see `capacity_paced.py`: shapes of paced engines under a backlog. Goal: within 5%. What
the simulator says of paced engines, `prfaas rehearse` compares.
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
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import capacity_paced
from bench_load import traffic_of
from capacity_files import (
    SHAPES,
    Turn,
    capacity_row,
    plan_file,
    recorded_arrivals,
    simulation_file,
    trace_of,
)
from e2e_systems import BY_THRESHOLD, ROLES, engine, running_engines, stream
from engine_cores import cores_of
from load_client import Traffic
from load_systems import HOST, two_clusters
from own_command import prfaas
from paced import add_pace, is_void, parsed
from running_region import served_model
from smoke import add_smoke

from deploy.lab.demo.scenario import text
from deploy.lab.demo.tiny_models import build_model
from deploy.lab.demo.tiny_specs import MODELS, TinyModel
from deploy.region.launch.devices import cores_here
from deploy.region.launch.launcher import RunningRegion
from kvmanager.agent.host_facts import CORE_VARIABLE
from scheduler.routing.service import ServiceModel

MODEL: Final = "mimo-v2-tiny"
BLOCK_TOKENS: Final = 32
TTFT_GOAL: Final = 0.15
TALK_OUTPUT_TOKENS: Final = 32
RECORD_LIMIT_S: Final = 10.0
BESIDE: Final = 4
"""Requests at a time at the engine beside the one that is profiled."""
SAMPLE: Final = 200
"""Lengths drawn for a plan's histogram."""
CONVERSED: Final = SHAPES[1]
"""The shape of the region that conversations are held with."""
LOADED: Final = SHAPES[1]
"""The shape whose engines under load predict all shapes: there one of them only prefills, and the
other one only decodes.
"""
BY_ENGINE: Final = "an engine beside a busy one"
BY_TRAFFIC: Final = f"engines of '{LOADED.name}' under a full load"


@dataclass(frozen=True, slots=True)
class Talks:
    """Conversations side by side: each turn sends all before it, its answer and `new_tokens`."""

    num_talks: int
    num_turns: int
    first_tokens: tuple[int, int]
    new_tokens: tuple[int, int]
    output_tokens: int
    mean_pause_s: float


def profiled(arguments: argparse.Namespace, url: str, key: str, model: Path, out: Path) -> None:
    """Write the profile of the engine at `url`; RuntimeError if it cannot be measured."""
    words = ["plan", "profile", "--url", url, "--out", str(out), "--config", str(model)]
    words += ["--lengths", arguments.lengths, "--batch-sizes", arguments.batch_sizes]
    words += ["--repeats", str(arguments.repeats), "--output-tokens", str(arguments.output)]
    if key:
        words += ["--api-key", key]
    answer = prfaas(*words)
    if not answer["ok"]:
        raise RuntimeError(f"no profile: {answer['error']}")


def compared_shapes(
    arguments: argparse.Namespace, by: str, profile: Path, measured: Mapping[str, float]
) -> list[dict[str, Any]]:
    """A row for each shape: the capacity that this profile, which is described `by`, predicts, and
    the one of `measured` if any.
    """
    traffic = traffic_of(arguments)
    lengths = sorted(traffic.lengths(SAMPLE, seed=0))
    file = profile.with_name("plan.yaml")
    rows = []
    for shape in SHAPES:
        plan = plan_file(shape, profile, lengths, traffic.output_tokens, 1e3 / traffic.slo_tpot_ms)
        file.write_text(yaml.safe_dump(plan))
        answer = prfaas("plan", "solve", str(file))
        rows.append(capacity_row(shape.name, by, answer, measured.get(shape.measured_as)))
    return rows


def capacities_of(load: Path | None) -> list[dict[str, Any]]:
    """The rows of saturated systems in the raw numbers of `bench_load.py`."""
    if load is None:
        return []
    found: list[dict[str, Any]] = json.loads(load.read_text())["capacity"]
    return found


def loaded_profile(capacities: Sequence[Mapping[str, Any]], file: Path) -> bool:
    """Write the profile of the engines of `LOADED` under a full load; False if there is none."""
    profiles = {row["system"]: row.get("profile") for row in capacities}
    if not profiles.get(LOADED.measured_as):
        return False
    file.write_text(yaml.safe_dump({"profile": profiles[LOADED.measured_as]}))
    return True


async def converse(url: str, model: str, talks: Talks, seed: int = 1) -> list[Turn]:
    """Hold all conversations at once; the turns in the order in which they were sent."""
    sent: list[tuple[float, Turn]] = []
    wanted_answer = {"max_tokens": talks.output_tokens, "ignore_eos": True}
    timeout = aiohttp.ClientTimeout(total=300)

    async def talk(number: int, session: aiohttp.ClientSession) -> None:
        draws = random.Random(1000 * seed + number)
        said = ""
        wanted = talks.first_tokens
        for _ in range(talks.num_turns):
            # A pause before each turn, so that conversations do not begin together either.
            await asyncio.sleep(draws.expovariate(1 / talks.mean_pause_s))
            prompt = said + text(draws.randint(*wanted), draws.getrandbits(32))
            # As token ids, which are the bytes: a gateway does not count a short text.
            body = {"model": model, "prompt": list(prompt.encode())}
            at_s = time.perf_counter()
            ttft_s, answer, _ = await stream(session, url, {**body, **wanted_answer})
            sent.append((at_s, Turn(number, len(prompt), ttft_s)))
            said, wanted = prompt + answer, talks.new_tokens

    async with aiohttp.ClientSession(timeout=timeout) as session, asyncio.TaskGroup() as group:
        for number in range(talks.num_talks):
            group.create_task(talk(number, session))
    return [turn for _, turn in sorted(sent, key=lambda one: one[0])]


def replayed(
    turns: Sequence[Turn],
    arrivals: Sequence[tuple[float, int]],
    talks: Talks,
    profile: Path,
    tokens_per_s: float,
    service: Mapping[str, float],
    render_s: float,
) -> list[dict[str, Any]]:
    """A row for P50 and P90: the TTFT that the simulator finds, and the measured one, seconds."""
    lines = trace_of(arrivals, turns, output_tokens=talks.output_tokens, block_tokens=BLOCK_TOKENS)
    trace, file = profile.with_name("trace.jsonl"), profile.with_name("simulation.yaml")
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    simulation = simulation_file(
        CONVERSED, profile, trace, BLOCK_TOKENS, tokens_per_s, service, render_s
    )
    file.write_text(yaml.safe_dump(simulation))
    (found,) = prfaas("simulate", str(file))["policies"].values()
    return [ttft_row(turns, percent, found[f"ttft_p{percent}_s"]) for percent in (50, 90)]


def ttft_row(turns: Sequence[Turn], percent: int, simulated_s: float) -> dict[str, Any]:
    """The simulated percentile of the TTFT against the measured one."""
    times = sorted(turn.ttft_s for turn in turns)
    measured_s = times[round(percent / 100 * (len(times) - 1))]
    error = simulated_s / measured_s - 1
    return {
        "part": "conversation",
        "name": f"TTFT P{percent}",
        "num_turns": len(turns),
        "predicted_s": round(simulated_s, 4),
        "measured_s": round(measured_s, 4),
        "error": round(error, 3),
        "met": abs(error) <= TTFT_GOAL,
    }


@asynccontextmanager
async def profiled_engine(
    model: TinyModel, path: Path, logs: Path, traffic: Traffic
) -> AsyncIterator[str]:
    """The URL of an engine with the cores that it has among two. The other one serves `traffic`,
    `BESIDE` requests at a time.
    """
    specs = [
        engine(role, model, path, host=HOST, args=model.engine_args, env={CORE_VARIABLE: cores})
        for role, cores in zip(ROLES, cores_of(len(ROLES), cores_here()), strict=True)
    ]
    async with (
        aiohttp.ClientSession() as session,
        running_engines(specs, logs, session, lambda _, argv: argv),
        asyncio.TaskGroup() as group,
    ):
        beside = [
            group.create_task(_keep_busy(session, specs[1].url, model.name, traffic, seed))
            for seed in range(BESIDE)
        ]
        yield specs[0].url
        for task in beside:
            task.cancel()


async def _keep_busy(
    session: aiohttp.ClientSession, url: str, model: str, traffic: Traffic, seed: int
) -> None:
    """Ask for one answer after the other until cancelled."""
    lengths = traffic.lengths(SAMPLE, seed)
    for number in itertools.count():
        prompt = text(lengths[number % SAMPLE], SAMPLE * seed + number)
        body = {"model": model, "prompt": prompt, "ignore_eos": True}
        await stream(session, url, {**body, "max_tokens": traffic.output_tokens})


@asynccontextmanager
async def recorded_region(
    model: TinyModel, path: Path, logs: Path, recording: Path
) -> AsyncIterator[str]:
    """The URL of a region with prefix caches, whose gateway records; all prompts are remote."""
    gateway = {**BY_THRESHOLD, "recorder": {"dir": str(recording)}}
    spec = two_clusters(model, path, gateway)
    models = tuple(item.model_copy(update={"prefix_caching": True}) for item in spec.models)
    spec = spec.model_copy(update={"models": models})
    async with RunningRegion(spec, logs / "region") as region:
        yield region.gateway_url


async def new_arrivals(recording: Path, num_before: int, num: int) -> list[tuple[float, int]]:
    """The `num` requests that were recorded after the first `num_before`; RuntimeError if they are
    not in the files within `RECORD_LIMIT_S`.
    """
    deadline_s = time.monotonic() + RECORD_LIMIT_S
    while len(found := recorded_arrivals(recording)) < num_before + num:
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"{len(found) - num_before} of {num} requests were recorded")
        await asyncio.sleep(0.2)
    return found[num_before:]


async def conversations(
    url: str, recording: Path, talks: Talks
) -> tuple[list[Turn], list[tuple[float, int]]]:
    """Hold them; the turns, and the arrivals that the gateway at `url` recorded meanwhile."""
    num_before = len(recorded_arrivals(recording))
    turns = await converse(url, await served_model(url), talks)
    return turns, await new_arrivals(recording, num_before, len(turns))


async def learnt_of(url: str) -> tuple[Mapping[str, float], float]:
    """What the gateway at `url` has learnt of the place with most prefills (`ServiceModel`), and
    the median time that it took to render a prompt, seconds.
    """
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{url}/prfaas/scheduling") as response:
            models = (await response.json())["models"]
        async with session.get(f"{url}/prfaas/requests") as response:
            records = (await response.json())["requests"]
    # A record leaves out the parts that its request did not have.
    render_s = statistics.median(record["parts"].get("render_s") or 0.0 for record in records)
    places = [place for model in models for place in model["places"]]
    numbers = max(places, key=lambda place: place["num_seen"])["service"]
    return dict(zip(ServiceModel._fields, numbers, strict=True)), render_s


async def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Profile an engine, compare the shapes, hold conversations and play them."""
    talks = Talks(
        *(arguments.talks, arguments.turns, arguments.first, arguments.new),
        output_tokens=TALK_OUTPUT_TOKENS,
        mean_pause_s=arguments.pause,
    )
    model = MODELS[arguments.model]
    path = build_model(model, folder)
    if arguments.pace:
        return await capacity_paced.measure(arguments, model, path, folder)
    profile, recording = folder / "profile.yaml", arguments.recording or folder / "recording"
    if arguments.gateway:
        key = arguments.engine_key.read_text().strip() if arguments.engine_key else ""
        await asyncio.to_thread(profiled, arguments, arguments.engine, key, path, profile)
        turns, arrivals = await conversations(arguments.gateway, recording, talks)
        service, render_s = await learnt_of(arguments.gateway)
    else:
        # One after the other, so that no more than two engines share the cores.
        async with profiled_engine(model, path, folder, traffic_of(arguments)) as url:
            _say(f"profiling {url}")
            await asyncio.to_thread(profiled, arguments, url, "", path, profile)
        async with recorded_region(model, path, folder, recording) as url:
            _say(f"holding conversations with {url}")
            await converse(url, await served_model(url), talks, seed=2)
            service, render_s = await learnt_of(url)
            turns, arrivals = await conversations(url, recording, talks)
    capacities = capacities_of(arguments.load)
    measured = {row["system"]: row["throughput_rps"] for row in capacities}
    rows = compared_shapes(arguments, BY_ENGINE, profile, measured)
    if loaded_profile(capacities, loaded := folder / "loaded.yaml"):
        rows += compared_shapes(arguments, BY_TRAFFIC, loaded, measured)
    rows += replayed(turns, arrivals, talks, profile, 1e3 / arguments.slo_ms[1], service, render_s)
    return {
        "settings": {"model": arguments.model, "talks": asdict(talks)},
        "missing": {row["name"]: why_missing(row) for row in rows if "met" not in row},
        "profile": yaml.safe_load(profile.read_text())["profile"],
        "service": service,
        "render_s": render_s,
        "rows": rows,
        "turns": [asdict(turn) for turn in turns],
    }


def why_missing(row: Mapping[str, Any]) -> str:
    """Why a shape was planned and not measured."""
    shape = next(shape for shape in SHAPES if shape.name == row["name"])
    num_cores = len(cores_here())
    if shape.num_engines > num_cores:
        return f"{num_cores} cores cannot give {shape.num_engines} engines one each"
    return f"{shape.measured_as or 'a system of this shape'} is not in --load"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def show(kept: Mapping[str, Any]) -> None:
    """The rows, and what was missed."""
    for row in kept["rows"]:
        unit = "rps" if row["part"] == "capacity" else "s"
        predicted, measured = row[f"predicted_{unit}"], row[f"measured_{unit}"]
        verdict = {True: "met", False: "MISSED"}.get(row.get("met"), "not measured")
        error = f"{row['error']:+.1%}" if "error" in row else "-"
        numbers = f"predicted {predicted:>7}  measured {measured!s:>7}  {error:>7}"
        by = f"  by {row['by']}" if "by" in row else ""
        print(f"{row['name']:>38}  {numbers}  {verdict}{by}")
    for name, why in kept["missing"].items():
        print(f"not measured: {name}: {why}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=sorted(MODELS), default=MODEL)
    parser.add_argument("--load", type=Path, help="raw numbers of bench_load.py")
    parser.add_argument("--tokens", type=int, nargs=2, default=(500, 2500), metavar=("MIN", "MAX"))
    parser.add_argument("--output", type=int, default=64, help="tokens of each answer")
    parser.add_argument(
        "--slo-ms", type=float, nargs=2, default=(1000.0, 50.0), metavar=("TTFT", "TPOT")
    )
    parser.add_argument("--lengths", default="128,512,1Ki,2Ki,3Ki", help="prompts to profile")
    parser.add_argument("--batch-sizes", default="1,4,8,16", help="streams to profile")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--talks", type=int, default=8, help="conversations at a time")
    parser.add_argument("--turns", type=int, default=6, help="of each conversation")
    parser.add_argument("--first", type=int, nargs=2, default=(500, 1000), help="tokens")
    parser.add_argument("--new", type=int, nargs=2, default=(200, 400), help="tokens of a turn")
    parser.add_argument("--pause", type=float, default=10.0, help="mean seconds before a turn")
    parser.add_argument("--seconds", type=float, default=110.0, help="of a backlog, with --pace")
    parser.add_argument("--warm", type=float, default=45.0, help="seconds before those")
    parser.add_argument("--gateway", metavar="URL", help="of a region that runs")
    parser.add_argument("--engine", metavar="URL", help="one of its engines, to profile")
    parser.add_argument("--engine-key", type=Path, metavar="FILE", help="the key of its engines")
    parser.add_argument("--recording", type=Path, metavar="DIR", help="of the gateway's recorder")
    smallest = {"talks": 2, "turns": 2, "first": (300, 400), "new": (50, 80), "pause": 0.2}
    profiling = {"lengths": "128,256", "batch_sizes": "1", "repeats": 1, "output": 32}
    # Any speed will do: a busy machine decodes slowly.
    add_smoke(parser, **smallest, **profiling, slo_ms=(1000.0, 5000.0))
    add_pace(parser, tokens=(250, 2500), output=128)
    parser.add_argument("--json", type=Path, help="write the raw numbers here")
    arguments = parsed(parser)
    if arguments.gateway and not (arguments.engine and arguments.recording):
        parser.error("--gateway needs --engine and --recording")
    with tempfile.TemporaryDirectory(prefix="prfaas-capacity-") as folder:
        kept = asyncio.run(measure(arguments, Path(folder)))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(kept, indent=1) + "\n")
    show(kept)
    if is_void(kept.get("pace", {})):
        sys.exit(1)


if __name__ == "__main__":
    main()
