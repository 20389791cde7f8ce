"""The prefill cluster front over loopback HTTP and gRPC, embedded and remote, with fake engines."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from eventually import eventually
from front_access import prefill_cluster, running, started_prefill
from front_doubles import BYTES_PER_TOKEN, FakeAgent, FakeEngine, prefill_job
from openai_engine import refusing

from kvmanager.hashing import token_digest
from kvmanager.media_items import MediaItem
from kvmanager.token_ids import TokenIds
from prfaas.cluster import PrefillCluster
from prfaas.embedded import EmbeddedPrefillCluster, PrefillClusterConfig
from prfaas.engines.errors import PrefillFailed, UnknownInstance
from prfaas.engines.health import ProbeTiming
from prfaas.engines.instances import InstancesConfig
from prfaas.engines.prefill_run import RunnerConfig
from prfaas.engines.timing import TimingOrder
from prfaas.jobs import PrefillJob, PrefillResult
from prfaas.queue_values import QueueConfig
from prfaas.remote import RemotePrefillCluster

CONFIG = PrefillClusterConfig(
    queue=QueueConfig(max_queued=2),
    instances=InstancesConfig(probes=ProbeTiming(interval_s=0.1, start_interval_s=0.05)),
    runner=RunnerConfig(await_slice_s=0.5, cleanup_timeout_s=1.0, stall_timeout_s=0.5),
)


class Rig:
    """Two instances, each with its own agent, and the front that a test is about."""

    def __init__(self) -> None:
        self.agents: list[FakeAgent] = []
        self.engines: list[FakeEngine] = []
        self.embedded: EmbeddedPrefillCluster
        self.front: PrefillCluster

    def hold(self) -> None:
        for engine in self.engines:
            engine.first_token.clear()

    def release(self) -> None:
        for engine in self.engines:
            engine.first_token.set()

    @property
    def num_outboxes(self) -> int:
        return sum(len(agent.outboxes) for agent in self.agents)


@asynccontextmanager
async def make_rig(
    kind: str, *, num_instances: int = 2, max_concurrent: int = 1
) -> AsyncIterator[Rig]:
    rig = Rig()
    async with AsyncExitStack() as stack:
        specs = []
        for index in range(num_instances):
            agent = await running(stack, FakeAgent(f"p{index}"))
            engine = await running(stack, FakeEngine(agent))
            rig.agents.append(agent)
            rig.engines.append(engine)
            specs.append(engine.spec(f"p{index}", "prefill", max_concurrent=max_concurrent))
        rig.embedded = prefill_cluster("east", specs, CONFIG)
        rig.front = await started_prefill(stack, kind, rig.embedded)
        yield rig
        rig.release()


@pytest.fixture(params=["embedded", "remote"])
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    async with make_rig(request.param) as made:
        yield made


async def failure(work: Awaitable[PrefillResult]) -> PrefillFailed:
    with pytest.raises(PrefillFailed) as caught:
        await work
    return caught.value


def poet_job(number: int) -> PrefillJob:
    job = prefill_job(number, model="tiny")
    landing = msgspec.structs.replace(job.landing, adapter="files:1")
    return msgspec.structs.replace(job, adapter="poet", landing=landing)


async def test_a_job_with_an_adapter_asks_for_it_by_name(rig: Rig) -> None:
    await rig.front.submit(poet_job(1))
    body = next(engine.posted[0] for engine in rig.engines if engine.posted)
    assert body["model"] == "poet"
    assert body["kv_transfer_params"]["prfaas"]["adapter"] == "files:1"


async def test_a_job_runs_and_reports_its_numbers(rig: Rig) -> None:
    result = await rig.front.submit(prefill_job(1, num_tokens=8))
    assert (result.nbytes, result.cached_tokens) == (8 * BYTES_PER_TOKEN, 3)
    assert result.sent_share_at_prefill_end == 0.5
    assert result.transfer_tail_s == 0.125
    assert result.num_attempts == 1
    assert result.service_s == result.prefill_s
    assert result.open_s > 0
    assert result.engine_queue_s is not None
    assert 0 <= result.engine_queue_s <= result.prefill_s
    assert result.progress == ((0.5, result.nbytes, result.nbytes // 2),)
    assert result.reason == "least_loaded; cached_tokens=0; tokens_ahead=0; instances=2"
    body = next(engine.posted[0] for engine in rig.engines if engine.posted)
    assert body["max_tokens"] == 1
    assert body["prompt"] == [1] * 8
    assert body["kv_transfer_params"]["prfaas"] == {
        "role": "producer",
        "transfer_id": f"{1:032x}",
        "attempt": 1,
        "adapter": "",
        "token_digest": "",
    }
    assert rig.num_outboxes == 0


CHAT = b'{"messages":[],"tools":[{}],"stream":true,"n":3,"max_tokens":90,"seed":5}'


async def test_a_job_with_media_sends_the_chat_and_what_must_come_out_of_it(rig: Rig) -> None:
    media = (MediaItem("cat", 2, 4),)
    job = prefill_job(1, num_tokens=8)
    digest = token_digest(job.prompt_token_ids, media).hex()
    landing = msgspec.structs.replace(job.landing, token_digest=digest)
    job = msgspec.structs.replace(job, landing=landing, media=media, chat=CHAT)
    await rig.front.submit(job)
    body = next(engine.posted[0] for engine in rig.engines if engine.posted)
    assert "prompt" not in body
    assert (body["tools"], body["tool_choice"], body["seed"]) == ([{}], "none", 5)
    assert (body["stream"], body["n"], body["max_tokens"]) == (False, 1, 1)
    params = body["kv_transfer_params"]["prfaas"]
    assert params["token_digest"] == digest


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"media": (MediaItem("dog", 2, 4),), "chat": CHAT}, "other tokens or media"),
        ({"chat": CHAT}, "needs its chat, and no other"),
    ],
)
async def test_media_that_the_landing_is_not_for_are_refused(
    rig: Rig, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(PrefillFailed, match=message):
        await rig.front.submit(msgspec.structs.replace(prefill_job(1, num_tokens=8), **changes))
    assert not any(engine.posted for engine in rig.engines)


async def test_a_jobs_grant_reaches_the_agent(rig: Rig) -> None:
    job = msgspec.structs.replace(prefill_job(1), grant=b"granted")
    await rig.front.submit(job)
    assert [grant for agent in rig.agents for grant in agent.grants] == [b"granted"]


async def test_jobs_spread_over_instances_and_the_rest_waits(rig: Rig) -> None:
    rig.hold()
    tasks = [asyncio.create_task(rig.front.submit(prefill_job(n))) for n in (1, 2, 3)]
    for engine in rig.engines:
        await engine.wait_requests(1)
    await eventually(lambda: rig.embedded._queue.depth == 1)
    report = await rig.front.report()
    assert (report.running, report.queue_depth, report.healthy) == (2, 1, True)
    assert (report.queued_tokens, report.running_tokens) == (8, 16)
    assert sorted((job.instance, job.uncached_tokens) for job in report.jobs) == [
        ("", 8),
        ("p0", 8),
        ("p1", 8),
    ]
    assert {job.transfer_id for job in report.jobs} == {f"{n:032x}" for n in (1, 2, 3)}
    assert all(0 <= job.for_s < 20 for job in report.jobs)
    assert [item.running for item in report.instances] == [1, 1]
    rig.release()
    results = await asyncio.gather(*tasks)
    assert {result.instance for result in results} == {"p0", "p1"}
    assert sorted(result.queue_s > 0 for result in results) == [False, False, True]


async def test_a_job_goes_where_its_prompt_is_cached(rig: Rig) -> None:
    cached_tokens = {rig.agents[1].target: 6}
    job = msgspec.structs.replace(prefill_job(1), cached_tokens=cached_tokens)
    result = await rig.front.submit(job)
    assert result.instance == "p1"
    assert result.reason == "cached; cached_tokens=6; tokens_ahead=0; instances=2"


async def test_jobs_follow_the_layouts_of_engines_that_change(rig: Rig) -> None:
    old, new = rig.agents[0].fingerprint, "ef" * 32

    async def fingerprints() -> list[str]:
        return [item.layout_fingerprint for item in (await rig.front.report()).instances]

    async def change(index: int) -> None:
        rig.agents[index].fingerprint = new
        await eventually(fingerprints, lambda found: found[index] == new)

    assert await fingerprints() == [old, old]
    await change(0)
    used = [(await rig.front.submit(prefill_job(number))).instance for number in (1, 2)]
    assert used == ["p1", "p1"]
    await change(1)
    error = await failure(rig.front.submit(prefill_job(3)))
    assert error.code == "no_instance"
    assert "p0 lays KVCache out otherwise than the landing: fake" in error.message
    job = prefill_job(4)
    landing = msgspec.structs.replace(job.landing, layout_fingerprint=new)
    await rig.front.submit(msgspec.structs.replace(job, landing=landing))


async def test_what_a_prefill_took_itself_begins_when_the_one_before_it_ended() -> None:
    async with make_rig("embedded", num_instances=1, max_concurrent=2) as rig:
        rig.hold()
        tasks = []
        for number in (1, 2):
            tasks.append(asyncio.create_task(rig.front.submit(prefill_job(number))))
            await rig.engines[0].wait_requests(number)
        await asyncio.sleep(0.3)  # the fake agent says that the last 0.125 s were transfer
        rig.release()
        first, second = await asyncio.gather(*tasks)
        assert first.service_s == first.prefill_s > 0
        assert second.service_s < second.prefill_s / 2


async def test_a_job_over_the_queue_bound_is_refused(rig: Rig) -> None:
    rig.hold()
    tasks = [asyncio.create_task(rig.front.submit(prefill_job(n))) for n in range(1, 5)]
    for engine in rig.engines:
        await engine.wait_requests(1)
    await eventually(lambda: rig.embedded._queue.depth == 2)
    error = await failure(rig.front.submit(prefill_job(5)))
    assert error.code == "queue_full"
    assert "2 jobs wait" in error.message
    rig.release()
    await asyncio.gather(*tasks)


async def test_cancelling_a_queued_job_frees_its_place(rig: Rig) -> None:
    rig.hold()
    running = [asyncio.create_task(rig.front.submit(prefill_job(n))) for n in (1, 2)]
    for engine in rig.engines:
        await engine.wait_requests(1)
    queued = asyncio.create_task(rig.front.submit(prefill_job(3)))
    await eventually(lambda: rig.embedded._queue.depth == 1)
    queued.cancel()
    await asyncio.gather(queued, return_exceptions=True)
    await eventually(lambda: rig.embedded._queue.depth == 0)
    rig.release()
    await asyncio.gather(*running)
    assert sum(len(engine.posted) for engine in rig.engines) == 2


async def test_cancelling_a_running_job_aborts_engine_and_outbox(rig: Rig) -> None:
    rig.hold()
    task = asyncio.create_task(rig.front.submit(prefill_job(1)))
    await rig.engines[0].wait_requests(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await rig.engines[0].wait_aborts(1)
    await eventually(lambda: rig.num_outboxes == 0 and rig.embedded._queue.num_running == 0)
    assert rig.agents[0].cancelled == [f"{1:032x}"]


async def test_cancelling_while_the_outbox_opens_leaves_no_outbox(rig: Rig) -> None:
    opening, go_on = asyncio.Event(), asyncio.Event()

    async def pause(method: str) -> None:
        if method == "OpenOutbox":
            opening.set()
            await go_on.wait()

    rig.agents[0].before_reply = pause
    task = asyncio.create_task(rig.front.submit(prefill_job(1)))
    await opening.wait()
    task.cancel()
    await asyncio.sleep(0.05)
    go_on.set()
    await asyncio.gather(task, return_exceptions=True)
    await eventually(lambda: rig.agents[0].cancelled == [f"{1:032x}"])
    await eventually(lambda: rig.num_outboxes == 0 and rig.embedded._queue.num_running == 0)
    assert rig.engines[0].posted == []


async def test_cancelling_while_the_transfer_ends_cancels_it(rig: Rig) -> None:
    rig.engines[0].completes_transfer = False
    task = asyncio.create_task(rig.front.submit(prefill_job(1)))
    await rig.engines[0].wait_requests(1)
    await eventually(lambda: rig.engines[0].num_serving == 0)
    assert rig.num_outboxes == 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await eventually(lambda: rig.num_outboxes == 0 and rig.embedded._queue.num_running == 0)


async def test_an_engine_that_dies_is_replaced_once(rig: Rig) -> None:
    rig.hold()
    task = asyncio.create_task(rig.front.submit(prefill_job(1)))
    await rig.engines[0].wait_requests(1)
    rig.engines[1].first_token.set()
    await rig.engines[0].stop()
    result = await task
    assert (result.instance, result.num_attempts) == ("p1", 2)
    assert rig.num_outboxes == 0
    report = await rig.front.report()
    assert [item.healthy for item in report.instances] == [False, True]
    assert "engine" in report.instances[0].reason


async def test_both_engines_dying_is_a_clear_failure(rig: Rig) -> None:
    rig.hold()
    task = asyncio.create_task(rig.front.submit(prefill_job(1)))
    await rig.engines[0].wait_requests(1)
    await rig.engines[0].stop()
    await rig.engines[1].wait_requests(1)
    await rig.engines[1].stop()
    error = await failure(task)
    assert error.code == "engine_failed"
    assert "p1" in error.message
    assert rig.num_outboxes == 0
    assert (await failure(rig.front.submit(prefill_job(2)))).code == "no_instance"


async def test_an_engine_that_left_its_agent_is_not_given_an_outbox(rig: Rig) -> None:
    rig.agents[0].instances.clear()
    result = await rig.front.submit(prefill_job(1))
    assert result.instance == "p1"
    assert rig.agents[0].cancelled == []
    rig.agents[1].instances.clear()
    error = await failure(rig.front.submit(prefill_job(2)))
    assert error.code == "engine_failed"
    assert "engine p1 is not connected" in error.message


async def test_an_engine_that_does_not_tell_its_own_queue_has_it_in_the_prefill(rig: Rig) -> None:
    for agent in rig.agents:
        agent.prefill_s = 0.0
    assert (await rig.front.submit(prefill_job(1))).engine_queue_s is None


async def test_a_full_or_dead_agent_leads_to_the_other_instance(rig: Rig) -> None:
    rig.agents[0].outbox_room = 0
    result = await rig.front.submit(prefill_job(1))
    assert (result.instance, result.num_attempts) == ("p1", 2)
    rig.agents[0].outbox_room = 100
    await rig.agents[1].stop()
    results = [await rig.front.submit(prefill_job(n)) for n in (2, 3)]
    assert {result.instance for result in results} == {"p0"}


async def test_an_agent_that_dies_under_a_job_fails_it_quickly() -> None:
    async with make_rig("embedded", num_instances=1) as rig:
        rig.hold()
        task = asyncio.create_task(rig.front.submit(prefill_job(1)))
        await rig.engines[0].wait_requests(1)
        await rig.agents[0].stop()
        async with asyncio.timeout(20):
            error = await failure(task)
            await rig.engines[0].wait_aborts(1)
        assert error.code == "agent_failed"
        assert not (await rig.front.report()).healthy


async def test_an_engine_that_hangs_loses_its_jobs(rig: Rig) -> None:
    rig.hold()
    task = asyncio.create_task(rig.front.submit(prefill_job(1)))
    await rig.engines[0].wait_requests(1)
    rig.engines[1].first_token.set()
    rig.engines[0].healthy = False
    result = await task
    assert (result.instance, result.num_attempts) == ("p1", 2)
    await rig.engines[0].wait_aborts(1)


async def test_a_request_the_engine_refuses_is_not_tried_elsewhere(rig: Rig) -> None:
    for engine in rig.engines:
        engine.reply = refusing(400, "refused by the fake")
    error = await failure(rig.front.submit(prefill_job(1)))
    assert error.code == "rejected"
    assert "refused by the fake" in error.message
    assert sum(len(engine.posted) for engine in rig.engines) == 1
    assert rig.num_outboxes == 0


async def test_an_adapter_that_one_engine_lacks_is_looked_for_at_another(rig: Rig) -> None:
    rig.engines[0].reply = refusing(404)
    result = await rig.front.submit(poet_job(1))
    assert (result.instance, result.num_attempts) == ("p1", 2)
    assert [len(engine.posted) for engine in rig.engines] == [1, 1]
    rig.engines[1].reply = refusing(404)
    assert (await failure(rig.front.submit(poet_job(2)))).code == "rejected"
    num_requests = sum(len(engine.posted) for engine in rig.engines)
    error = await failure(rig.front.submit(prefill_job(3)))
    assert error.code == "rejected", "a wrong model is a mistake of the request"
    assert sum(len(engine.posted) for engine in rig.engines) == num_requests + 1


async def test_a_transfer_that_fails_aborts_the_prefill(rig: Rig) -> None:
    rig.hold()
    task = asyncio.create_task(rig.front.submit(prefill_job(1)))
    await rig.engines[0].wait_requests(1)
    rig.agents[0].end_outbox(f"{1:032x}", "failed", "refused: unknown transfer")
    error = await failure(task)
    assert error.code == "transfer_failed"
    assert "refused: unknown transfer" in error.message
    await rig.engines[0].wait_aborts(1)
    assert len(rig.engines[1].posted) == 0


async def test_a_transfer_that_stalls_after_the_prefill_is_given_up(rig: Rig) -> None:
    rig.engines[0].completes_transfer = False
    error = await failure(rig.front.submit(prefill_job(1)))
    assert error.code == "transfer_failed"
    assert "0 of 4096 bytes" in error.message
    assert rig.num_outboxes == 0


async def test_contradictory_jobs_are_refused(rig: Rig) -> None:
    job = prefill_job(1)
    short = msgspec.structs.replace(job, prompt_token_ids=TokenIds.of([1, 1]))
    other = msgspec.structs.replace(job, prompt_token_ids=TokenIds.of([2] * 8))
    for wrong in (short, other):
        assert (await failure(rig.front.submit(wrong))).code == "invalid"
    rig.hold()
    task = asyncio.create_task(rig.front.submit(job))
    await rig.engines[0].wait_requests(1)
    assert (await failure(rig.front.submit(job))).code == "invalid"
    rig.release()
    await task


async def test_draining_lets_jobs_end_and_takes_no_new_ones(rig: Rig) -> None:
    rig.hold()
    task = asyncio.create_task(rig.front.submit(prefill_job(1)))
    await rig.engines[0].wait_requests(1)
    draining = asyncio.create_task(rig.front.drain("p0"))
    rig.engines[1].first_token.set()
    for number in (2, 3):
        assert (await rig.front.submit(prefill_job(number))).instance == "p1"
    assert not draining.done()
    rig.release()
    await asyncio.gather(task, draining)
    assert (await rig.front.report()).instances[0].draining
    await rig.front.resume("p0")
    used = {(await rig.front.submit(prefill_job(n))).instance for n in (4, 5)}
    assert used == {"p0", "p1"}
    for call in (rig.front.drain, rig.front.resume):
        with pytest.raises(UnknownInstance, match="p9"):
            await call("p9")


async def test_a_drain_ends_with_the_caller_that_waited_for_it(rig: Rig) -> None:
    """A remote one at least: it cannot say any more what comes next."""
    rig.hold()
    task = asyncio.create_task(rig.front.submit(prefill_job(1)))
    await rig.engines[0].wait_requests(1)
    draining = asyncio.create_task(rig.front.drain("p0"))
    instance = rig.embedded._instances.by_name["p0"]
    await eventually(lambda: instance.draining)
    draining.cancel()
    await asyncio.gather(draining, return_exceptions=True)
    if rig.front is not rig.embedded:
        await eventually(lambda: not instance.draining)
    rig.release()
    await task


async def test_an_instance_that_comes_back_is_used_again(rig: Rig) -> None:
    rig.engines[0].healthy = False
    await eventually(lambda: not rig.embedded._instances.by_name["p0"].transfers)
    assert (await rig.front.submit(prefill_job(1))).instance == "p1"
    rig.engines[0].healthy = True
    await eventually(lambda: rig.embedded._instances.by_name["p0"].transfers)
    assert (await rig.front.submit(prefill_job(2))).instance == "p0"


async def test_closing_ends_everything(rig: Rig) -> None:
    rig.hold()
    tasks = [asyncio.create_task(rig.front.submit(prefill_job(n))) for n in (1, 2, 3)]
    for engine in rig.engines:
        await engine.wait_requests(1)
    await eventually(lambda: rig.embedded._queue.depth == 1)
    await rig.front.close()
    errors = await asyncio.gather(*tasks, return_exceptions=True)
    assert [getattr(error, "code", error) for error in errors] == ["closed"] * 3
    await eventually(lambda: rig.num_outboxes == 0)
    assert (await failure(rig.front.submit(prefill_job(4)))).code == "closed"


async def test_an_idle_instance_is_timed_and_a_busy_one_is_not(rig: Rig) -> None:
    order = TimingOrder(instance="p0", lengths=(4, 8), limit_s=5.0)
    found = await rig.front.time_prefills(order)
    assert ([num for num, _ in found.prefills], found.reason) == ([4, 8], "")
    assert [len(body["prompt"]) for body in rig.engines[0].posted] == [4, 8]
    assert all(body["cache_salt"] for body in rig.engines[0].posted)
    assert rig.num_outboxes == 0
    rig.hold()
    tasks = [asyncio.create_task(rig.front.submit(prefill_job(n))) for n in (1, 2)]
    for engine in rig.engines:
        await eventually(lambda engine=engine: engine.num_serving == 1)
    found = await rig.front.time_prefills(order)
    assert (found.prefills, found.reason) == ((), "p0 is busy")
    rig.release()
    await asyncio.gather(*tasks)
    with pytest.raises(UnknownInstance, match="p9"):
        await rig.front.time_prefills(TimingOrder(instance="p9", lengths=(4,), limit_s=5.0))


async def test_the_lease_of_a_long_prefill_is_renewed() -> None:
    async with make_rig("embedded", num_instances=1) as rig:
        rig.embedded._runner._config = replace(CONFIG.runner, outbox_lease_s=0.15)
        rig.hold()
        task = asyncio.create_task(rig.front.submit(prefill_job(1)))
        await eventually(lambda: rig.agents[0].renewals >= 3)
        rig.release()
        await task


async def test_a_remote_front_that_is_not_there_is_said_to_be() -> None:
    front = RemotePrefillCluster("east", "127.0.0.1:1")
    assert (await failure(front.submit(prefill_job(1)))).code == "unreachable"
    report = await front.report()
    assert not report.healthy
    assert "not reachable" in report.reason
    await front.close()
