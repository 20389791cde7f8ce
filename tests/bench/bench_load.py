"""TTFT, time per output token and goodput under load: ours beside its peers on the same engines.

    python tests/bench/bench_load.py [--systems prfaas nixl] [--json FILE] [--add]
    python tests/bench/bench_load.py --smoke --gateway URL

Each system (see `load_systems.py`) is started in turn on the cores of this machine and driven by
`vllm bench serve`: first with many requests at a time, which gives its capacity, lets its
scheduler learn, and gives a profile of its engines under a full load (`prfaas plan
profile-live`), then at rates that are shares of the reference capacity. That is the capacity of
`prfaas`, so that every system gets the same rates. Measured in parts, `--add` keeps the rows of
earlier parts, and takes the reference from them. With --gateway a region that runs already is
driven alone. nixl needs root (see `e2e_systems.py`).

With --pace each system has the same two engines at the pace of GPUs: a fast one, which prefills,
and a slow one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from e2e_systems import CHUNK_TOKENS
from engine_cores import CannotRunError
from load_client import Client, Run, Traffic, client, rate_runs, settings
from load_systems import SYSTEMS, Serving
from own_command import prfaas
from paced import Watch, add_pace, is_void, parsed
from running_region import served_model
from smoke import add_smoke

from deploy.lab.demo.tiny_models import build_model
from deploy.lab.demo.tiny_specs import MODELS
from prfaas.engines.errors import EngineStartFailed

OURS: Final = "prfaas"
MODEL: Final = "mimo-v2-tiny"
SATURATION_SEED: Final = 0
NUM_RECORDS: Final = 1000
COLUMNS: Final = (
    *("system", "request_rate", "completed", "failed", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s"),
    *("tpot_p50_s", "goodput_rps", "remote_share"),
)
GOALS: Final = (("ttft_p50_s", 0.45), ("ttft_p99_s", 0.6), ("tpot_p50_s", 0.55))
"""At most this much of nixl's at the same rate."""

Kept = dict[str, Any]


async def records_of(url: str, run: Run) -> list[Mapping[str, Any]]:
    """The gateway's records of the requests of a run, as far as it still has them."""
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{url}/prfaas/requests?limit={NUM_RECORDS}") as response:
            every = (await response.json())["requests"]
    return [record for record in every if record["request_id"].startswith(f"{run.name}-")]


