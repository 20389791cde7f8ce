"""Time to first token of prompts with images, with and without an encode stage of its own.

    python tests/bench/bench_images.py [--json FILE] [--images 8] [--side 256] [--repeats 10]
    python tests/bench/bench_images.py --smoke --gateway URL

A prefill cluster, a PD cluster and an emulated link of 1 Gbit/s and 20 ms, engines on the CPU with
a core each: the decode engine shares the encoder's, and has next to nothing to do. The vision tower
takes longer than the language model. Two arrangements:

- EP+D: the prefill instance encodes the images of its prompts itself.
- E+P+D: an encode instance beside it does.

Three cases of each, in turns: `lone`, a prompt with new images; `together`, several such prompts at
once, so that the images of one are encoded while another is prefilled; `again`, the images of the
lone prompt behind another text, so that no prefix is cached and every embedding may be. `text` is a
prompt of as many tokens without images.

Bytes of a lone prompt are printed for all that could cross the link: its pixels, the embeddings
that the encoder makes of them, and the KVCache that did cross. With --gateway a region that runs
already is asked, whatever its arrangement.
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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from engine_region import agent_status, settled_record_at
from running_region import served_model
from smoke import add_smoke
from tiny_vision import BENCH_VISION, IMAGE_ARGS, PIXELS_PER_TOKEN, image_url, vision_environment

from deploy.lab.demo.regions import demo_region
from deploy.lab.demo.scenario import text
from deploy.lab.demo.tiny_models import build_model
from deploy.region.launch.launcher import RunningRegion
from deploy.region.spec.region import RegionInstance, RegionSpec
from kvmanager.agent.host_facts import CORE_VARIABLE

MODEL: Final = replace(BENCH_VISION, engine_args=(*BENCH_VISION.engine_args, *IMAGE_ARGS))
ARRANGEMENTS: Final = ("EP+D", "E+P+D")
OF_THE_REGION: Final = "of the region"
CASES: Final = ("lone", "again", "together", "text")
TEXT_TOKENS: Final = 300
OUTPUT_TOKENS: Final = 4
PREFILL_NODE: Final = "a1"


@dataclass(frozen=True, slots=True)
class Measured:
    """One prompt. `parts` are those of its TTFT as the gateway recorded them, in seconds."""

    arrangement: str
    case: str
    ttft_s: float
    route: str
    body_bytes: int
    transfer_bytes: int
    parts: Mapping[str, float] = field(default_factory=dict)


class Client:
    """Asks one gateway about images, which are told by their seeds."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, model: str, arrangement: str, side: int
    ) -> None:
        self._session, self._url, self._model = session, url, model
        self._arrangement, self._side = arrangement, side
        self.measured: list[Measured] = []

    async def ask(
        self, case: str, seeds: Sequence[int], text_seed: int, num_tokens: int = TEXT_TOKENS
    ) -> None:
        """A chat of a text of `num_tokens`, which no other prompt has, and one image a seed."""
        content: list[dict[str, Any]] = [
            {"type": "image_url", "image_url": {"url": image_url(seed, self._side, self._side)}}
            for seed in seeds
        ]
        content.insert(0, {"type": "text", "text": text(num_tokens, seed=text_seed)})
        body = json.dumps(
            {
                "model": self._model,
                "messages": [{"role": "user", "content": content}],
                "max_tokens": OUTPUT_TOKENS,
                "temperature": 0,
                "stream": True,
            }
        ).encode()
        ttft_s, request_id = await self._first_token(body)
        record = await settled_record_at(self._url, request_id)
        parts = {name: value for name, value in record["parts"].items() if value is not None}
        self.measured.append(
            Measured(
                self._arrangement,
                case,
                ttft_s,
                record["route"],
                len(body),
                record["transfer_bytes"],
                parts,
            )
        )

    async def _first_token(self, body: bytes) -> tuple[float, str]:
        started_s, ttft_s = time.perf_counter(), 0.0
        headers = {"Content-Type": "application/json"}
        async with self._session.post(
            f"{self._url}/v1/chat/completions", data=body, headers=headers
        ) as response:
            if response.status != 200:
                raise RuntimeError(f"{response.status} {await response.text()}")
            async for line in response.content:
                if not ttft_s and _has_token(line):
                    ttft_s = time.perf_counter() - started_s
            request_id = response.headers["x-request-id"]
        if not ttft_s:
            raise RuntimeError(f"{request_id}: no token came")
        return ttft_s, request_id


