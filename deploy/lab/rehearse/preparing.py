"""From files and options to what is played: the regions in their order, and the requests.

It reads files and starts nothing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import yaml

from deploy.lab.demo.tiny_models import build_model
from deploy.lab.demo.tiny_specs import MODELS
from deploy.lab.rehearse.deriving import Rehearsal, rehearsal_of
from deploy.lab.rehearse.from_region import rehearsal_of_region
from deploy.lab.rehearse.region_file import Folders
from deploy.lab.rehearse.run import Backlog, Run
from deploy.lab.rehearse.spec import RehearsalFile
from deploy.lab.rehearse.traffic import (
    Prompts,
    Source,
    Wanted,
    requests_of,
    source_of_file,
    source_of_prompts,
)
from deploy.plan.simulate.building import Simulation, load_simulation
from deploy.region.spec.loading import load_region
from kvmanager.config_files.yaml_files import read_text
from scheduler.planning.throughput import Mode


def prepare(
    file: Path, compared: Sequence[str], wanted: Wanted, directory: Path, keep: Path | None
) -> Run:
    """Read the files and build tiny models in `directory`. `compared` are policies of `file`, or
    other files. Raises `FileError`, and ValueError for what cannot be rehearsed.
    """
    simulation: Simulation | None = None
    if _is_region(file):
        if wanted.prompts is None:
            raise ValueError(
                "a region.yaml does not say which prompts come: give --trace or --lengths"
            )
        rehearsals = [_of_region(file, wanted.prompts)]
        source = source_of_prompts(wanted.prompts, rehearsals[0].plan.system_rps(Mode.EXACT))
    else:
        if wanted.prompts is not None:
            raise ValueError(
                "it says itself which prompts come: --trace and --lengths are for a region.yaml"
            )
        simulation = load_simulation(file, RehearsalFile)
        rehearsals = [_of_file(simulation, "", file.stem, directory)]
        source = source_of_file(simulation)
    for text in compared:
        # A file may have the name of a policy, but hardly with its ending.
        if Path(text).suffix not in (".yaml", ".yml"):
            if simulation is None:
                raise ValueError(f"--compare {text}: a region.yaml has no policies; name a file")
            rehearsals.append(_of_file(simulation, text, text, directory))
        elif _is_region(Path(text)):
            if wanted.prompts is None:
                raise ValueError(f"--compare {text}: compare a plan file with plan files")
            rehearsals.append(_of_region(Path(text), wanted.prompts))
        else:
            other = load_simulation(Path(text), RehearsalFile)
            rehearsals.append(_of_file(other, "", Path(text).stem, directory))
    _check(rehearsals)
    return _run(rehearsals, source, wanted, keep)


def _run(rehearsals: Sequence[Rehearsal], source: Source, wanted: Wanted, keep: Path | None) -> Run:
    scale = rehearsals[0].scale
    backlog = None
    if wanted.num_clients is not None:
        real_s = (wanted.duration_s or source.duration_s) * scale.slowdown
        backlog = Backlog(num_clients=wanted.num_clients, span_s=real_s)
    room = min(rehearsal.max_model_len for rehearsal in rehearsals)
    workload = scale.workload(requests_of(source, wanted), room)
    return Run(
        rehearsals=rehearsals, workload=workload, backlog=backlog, seed=wanted.seed, keep=keep
    )


def _check(rehearsals: Sequence[Rehearsal]) -> None:
    """ValueError if the regions cannot be compared."""
    names = [rehearsal.name for rehearsal in rehearsals]
    if len(set(names)) < len(names):
        raise ValueError(f"two regions have one name: {', '.join(names)}")
    units = {(one.scale.tokens, one.scale.step, one.scale.slowdown) for one in rehearsals}
    if len(units) > 1:
        raise ValueError(
            "tokens_per_token, output_tokens_per_token and slowdown must be the same for the same "
            "arrivals"
        )


def _of_file(simulation: Simulation, policy: str, name: str, directory: Path) -> Rehearsal:
    assert isinstance(simulation.file, RehearsalFile)
    (directory / name).mkdir(exist_ok=True)
    tiny = MODELS[simulation.file.rehearsal.model]
    folders = Folders(build_model(tiny, directory / "models"), directory / name)
    policy = policy or simulation.file.simulation.policy
    return replace(rehearsal_of(simulation, policy, folders), name=name)


def _of_region(file: Path, prompts: Prompts) -> Rehearsal:
    document = yaml.safe_load(file.read_text())
    found = rehearsal_of_region(load_region(file, os.environ), document, prompts)
    return replace(found, name=file.stem)


def _is_region(file: Path) -> bool:
    """Whether a file is a region.yaml. Raises `FileError` if it cannot be read."""
    try:
        document = yaml.safe_load(read_text(file))
    except yaml.YAMLError:
        # Who reads it as a plan says where it is wrong.
        return False
    return isinstance(document, dict) and "clusters" in document
