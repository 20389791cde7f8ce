"""Regions of real vLLM engines for tests: their spec, their models, a plain engine to compare with.

Engines are small and slow to start (ten seconds each on two cores): tests share them.
"""

import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from certificates import make_region_files
from eventually import eventually

from deploy.gateway.scheduling.config import RoutingSection
from deploy.lab.demo.answers import Answer, ask_all
from deploy.lab.demo.reference import decided_answers
from deploy.lab.demo.regions import demo_region
from deploy.lab.demo.scenario import DemoRequest
from deploy.lab.demo.tiny_models import build_model
from deploy.lab.demo.tiny_specs import MODELS
from deploy.region.launch.launcher import RunningRegion
from deploy.region.launch.probes import region_trouble
from deploy.region.launch.running import RunningProcess
from deploy.region.spec.region import (
    ClusterSpec,
    NodeSpec,
    RegionInstance,
    RegionSpec,
    SecuritySpec,
)
from kvmanager.agent.messages import SERVICE, EngineStatus, Status, StatusReply
from kvmanager.config_files.fields import TlsSection
from kvmanager.config_files.security import is_loopback
from transport.grants import Granter, GrantFile
from transport.rpc import RpcClient, RpcError

RECURRENT = "qwen3-next-tiny"
WINDOW = "mimo-v2-tiny"
LOOPBACK = "127.0.0.1"
HEARD_LATELY_S = RoutingSection.of().max_link_age_s / 2


def model_dir(cache_dir: Path, name: str) -> Path:
    """The built model; building takes a second the first time."""
    return build_model(MODELS[name], cache_dir)


def region_spec(path: Path, name: str, **changes: Any) -> RegionSpec:
    """The demo's region for one model; see `deploy.lab.demo.regions.demo_region`."""
    return demo_region(MODELS[name], path, **changes)


def own_address() -> str:
    """An IPv4 address at which other hosts reach this one, or loopback where it has none."""
    stats = psutil.net_if_stats()
    for interface, addresses in psutil.net_if_addrs().items():
        for one in addresses:
            is_usable = one.family is socket.AF_INET and not is_loopback(one.address)
            if is_usable and stats[interface].isup:
                return one.address
    return LOOPBACK


def with_tls(spec: RegionSpec, folder: Path, host: str = LOOPBACK) -> RegionSpec:
    """The same region with mutual TLS and all nodes at `host`, for which certificates are made in
    `folder`. Engines serve HTTPS unless that is a loopback address.
    """
    files = make_region_files(folder, spec.name, host)
    tls = TlsSection(cert=files.cert, key=files.key, ca=files.ca)

    def at_host(cluster: ClusterSpec) -> ClusterSpec:
        nodes = tuple(node.model_copy(update={"host": host}) for node in cluster.nodes)
        return cluster.model_copy(update={"nodes": nodes})

    clusters = tuple(map(at_host, spec.clusters))
    return spec.model_copy(update={"clusters": clusters, "security": SecuritySpec(tls=tls)})


def with_engines(
    spec: RegionSpec,
    engines: Mapping[str, Sequence[Mapping[str, Any]]],
    agents: Mapping[str, Any] | None = None,
    **of_model: Any,
) -> RegionSpec:
    """The same region with these engines on its nodes, each as region.yaml has it, and with these
    settings of its agents and its model.
    """

    def at_node(node: NodeSpec) -> NodeSpec:
        instances = tuple(map(RegionInstance.model_validate, engines[node.name]))
        agent = node.agent.model_copy(update=dict(agents or {}))
        return node.model_copy(update={"instances": instances, "agent": agent})

    clusters = tuple(
        cluster.model_copy(update={"nodes": tuple(map(at_node, cluster.nodes))})
        for cluster in spec.clusters
    )
    model = spec.models[0].model_copy(update=of_model)
    return spec.model_copy(update={"clusters": clusters, "models": (model, *spec.models[1:])})


@contextlib.asynccontextmanager
async def running(spec: RegionSpec, run_dir: Path) -> AsyncIterator[RunningRegion]:
    """The region, every engine healthy; stopped at the end."""
    async with RunningRegion(spec, run_dir) as region:
        yield region


def prompt(
    name: str, num_tokens: int, seed: int, *, wave: int = 0, stream: bool = False, prefix: str = ""
) -> DemoRequest:
    """A completion of exactly `num_tokens` prompt tokens (the tokenizer makes one of each byte)."""
    return DemoRequest(
        name, "/v1/completions", num_tokens, seed, stream, "prefill_cluster", wave, prefix=prefix
    )


async def ask_at(url: str, model: str, requests: Sequence[DemoRequest]) -> dict[str, Answer]:
    """What the gateway at `url` answers, by the requests' names."""
    return await ask_all(url, model, requests, lambda request, answer: None)


async def records_at(url: str) -> dict[str, dict[str, Any]]:
    """The latest record that the gateway at `url` has of each request id."""
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{url}/prfaas/requests?limit=500") as response:
            listed = (await response.json())["requests"]
    return {record["request_id"]: record for record in reversed(listed)}


async def settled_record_at(url: str, request_id: str) -> dict[str, Any]:
    """The gateway's record of a request once both legs are over, which may follow the answer."""
    found: dict[str, Any] = {}

    async def is_settled() -> bool:
        found.update((await records_at(url))[request_id])
        return bool(found["is_settled"])

    await until(is_settled, "the request has settled")
    return found


