"""A gateway that records: what it decided for real requests is decided again, number by number."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from deploy.plan.simulate.recording import document_of, play_recordings

LIMITS = {"admission": {"default_tenant": {"max_requests": 1}}}


async def test_a_recorded_day_is_decided_again(open_region: Any, tmp_path: Path) -> None:
    recorder = {"dir": tmp_path / "flight", "keep": "64MiB"}
    async with open_region(recorder=recorder, scheduling=LIMITS) as region:
        for seed in range(8):
            await region.post(region.long_body(seed=seed))
            await region.post({"model": "tiny", "prompt": "secret words", "stream": True})
        region.far.started.clear()
        region.far.gate.clear()
        served = asyncio.create_task(region.post(region.long_body()))
        await region.far.started.wait()
        assert (await region.post(region.long_body()))[0] == 429
        region.far.gate.set()
        assert (await served)[0] == 200
        async with region.session.get(region.url + "/prfaas/scheduling") as response:
            assert response.status == 200
        async with region.session.get(region.url + "/metrics") as response:
            metrics = await response.text()
    assert "prfaas_gateway_recorder_lost_events_total 0.0" in metrics
    found = document_of(*play_recordings(tmp_path / "flight"))
    assert found["differences"] == []
    assert found["is_complete"]
    assert found["decisions"] >= 2 * 18
    outcomes = {(row["decision"], row["outcome"]) for row in found["outcomes"]}
    assert ("TenantAsked", "refused (tenant_requests)") in outcomes
    assert ("RouteAsked", "far (above_threshold)") in outcomes
    for path in (tmp_path / "flight").iterdir():
        assert b"secret" not in path.read_bytes()
