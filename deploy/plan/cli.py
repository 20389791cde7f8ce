"""`prfaas plan`: does cross-site prefill pay, with which threshold, split and link?

It reads files and prints. A command imports what is slow to import when it runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from deploy.command_line import JsonOption, check_plot, command_group, fail, print_json
from deploy.ops.plan import live_command
from deploy.plan.kv.cli import kv_command
from deploy.plan.profile.cli import profile_command
from deploy.plan.profile.live_cli import profile_live_command

if TYPE_CHECKING:
    from deploy.plan.solve.building import PlanInput
    from scheduler.planning.joint import JointRegion

_HELP = """Plan a region before buying it: threshold, instances, link, cost, time to first token.

\b
prfaas plan example > plan.yaml    a file to start from (the paper's case study)
prfaas plan example --sites > plan.yaml    the same for several PD clusters
prfaas plan example --images > plan.yaml   prompts with images, which are encoded first
prfaas plan solve plan.yaml        the best plan for it, and what binds
prfaas plan sweep plan.yaml --over link_gbps=1,2,5,10
prfaas plan kv config.json         KVCache size of a model
prfaas plan profile --url ENGINE   measure an engine for the file's `profiles`
prfaas plan profile-live           the same from the requests that a region has served
prfaas plan live                   what a running gateway plans, and why

Numbers: k or K after a token count means 1000, Ki means 1024 (8k = 8000, 8Ki = 8192). Sizes are
MiB = 2^20 bytes or MB = 10^6 bytes. Link rates are bits: 10Gbit is 10^10 bits a second.
"""

plan_app = command_group(_HELP)
plan_app.command("kv")(kv_command)
plan_app.command("profile")(profile_command)
plan_app.command("profile-live")(profile_live_command)
plan_app.command("live")(live_command)

PlanArgument = Annotated[Path, typer.Argument(metavar="FILE", help="plan file, YAML")]
SeedOption = Annotated[int, typer.Option(help="seed of the simulated requests")]
RequestsOption = Annotated[
    int, typer.Option("--requests", min=1000, help="simulated requests at each load")
]


@plan_app.command("example")
def example_command(
    sites: Annotated[
        bool, typer.Option("--sites", help="several PD clusters, shared uplinks and a second model")
    ] = False,
    images: Annotated[
        bool, typer.Option("--images", help="one PD cluster whose prompts have images")
    ] = False,
) -> None:
    """Print a plan file to start from: the paper's case study, every key explained."""
    if sites and images:
        fail("give --sites or --images, not both", 2)
    name = "sites.yaml" if sites else "images.yaml" if images else "case-study.yaml"
    typer.echo((Path(__file__).parent / "examples" / name).read_text(), nl=False)


@plan_app.command("case-study")
def case_study_command(as_json: JsonOption = False) -> None:
    """Work out the paper's three deployments (its Table 6) and compare with its numbers."""
    from deploy.plan.solve.case_study import case_study, deployments
    from scheduler.planning.throughput import Mode

    paper, exact = case_study(Mode.PAPER), case_study(Mode.EXACT)
    found = deployments(Mode.PAPER)
    printed = {d.key: d.printed for d in found}
    if as_json:
        rows = {
            key: {**row, "exact": exact[key], "paper_prints": printed[key]}
            for key, row in paper.items()
        }
        print_json(rows, indent=2)
        return
    from deploy.plan.solve.tables import print_case_study

    titles = {d.key: d.title for d in found}
    print_case_study(Console(), paper, exact, printed, titles)


@plan_app.command("solve")
def solve_command(
    file: PlanArgument,
    as_json: JsonOption = False,
    search: Annotated[
        bool, typer.Option("--search", help="also show the best threshold of every division")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="pictures; .png, .svg or .html")
    ] = None,
    num_requests: RequestsOption = 100_000,
    seed: SeedOption = 1,
) -> None:
    """Find the plan with the highest throughput: who prefills what, what binds, TTFT, cost.

    For a file with `images` also: which stages share instances, how many, and their goodput.

    \b
    Exit status 0: a plan was found, 1: a goal of the file (rate_rps, slo.ttft_p90) is not met,
    2: the file is wrong.
    """
    plan_input = _load(file)
    # Checked before the search and the simulation, which take a while.
    if plot is not None:
        check_plot(plot, ".png", ".svg", ".html")
    if plan_input.joint is not None:
        if search:
            fail("--search is for files without homes of requests", 2)
        _solve_joint(file, plan_input, plan_input.joint, (as_json, plot, num_requests, seed))
        return
    from deploy.plan.solve.solving import Goals, search_table, solve
    from scheduler.planning.plan import NoRouteError
    from scheduler.planning.solve import is_pair

    spec, region = plan_input.spec, plan_input.region
    if search and not is_pair(region):
        fail("--search needs one PD cluster and at most one prefill cluster", 2)
    try:
        solution = solve(
            region,
            Goals(spec.traffic.rate_rps, spec.slo.ttft_p90),
            whole=spec.instances == "whole",
            currency=spec.currency,
            num_requests=num_requests,
            seed=seed,
        )
    except NoRouteError as error:
        fail(f"{file}: {error}", 2)
    document = solution.document | _profiles(plan_input)
    if plan_input.images is not None:
        from deploy.plan.solve.image_solving import solve_images

        found = solve_images(plan_input.images, solution.plan, spec.traffic.rate_rps, seed)
        document["images"] = found.document
        document["goals"] |= found.goals
    rows = search_table(region) if search else []
    if search:
        document["search"] = rows
    if plot is not None:
        from deploy.plan.solve.plots import write_plots

        write_plots(plot, solution)
        typer.echo(f"wrote {plot}", err=True)
    if as_json:
        print_json(document, indent=2)
    else:
        from deploy.plan.solve.tables import print_search, print_solution

        console = Console()
        print_solution(console, document, plan_input.fits)
        if plan_input.images is not None:
            from deploy.plan.solve.image_view import print_images

            print_images(console, document["images"], document["goals"])
        if search:
            print_search(console, rows)
    if not all(goal["met"] for goal in document["goals"].values()):
        raise typer.Exit(1)


