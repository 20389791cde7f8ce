"""The ways from a prefill to a decode instance: chosen by node and setting; fake engines."""

import asyncio
from dataclasses import replace

import msgspec
import pytest
from eventually import eventually
from pd_front_rig import CONFIG, PdRig, make_rig

from kvmanager.token_ids import TokenIds
from local_pd.handoff import HandOffWay
from local_pd.messages import DecodeSlot
from prfaas.engines.errors import PrefillFailed
from prfaas.engines.prefill_run import NIXL_PRODUCER
from prfaas.jobs import PrefillJob

LAST = TokenIds.of([7])


async def near_and_far(rig: PdRig) -> tuple[DecodeSlot, DecodeSlot]:
    """A slot on the node of the prefill instance, and one on the other node."""
    near, far = await rig.reserve(hands_off=True), await rig.reserve(hands_off=True)
    assert (near.instance, far.instance) == ("d0", "d1")
    return near, far


def whole_prompt(rig: PdRig, slot: DecodeSlot) -> PrefillJob:
    return msgspec.structs.replace(rig.job_for(slot), last_token=LAST)


@pytest.mark.parametrize(
    ("way", "within", "between"),
    [
        ("auto", "arena", "transport"),
        ("transport", "transport", "transport"),
        ("nixl", "arena", "nixl"),
    ],
)
async def test_the_way_follows_from_setting_and_nodes(
    way: HandOffWay, within: str, between: str
) -> None:
    async with make_rig("remote", replace(CONFIG, hand_off=way)) as rig:
        near, far = await near_and_far(rig)
        assert near.reason.endswith("with a prefill instance beside it")
        result = await rig.front.prefill_locally(whole_prompt(rig, near))
        assert (result.hand_off, result.instance) == (within, "p0")
        assert result.reason.endswith("on the landing's node")
        result = await rig.front.prefill_locally(whole_prompt(rig, far))
        assert (result.hand_off, result.instance) == (between, "p0")
        counted = rig.embedded._metrics.hand_offs
        assert counted.labels("west", within)._value.get() >= 1
        assert counted.labels("west", between)._value.get() >= 1


async def test_kvcache_of_an_adapter_does_not_go_by_nixl() -> None:
    """NixlConnector asks nobody whether both engines have the same adapter."""
    async with make_rig("remote", replace(CONFIG, hand_off="nixl")) as rig:
        _, far = await near_and_far(rig)
        landing = msgspec.structs.replace(far.landing, adapter="files:1")
        job = msgspec.structs.replace(whole_prompt(rig, far), adapter="poet", landing=landing)
        result = await rig.front.prefill_locally(job)
        assert result.hand_off == "transport"
        (asked,) = rig.engines["p0"].posted
        assert asked["model"] == "poet"
        assert asked["kv_transfer_params"]["prfaas"]["adapter"] == "files:1"


async def test_kvcache_of_several_choices_does_not_go_by_nixl() -> None:
    """Each choice is a request that loads, and NixlConnector serves the first that reads."""
    async with make_rig("remote", replace(CONFIG, hand_off="nixl")) as rig:
        _, far = await near_and_far(rig)
        job = msgspec.structs.replace(whole_prompt(rig, far), num_choices=2)
        assert (await rig.front.prefill_locally(job)).hand_off == "transport"


@pytest.mark.parametrize(("adapter", "identity"), [("poet", ""), ("", "files:1")])
async def test_a_job_and_its_landing_agree_on_the_adapter(adapter: str, identity: str) -> None:
    async with make_rig("embedded") as rig:
        _, far = await near_and_far(rig)
        landing = msgspec.structs.replace(far.landing, adapter=identity)
        job = msgspec.structs.replace(rig.job_for(far), adapter=adapter, landing=landing)
        with pytest.raises(PrefillFailed, match="the landing was reserved for another"):
            await rig.front.prefill_locally(job)


async def test_nixl_prefills_the_whole_prompt_and_opens_no_outbox() -> None:
    async with make_rig("embedded", replace(CONFIG, hand_off="nixl")) as rig:
        _, far = await near_and_far(rig)
        job = whole_prompt(rig, far)
        result = await rig.front.prefill_locally(job)
        assert result.kv_transfer_params["do_remote_prefill"]
        assert (result.nbytes, result.cached_tokens) == (0, 3)
        (asked,) = rig.engines["p0"].posted
        assert asked["kv_transfer_params"] == NIXL_PRODUCER
        assert asked["prompt"] == [*job.prompt_token_ids.tolist(), 7]
        assert rig.nodes[0].outboxes == {}
        assert rig.nodes[0].grants == []


@pytest.mark.parametrize(
    ("keeps", "last", "code"), [(False, LAST, "engine_failed"), (True, TokenIds(), "invalid")]
)
async def test_what_nixl_cannot_hand_over_fails(keeps: bool, last: TokenIds, code: str) -> None:
    async with make_rig("embedded", replace(CONFIG, hand_off="nixl")) as rig:
        _, far = await near_and_far(rig)
        rig.engines["p0"].keeps_kvcache = keeps
        job = msgspec.structs.replace(rig.job_for(far), last_token=last)
        with pytest.raises(PrefillFailed) as caught:
            await rig.front.prefill_locally(job)
        assert caught.value.code == code


async def test_cancelling_a_nixl_prefill_aborts_it() -> None:
    async with make_rig("embedded", replace(CONFIG, hand_off="nixl")) as rig:
        _, far = await near_and_far(rig)
        rig.engines["p0"].first_token.clear()
        task = asyncio.create_task(rig.front.prefill_locally(whole_prompt(rig, far)))
        await rig.engines["p0"].wait_requests(1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await rig.engines["p0"].wait_aborts(1)
        await eventually(lambda: rig.embedded._handoff.num_tokens == 0)


async def test_an_engine_that_is_lost_in_a_nixl_prefill_is_a_clear_failure() -> None:
    async with make_rig("embedded", replace(CONFIG, hand_off="nixl")) as rig:
        _, far = await near_and_far(rig)
        rig.engines["p0"].first_token.clear()
        task = asyncio.create_task(rig.front.prefill_locally(whole_prompt(rig, far)))
        await rig.engines["p0"].wait_requests(1)
        await rig.engines["p0"].stop()
        with pytest.raises(PrefillFailed) as caught:
            await task
        assert caught.value.code == "engine_failed"
