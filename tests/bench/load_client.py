"""What `bench_load.py` asks of a system: prompts of random lengths, sent by `vllm bench serve`.

Knows an OpenAI URL, and no system behind it.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from deploy.lab.demo.byte_tokenizer import tokenizer_files
from deploy.lab.demo.scenario import text

CLIENT: Final = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""What the command `vllm bench serve` runs. The command itself looks up a distribution called vllm,
which the CPU build does not have.
"""
CLIENT_LIMIT_S: Final = 570.0


@dataclass(frozen=True, slots=True)
class Traffic:
    """Prompts, all different, whose lengths are uniform from `min_tokens` to `max_tokens`, and
    answers of `output_tokens` each. `slo_ttft_ms` and `slo_tpot_ms`: a request within both counts
    as goodput.
    """

    min_tokens: int
    max_tokens: int
    output_tokens: int
    slo_ttft_ms: float
    slo_tpot_ms: float

    def lengths(self, num_prompts: int, seed: int) -> list[int]:
        """Tokens of each prompt."""
        draws = random.Random(seed)
        return [draws.randint(self.min_tokens, self.max_tokens) for _ in range(num_prompts)]


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the client: `num_prompts` at `rate_rps` at random moments (Poisson), or with
    `concurrency` always that many at a time.
    """

    name: str
    seed: int
    num_prompts: int
    rate_rps: float = math.inf
    concurrency: int | None = None


def rate_runs(rates: Sequence[float], seconds: float, least: int = 10) -> list[Run]:
    """A run of `seconds` for each rate, requests/s, but of `least` prompts at least."""
    return [
        Run(f"rate-{rate:g}", seed, max(least, round(rate * seconds)), rate_rps=rate)
        for seed, rate in enumerate(rates, start=1)
    ]


def client_argv(url: str, model: str, traffic: Traffic, run: Run, folder: Path) -> list[str]:
    """The client's command line. `folder` has its prompts and tokenizer and gets its result."""
    argv = [sys.executable, "-c", CLIENT, "--backend", "openai", "--base-url", url]
    argv += ["--model", model, "--tokenizer", str(folder / "tokenizer"), "--temperature", "0"]
    argv += ["--dataset-name", "custom", "--dataset-path", str(folder / f"{run.name}.jsonl")]
    argv += ["--skip-chat-template", "--disable-shuffle", "--ignore-eos", "--disable-tqdm"]
    argv += ["--custom-output-len", str(traffic.output_tokens)]
    argv += ["--num-prompts", str(run.num_prompts), "--seed", str(run.seed)]
    argv += ["--request-rate", str(run.rate_rps), "--request-id-prefix", f"{run.name}-"]
    if run.concurrency is not None:
        argv += ["--max-concurrency", str(run.concurrency)]
    argv += ["--percentile-metrics", "ttft,tpot,e2el", "--metric-percentiles", "50,90,99"]
    argv += ["--goodput", f"ttft:{traffic.slo_ttft_ms:g}", f"tpot:{traffic.slo_tpot_ms:g}"]
    argv += ["--ready-check-timeout-sec", "0"]
    argv += ["--save-result", "--result-dir", str(folder), "--result-filename", f"{run.name}.json"]
    return argv


async def ask(url: str, model: str, traffic: Traffic, run: Run, folder: Path) -> dict[str, Any]:
    """What the client found, flat; RuntimeError with its last words if it fails."""
    _write_inputs(traffic, run, folder)
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    process = await asyncio.create_subprocess_exec(
        *client_argv(url, model, traffic, run, folder),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=environment,
    )
    try:
        async with asyncio.timeout(CLIENT_LIMIT_S):
            told, _ = await process.communicate()
    except TimeoutError:
        raise RuntimeError(f"{run.name}: no end after {CLIENT_LIMIT_S:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise RuntimeError(f"vllm bench serve failed: {told[-2000:].decode(errors='replace')}")
    return found(json.loads((folder / f"{run.name}.json").read_text()))


def found(result: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of `vllm bench serve` that are kept, times in seconds. Only counts are kept
    where no request was answered.
    """
    counts = {
        "completed": result["completed"],
        "failed": result["failed"],
        "duration_s": round(result["duration"], 3),
    }
    if not result["completed"]:
        return counts
    times = {
        f"{name}_p{percentile}_s": round(result[f"p{percentile}_{name}_ms"] / 1e3, 5)
        for name in ("ttft", "tpot", "e2el")
        for percentile in (50, 90, 99)
    }
    return {
        **counts,
        "throughput_rps": round(result["request_throughput"], 4),
        "goodput_rps": round(result["request_goodput"], 4),
        **times,
    }


def _write_inputs(traffic: Traffic, run: Run, folder: Path) -> None:
    tokenizer = folder / "tokenizer"
    tokenizer.mkdir(parents=True, exist_ok=True)
    for name, content in tokenizer_files().items():
        (tokenizer / name).write_text(json.dumps(content))
    lengths = traffic.lengths(run.num_prompts, run.seed)
    # Prompts of different runs are different, so that no cache of one helps the next.
    prompts = (text(length, 1000 * run.seed + number) for number, length in enumerate(lengths))
    lines = (json.dumps({"prompt": prompt}) for prompt in prompts)
    (folder / f"{run.name}.jsonl").write_text("\n".join(lines) + "\n")


def settings(traffic: Traffic) -> dict[str, Any]:
    """The traffic as it is kept beside the rows."""
    return asdict(traffic)
