"""Instances join and leave fronts that serve, embedded and remote, with fake engines."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pd_front_rig
import pytest
from eventually import eventually
from front_access import prefill_cluster, running, started_prefill
from front_doubles import FakeAgent, FakeEngine, prefill_job

from prfaas.cluster import PrefillCluster
from prfaas.embedded import EmbeddedPrefillCluster, PrefillClusterConfig
from prfaas.engines.errors import UnknownInstance
from prfaas.engines.health import ProbeTiming
from prfaas.engines.instance import InstanceSpec
from prfaas.engines.instances import InstancesConfig
from prfaas.engines.members import Join, Leave, LetGo, MemberRefused
from prfaas.engines.prefill_run import RunnerConfig

CONFIG = PrefillClusterConfig(
    instances=InstancesConfig(probes=ProbeTiming(interval_s=0.05, start_interval_s=0.05)),
    runner=RunnerConfig(await_slice_s=0.5, cleanup_timeout_s=1.0, stall_timeout_s=0.5),
)


class Members:
    """A prefill front, at first with `p0`, and engines that may join it."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self.engines: dict[str, FakeEngine] = {}
        self.agents: dict[str, FakeAgent] = {}
        self.embedded: EmbeddedPrefillCluster
        self.front: PrefillCluster

    async def engine(self, name: str) -> Join:
        """A running engine with an agent, and the order to add it."""
        agent = self.agents[name] = await running(self._stack, FakeAgent(name))
        engine = self.engines[name] = await running(self._stack, FakeEngine(agent))
        return Join(name=name, url=engine.url, agent=agent.target, max_concurrent=1)

    async def names(self, *, usable: bool = False) -> list[str]:
        report = await self.front.report()
        return [
            item.name
            for item in report.instances
            if not usable or (item.healthy and not item.draining)
        ]

    async def until_names(self, *names: str, usable: bool = True) -> None:
        await eventually(lambda: self.names(usable=usable), lambda found: found == list(names))

    async def reason(self, name: str) -> str:
        report = await self.front.report()
        return next(item.reason for item in report.instances if item.name == name)


@pytest.fixture(params=["embedded", "remote"])
async def members(request: pytest.FixtureRequest) -> AsyncIterator[Members]:
    async with AsyncExitStack() as stack:
        made = Members(stack)
        spec: InstanceSpec = (await made.engine("p0")).spec()
        made.embedded = prefill_cluster("east", [spec], CONFIG)
        made.front = await started_prefill(stack, request.param, made.embedded)
        yield made
        for engine in made.engines.values():
            engine.first_token.set()


async def test_an_instance_that_joins_takes_jobs_that_wait(members: Members) -> None:
    members.engines["p0"].first_token.clear()
    jobs = [asyncio.create_task(members.front.submit(prefill_job(n))) for n in (1, 2)]
    await members.engines["p0"].wait_requests(1)
    await members.front.change_members(await members.engine("p1"))
    done, waiting = await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
    members.engines["p0"].first_token.set()
    assert [job.result().instance for job in done] == ["p1"]
    assert [(await job).instance for job in waiting] == ["p0"]


async def test_an_instance_that_leaves_ends_its_job_and_the_queue_goes_to_others(
    members: Members,
) -> None:
    await members.front.change_members(await members.engine("p1"))
    await members.until_names("p0", "p1")
    for engine in members.engines.values():
        engine.first_token.clear()
    jobs = [asyncio.create_task(members.front.submit(prefill_job(n))) for n in (1, 2, 3, 4)]
    for engine in members.engines.values():
        await engine.wait_requests(1)
    await members.front.change_members(Leave(name="p0"))
    await members.until_names("p1")
    assert await members.names() == ["p0", "p1"]
    members.engines["p0"].first_token.set()
    await members.front.change_members(LetGo(name="p0"))
    await members.until_names("p1", usable=False)
    members.engines["p1"].first_token.set()
    results = await asyncio.gather(*jobs)
    assert sorted(result.instance for result in results) == ["p0", "p1", "p1", "p1"]
    assert len(members.engines["p0"].posted) == 1


async def test_an_instance_stays_until_it_is_let_go_and_takes_no_job_meanwhile(
    members: Members,
) -> None:
    await members.front.change_members(await members.engine("p1"))
    await members.until_names("p0", "p1")
    await members.front.change_members(Leave(name="p0"))
    await members.front.resume("p0")  # as the end of a conversion would
    assert (await members.front.submit(prefill_job(1))).instance == "p1"
    report = await members.front.report()
    assert [(item.name, item.leaving) for item in report.instances] == [("p0", True), ("p1", False)]
    await members.front.change_members(LetGo(name="p0"))
    await members.until_names("p1", usable=False)


