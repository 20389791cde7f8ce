"""The PD cluster front's slots, reports and leases; fake engines, loopback."""

import asyncio
from dataclasses import replace

import pytest
from front_doubles import (
    BYTES_PER_TOKEN,
    FINGERPRINT,
    eventually,
    prefill_job,
)
from pd_front_rig import CONFIG, ROLES, PdRig, make_rig

from kvmanager.agent.messages import CacheModel, Reserve
from kvmanager.load_times import LoadTimes
from local_pd.errors import FrontUnreachable, NoInstance, NoLandingRoom
from local_pd.messages import DecodeSlot, DirectRequest, ReserveRequest
from local_pd.remote import RemotePdCluster
from prfaas.engines.health import ProbeTiming
from scheduler.live.long_term.conversion import RoleChange
from transport.rpc import RpcError


async def test_a_slot_names_engine_and_landing(rig: PdRig) -> None:
    slot = await rig.reserve()
    assert slot.instance == "d0"
    assert slot.engine_url == rig.engines["d0"].url
    assert slot.reason == "2 usable, least loaded first"
    assert slot.landing.nbytes == 8 * BYTES_PER_TOKEN
    assert rig.front.has_prefill_instances
    assert await rig.front.release(slot, "done") is None
    times = rig.nodes[0].load_times = LoadTimes(0.25, 0.5, 0.75)
    assert await rig.front.release(slot, "done") == times
    assert rig.num_landings == 0


async def test_a_slot_is_for_the_adapter_that_was_asked_for(rig: PdRig) -> None:
    slot = await rig.reserve(adapter="files:1")
    assert slot.landing.adapter == "files:1"


@pytest.mark.parametrize("at_once", [True, False])
async def test_slots_go_to_the_least_loaded_decoder(rig: PdRig, at_once: bool) -> None:
    if at_once:
        slots = await asyncio.gather(*(rig.reserve() for _ in range(4)))
    else:
        slots = [await rig.reserve() for _ in range(4)]
    assert sorted(slot.instance for slot in slots) == ["d0", "d0", "d1", "d1"]
    rig.engines["d0"].waiting = 3
    await eventually(lambda: rig.embedded._instances.by_name["d0"].load.num_requests == 3)
    assert (await rig.reserve()).instance == "d1"


async def test_what_a_node_has_cached_draws_requests_and_is_not_sent(rig: PdRig) -> None:
    preferred = rig.nodes[1]
    preferred.cached_tokens = 4
    keys = bytes(range(48))
    digest = prefill_job(1).landing.token_digest
    slot = await rig.front.reserve(
        ReserveRequest(
            num_tokens=8,
            token_digest=digest,
            request_id="r1",
            block_keys=keys,
            prefer_nodes=("10.0.0.9:1", preferred.target),
            tenant="blue",
        )
    )
    assert slot.instance == "d1"
    assert preferred.landings[slot.landing.transfer_id] == Reserve(
        8, CONFIG.lease_s, FINGERPRINT, token_digest=digest, tenant="blue", block_keys=keys
    )
    assert slot.landing.cached_tokens == 4
    target = await rig.front.direct(
        DirectRequest(request_id="r2", prefer_nodes=(preferred.target,))
    )
    assert target.instance == "d1"
    assert "cached" in target.reason


async def test_reports_say_where_and_how_prompts_are_cached(rig: PdRig) -> None:
    model = CacheModel("ab" * 16, 64, [(0, 4096, 0)])
    rig.nodes[0].cache_model = model

    async with asyncio.timeout(5):
        while (await rig.front.report()).instances[0].cache is None:
            await asyncio.sleep(0.01)
    reports = {item.name: item for item in (await rig.front.report()).instances}
    assert reports["d0"].cache == model
    assert reports["d0"].node == rig.nodes[0].target == reports["d0"].node_name
    assert reports["d1"].cache is None


