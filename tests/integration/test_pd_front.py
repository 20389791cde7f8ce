"""The local PD cluster front over loopback, embedded and remote, with fake engines."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import msgspec
import pytest
from front_doubles import (
    BYTES_PER_TOKEN,
    FakeAgent,
    FakeEngine,
    eventually,
    prefill_job,
)
from prometheus_client import CollectorRegistry

from kvmanager.agent.messages import CacheModel
from local_pd.cluster import PdCluster
from local_pd.embedded import EmbeddedPdCluster, PdClusterConfig
from local_pd.errors import FrontUnreachable, NoInstance, NoLandingRoom, RoleRefused
from local_pd.messages import DecodeSlot
from local_pd.metrics import PdMetrics
from local_pd.remote import RemotePdCluster
from local_pd.server import SERVICE, PdServer
from prfaas.engines.errors import PrefillFailed, UnknownInstance
from prfaas.engines.instances import InstancesConfig, InstanceSpec
from prfaas.engines.prefill_run import RunnerConfig
from prfaas.jobs import PrefillJob
from scheduler.live.conversion import RoleChange, RoleStatus
from transport.rpc import RpcServer

ROLES = {"d0": "decode", "d1": "decode", "p0": "prefill"}

CONFIG = PdClusterConfig(
    lease_s=10.0,
    drain_poll_interval_s=0.02,
    instances=InstancesConfig(probe_interval_s=0.05, start_probe_interval_s=0.05, poll_load=True),
    runner=RunnerConfig(await_slice_s=0.5, cleanup_timeout_s=1.0, stall_timeout_s=0.5),
)


class Rig:
    """Two decode instances on two nodes, a prefill instance on the first, and the front."""

    def __init__(self) -> None:
        self.nodes: list[FakeAgent] = []
        self.engines: dict[str, FakeEngine] = {}
        self.embedded: EmbeddedPdCluster
        self.front: PdCluster

    @property
    def num_landings(self) -> int:
        return sum(len(node.landings) for node in self.nodes)

    def job_for(self, slot: DecodeSlot) -> PrefillJob:
        job = prefill_job(1, num_tokens=slot.landing.num_tokens)
        return msgspec.structs.replace(job, landing=slot.landing)

    async def reserve(self) -> DecodeSlot:
        job = prefill_job(1)
        return await self.front.reserve(8, job.landing.token_digest, "r1")


@asynccontextmanager
async def make_rig(kind: str, config: PdClusterConfig = CONFIG) -> AsyncIterator[Rig]:
    rig = Rig()
    async with AsyncExitStack() as stack:
        rig.nodes = [await FakeAgent("d0", "p0").start(), await FakeAgent("d1").start()]
        specs = []
        for name, role in ROLES.items():
            agent = rig.nodes[1] if name == "d1" else rig.nodes[0]
            engine = rig.engines[name] = await FakeEngine(agent).start()
            stack.push_async_callback(engine.stop)
            specs.append(
                InstanceSpec.model_validate(
                    {"name": name, "url": engine.url, "agent": agent.target, "role": role}
                )
            )
        for node in rig.nodes:
            stack.push_async_callback(node.stop)
        rig.embedded = EmbeddedPdCluster(
            "west",
            specs,
            replace(config, keep_leases=kind == "embedded"),
            metrics=PdMetrics(CollectorRegistry()),
        )
        await rig.embedded.start()
        stack.push_async_callback(rig.embedded.close)
        rig.front = rig.embedded
        if kind == "remote":
            server = PdServer(rig.embedded, "127.0.0.1:0")
            port = await server.start()
            stack.push_async_callback(server.stop, 0)
            rig.front = RemotePdCluster("west", f"127.0.0.1:{port}", has_prefill_instances=True)
            stack.push_async_callback(rig.front.close)
        yield rig
        for engine in rig.engines.values():
            engine.may_answer.set()


@pytest.fixture(params=["embedded", "remote"])
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    async with make_rig(request.param) as made:
        yield made


async def test_a_slot_names_engine_landing_and_what_the_engine_must_be_told(rig: Rig) -> None:
    slot = await rig.reserve()
    assert slot.instance == "d0"
    assert slot.engine_url == rig.engines["d0"].url
    assert slot.landing.nbytes == 8 * BYTES_PER_TOKEN
    assert slot.kv_transfer_params == {
        "prfaas": {
            "role": "consumer",
            "transfer_id": slot.landing.transfer_id,
            "num_tokens": 8,
            "token_digest": prefill_job(1).landing.token_digest,
            "arena_epoch": "e1",
            "runs": [[0, 2], [5, 1]],
            "layout_fingerprint": slot.landing.layout_fingerprint,
            "cached_tokens": 0,
            "cached_runs": [],
        }
    }
    assert rig.front.has_prefill_instances
    await rig.front.release(slot, "done")
    await rig.front.release(slot, "done")
    assert rig.num_landings == 0


async def test_slots_go_to_the_least_loaded_decoder(rig: Rig) -> None:
    slots = [await rig.reserve() for _ in range(4)]
    assert sorted(slot.instance for slot in slots) == ["d0", "d0", "d1", "d1"]
    rig.engines["d0"].waiting = 3
    await eventually(lambda: rig.embedded._instances.by_name["d0"].load.num_requests == 3)
    assert (await rig.reserve()).instance == "d1"


async def test_what_a_node_has_cached_draws_requests_and_is_not_sent(rig: Rig) -> None:
    preferred = rig.nodes[1]
    preferred.cached_tokens = 4
    keys = bytes(range(48))
    digest = prefill_job(1).landing.token_digest
    slot = await rig.front.reserve(
        8, digest, "r1", block_keys=keys, prefer_nodes=["10.0.0.9:1", preferred.target]
    )
    assert slot.instance == "d1"
    assert preferred.landings[slot.landing.transfer_id].block_keys == keys
    assert slot.landing.cached_tokens == 4
    params = slot.kv_transfer_params["prfaas"]
    assert (params["cached_tokens"], params["cached_runs"]) == (4, [[[9, 1]]])
    target = await rig.front.direct("r2", prefer_nodes=[preferred.target])
    assert target.instance == "d1"
    assert "cached" in target.reason


async def test_reports_say_where_and_how_prompts_are_cached(rig: Rig) -> None:
    model = CacheModel("ab" * 16, 64, [(0, 4096, 0)])
    rig.nodes[0].cache_model = model

    async with asyncio.timeout(5):
        while (await rig.front.report()).instances[0].cache is None:
            await asyncio.sleep(0.01)
    reports = {item.name: item for item in (await rig.front.report()).instances}
    assert reports["d0"].cache == model
    assert reports["d0"].node == rig.nodes[0].target == reports["d0"].node_name
    assert reports["d1"].cache is None


async def test_reports_say_how_full_engines_are(rig: Rig) -> None:
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
    # What landings hold now is no part of it: that is old when a request comes.
    assert (d0.landing_cap_bytes, d1.landing_cap_bytes) == (1 << 20, 1 << 20)
    assert 0 <= d0.looked_s < 10


async def test_a_full_node_leads_to_the_other_and_two_to_no_room(rig: Rig) -> None:
    rig.nodes[0].landing_room = 0
    assert (await rig.reserve()).instance == "d1"
    rig.nodes[1].landing_room = 1
    with pytest.raises(NoLandingRoom, match=r"d0.*landing cap.*d1|d1.*landing cap.*d0"):
        await rig.reserve()


async def test_nodes_that_are_gone_are_said_to_be(rig: Rig) -> None:
    for node in rig.nodes:
        await node.stop()
    with pytest.raises(FrontUnreachable, match="no landing reserved"):
        await rig.reserve()
    with pytest.raises(NoInstance, match="node agent is not healthy"):
        await rig.reserve()
    target = await rig.front.direct("r1")  # engines alone still serve
    assert target.instance in ("d0", "d1")


async def test_a_request_is_served_whole_by_the_least_loaded_engine(rig: Rig) -> None:
    targets = [await rig.front.direct(f"r{n}") for n in range(4)]
    assert sorted(target.instance for target in targets) == ["d0", "d0", "d1", "d1"]
    assert targets[0].engine_url == rig.engines[targets[0].instance].url
    assert (await rig.front.direct("r5", exclude=["d0"])).instance == "d1"
    assert (await rig.front.direct("r6", exclude=["d0", "d1"])).instance == "p0"
    assert (await rig.front.direct("r7", exclude=list(ROLES))).instance in ROLES
    for engine in rig.engines.values():
        engine.healthy = False
    await eventually(lambda: not any(i.serves for i in rig.embedded._instances.by_name.values()))
    with pytest.raises(NoInstance, match="engine is not healthy"):
        await rig.front.direct("r8")


async def test_cancelling_a_reservation_leaves_no_landing(rig: Rig) -> None:
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


async def awaited(rig: Rig, slot: DecodeSlot, timeout_s: float = 20.0) -> tuple[str, str]:
    report = await rig.front.await_landing(slot, timeout_s)
    return report.state, report.error


async def test_a_landing_is_awaited_to_its_end(rig: Rig) -> None:
    slots = [await rig.reserve() for _ in range(3)]
    ends = [asyncio.create_task(awaited(rig, slot)) for slot in slots]
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


async def test_a_landing_that_takes_its_time_is_open(rig: Rig) -> None:
    assert await awaited(rig, await rig.reserve(), 0.05) == ("open", "")


async def test_a_request_is_given_to_the_engine_once_however_long_its_landing_takes(
    rig: Rig,
) -> None:
    slot = await rig.reserve()
    load = rig.embedded._instances.by_name["d0"].load
    num_given = load.poll_starts()
    for _ in range(3):
        assert (await awaited(rig, slot, 0.02))[0] == "open"
    assert load.poll_starts() == num_given
    rig.nodes[0].end_landing(slot.landing.transfer_id, "complete")
    assert (await awaited(rig, slot))[0] == "landed"
    assert load.poll_starts() == num_given + 1


async def test_giving_a_slot_back_ends_the_wait_for_its_landing(rig: Rig) -> None:
    slot = await rig.reserve()
    waiting = asyncio.create_task(awaited(rig, slot))
    await eventually(lambda: rig.nodes[0].num_awaiting == 1)
    await rig.front.release(slot, "given up")
    assert (await waiting)[0] == "failed"


async def test_a_landing_nobody_can_tell_of_is_unknown(rig: Rig) -> None:
    slot = await rig.reserve()
    waiting = asyncio.create_task(awaited(rig, slot))
    await eventually(lambda: rig.nodes[0].num_awaiting == 1)
    await rig.nodes[0].stop()
    state, error = await waiting
    assert state == "unknown"
    assert error
    nowhere = msgspec.structs.replace(slot, instance="d9")
    assert await awaited(rig, nowhere) == ("unknown", "west has no instance d9")
    elsewhere = msgspec.structs.replace(slot, instance="d1")
    assert (await awaited(rig, elsewhere))[1].startswith("NOT_FOUND")


async def test_cancelling_the_wait_for_a_landing_leaves_it_alone(rig: Rig) -> None:
    slot = await rig.reserve()
    waiting = asyncio.create_task(awaited(rig, slot))
    await eventually(lambda: rig.nodes[0].num_awaiting == 1)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert waiting.cancelled()
    await eventually(lambda: rig.nodes[0].num_awaiting == 0)
    instance = rig.embedded._instances.by_name[slot.instance]
    await eventually(lambda: rig.embedded._num_requests(instance) == 0)
    assert rig.num_landings == 1


async def test_closing_ends_the_wait_for_a_landing(rig: Rig) -> None:
    waiting = asyncio.create_task(awaited(rig, await rig.reserve()))
    await eventually(lambda: rig.nodes[0].num_awaiting == 1)
    await rig.front.close()
    assert (await waiting)[0] == "unknown"


async def test_requests_whose_kvcache_is_on_its_way_count(rig: Rig) -> None:
    slots = [await rig.reserve() for _ in range(2)]
    waits = [asyncio.create_task(awaited(rig, slot)) for slot in slots]
    await eventually(lambda: sum(node.num_awaiting for node in rig.nodes) == 2)
    load = rig.embedded._instances.by_name["d0"].load
    await eventually(lambda: load.num_requests == 0)  # probes have seen idle engines meanwhile
    assert (await rig.front.report()).running >= 2
    draining = asyncio.create_task(rig.front.drain("d0"))
    await asyncio.sleep(0.1)
    assert not draining.done()
    for node in rig.nodes:
        for transfer_id in node.landings:
            node.end_landing(transfer_id, "complete")
    assert [end[0] for end in await asyncio.gather(*waits)] == ["landed"] * 2
    assert not draining.done()
    for slot in slots:
        await rig.front.release(slot, "answered")
    await draining


async def test_requests_count_once_and_until_they_are_over(rig: Rig) -> None:
    async def num_requests() -> int:
        report = await rig.front.report()
        return next(item.running for item in report.instances if item.name == slot.instance)

    slot = await rig.reserve()
    load = rig.embedded._instances.by_name[slot.instance].load
    await eventually(lambda: load.num_requests == 0)  # no engine has anything to do
    assert await num_requests() == 1
    node = next(node for node in rig.nodes if slot.landing.transfer_id in node.landings)
    node.end_landing(slot.landing.transfer_id, "complete")
    load.polled(5, load.poll_starts())
    assert (await awaited(rig, slot))[0] == "landed"
    assert load.num_requests == 6
    await rig.front.request_ended(slot.instance)
    assert load.num_requests == 5
    await rig.front.request_ended("nowhere")
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


async def test_a_lease_that_is_over_is_not_renewed_for_ever() -> None:
    async with make_rig("embedded", replace(CONFIG, lease_s=0.06)) as rig:
        await rig.reserve()
        rig.nodes[0].landings.clear()
        await eventually(lambda: len(rig.embedded._leases) == 0)


async def test_a_local_prefill_fills_the_landing(rig: Rig) -> None:
    slot = await rig.reserve()
    result = await rig.front.prefill_locally(rig.job_for(slot))
    assert (result.instance, result.nbytes) == ("p0", 8 * BYTES_PER_TOKEN)
    assert result.reason.startswith("least_loaded; cached_tokens=0; tokens_ahead=0")
    assert rig.engines["p0"].requests[0]["kv_transfer_params"]["prfaas"]["role"] == "producer"
    assert (await rig.front.report()).running_tokens == 0


async def test_cancelling_a_local_prefill_aborts_it(rig: Rig) -> None:
    slot = await rig.reserve()
    rig.engines["p0"].may_answer.clear()
    task = asyncio.create_task(rig.front.prefill_locally(rig.job_for(slot)))
    await rig.engines["p0"].wait_requests(1)
    report = await rig.front.report()
    assert report.running_tokens == 8
    (job,) = report.jobs
    assert (job.transfer_id, job.instance) == (slot.landing.transfer_id, "p0")
    assert (job.num_tokens, job.uncached_tokens) == (8, 8)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    async with asyncio.timeout(20):
        await rig.engines["p0"].wait_aborts(1)
    await eventually(lambda: not rig.nodes[0].outboxes)
    await eventually(lambda: rig.embedded._handoff.num_tokens == 0)


async def test_a_prefill_engine_that_dies_is_a_clear_failure(rig: Rig) -> None:
    slot = await rig.reserve()
    rig.engines["p0"].may_answer.clear()
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


async def test_draining_waits_for_the_engine_and_takes_nothing_new(rig: Rig) -> None:
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


async def test_draining_waits_for_slots_that_are_held(rig: Rig) -> None:
    slot = await rig.reserve()
    load = rig.embedded._instances.by_name["d0"].load
    await eventually(lambda: load.num_requests == 0)  # nothing but the slot says that work comes
    draining = asyncio.create_task(rig.front.drain("d0"))
    await asyncio.sleep(0.15)
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


async def test_an_engine_that_dies_is_not_drained(rig: Rig) -> None:
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


async def test_an_engine_that_drains_serves_what_no_other_can(rig: Rig) -> None:
    for instance in rig.embedded._instances.by_name.values():
        instance.draining = True
    assert (await rig.front.report()).healthy
    assert (await rig.front.direct("r1")).instance == "d0"
    with pytest.raises(NoInstance, match="is draining"):
        await rig.reserve()


async def test_draining_waits_for_local_prefills(rig: Rig) -> None:
    slot = await rig.reserve()
    rig.engines["p0"].may_answer.clear()
    job = asyncio.create_task(rig.front.prefill_locally(rig.job_for(slot)))
    await rig.engines["p0"].wait_requests(1)
    draining = asyncio.create_task(rig.front.drain("p0"))
    await asyncio.sleep(0.1)
    assert not draining.done()
    rig.engines["p0"].may_answer.set()
    assert (await job).instance == "p0"
    async with asyncio.timeout(5):
        await draining


async def test_a_role_is_what_the_front_gives_an_instance_to_do(rig: Rig) -> None:
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


async def test_closing_ends_local_prefills(rig: Rig) -> None:
    slot = await rig.reserve()
    rig.engines["p0"].may_answer.clear()
    task = asyncio.create_task(rig.front.prefill_locally(rig.job_for(slot)))
    await rig.engines["p0"].wait_requests(1)
    await rig.front.close()
    with pytest.raises(PrefillFailed) as caught:
        await task
    assert caught.value.code == "closed"
    await eventually(lambda: not rig.nodes[0].outboxes)


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


async def test_a_remote_front_that_is_not_there_is_said_to_be() -> None:
    front = RemotePdCluster("west", "127.0.0.1:1", has_prefill_instances=False)
    with pytest.raises(FrontUnreachable, match="west"):
        await front.reserve(8, "00" * 32, "r1")
    with pytest.raises(FrontUnreachable, match="west"):
        await front.direct("r1")
    with pytest.raises(FrontUnreachable, match="west"):
        await front.set_role("d0", RoleChange("prefill", 1))
    landing = prefill_job(1).landing
    slot = DecodeSlot(
        landing=landing, instance="d0", engine_url="", kv_transfer_params={}, lease_s=1.0
    )
    assert (await front.await_landing(slot, 0.1)).state == "unknown"
    report = await front.report()
    assert (report.healthy, "not reachable" in report.reason) == (False, True)
    await front.close()
