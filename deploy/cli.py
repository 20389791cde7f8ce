"""The `prfaas` command: one name for everything a user starts.

This file knows the names and one-line descriptions of the subcommands. The module of a subcommand
is imported when it runs, so that help and errors appear at once.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from deploy.command_line import EXIT_CODES, CommandFailed, fail
from deploy.help_examples import EXAMPLES
from prfaas.own_packages import PACKAGES, refuse_foreign_packages

_HELP = """Prefill-as-a-Service for vLLM: prefill in one datacenter, decode in another.

\b
prfaas region check region.yaml    is the file right?
prfaas up region.yaml              start a region on this machine
prfaas up region.yaml --node a1    start the part of it on this host
prfaas status                      what runs, what it holds
prfaas down                        stop it

`gateway`, `prefill`, `pd` and `agent` are the processes that `up` starts.
"""
_EXIT_CODES = "\b\nExit status:\n" + "\n".join(
    f"{status:>3}  {meaning}" for status, meaning in EXIT_CODES.items()
)


@dataclass(frozen=True, slots=True)
class _Entry:
    """The module of a subcommand, and its function or typer app there.

    `extra` names what `pip install` must have added for it.
    """

    module: str
    attribute: str
    summary: str
    extra: str = ""


_COMMANDS: dict[str, _Entry] = {
    "up": _Entry("deploy.region.cli", "up_command", "Start a region and keep it running."),
    "status": _Entry("deploy.region.cli", "status_command", "Show what runs and what it holds."),
    "down": _Entry("deploy.region.cli", "down_command", "Stop a region."),
    "doctor": _Entry(
        "deploy.region.doctor.cli", "doctor_app", "Measure a link; say what limits it."
    ),
    "cache": _Entry("deploy.ops.cache", "cache_app", "Show what is cached where."),
    "clusters": _Entry(
        "deploy.ops.clusters", "clusters_command", "Show clusters, their load, and thresholds."
    ),
    "requests": _Entry(
        "deploy.ops.requests", "requests_command", "Show the last requests and their TTFT."
    ),
    "explain": _Entry(
        "deploy.ops.explain", "explain_command", "Say why a request went where it did."
    ),
    "link": _Entry("deploy.ops.link", "link_app", "Show what links carry, live."),
    "health": _Entry(
        "deploy.ops.health", "health_command", "Ask one process whether it lives, for probes."
    ),
    "role": _Entry(
        "deploy.ops.role", "role_app", "Show or change which instances encode, prefill and decode."
    ),
    "instance": _Entry(
        "deploy.ops.instance", "instance_app", "Show, add or remove instances of a region."
    ),
    "gateways": _Entry("deploy.ops.clusters", "gateways_command", "Show the gateways of a region."),
    "region": _Entry(
        "deploy.region.file_cli", "region_app", "Region files: check, compare, reload, systemd."
    ),
    "certs": _Entry(
        "deploy.region.certs_cli", "certs_app", "Make the keys and certificates of a region."
    ),
    "gateway": _Entry("deploy.gateway.cli", "gateway_command", "Serve the OpenAI API.", "gateway"),
    "prefill": _Entry("prfaas.cli", "prefill_command", "Run the front of a prefill cluster."),
    "pd": _Entry("local_pd.cli", "pd_command", "Run the front of a local PD cluster."),
    "agent": _Entry(
        "kvmanager.agent.cli", "agent_command", "Run the node agent of this host.", "agent"
    ),
    "directory": _Entry(
        "kvmanager.directory.cli",
        "directory_command",
        "Keep track of what agents have cached.",
        "gateway",
    ),
    "plan": _Entry(
        "deploy.plan.cli", "plan_app", "Plan threshold, instances, link and cost.", "plan"
    ),
    "simulate": _Entry(
        "deploy.plan.simulate.cli",
        "simulate_app",
        "Play traffic through a region in virtual time.",
        "plan",
    ),
    "emulate": _Entry(
        "deploy.lab.emulator.cli", "emulate_app", "Emulate a long link and its faults."
    ),
    "demo": _Entry(
        "deploy.lab.demo.cli", "demo_command", "Run and check two regions of tiny models."
    ),
    "rehearse": _Entry(
        "deploy.lab.rehearse.cli",
        "rehearse_command",
        "Play a plan on real engines at the pace of its profiles.",
        "plan",
    ),
    "version": _Entry("deploy.cli", "version_command", "Print the version."),
}


class _LazyGroup(TyperGroup):
    """Lists the subcommands of the table above and imports only the one that is run."""

    # Contexts and commands are click's or, in newer versions of typer, those of a copy inside
    # typer.

    def __init__(self, **options: Any) -> None:
        # Help, completion and "did you mean" need only names and summaries.
        stubs = {
            name: TyperCommand(name, short_help=entry.summary) for name, entry in _COMMANDS.items()
        }
        super().__init__(**options | {"commands": stubs})

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        entry = _COMMANDS.get(name or "")
        if entry is None:
            return name, command, rest
        try:
            return name, _load(name or "", entry), rest
        except ModuleNotFoundError as error:
            _name_extra(name, error)
            raise

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except CommandFailed as error:
            fail(str(error), error.exit_status)
        except ModuleNotFoundError as error:
            _name_extra(ctx.invoked_subcommand, error)
            raise


app = typer.Typer(
    cls=_LazyGroup, help=_HELP, epilog=_EXIT_CODES, no_args_is_help=True, rich_markup_mode=None
)


def _version(wanted: bool) -> None:
    if wanted:
        version_command()
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[  # its callback does the work, before a command is required
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Print the version.")
    ] = False,
) -> None:
    pass


def version_command() -> None:
    """Print the version of prfaas."""
    try:
        typer.echo(version("prfaas"))
    except PackageNotFoundError:
        typer.echo("unknown: prfaas is not installed")


def _name_extra(command: str | None, error: ModuleNotFoundError) -> None:
    """Exit with status 1 and what to install, if the command has an extra for what is missing."""
    entry = _COMMANDS.get(command or "")
    missing = (error.name or "").partition(".")[0]
    if entry is not None and entry.extra and missing not in PACKAGES:
        fail(f"prfaas {command} needs {missing}: pip install 'prfaas[{entry.extra}]'", 1)


def _load(name: str, entry: _Entry) -> Any:
    target: typer.Typer | Callable[..., Any]
    target = getattr(importlib.import_module(entry.module), entry.attribute)
    # A command without subcommands is a function; typer makes an app of it.
    if not isinstance(target, typer.Typer):
        single = typer.Typer(add_completion=False, rich_markup_mode=None)
        single.command(name)(target)
        target = single
    command = get_command(target)
    command.name = name
    _add_examples(command, name)
    return command


def _add_examples(command: Any, words: str) -> None:
    """End the help of `command`, and of those below it, with its example."""
    for name, below in getattr(command, "commands", {}).items():
        _add_examples(below, f"{words} {name}")
    if words in EXAMPLES:
        command.epilog = f"\b\nFor example:\n{EXAMPLES[words]}"


if __name__ == "__main__":
    refuse_foreign_packages()
    app(prog_name="prfaas")
