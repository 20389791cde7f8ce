"""Instances found in DNS and in Kubernetes, by a front as users start it.

The DNS server is a small real one, over UDP, made with dnspython. There is no Kubernetes cluster
here: a small HTTP server speaks the list and watch of EndpointSlices as the API does.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import dns.flags
import dns.message
import dns.rcode
import dns.rrset
import pytest
from aiohttp import web
from eventually import eventually
from front_access import prefill_cluster, running
from front_doubles import FakeAgent, FakeEngine, prefill_job

from prfaas.embedded import EmbeddedPrefillCluster, PrefillClusterConfig
from prfaas.engines.discovery.dns import DnsRecords
from prfaas.engines.discovery.following import follow_discovery
from prfaas.engines.discovery.found import DiscoverySection, Found
from prfaas.engines.health import ProbeTiming
from prfaas.engines.instances import InstancesConfig
from prfaas.engines.members import LetGo
from transport import LocalError

NAME = "_engine._tcp.east.test."


class DnsServer(asyncio.DatagramProtocol):
    """Answers questions for SRV records of `NAME`. Without records the name does not exist."""

    def __init__(self) -> None:
        self.records: list[tuple[str, int]] = []
        self.broken = False
        self.address = ""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["DnsServer"]:
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_datagram_endpoint(lambda: self, ("127.0.0.1", 0))
        host, port = transport.get_extra_info("sockname")
        self.address = f"{host}:{port}"
        yield self
        transport.close()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, address: Any) -> None:
        question = dns.message.from_wire(data)
        answer = dns.message.make_response(question)
        answer.flags |= dns.flags.RA
        if self.broken:
            answer.set_rcode(dns.rcode.SERVFAIL)
        elif self.records and question.question[0].name.to_text() == NAME:
            lines = [f"0 0 {port} {host}." for host, port in self.records]
            answer.answer.append(dns.rrset.from_text(NAME, 5, "IN", "SRV", *lines))
        else:
            answer.set_rcode(dns.rcode.NXDOMAIN)
        self._transport.sendto(answer.to_wire(), address)


class KubernetesApi:
    """Lists and watches the EndpointSlices of the service `ns/east`, as the API server does."""

    def __init__(self) -> None:
        self.slices: list[dict[str, Any]] = []
        self.version = 1
        self.num_watches = 0
        self.status = 200
        self._changed = asyncio.Event()
        self.url = ""

    def say(
        self, *endpoints: dict[str, Any], port: int = 8000, also: Sequence[dict[str, Any]] = ()
    ) -> None:
        """The slice is another one from now on, with a slice of IPv6 addresses before it."""
        self.version += 1
        self.slices = [self._slice("IPv6", also, port)] if also else []
        self.slices.append(self._slice("IPv4", endpoints, port))
        self._changed.set()
        self._changed = asyncio.Event()

    def _slice(self, kind: str, endpoints: Sequence[dict[str, Any]], port: int) -> dict[str, Any]:
        labels = {"kubernetes.io/service-name": "east"}
        return {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": f"east-{kind.lower()}",
                "namespace": "ns",
                "labels": labels,
                "resourceVersion": str(self.version),
            },
            "addressType": kind,
            "endpoints": list(endpoints),
            "ports": [{"name": "metrics", "port": 1}, {"name": "engine", "port": port}],
        }

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["KubernetesApi"]:
        app = web.Application()
        path = "/apis/discovery.k8s.io/v1/namespaces/ns/endpointslices"
        app.router.add_get(path, self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        yield self
        await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        assert request.query["labelSelector"] == "kubernetes.io/service-name=east"
        if self.status != 200:
            status = {"kind": "Status", "code": self.status, "reason": "Gone"}
            return web.json_response(status, status=self.status)
        if request.query.get("watch") != "true":
            metadata = {"resourceVersion": str(self.version)}
            listed = {"kind": "EndpointSliceList", "apiVersion": "discovery.k8s.io/v1"}
            return web.json_response(listed | {"metadata": metadata, "items": self.slices})
        self.num_watches += 1
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        try:
            async with asyncio.timeout(float(request.query["timeoutSeconds"])):
                while request.query["resourceVersion"] == str(self.version):
                    await self._changed.wait()
        except TimeoutError:
            return response
        event = {"type": "MODIFIED", "object": self.slices[0]}
        await response.write(json.dumps(event).encode() + b"\n")
        return response


class Cluster:
    """A prefill front without listed instances, and engines to be found."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.stack = stack
        self.engines: dict[str, FakeEngine] = {}
        self.ports: dict[str, int] = {}
        self.agent_port = 0
        self.left: set[str] = set()
        """What was seen to leave."""
        self.front: EmbeddedPrefillCluster

    def follow(self, **section: Any) -> None:
        found = DiscoverySection(agent_port=self.agent_port, role="prefill", **section)
        task = asyncio.create_task(follow_discovery(found, self.front.departures))

        async def stop() -> None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        self.stack.push_async_callback(stop)

    async def until(self, *names: str) -> None:
        async def healthy() -> list[str]:
            report = await self.front.report()
            for item in report.instances:
                if item.leaving:
                    self.left.add(item.name)
                    await self.front.change_members(LetGo(name=item.name))
            return sorted(item.name for item in report.instances if item.healthy)

        await eventually(healthy, lambda found: found == sorted(names))


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        made = Cluster(stack)
        probing = InstancesConfig(probes=ProbeTiming(interval_s=0.1, start_interval_s=0.05))
        made.front = prefill_cluster("east", [], PrefillClusterConfig(instances=probing))
        await made.front.start()
        stack.push_async_callback(made.front.close)
        # Engines of one host share its node agent.
        agent = await running(stack, FakeAgent())
        made.agent_port = int(agent.target.rpartition(":")[2])
        for _ in range(2):
            engine = await running(stack, FakeEngine(agent))
            port = int(engine.url.rpartition(":")[2])
            name = f"localhost-{port}"
            made.engines[name], made.ports[name] = engine, port
        agent.instances = [*made.engines, "p0", "p1"]
        yield made


