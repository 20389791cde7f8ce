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
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from deploy.lab.demo.byte_tokenizer import tokenizer_files
from deploy.lab.demo.scenario import text

CLIENT: Final = """
import json, sys
from vllm.benchmarks import serve
from vllm.benchmarks.datasets import SampleRequest
from vllm.utils.argparse_utils import FlexibleArgumentParser

def prompts(args, tokenizer):
    lines = [json.loads(line)["prompt"] for line in open(args.dataset_path)]
    return [
        SampleRequest(
            prompt=prompt,
            prompt_len=len(tokenizer(prompt).input_ids),
            expected_output_len=args.custom_output_len,
            request_id=args.request_id_prefix + str(number),
        )
        for number, prompt in enumerate(lines)
    ]

serve.get_samples = prompts
parser = FlexibleArgumentParser()
serve.add_cli_args(parser)
for line in sys.stdin:
    serve.main(parser.parse_args(json.loads(line)))
    print(flush=True)
    print("END OF RUN", flush=True)
"""
"""Does what the command `vllm bench serve` does, for each list of words on a line. The command
itself looks up a distribution called vllm, which the CPU build does not have, its custom data set
needs pandas, and it imports for ten seconds every time.
"""
END_OF_RUN: Final = b"END OF RUN\n"
CLIENT_LIMIT_S: Final = 570.0
LINE_LIMIT_BYTES: Final = 1 << 24


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


def words_of(url: str, model: str, traffic: Traffic, run: Run, folder: Path) -> list[str]:
    """What follows `vllm bench serve`. `folder` has prompts and tokenizer and gets the result."""
    argv = ["--backend", "openai", "--base-url", url]
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


class Client:
    """`vllm bench serve` in a process of its own, for one run after the other."""

    def __init__(self, process: asyncio.subprocess.Process, folder: Path) -> None:
        self._process = process
        self._folder = folder

    async def ask(self, url: str, model: str, traffic: Traffic, run: Run) -> dict[str, Any]:
        """What it found, flat; RuntimeError with its last words if it fails."""
        write_inputs(traffic, run, self._folder)
        words = words_of(url, model, traffic, run, self._folder)
        told: deque[bytes] = deque(maxlen=40)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(words).encode() + b"\n")
        try:
            async with asyncio.timeout(CLIENT_LIMIT_S):
                while (line := await self._process.stdout.readline()) != END_OF_RUN:
                    told.append(line)
                    if not line:
                        text_told = b"".join(told).decode(errors="replace")
                        raise RuntimeError(f"vllm bench serve ended in {run.name}: {text_told}")
        except TimeoutError:
            raise RuntimeError(f"{run.name}: no end after {CLIENT_LIMIT_S:g} s") from None
        return found(json.loads((self._folder / f"{run.name}.json").read_text()))


@asynccontextmanager
async def client(folder: Path) -> AsyncIterator[Client]:
    """A client whose prompts and results are in `folder`; killed at the end."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", CLIENT),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        limit=LINE_LIMIT_BYTES,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
    )
    try:
        yield Client(process, folder)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


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


def write_inputs(traffic: Traffic, run: Run, folder: Path) -> None:
    """The prompts and the tokenizer that the words name."""
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
