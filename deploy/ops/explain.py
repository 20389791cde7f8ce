"""`prfaas explain`: asks a gateway for the records of one request.

Their type and view are imported when the command runs, so that its help appears at once.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Final
from urllib.parse import quote

import typer
from rich.console import Console

from deploy.command_line import GatewayOption, JsonOption, KeyOption, RunDirOption, print_json
from deploy.region import client

if TYPE_CHECKING:
    from deploy.gateway.serving.records import RequestRecord

_NUM_NEWEST: Final = 10


def explain_command(
    request_id: Annotated[
        str, typer.Argument(metavar="REQUEST-ID", help="x-request-id of the answer")
    ],
    gateway: GatewayOption = "",
    run_dir: RunDirOption = None,
    api_key: KeyOption = "",
    as_json: JsonOption = False,
    timeline: Annotated[
        bool, typer.Option("--timeline", help="Draw the parts of its TTFT on one time axis.")
    ] = False,
) -> None:
    """Say why a request took its route, and compare its times with the predicted ones.

    The columns local and remote show what was predicted for each side when the request came. The
    column measured shows the side that was taken; error is predicted / measured - 1.

    \b
    prfaas explain 8f14e45fceea167a5a36dedd4bea2543
    prfaas explain 8f14e45fceea167a5a36dedd4bea2543 --timeline
    prfaas explain my-id --gateway http://10.0.0.5:8000 --json | jq '.requests[0].reason'
    """
    url, key = client.find_pages(gateway, run_dir, api_key)
    found = find_records(url, request_id, key=key)
    if timeline:
        from deploy.ops.timeline import print_timelines, timeline_of

        if as_json:
            print_json({"timelines": [timeline_of(record) for record in found]})
        else:
            print_timelines(Console(), found)
        return
    if as_json:
        print_json({"requests": found})
        return
    from deploy.ops.explain_view import print_records

    print_records(Console(), found, time.time())


def find_records(url: str, request_id: str, *, key: str = "") -> list[RequestRecord]:
    """All records of this id, newest first.

    Raises `client.CannotAsk`, which names the newest ids if the gateway has no record of this id.
    """
    try:
        # All of it is quoted: what a user types must not become another path or a query.
        return _records(url, f"/{quote(request_id, safe='')}", key)
    except client.CannotAsk as error:
        if error.status != 404:
            raise
    # The gateway forgets old records, so ids that it still knows are named.
    newest = _records(url, f"?limit={_NUM_NEWEST}", key)
    raise client.CannotAsk(f"{url} has no record of {request_id}; {_known(newest)}", 404)


def _records(url: str, which: str, key: str) -> list[RequestRecord]:
    from deploy.gateway.serving.records import RequestRecord

    answer = client.ask(url, f"/prfaas/requests{which}", dict[str, list[RequestRecord]], key=key)
    return answer["requests"]


def _known(newest: list[RequestRecord]) -> str:
    if not newest:
        return "it has served no request yet"
    ids = "".join(f"\n  {record.request_id}" for record in newest)
    return f"it keeps only the latest. The id is the answer's x-request-id; the newest are:{ids}"