async def reference_answers(
    url: str, name: str, requests: Sequence[DemoRequest]
) -> tuple[list[DemoRequest], dict[str, Answer]]:
    """What the engine at `url` answers; see `decided_answers`. An error is no reference."""

    def check(request: DemoRequest, answer: Answer) -> None:
        assert not answer.error, f"no reference for {request.name}: {answer.error}"

    return await decided_answers(url, MODELS[name], requests, check)


async def computed_alone(
    region: RunningRegion,
    session: aiohttp.ClientSession,
    instance: str,
    model: str,
    request: DemoRequest,
    **fields: str,
) -> list[int]:
    """The tokens with which an engine itself answers the whole prompt. With a `cache_salt` in
    `fields` nothing that is cached has a part in it.
    """
    url = f"{region.engine(instance).address}{request.endpoint}"
    body = replace(request, stream=False).body(model) | fields
    access = region.engine_access()
    async with session.post(url, json=body, headers=access.headers, ssl=access.tls()) as response:
        answer = await response.json()
    assert response.status == 200, answer
    return list(answer["choices"][0]["token_ids"])


async def until(holds: Callable[[], Awaitable[bool]], what: str, timeout_s: float = 60.0) -> None:
    """`eventually`, with pauses that leave the engines' cores to them."""
    await eventually(holds, what=what, timeout_s=timeout_s, pause_s=0.1)


def granter_of(region: RunningRegion) -> Granter:
    """Signs for the region's agents as its gateway does."""
    return Granter(GrantFile(region.directory.granting_key, region.region.name))


def listening_hosts(*processes: RunningProcess) -> set[str]:
    """The addresses at which these processes accept connections."""
    pids = {pid for process in processes for pid in process.pids}
    return {
        connection.laddr.ip.removeprefix("::ffff:")  # an IPv4 address of an IPv6 socket
        for connection in psutil.net_connections("tcp")
        if connection.pid in pids and connection.status == psutil.CONN_LISTEN and connection.laddr
    }


async def agent_status(region: RunningRegion, node: str) -> StatusReply:
    client = RpcClient(region.agent_control(node), SERVICE, region.credentials("operator"))
    try:
        return await client.call("Status", Status(), StatusReply, 5.0)
    finally:
        await client.close()


async def engine_status(region: RunningRegion, node: str, instance: str) -> EngineStatus:
    """What the agent of a node says of one of its engines."""
    engines = (await agent_status(region, node)).engines
    (found,) = (engine for engine in engines if engine.instance == instance)
    return found


async def everything_is_given_back(
    region: RunningRegion,
    timeout_s: float = 60.0,
    *,
    nodes: Sequence[str] = ("a1", "b1"),
    without: str = "",
) -> None:
    """No arena byte is held at any of `nodes` and no KV block in any engine `without` this one."""

    async def arenas_are_empty() -> bool:
        try:
            states = [await agent_status(region, node) for node in nodes]
        except RpcError:
            return False
        return all(state.landing_bytes == state.outbox_bytes == 0 for state in states)

    async def engines_are_empty() -> bool:
        names = [process.name for process in region.processes if process.kind == "engine"]
        engines = [name for name in names if name != without]
        return all([await kv_usage(region, instance) == 0.0 for instance in engines])

    await until(arenas_are_empty, "arenas are empty", timeout_s)
    await until(engines_are_empty, "engines are empty", timeout_s)


async def link_is_usable(url: str) -> bool:
    """Whether the gateway at `url` may use the link between two clusters again, after a fault.

    Its sending agent must have been heard of lately: one that was restarted is unheard for as long
    as the gateway takes to ask again, and routing trusts nothing older than `max_link_age_s`.
    """
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{url}/prfaas/links") as response:
            links = (await response.json())["links"]
    return any(
        link["source"] == "prefill-a"
        and link["condition"] not in ("down", "congested")
        and link["available_bytes_per_s"] != 0
        and link["age_s"] is not None
        and link["age_s"] <= HEARD_LATELY_S
        for link in links
    )


async def are_usable(region: RunningRegion, url: str, instances: Collection[str]) -> None:
    """Return once the gateway at `url` finds these instances usable, which it probes by itself."""

    async def is_so() -> bool:
        return await region_trouble(url, region.operator_key, instances) is None

    await until(is_so, f"the gateway may use {', '.join(instances)}")


async def kv_usage(region: RunningRegion, instance: str) -> float:
    """Share of the engine's KV blocks in use; 1 when it does not answer."""
    metrics = await engine_metrics(region, instance)
    return metrics.get("vllm:kv_cache_usage_perc", 1.0)


async def computed_tokens(region: RunningRegion, instance: str) -> float:
    """The prompt tokens that the engine has computed itself."""
    metrics = await engine_metrics(region, instance)
    return metrics["vllm:prompt_tokens_total"] - metrics["vllm:prompt_tokens_cached_total"]


async def engine_metrics(region: RunningRegion, instance: str) -> dict[str, float]:
    """Samples of the engine's /metrics by name, labels summed; empty when it does not answer."""
    values: dict[str, float] = {}
    access = region.engine_access()
    url = f"{region.engine(instance).address}/metrics"
    with contextlib.suppress(aiohttp.ClientError):
        async with aiohttp.ClientSession(headers=access.headers) as session:
            async with session.get(url, ssl=access.tls()) as response:
                for line in (await response.text()).splitlines():
                    if not line.startswith("#"):
                        name, _, value = line.rpartition(" ")
                        name = name.partition("{")[0]
                        values[name] = values.get(name, 0.0) + float(value)
    return values
