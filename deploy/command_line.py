"""Options, JSON output and failures that all commands share.

It imports little, so that help appears quickly.
"""

from __future__ import annotations

import sys
from enum import IntEnum
from pathlib import Path
from typing import Annotated, Final, NoReturn
from urllib.parse import urlsplit

import typer


def _checked_url(value: str) -> str:
    """The gateway's URL as it was given. Raises `typer.BadParameter`, whose exit status is 2."""
    if not value:
        return value
    try:
        found = urlsplit(value)
        is_url = found.scheme in ("http", "https") and bool(found.hostname) and found.port != 0
    except ValueError:
        # A port that is no number, or brackets without an address.
        is_url = False
    if not is_url:
        raise typer.BadParameter(f"{value!r} is no URL like http://10.0.0.5:8000")
    return value


JsonOption = Annotated[bool, typer.Option("--json", help="JSON instead of tables")]
GatewayOption = Annotated[
    str,
    typer.Option(
        metavar="URL",
        callback=_checked_url,
        help="the region's gateway; default: the one that runs here",
    ),
]
RunDirOption = Annotated[
    Path | None, typer.Option(help="directory of the run; default: ~/.local/state/prfaas/NAME")
]
KeyOption = Annotated[
    str, typer.Option(envvar="PRFAAS_API_KEY", help="API key, where the gateway asks for one")
]


class ExitCode(IntEnum):
    """Every exit status of `prfaas`. docs/command-line.md has the same table."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    UNREACHABLE = 3
    REFUSED = 4
    INTERRUPTED = 130


EXIT_CODES: Final = {
    ExitCode.DONE: "done; Ctrl-C also ends `--watch`, `link top` and what serves like this",
    ExitCode.FAILED: "it failed, or found that something is wrong; the message says what",
    ExitCode.USAGE: "wrong arguments or a wrong file; nothing was done",
    ExitCode.UNREACHABLE: "the gateway does not answer; the message has its address",
    ExitCode.REFUSED: "the gateway refuses the key, or asks for one",
    ExitCode.INTERRUPTED: "Ctrl-C before it was done",
}
"""The meaning of each, for people."""


class CommandFailed(Exception):
    """Ends the command that raises it: `prfaas` prints the message and exits with the status."""

    exit_status: int = ExitCode.FAILED


def fail(message: str, status: int) -> NoReturn:
    """Print `message` on stderr and exit."""
    typer.echo(message, err=True)
    raise typer.Exit(status)


def check_plot(path: Path, *endings: str, option: str = "--plot") -> None:
    """Exit with status 2 if `--plot`, or another option, names no file that can be written.

    It is for commands that run for a while before they write the file.
    """
    if path.suffix not in endings:
        *others, last = endings
        fail(f"{option} {path}: the name must end in {', '.join(others)} or {last}", 2)
    if not path.parent.is_dir():
        fail(f"{option} {path}: there is no directory {path.parent}", 2)


def print_json(value: object, *, indent: int = -1) -> None:
    """Print JSON on stdout: one line, or with `indent` one line per value.

    Structs and dataclasses become objects; a number that is not finite becomes null.
    """
    # Imported here: help needs no JSON.
    import msgspec

    # msgspec does not know numpy's numbers.
    encoded = msgspec.json.encode(value, enc_hook=float)
    sys.stdout.buffer.write(msgspec.json.format(encoded, indent=indent) + b"\n")
    sys.stdout.buffer.flush()


def command_group(summary: str) -> typer.Typer:
    """An app for the commands below one name. It shows its help when none of them is given."""
    group = typer.Typer(
        no_args_is_help=True, rich_markup_mode=None, add_completion=False, help=summary
    )
    # With a callback, typer keeps the command's name even if it is the only one.
    group.callback()(lambda: None)
    return group
