"""The decode request is posted when its KVCache has landed, or when nothing will."""

import asyncio
import json
from typing import Any

import pytest

from local_pd.messages import LandingReport
from prfaas.engines.errors import PrefillFailed


async def waiting_for_landing(region: Any, **fields: Any) -> tuple[asyncio.Task[Any], str]:
    """A request whose prefill leg hangs, and the id of the landing it waits for."""
    for cluster in region.prefill.values():
        cluster.gate.clear()
    asking = asyncio.create_task(region.post(region.long_body(**fields)))
    await region.until(lambda: len(region.pd.awaiting) == 1)
    (transfer_id,) = region.pd.awaiting
    return asking, transfer_id


@pytest.mark.parametrize("stream", [False, True])
async def test_the_engine_sees_nothing_before_the_kvcache_has_landed(
    region: Any, stream: bool
) -> None:
    asking, transfer_id = await waiting_for_landing(region, stream=stream)
    await region.heard()
    assert region.engine.bodies() == []
    region.far.gate.set()
    status, headers, _ = await asking
    assert status == 200
    assert headers["x-prfaas-route"] == "prefill_cluster"
    (body,) = region.engine.bodies()
    assert json.loads(body)["kv_transfer_params"]["prfaas"]["transfer_id"] == transfer_id
    assert region.engine.sources == ["landing"]
    record = await region.record()
    assert 0 < record.landing_wait_s <= record.ttft_s
    await region.assert_nothing_held()


async def test_a_landing_may_take_longer_than_one_call(open_region: Any) -> None:
    async with open_region(timeouts={"cluster_s": 0.1}) as region:
        asking, _ = await waiting_for_landing(region)
        await asyncio.sleep(0.35)
        assert region.engine.bodies() == []
        region.far.gate.set()
        assert (await asking)[0] == 200
        assert region.engine.sources == ["landing"]
        await region.assert_nothing_held()


async def test_the_leg_may_know_of_the_landing_first(region: Any) -> None:
    region.pd.reports_landings = False
    status, headers, _ = await region.post(region.long_body())
    assert status == 200
    assert headers["x-prfaas-transfer-bytes"] == str(299 * 512)
    assert region.engine.sources == ["landing"]
    await region.assert_nothing_held()


async def test_a_leg_that_fails_leaves_the_prompt_to_the_engine(region: Any) -> None:
    region.far.error = PrefillFailed("engine_failed", "killed")
    asking, transfer_id = await waiting_for_landing(region)
    region.far.gate.set()
    status, headers, _ = await asking
    assert status == 200
    assert headers["x-prfaas-reason"].startswith("prefill_failed")
    (body,) = region.engine.bodies()
    assert json.loads(body) == region.long_body()
    await region.assert_nothing_held()
    assert region.pd.released == [transfer_id]


def tokens_ahead(region: Any) -> int:
    """Of a prompt that one engine would compute now."""
    given = region.gateway.scheduler.live.ledger.direct().values()
    return sum(prompt.uncached_tokens for prompts in given for prompt in prompts)


