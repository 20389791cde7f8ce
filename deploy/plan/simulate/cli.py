"""`prfaas simulate`: a region in virtual time, driven by the scheduler's own decisions.

It reads files and prints. A command imports what is slow to import when it runs.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from deploy.command_line import JsonOption, check_plot, fail

if TYPE_CHECKING:
    from deploy.plan.simulate.building import Simulation
    from deploy.plan.simulate.study import Study
    from scheduler.replay.results import Outcome

_HELP = """Play traffic through a region in virtual time: goodput, first tokens, egress, roles.

\b
prfaas simulate example > simulation.yaml     a file to start from
prfaas simulate simulation.yaml               with the policy that it names
prfaas simulate simulation.yaml --compare     with several policies, side by side
prfaas simulate study congestion              a ready-made question with goals
prfaas simulate --recording DIR               what a gateway recorded, decided again

The same code decides as in a running region: routing, thresholds, queues, admission, conversions.
The same file and seed give the same result.
"""


class _FileGroup(TyperGroup):
    """Takes a file in place of a command: `simulate FILE` is `simulate run FILE`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # A recording takes the place of the file, so it needs no command either.
        if any(word.partition("=")[0] == "--recording" for word in args):
            if args[0] not in self.commands:
                args = ["recording", *args]
        elif args and args[0] not in self.commands and args[0] != "--help":
            args = ["run", *args]
        return super().parse_args(ctx, args)


simulate_app = typer.Typer(
    cls=_FileGroup, help=_HELP, no_args_is_help=True, rich_markup_mode=None, add_completion=False
)

SeedOption = Annotated[int, typer.Option(min=0, help="of drawn traffic and of jitter")]
SeriesOption = Annotated[
    bool, typer.Option("--series", help="with --json: the state over time, too")
]
RequestsOption = Annotated[
    bool, typer.Option("--requests", help="with --json: what was decided of each request, and why")
]
PlotOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="pictures over time; .png or .svg")
]


@simulate_app.command("example")
def example_command(
    sites: Annotated[
        bool, typer.Option("--sites", help="several PD clusters, one prefill cluster is lost")
    ] = False,
) -> None:
    """Print a simulation file to start from: a link that slows down, every key explained."""
    name = "sites.yaml" if sites else "simulation.yaml"
    typer.echo((Path(__file__).parent / "examples" / name).read_text(), nl=False)


@simulate_app.command("run")
def run_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="simulation file, YAML")],
    policy: Annotated[
        list[str] | None, typer.Option(help="what decides; repeatable; default: the file's")
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help="the usual policies")] = False,
    seed: SeedOption = 1,
    warm_up: Annotated[
        float, typer.Option(min=0, max=0.9, help="first share of the time that is not counted")
    ] = 0.0,
    as_json: JsonOption = False,
    with_series: SeriesOption = False,
    with_requests: RequestsOption = False,
    plot: PlotOption = None,
) -> None:
    """Play a simulation file.

    \b
    Policies: those of the file, and
      static       one threshold for ever, first come first served (the paper)
      router       the scheduler as it runs
      oracle       the router, told what links will do
      homogeneous  all instances in the PD cluster, no prefill cluster
    """
    # Before the simulation, which may take minutes.
    if plot is not None:
        check_plot(plot, ".png", ".svg")
    simulation = _load(file)
    names = _names(simulation, policy, compare)
    from deploy.plan.simulate.report import print_outcomes
    from kvmanager.config_files.problems import FileError
    from scheduler.replay.driver import replay

    try:
        workload = simulation.workload(seed)
        outcomes = {}
        for name in names:
            model, chosen = simulation.policy(name)
            outcomes[name] = replay(model, workload, chosen, seed=seed)
    except FileError as error:
        fail(str(error), 2)
    except ValueError as error:
        fail(f"{file}: {error}", 2)
    documents = {
        name: _document(
            outcome, warm_up * outcome.span_s, series=with_series, requests=with_requests
        )
        for name, outcome in outcomes.items()
    }
    if plot is not None:
        from deploy.plan.simulate.plots import write_plots

        write_plots(plot, outcomes)
        typer.echo(f"wrote {plot}", err=True)
    if as_json:
        _print_json({"seed": seed, "policies": documents})
    else:
        print_outcomes(_console(), documents)