async def test_what_runs_at_the_end_of_the_limit_fails_over(members: Members) -> None:
    await members.front.change_members(await members.engine("p1"))
    await members.until_names("p0", "p1")
    members.engines["p0"].first_token.clear()
    members.engines["p1"].first_token.clear()
    jobs = [asyncio.create_task(members.front.submit(prefill_job(n))) for n in (1, 2)]
    for engine in members.engines.values():
        await engine.wait_requests(1)
    await members.front.change_members(Leave(name="p0", limit_s=0.2))
    await members.engines["p0"].wait_aborts(1)
    members.engines["p1"].first_token.set()
    results = await asyncio.gather(*jobs)
    assert [result.instance for result in results] == ["p1", "p1"]
    await members.until_names("p1", usable=False)


async def test_another_of_the_name_joins_once_the_first_is_gone(members: Members) -> None:
    old = members.engines["p0"]
    old.first_token.clear()
    job = asyncio.create_task(members.front.submit(prefill_job(1)))
    await old.wait_requests(1)
    await members.front.change_members(Leave(name="p0"))
    await members.front.change_members(await members.engine("p0"))
    with pytest.raises(MemberRefused, match="another p0 waits"):
        await members.front.change_members(Join(name="p0", url="http://127.0.0.1:1", agent="a:1"))
    old.first_token.set()
    await job
    await members.front.change_members(LetGo(name="p0"))
    await members.until_names("p0")
    assert (await members.front.submit(prefill_job(2))).instance == "p0"
    assert len(members.engines["p0"].posted) == 1


async def test_who_may_not_join(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    order = await members.engine("p0")
    with pytest.raises(MemberRefused, match="east has an instance p0 already"):
        await members.front.change_members(order)
    with pytest.raises(MemberRefused, match="max_concurrent"):
        await members.front.change_members(
            Join(name="p9", url="http://127.0.0.1:1", agent="a:1", max_concurrent=0)
        )
    with pytest.raises(UnknownInstance):
        await members.front.change_members(Leave(name="p9"))
    # One whose engine has other weights is in no placement, and says why.
    other = await members.engine("p1")
    members.agents["p1"].fingerprint, members.agents["p1"].weights = "cd" * 32, "weights-2"
    await members.front.change_members(other)
    reason = await eventually(lambda: members.reason("p1"), lambda text: "may not join" in text)
    assert "the weights are weights-2 at p1, but weights-1 at p0" in reason
    assert await members.names(usable=True) == ["p0"]
    # Its engine loads the right ones.
    members.agents["p1"].fingerprint = members.agents["p0"].fingerprint
    await members.until_names("p0", "p1")


async def test_a_dead_agent_keeps_nobody_waiting(members: Members) -> None:
    await members.front.change_members(await members.engine("p1"))
    await members.until_names("p0", "p1")
    await members.agents["p0"].stop()
    await members.front.change_members(Leave(name="p0"))
    await members.until_names("p1", usable=False)


async def test_nothing_is_left_of_a_thousand_that_joined_and_left(members: Members) -> None:
    embedded = members.embedded
    before = len(asyncio.all_tasks())
    order = await members.engine("p1")
    for number in range(1000):
        name = f"x{number}"
        embedded.departures.join(
            Join(name=name, url=order.url, agent=order.agent, role="prefill").spec()
        )
        embedded.departures.order(Leave(name=name))
        embedded.departures.order(LetGo(name=name))
        if number % 50 == 49:
            await members.until_names("p0", usable=False)
    await members.until_names("p0", usable=False)
    assert list(embedded._queue._instances) == list(embedded._instances.by_name) == ["p0"]
    assert not embedded.departures._leaving
    assert list(embedded._instances._tasks) == ["p0"]
    await eventually(lambda: len(asyncio.all_tasks()) <= before + 2)
    assert (await members.front.submit(prefill_job(1))).instance == "p0"


@pytest.mark.parametrize("kind", ["embedded", "remote"])
async def test_a_pd_instance_leaves_when_its_slots_and_requests_are_over(kind: str) -> None:
    async with pd_front_rig.make_rig(kind) as rig:
        slot = await rig.reserve()
        left = slot.instance
        await rig.front.change_members(Leave(name=left))
        await rig.front.change_members(LetGo(name=left))
        other = await rig.reserve()
        assert other.instance != left
        assert left in {item.name for item in (await rig.front.report()).instances}
        rig.nodes[int(left[1])].end_landing(slot.landing.transfer_id, "complete")
        assert await rig.awaited(slot) == ("landed", "")
        await rig.front.release(slot, "done")
        rig.front.request_ended(left)
        await eventually(
            rig.front.report, lambda report: left not in {item.name for item in report.instances}
        )
        assert left not in rig.embedded._landings.slots._num_awaited
        assert left not in rig.embedded._handoff._given
        await rig.front.release(other, "done")