@pytest.mark.parametrize("agent_is_gone", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_prompts_that_fall_to_the_engine_are_work_ahead_of_others(
    region: Any, agent_is_gone: bool, stream: bool
) -> None:
    region.pd.agent_is_gone = agent_is_gone
    region.far.error = PrefillFailed("engine_failed", "killed")
    region.far.gate.clear()
    region.engine.first_token.clear()
    asking = [
        asyncio.create_task(region.post(region.long_body(stream=stream, seed=number)))
        for number in range(4)
    ]
    await region.until(lambda: len(region.far.jobs) == 4)
    assert tokens_ahead(region) == 0
    region.far.gate.set()
    await region.until(lambda: len(region.engine.sources) == 4)
    assert tokens_ahead(region) == 4 * 300
    region.engine.first_token.set()
    assert {status for status, _, _ in await asyncio.gather(*asking)} == {200}
    assert tokens_ahead(region) == 0
    assert len(region.gateway.scheduler.live.ledger) == 0
    await region.assert_nothing_held()


async def test_a_leg_that_fails_after_the_landing_does_not_matter(open_region: Any) -> None:
    async with open_region(prefill=("a", "b")) as region:
        leg = region.prefill["a"]
        leg.late_error = PrefillFailed("agent_failed", "lost sight of the transfer")
        leg.report_gate.clear()
        region.engine.first_token.clear()
        asking = asyncio.create_task(region.post(region.long_body()))
        await region.until(lambda: region.engine.sources == ["landing"])
        leg.report_gate.set()
        await region.until(lambda: leg.num_running == 0)
        region.engine.first_token.set()
        status, headers, _ = await asking
        assert status == 200
        assert headers["x-prfaas-route"] == "prefill_cluster"
        record = await region.record()
        assert (record.target, record.num_retries) == ("a", 0)
        assert "lost sight" in record.prefill_error
        await region.assert_nothing_held()


async def test_an_agent_that_goes_away_leaves_it_to_the_engine(region: Any) -> None:
    asking, transfer_id = await waiting_for_landing(region)
    region.pd.landings[transfer_id].set_result(LandingReport(state="unknown", error="killed"))
    await region.until(lambda: transfer_id in region.engine.landings)
    assert region.far.num_running == 1
    region.far.gate.set()
    status, headers, _ = await asking
    assert status == 200
    assert headers["x-prfaas-route"] == "prefill_cluster"
    assert region.engine.sources == ["landing"]
    await region.assert_nothing_held()


async def test_a_leg_that_fails_while_the_engine_waits_gives_the_landing_back(region: Any) -> None:
    region.pd.agent_is_gone = True
    region.far.error = PrefillFailed("engine_failed", "killed")
    region.far.gate.clear()
    asking = asyncio.create_task(region.post(region.long_body()))
    await region.until(lambda: len(region.engine.landings) == 1)
    region.far.gate.set()
    status, headers, _ = await asking
    assert status == 200
    assert headers["x-prfaas-reason"].startswith("prefill_failed")
    assert region.engine.sources == ["recomputed"]
    await region.assert_nothing_held()


async def test_a_leg_that_fails_while_the_engine_waits_may_be_replaced(open_region: Any) -> None:
    async with open_region(prefill=("a", "b")) as region:
        region.pd.agent_is_gone = True
        region.prefill["a"].error = PrefillFailed("engine_failed", "killed")
        region.prefill["a"].gate.clear()
        asking = asyncio.create_task(region.post(region.long_body()))
        await region.until(lambda: len(region.engine.landings) == 1)
        region.prefill["a"].gate.set()
        status, _, _ = await asking
        assert status == 200
        assert (await region.record()).target == "b"
        assert len(region.engine.bodies()) == 2
        await region.assert_nothing_held()


@pytest.mark.parametrize("error", [None, PrefillFailed("engine_failed", "out of memory")])
async def test_a_failed_landing_gives_the_leg_a_moment_to_say_why(
    open_region: Any, error: PrefillFailed | None
) -> None:
    grace_s = 0.1 if error is None else 30.0
    async with open_region(timeouts={"result_grace_s": grace_s}) as region:
        region.far.error = error
        asking, transfer_id = await waiting_for_landing(region)
        region.pd.end_landing(transfer_id, "failed", "expired: lease")
        if error is not None:
            region.far.gate.set()
        status, headers, _ = await asyncio.wait_for(asking, 5)
        assert status == 200
        assert headers["x-prfaas-reason"].startswith("prefill_failed")
        assert json.loads(region.engine.bodies()[0]) == region.long_body()
        assert region.far.num_cancelled == (error is None)
        expected = error or PrefillFailed("transfer_failed", "landing expired: lease")
        assert (await region.record()).prefill_error == str(expected)
        async with region.session.get(region.url + "/metrics") as response:
            counted = f'failures_total{{code="{expected.code}",target="far"}} 1.0'
            assert counted in await response.text()
        await region.assert_nothing_held()


async def test_a_failed_landing_of_a_hung_leg_goes_to_another_cluster(open_region: Any) -> None:
    async with open_region(prefill=("a", "b"), timeouts={"result_grace_s": 0.1}) as region:
        asking, transfer_id = await waiting_for_landing(region)
        region.pd.end_landing(transfer_id, "failed", "checksum")
        region.prefill["b"].gate.set()
        status, headers, _ = await asking
        assert status == 200
        assert headers["x-prfaas-route"] == "prefill_cluster"
        assert (await region.record()).target == "b"
        assert region.prefill["a"].num_cancelled == 1
        await region.assert_nothing_held()


async def test_nothing_landing_for_too_long_is_504(open_region: Any) -> None:
    async with open_region(timeouts={"engine_silence_s": 0.2}) as region:
        asking, _ = await waiting_for_landing(region)
        status, _, answer = await asking
        assert status == 504
        assert json.loads(answer)["error"]["code"] == "engine_timeout"
        assert region.engine.bodies() == []
        await region.assert_nothing_held()
        assert region.far.num_cancelled == 1