def _has_token(line: bytes) -> bool:
    """Whether this line of a stream of a chat has text; RuntimeError for an error."""
    if not line.startswith(b"data:") or b"[DONE]" in line:
        return False
    event = json.loads(line[5:])
    if "choices" not in event:
        raise RuntimeError(str(event))
    return any(choice["delta"].get("content") for choice in event["choices"])


async def measure_cases(client: Client, arguments: argparse.Namespace, first_seed: int) -> None:
    """All cases in turns. No two of these prompts share a text, and only `again` shares images."""
    seeds = iter(range(first_seed, first_seed + 1_000_000))

    def images() -> list[int]:
        return [next(seeds) for _ in range(arguments.images)]

    image_tokens = arguments.images * arguments.side**2 // PIXELS_PER_TOKEN
    for _ in range(arguments.repeats):
        lone = images()
        await client.ask("lone", lone, next(seeds))
        await client.ask("again", lone, next(seeds))
        prompts = [(images(), next(seeds)) for _ in range(arguments.together)]
        await asyncio.gather(*(client.ask("together", *prompt) for prompt in prompts))
        await client.ask("text", (), next(seeds), TEXT_TOKENS + image_tokens)


def region_spec(path: Path, arrangement: str) -> RegionSpec:
    """The demo's region for the vision model, without an engine that prefills where it decodes."""
    spec = demo_region(MODEL, path, threshold_tokens=100, local_prefill=False)
    encode, prefill = {CORE_VARIABLE: "0"}, {CORE_VARIABLE: "1"}
    engines = [RegionInstance(name="a1-prefill", env=prefill)]
    if arrangement == "E+P+D":
        engines.append(RegionInstance(name="a1-encode", role="encode", env=encode))
    decode = [RegionInstance(name="b1-decode", role="decode", env=encode)]
    far, near = spec.clusters
    return spec.model_copy(
        update={
            "clusters": tuple(
                cluster.model_copy(
                    update={
                        "nodes": (cluster.nodes[0].model_copy(update={"instances": tuple(here)}),)
                    }
                )
                for cluster, here in ((far, engines), (near, decode))
            )
        }
    )


async def measure(arguments: argparse.Namespace) -> tuple[list[Measured], dict[str, Any]]:
    """Every arrangement; what its prefill node's agent says of embeddings, by arrangement."""
    measured: list[Measured] = []
    embeddings: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="prfaas-bench-") as folder:
        path = build_model(MODEL, Path(folder))
        for number, name in enumerate(arguments.arrangements):
            _say(f"starting {name}")
            spec = region_spec(path, name)
            async with (
                RunningRegion(spec, Path(folder) / f"region-{number}") as region,
                aiohttp.ClientSession() as session,
            ):
                client = Client(session, region.gateway_url, MODEL.name, name, arguments.side)
                warm_up = argparse.Namespace(**vars(arguments) | {"repeats": arguments.warm_ups})
                await measure_cases(client, warm_up, 500_000_000)
                client.measured.clear()
                await measure_cases(client, arguments, 10_000_000 * number)
                measured += client.measured
                found = (await agent_status(region, PREFILL_NODE)).embeddings
                embeddings[name] = None if found is None else msgspec.structs.asdict(found)
    return measured, embeddings


