"""`GET /prfaas/plan` over HTTP, and its command."""

import asyncio
from typing import Any

from typer.testing import CliRunner

from deploy.cli import app
from deploy.gateway.scheduling.config import LongTermSection, SchedulingConfig


async def test_the_plan_of_a_running_gateway(open_region: Any) -> None:
    scheduling = SchedulingConfig(long_term=LongTermSection(mode="advise"))
    async with open_region(scheduling=scheduling) as region:
        await region.post(region.long_body())
        async with region.session.get(region.url + "/prfaas/plan") as response:
            assert response.status == 200
            found = await response.json()
        assert found["mode"] == "advise"
        assert 0 < found["next_step_s"] <= found["period_s"]
        assert found["thresholds"].keys() == {"far"}
        assert found["decisions"] == []
        command = ["plan", "live", "--gateway", region.url]
        shown = await asyncio.to_thread(CliRunner().invoke, app, command)
        assert shown.exit_code == 0
        assert "planned threshold of far, tokens" in shown.output
        async with region.session.get(region.url + "/metrics") as response:
            assert (
                'prfaas_plan_threshold_tokens{source="far",target="home"}' in await response.text()
            )


async def test_the_plan_is_protected_where_there_are_keys(open_region: Any) -> None:
    async with open_region(api_keys=("one",)) as region:
        async with region.session.get(region.url + "/prfaas/plan") as response:
            assert response.status == 401
