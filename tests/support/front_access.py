"""Fronts as a test asks them: in its own process, or through gRPC on loopback.

`stack` ends whatever is started here.
"""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any, Protocol, TypeVar

from prometheus_client import CollectorRegistry

from deploy.gateway.app import Gateway
from deploy.gateway.server import start_server
from local_pd.cluster import PdCluster
from local_pd.embedded import EmbeddedPdCluster, PdClusterConfig
from local_pd.metrics import PdMetrics
from local_pd.remote import RemotePdCluster
from local_pd.server import PdServer
from prfaas.cluster import PrefillCluster
from prfaas.embedded import EmbeddedPrefillCluster, PrefillClusterConfig
from prfaas.engines.instance import InstanceSpec
from prfaas.metrics import PrefillMetrics
from prfaas.remote import RemotePrefillCluster
from prfaas.server import PrefillServer

LOOPBACK = "127.0.0.1"


class Double(Protocol):
    """What can be started and stopped."""

    async def start(self) -> Any: ...

    async def stop(self) -> None: ...


DoubleT = TypeVar("DoubleT", bound=Double)


async def running(stack: AsyncExitStack, double: DoubleT) -> DoubleT:
    """Start a double of an engine or agent."""
    await double.start()
    stack.push_async_callback(double.stop)
    return double


def pd_cluster(
    name: str, specs: Sequence[InstanceSpec], config: PdClusterConfig, **more: Any
) -> EmbeddedPdCluster:
    """A PD front with metrics of its own."""
    metrics = PdMetrics(CollectorRegistry())
    return EmbeddedPdCluster(name, list(specs), config, metrics=metrics, **more)


def prefill_cluster(
    name: str, specs: Sequence[InstanceSpec], config: PrefillClusterConfig, **more: Any
) -> EmbeddedPrefillCluster:
    """The front of a prefill cluster with metrics of its own."""
    metrics = PrefillMetrics(CollectorRegistry())
    return EmbeddedPrefillCluster(name, list(specs), config, metrics=metrics, **more)


async def ready(stack: AsyncExitStack, *fronts: EmbeddedPdCluster | EmbeddedPrefillCluster) -> None:
    """Start fronts, and wait until their instances serve."""
    for front in fronts:
        await front.start()
        stack.push_async_callback(front.close)
        await front.wait_ready(60)


async def gateway_url(stack: AsyncExitStack, gateway: Gateway) -> str:
    """Serve with a gateway; its address."""
    runner = await start_server(gateway)
    stack.push_async_callback(runner.cleanup)
    host, port = runner.addresses[0][:2]
    return f"http://{host}:{port}"


async def started_pd(stack: AsyncExitStack, kind: str, embedded: EmbeddedPdCluster) -> PdCluster:
    """Start a PD front, and the way to it if `kind` is "remote"."""
    await embedded.start()
    stack.push_async_callback(embedded.close)
    if kind != "remote":
        return embedded
    server = PdServer(embedded, f"{LOOPBACK}:0")
    port = await server.start()
    stack.push_async_callback(server.stop, 0)
    front = RemotePdCluster("west", f"{LOOPBACK}:{port}", has_prefill_instances=True)
    stack.push_async_callback(front.close)
    return front


async def started_prefill(
    stack: AsyncExitStack, kind: str, embedded: EmbeddedPrefillCluster
) -> PrefillCluster:
    """The same for the front of a prefill cluster."""
    await embedded.start()
    stack.push_async_callback(embedded.close)
    if kind != "remote":
        return embedded
    server = PrefillServer(embedded, f"{LOOPBACK}:0")
    port = await server.start()
    stack.push_async_callback(server.stop, 0)
    front = RemotePrefillCluster("east", f"{LOOPBACK}:{port}")
    stack.push_async_callback(front.close)
    return front
