"""Draining and roles at the PD cluster front; fake engines, loopback."""

import asyncio
from dataclasses import replace

import pytest
from eventually import eventually
from front_doubles import looked_at
from pd_front_rig import CONFIG, PdRig, make_rig

from local_pd.errors import NoInstance, RoleRefused
from local_pd.messages import DirectRequest
from local_pd.remote import RemotePdCluster
from local_pd.server import SERVICE
from prfaas.engines.errors import UnknownInstance
from scheduler.live.long_term.conversion import RoleChange, RoleStatus
from transport.rpc import RpcServer


async def test_draining_waits_for_the_engine_and_takes_nothing_new(rig: PdRig) -> None:
    rig.engines["d0"].waiting = 1
    await eventually(lambda: rig.embedded._instances.by_name["d0"].load.num_requests == 1)
    draining = asyncio.create_task(rig.front.drain("d0"))
    await eventually(lambda: rig.embedded._instances.by_name["d0"].draining)
    assert {(await rig.reserve()).instance for _ in range(3)} == {"d1"}
    assert not draining.done()
    rig.engines["d0"].waiting = 0
    await draining
    assert [item.draining for item in (await rig.front.report()).instances] == [True, False, False]
    await rig.front.resume("d0")
    assert (await rig.reserve()).instance == "d0"
    with pytest.raises(UnknownInstance, match="d9"):
        await rig.front.drain("d9")


async def test_draining_waits_for_slots_that_are_held(rig: PdRig) -> None:
    slot = await rig.reserve()
    load = rig.embedded._instances.by_name["d0"].load
    await eventually(lambda: load.num_requests == 0)  # nothing but the slot says that work comes
    draining = asyncio.create_task(rig.front.drain("d0"))
    await eventually(lambda: rig.embedded._instances.by_name["d0"].draining)
    await looked_at(rig.engines["d0"])
    assert not draining.done()
    await rig.front.release(slot, "answered")
    async with asyncio.timeout(5):
        await draining


@pytest.mark.parametrize("dies", [False, True])
async def test_an_instance_that_was_left_drained_is_given_work_again(dies: bool) -> None:
    """Whoever drained it was killed: neither `resume` nor anything else comes."""
    instances = replace(CONFIG.instances, drained_hold_s=1.0)
    async with make_rig("remote", replace(CONFIG, instances=instances)) as rig:
        instance = rig.embedded._instances.by_name["d0"]
        rig.engines["d0"].waiting = 1
        await eventually(lambda: instance.load.num_requests == 1)
        draining = asyncio.create_task(rig.front.drain("d0"))
        await eventually(lambda: instance.draining)
        await asyncio.sleep(1.2)
        assert instance.draining  # it still has something to do
        if dies:
            rig.engines["d0"].healthy = False
        else:
            rig.engines["d0"].waiting = 0
        await asyncio.gather(draining, return_exceptions=True)
        assert isinstance(draining.exception(), NoInstance) is dies
        await eventually(lambda: not instance.draining)


async def test_whoever_resumes_or_drains_again_is_not_overruled() -> None:
    async with make_rig("remote") as rig:
        holds = rig.embedded._instances._holds
        instance = rig.embedded._instances.by_name["d0"]
        await rig.front.drain("d0")
        ends = [holds["d0"]]
        await rig.front.resume("d0")
        assert ends[0].cancelled()
        assert holds == {}
        await rig.front.drain("d0")
        ends.append(holds["d0"])
        rig.engines["d0"].waiting = 1
        await eventually(lambda: instance.load.num_requests == 1)
        draining = asyncio.create_task(rig.front.drain("d0"))
        await eventually(ends[1].cancelled)
        assert holds == {}
        rig.engines["d0"].waiting = 0
        await draining
        assert not holds["d0"].cancelled()
        assert instance.draining


async def test_an_engine_that_dies_is_not_drained(rig: PdRig) -> None:
    """Nobody can tell what became of its requests."""
    instance = rig.embedded._instances.by_name["d0"]
    rig.engines["d0"].waiting = 1
    await eventually(lambda: instance.load.num_requests == 1)
    draining = asyncio.create_task(rig.front.drain("d0"))
    await eventually(lambda: instance.draining)
    rig.engines["d0"].healthy = False
    async with asyncio.timeout(5):
        with pytest.raises(NoInstance, match="d0 is not drained but gone: engine: "):
            await draining
    assert instance.draining
    await rig.front.resume("d0")
    assert not instance.draining


async def test_an_engine_that_drains_serves_what_no_other_can(rig: PdRig) -> None:
    for instance in rig.embedded._instances.by_name.values():
        instance.draining = True
    assert (await rig.front.report()).healthy
    assert (await rig.front.direct(DirectRequest(request_id="r1"))).instance == "d0"
    with pytest.raises(NoInstance, match="is draining"):
        await rig.reserve()


async def test_draining_waits_for_local_prefills(rig: PdRig) -> None:
    slot = await rig.reserve()
    rig.engines["p0"].first_token.clear()
    job = asyncio.create_task(rig.front.prefill_locally(rig.job_for(slot)))
    await rig.engines["p0"].wait_requests(1)
    draining = asyncio.create_task(rig.front.drain("p0"))
    await eventually(lambda: rig.embedded._instances.by_name["p0"].draining)
    await looked_at(rig.engines["p0"])
    assert not draining.done()
    rig.engines["p0"].first_token.set()
    assert (await job).instance == "p0"
    async with asyncio.timeout(5):
        await draining


