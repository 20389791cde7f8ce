"""A region on six hosts of this machine, and what happens to it: `make sites` (root).

    make sites                                  everything
    make sites SITES_ARGS="--only gateway"      acts whose name has this word

It prints a line for each act and a table, writes sites-results/sites.json, and exits 1 if a
request failed that had to be answered, or if any answer had a wrong token.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / name) for name in ("support", "bench", "sites")]

from hosts import Host, hosts  # noqa: E402
from load import Client, Phase  # noqa: E402
from play import Act, Sites, acts, play, write_file  # noqa: E402
from redis_host import Redis, redis_url  # noqa: E402
from region import JOINING, LINKS, OUTSIDE, PD, PREFILL, region_file  # noqa: E402
from region_hosts import RegionHost, make_keys  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from wan import Inside  # noqa: E402

from deploy.lab.demo.answers import Answer  # noqa: E402
from deploy.lab.demo.reference import decided_answers, plain_engine  # noqa: E402
from deploy.lab.demo.scenario import DemoRequest  # noqa: E402
from deploy.lab.demo.tiny_models import build_model  # noqa: E402
from deploy.lab.demo.tiny_specs import MODELS, TinyModel  # noqa: E402
from deploy.table_style import new_table, say  # noqa: E402
from transport.region_key import new_key  # noqa: E402

MODEL = "mimo-v2-tiny"
LENGTHS = (40, 300, 700, 1200, 2000, 3000)
RESULTS = Path("sites-results")
KEY = new_key()
"""What clients show to the gateways, and gateways to Redis."""


def prompts_for(acts: Sequence[Act], per_act: int) -> dict[str, list[DemoRequest]]:
    """Prompts of all lengths for each act, no text twice, every other one streamed."""
    made: dict[str, list[DemoRequest]] = {}
    for number, act in enumerate(acts, start=1):
        made[act.name] = [
            DemoRequest(
                name=f"{act.name} {index}",
                endpoint="/v1/completions",
                num_bytes=LENGTHS[index % len(LENGTHS)] + index,
                seed=1000 * number + index,
                stream=bool(index % 2),
                route="prefill_cluster",
                wave=0,
            )
            for index in range(per_act)
        ]
    return made


async def right_answers(
    model: TinyModel, path: Path, folder: Path, prompts: Mapping[str, Sequence[DemoRequest]]
) -> tuple[dict[str, list[DemoRequest]], dict[str, Answer]]:
    """The prompts that one plain engine is sure of, by act, and what it answers."""
    chosen: dict[str, list[DemoRequest]] = {}
    expected: dict[str, Answer] = {}
    async with plain_engine(model, path, folder) as url:
        for act, requests in prompts.items():
            chosen[act], answers = await decided_answers(
                url, model, requests, lambda request, answer: None
            )
            expected |= answers
    return chosen, expected


def region_hosts(
    folder: Path, machines: Mapping[str, Host], region: object
) -> dict[str, RegionHost]:
    """A folder with file and keys for each host of the region."""
    file = folder / "region.yaml"
    file.write_text(json.dumps(region))
    make_keys(folder / "made", file)
    parts = {}
    for node in (*PREFILL.values(), JOINING, *PD.values()):
        shutil.copytree(folder / "made" / node, folder / node / "keys")
        (folder / node / "clients").write_text(f"site {KEY}\n")
        (folder / node / "clients").chmod(0o600)
        parts[node] = RegionHost(node, folder / node, machines[node].argv)
    return parts


def table(phases: Sequence[Phase]) -> Table:
    """What became of the requests of each act."""
    numbers = ("asked", "failed", "wrong", "lost", "remote", "spilled", "TTFT p50 s", "p99 s", "s")
    made = new_table("while", "why prompts stayed", numbers=numbers)
    for phase in phases:
        ttfts = sorted(one.answer.ttft_s for one in phase.asked if not one.answer.error) or [0.0]
        counts = (phase.asked, phase.failed, phase.wrong, phase.lost)
        cells = [*(str(len(items)) for items in counts)]
        cells += [str(phase.num_remote), str(phase.num_spilled)]
        cells += [f"{statistics.median(ttfts):.2f}", f"{ttfts[int(0.99 * len(ttfts))]:.2f}"]
        made.add_row(phase.name, _stayed(phase), *cells, f"{phase.seconds:.0f}")
    return made


def _stayed(phase: Phase) -> str:
    return ", ".join(f"{reason} {num}" for reason, num in phase.stayed.most_common())


def keep(phases: Sequence[Phase]) -> Path:
    """Write every request with what became of it."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / "sites.json"
    kept = {
        "machine": {"cores": os.cpu_count(), "kernel": platform.release()},
        "links": {name: str(link) for name, link in LINKS.items()},
        "acts": [asdict(phase) for phase in phases],
    }
    path.write_text(json.dumps(kept, indent=1))
    return path


