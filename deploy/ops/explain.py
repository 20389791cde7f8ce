"""`prfaas explain`: turns arguments into a question to a gateway, and errors into exit statuses.

What the command needs is imported by it, so that its help appears at once.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Annotated

import typer

from deploy.command_line import GatewayOption, JsonOption, KeyOption, fail


def explain_command(
    request_id: Annotated[
        str, typer.Argument(metavar="REQUEST-ID", help="x-request-id of the answer")
    ],
    gateway: GatewayOption = "",
    api_key: KeyOption = "",
    as_json: JsonOption = False,
) -> None:
    """Say why a request went where it did, and how it went beside what was predicted.

    The columns local and remote hold what was predicted of both sides when the request came,
    measured what became of the one that was taken, error predicted over measured less 1.

    \b
    prfaas explain 8f14e45fceea167a5a36dedd4bea2543
    prfaas explain my-id --gateway http://10.0.0.5:8000 --json | jq '.requests[0].reason'
    """
    import msgspec
    from rich.console import Console

    from deploy.ops.client import CannotAsk, find_gateway
    from deploy.ops.explain_client import find_records
    from deploy.ops.explain_view import print_records
    from deploy.region.launch.rundir import RunDirectoryError

    try:
        found = find_records(gateway or find_gateway(os.environ), request_id, key=api_key)
    except (CannotAsk, RunDirectoryError) as error:
        fail(str(error), 1)
    if as_json:
        sys.stdout.buffer.write(msgspec.json.encode(found) + b"\n")
    else:
        print_records(Console(), found.requests, time.time())
