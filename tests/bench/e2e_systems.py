"""The systems that `bench_e2e.py` compares, each as engines at two sites and a way to ask them.

Does not know what is asked nor what is made of the answers. Every engine is bound to its share of
the cores, and nothing else may run on those of the prefill engine: fronts, gateway, agents, the
link's forwarder and the client share the others with the decode engine.

NIXL's settings: kv_producer and kv_consumer, the connector's default threads, UCX over TCP on the
link's device alone, UCX's locks as mutexes, and NUMA nodes hidden from its engines. On loopback 9
hand-offs of 9 came through with the last two; with neither, one of the first five hung. On a CPU
the connector pins its worker's main thread to a node's last core, the same core for both engines
here, and UCX's default locks spin. Which of the two is needed was not told apart.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import aiohttp
from engine_cores import cores_of, left_alone
from paced import paced_engine, paced_region
from wan import DEVICE, FAR, NEAR, Inside, Wan

from deploy.lab.demo.tiny_specs import TinyModel
from deploy.region.launch.devices import cores_here
from deploy.region.launch.launcher import RunningRegion
from deploy.region.launch.parts import part_with
from deploy.region.launch.plan import PlannedProcess
from deploy.region.launch.rundir import ENGINE_KEY
from deploy.region.spec.region import RegionSpec
from kvmanager.agent.host_facts import CORE_VARIABLE
from kvmanager.private_files import write_private
from prfaas.engines.access import EngineAccess
from prfaas.engines.client import EngineHttp
from prfaas.engines.command import EngineSpec
from prfaas.engines.supervision.supervisor import Supervisor, engine_process
from transport.region_key import new_key

MODEL = "mimo-v2-bench"
CHUNK_TOKENS = 1024
OUTPUT_TOKENS = 4
START_TIMEOUT_S = 300.0
NIXL_PORTS = {"prefill": 25600, "decode": 25700}
ENGINE_PORTS = {"prefill": 25001, "decode": 25002, "plain": 25003}

ROLES: Final = ("prefill", "decode")

HIDE_NUMA = 'mount -t tmpfs none /sys/devices/system/node && exec "$@"'
Wrap = Callable[[str, Sequence[str]], Sequence[str]]

WITHOUT_NUMA = ("sh", "-c", HIDE_NUMA, "sh")
"""Runs a command that finds no NUMA nodes; `ip netns exec` gives it mounts of its own."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a system said to one prompt. `wire_bytes` and `parts` (seconds, by the names of the
    gateway's records) are known of ours only.
    """

    ttft_s: float
    text: str
    wire_bytes: int
    parts: Mapping[str, float]


def word_of(line: bytes, url: str) -> str:
    """The text in a line of a stream of completions, "" in any other; RuntimeError for an error."""
    if not line.startswith(b"data:") or b"[DONE]" in line:
        return ""
    event = json.loads(line[5:])
    if "choices" not in event:
        raise RuntimeError(f"{url}: {event}")
    return str(event["choices"][0]["text"])


async def stream(
    session: aiohttp.ClientSession,
    url: str,
    body: dict[str, Any],
    headers: Mapping[str, str] = MappingProxyType({}),
) -> tuple[float, str, str]:
    """Seconds to the first token, the whole text and the request id; raises on a bad answer."""
    started_s = time.perf_counter()
    first_s = 0.0
    words = []
    wanted = {"max_tokens": OUTPUT_TOKENS, **body, "temperature": 0, "stream": True}
    async with session.post(f"{url}/v1/completions", json=wanted, headers=headers) as response:
        if response.status != 200:
            raise RuntimeError(f"{url}: {response.status} {await response.text()}")
        async for line in response.content:
            if word := word_of(line, url):
                first_s = first_s or time.perf_counter() - started_s
                words.append(word)
        request_id = response.headers.get("x-request-id", "")
    if not first_s:
        raise RuntimeError(f"{url}: no token came")
    return first_s, "".join(words), request_id


def engine(role: str, model: TinyModel, path: Path, *, host: str, **changes: Any) -> EngineSpec:
    """An engine outside of a region, with the settings that `region_spec` gives to ours."""
    return EngineSpec(
        instance=role,
        model=str(path),
        served_name=model.name,
        host=host,
        port=ENGINE_PORTS[role],
        dtype=model.dtype,
        max_model_len=model.max_model_len,
        max_num_batched_tokens=CHUNK_TOKENS,
        kv_space_gib=1,
        enforce_eager=True,
        **changes,
    )


def nixl_engine(
    role: str,
    model: TinyModel,
    path: Path,
    *,
    host: str,
    device: str,
    env: Mapping[str, str] = MappingProxyType({}),
) -> EngineSpec:
    """The prefill or the decode engine with vLLM's NixlConnector, UCX over TCP on this device.
    `env` is added to the engine's environment.
    """
    config = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_producer" if role == "prefill" else "kv_consumer",
        "kv_buffer_device": "cpu",
    }
    return engine(
        role,
        model,
        path,
        host=host,
        args=(*model.engine_args, "--kv-transfer-config", json.dumps(config)),
        env={
            "UCX_TLS": "tcp",
            "UCX_NET_DEVICES": device,
            "UCX_USE_MT_MUTEX": "y",
            "UCX_KEEPALIVE_INTERVAL": "inf",  # starved cores are not lost peers
            "VLLM_NIXL_SIDE_CHANNEL_HOST": host,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(NIXL_PORTS[role]),
            **env,
        },
    )


@asynccontextmanager
async def running_engines(
    specs: Iterable[EngineSpec], logs: Path, session: aiohttp.ClientSession, wrap: Wrap
) -> AsyncIterator[None]:
    """Engines without a region, all of them healthy; stopped at the end. `wrap` makes the command
    of an engine from its instance and its argv.
    """
    async with AsyncExitStack() as stack:
        supervisors = []
        for spec in specs:
            process = engine_process(spec, logs)
            process = replace(process, argv=wrap(spec.instance, process.argv))
            supervisor = Supervisor(process, EngineHttp(spec.url, session).health)
            supervisor.start()
            stack.push_async_callback(supervisor.stop)
            supervisors.append(supervisor)
        for supervisor in supervisors:
            await supervisor.wait_healthy(START_TIMEOUT_S, None)
        yield


@asynccontextmanager
async def nixl(
    link: Wan, model: TinyModel, path: Path, logs: Path, *, pace: bool
) -> AsyncIterator[Any]:
    """Two engines with vLLM's NixlConnector, one at each site."""

    def at_its_site(role: str, argv: Sequence[str]) -> list[str]:
        site = link.far if role == "prefill" else link.near
        return link.at_site(site, [*WITHOUT_NUMA, *argv])

    shares = cores_of(len(ROLES), cores_here())
    specs = [
        nixl_engine(role, model, path, host=host, device=DEVICE, env={CORE_VARIABLE: cores})
        for role, host, cores in zip(ROLES, (FAR, NEAR), shares, strict=True)
    ]
    if pace:
        specs = [paced_engine(spec, logs) for spec in specs]
    async with (
        aiohttp.ClientSession() as session,
        running_engines(specs, logs, session, at_its_site),
    ):

        async def ask(prompt: str) -> Answer:
            started_s = time.perf_counter()
            body: dict[str, Any] = {"model": MODEL, "prompt": prompt}
            asked = {"do_remote_decode": True, "do_remote_prefill": False}
            first_leg = {**body, "max_tokens": 1, "temperature": 0, "kv_transfer_params": asked}
            async with session.post(
                f"{url_of('prefill')}/v1/completions", json=first_leg
            ) as response:
                answer = await response.json()
            params = answer["kv_transfer_params"]
            prefill_s = time.perf_counter() - started_s
            second_leg = {**body, "kv_transfer_params": params}
            first_s, words, _ = await stream(session, url_of("decode"), second_leg)
            return Answer(prefill_s + first_s, words, 0, {"prefill_s": prefill_s})

        with nullcontext() if pace else left_alone(shares[0]):
            yield ask


