"""Links between two real agents: a rate that falls and comes back, a cut, probes, and what a
gateway that follows them shows.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import pytest
from agent_process import AgentProcess
from eventually import wait_until

from deploy.gateway.app import Gateway
from deploy.gateway.file import GatewayFile, agent_clients, build_clusters, build_links
from deploy.gateway.links.region_links import LinksOverview
from deploy.gateway.server import start_server
from deploy.lab.emulator import RelayProcess
from deploy.region.client import ask
from kvmanager.agent.between_agents import probe_link
from kvmanager.agent.client import AgentClient
from kvmanager.agent.links.messages import LinkFeed, WatchLinks
from kvmanager.agent.probe_messages import (
    ProbeEnd,
    ProbeEndReply,
    ProbeLanding,
    ProbeLandingReply,
    ProbeSend,
    ProbeSendReply,
)
from netmon.estimate import LinkCondition, PathReport
from netmon.region_link import LinkNow
from transport.rpc import RpcError

GIB = 1 << 30
MBIT = 125_000
# Queues grow by design here, and a busy machine makes them grow faster: that is no news.
QUICK = {"dwell_s": 0.4, "calm_s": 0.4, "backlog_s": [math.inf, math.inf]}


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[AgentProcess, AgentProcess]]:
    with (
        AgentProcess(
            tmp_path_factory.mktemp("a"),
            link_sample_interval_s=0.1,
            link_detector=QUICK,
        ) as sender,
        AgentProcess(tmp_path_factory.mktemp("b"), link_probes=False) as receiver,
    ):
        yield sender, receiver


class Sending:
    """Bytes, by default without end, from one agent to another, by way of an emulated link."""

    def __init__(
        self,
        sender: AgentProcess,
        receiver: AgentProcess,
        link: RelayProcess,
        nbytes: int = 8 * GIB,
    ) -> None:
        self._sender = sender
        landing = receiver.call("ProbeLanding", ProbeLanding(nbytes, 30.0), ProbeLandingReply)
        self._transfer_id = landing.transfer_id
        request = ProbeSend(
            transfer_id=landing.transfer_id,
            token=landing.token,
            fingerprint=landing.fingerprint,
            nbytes=nbytes,
            host=link.host,
            port=link.port,
            lease_s=30.0,
        )
        sender.call("ProbeSend", request, ProbeSendReply)

    def end(self) -> None:
        self._sender.call("ProbeEnd", ProbeEnd(self._transfer_id), ProbeEndReply)


def feed_of(agent: AgentProcess, **request: int | float | bool) -> LinkFeed:
    return agent.call("WatchLinks", WatchLinks(**request), LinkFeed)  # type: ignore[arg-type]


def seen(agent: AgentProcess, link: RelayProcess) -> PathReport | None:
    name = f"{link.host}:{link.port}"
    return next((item for item in feed_of(agent).links if item.endpoint == name), None)


def wait_for(
    agent: AgentProcess, link: RelayProcess, wanted: Callable[[PathReport], bool], timeout_s: float
) -> PathReport:
    """The link as soon as it is as `wanted`; AssertionError, with what it is, if it is not."""
    report: PathReport = wait_until(
        lambda: seen(agent, link),
        lambda report: report is not None and wanted(report),
        timeout_s=timeout_s,
    )
    return report


@pytest.mark.alone
def test_a_fall_of_the_rate_is_seen_and_its_return(
    agents: tuple[AgentProcess, AgentProcess],
) -> None:
    sender, receiver = agents
    with RelayProcess(receiver.ready["data"], rate="200Mbit", rtt="10ms") as link:
        sending = Sending(*agents, link)

        def is_measured(report: PathReport) -> bool:
            rates = report.estimate.available_bytes_per_s, report.reference_bytes_per_s
            return report.condition == "clear" and all(150 < rate / MBIT < 300 for rate in rates)

        clear = wait_for(sender, link, is_measured, 6.0)
        assert clear.num_transfers == 1
        assert clear.oldest_queued_s is not None
        assert clear.estimate.backlog_bytes > 100 << 20
        link.configure(rate="50Mbit")
        congested = wait_for(sender, link, lambda report: report.condition == "congested", 2.0)
        assert congested.num_changes[LinkCondition.CONGESTED] >= 1
        assert congested.reason
        link.configure(rate="200Mbit")
        back = wait_for(sender, link, lambda report: report.condition == "clear", 15.0)
        assert back.estimate.available_bytes_per_s > 100 * MBIT
        sending.end()
        wait_for(sender, link, lambda report: report.num_transfers == 0, 3.0)
        feed = feed_of(sender)
        assert feed.data_endpoint == sender.ready["data"]
        report = next(item for item in feed.links if item.endpoint == f"{link.host}:{link.port}")
        assert report.estimate.acked_bytes > 10_000_000


def test_a_cut_link_is_down_and_comes_back_without_traffic(
    agents: tuple[AgentProcess, AgentProcess],
) -> None:
    sender, receiver = agents
    with RelayProcess(receiver.ready["data"], rate="200Mbit", rtt="10ms") as link:
        sending = Sending(*agents, link)
        wait_for(sender, link, lambda report: report.estimate.achieved_bytes_per_s > MBIT, 5.0)
        link.cut()
        down = wait_for(sender, link, lambda report: report.condition == "down", 2.0)
        assert down.estimate.available_bytes_per_s == 0
        assert down.num_connections == 0
        sending.end()
        link.heal()
        wait_for(sender, link, lambda report: report.condition == "clear", 15.0)


@pytest.mark.alone
def test_watching_waits_for_news(agents: tuple[AgentProcess, AgentProcess]) -> None:
    sender, receiver = agents
    feed = feed_of(sender)
    began_s = time.monotonic()
    feed = feed_of(sender, after_seq=feed.seq, timeout_s=0.3)
    assert feed_of(sender, after_seq=feed.seq + 1000, timeout_s=5.0).seq < feed.seq + 1000
    assert time.monotonic() - began_s < 3.0
    with RelayProcess(receiver.ready["data"]) as link:
        sending = Sending(*agents, link)
        seqs = [feed.seq]
        for _ in range(3):
            seqs.append(feed_of(sender, after_seq=seqs[-1], timeout_s=5.0).seq)
        sending.end()
        assert seqs == sorted(set(seqs))
        wait_for(sender, link, lambda report: report.num_transfers == 0, 3.0)
    with pytest.raises(RpcError) as refused:
        feed_of(sender, timeout_s=-1.0)
    assert refused.value.code == "INVALID"


def test_a_probe_measures_an_idle_link(agents: tuple[AgentProcess, AgentProcess]) -> None:
    sender, receiver = agents

    async def probe(link: RelayProcess, via: AgentProcess, nbytes: int) -> float:
        clients = [AgentClient(agent.ready["control"]) for agent in (via, receiver)]
        try:
            reply = await probe_link(*clients, nbytes, link.host, link.port)
        finally:
            for client in clients:
                await client.close()
        assert (reply.acked_bytes, reply.error) == (nbytes, "")
        return reply.duration_s

    with RelayProcess(receiver.ready["data"], rate="200Mbit", rtt="10ms") as link:
        asyncio.run(probe(link, sender, 64 << 10))  # makes the link known
        wait_until(lambda: seen(sender, link) is not None)
        duration_s = asyncio.run(probe(link, sender, 4 << 20))
        assert 0.1 < duration_s < 1.0
        report = wait_for(sender, link, lambda report: report.estimate.age_s is not None, 2.0)
        assert 100 * MBIT < report.estimate.available_bytes_per_s < 500 * MBIT
        with pytest.raises(RpcError, match="link_probes"):
            asyncio.run(probe(link, receiver, 1024))


def gateway_file(sender: AgentProcess, receiver: AgentProcess, link: RelayProcess) -> GatewayFile:
    """A region of these agents, whose engines do not run."""

    def instance(name: str, agent: AgentProcess) -> dict[str, str]:
        control = agent.ready["control"]
        return {"name": name, "agent": control, "node": f"n-{name}", "url": "http://127.0.0.1:1"}

    far = {
        "name": "far",
        "link": "wan",
        "instances": [instance("p0", sender) | {"role": "prefill"}],
        "endpoints": {receiver.ready["data"]: f"{link.host}:{link.port}"},
    }
    return GatewayFile.model_validate(
        {
            "gateway": {"port": 0, "models": [{"name": "m"}], "report_interval_s": 0.05},
            "pd": {"name": "home", "instances": [instance("d0", receiver) | {"role": "both"}]},
            "prefill": [far],
        }
    )


@asynccontextmanager
async def relay_to(receiver: AgentProcess) -> AsyncIterator[RelayProcess]:
    """A relay whose start and stop do not hold up the event loop."""
    link = RelayProcess(receiver.ready["data"], rate="200Mbit", rtt="10ms")
    await asyncio.to_thread(link.start)
    try:
        yield link
    finally:
        await asyncio.to_thread(link.stop)


async def test_a_gateway_shows_the_link_and_has_it_probed(
    agents: tuple[AgentProcess, AgentProcess],
) -> None:
    sender, receiver = agents
    async with relay_to(receiver) as link:
        file = gateway_file(sender, receiver, link)
        clusters = build_clusters(file)
        await clusters.start()
        gateway = Gateway(
            file.gateway,
            clusters.pds,
            clusters.prefill,
            region_links=build_links(file, agent_clients(file)),
        )
        runner = await start_server(gateway)
        url = "http://{}:{}".format(*runner.addresses[0][:2])

        async def shown(wanted: Callable[[LinkNow], object]) -> LinksOverview:
            async with asyncio.timeout(8):
                while True:
                    found = await asyncio.to_thread(ask, url, "/prfaas/links", LinksOverview)
                    (now,) = found.links
                    if wanted(now):
                        return found
                    await asyncio.sleep(0.05)

        try:
            await shown(lambda now: now.name == "wan" and now.age_s is not None)
            # A transfer too small to say anything of the link, which is then probed.
            sending = await asyncio.to_thread(Sending, sender, receiver, link, 1000)
            found = await shown(lambda now: now.available_bytes_per_s)
            path = next(item for item in found.paths if item.to)
            assert (path.agent, path.to) == ("far/n-p0", "home/n-d0")
            assert found.links[0].available_bytes_per_s > MBIT  # type: ignore[operator]
            await asyncio.to_thread(sending.end)
            sending = await asyncio.to_thread(Sending, sender, receiver, link)
            await shown(lambda now: now.backlog_bytes and now.utilisation > 0.5)
            link.cut()
            await shown(lambda now: now.condition == "down")
            await asyncio.to_thread(sending.end)
        finally:
            await runner.cleanup()
            await clusters.close()
