"""Attacks before any handler (heads, packed bodies) and with what engines answer: secrets in logs,
work for strangers, memory that belongs to nobody.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry
from raw_client import RawClient

from deploy.gateway.api_keys import ApiKey
from kvmanager.metrics_server import MetricsServer
from transport import Endpoint

KEYS = tuple(ApiKey.model_validate(line) for line in ("acme one", "mallory two"))
SHORT = {"model": "tiny", "prompt": "x"}
SECRET = b"sk-secret-0123456789"


async def ask(url: str, *lines: bytes, path: bytes = b"/v1/completions") -> tuple[int, bytes]:
    """The status and the rest of the answer to a request with these headers."""
    body = json.dumps(SHORT).encode()
    head = [b"POST " + path + b" HTTP/1.1", b"Host: x", b"Content-Type: application/json"]
    head += [b"Connection: close", b"Content-Length: %d" % len(body), *lines]
    async with RawClient(url) as client:
        client.writer.write(b"\r\n".join([*head, b"", body]))
        status, rest = await client.status(), b""
        while piece := await client.reader.read(65536):
            rest += piece
    return status, rest


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (b"Cookie: session=" + SECRET + b"; " + b"a" * 9_000, 200),
        (b"Cookie: session=" + SECRET + b"; " + b"a" * 60_000, 200),
        (b"Cookie: session=" + SECRET + b"; " + b"a" * 70_000, 431),
        (b"\r\n".join(b"X-%d: %s%s" % (i, SECRET, b"a" * 9_000) for i in range(8)), 431),
        (b"Authorization : Bearer " + SECRET, 400),
        (b"X-Key: " + SECRET + b"\x00", 400),
    ],
)
async def test_a_head_is_as_long_as_at_an_engine_and_never_in_a_log(
    region: Any, caplog: pytest.LogCaptureFixture, line: bytes, status: int
) -> None:
    caplog.set_level(logging.DEBUG)
    found, rest = await ask(region.url, line)
    assert found == status
    assert SECRET.decode() not in caplog.text
    if status == 200:
        return
    head, _, body = rest.partition(b"\r\n\r\n")
    assert b"application/json" in head
    code = json.loads(body)["error"]["code"]
    assert code == ("head_too_large" if status == 431 else "bad_request")
    assert SECRET not in rest
    counted = region.gateway.metrics.registry.get_sample_value
    assert counted("prfaas_gateway_rejected_total", {"code": code}) == 1


async def test_each_request_of_a_connection_has_a_head_of_its_own(region: Any) -> None:
    async with RawClient(region.url) as client:
        for _ in range(100):
            await client.send(b"GET /livez HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 1000 + b"\r\n\r\n")
            head = await client.reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            await client.reader.readexactly(int(head.lower().partition(b"length: ")[2].split()[0]))


async def test_metrics_servers_show_no_heads_either(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    server = MetricsServer(CollectorRegistry(), Endpoint("127.0.0.1", 0))
    at = await server.start()
    try:
        for line in (b"Authorization : Bearer " + SECRET, b"X: " + SECRET + b"a" * 70_000):
            status, rest = await ask(f"http://{at}", line)
            assert status in (400, 431)
            assert SECRET not in rest
            assert SECRET.decode() not in caplog.text
    finally:
        await server.stop()


async def test_nothing_is_unpacked_for_strangers(open_region: Any) -> None:
    async with open_region(api_keys=KEYS) as region:
        for packing in ("gzip", "br", "GZIP, identity"):
            status, _ = await ask(region.url, b"Content-Encoding: " + packing.encode())
            assert status == 415


def timers(port: int, peers_port: int) -> list[list[str]]:
    """The kernel's timer of the socket between these ports: its kind, and when it ends."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    wanted = f"{port:04X}", f"{peers_port:04X}"
    return [row[5].split(":") for row in rows if (row[1][-4:], row[2][-4:]) == wanted]


async def test_a_client_that_is_gone_without_a_word_is_noticed(open_region: Any) -> None:
    """By probes within a minute, where the kernel's own begin after two hours."""
    async with open_region() as region, RawClient(region.url) as client:
        await client.send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert await client.status() == 200
        ours = client.writer.get_extra_info("sockname")[1]
        theirs = int(region.url.rpartition(":")[2])
        (timer,) = timers(theirs, ours)
        assert timer[0] == "02", "no timer of probes"
        assert int(timer[1], 16) <= 6_000, "in hundredths of a second"


async def test_answers_count_towards_the_memory_of_their_tenant(open_region: Any) -> None:
    """A short request may have an answer of many megabytes, which its client does not read."""
    limits = {
        "max_body_bytes": 1 << 20,
        "max_buffered_bytes": 64 << 20,
        "max_tenant_buffered_bytes": 8 << 20,
    }
    async with open_region(api_keys=KEYS, **limits) as region:

        async def long(request: web.Request, body: Any) -> web.Response:
            return web.Response(body=b'{"x":"' + b"a" * (3 << 20) + b'"}')

        region.engine.reply = long
        body = json.dumps(SHORT).encode()
        clients = [RawClient(region.url) for _ in range(6)]
        for client in clients:
            await client.__aenter__()
            headers = {"Content-Type": "application/json", "Authorization": "Bearer two"}
            await client.post("/v1/completions", headers, announced=len(body), body=body)
        statuses = sorted([await client.status() for client in clients])
        assert statuses[:2] == [200, 200]
        assert statuses[2:].count(429) >= 3
        assert region.gateway._limits.num_body_bytes <= 9 << 20
        # Others have their own.
        mine = {"headers": {"Authorization": "Bearer one"}}
        assert (await region.post(SHORT, **mine))[0] == 200
        for client in clients:
            await client.__aexit__()
        await region.until(lambda: region.gateway.num_in_flight == 0)
        assert region.gateway._limits.num_body_bytes == 0