async def test_reports_say_how_full_engines_are(rig: PdRig) -> None:
    rig.engines["d0"].waiting, rig.engines["d0"].deferred = 3, 2
    rig.engines["d0"].kv_usage, rig.engines["d0"].num_kv_blocks = 0.75, 101
    rig.nodes[0].kv_block_bytes, rig.nodes[0].landing_bytes = 4096, 1_000_000
    await eventually(lambda: rig.embedded._instances.by_name["d0"].load.num_requests == 3)
    await eventually(lambda: rig.embedded._instances.by_name["d0"].kv_block_bytes == 4096)
    reports = {item.name: item for item in (await rig.front.report()).instances}
    d0, d1 = reports["d0"], reports["d1"]
    assert (d0.running, d0.num_running, d0.decode_slots) == (3, 0, 256)
    # Two of three that wait do so for their KVCache, which no room would help.
    assert (d0.num_waiting, d1.num_waiting) == (1, 0)
    # vLLM keeps one block for itself.
    assert (d0.kv_usage, d0.kv_total_bytes) == (0.75, 100 * 4096)
    assert (d1.kv_usage, d1.kv_total_bytes) == (0.0, None)
    assert (d0.landing_cap_bytes, d1.landing_cap_bytes) == (1 << 20, 1 << 20)
    assert (d0.landing_room_bytes, d1.landing_room_bytes) == ((1 << 20) - 1_000_000, 1 << 20)
    assert 0 <= d0.looked_s < 10


async def test_a_full_node_leads_to_the_other_and_two_to_no_room(rig: PdRig) -> None:
    rig.nodes[0].landing_room = 0
    assert (await rig.reserve()).instance == "d1"
    rig.nodes[1].landing_room = 1
    with pytest.raises(NoLandingRoom, match=r"d0.*landing cap.*d1|d1.*landing cap.*d0"):
        await rig.reserve()


async def test_nodes_that_are_gone_are_said_to_be(rig: PdRig) -> None:
    for node in rig.nodes:
        await node.stop()
    with pytest.raises(FrontUnreachable, match="no landing reserved"):
        await rig.reserve()
    with pytest.raises(NoInstance, match="node agent is not healthy"):
        await rig.reserve()
    target = await rig.front.direct(DirectRequest(request_id="r1"))  # engines alone still serve
    assert target.instance in ("d0", "d1")


@pytest.mark.parametrize("kind", ["embedded", "remote"])
async def test_requests_are_spread_between_two_polls(kind: str) -> None:
    rarely = replace(
        CONFIG, instances=replace(CONFIG.instances, probes=ProbeTiming(interval_s=60.0))
    )
    async with make_rig(kind, rarely) as rig:
        targets = [await rig.front.direct(DirectRequest(request_id=f"r{n}")) for n in range(4)]
    assert sorted(target.instance for target in targets) == ["d0", "d0", "d1", "d1"]


async def test_a_request_is_served_whole_by_a_usable_engine(rig: PdRig) -> None:
    target = await rig.front.direct(DirectRequest(request_id="r0"))
    assert target.engine_url == rig.engines[target.instance].url
    left = {("d0",): {"d1"}, ("d0", "d1"): {"p0"}, tuple(ROLES): set(ROLES)}
    for exclude, instances in left.items():
        target = await rig.front.direct(DirectRequest(request_id="r5", exclude=exclude))
        assert target.instance in instances
    for engine in rig.engines.values():
        engine.healthy = False
    await eventually(lambda: not any(i.serves for i in rig.embedded._instances.by_name.values()))
    with pytest.raises(NoInstance, match="engine is not healthy"):
        await rig.front.direct(DirectRequest(request_id="r8"))


async def test_cancelling_a_reservation_leaves_no_landing(rig: PdRig) -> None:
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def pause(method: str) -> None:
        if method == "Reserve":
            asked.set()
            await go_on.wait()

    rig.nodes[0].before_reply = pause
    task = asyncio.create_task(rig.reserve())
    await asked.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    go_on.set()
    await eventually(lambda: len(rig.nodes[0].cancelled) == 1)
    assert rig.num_landings == 0


