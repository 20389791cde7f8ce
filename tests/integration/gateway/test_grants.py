"""Grants that a gateway signs for the node agents that a request needs."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from granting import grant_files

from kvmanager.agent.grants import outbox_send
from transport.grants import Granter, check_grant, load_public_keys, read_grant


async def test_a_request_lands_and_is_sent_with_grants(open_region: Any, tmp_path: Path) -> None:
    private, public = grant_files(tmp_path)
    granter = Granter(private)
    async with open_region(hand_off_tokens=20, threshold_tokens=1000, granter=granter) as region:
        region.pd.prefill = region.far
        while not region.far.jobs:  # until the gateway has heard of an instance that prefills
            status, _, _ = await region.post(region.long_body())
            assert status == 200
            await asyncio.sleep(0.01)
        ((wanted, to_land),), (job,) = region.pd.grants, region.far.jobs
    keys, now_s = load_public_keys(public), time.time()
    for asked, raw in ((wanted, to_land), (outbox_send(job.landing), job.grant)):
        check_grant(read_grant(keys, raw, asked.method), asked, region="r", now_s=now_s)
