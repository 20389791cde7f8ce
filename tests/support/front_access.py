"""Fronts as a test asks them: in its own process, or through gRPC on loopback."""

from contextlib import AsyncExitStack

from local_pd.cluster import PdCluster
from local_pd.embedded import EmbeddedPdCluster
from local_pd.remote import RemotePdCluster
from local_pd.server import PdServer
from prfaas.cluster import PrefillCluster
from prfaas.embedded import EmbeddedPrefillCluster
from prfaas.remote import RemotePrefillCluster
from prfaas.server import PrefillServer

LOOPBACK = "127.0.0.1"


async def started_pd(stack: AsyncExitStack, kind: str, embedded: EmbeddedPdCluster) -> PdCluster:
    """Start a PD front, and the way to it if `kind` is "remote". `stack` ends both."""
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