async def ask_region(session: aiohttp.ClientSession, url: str, model: str, prompt: str) -> Answer:
    """The answer to a prompt that a region offloads; RuntimeError if it does not."""
    first_s, words, request_id = await stream(session, url, {"model": model, "prompt": prompt})
    record = await _record(session, url, request_id)
    parts = {name: value for name, value in record["parts"].items() if value is not None}
    return Answer(first_s, words, record["transfer_bytes"], parts)


@asynccontextmanager
async def prfaas(
    link: Wan, model: TinyModel, path: Path, logs: Path, *, pace: bool
) -> AsyncIterator[Any]:
    """A region of a prefill cluster at the far site and a PD cluster and the gateway here."""

    key = logs / ENGINE_KEY
    write_private(key, f"{new_key()}\n".encode())
    spec = region_spec(model, path, engine_key=key)
    if pace:
        spec = paced_region(spec)
    # As on two hosts, where each starts its own site: a front is beside its engines.
    part = part_with(spec, "sites", tuple(node.name for node in spec.nodes))

    def at_its_site(planned: PlannedProcess) -> PlannedProcess:
        if planned.name not in ("agent.far", "front.far", "prefill"):
            return planned
        argv = link.at_site(link.far, planned.process.argv)
        return replace(planned, process=replace(planned.process, argv=argv))

    cores, *_ = cores_of(len(ROLES), cores_here())  # as the region divides them itself
    async with (
        aiohttp.ClientSession() as session,
        RunningRegion(spec, logs / "region", part=part, adapt=at_its_site) as region,
    ):

        async def ask(prompt: str) -> Answer:
            return await ask_region(session, region.gateway_url, MODEL, prompt)

        with nullcontext() if pace else left_alone(cores):
            yield ask


