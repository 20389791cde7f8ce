"""From files and options to what is played: the regions in their order, and the requests.

It reads files and starts nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from deploy.lab.demo.tiny_models import build_model
from deploy.lab.demo.tiny_specs import MODELS
from deploy.lab.rehearse.deriving import Rehearsal, rehearsal_of
from deploy.lab.rehearse.region_file import Folders
from deploy.lab.rehearse.run import Backlog, Run
from deploy.lab.rehearse.spec import RehearsalFile
from deploy.lab.rehearse.traffic import Wanted, requests_of, span_s
from deploy.plan.simulate.building import Simulation, load_simulation


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What is played, one region after the other. Each has the directory of its name below that
    of the run.
    """

    rehearsals: Sequence[Rehearsal]
    run: Run


def prepare(
    file: Path, compared: Sequence[str], wanted: Wanted, directory: Path, keep: Path | None
) -> Prepared:
    """Read the files and build tiny models in `directory`. `compared` are policies of `file`, or
    other files. Raises `FileError`, and ValueError for what cannot be rehearsed.
    """
    first = load_simulation(file, RehearsalFile)
    rehearsals = [_rehearsal(first, "", file.stem, directory)]
    for text in compared:
        # A file may have the name of a policy, but hardly with its ending.
        if Path(text).suffix in (".yaml", ".yml"):
            other = load_simulation(Path(text), RehearsalFile)
            rehearsals.append(_rehearsal(other, "", Path(text).stem, directory))
        else:
            rehearsals.append(_rehearsal(first, text, text, directory))
    names = [rehearsal.name for rehearsal in rehearsals]
    if len(set(names)) < len(names):
        raise ValueError(f"two regions have one name: {', '.join(names)}")
    mine = rehearsals[0]
    if any(other.scale.step != mine.scale.step for other in rehearsals):
        raise ValueError("tokens_per_token and slowdown must be the same for the same arrivals")
    room = min(rehearsal.max_model_len for rehearsal in rehearsals)
    backlog = None
    if wanted.num_clients is not None:
        real_s = span_s(first, wanted) * mine.scale.slowdown
        backlog = Backlog(num_clients=wanted.num_clients, span_s=real_s)
    workload = mine.scale.workload(requests_of(first, wanted), room)
    run = Run(workload=workload, backlog=backlog, seed=wanted.seed, keep=keep)
    return Prepared(rehearsals=rehearsals, run=run)


def _rehearsal(simulation: Simulation, policy: str, name: str, directory: Path) -> Rehearsal:
    assert isinstance(simulation.file, RehearsalFile)
    (directory / name).mkdir(exist_ok=True)
    tiny = MODELS[simulation.file.rehearsal.model]
    folders = Folders(build_model(tiny, directory / "models"), directory / name)
    policy = policy or simulation.file.simulation.policy
    return replace(rehearsal_of(simulation, policy, folders), name=name)