async def test_a_role_is_what_the_front_gives_an_instance_to_do(rig: PdRig) -> None:
    order = RoleChange("prefill", 1)
    assert await rig.front.set_role("d0", order) == RoleStatus("prefill", 1)
    assert await rig.front.set_role("d0", order) == RoleStatus("prefill", 1)
    assert {(await rig.reserve()).instance for _ in range(3)} == {"d1"}
    with pytest.raises(RoleRefused, match="too old; it is prefill since epoch 1"):
        await rig.front.set_role("d0", RoleChange("decode", 1))
    await rig.front.set_role("p0", RoleChange("decode", 1))
    result = await rig.front.prefill_locally(rig.job_for(await rig.reserve()))
    assert result.instance == "d0"
    draining = asyncio.create_task(rig.front.drain("p0"))
    await eventually(lambda: rig.embedded._instances.by_name["p0"].draining)
    reports = {item.name: item for item in (await rig.front.report()).instances}
    assert [(i.role, i.role_epoch, i.role_ready) for i in reports.values()] == [
        ("prefill", 1, True),
        ("decode", 0, True),
        ("decode", 1, False),
    ]
    assert await rig.front.set_role("p0", RoleChange("prefill", 2)) == RoleStatus(
        "prefill", 2, ready=False
    )
    draining.cancel()
    for name in ("d0", "p0"):
        await rig.front.set_role(name, RoleChange("decode", 3))
    await rig.front.report()
    assert not rig.front.has_prefill_instances
    with pytest.raises(UnknownInstance, match="d9"):
        await rig.front.set_role("d9", order)
    rig.embedded._instances.by_name["d1"].role = "both"
    with pytest.raises(RoleRefused, match="prefills and decodes"):
        await rig.front.set_role("d1", order)


async def test_a_drain_ends_with_the_gateway_that_waited_for_it() -> None:
    async with make_rig("remote") as rig:
        instance = rig.embedded._instances.by_name["d0"]
        rig.engines["d0"].waiting = 1
        await eventually(lambda: instance.load.num_requests == 1)
        draining = asyncio.create_task(rig.front.drain("d0"))
        await eventually(lambda: instance.draining)
        await rig.front.close()
        await asyncio.gather(draining, return_exceptions=True)
        await eventually(lambda: not instance.draining)


async def test_a_front_that_knows_no_roles_refuses_them_for_good() -> None:
    """Otherwise its instance would stay drained for as long as somebody tries to undo the order."""
    server = RpcServer("127.0.0.1:0", {SERVICE: {}})
    front = RemotePdCluster("west", f"127.0.0.1:{await server.start()}", has_prefill_instances=True)
    with pytest.raises(RoleRefused):
        await front.set_role("d0", RoleChange("prefill", 1))
    await front.close()
    await server.stop(0.0)


async def test_orders_of_a_former_leader_are_refused(rig: PdRig) -> None:
    await rig.front.set_role("d0", RoleChange("prefill", 1), leader=7)
    for late in (0, 6):
        with pytest.raises(RoleRefused, match=f"another gateway leads since .*7, not {late}"):
            await rig.front.set_role("d0", RoleChange("decode", 2), leader=late)
        with pytest.raises((RoleRefused, NoInstance), match="another gateway leads"):
            await rig.front.drain("d1", leader=late)
        with pytest.raises(RoleRefused, match="another gateway leads"):
            await rig.front.resume("d1", leader=late)
    assert not rig.embedded._instances.by_name["d1"].draining
    await rig.front.set_role("d0", RoleChange("decode", 2), leader=8)
    with pytest.raises(RoleRefused, match="another gateway leads"):
        await rig.front.set_role("d0", RoleChange("prefill", 3), leader=7)


async def test_an_instance_is_converted_to_encode_and_back_if_its_engine_can(rig: PdRig) -> None:
    with pytest.raises(RoleRefused, match="encodes for no other"):
        await rig.front.set_role("d1", RoleChange("encode", 1))
    instance = rig.embedded._instances.by_name["d1"]
    instance.spec = instance.spec.model_copy(update={"encoder_role": "ec_both"})
    await rig.front.drain("d1")
    status = await rig.front.set_role("d1", RoleChange("encode", 1))
    assert (status.role, status.epoch) == ("encode", 1)
    await rig.front.resume("d1")
    report = {item.name: item for item in (await rig.front.report()).instances}
    assert (report["d1"].role, report["d1"].encodes, report["d1"].draining) == (
        "encode",
        True,
        False,
    )
    assert not report["d0"].encodes
    # It gets no other work, not even where it is asked for.
    assert {(await rig.reserve()).instance for _ in range(3)} == {"d0"}
    rig.engines["d0"].healthy = False
    await eventually(lambda: not rig.embedded._instances.by_name["d0"].serves)
    assert (await rig.front.direct(DirectRequest(request_id="r"))).instance == "p0"
    await rig.front.set_role("d1", RoleChange("decode", 2))
    assert (await rig.front.direct(DirectRequest(request_id="r"))).instance == "d1"


async def test_an_engine_with_the_encoder_alone_keeps_its_role(rig: PdRig) -> None:
    instance = rig.embedded._instances.by_name["d1"]
    instance.spec = instance.spec.model_copy(update={"role": "encode"})
    instance.role = "encode"
    with pytest.raises(RoleRefused, match="whole_model: true"):
        await rig.front.set_role("d1", RoleChange("decode", 1))
    assert (await rig.front.set_role("d1", RoleChange("encode", 1))).role == "encode"
