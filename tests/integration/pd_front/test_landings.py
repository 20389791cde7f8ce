"""What the PD cluster front says of landings under way; fake engines, loopback."""

import asyncio

import msgspec
from eventually import eventually
from front_doubles import looked_at
from pd_front_rig import PdRig


async def test_a_landing_is_awaited_to_its_end(rig: PdRig) -> None:
    slots = [await rig.reserve() for _ in range(3)]
    ends = [asyncio.create_task(rig.awaited(slot)) for slot in slots]
    await eventually(lambda: sum(node.num_awaiting for node in rig.nodes) == 3)
    node_of = {"d0": rig.nodes[0], "d1": rig.nodes[1]}
    states = [("complete", ""), ("failed", "checksum"), ("expired", "lease")]
    for slot, (state, error) in zip(slots, states, strict=True):
        node_of[slot.instance].end_landing(slot.landing.transfer_id, state, error)
    assert await asyncio.gather(*ends) == [
        ("landed", ""),
        ("failed", "failed: checksum"),
        ("failed", "expired: lease"),
    ]


async def test_a_landing_that_takes_its_time_is_open(rig: PdRig) -> None:
    assert await rig.awaited(await rig.reserve(), 0.05) == ("open", "")


async def test_a_request_is_given_to_the_engine_once_however_long_its_landing_takes(
    rig: PdRig,
) -> None:
    slot = await rig.reserve()
    load = rig.embedded._instances.by_name["d0"].load
    num_given = load.poll_starts()
    for _ in range(3):
        assert (await rig.awaited(slot, 0.02))[0] == "open"
    assert load.poll_starts() == num_given
    rig.nodes[0].end_landing(slot.landing.transfer_id, "complete")
    assert (await rig.awaited(slot))[0] == "landed"
    assert load.poll_starts() == num_given + 1


async def test_giving_a_slot_back_ends_the_wait_for_its_landing(rig: PdRig) -> None:
    slot = await rig.reserve()
    waiting = asyncio.create_task(rig.awaited(slot))
    await eventually(lambda: rig.nodes[0].num_awaiting == 1)
    await rig.front.release(slot, "given up")
    assert (await waiting)[0] == "failed"


async def test_a_landing_nobody_can_tell_of_is_unknown(rig: PdRig) -> None:
    slot = await rig.reserve()
    waiting = asyncio.create_task(rig.awaited(slot))
    await eventually(lambda: rig.nodes[0].num_awaiting == 1)
    await rig.nodes[0].stop()
    state, error = await waiting
    assert state == "unknown"
    assert error
    nowhere = msgspec.structs.replace(slot, instance="d9")
    assert await rig.awaited(nowhere) == ("unknown", "west has no instance d9")
    elsewhere = msgspec.structs.replace(slot, instance="d1")
    assert (await rig.awaited(elsewhere))[1].startswith("NOT_FOUND")


async def test_cancelling_the_wait_for_a_landing_leaves_it_alone(rig: PdRig) -> None:
    slot = await rig.reserve()
    waiting = asyncio.create_task(rig.awaited(slot))
    await eventually(lambda: rig.nodes[0].num_awaiting == 1)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert waiting.cancelled()
    await eventually(lambda: rig.nodes[0].num_awaiting == 0)
    instance = rig.embedded._instances.by_name[slot.instance]
    await eventually(lambda: rig.embedded._num_requests(instance) == 0)
    assert rig.num_landings == 1


async def test_closing_ends_the_wait_for_a_landing(rig: PdRig) -> None:
    waiting = asyncio.create_task(rig.awaited(await rig.reserve()))
    await eventually(lambda: rig.nodes[0].num_awaiting == 1)
    await rig.front.close()
    assert (await waiting)[0] == "unknown"


async def test_requests_whose_kvcache_is_on_its_way_count(rig: PdRig) -> None:
    slots = [await rig.reserve() for _ in range(2)]
    waits = [asyncio.create_task(rig.awaited(slot)) for slot in slots]
    await eventually(lambda: sum(node.num_awaiting for node in rig.nodes) == 2)
    load = rig.embedded._instances.by_name["d0"].load
    await eventually(lambda: load.num_requests == 0)  # probes have seen idle engines meanwhile
    assert (await rig.front.report()).running >= 2
    draining = asyncio.create_task(rig.front.drain("d0"))
    await eventually(lambda: rig.embedded._instances.by_name["d0"].draining)
    await looked_at(rig.engines["d0"])
    assert not draining.done()
    for node in rig.nodes:
        for transfer_id in node.landings:
            node.end_landing(transfer_id, "complete")
    assert [end[0] for end in await asyncio.gather(*waits)] == ["landed"] * 2
    assert not draining.done()
    for slot in slots:
        await rig.front.release(slot, "answered")
    await draining
