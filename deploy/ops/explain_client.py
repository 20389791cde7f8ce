"""Asks a gateway for the records of one request. Prints nothing."""

from __future__ import annotations

from typing import Final
from urllib.parse import quote

import msgspec

from deploy.gateway.serving.records import RequestRecord
from deploy.ops.client import CannotAsk, ask

_NUM_NEWEST: Final = 10


class Records(msgspec.Struct):
    """What a gateway answers: records, newest first."""

    requests: list[RequestRecord]


def find_records(url: str, request_id: str, *, key: str = "") -> Records:
    """All records of this id, newest first. Raises `CannotAsk`, which names the newest ids when
    the gateway has no record of this one.
    """
    try:
        return ask(url, f"/prfaas/requests/{quote(request_id, safe='')}", Records, key=key)
    except CannotAsk as error:
        if error.status != 404:
            raise
    newest = ask(url, f"/prfaas/requests?limit={_NUM_NEWEST}", Records, key=key).requests
    raise CannotAsk(f"{url} has no record of {request_id}; {_known(newest)}", 404)


def _known(newest: list[RequestRecord]) -> str:
    if not newest:
        return "it has served no request yet"
    ids = "".join(f"\n  {record.request_id}" for record in newest)
    return f"it keeps the latest only. The id is the answer's x-request-id; the newest are:{ids}"
