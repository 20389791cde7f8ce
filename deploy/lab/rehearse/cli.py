"""`prfaas rehearse`: a plan on real engines at the pace of its profiles.

It reads options and prints. A command imports what is slow to import when it runs.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.command_line import ExitCode, JsonOption, check_plot, fail, print_json

if TYPE_CHECKING:
    from deploy.lab.rehearse.report import Played
    from deploy.lab.rehearse.traffic import Prompts, Wanted


def _print_example(wanted: bool) -> None:
    if wanted:
        file = Path(__file__).parent / "examples" / "rehearsal.yaml"
        typer.echo(file.read_text(), nl=False)
        raise typer.Exit


def rehearse_command(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="plan or simulation file, or region.yaml"),
    ] = None,
    example: Annotated[
        bool,
        typer.Option(
            "--example", is_eager=True, callback=_print_example, help="print a file to start from"
        ),
    ] = False,
    compare: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME|FILE",
            help="then the same requests for: homogeneous, a policy of the file, another file",
        ),
    ] = None,
    load: Annotated[
        float | None, typer.Option(min=0.01, help="requests/s as a share of the plan's highest")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(min=1e-6, help="requests/s, in the plan's time")
    ] = None,
    clients: Annotated[
        int | None,
        typer.Option(min=1, help="a backlog: so many clients, each asks again when answered"),
    ] = None,
    requests: Annotated[int | None, typer.Option(min=2, help="end after so many")] = None,
    duration: Annotated[
        str | None, typer.Option(help="how long requests arrive, in the plan's time: 5min")
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="play a region once more if it was void")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="of arrivals, lengths and tokens")] = 1,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="for a region.yaml: a trace, as `simulate` takes it"),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(help="for a region.yaml: prompts, equally frequent, such as 2k,8k,60k"),
    ] = None,
    output_tokens: Annotated[
        int, typer.Option(min=1, help="with --lengths: tokens of an answer")
    ] = 1024,
    as_json: JsonOption = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="TTFT live and simulated; .png or .svg")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="one file to hand on; .html or .md")
    ] = None,
    keep: Annotated[
        Path | None, typer.Option(metavar="DIR", help="raw results: requests, passes, logs")
    ] = None,
) -> None:
    """Play a plan on real engines here, each as slow as its profile says.

    \b
    prfaas rehearse --example > rehearsal.yaml
    prfaas rehearse rehearsal.yaml --requests 100
    prfaas rehearse rehearsal.yaml --compare homogeneous --load 0.7 --report rehearsal.html
    prfaas rehearse rehearsal.yaml --clients 80 --duration 10min    # a backlog: the highest rate
    prfaas rehearse region.yaml --lengths 2k,8k,60k --rate 0.8      # paced instances of your own

    The region has the planner's best division and threshold for exactly this plan, or those of the
    file's policy. Engines are vLLM on the CPU; KVCache of a tiny model really moves through
    connector, agents and an emulated link. One real token stands for several of the plan. Results
    are in the plan's units: plan, simulated and live columns for the same arrivals.

    \b
    Exit status 1: it is void (engines did not keep their pace, or the machine was too busy: raise
    rehearsal.slowdown), or a request failed. 130: Ctrl-C, after the region ended.
    """
    if file is None:
        fail("give a FILE; `prfaas rehearse --example` prints one", ExitCode.USAGE)
    if plot is not None:
        check_plot(plot, ".png", ".svg")
    if report is not None:
        check_plot(report, ".html", ".md", option="--report")
    from deploy.lab.rehearse.traffic import Wanted

    wanted = Wanted(
        load=load,
        rate_rps=rate,
        num_clients=clients,
        num_requests=requests,
        duration_s=_seconds(duration),
        seed=seed,
        prompts=_prompts(trace, lengths, output_tokens),
    )
    _check(wanted)
    played = _played(file, compare or [], wanted, keep, again)
    _write(played, seed, as_json, plot, report)
    if not all(one.is_good for one in played):
        raise typer.Exit(ExitCode.FAILED)


def _seconds(text: str | None) -> float | None:
    from kvmanager.config_files.units import parse_duration

    try:
        found = None if text is None else parse_duration(text)
    except ValueError as error:
        raise typer.BadParameter(f"--duration: {error}") from error
    if found is not None and found <= 0:
        raise typer.BadParameter(f"--duration {text}: it must be above 0")
    return found


def _prompts(trace: Path | None, lengths: str | None, output_tokens: int) -> Prompts | None:
    """What arrives in a region.yaml; None if it is not said."""
    from deploy.lab.rehearse.traffic import Prompts
    from deploy.plan.trace import load_trace
    from kvmanager.config_files.problems import FileError
    from kvmanager.config_files.units import parse_tokens

    if trace is not None and lengths is not None:
        fail("give --trace or --lengths", ExitCode.USAGE)
    try:
        if trace is not None:
            return Prompts(traced=load_trace(trace))
        if lengths is not None:
            tokens = [parse_tokens(text) for text in lengths.split(",")]
            return Prompts(lengths=tokens, output_tokens=output_tokens)
    except (FileError, ValueError) as error:
        fail(str(error), ExitCode.USAGE)
    return None


def _check(wanted: Wanted) -> None:
    """Exit with status 2 for options that contradict each other."""
    given = [wanted.load is not None, wanted.rate_rps is not None, wanted.num_clients is not None]
    if sum(given) > 1:
        fail("give one of --load, --rate and --clients", ExitCode.USAGE)
    if wanted.num_requests is not None and wanted.duration_s is not None:
        fail("give --requests or --duration", ExitCode.USAGE)
    if wanted.num_requests is not None and wanted.num_clients is not None:
        fail("--clients ask for a --duration, not for --requests", ExitCode.USAGE)


def _played(
    file: Path, compare: list[str], wanted: Wanted, keep: Path | None, again: bool
) -> list[Played]:
    from rich.console import Console

    from deploy.lab.rehearse.command import Interrupted, play_all
    from deploy.region.launch.running import RegionStartFailed
    from kvmanager.config_files.problems import FileError
    from kvmanager.logs import set_up_logging

    set_up_logging("warning")
    try:
        return play_all(file, compare, wanted, keep, Console(stderr=True), again=again)
    except FileError as error:
        fail(str(error), ExitCode.USAGE)
    except ValueError as error:
        fail(f"{file}: {error}", ExitCode.USAGE)
    except RegionStartFailed as error:
        fail(str(error), ExitCode.FAILED)
    except Interrupted:
        raise typer.Exit(ExitCode.INTERRUPTED) from None


def _write(
    played: list[Played], seed: int, as_json: bool, plot: Path | None, report: Path | None
) -> None:
    from rich.console import Console

    from deploy.lab.rehearse.report import document_of, print_played, write_report

    if as_json:
        print_json(document_of(played, seed), indent=2)
    else:
        print_played(Console(), played)
    if plot is not None:
        from deploy.lab.rehearse.plots import write_plots

        write_plots(plot, played)
        typer.echo(f"wrote {plot}", err=True)
    if report is not None:
        picture = ""
        if report.suffix == ".html":
            from deploy.lab.rehearse.plots import as_svg

            picture = as_svg(played)
        command = shlex.join(["prfaas", *sys.argv[1:]])
        write_report(report, played, command, picture)
        typer.echo(f"wrote {report}", err=True)
