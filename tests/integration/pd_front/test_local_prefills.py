"""Prefills inside the PD cluster; fake engines, loopback."""

import asyncio

import msgspec
import pytest
from eventually import eventually
from front_doubles import BYTES_PER_TOKEN
from pd_front_rig import PdRig, make_rig

from local_pd.errors import NoInstance
from local_pd.messages import ReserveRequest
from prfaas.engines.errors import PrefillFailed


async def test_a_local_prefill_fills_the_landing(rig: PdRig) -> None:
    slot = await rig.reserve()
    result = await rig.front.prefill_locally(rig.job_for(slot))
    assert (result.instance, result.nbytes) == ("p0", 8 * BYTES_PER_TOKEN)
    assert result.reason.startswith("least_loaded; cached_tokens=0; tokens_ahead=0")
    assert rig.engines["p0"].posted[0]["kv_transfer_params"]["prfaas"]["role"] == "producer"
    assert (await rig.front.report()).running_tokens == 0


async def test_grants_reach_the_agents(rig: PdRig) -> None:
    digest = rig.job_for(await rig.reserve()).landing.token_digest
    slot = await rig.front.reserve(
        ReserveRequest(num_tokens=8, token_digest=digest, request_id="r2", grant=b"to land")
    )
    assert rig.landing(slot).grant == b"to land"
    await rig.front.prefill_locally(msgspec.structs.replace(rig.job_for(slot), grant=b"to send"))
    assert rig.nodes[0].grants == [b"to send"]


async def test_an_instance_prefills_for_those_that_lay_kvcache_out_as_it_does(rig: PdRig) -> None:
    other = "ef" * 32
    rig.nodes[0].fingerprints = {"p0": other}

    async def fingerprints() -> dict[str, str]:
        return {i.name: i.layout_fingerprint for i in (await rig.front.report()).instances}

    await eventually(fingerprints, lambda found: found["p0"] == other)
    slot = await rig.reserve()
    with pytest.raises(PrefillFailed, match="otherwise than the landing: fake") as caught:
        await rig.front.prefill_locally(rig.job_for(slot))
    assert caught.value.code == "no_instance"
    with pytest.raises(NoInstance, match=r"d0 .* otherwise than what is prefilled: fake, d1"):
        await rig.reserve(hands_off=True)
    rig.nodes[1].fingerprint = other
    await eventually(fingerprints, lambda found: found["d1"] == other)
    assert (await rig.reserve(hands_off=True)).instance == "d1"
    slot = await rig.reserve(layouts=(other,))
    assert (slot.instance, slot.landing.layout_fingerprint) == ("d1", other)
    assert (await rig.front.prefill_locally(rig.job_for(slot))).instance == "p0"


async def test_an_engine_that_left_its_agent_leaves_the_landing_alone(rig: PdRig) -> None:
    """It is at the same agent, where ending a transfer ends both of its ends."""
    slot = await rig.reserve()
    rig.nodes[0].instances.remove("p0")
    with pytest.raises(PrefillFailed) as caught:
        await rig.front.prefill_locally(rig.job_for(slot))
    # Without an instance if a probe came first.
    assert caught.value.code in ("engine_failed", "no_instance")
    assert rig.num_landings == 1
    assert rig.nodes[0].cancelled == []


async def test_cancelling_a_local_prefill_aborts_it(rig: PdRig) -> None:
    slot = await rig.reserve()
    rig.engines["p0"].first_token.clear()
    task = asyncio.create_task(rig.front.prefill_locally(rig.job_for(slot)))
    await rig.engines["p0"].wait_requests(1)
    report = await rig.front.report()
    assert report.running_tokens == 8
    (job,) = report.jobs
    assert (job.transfer_id, job.instance) == (slot.landing.transfer_id, "p0")
    assert (job.num_tokens, job.uncached_tokens) == (8, 8)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await rig.engines["p0"].wait_aborts(1)
    await eventually(lambda: not rig.nodes[0].outboxes)
    await eventually(lambda: rig.embedded._handoff.num_tokens == 0)


async def test_a_prefill_engine_that_dies_is_a_clear_failure(rig: PdRig) -> None:
    slot = await rig.reserve()
    rig.engines["p0"].first_token.clear()
    task = asyncio.create_task(rig.front.prefill_locally(rig.job_for(slot)))
    await rig.engines["p0"].wait_requests(1)
    await rig.engines["p0"].stop()
    with pytest.raises(PrefillFailed) as caught:
        await task
    assert caught.value.code == "engine_failed"
    with pytest.raises(PrefillFailed) as caught:
        await rig.front.prefill_locally(rig.job_for(slot))
    assert caught.value.code == "no_instance"
    assert not rig.nodes[0].outboxes


async def test_an_engine_that_is_back_can_be_given_work_while_its_agent_is_still_asked() -> None:
    async with make_rig("embedded") as rig:
        instance = rig.embedded._instances.by_name["p0"]
        rig.engines["p0"].healthy = False
        await eventually(instance.gone.is_set)
        go_on = asyncio.Event()

        async def slow(method: str) -> None:
            if method == "Status":
                await go_on.wait()

        rig.nodes[0].before_reply = slow
        rig.engines["p0"].healthy = True
        await eventually(lambda: instance.transfers)
        assert not instance.gone.is_set()
        go_on.set()
        slot = await rig.reserve()
        assert (await rig.front.prefill_locally(rig.job_for(slot))).instance == "p0"


async def test_closing_ends_local_prefills(rig: PdRig) -> None:
    slot = await rig.reserve()
    rig.engines["p0"].first_token.clear()
    task = asyncio.create_task(rig.front.prefill_locally(rig.job_for(slot)))
    await rig.engines["p0"].wait_requests(1)
    await rig.front.close()
    with pytest.raises(PrefillFailed) as caught:
        await task
    assert caught.value.code == "closed"
    await eventually(lambda: not rig.nodes[0].outboxes)
