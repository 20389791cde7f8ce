"""Links between clusters out of what agents say; agents are followed. No sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from deploy.gateway.links.region_links import SAME_S, RegionLinks
from kvmanager.agent.links.messages import LinkFeed, LinkView, SendLinkProbeReply, WatchLinks
from kvmanager.agent.messages import ProbeLandingReply
from netmon.estimate import LinkEstimate
from scheduler.live.region_link import NUM_STEPS, STALE_S, HeardPath, RegionLink
from scheduler.reports import ClusterReport, InstanceReport
from scheduler.routing.views import LinkCondition
from transport.rpc import RpcError

MB = 1_000_000


def view(
    endpoint: str = "b1:7100",
    condition: str = "clear",
    *,
    available: float = 0.0,
    full_age_s: float | None = None,
    age_s: float | None = None,
    **fields: Any,
) -> LinkView:
    """`fields` are those of the estimate, but for the transfers and the size of a probe."""
    of_view = {
        name: fields.pop(name) for name in ("num_transfers", "probe_bytes") if name in fields
    }
    estimate = LinkEstimate(
        available_bytes_per_s=available,
        full_age_s=full_age_s,
        age_s=full_age_s if age_s is None else age_s,
        is_up=condition != "down",
        **({"sample_age_s": 0.1} | fields),
    )
    return LinkView(
        endpoint=endpoint,
        condition=condition,
        reason=f"because of {endpoint}",
        condition_s=1.0,
        reference_bytes_per_s=available,
        estimate=estimate,
        **of_view,
    )


def heard(*views: LinkView, at_s: float = 10.0) -> list[HeardPath]:
    return [HeardPath(f"far/a{index}", "home/b1", item, at_s) for index, item in enumerate(views)]


def link_of(*views: LinkView, now_s: float = 10.0) -> RegionLink:
    link = RegionLink("far", "home")
    link.observe(heard(*views, at_s=now_s), now_s)
    return link


def test_an_unused_link_is_clear_and_unknown() -> None:
    now = RegionLink("far", "home", "wan").now(5.0)
    assert (now.name, now.condition, now.available_bytes_per_s) == ("wan", "clear", None)
    assert (now.age_s, now.num_paths) == (None, 0)
    assert now.view().age_s > 1000
    heard_of = RegionLink("far", "home").now(5.0, 0.5)
    assert heard_of.age_s == 0.5
    assert heard_of.view().available_bytes_per_s is None


def test_a_link_whose_senders_are_silent_says_so() -> None:
    link = link_of(view(available=50.0 * MB, full_age_s=0.2), now_s=10.0)
    assert "heard of" not in link.now(14.0, 4.0).reason
    silent = link.now(18.0, 8.0)
    assert silent.reason == "none of its senders was heard of for 8.0 s"
    assert silent.age_s == 8.0


def test_what_is_measured_together_adds_up() -> None:
    busy = {"available": 50.0 * MB, "full_age_s": 0.2, "achieved_bytes_per_s": 50.0 * MB}
    link = link_of(
        view(**busy, backlog_bytes=100 * MB, num_transfers=2, rtt_s=0.03, base_rtt_s=0.02),
        view(**busy, backlog_bytes=50 * MB, num_transfers=1, rtt_s=0.02, base_rtt_s=0.01, loss=0.1),
        view(available=90.0 * MB, full_age_s=50.0, achieved_bytes_per_s=10.0 * MB, rtt_s=0.01),
    )
    now = link.now(10.0)
    assert now.available_bytes_per_s == 110 * MB
    assert now.achieved_bytes_per_s == 110 * MB
    assert (now.utilisation, now.is_floor, now.rate_age_s) == (1.0, False, 0.0)
    assert (now.backlog_bytes, now.num_transfers) == (150 * MB, 3)
    assert now.backlog_s == pytest.approx(150 / 110)
    assert (now.rtt_s, now.loss) == (0.03, 0.1)
    routing = now.view()
    assert (routing.state, routing.backlog_bytes) == (LinkCondition.CLEAR, 150 * MB)


def test_a_rate_stays_when_the_traffic_ends_and_grows_older() -> None:
    busy = {"available": 50.0 * MB, "full_age_s": 0.2}
    link = link_of(view(**busy), view(**busy))
    for now_s in (12.0, 14.0, 16.0):
        idle = {"available": 50.0 * MB, "full_age_s": now_s - 9.8}
        link.observe(heard(view(**idle), view(**idle), at_s=now_s), now_s)
    now = link.now(16.0)
    assert now.available_bytes_per_s == 100 * MB
    assert now.rate_age_s == 6.0


def test_one_that_measures_now_overrules_the_memory_of_others() -> None:
    link = link_of(view(available=100.0 * MB, full_age_s=0.1))
    paths = heard(
        view(available=100.0 * MB, full_age_s=20.0),
        view(available=5.0 * MB, full_age_s=0.2, num_transfers=1),
        at_s=30.0,
    )
    link.observe(paths, 30.0)
    assert link.now(30.0).available_bytes_per_s == 5 * MB


def test_floors_raise_and_never_lower() -> None:
    link = link_of(view(available=10.0 * MB, age_s=0.5, is_floor=True))
    assert link.now(10.0).available_bytes_per_s == 10 * MB
    assert link.now(10.0).is_floor
    for rate, expected in ((30.0, 30.0), (20.0, 30.0), (28.0, 30.0)):
        link.observe(heard(view(available=rate * MB, age_s=0.0, is_floor=True), at_s=20.0), 20.0)
        assert link.now(20.0).available_bytes_per_s == expected * MB
    assert link.now(21.0).rate_age_s == 1.0


def test_the_worst_path_speaks_for_the_link() -> None:
    link = link_of(view("b1:1"), view("b2:1", "congested", num_transfers=1), view("b3:1", "rising"))
    now = link.now(10.0)
    assert (now.condition, now.num_paths) == ("congested", 3)
    assert now.reason == "far/a1 to home/b1: because of b2:1"


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([], "down"),
        ([view("b2:1")], "clear"),
        ([view("b2:1", "rising", num_transfers=1)], "rising"),
        ([view("b2:1", "down")], "down"),
    ],
)
def test_one_dead_receiver_is_no_dead_link(others: list[LinkView], expected: str) -> None:
    assert link_of(view("b1:1", "down"), *others).now(10.0).condition == expected


def test_a_link_is_down_when_all_who_want_to_send_cannot() -> None:
    link = link_of(
        view("b1:1", "down", num_transfers=1, backlog_bytes=5),
        view("b2:1", available=7.0, age_s=0.0),
    )
    now = link.now(10.0)
    assert (now.condition, now.available_bytes_per_s) == ("down", 0.0)
    assert now.view().state is LinkCondition.DOWN


def test_old_news_is_no_news() -> None:
    link = link_of(view(condition="congested", available=5.0 * MB, full_age_s=0.1))
    late_s = 10.0 + STALE_S + 1
    now = link.now(late_s, 2.0)
    assert (now.condition, now.num_paths, now.age_s) == ("clear", 0, 2.0)
    assert now.available_bytes_per_s == 5 * MB
    assert now.rate_age_s == STALE_S + 1


def test_the_past_is_kept_for_a_while() -> None:
    link = RegionLink("far", "home")
    for index in range(4 * NUM_STEPS):
        now_s = index / 4
        link.observe(heard(view(achieved_bytes_per_s=float(index)), at_s=now_s), now_s)
    steps = link.steps(now_s)
    assert len(steps) == NUM_STEPS
    assert [step.age_s for step in steps] == sorted((s.age_s for s in steps), reverse=True)
    assert steps[0].achieved_bytes_per_s < steps[-1].achieved_bytes_per_s


class LinkSpeaker:
    """An agent that answers when the test lets it."""

    def __init__(self, data_endpoint: str) -> None:
        self.data_endpoint = data_endpoint
        self.answers: asyncio.Queue[list[LinkView] | Exception] = asyncio.Queue()
        self.asked: list[int] = []
        self.sent: list[tuple[int, str, int]] = []
        self.num_closed = 0

    async def watch(self, request: WatchLinks) -> LinkFeed:
        self.asked.append(request.after_seq)
        answer = await self.answers.get()
        if isinstance(answer, Exception):
            raise answer
        return LinkFeed(len(self.asked), self.data_endpoint, answer)

    async def open_landing(self, nbytes: int) -> ProbeLandingReply:
        return ProbeLandingReply(f"probe of {nbytes}", "", "", "b1", 7100, 5.0)

    async def send(
        self, landing: ProbeLandingReply, nbytes: int, host: str, port: int
    ) -> SendLinkProbeReply:
        assert landing.transfer_id == f"probe of {nbytes}"
        self.sent.append((nbytes, host, port))
        return SendLinkProbeReply(nbytes, 0.1)

    async def end_landing(self, transfer_id: str) -> None: ...

    async def close(self) -> None:
        self.num_closed += 1


class Region:
    """One sending and one receiving node; the sender takes a detour."""

    def __init__(self) -> None:
        self.now_s = 50.0
        self.agents = {"a:1": LinkSpeaker("a1:7100"), "b:1": LinkSpeaker("b1:7100")}
        self.links = RegionLinks(
            self.agents.__getitem__,
            names={("far", "home"): "wan"},
            detours={"far": {"b1:7100": "tunnel:9"}},
            clock_s=lambda: self.now_s,
        )

    async def start(self) -> None:
        await self.links.watch(report("far", a1="a:1"))
        await self.links.watch(report("home", b1="b:1"))

    def say(self, target: str, *views: LinkView) -> None:
        self.agents[target].answers.put_nowait(list(views))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not condition():
                await asyncio.sleep(0.001)


def report(name: str, **nodes: str) -> ClusterReport:
    """By node name, the address of its agent."""
    instances = tuple(
        InstanceReport(
            name=f"i-{node}",
            role="both",
            model="m",
            healthy=True,
            draining=False,
            running=0,
            max_concurrent=1,
            node=target,
            node_name=node,
        )
        for node, target in nodes.items()
    )
    return ClusterReport(name=name, healthy=True, queue_depth=0, running=0, instances=instances)


@pytest.fixture
async def region() -> AsyncIterator[Region]:
    made = Region()
    await made.start()
    yield made
    await made.links.close()
    assert all(agent.num_closed for agent in made.agents.values())


async def test_paths_are_joined_to_links_by_where_they_lead(region: Region) -> None:
    links = region.links
    assert links.now("far", "home").age_s is None
    region.say("b:1")
    region.say("a:1", view("tunnel:9", available=9.0, full_age_s=0.1), view("elsewhere:1"))
    await region.until(lambda: links.now("far", "home").num_paths == 1)
    region.now_s += 2.0
    now = links.now("far", "home")
    assert (now.name, now.available_bytes_per_s, now.age_s) == ("wan", 9.0, 2.0)
    region.now_s += 0.5 * SAME_S
    assert links.now("far", "home") is now
    overview = links.overview()
    assert [path.to for path in overview.paths] == ["home/b1", ""]
    assert [(link.source, link.target) for link in overview.links] == [("far", "home")]
    assert overview.errors == {}
    region.say("b:1", view("a1:7100", available=3.0, full_age_s=0.1))
    await region.until(lambda: len(links.overview().links) == 2)
    assert links.now("home", "far").available_bytes_per_s == 3.0


async def test_an_agent_that_does_not_answer_keeps_its_last_words(region: Region) -> None:
    links = region.links
    region.say("b:1")
    region.say("a:1", view("tunnel:9", "congested"))
    await region.until(lambda: links.now("far", "home").condition == "congested")
    region.agents["a:1"].answers.put_nowait(RpcError("UNAVAILABLE", "gone"))
    await region.until(lambda: "far/a1" in links.overview().errors)
    assert links.overview().errors == {"far/a1": "gone"}
    region.now_s += 60.0
    assert links.now("far", "home").age_s == 60.0
    region.say("a:1", view("tunnel:9"))
    await region.until(lambda: not links.overview().errors)
    assert region.agents["a:1"].asked[:3] == [0, 1, 0]
    assert links.now("far", "home").age_s == pytest.approx(0.0)


async def test_nodes_that_are_reported_no_more_are_forgotten(region: Region) -> None:
    links = region.links
    region.say("b:1")
    region.say("a:1", view("tunnel:9"))
    await region.until(lambda: links.now("far", "home").num_paths == 1)
    await links.watch(report("far"))  # says nothing
    assert len(links.overview().paths) == 1
    region.agents["a:2"] = LinkSpeaker("a2:7100")
    await links.watch(report("far", a2="a:2"))
    assert links.overview().paths == []
    assert region.agents["a:1"].num_closed == 1


async def test_a_probe_that_is_asked_for_is_sent_once(region: Region) -> None:
    region.say("b:1")
    await region.until(lambda: len(region.agents["b:1"].asked) == 2)
    region.say("a:1", view("tunnel:9", probe_bytes=4096), view("elsewhere:1", probe_bytes=1))
    region.say("a:1", view("tunnel:9", probe_bytes=4096))
    await region.until(lambda: len(region.agents["a:1"].asked) == 3)
    assert region.agents["a:1"].sent == [(4096, "tunnel", 9)]
