"""The systems that `bench_load.py` compares: each has the machine's cores for its engines, and
answers at one OpenAI URL on loopback.

Does not know what is asked nor what is made of the answers. Every engine has the same settings and
is bound to its share of the cores; gateways, agents, routers and the client are bound to none. So
each worker has a process of its own: vLLM binds no worker that computes in the engine core's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import aiohttp
from e2e_systems import (
    BY_THRESHOLD,
    ENGINE_PORTS,
    ROLES,
    WITHOUT_NUMA,
    engine,
    nixl_engine,
    region_spec,
    running_engines,
)
from engine_cores import CannotRunError, cores_of
from free_ports import free_port
from gateway_process import answers, child
from paced import paced_engine, paced_region
from router_wheel import ROUTER, router_path

from deploy.lab.demo.regions import pd_cluster_alone
from deploy.lab.demo.tiny_specs import TinyModel
from deploy.region.launch.devices import cores_here
from deploy.region.launch.launcher import RunningRegion
from deploy.region.spec.region import RegionInstance, RegionSpec
from kvmanager.agent.host_facts import CORE_VARIABLE

HOST: Final = "127.0.0.1"
UNSHARE: Final = "/usr/bin/unshare"


@dataclass(frozen=True, slots=True)
class Serving:
    """A system that answers, and the model to ask it for. `has_records`: its gateway tells how each
    request went.
    """

    url: str
    model: str
    has_records: bool = False


class System(Protocol):
    """Starts a system from a model, the folder of its weights and a folder for logs. With `pace`
    its engines are paced. Raises `CannotRunError`.
    """

    def __call__(
        self, model: TinyModel, path: Path, logs: Path, *, pace: bool
    ) -> AbstractAsyncContextManager[Serving]: ...


def two_clusters(model: TinyModel, path: Path, gateway: Mapping[str, Any]) -> RegionSpec:
    """A prefill cluster and a PD cluster of an engine each, which speak TCP on loopback."""
    return region_spec(model, path, gateway=gateway, hosts=(HOST, HOST))


def pd_alone(model: TinyModel, path: Path) -> RegionSpec:
    """The same two engines as the prefill and the decode instance of one PD cluster, with default
    scheduling.
    """
    instances = [RegionInstance(name=role, role=role, port=ENGINE_PORTS[role]) for role in ROLES]
    return pd_cluster_alone(two_clusters(model, path, {}), instances)


@asynccontextmanager
async def region(
    spec_of: Callable[[TinyModel, Path], RegionSpec],
    model: TinyModel,
    path: Path,
    logs: Path,
    *,
    pace: bool,
) -> AsyncIterator[Serving]:
    """A region, whose engines get their cores as `prfaas up` divides them."""
    spec = spec_of(model, path)
    if pace:
        # The same two engines in each system, wherever the prefill engine is.
        spec = paced_region(spec, fast=["prefill"])
    cores_of(sum(len(node.instances) for node in spec.nodes), cores_here())
    async with RunningRegion(spec, logs / "region") as running:
        yield Serving(running.gateway_url, model.name, has_records=True)


@asynccontextmanager
async def nixl(model: TinyModel, path: Path, logs: Path, *, pace: bool) -> AsyncIterator[Serving]:
    """Two engines with vLLM's NixlConnector, over TCP on loopback, behind vllm-router."""
    if os.geteuid() != 0:
        raise CannotRunError("only root can hide the NUMA nodes, which its engines need")
    specs = [
        nixl_engine(role, model, path, host=HOST, device="lo", env={CORE_VARIABLE: cores})
        for role, cores in zip(ROLES, cores_of(len(ROLES), cores_here()), strict=True)
    ]
    if pace:
        specs = [paced_engine(spec, logs) for spec in specs]

    def without_numa(_: str, argv: Sequence[str]) -> list[str]:
        # In a mount namespace of its own, so that the rest of the machine keeps its nodes.
        return [UNSHARE, "--mount", *WITHOUT_NUMA, *argv]

    with ExitStack() as stack:
        wheel = router_path(logs, may_install=True)
        async with (
            aiohttp.ClientSession() as session,
            running_engines(specs, logs, session, without_numa),
        ):
            port = free_port()
            argv = [sys.executable, "-m", "vllm_router.launch_router", "--host", HOST]
            argv += ["--port", str(port), "--vllm-pd-disaggregation", "--kv-connector", "nixl"]
            argv += ["--prefill", specs[0].url, "--decode", specs[1].url]
            argv += ["--policy", "round_robin", "--log-level", "error"]
            argv += ["--prometheus-port", str(free_port())]
            health = b"GET /health HTTP/1.1\r\nHost: router\r\n\r\n"
            env = os.environ | {"PYTHONPATH": wheel or ""}
            try:
                stack.enter_context(child(argv, answers(port, health), env))
            except RuntimeError as error:
                raise CannotRunError(f"{ROUTER} cannot be run: {str(error)[-500:]}") from error
            yield Serving(f"http://{HOST}:{port}", model.name)


@asynccontextmanager
async def plain(model: TinyModel, path: Path, logs: Path, *, pace: bool) -> AsyncIterator[Serving]:
    """One engine with all cores and without any connector."""
    if pace:
        raise CannotRunError("one paced engine is half of the hardware of the others")
    env = {CORE_VARIABLE: cores_of(1, cores_here())[0]}
    spec = engine("plain", model, path, host=HOST, args=model.engine_args, env=env)
    async with (
        aiohttp.ClientSession() as session,
        running_engines([spec], logs, session, lambda _, argv: argv),
    ):
        yield Serving(spec.url, model.name)


SYSTEMS: Final[Mapping[str, System]] = {
    "prfaas": partial(region, lambda model, path: two_clusters(model, path, {})),
    "prfaas-remote": partial(region, lambda model, path: two_clusters(model, path, BY_THRESHOLD)),
    "prfaas-pd": partial(region, pd_alone),
    "nixl": nixl,
    "plain": plain,
}
"""By name: this region with default routing, and with all prompts prefilled remotely; the same
engines as one PD cluster; vLLM's own way with them; one engine with all cores.
"""