def routed(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The share of prompts that were prefilled in another cluster, the median TTFT of these and of
    the others, seconds, and the median and P90 error of the TTFT that was predicted for those that
    went as was predicted.
    """
    if not records:
        return {}
    times: dict[str, list[float]] = {"remote": [], "local": []}
    for record in records:
        route = "remote" if record["route"] == "prefill_cluster" else "local"
        times[route].append(record["ttft_s"] or 0.0)
    errors = sorted(
        abs(record["predicted_ttft_s"] / record["ttft_s"] - 1)
        for record in records
        if record["predicted_ttft_s"] and record["ttft_s"] and not record["num_retries"]
    )
    found: dict[str, Any] = {"remote_share": round(len(times["remote"]) / len(records), 3)}
    for route, seconds in times.items():
        if seconds:
            found[f"{route}_ttft_p50_s"] = round(statistics.median(seconds), 4)
    if errors:
        found["prediction_error_p50"] = round(statistics.median(errors), 3)
        found["prediction_error_p90"] = round(errors[int(0.9 * (len(errors) - 1))], 3)
    return found


async def drive(
    arguments: argparse.Namespace, kept: Kept, name: str, serving: Serving, by: Client
) -> None:
    """Measure a running system: its capacity, then every rate. Adds to `kept`."""
    traffic = traffic_of(arguments)
    saturated = Run("saturation", SATURATION_SEED, arguments.prompts, concurrency=arguments.many)
    found = await by.ask(serving.url, serving.model, traffic, saturated)
    if serving.has_records:
        found |= routed(await records_of(serving.url, saturated))
        found["profile"] = await asyncio.to_thread(loaded_profile, serving.url)
    kept["capacity"].append({"system": name, "concurrency": arguments.many, **found})
    _say(f"{name}: capacity {found.get('throughput_rps')} requests/s")
    for run in rate_runs(rates_of(arguments, name, kept), arguments.seconds, arguments.least):
        found = await by.ask(serving.url, serving.model, traffic, run)
        if serving.has_records:
            found |= routed(await records_of(serving.url, run))
        row = {"system": name, "request_rate": run.rate_rps, **found}
        kept["rows"].append(row)
        # What is measured stays, whatever happens to the rest of a long run.
        save(arguments.json, kept)
        _say(" ".join(f"{column}={row.get(column)}" for column in COLUMNS))


def loaded_profile(url: str) -> Mapping[str, Any] | None:
    """What `prfaas plan profile-live` makes of what the gateway at `url` has served; None where
    that is too little.
    """
    with tempfile.TemporaryDirectory() as folder:
        words = ["plan", "profile-live", "--gateway", url, "--out", f"{folder}/profile.yaml"]
        answer = prfaas(*words)
    if not answer["ok"]:
        _say(f"no profile of {url}: {answer['error']}")
        return None
    profile: Mapping[str, Any] = answer["profile"]
    return profile


def rates_of(arguments: argparse.Namespace, name: str, kept: Kept) -> list[float]:
    """Requests/s to drive `name` at."""
    if arguments.rates:
        return list(arguments.rates)
    capacities = {row["system"]: row["throughput_rps"] for row in kept["capacity"]}
    reference = capacities.get(OURS, capacities[name])
    return [round(share * reference, 2) for share in arguments.loads]


def traffic_of(arguments: argparse.Namespace) -> Traffic:
    least, most = arguments.tokens
    return Traffic(least, most, arguments.output, *arguments.slo_ms)


async def measure(arguments: argparse.Namespace, kept: Kept) -> None:
    """Start and drive every wanted system in turn; one that cannot be run here is missing."""
    model = MODELS[arguments.model]
    with tempfile.TemporaryDirectory(prefix="prfaas-load-") as temporary:
        folder = Path(temporary)
        path = build_model(model, folder)
        async with client(folder) as by:
            for name in arguments.systems:
                _forget(kept, name)
                logs = (arguments.logs or folder / "logs") / name
                logs.mkdir(parents=True, exist_ok=True)
                _say(f"{name}: starting")
                try:
                    async with SYSTEMS[name](model, path, logs, pace=arguments.pace) as serving:
                        watch = Watch()
                        await drive(arguments, kept, name, serving, by)
                        if arguments.pace:
                            kept.setdefault("pace", {})[name] = watch.verdict(logs)
                except (CannotRunError, EngineStartFailed) as error:
                    kept["missing"][name] = str(error)
                    _say(f"{name} left out: {error}")


async def measure_running(arguments: argparse.Namespace, kept: Kept) -> None:
    """The region behind --gateway alone."""
    model = await served_model(arguments.gateway)
    serving = Serving(arguments.gateway, model, has_records=True)
    with tempfile.TemporaryDirectory(prefix="prfaas-load-") as folder:
        async with client(Path(folder)) as by:
            await drive(arguments, kept, OURS, serving, by)
    kept["missing"] |= dict.fromkeys(SYSTEMS.keys() - {OURS}, "only the region at --gateway")


def _forget(kept: Kept, name: str) -> None:
    kept["missing"].pop(name, None)
    for key in ("rows", "capacity"):
        kept[key] = [row for row in kept[key] if row["system"] != name]


def begun(arguments: argparse.Namespace) -> Kept:
    """What is kept, with the rows of earlier parts with --add. ValueError if those had other
    settings.
    """
    wanted = {
        "model": arguments.model,
        "seconds": arguments.seconds,
        "chunk_tokens": CHUNK_TOKENS,
        **settings(traffic_of(arguments)),
    }
    fresh: Kept = {"settings": wanted, "missing": {}, "capacity": [], "rows": []}
    if not arguments.add or not arguments.json or not arguments.json.exists():
        return fresh
    earlier: Kept = json.loads(arguments.json.read_text())
    if earlier["settings"] != wanted:
        raise ValueError(f"{arguments.json} has other settings: {earlier['settings']}")
    return earlier


def verdicts(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What was wanted and found at each rate at which both ours and a peer were measured."""
    by_cell = {(row["system"], row["request_rate"]): row for row in rows}
    out = []
    for (system, rate), ours in by_cell.items():
        if system != OURS or not ours["completed"]:
            continue
        nixl = by_cell.get(("nixl", rate), {})
        for key, goal in GOALS:
            if nixl.get(key):
                found = round(ours[key] / nixl[key], 3)
                what = f"{key} over nixl's"
                out.append(_verdict(rate, what, found, found <= goal, f"at most {goal}"))
        pd = by_cell.get(("prfaas-pd", rate), {})
        if pd.get("goodput_rps") is not None:
            found, wanted = ours["goodput_rps"], pd["goodput_rps"]
            met = found >= wanted
            out.append(_verdict(rate, "goodput_rps", found, met, f"at least prfaas-pd's {wanted}"))
    return out


def _verdict(rate: float, what: str, found: float, met: bool, wanted: str) -> dict[str, Any]:
    return {"request_rate": rate, "what": what, "found": found, "wanted": wanted, "met": met}


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def save(file: Path | None, kept: Kept) -> None:
    """Write what is kept so far, with its goals."""
    kept["goals"] = verdicts(kept["rows"])
    if file is not None:
        file.write_text(json.dumps(kept, indent=1) + "\n")


def show(kept: Kept) -> None:
    """The table and the goals."""
    widths = {column: max(len(column), 13) for column in COLUMNS}
    print("  ".join(f"{column:>{width}}" for column, width in widths.items()))
    for row in kept["rows"]:
        cells = ((row.get(column, "-"), width) for column, width in widths.items())
        print("  ".join(f"{value!s:>{width}}" for value, width in cells))
    for row in kept["capacity"]:
        print(f"{row['system']}: {row.get('throughput_rps', 0)} requests/s at most")
    for one in kept["goals"]:
        verdict = "met   " if one["met"] else "MISSED"
        print(
            f"{verdict} {one['request_rate']:g}/s {one['what']}: {one['found']} ({one['wanted']})"
        )
    for name, why in kept["missing"].items():
        print(f"not measured: {name}: {why}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--model", choices=sorted(MODELS), default=MODEL)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.2, 0.4, 0.6, 0.8, 1.0, 1.2])
    parser.add_argument("--rates", type=float, nargs="+", help="requests/s, in place of --loads")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each rate")
    parser.add_argument("--tokens", type=int, nargs=2, default=(500, 2500), metavar=("MIN", "MAX"))
    parser.add_argument("--output", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--prompts", type=int, default=40, help="to find the capacity")
    parser.add_argument("--many", type=int, default=16, help="requests at a time, for the capacity")
    parser.add_argument("--least", type=int, default=10, help="fewest prompts of a rate")
    parser.add_argument(
        "--slo-ms", type=float, nargs=2, default=(1000.0, 50.0), metavar=("TTFT", "TPOT")
    )
    parser.add_argument("--gateway", metavar="URL", help="of a region that runs: only that one")
    parser.add_argument("--logs", type=Path, help="keep the logs here")
    parser.add_argument("--add", action="store_true", help="keep the rows that --json has")
    add_smoke(
        parser, seconds=1.0, loads=[0.5], tokens=(100, 300), output=8, prompts=4, many=2, least=3
    )
    add_pace(
        parser,
        loads=[0.3, 0.6, 0.9],
        tokens=(250, 2500),
        output=64,
        slo_ms=(5000.0, 150.0),
    )
    parser.add_argument("--json", type=Path, help="write the raw numbers here")
    arguments = parsed(parser)
    try:
        kept = begun(arguments)
    except ValueError as error:
        parser.error(f"--add: {error}")
    measuring = measure_running if arguments.gateway else measure
    asyncio.run(measuring(arguments, kept))
    save(arguments.json, kept)
    show(kept)
    if is_void(kept.get("pace", {})):
        sys.exit(1)


if __name__ == "__main__":
    main()