async def run(arguments: argparse.Namespace, folder: Path, console: Console) -> list[Phase]:
    """The whole play, or the acts that were asked for."""
    model = MODELS[MODEL]
    path = build_model(model, ROOT / ".demo" / "models")
    wanted = [act for act in acts() if arguments.only in act.name]
    say(console, f"asking one plain engine for {len(wanted) * arguments.prompts} right answers")
    prompts, expected = await right_answers(
        model, path, folder / "plain", prompts_for(wanted, arguments.prompts)
    )
    with hosts(LINKS) as machines, Inside(machines[OUTSIDE].namespace):
        addresses = {name: machine.address for name, machine in machines.items()}
        made = folder / "made"
        of = partial(region_file, model, path, addresses, redis_url(addresses[OUTSIDE], made, KEY))
        files = {"first": of(), "joined": of(joined=True)}
        parts = region_hosts(folder, machines, files["joined"])
        redis = Redis(machines[OUTSIDE], made, KEY)
        client = Client(
            {node: f"http://{addresses[node]}:8000" for node in PD.values()},
            *(model.name, tuple(PD), prompts, expected, KEY),
        )
        sites = Sites(machines, parts, client, redis, files)
        phases: list[Phase] = []
        try:
            redis.start()
            write_file(parts.values(), files["first"])
            started = [part for name, part in parts.items() if name != JOINING]
            say(console, f"starting {len(started)} hosts, an engine each")
            for part in started:
                part.begin()
            for part in started:
                await asyncio.to_thread(part.ready)
            for act in wanted:
                phases.append(await play(sites, act, arguments.per_s))
                phase = phases[-1]
                say(
                    console,
                    f"{phase.name}: {len(phase.asked)} asked, {len(phase.failed)} failed, "
                    f"{len(phase.wrong)} wrong, {phase.num_remote} remote, {phase.seconds:.0f} s; "
                    f"stayed: {_stayed(phase)}",
                )
        finally:
            # What a host runs is no child of ours: only `nsenter` would end with its number.
            for machine in machines.values():
                machine.power_off()
            for part in parts.values():
                part.close()
            redis.stop()
        return phases


def main() -> int:
    parser = argparse.ArgumentParser(prog="make sites", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="acts whose name has this word")
    parser.add_argument("--per-s", type=float, default=1.0, help="requests a second")
    parser.add_argument("--prompts", type=int, default=24, help="different prompts for each act")
    parser.add_argument("--keep", type=Path, help="keep the hosts' folders with their logs here")
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        print("hosts in network namespaces need root: run `sudo make sites`", file=sys.stderr)
        return 2
    console = Console()
    with contextlib.ExitStack() as stack:
        folder = arguments.keep
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sites-")))
        folder.mkdir(parents=True, exist_ok=True)
        phases = asyncio.run(run(arguments, folder.absolute(), console))
    console.print(table(phases))
    for phase in phases:
        for one in (*phase.failed, *phase.wrong):
            say(console, f"{phase.name}: at {one.gateway}: {one.answer.error or 'wrong tokens'}")
    say(console, f"every request: {keep(phases)}")
    return 1 if any(phase.failed or phase.wrong for phase in phases) else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # everything is stopped and removed by then
        sys.exit(130)
