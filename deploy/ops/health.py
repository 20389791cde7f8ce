"""`prfaas health`: ask a process whether it lives or serves, as probes of containers do.

It imports only the standard library, since a probe runs every few seconds.
"""

from __future__ import annotations

import urllib.error
import urllib.request
from typing import Annotated

import typer

from transport.plain import printable

_DEFAULT_URL = "http://127.0.0.1:8000/livez"
_MAX_SHOWN_BYTES = 500


def health_command(
    url: Annotated[
        str, typer.Argument(metavar="URL", envvar="PRFAAS_HEALTH_URL", help="a page of a process")
    ] = _DEFAULT_URL,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="longest wait for the answer")] = 4.0,
) -> None:
    """Ask /livez or /readyz of a process, or /health of an engine.

    It prints the answer and exits with 0 if the status is 200, else with 1.

    \b
    prfaas health http://127.0.0.1:9100/readyz
    """
    # A proxy of the environment is for the way out, not for this host.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=timeout_s) as response:
            typer.echo(_text(response.read(_MAX_SHOWN_BYTES)) or "ok")
    except urllib.error.HTTPError as error:
        answer = _text(error.read(_MAX_SHOWN_BYTES))
        typer.echo(f"{url} answers {error.code}: {answer}", err=True)
        raise typer.Exit(1) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        typer.echo(f"{url} does not answer: {reason}", err=True)
        raise typer.Exit(1) from None


def _text(answer: bytes) -> str:
    return printable(answer.decode(errors="replace").strip(), lines=True)
