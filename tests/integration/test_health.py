"""Probes ask servers over gRPC and HTTP whether they serve, without any role or key."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import grpc
import grpc.aio
import pytest
from certificates import make_authority, make_node
from grpc_health_probe import grpc_health
from prometheus_client import CollectorRegistry

from kvmanager.metrics_server import MetricsServer
from transport import Credentials, Endpoint, Identity, RegionKey
from transport.region_key import new_key
from transport.rpc import RpcServer
from transport.rpc_auth import channel_credentials


class Process:
    """What serves or not."""

    def __init__(self) -> None:
        self.trouble = ""

    async def why_not_ready(self) -> str:
        return self.trouble


@asynccontextmanager
async def serving(process: Process, credentials: Credentials | None = None) -> AsyncIterator[str]:
    server = RpcServer("127.0.0.1:0", {}, credentials, why_not_ready=process.why_not_ready)
    port = await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


def region_key(folder: Path) -> RegionKey:
    path = folder / "region.key"
    path.write_text(new_key())
    path.chmod(0o600)
    return RegionKey(path, Identity("r", "agent", "x"))


@pytest.mark.parametrize("security", ["none", "key", "tls"])
async def test_grpc_says_whether_the_process_serves(tmp_path: Path, security: str) -> None:
    process, credentials, channel = Process(), None, None
    if security == "key":
        credentials = region_key(tmp_path)
    elif security == "tls":
        authority = make_authority(tmp_path, "ca")
        credentials = make_node(tmp_path, "server", authority, uris=("spiffe://r/agent/a",))
        # The authority has signed it, but it names no role.
        channel = channel_credentials(make_node(tmp_path, "probe", authority))
    async with serving(process, credentials) as target:
        assert await grpc_health(target, channel) == "SERVING"
        # All services of a process serve, or none; a long name changes nothing.
        assert await grpc_health(target, channel, service="x" * 1_000_000) == "SERVING"
        process.trouble = "no instance serves"
        assert await grpc_health(target, channel) == "NOT_SERVING"


@pytest.mark.parametrize("method", ["Watch", "List"])
async def test_nobody_can_make_a_server_hold_a_watch(method: str) -> None:
    async with serving(Process()) as target, grpc.aio.insecure_channel(target) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(f"/grpc.health.v1.Health/{method}")(b"", timeout=10)
        # The protocol's word for it: callers then take the server to serve.
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_http_tells_a_process_that_lives_from_one_that_serves() -> None:
    process = Process()
    at = Endpoint("127.0.0.1", 0)
    server = MetricsServer(CollectorRegistry(), at, why_not_ready=process.why_not_ready)
    url = f"http://{await server.start()}"

    async def asked(session: aiohttp.ClientSession, path: str) -> tuple[int, str]:
        async with session.get(url + path) as answer:
            return answer.status, await answer.text()

    try:
        async with aiohttp.ClientSession() as session:
            assert await asked(session, "/readyz") == (200, "ok\n")
            process.trouble = "no instance serves"
            assert await asked(session, "/readyz") == (503, "no instance serves\n")
            assert await asked(session, "/livez") == (200, "ok\n")
    finally:
        await server.stop()


async def test_a_server_that_stops_is_not_ready() -> None:
    server = RpcServer("127.0.0.1:0", {})
    await server.start()
    assert not await server.why_not_ready()
    await server.stop(0)
    assert await server.why_not_ready() == "stopping"
