"""Both fronts with real node agents and real transfers; only the engines' computing is fake.

All of them know each other by the region's key, each front in the role that it has as a process.
The agents ask for grants, which the tests sign as a gateway does.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from agent_process import SMALL_LAYOUT, AgentProcess, DrivenEngine
from eventually import eventually
from front_access import pd_cluster, prefill_cluster, ready, running
from front_doubles import FakeEngine, prefill_job
from granting import grant_files
from whole_region import spec

from deploy.gateway.grants import granted_job, reservation_grant
from local_pd.embedded import EmbeddedPdCluster, PdClusterConfig
from local_pd.errors import NoLandingRoom
from local_pd.messages import DecodeSlot, ReserveRequest
from prfaas.embedded import EmbeddedPrefillCluster, PrefillClusterConfig
from prfaas.engines.errors import PrefillFailed
from prfaas.engines.health import ProbeTiming
from prfaas.engines.instances import InstancesConfig
from prfaas.engines.prefill_run import RunnerConfig
from prfaas.jobs import PrefillJob, PrefillResult
from transport import Identity, RegionKey, Role
from transport.grants import Granter
from transport.region_key import new_key

PROBING = InstancesConfig(probes=ProbeTiming(interval_s=0.2, start_interval_s=0.1), poll_load=True)
RUNNER = RunnerConfig(await_slice_s=0.5)
NUM_TOKENS = 200


class Region:
    """A prefill cluster of one instance, a PD cluster of one, each with its own agent."""

    def __init__(self) -> None:
        self.sending: AgentProcess
        self.receiving: AgentProcess
        self.producer: DrivenEngine
        self.consumer: DrivenEngine
        self.prefill_http = FakeEngine()
        self.prefill: EmbeddedPrefillCluster
        self.pd: EmbeddedPdCluster
        self.granter: Granter
        self.data = b""
        self.share = 1.0

    def fill(self, body: dict[str, Any]) -> None:
        """What the connector does during a prefill; `share` of the bytes become ready."""
        self.producer.fill(body["kv_transfer_params"]["prfaas"], self.data, self.share)

    async def begin(self) -> tuple[DecodeSlot, asyncio.Task[PrefillResult]]:
        """Reserve, let the decode engine watch, submit."""
        job = prefill_job(7, num_tokens=NUM_TOKENS)
        slot = await self.reserve()
        self.data = os.urandom(slot.landing.nbytes)
        self.consumer.client.watch(bytes.fromhex(slot.landing.transfer_id))
        job = granted_job(self.granter, msgspec.structs.replace(job, landing=slot.landing))
        return slot, asyncio.create_task(self.submit(job))

    async def reserve(self) -> DecodeSlot:
        """A slot for the job of `begin`."""
        digest = prefill_job(7, num_tokens=NUM_TOKENS).landing.token_digest
        grant = reservation_grant(self.granter, NUM_TOKENS, digest, b"")
        request = ReserveRequest(
            num_tokens=NUM_TOKENS, token_digest=digest, request_id="r7", grant=grant
        )
        return await self.pd.reserve(request)

    async def submit(self, job: PrefillJob) -> PrefillResult:
        return await self.prefill.submit(job)

    async def told(self) -> tuple[Any, ...]:
        """What the decode engine hears next."""
        return await asyncio.to_thread(self.consumer.next)

    async def landing_bytes(self) -> int:
        instance = self.pd._instances.by_name["d0"]
        return (await instance.agent.status(2.0)).landing_bytes

    async def bytes_arrived(self, slot: DecodeSlot) -> None:
        """Wait until the transfer is under way."""
        await self.prefill_http.wait_requests(1)
        agent = self.prefill._instances.by_name["p0"].agent
        transfer_id = slot.landing.transfer_id
        await eventually(
            lambda: agent.wait(transfer_id, "outbox", wait_s=0.02, timeout_s=5.0),
            lambda report: report.acked_bytes,
        )

    async def memory_is_back(self) -> None:
        await eventually(self.landing_bytes, lambda nbytes: not nbytes, timeout_s=15)


@pytest.fixture
async def region(tmp_path: Path) -> AsyncIterator[Region]:
    made = Region()
    async with AsyncExitStack() as stack:
        path = tmp_path / "region.key"
        path.write_text(new_key())
        path.chmod(0o600)
        private, public = grant_files(tmp_path)
        made.granter = Granter(private)
        key = {
            "region_key": {"file": str(path), "region": "r", "name": "agent"},
            "granting_keys": {"file": str(public.path), "region": "r"},
        }
        made.sending = stack.enter_context(AgentProcess(tmp_path / "send", **key))
        # Patient at the receiving end, so that only a message can end a landing within a test.
        patient = {"num_connections": 2, "idle_timeout_s": 30.0, "ack_timeout_s": 10.0}
        receiving = AgentProcess(tmp_path / "receive", transport=patient, **key)
        made.receiving = stack.enter_context(receiving)
        made.sending.caller = made.receiving.caller = shown(path, "gateway")
        made.producer = stack.enter_context(DrivenEngine(made.sending, "p0"))
        made.consumer = stack.enter_context(DrivenEngine(made.receiving, "d0"))
        http = await running(stack, made.prefill_http)
        http.before_answer = made.fill
        made.prefill = prefill_cluster(
            "east",
            [spec("p0", http.url, made.sending, "prefill")],
            PrefillClusterConfig(instances=probing(path, "prefill-front"), runner=RUNNER),
        )
        decoder = await running(stack, FakeEngine())
        made.pd = pd_cluster(
            "west",
            [spec("d0", decoder.url, made.receiving, "both")],
            PdClusterConfig(instances=probing(path, "pd-front"), runner=RUNNER, lease_s=60.0),
        )
        await ready(stack, made.prefill, made.pd)
        yield made
        http.first_token.set()


def shown(path: Path, role: Role) -> RegionKey:
    return RegionKey(path, Identity("r", role, "front"))


def probing(path: Path, role: Role) -> InstancesConfig:
    return replace(PROBING, credentials=shown(path, role))


async def test_the_decode_engine_gets_the_bytes_of_the_prefill_engine(region: Region) -> None:
    slot, task = await region.begin()
    assert (await region.pd.await_landing(slot, 20.0)).state == "landed"
    result = await task
    assert result.nbytes == len(region.data)
    assert 0.0 <= result.sent_share_at_prefill_end <= 1.0
    assert await region.told() == ("landed", slot.landing.transfer_id)
    landed = region.consumer.read(slot.landing.transfer_id, slot.landing.nbytes)
    assert landed == region.data
    region.consumer.client.release(bytes.fromhex(slot.landing.transfer_id))
    await region.pd.release(slot, "done")
    await region.memory_is_back()


async def test_an_engine_that_dies_tells_the_decode_engine_at_once(region: Region) -> None:
    region.share = 0.5
    region.prefill_http.first_token.clear()
    slot, task = await region.begin()
    await region.bytes_arrived(slot)
    assert (await region.pd.await_landing(slot, 0.05)).state == "open"
    landing = asyncio.create_task(region.pd.await_landing(slot, 20.0))
    region.producer.client.close()
    await region.prefill_http.stop()
    with pytest.raises(PrefillFailed) as caught:
        await task
    assert caught.value.code == "engine_failed"
    assert (await landing).state == "failed"
    assert (await region.told())[:2] == ("failed", slot.landing.transfer_id)
    await region.pd.release(slot, "prefill failed")
    await region.memory_is_back()


async def test_a_sending_agent_that_is_killed_fails_the_job_quickly(region: Region) -> None:
    region.share = 0.5
    region.prefill_http.first_token.clear()
    slot, task = await region.begin()
    await region.bytes_arrived(slot)
    region.sending.end(signal.SIGKILL)
    with pytest.raises(PrefillFailed) as caught:
        await task
    assert caught.value.code == "agent_failed"
    await region.pd.release(slot, "prefill failed")
    assert (await region.told())[0] == "failed"
    await region.memory_is_back()
    await region.prefill_http.wait_aborts(1)


async def test_a_receiving_agent_that_is_killed_fails_the_job(region: Region) -> None:
    region.share = 0.5
    region.prefill_http.first_token.clear()
    slot, task = await region.begin()
    await region.bytes_arrived(slot)
    landing = asyncio.create_task(region.pd.await_landing(slot, 20.0))
    region.receiving.end(signal.SIGKILL)
    assert (await landing).state == "unknown"
    with pytest.raises(PrefillFailed) as caught:
        await task
    assert caught.value.code == "transfer_failed"
    await region.prefill_http.wait_aborts(1)
    await region.pd.release(slot, "prefill failed")


async def test_cancelling_gives_back_both_ends(region: Region) -> None:
    region.share = 0.5
    region.prefill_http.first_token.clear()
    slot, task = await region.begin()
    await region.bytes_arrived(slot)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert (await region.told())[:2] == ("failed", slot.landing.transfer_id)
    await region.pd.release(slot, "client gone")
    await region.memory_is_back()
    outboxes = region.prefill._instances.by_name["p0"].agent
    await eventually(lambda: outboxes.status(2.0), lambda status: not status.outbox_bytes)


async def test_a_full_landing_is_no_room_and_release_makes_room(region: Region) -> None:
    slots: list[DecodeSlot] = []

    async def fill_up() -> None:
        while True:
            slots.append(await region.reserve())

    with pytest.raises(NoLandingRoom):
        await fill_up()
    assert slots
    for slot in slots:
        await region.pd.release(slot, "done")
    await region.memory_is_back()
    await region.pd.release(await region.reserve(), "done")


async def test_engines_of_another_layout_on_the_node_are_no_obstacle(region: Region) -> None:
    other = msgspec.structs.replace(SMALL_LAYOUT, weights="files:1")
    with DrivenEngine(region.receiving, "d9", other):
        slot, task = await region.begin()
        assert slot.landing.layout_fingerprint == SMALL_LAYOUT.fingerprint().hex()
        assert (await region.pd.await_landing(slot, 20.0)).state == "landed"
        await task
        assert await region.told() == ("landed", slot.landing.transfer_id)
        region.consumer.client.release(bytes.fromhex(slot.landing.transfer_id))
        await region.pd.release(slot, "done")
    await region.memory_is_back()


async def test_a_slot_nobody_renews_comes_back_with_its_lease(region: Region) -> None:
    region.pd._config = replace(region.pd._config, lease_s=1.0)
    slot = await region.reserve()
    region.pd._landings.leases.drop(slot.landing.transfer_id)
    await region.memory_is_back()


async def test_an_engine_not_connected_to_its_agent_is_not_ready(region: Region) -> None:
    region.producer.client.close()
    await eventually(lambda: not region.prefill._instances.by_name["p0"].transfers, timeout_s=15)
    report = await region.prefill.report()
    assert "no connection from an engine called p0" in report.instances[0].reason
