"""Whether the instances of a region can take the time of another device, and how they do."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Final

from deploy.lab.pace.times import VARIABLE, PassTimes
from deploy.region.spec.region import RegionInstance, RegionSpec, role_of
from kvmanager.config_files.problems import FileError, KeyPath, Problem
from scheduler.reports import Role, decodes

_WORKER: Final = "deploy.lab.pace.worker.PacedWorker"
_REFUSALS: Final = "deploy.lab.pace.worker:UnpacedRequests"
_UNPACED: Final = re.compile(r"^(-sc|--spec(ulative)?[-_].*|--worker[-_]cls)(=|$)")


def check_pace(region: RegionSpec) -> Iterator[Problem]:
    """What paced instances cannot do, by name."""
    for m, model in enumerate(region.models):
        if model.pace is not None and model.kv_space_gib is None:
            message = "paced engines run on the CPU; write its kv_space_gib"
            yield Problem(("models", m, "kv_space_gib"), message)
    for c, cluster in enumerate(region.clusters):
        for n, node in enumerate(cluster.nodes):
            for i, item in enumerate(node.instances):
                at = ("clusters", c, "nodes", n, "instances", i)
                if item.model not in {None, *(model.name for model in region.models)}:
                    continue
                role = role_of(item, cluster)
                yield from (
                    Problem((*at, key), text) for key, text in _faults(region, item, role).items()
                )


def _faults(region: RegionSpec, item: RegionInstance, role: Role) -> dict[str, str]:
    if region.pace_of(item) is None:
        lacks = item.pace is not None
        return {"pace": "write pace of its model too, which says the rest"} if lacks else {}
    args = region.model_of(item).args + item.args
    found: dict[str, str] = {}
    if decodes(role) and item.decode_slots is None:
        found["decode_slots"] = "a paced instance needs it: what its device decodes at a time"
    if region.num_workers_of(item) > 1:
        found["pace"] = "a paced instance has one worker; the profile is that of all its GPUs"
    if role == "encode" or item.encodes:
        found["pace"] = "passes of an encoder are not paced; leave out pace, or the encoding"
    if unpaced := [arg for arg in args if _UNPACED.match(arg)]:
        found["pace"] = f"{unpaced[0]} is not paced; leave it out"
    return found


def check_profiles(region: RegionSpec, nodes: Collection[str] | None) -> Iterator[Problem]:
    """The profiles that cannot be read on this machine, or lack what an instance needs; with
    `nodes`, those of their instances.
    """
    for c, cluster in enumerate(region.clusters):
        for n, node in enumerate(cluster.nodes):
            for i, item in enumerate(node.instances):
                at: KeyPath = ("clusters", c, "nodes", n, "instances", i, "pace")
                pace = region.pace_of(item)
                if pace is None or (nodes is not None and node.name not in nodes):
                    continue
                try:
                    times = _times(region, item, Path())
                except (FileError, OSError, ValueError) as error:
                    yield Problem(at, f"{pace.profile}: {error}")
                    continue
                if decodes(role_of(item, cluster)) and not times.steps:
                    yield Problem(at, f"{pace.profile} has no decode steps, which its role needs")


def paced_options(region: RegionSpec, item: RegionInstance, folder: Path) -> dict[str, Any]:
    """What is added to `args` and `env` of a paced engine, which logs its passes in `folder`;
    nothing for another one.
    """
    if region.pace_of(item) is None:
        return {}
    return engine_options(_times(region, item, folder / f"{item.name}.jsonl"))


def engine_options(times: PassTimes) -> dict[str, Any]:
    """What is added to `args` and `env` of an engine that takes these times."""
    return {
        "args": ("--worker-cls", _WORKER, "--logits-processors", _REFUSALS),
        # One worker computes in the engine core's process, with one thread: others would spin.
        "env": {
            VARIABLE: times.encode(),
            "OMP_NUM_THREADS": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        },
    }


def _times(region: RegionSpec, item: RegionInstance, log: Path) -> PassTimes:
    pace = region.pace_of(item)
    assert pace is not None
    return PassTimes.of(pace, region.model_of(item).max_model_len, log)
