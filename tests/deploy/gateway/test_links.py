"""The gateway follows agents and joins their paths to links. No sockets."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator

import pytest
from eventually import eventually
from link_cases import path_report
from msgspec import structs
from report_cases import on_nodes

from deploy.gateway.links.region_links import SAME_S, RegionLinks
from kvmanager.agent.links.messages import LinkFeed, SendLinkProbeReply, WatchLinks
from kvmanager.agent.probe_messages import ProbeLandingReply
from netmon.estimate import PathReport
from transport.rpc import RpcError


class LinkSpeaker:
    """An agent that answers when the test lets it."""

    def __init__(self, data_endpoint: str) -> None:
        self.data_endpoint = data_endpoint
        self.answers: asyncio.Queue[list[PathReport] | Exception] = asyncio.Queue()
        self.asked: list[int] = []
        self.sent: list[tuple[int, str, int]] = []
        self.num_closed = 0

    async def watch_links(self, request: WatchLinks) -> LinkFeed:
        self.asked.append(request.after_seq)
        answer = await self.answers.get()
        if isinstance(answer, Exception):
            raise answer
        return LinkFeed(len(self.asked), self.data_endpoint, answer)

    async def probe_landing(
        self, nbytes: int, lease_s: float, timeout_s: float
    ) -> ProbeLandingReply:
        return ProbeLandingReply(f"probe of {nbytes}", "", "", "b1", 7100, 5.0)

    async def send_link_probe(
        self, landing: ProbeLandingReply, nbytes: int, host: str, port: int
    ) -> SendLinkProbeReply:
        assert landing.transfer_id == f"probe of {nbytes}"
        self.sent.append((nbytes, host, port))
        return SendLinkProbeReply(nbytes, 0.1)

    async def probe_end(self, transfer_id: str, reason: str, timeout_s: float) -> None: ...

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
        await self.links.watch(on_nodes("far", a1="a:1"))
        await self.links.watch(on_nodes("home", b1="b:1"))

    def say(self, target: str, *reports: PathReport) -> None:
        self.agents[target].answers.put_nowait(list(reports))


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
    region.say(
        "a:1", path_report("tunnel:9", available=9.0, full_age_s=0.1), path_report("elsewhere:1")
    )
    await eventually(lambda: links.now("far", "home").num_paths == 1)
    region.now_s += 2.0
    now = links.now("far", "home")
    assert (now.name, now.available_bytes_per_s, now.age_s) == ("wan", 9.0, 2.0)
    region.now_s += 0.5 * SAME_S
    assert links.now("far", "home") is now
    overview = links.overview()
    assert [path.to for path in overview.paths] == ["home/b1", ""]
    assert [(link.source, link.target) for link in overview.links] == [("far", "home")]
    assert overview.errors == {}
    region.say("b:1", path_report("a1:7100", available=3.0, full_age_s=0.1))
    await eventually(lambda: len(links.overview().links) == 2)
    assert links.now("home", "far").available_bytes_per_s == 3.0


async def test_an_agent_that_does_not_answer_keeps_its_last_words(region: Region) -> None:
    links = region.links
    region.say("b:1")
    region.say("a:1", path_report("tunnel:9", "congested"))
    await eventually(lambda: links.now("far", "home").condition == "congested")
    region.agents["a:1"].answers.put_nowait(RpcError("UNAVAILABLE", "gone"))
    await eventually(lambda: "far/a1" in links.overview().errors)
    assert links.overview().errors == {"far/a1": "gone"}
    region.now_s += 60.0
    assert links.now("far", "home").age_s == 60.0
    region.say("a:1", path_report("tunnel:9"))
    await eventually(lambda: not links.overview().errors)
    assert region.agents["a:1"].asked[:3] == [0, 1, 0]
    assert links.now("far", "home").age_s == pytest.approx(0.0)


async def test_nodes_that_are_reported_no_more_are_forgotten(region: Region) -> None:
    links = region.links
    region.say("b:1")
    region.say("a:1", path_report("tunnel:9"))
    await eventually(lambda: links.now("far", "home").num_paths == 1)
    await links.watch(structs.replace(on_nodes("far"), heard=False))  # says nothing
    assert len(links.overview().paths) == 1
    region.agents["a:2"] = LinkSpeaker("a2:7100")
    await links.watch(on_nodes("far", a2="a:2"))
    assert links.overview().paths == []
    assert region.agents["a:1"].num_closed == 1
    await eventually(lambda: len(region.agents["a:2"].asked) > 0)
    await links.watch(on_nodes("far"))
    assert region.agents["a:2"].num_closed == 1


async def test_a_probe_that_is_asked_for_is_sent_once(region: Region) -> None:
    region.say("b:1")
    await eventually(lambda: len(region.agents["b:1"].asked) == 2)
    region.say(
        "a:1", path_report("tunnel:9", probe_bytes=4096), path_report("elsewhere:1", probe_bytes=1)
    )
    region.say("a:1", path_report("tunnel:9", probe_bytes=4096))
    await eventually(lambda: len(region.agents["a:1"].asked) == 3)
    assert region.agents["a:1"].sent == [(4096, "tunnel", 9)]


async def test_a_node_that_says_it_receives_where_another_one_does_is_not_believed() -> None:
    region = Region()
    region.agents["x:1"] = LinkSpeaker("b1:7100")
    await region.start()
    region.say("b:1")
    await region.links.wait_heard(0.2)
    await region.links.watch(on_nodes("evil", x1="x:1"))
    region.say("x:1", path_report("b1:7100"))
    await eventually(lambda: bool(region.links.overview().errors))
    assert region.links.overview().errors == {
        "evil/x1": "it says that it receives at b1:7100, as home/b1 does"
    }
    region.say("a:1", path_report("tunnel:9"))
    await eventually(lambda: bool(region.links.overview().paths))
    assert [path.to for path in region.links.overview().paths] == ["home/b1"]
    await region.links.close()


async def test_a_report_with_numbers_that_cannot_be_is_not_believed(region: Region) -> None:
    region.say("b:1")
    region.say("a:1", path_report("tunnel:9", rtt_s=math.nan))
    await eventually(lambda: bool(region.links.overview().errors))
    error = "rtt_s is nan; it must be finite and not negative"
    assert region.links.overview().errors == {"far/a1": error}
    assert region.links.now("far", "home").num_paths == 0