async def measure_running(arguments: argparse.Namespace) -> list[Measured]:
    """The region behind `--gateway`."""
    async with aiohttp.ClientSession() as session:
        model = await served_model(arguments.gateway)
        client = Client(session, arguments.gateway, model, OF_THE_REGION, arguments.side)
        await measure_cases(client, arguments, int(time.time()) * 1000)
        return client.measured


def summarise(measured: Sequence[Measured], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each arrangement and case: medians, and by their names the medians of parts."""
    rows = []
    for arrangement in dict.fromkeys(item.arrangement for item in measured):
        for case in CASES:
            here = [i for i in measured if (i.arrangement, i.case) == (arrangement, case)]
            names = sorted({name for item in here for name in item.parts})
            rows.append(
                {
                    "arrangement": arrangement,
                    "case": case,
                    "num": len(here),
                    "ttft_p50_ms": 1e3 * statistics.median(i.ttft_s for i in here),
                    "ttft_max_ms": 1e3 * max(i.ttft_s for i in here),
                    "remote": sum(i.route == "prefill_cluster" for i in here),
                    "body_bytes": here[0].body_bytes,
                    "embedding_bytes": _embedding_bytes(arguments) if case != "text" else 0,
                    "kvcache_bytes": statistics.median_high(i.transfer_bytes for i in here),
                    "parts_p50_ms": {
                        name: 1e3 * statistics.median(i.parts.get(name, 0.0) for i in here)
                        for name in names
                    },
                }
            )
    return rows


def _embedding_bytes(arguments: argparse.Namespace) -> int:
    """Of all images of a prompt: a row of the language model's width in bfloat16 for each token."""
    num_tokens = arguments.images * arguments.side**2 // PIXELS_PER_TOKEN
    return int(num_tokens * MODEL.config["vision_config"]["out_hidden_size"] * 2)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def report(rows: Sequence[Mapping[str, Any]]) -> None:
    """The table."""
    columns = ("arrangement", "case", "prompts", "TTFT p50 ms", "max", "pixels", "embeddings", "KV")
    print(("{:<14}" * 2 + "{:>12}" * 6).format(*columns))
    for row in rows:
        sizes = (row["body_bytes"], row["embedding_bytes"], row["kvcache_bytes"])
        print(
            f"{row['arrangement']:<14}{row['case']:<14}{row['num']:>12}{row['ttft_p50_ms']:>12.0f}"
            f"{row['ttft_max_ms']:>12.0f}"
            + "".join(f"{f'{size / 2**20:.2f} MiB':>12}" for size in sizes)
        )
    for row in rows:
        parts = ", ".join(f"{name} {ms:.0f}" for name, ms in row["parts_p50_ms"].items() if ms >= 1)
        print(f"{row['arrangement']} {row['case']}: {parts} (ms, medians of the parts)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=8, help="images of a prompt, at most 8")
    parser.add_argument("--side", type=int, default=256, help="pixels of an image's side")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--together", type=int, default=4, help="prompts at once")
    parser.add_argument("--warm-ups", type=int, default=2)
    parser.add_argument(
        "--arrangements", nargs="+", choices=ARRANGEMENTS, default=list(ARRANGEMENTS)
    )
    parser.add_argument("--gateway", help="ask the region behind this URL instead")
    parser.add_argument("--json", type=Path, help="raw numbers")
    add_smoke(parser, images=2, side=64, repeats=1, together=2, warm_ups=0)
    arguments = parser.parse_args()
    embeddings: dict[str, Any] = {}
    if arguments.gateway:
        measured = asyncio.run(measure_running(arguments))
    else:
        os.environ |= vision_environment()
        measured, embeddings = asyncio.run(measure(arguments))
    rows = summarise(measured, arguments)
    report(rows)
    for name, found in embeddings.items():
        print(f"{name}: embeddings at the prefill node's agent: {found}")
    if arguments.json:
        kept = {"rows": rows, "embeddings": embeddings, "raw": [asdict(one) for one in measured]}
        arguments.json.write_text(json.dumps(kept, indent=1))


if __name__ == "__main__":
    main()
