"""A region over mutual TLS: who gets in, what crosses the link, what a Prometheus server sees."""

import asyncio
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest
from dashboard_queries import missing_of_engines
from data_port import is_welcome, tls_context
from engine_region import (
    LOOPBACK,
    WINDOW,
    agent_status,
    ask_at,
    listening_hosts,
    own_address,
    prompt,
)
from prometheus_server import needs_prometheus
from served_region import DECODE, PREFILL, Served, serving

from kvmanager.config_files.security import is_loopback
from transport import TlsFiles

pytestmark = [pytest.mark.asyncio(loop_scope="session"), serving(WINDOW)]


async def test_kvcache_crosses_tls(served: Served) -> None:
    """The only way into a data port is TLS with a certificate of the region; KVCache gets in."""
    region = served.region
    files = region.credentials("operator")
    assert isinstance(files, TlsFiles)
    contexts = [None, *(tls_context(files, with_certificate=shows) for shows in (False, True))]
    agents = [await agent_status(region, node) for node in ("a1", "b1")]
    for agent in agents:
        assert agent.is_encrypted
        port = agent.data_endpoint
        welcomes = [await asyncio.to_thread(is_welcome, port, one) for one in contexts]
        assert welcomes == [False, False, True]
    moved_before = region.relay().report().forward.out_bytes
    record = await served.prefilled(prompt("encrypted", 1500, 31))
    moved_bytes = region.relay().report().forward.out_bytes - moved_before
    assert moved_bytes >= record["transfer_bytes"] > 0, record


async def test_engines_serve_the_region_over_https(served: Served) -> None:
    """On a host that has only loopback addresses they are asked over HTTP, as in other regions."""
    region, host = served.region, own_address()
    access = region.engine_access()
    for engine in map(region.engine, (PREFILL, DECODE)):
        found = urlsplit(engine.address)
        assert (found.scheme, found.hostname) == ("http" if is_loopback(host) else "https", host)
        assert listening_hosts(engine) <= {host, LOOPBACK}
        async with aiohttp.ClientSession() as session:
            url = f"{engine.address}/health"
            async with session.get(url, ssl=access.tls()) as response:
                assert response.status == 401, "a certificate is no key"
            async with session.get(url, ssl=access.tls(), headers=access.headers) as response:
                assert response.status == 200
            if found.scheme == "https":
                files = region.credentials("operator")
                assert isinstance(files, TlsFiles)
                nameless = tls_context(files, with_certificate=False)
                with pytest.raises(aiohttp.ClientError):
                    await session.get(url, ssl=nameless, headers=access.headers)


@needs_prometheus
async def test_dashboards_find_what_engines_moved(served: Served, tmp_path: Path) -> None:
    """Panels of vLLM's metrics and of prefix caches, in a real Prometheus server."""
    region = served.region
    # The loop must go on, since it runs the region.
    found = asyncio.create_task(
        asyncio.to_thread(missing_of_engines, region.directory.root, tmp_path)
    )
    number = 0
    while not found.done():
        number += 1
        new = prompt(f"seen {number}", 600, 5_000 + number, stream=True)
        again = replace(new, name=f"{new.name} again")
        await ask_at(region.gateway_url, served.model, [new, again])
    assert await found == []
