"""The gateway's view of the region's links: follows what all node agents say of their paths.

One task for each agent asks for news (`WatchLinks`), so a change of condition is known here one
round trip after it was seen. The last report of an agent that does not answer stays and grows
older. Paths are joined to links by where they lead: every agent says where it receives, and the
region's file says which detours lead there. Agents that ask for a probe of an idle path get one,
one at a time.

It does not know requests, nor what is decided from a link's state.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import msgspec

from kvmanager.agent.between_agents import probe_link
from kvmanager.agent.client import AgentClient
from kvmanager.agent.links.messages import LinkFeed, WatchLinks
from kvmanager.directory.messages import NodeName
from netmon.estimate import PathReport
from netmon.region_link import LinkNow, LinkPath, LinkRate, RegionLink
from scheduler.reports import ClusterReport
from transport import Endpoint
from transport.backoff import Backoff
from transport.rpc import RpcError
from transport.tasks import start_task

logger = logging.getLogger("prfaas.deploy.gateway")

POLL_S: Final = 2.0
"""How long an agent without news may delay its answer, seconds."""
FIRST_RETRY_S: Final = 0.2
MAX_RETRY_S: Final = 2.0
"""The longest wait before an agent is asked again, seconds. Routing trusts no link without a report
for 5 s, so an agent that is back must be asked soon.
"""
SAME_S: Final = 0.05
"""Without news, a link is not worked out again within this time, seconds."""
LEAST_BETWEEN_S: Final = 0.05
"""The least time between two questions to one agent, seconds."""
MAX_NAMED_CHARS: Final = 3000
"""A grant has at most `transport.grants.MAX_GRANT_BYTES`."""
PROBE_PAUSE_S: Final = 2.0
"""The pause after a probe, seconds. Two probes at a time through one link would each see a part of
it.
"""


class LinksOverview(msgspec.Struct, frozen=True):
    """All links of the region, the paths they are made of, and why agents could not be asked."""

    links: list[LinkNow]
    paths: list[LinkPath]
    errors: dict[str, str] = {}


class _Agent:
    """One followed agent."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.feed: LinkFeed | None = None
        self.reported_s = 0.0
        self.error = ""
        self.answered = asyncio.Event()
        """Set once it has answered, or failed to."""
        self.task: asyncio.Task[None] | None = None


