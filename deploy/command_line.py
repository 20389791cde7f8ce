"""What commands share: how they take `--json` and how they fail. Light, so that help is quick."""

from __future__ import annotations

from typing import Annotated, NoReturn

import typer

JsonOption = Annotated[bool, typer.Option("--json", help="JSON instead of tables")]


def fail(message: str, status: int) -> NoReturn:
    """Say `message` on stderr and exit."""
    typer.echo(message, err=True)
    raise typer.Exit(status)
