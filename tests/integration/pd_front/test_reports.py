"""What the front's reports say of landing room and KV memory, and what that decides."""

import asyncio

import msgspec
import pytest
from eventually import eventually
from front_doubles import BYTES_PER_TOKEN
from live_region_cases import MODEL, Region, teach
from pd_front_rig import ROLES, PdRig

from prfaas.engines.errors import UnknownInstance
from prfaas.engines.timing import TimingOrder
from scheduler.live.events import AdmitAsked
from scheduler.routing.prediction import Prediction


async def test_reports_count_a_landing_at_once_on_all_instances_of_its_node(rig: PdRig) -> None:
    async def room() -> dict[str, int | None]:
        report = await rig.front.report()
        return {item.name: item.landing_room_bytes for item in report.instances}

    whole = 1 << 20
    left = whole - 8 * BYTES_PER_TOKEN
    no_more_probes = asyncio.Event()

    async def pause(method: str) -> None:
        if method == "Status":
            await no_more_probes.wait()

    for agent in rig.nodes:
        agent.before_reply = pause
    slot = await rig.reserve()
    assert await room() == {"d0": left, "p0": left, "d1": whole}
    await rig.front.release(slot, "done")
    assert await room() == dict.fromkeys(ROLES, whole)
    no_more_probes.set()


async def test_reports_have_the_adapters_and_the_encoder_of_each_engine(rig: PdRig) -> None:
    rig.nodes[1].adapters = {"poet": "files:1"}
    rig.nodes[1].encoder = "files:2 torch.bfloat16"

    async def told() -> dict[str, tuple[dict[str, str], str]]:
        instances = (await rig.front.report()).instances
        return {item.name: (item.adapters, item.encoder) for item in instances}

    await eventually(lambda: bool(rig.embedded._instances.by_name["d1"].encoder))
    d1 = {"poet": "files:1"}, "files:2 torch.bfloat16"
    assert await told() == {"d0": ({}, ""), "p0": ({}, ""), "d1": d1}


async def test_an_idle_instance_is_timed_and_a_busy_one_is_not(rig: PdRig) -> None:
    order = TimingOrder(instance="d1", lengths=(4, 8), limit_s=5.0)
    found = await rig.front.time_prefills(order)
    assert ([num for num, _ in found.prefills], found.reason) == ([4, 8], "")
    report = await rig.front.report()
    assert [item.running for item in report.instances] == [0, 0, 0]
    rig.engines["d1"].waiting = 1
    await eventually(lambda: rig.embedded._instances.by_name["d1"].load.num_requests == 1)
    found = await rig.front.time_prefills(order)
    assert (found.prefills, found.reason) == ((), "d1 is busy")
    with pytest.raises(UnknownInstance, match="d9"):
        await rig.front.time_prefills(TimingOrder(instance="d9", lengths=(4,), limit_s=5.0))


async def test_the_room_of_an_older_agent_is_not_known(rig: PdRig) -> None:
    rig.nodes[0].tells_room = False
    by_name = rig.embedded._instances.by_name
    await eventually(lambda: by_name["d0"].landing_room_bytes is None)
    await rig.front.release(await rig.reserve(), "done")
    reports = {item.name: item for item in (await rig.front.report()).instances}
    assert (reports["d0"].landing_room_bytes, reports["d0"].landing_cap_bytes) == (None, 1 << 20)


@pytest.mark.parametrize(("kv_usage", "code"), [(0.5, "admitted"), (0.96, "decode_memory")])
async def test_what_an_engines_metrics_say_of_its_kv_memory_refuses_requests(
    rig: PdRig, kv_usage: float, code: str
) -> None:
    for name in ("d0", "d1"):
        engine = rig.engines[name]
        engine.num_serving, engine.kv_usage, engine.num_kv_blocks = 5, kv_usage, 101
    for node in rig.nodes:
        node.kv_block_bytes = 1_000_000

    def is_seen(name: str) -> bool:
        report = rig.embedded._instances.by_name[name].report(5)
        return (report.kv_usage, report.kv_total_bytes) == (kv_usage, 100_000_000)

    await eventually(lambda: is_seen("d0") and is_seen("d1"))
    region = Region()
    region.home = msgspec.structs.replace(await rig.front.report(), name="home")
    scheduler = region.scheduler()
    teach(scheduler, "far", 1e-4)  # 512 bytes of KVCache for each token
    question = AdmitAsked(1, "", MODEL, 8000, Prediction(prefill_s=0.8))
    scheduler.links()
    verdict = scheduler.ask(question).verdict
    assert verdict.reason == code
    if not verdict.admitted:
        # 192 MB are in use, and 194 may be.
        assert verdict.numbers["kv_bytes"] == pytest.approx(196_096_000)
        assert verdict.numbers["kv_total_bytes"] == 200_000_000