@simulate_app.command("recording")
def recording_command(
    recording: Annotated[
        Path, typer.Option(metavar="DIR", help="gateway.recorder.dir of a region", exists=True)
    ],
    region: Annotated[
        Path | None,
        typer.Option("--with", metavar="FILE", help="region.yaml with other settings"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Take the recorded events again and compare every decision, with its numbers.

    \b
    Exit status 1: a decision is not what was recorded.
    --with FILE    what these settings would have decided; differences are the answer, status 0
    """
    from deploy.plan.simulate.recording import document_of, play_recordings, settings_of
    from scheduler.replay.recording import RecordingError

    resettle = None
    if region is not None:
        from deploy.region.spec.loading import load_region
        from kvmanager.config_files.problems import FileError

        try:
            resettle = settings_of(load_region(region, os.environ), region)
        except FileError as error:
            fail(str(error), 2)
    try:
        played, num_files = play_recordings(recording, resettle)
    except RecordingError as error:
        fail(str(error), 2)
    if as_json:
        _print_json(document_of(played, num_files))
    else:
        from deploy.plan.simulate.recording_view import print_played

        print_played(_console(), played, num_files, is_what_if=resettle is not None)
    if resettle is None and played.differences:
        raise typer.Exit(1)


@simulate_app.command("study")
def study_command(
    name: Annotated[
        str,
        typer.Argument(help="case-study, congestion, shift, steady, overload, loss or images"),
    ],
    seed: SeedOption = 1,
    scale: Annotated[
        float, typer.Option(min=0.01, max=10, help="length of the runs; 1 is what goals are for")
    ] = 1.0,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="for overload: a trace, at double speed")
    ] = None,
    as_json: JsonOption = False,
    with_series: SeriesOption = False,
    with_requests: RequestsOption = False,
    plot: PlotOption = None,
) -> None:
    """Run a ready-made study and compare it with its goals.

    Exit status 1: a goal was missed.
    """
    from deploy.plan.simulate.studies import STUDIES
    from kvmanager.config_files.problems import suggestion

    if name not in STUDIES:
        fail(f"no study {name!r}{suggestion(name, STUDIES)}", 2)
    if trace is not None and name != "overload":
        fail("--trace is for the study overload", 2)
    # Before the study, which may take minutes.
    if plot is not None:
        check_plot(plot, ".png", ".svg")
    study = _overload(trace, seed, scale) if trace is not None else STUDIES[name](seed, scale)
    if plot is not None and study.outcomes:
        from deploy.plan.simulate.plots import write_plots

        write_plots(plot, study.outcomes)
        typer.echo(f"wrote {plot}", err=True)
    if as_json:
        goals = [
            {"name": g.name, "wanted": g.wanted, "found": g.found, "met": g.met}
            for g in study.goals
        ]
        runs = {
            title: _document(outcome, series=with_series, requests=with_requests)
            for title, outcome in study.outcomes.items()
        }
        whole = {"study": name, "seed": seed, "rows": study.rows, "goals": goals, "runs": runs}
        _print_json(whole)
    else:
        _print_study(study)
    if not all(goal.met for goal in study.goals):
        raise typer.Exit(1)


def _document(
    outcome: Outcome, from_s: float = 0.0, *, series: bool, requests: bool
) -> dict[str, Any]:
    from deploy.plan.simulate.report import document_of, requests_of, series_of

    document = document_of(outcome, from_s)
    if series:
        document["series"] = series_of(outcome)
    if requests:
        document["requests"] = requests_of(outcome)
    return document


def _overload(trace: Path, seed: int, scale: float) -> Study:
    from deploy.plan.simulate.studies import overload
    from deploy.plan.trace import load_trace
    from kvmanager.config_files.problems import FileError

    try:
        return overload(seed, scale, load_trace(trace))
    except FileError as error:
        fail(str(error), 2)


def _load(file: Path) -> Simulation:
    from deploy.plan.simulate.building import load_simulation
    from kvmanager.config_files.problems import FileError

    try:
        return load_simulation(file)
    except FileError as error:
        fail(str(error), 2)


def _names(simulation: Simulation, given: list[str] | None, compare: bool) -> list[str]:
    from kvmanager.config_files.problems import suggestion

    names = list(given or ([] if compare else [simulation.file.simulation.policy]))
    if compare:
        names += [name for name in simulation.compared if name not in names]
    known = simulation.policy_names
    for name in names:
        if name not in known:
            fail(f"--policy {name}: unknown{suggestion(name, known)}", 2)
    return names


def _print_study(study: Study) -> None:
    from rich.table import Table

    from deploy.table_style import TABLE_STYLE

    console = _console()
    table = Table(**TABLE_STYLE)
    for key in study.rows[0]:
        table.add_column(key.replace("_", "\n", 1), justify="right")
    for row in study.rows:
        table.add_row(*(_cell(value) for value in row.values()))
    console.print(table)
    for goal in study.goals:
        verdict = "met   " if goal.met else "MISSED"
        console.print(f"{verdict} {goal.name}: {goal.found:.4g} ({goal.wanted})", highlight=False)


def _cell(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def _print_json(value: Any) -> None:
    import json

    typer.echo(json.dumps(value, indent=2, default=float))


def _console() -> Any:
    from rich.console import Console

    return Console()