class RegionLinks:
    """Follows a region's agents and joins their paths to links.

    `watch` gets the clusters' reports.
    """

    def __init__(
        self,
        connect: Callable[[str], AgentClient],
        *,
        names: Mapping[tuple[str, str], str] | None = None,
        detours: Mapping[str, Mapping[str, str]] | None = None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`connect` makes a client of the agent at a control address, to be closed here.

        `names` are what operators call links, by (source, target) cluster. `detours` maps, for each
        sending cluster, the address that a receiving agent advertises to the address to connect to
        instead.
        """
        self._connect = connect
        self._names = dict(names or {})
        self._advertised = {
            source: {dialled: advertised for advertised, dialled in pairs.items()}
            for source, pairs in (detours or {}).items()
        }
        self._clock_s = clock_s
        self._agents: dict[NodeName, _Agent] = {}
        self._nodes_at: dict[str, NodeName] = {}  # by where they receive
        self._links: dict[tuple[str, str], RegionLink] = {}
        self._recent: dict[tuple[str, str], tuple[float, LinkNow]] = {}
        self._probing: asyncio.Task[None] | None = None
        for source, target in self._names:
            self._link(source, target)

    async def watch(self, report: ClusterReport) -> None:
        """Follow the nodes in `report` as those of its cluster.

        The report of a front that could not be asked says nothing about nodes.
        """
        if not report.heard:
            return
        agents = {
            NodeName(report.name, item.node_name or item.node): item.node
            for item in report.instances
            if item.node
        }
        for name, agent in list(self._agents.items()):
            # The node's agent is gone or listens elsewhere, so its last report does not count any
            # more.
            if name.cluster == report.name and agents.get(name) != agent.target:
                del self._agents[name]
                self._nodes_at = {at: node for at, node in self._nodes_at.items() if node != name}
                await _ended(agent.task)
        for name, target in agents.items():
            if name not in self._agents:
                agent = self._agents[name] = _Agent(target)
                agent.task = start_task(self._follow(name, agent), f"links of {name}")

    def now(self, source: str, target: str) -> LinkNow:
        """The link between two clusters; one that nobody has used says so.

        Every request asks, so the last answer is given again for a moment, unless there is news.
        """
        now_s, key = self._clock_s(), (source, target)
        at_s, now = self._recent.get(key, (-math.inf, None))
        if now is None or not 0 <= now_s - at_s <= SAME_S:
            # A link that was only asked for does not become one of the region's links.
            link = self._links.get(key) or RegionLink(source, target)
            now = self._now(link)
            self._recent[key] = now_s, now
        return now

    async def wait_heard(self, timeout_s: float) -> None:
        """Wait until every followed agent has answered or failed to, but at most `timeout_s`."""
        waited = [agent.answered.wait() for agent in self._agents.values()]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*waited)

    def receivers(self, cluster: str) -> str:
        """Where the node agents of a cluster receive, with spaces between them, for grants
        (`transport.grants.Granted`); "" while one of them has not said it, or they are very many.
        """
        nodes = {name for name in self._agents if name.cluster == cluster}
        addresses = sorted(at for at, name in self._nodes_at.items() if name in nodes)
        text = " ".join(addresses)
        return text if len(addresses) == len(nodes) and len(text) <= MAX_NAMED_CHARS else ""

    def links(self) -> list[LinkNow]:
        """All links of which anything is known, by the clusters at their ends."""
        return [self._now(link) for _, link in sorted(self._links.items())]

    def rates(self) -> list[LinkRate]:
        """The rates of all links that have one, for `remember`."""
        now_s = self._clock_s()
        return [rate for link in self._links.values() if (rate := link.rate(now_s)) is not None]

    def remember(self, rates: Iterable[LinkRate], age_s: float) -> None:
        """Start from what was known `age_s` ago of links that the region's file has."""
        then_s = self._clock_s() - age_s
        for rate in rates:
            if (link := self._links.get((rate.source, rate.target))) is not None:
                link.remember(rate, then_s)
        self._recent.clear()

    def overview(self) -> LinksOverview:
        """The answer to GET /prfaas/links."""
        now_s = self._clock_s()
        return LinksOverview(
            links=self.links(),
            paths=[path for name in self._agents for path in self._paths(name, now_s)],
            errors={str(name): agent.error for name, agent in self._agents.items() if agent.error},
        )

    async def close(self) -> None:
        """Stop following all agents. Idempotent."""
        agents = list(self._agents.values())
        self._agents.clear()
        probing, self._probing = self._probing, None
        await asyncio.gather(_ended(probing), *(_ended(agent.task) for agent in agents))

    def _now(self, link: RegionLink) -> LinkNow:
        now_s = self._clock_s()
        reported_s = [
            agent.reported_s
            for name, agent in self._agents.items()
            if name.cluster == link.source and agent.feed is not None
        ]
        return link.now(now_s, max(0.0, now_s - max(reported_s)) if reported_s else None)

    async def _follow(self, name: NodeName, agent: _Agent) -> None:
        client, backoff = self._connect(agent.target), Backoff(FIRST_RETRY_S, MAX_RETRY_S)
        try:
            while True:
                # After an error the agent may have restarted, with numbers that begin again.
                seq = 0 if agent.feed is None or agent.error else agent.feed.seq
                request = WatchLinks(after_seq=seq, timeout_s=POLL_S, sends_probes=True)
                try:
                    self._take(name, agent, await client.watch_links(request))
                except RpcError as error:
                    # Logged once: the next attempts fail alike until the agent is back.
                    if not agent.error:
                        logger.warning("%s: its links are not known now: %s", name, error)
                    agent.error = error.message
                except ValueError as error:
                    if not agent.error:
                        logger.error("%s: its links are not believed: %s", name, error)
                    agent.error = str(error)
                except Exception as error:
                    # Whatever goes wrong with one answer, the agent must be followed further.
                    logger.exception("%s: following its links failed", name)
                    agent.error = repr(error)
                else:
                    agent.error = ""
                    backoff.reset()
                agent.answered.set()
                await asyncio.sleep(backoff.after(0.0) if agent.error else LEAST_BETWEEN_S)
        finally:
            await client.close()

    def _take(self, name: NodeName, agent: _Agent, feed: LinkFeed) -> None:
        """Take in the report of an agent."""
        now_s = self._clock_s()
        receiver = self._nodes_at.get(feed.data_endpoint, name)
        # Paths to the other node would count as paths to this one, and probes would go to it.
        if receiver != name:
            raise ValueError(
                f"it says that it receives at {feed.data_endpoint}, as {receiver} does"
            )
        for report in feed.links:
            report.check()
        agent.feed, agent.reported_s = feed, now_s
        # News: the answers given a moment ago may be wrong now.
        self._recent.clear()
        self._nodes_at = {at: node for at, node in self._nodes_at.items() if node != name}
        self._nodes_at[feed.data_endpoint] = name
        by_link: dict[tuple[str, str], list[LinkPath]] = {}
        # All agents of the cluster: this feed may say where paths of the others lead.
        for other in self._agents:
            if other.cluster == name.cluster:
                for path in self._paths(other, now_s):
                    target = path.to.partition("/")[0]
                    if target:
                        by_link.setdefault((name.cluster, target), []).append(path)
        for key, paths in by_link.items():
            self._link(*key).observe(paths, now_s)
        self._send_probes(name, agent, feed)

    def _paths(self, name: NodeName, now_s: float) -> list[LinkPath]:
        agent = self._agents[name]
        reports = agent.feed.links if agent.feed is not None else ()
        age_s = max(0.0, now_s - agent.reported_s)
        return [
            LinkPath(str(name), self._leads_to(name.cluster, report.endpoint), report, age_s)
            for report in reports
        ]

    def _leads_to(self, source: str, endpoint: str) -> str:
        """The node behind an endpoint, "cluster/node"; "" if no agent says that it receives
        there.
        """
        node = self._node_at(source, endpoint)
        return "" if node is None else str(node)

    def _node_at(self, source: str, endpoint: str) -> NodeName | None:
        advertised = self._advertised.get(source, {}).get(endpoint, endpoint)
        return self._nodes_at.get(advertised)

    def _link(self, source: str, target: str) -> RegionLink:
        key = source, target
        if key not in self._links:
            self._links[key] = RegionLink(source, target, self._names.get(key, ""))
        return self._links[key]

    def _send_probes(self, name: NodeName, agent: _Agent, feed: LinkFeed) -> None:
        for report in feed.links:
            node = self._node_at(name.cluster, report.endpoint)
            receiver = None if node is None else self._agents.get(node)
            # The receiver takes part in a probe, so its agent must be followed, too.
            if not report.probe_bytes or receiver is None:
                continue
            if self._probing is None or self._probing.done():
                self._probing = start_task(
                    self._probe(agent.target, receiver.target, report), "probe a link"
                )

    async def _probe(self, sender: str, receiver: str, report: PathReport) -> None:
        clients, target = (self._connect(sender), self._connect(receiver)), report.endpoint
        try:
            reply = await probe_link(*clients, report.probe_bytes, *Endpoint.parse(target))
            logger.debug("probe of %s: %s", target, reply)
        except RpcError as error:
            logger.info("no probe of %s: %s", target, error)
        finally:
            await asyncio.gather(*(client.close() for client in clients))
        # Within the task, so that `_probing.done()` also covers the pause.
        await asyncio.sleep(PROBE_PAUSE_S)


async def _ended(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
