"""`--pace` of a bench: its engines take the time of the paper's GPUs (`deploy.lab.pace`), so that
systems are compared and not the threads that this machine has for each engine.

Engines of prefill clusters have the profile `h200`, all others `h20`. A real token of a prompt
stands for 16, one of an answer for 4.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil
from smoke import add_sizes

from deploy.lab.pace.passes import judge, read_passes
from deploy.lab.pace.times import PaceSpec, PassTimes
from deploy.region.spec.pace import engine_options
from deploy.region.spec.region import RegionSpec
from prfaas.engines.command import EngineSpec

FAST, SLOW = "h200", "h20"
TOKENS_PER_TOKEN: Final = 16
OUTPUT_TOKENS_PER_TOKEN: Final = 4
_SCALE: Final = {
    "tokens_per_token": TOKENS_PER_TOKEN,
    "output_tokens_per_token": OUTPUT_TOKENS_PER_TOKEN,
}
CALIBRATION_S: Final = 60.0
"""The gateway's longest prompt for timing an instance takes an H20 10 s, with 16 tokens a token."""
DECODE_SLOTS: Final = 20
LINK: Final = {"rate": "800Mbit", "rtt": "20ms"}
"""As fast for the KVCache of a tiny model as 100 Gbit/s for that of the profiles."""
_TESTS: Final = Path(__file__).resolve().parents[1]
_PATH: Final = os.pathsep.join([str(_TESTS / "support" / "nixl_plugin"), str(_TESTS.parent)])
"""With a vLLM plugin for NIXL's progress thread: it polls, and would keep a core busy beside each
engine. With it, it waits for messages.
"""
HELP: Final = "engines take the time of GPUs; other sizes, options that follow win over them"


def add_pace(parser: argparse.ArgumentParser, **sizes: Any) -> None:
    """Add the flag, which gives these values to other options."""
    add_sizes(parser, "--pace", HELP, sizes)


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments of a bench with `--pace` and `--gateway`, which do not go together."""
    arguments = parser.parse_args()
    if arguments.pace and arguments.gateway:
        parser.error("--pace starts paced engines; leave out --gateway, whose region has its own")
    return arguments


def paced_region(spec: RegionSpec, *, fast: Collection[str] = ()) -> RegionSpec:
    """The same region of paced engines; the instances `fast` are as those of prefill clusters."""
    raw = spec.model_dump(mode="json", by_alias=True, exclude_unset=True)
    for model in raw["models"]:
        model["pace"] = {"profile": SLOW, **_SCALE}
    scheduling = raw.setdefault("gateway", {}).setdefault("scheduling", {})
    scheduling["calibration"] = {"limit_s": CALIBRATION_S}
    for cluster in raw["clusters"]:
        for node in cluster["nodes"]:
            for item in node["instances"]:
                if cluster["kind"] == "prefill" or item["name"] in fast:
                    item["pace"] = FAST
                if cluster["kind"] == "pd":
                    item["decode_slots"] = DECODE_SLOTS
    return RegionSpec.model_validate(raw)


def paced_engine(spec: EngineSpec, logs: Path) -> EngineSpec:
    """The same engine of no region, at the pace of its role."""
    profile = FAST if spec.instance == "prefill" else SLOW
    pace = PaceSpec(profile=profile, **_SCALE)
    log = logs / "pace" / f"{spec.instance}.jsonl"
    options = engine_options(PassTimes.of(pace, spec.max_model_len, log))
    changes = {
        "max_num_seqs": DECODE_SLOTS,
        "args": (*spec.args, *options["args"]),
        "env": {**spec.env, **options["env"], "PYTHONPATH": _PATH},
    }
    return spec.model_copy(update=changes)


class Watch:
    """Judges what paced engines do from now on."""

    def __init__(self) -> None:
        self._since = time.time()
        psutil.cpu_percent()  # The next call tells of the time since this one.

    def verdict(self, logs: Path) -> dict[str, Any]:
        """`deploy.lab.pace.passes.Verdict` on what the engines with these logs have done."""
        busy = psutil.cpu_percent() / 100
        passes = {
            name: [one for one in of if one.at >= self._since]
            for folder in logs.rglob("pace")
            for name, of in read_passes(folder).items()
        }
        found: dict[str, Any] = msgspec.to_builtins(judge(passes, busy))
        return found


def is_void(verdicts: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether a part of the run did not keep its pace; says so on stderr."""
    for name, verdict in verdicts.items():
        for reason in verdict["reasons"]:
            print(f"VOID: {name}: {reason}; measure again on a quiet machine", file=sys.stderr)
    return any(verdict["reasons"] for verdict in verdicts.values())