def is_whole(record: dict[str, Any]) -> bool:
    """Whether a request is over and its prefill at the other site is in its record; RuntimeError
    where it was prefilled at its own site.
    """
    if not record["is_settled"]:
        return False
    if record["route"] != "prefill_cluster":
        raise RuntimeError(f"not prefilled at the other site: {record['reason']}")
    return record["parts"].get("prefill_s") is not None


async def _record(
    session: aiohttp.ClientSession, gateway_url: str, request_id: str
) -> dict[str, Any]:
    """The request's record, once it `is_whole`; RuntimeError if it was not offloaded."""
    for _ in range(500):
        async with session.get(f"{gateway_url}/prfaas/requests/{request_id}") as response:
            answer = await response.json()
        for record in answer.get("requests", ()):
            if is_whole(record):
                return dict(record)
        await asyncio.sleep(0.02)
    raise RuntimeError(f"no record of the prefill came: {answer}")


BY_THRESHOLD: Mapping[str, Any] = {
    "threshold_tokens": 100,
    "scheduling": {"routing": {"policy": "threshold"}},
}
"""Of a gateway: predictions would keep prompts here while engines are unknown."""


def region_spec(
    model: TinyModel,
    path: Path,
    *,
    gateway: Mapping[str, Any] = BY_THRESHOLD,
    hosts: tuple[str, str] = (FAR, NEAR),
    engine_key: Path | None = None,
) -> RegionSpec:
    """A prefill cluster of one engine and a PD cluster of another, at these two addresses. Without
    an `engine_key` the region makes one.
    """
    agent = {"arena_gib": 0.5}
    far_host, near_host = hosts
    spec = {
        "name": "bench",
        "gateway": {"port": 0, **gateway},
        "models": [
            {
                "name": model.name,
                "path": str(path),
                "dtype": model.dtype,
                "max_model_len": model.max_model_len,
                "max_num_batched_tokens": CHUNK_TOKENS,
                "kv_space_gib": 1,
                "prefix_caching": False,
                "enforce_eager": True,
                "args": model.engine_args,
            }
        ],
        "clusters": [
            {
                "name": "far",
                "kind": "prefill",
                "nodes": [
                    {
                        "name": "far",
                        "host": far_host,
                        "agent": agent,
                        "instances": [{"name": "prefill", "port": ENGINE_PORTS["prefill"]}],
                    }
                ],
            },
            {
                "name": "near",
                "kind": "pd",
                "nodes": [
                    {
                        "name": "near",
                        "host": near_host,
                        "agent": agent,
                        "instances": [{"name": "decode", "port": ENGINE_PORTS["decode"]}],
                    }
                ],
            },
        ],
        "links": [{"from": "far", "to": "near"}],
        "security": {"trusted_network": True, "engine_key": engine_key},
    }
    return RegionSpec.model_validate(spec)


def engine_access(system: str, logs: Path) -> EngineAccess:
    """The credentials that the engines of a system with these logs demand."""
    return EngineAccess(logs / ENGINE_KEY if system == "prfaas" else None)


async def ask_engine(
    url: str, model: str, prompt: str, headers: Mapping[str, str], site: str = ""
) -> float:
    """An engine's own TTFT of a prompt, over a new connection from `site`, a network namespace, or
    from here. Raises RuntimeError, aiohttp.ClientError.
    """

    async def ask() -> float:
        async with aiohttp.ClientSession() as session:
            body = {"model": model, "prompt": prompt}
            return (await stream(session, url, body, headers))[0]

    def ask_there() -> float:
        with Inside(site):
            return asyncio.run(ask())

    # A thread of its own: the sockets of all others stay at their site.
    return await (asyncio.to_thread(ask_there) if site else ask())


def url_of(role: str) -> str:
    return f"http://{FAR if role == 'prefill' else NEAR}:{ENGINE_PORTS[role]}"


SYSTEMS = {"prfaas": prfaas, "nixl": nixl}
