"""What commands share: common options and how they fail. Light, so that help is quick."""

from __future__ import annotations

from typing import Annotated, NoReturn

import typer

JsonOption = Annotated[bool, typer.Option("--json", help="JSON instead of tables")]
GatewayOption = Annotated[
    str, typer.Option(metavar="URL", help="the region's gateway; default: the one that runs here")
]
KeyOption = Annotated[
    str, typer.Option(envvar="PRFAAS_API_KEY", help="API key, where the gateway asks for one")
]


def fail(message: str, status: int) -> NoReturn:
    """Say `message` on stderr and exit."""
    typer.echo(message, err=True)
    raise typer.Exit(status)
