"""`prfaas demo`: the main use of a region on one machine, checked token by token."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from deploy.command_line import JsonOption
from deploy.lab.demo.run import DEFAULT_MODELS, DemoOptions, run_demo
from kvmanager.logs import set_up_logging


def demo_command(
    model: Annotated[
        list[str] | None, typer.Option(help="a tiny model to use; repeatable; default: all of them")
    ] = None,
    work_dir: Annotated[Path, typer.Option(help="models and logs go here")] = Path(".demo"),
    report: Annotated[
        Path | None, typer.Option(help="the JSON report; default WORK_DIR/report.json")
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="leave the last region running until Ctrl-C, to look at")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Build tiny hybrid models, run a region for each, and check every answer.

    A region here is a prefill cluster, a PD cluster and an emulated 1 Gbit/s, 20 ms link on this
    machine, with real vLLM on the CPU. Each answer must have the tokens of a single plain engine,
    long prompts must cross the link layer by layer while they are prefilled, and nothing may be
    left behind. Exit status 0: every check held. With --json the report is on stdout, progress on
    stderr.
    """
    set_up_logging("warning")
    names = tuple(model or DEFAULT_MODELS)
    unknown = sorted(set(names) - set(DEFAULT_MODELS))
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r} is not one of {', '.join(DEFAULT_MODELS)}")
    options = DemoOptions(
        work_dir=work_dir, models=names, report=report, as_json=as_json, keep=keep
    )
    raise typer.Exit(run_demo(options, Console(stderr=as_json)))