async def test_srv_records_are_followed(cluster: Cluster) -> None:
    async with DnsServer().serving() as server:
        first, second = cluster.ports
        server.records = [("localhost", cluster.ports[first])]
        cluster.follow(dns=NAME, nameserver=server.address, interval_s=0.05)
        await cluster.until(first)
        assert (await cluster.front.submit(prefill_job(1))).instance == first
        server.broken = True
        await asyncio.sleep(0.3)
        await cluster.until(first)
        server.broken = False
        server.records = [("LocalHost", cluster.ports[name]) for name in (first, second)]
        await cluster.until(first, second)
        assert not cluster.left
        server.records = [("localhost", cluster.ports[second])]
        await cluster.until(second)
        server.records = []
        await cluster.until()


async def test_a_server_that_fails_is_no_answer() -> None:
    async with DnsServer().serving() as server:
        section = DiscoverySection(dns=NAME, nameserver=server.address)
        records = DnsRecords(section)
        assert await records.found() == []
        # Hosts with one first label, and two engines on one of them: all have names of their own.
        server.records = [("p.east.test", 8000), ("p.east.test", 8001), ("p.west.test", 8000)]
        assert sorted(await records.found(), key=lambda item: item.name) == [
            Found("p.east.test-8000", "p.east.test", 8000),
            Found("p.east.test-8001", "p.east.test", 8001),
            Found("p.west.test-8000", "p.west.test", 8000),
        ]
        # RFC 2782: the service is not there.
        server.records = [("", 0)]
        assert await records.found() == []
        server.broken = True
        with pytest.raises(LocalError, match=r"_engine\._tcp\.east\.test"):
            await records.found()


def endpoint(name: str, *, terminating: bool = False, address: str = "127.0.0.1") -> dict[str, Any]:
    return {
        "addresses": [address],
        "conditions": {"ready": not terminating, "serving": True, "terminating": terminating},
        "nodeName": "k8s-node",
        "targetRef": {"kind": "Pod", "name": name, "namespace": "ns"},
    }


def write_kubeconfig(path: Path, url: str) -> Path:
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path.write_text(json.dumps(content))
    return path


async def test_endpoint_slices_are_followed(cluster: Cluster, tmp_path: Path) -> None:
    first, second = cluster.ports.values()
    async with KubernetesApi().serving() as api:
        api.say(endpoint("p0"), port=first)
        kubeconfig = write_kubeconfig(tmp_path / "config", api.url)
        cluster.follow(
            kubernetes="ns/east", port_name="engine", kubeconfig=kubeconfig, interval_s=0.05
        )
        await cluster.until("p0")
        report = await cluster.front.report()
        assert report.instances[0].node_name == "k8s-node"
        await eventually(lambda: api.num_watches)
        # The service gets a slice of another family: nothing that runs leaves, nothing doubles.
        api.say(endpoint("p0"), port=first, also=[endpoint("p0", address="::1")])
        await asyncio.sleep(0.3)
        await cluster.until("p0")
        api.say(endpoint("p0"), endpoint("p1"), port=first, also=[endpoint("p0", address="::1")])
        await cluster.until("p0", "p1")
        assert not cluster.left
        # One that terminates has left, though it still serves.
        api.say(endpoint("p0", terminating=True), endpoint("p1"), port=first)
        await cluster.until("p1")
        # While the API does not answer, everybody stays; the version that was watched may be gone.
        api.status = 410
        api.say(endpoint("p1"), port=first)
        await asyncio.sleep(0.3)
        await cluster.until("p1")
        api.status = 200
        api.say(endpoint("p1"), port=second)
        await cluster.until("p1")
        # It was at another address before: that one leaves, and the new one joins.
        moved = list(cluster.engines.values())[1]
        async with asyncio.timeout(60):
            while not moved.posted:
                await cluster.until("p1")
                await asyncio.gather(cluster.front.submit(prefill_job(2)), return_exceptions=True)


async def test_without_the_extra_or_the_way_there_nobody_leaves(
    cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nowhere = tmp_path / "none"
    nowhere.write_text("{}")
    cluster.follow(kubernetes="ns/east", kubeconfig=nowhere, interval_s=0.05)
    await eventually(lambda: "instances are not looked up now" in caplog.text)
