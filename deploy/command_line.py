"""Options, output as JSON and failures that all commands share.

Imports little, so that help is quick.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

JsonOption = Annotated[bool, typer.Option("--json", help="JSON instead of tables")]
GatewayOption = Annotated[
    str, typer.Option(metavar="URL", help="the region's gateway; default: the one that runs here")
]
RunDirOption = Annotated[
    Path | None, typer.Option(help="directory of the run; default: ~/.local/state/prfaas/NAME")
]
KeyOption = Annotated[
    str, typer.Option(envvar="PRFAAS_API_KEY", help="API key, where the gateway asks for one")
]


class CommandFailed(Exception):
    """Ends the command that raises it: `prfaas` prints the message and exits with status 1."""

    exit_status = 1


def fail(message: str, status: int) -> NoReturn:
    """Say `message` on stderr and exit."""
    typer.echo(message, err=True)
    raise typer.Exit(status)


def check_plot(path: Path, *endings: str) -> None:
    """Exit with status 2 where `--plot` names no file that can be written; for commands that take a
    while until they write it.
    """
    if path.suffix not in endings:
        *others, last = endings
        fail(f"--plot {path}: the name must end in {', '.join(others)} or {last}", 2)
    if not path.parent.is_dir():
        fail(f"--plot {path}: there is no directory {path.parent}", 2)


def print_json(value: object, *, indent: int = -1) -> None:
    """JSON on stdout: one line, or with `indent` a line for each value. Structs and dataclasses are
    objects, a number that is not finite is null.
    """
    import msgspec

    # numpy's numbers are none of msgspec's.
    encoded = msgspec.json.encode(value, enc_hook=float)
    sys.stdout.buffer.write(msgspec.json.format(encoded, indent=indent) + b"\n")
    sys.stdout.buffer.flush()


def command_group(summary: str) -> typer.Typer:
    """An app for the commands below one name, which shows its help when none of them is given."""
    group = typer.Typer(
        no_args_is_help=True, rich_markup_mode=None, add_completion=False, help=summary
    )
    # With a callback, typer keeps the command's name also where there is only one.
    group.callback()(lambda: None)
    return group
