"""`prfaas plan live`: the plan that a running gateway follows, and what it rests on."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from deploy.command_line import GatewayOption, JsonOption, KeyOption, fail


def live_command(
    gateway: GatewayOption = "",
    api_key: KeyOption = "",
    num_decisions: Annotated[
        int, typer.Option("--decisions", min=0, help="how many of the last decisions")
    ] = 10,
    as_json: JsonOption = False,
) -> None:
    """Show the plan in force: threshold and division, what was measured, the last decisions.

    Times of prefill are learnt from prefills, error is by how much the last ones were off. The best
    division is that for the traffic that was measured. Every decision says what was done, or why
    nothing was.

    \b
    prfaas plan live
    prfaas plan live --gateway http://10.0.0.5:8000 --json | jq '.decisions[0]'
    """
    from deploy.gateway.scheduling.plan_overview import PlanOverview
    from deploy.ops.client import CannotAsk, ask, find_gateway
    from deploy.region.launch.rundir import RunDirectoryError

    try:
        url = gateway or find_gateway(os.environ)
        found = ask(url, "/prfaas/plan", PlanOverview, key=api_key)
    except (CannotAsk, RunDirectoryError) as error:
        fail(str(error), 1)
    if as_json:
        import msgspec

        sys.stdout.buffer.write(msgspec.json.encode(found) + b"\n")
        return
    from rich.console import Console

    from deploy.ops.plan_view import print_plan

    print_plan(Console(), found, num_decisions=num_decisions)