async def test_requests_count_once_and_until_they_are_over(rig: PdRig) -> None:
    async def num_requests() -> int:
        report = await rig.front.report()
        return next(item.running for item in report.instances if item.name == slot.instance)

    slot = await rig.reserve()
    load = rig.embedded._instances.by_name[slot.instance].load
    await eventually(lambda: load.num_requests == 0)  # no engine has anything to do
    assert await num_requests() == 1
    node = next(node for node in rig.nodes if slot.landing.transfer_id in node.landings)
    node.end_landing(slot.landing.transfer_id, "complete")
    # `num_requests` would depend on when the engine was polled last.
    change = load.poll_starts()
    assert (await rig.awaited(slot))[0] == "landed"
    assert load.poll_starts() == change + 1
    rig.front.request_ended(slot.instance)
    # A remote front is told in the background.
    await eventually(lambda: load.poll_starts() == change)
    rig.front.request_ended("nowhere")
    await rig.front.release(slot, "answered")


@pytest.mark.parametrize("kind", ["embedded", "remote"])
async def test_leases_are_kept_until_release(kind: str) -> None:
    async with make_rig(kind, replace(CONFIG, lease_s=0.15)) as rig:
        slot = await rig.reserve()
        await eventually(lambda: rig.nodes[0].renewals >= 3)
        await rig.front.release(slot, "done")
        renewals = rig.nodes[0].renewals
        await asyncio.sleep(0.2)
        assert rig.nodes[0].renewals <= renewals + 1


@pytest.mark.parametrize("kind", ["embedded", "remote"])
async def test_the_lease_that_the_node_grants_is_kept(kind: str) -> None:
    async with make_rig(kind) as rig:
        rig.nodes[0].max_lease_s = 0.15
        assert (await rig.reserve()).lease_s == 0.15
        await eventually(lambda: rig.nodes[0].renewals >= 3)


@pytest.mark.parametrize("kind", ["embedded", "remote"])
@pytest.mark.parametrize("trouble", ["hangs", "fails"])
async def test_a_lost_renewal_does_not_cost_the_lease(kind: str, trouble: str) -> None:
    async def spoil(method: str) -> None:
        if method == "Renew" and rig.nodes[0].renewals == 1:
            if trouble == "fails":
                raise RpcError("INTERNAL", "out of luck")
            await asyncio.sleep(60)

    async with make_rig(kind, replace(CONFIG, lease_s=3.0)) as rig:
        rig.nodes[0].before_reply = spoil
        await rig.reserve()
        async with asyncio.timeout(2.9):
            await eventually(lambda: rig.nodes[0].renewals >= 2)


async def test_a_lease_that_is_over_is_not_renewed_for_ever() -> None:
    async with make_rig("embedded", replace(CONFIG, lease_s=0.06)) as rig:
        await rig.reserve()
        rig.nodes[0].landings.clear()
        await eventually(lambda: len(rig.embedded._landings.leases) == 0)


async def test_a_remote_front_that_is_not_there_is_said_to_be() -> None:
    front = RemotePdCluster("west", "127.0.0.1:1", has_prefill_instances=False)
    with pytest.raises(FrontUnreachable, match="west"):
        await front.reserve(ReserveRequest(num_tokens=8, token_digest="00" * 32, request_id="r1"))
    with pytest.raises(FrontUnreachable, match="west"):
        await front.direct(DirectRequest(request_id="r1"))
    with pytest.raises(FrontUnreachable, match="west"):
        await front.set_role("d0", RoleChange("prefill", 1))
    landing = prefill_job(1).landing
    slot = DecodeSlot(landing=landing, instance="d0", engine_url="", lease_s=1.0)
    assert (await front.await_landing(slot, 0.1)).state == "unknown"
    report = await front.report()
    assert (report.healthy, "not reachable" in report.reason) == (False, True)
    await front.close()