def _solve_joint(
    file: Path,
    plan_input: PlanInput,
    joint: JointRegion,
    asked: tuple[bool, Path | None, int, int],
) -> None:
    """`solve` for a file whose requests have homes. `asked` has the options of `solve_command`."""
    from deploy.plan.solve.joint_solving import all_met, solve_joint
    from deploy.plan.solve.joint_view import print_joint, write_joint_plots
    from scheduler.planning.plan import NoRouteError

    as_json, plot, num_requests, seed = asked
    spec = plan_input.spec
    try:
        solution = solve_joint(
            joint,
            spec.slo.ttft_p90,
            currency=spec.currency,
            num_requests=num_requests,
            seed=seed,
        )
    except NoRouteError as error:
        fail(f"{file}: {error}", 2)
    if plot is not None:
        write_joint_plots(plot, solution)
        typer.echo(f"wrote {plot}", err=True)
    if as_json:
        print_json(solution.document | _profiles(plan_input), indent=2)
    else:
        print_joint(Console(), solution.document, plan_input.fits)
    if not all_met(solution.document):
        raise typer.Exit(1)


def _profiles(plan_input: PlanInput) -> dict[str, Any]:
    """The fitted profiles for --json."""
    if not plan_input.fits:
        return {}
    return {
        "profiles": {
            name: {
                "method": fit.method,
                "tokens": fit.tokens.tolist(),
                "measured_s": fit.values.tolist(),
                "residuals": fit.residuals.tolist(),
            }
            for name, fit in plan_input.fits.items()
        }
    }


@plan_app.command("sweep")
def sweep_command(
    file: PlanArgument,
    over: Annotated[
        list[str],
        typer.Option(metavar="NAME=VALUES", help="1,2,5 or FIRST:LAST:STEP; repeatable"),
    ],
    as_json: JsonOption = False,
) -> None:
    """Solve again for other values of a setting; show what keeping today's plan would lose.

    \b
    NAME is one of
      link_gbps          rate of every link, Gbit/s
      hit_ratio          cached share of every prompt (replaces the file's)
      cache_tokens       prefix cache that a trace meets, tokens
      output_tokens      mean output length
      prefill_instances  instances of every prefill cluster
      pd_instances       instances of every PD cluster
    Several --over give every combination.
    """
    from deploy.plan.values import parse_over

    try:
        ranges = dict(parse_over(text) for text in over)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--over") from error
    plan_input = _load(file)
    from deploy.plan.solve.solving import SWEEPABLE, Today, sweep
    from kvmanager.config_files.problems import suggestion

    for name in ranges:
        if name not in SWEEPABLE:
            fail(f"--over {name}: unknown{suggestion(name, SWEEPABLE)}", 2)
    if plan_input.joint is not None:
        fail("plan sweep is for files without homes of requests", 2)
    spec = plan_input.spec
    today = Today(plan_input.region, spec.traffic.hit_ratio, plan_input.traffic_with_cache)
    try:
        rows = sweep(today, ranges, whole=spec.instances == "whole")
    except ValueError as error:
        fail(f"--over: {error}", 2)
    if as_json:
        print_json(rows, indent=2)
        return
    from deploy.plan.solve.tables import print_sweep

    print_sweep(Console(), list(ranges), rows)


def _load(file: Path) -> PlanInput:
    from deploy.plan.solve.building import load_plan
    from kvmanager.config_files.problems import FileError

    try:
        return load_plan(file)
    except FileError as error:
        fail(str(error), 2)
