"""Attacks with addresses of media: on what only the gateway reaches, and on its memory and time."""

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest
from media_server import MediaServer, asking, settings

from deploy.gateway.api_keys import ApiKey
from deploy.gateway.media import fetch

CHAT = "/v1/chat/completions"
METADATA = "http://169.254.169.254/latest/meta-data/iam/security-credentials/"
KIB = 1 << 10


@pytest.fixture(name="server")
async def server_fixture() -> AsyncIterator[MediaServer]:
    async with MediaServer() as server:
        yield server


async def refused(region: Any, *urls: str, **kwargs: Any) -> dict[str, Any]:
    """The error of a request that no engine may see."""
    status, _, said = await region.post(asking(*urls), CHAT, **kwargs)
    error: dict[str, Any] = json.loads(said)["error"]
    assert status == 400, error
    assert error["type"] == "invalid_request_error"
    assert region.engine.requests == []
    return error


@pytest.fixture(name="names")
def names_fixture(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[list[str]]]:
    """What names lead to, one answer after the other; the last one stays."""
    known: dict[str, list[list[str]]] = {}

    def resolve(host: str, _port: int) -> list[str]:
        if host not in known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        answers = known[host]
        return answers.pop(0) if len(answers) > 1 else answers[0]

    monkeypatch.setattr(fetch, "_system_addresses", resolve)
    return known


@pytest.mark.parametrize(
    "url",
    [
        METADATA,
        "http://127.0.0.1/",
        "http://127.0.0.1:8000/prfaas/region",
        "http://localhost/",
        "http://0/",
        "http://127.1/",
        "http://2130706433/",
        "http://0x7f.0.0.1/",
        "http://0177.0.0.1/",
        "http://[::]/",
        "http://[::1]/",
        "http://[::ffff:169.254.169.254]/",
        "http://[64:ff9b::a9fe:a9fe]/",
        "http://10.0.0.1/",
        "http://user:secret@8.8.8.8/",
        "file:///proc/self/environ",
        "ftp://8.8.8.8/a.png",
        "http://8.8.8.8:22/",
    ],
)
async def test_by_default_nothing_internal_is_reached(region: Any, url: str) -> None:
    error = await refused(region, "data:image/png;base64,AAAA", url)
    assert error["param"] == "messages[0].content[2].image_url"
    assert error["message"].startswith("messages[0].content[2].image_url: the image is not fetched")


async def test_errors_tell_nothing_of_internal_names(
    region: Any, names: dict[str, list[list[str]]]
) -> None:
    names["db.internal"] = [["10.1.2.3"]]
    names["both.example"] = [["8.8.8.8", "10.1.2.3"]]
    names["six.example"] = [["fd00::1"]]
    names["none.example"] = [[]]
    told = {
        host: await refused(region, f"http://{host}/a.png")
        for host in (*names, "unknown.internal", "127.0.0.1", "10.1.2.3")
    }
    assert len({json.dumps(error) for error in told.values()}) == 1, told
    (error,) = {error["message"] for error in told.values()}
    assert not any(word in error for word in ("10.1", "internal", "example"))


async def test_the_connection_goes_to_the_address_that_was_checked(
    open_region: Any, server: MediaServer, names: dict[str, list[list[str]]]
) -> None:
    # The second answer of a name server under an attacker's control is the internal one.
    names["rebind.example"] = [["127.0.0.1"], ["127.0.0.2"]]
    asked: list[str] = []
    answer = fetch._system_addresses

    def resolve(host: str, port: int) -> list[str]:
        asked.append(host)
        return answer(host, port)

    async with open_region(**settings(server)) as region:
        region.gateway._services.media._fetch._resolve = resolve
        url = f"http://rebind.example:{server.port}/a.png"
        assert (await region.post(asking(url), CHAT))[0] == 200
        assert asked == ["rebind.example"]
        assert server.requests[0][1]["Host"] == f"rebind.example:{server.port}"
        # Kept connections would not be checked again: there are none.
        assert (await region.post(asking(url), CHAT))[0] == 400
        assert asked == ["rebind.example"] * 2
        assert len(server.requests) == 1


async def test_every_hop_of_a_redirect_is_checked(
    open_region: Any, server: MediaServer, names: dict[str, list[list[str]]]
) -> None:
    names["inside.example"] = [["10.0.0.1"]]
    hops = {
        "metadata": METADATA,
        "inside": f"http://inside.example:{server.port}/",
        "loopback": f"http://127.0.0.2:{server.port}/",
        "file": "file:///etc/passwd",
        "user": f"http://a:b@127.0.0.1:{server.port}/a.png",
        "port": "http://127.0.0.1:1/a.png",
        "broken": "http://[",
        "twice": "/redirect/metadata",
    }
    server.targets = hops | {"good": "/a.png", "again": "good"}
    async with open_region(**settings(server)) as region:
        for name in hops:
            error = await refused(region, f"{server.url}/redirect/{name}")
            assert "169.254" not in error["message"]
            assert "inside" not in error["message"]
        assert (await refused(region, server.url + "/loop"))["code"] == "media_redirects"
        assert server.asked("/loop") == 4
        assert (await region.post(asking(server.url + "/redirect/again"), CHAT))[0] == 200


async def test_what_is_no_medium_is_not_told(open_region: Any, server: MediaServer) -> None:
    page = b"<html>internal secrets</html>"
    server.bodies = {
        "page": ("text/html", page),
        "json": ("application/json", b'{"secret": 1}'),
        "video": ("video/mp4", b"1"),
        "line": ('image/png"\\', b"1"),
    }
    async with open_region(**settings(server)) as region:
        for name in server.bodies:
            error = await refused(region, f"{server.url}/body/{name}")
            assert error["code"] == "media_content_type"
        for status in (201, 204, 304, 401, 404, 500, 503):
            error = await refused(region, f"{server.url}/status/{status}")
            assert error["code"] == "media_status"
            assert str(status) in error["message"]
            assert "secrets" not in error["message"]
        gone = "http://127.0.0.1:80/a.png"
        assert (await refused(region, gone))["code"] == "media_unreachable"


async def test_size_is_bounded_as_it_arrives(open_region: Any, server: MediaServer) -> None:
    small = settings(server, max_bytes=64 * KIB)
    server.bodies = {
        "fits": ("image/png", b"0" * 64 * KIB),
        "large": ("image/png", b"0" * (64 * KIB + 1)),
    }
    async with open_region(**small, max_body_bytes=128 * KIB) as region:
        for path in ("/body/large", "/endless", "/bomb"):
            error = await refused(region, server.url + path)
            assert error["code"] in ("media_too_large", "media_encoding")
        assert (await region.post(asking(server.url + "/body/fits"), CHAT))[0] == 200
        region.engine.requests.clear()
        # A few bytes of address must not become any number of bytes of body.
        error = await refused(region, *[server.url + "/body/fits"] * 2)
        assert error["code"] == "media_body_too_large"
        await region.assert_nothing_held()
        assert region.gateway._limits.num_body_bytes == 0


async def test_memory_counts_against_the_gateway(open_region: Any, server: MediaServer) -> None:
    limits = {"max_body_bytes": 2048 * KIB, "max_buffered_bytes": 2048 * KIB}
    server.bodies = {str(n): ("image/png", bytes(512 * KIB)) for n in range(4)}
    async with open_region(**settings(server), **limits) as region:
        urls = [f"{server.url}/body/{name}" for name in server.bodies]
        status, headers, said = await region.post(asking(*urls), CHAT)
        assert (status, json.loads(said)["error"]["code"]) == (429, "too_many_requests")
        assert "retry-after" in headers
        await region.assert_nothing_held()
        assert region.gateway._limits.num_body_bytes == 0
        assert (await region.post(asking(urls[0]), CHAT))[0] == 200


async def test_number_of_media(open_region: Any, server: MediaServer) -> None:
    async with open_region(**settings(server, max_per_request=2)) as region:
        urls = [f"{server.url}/{n}.png" for n in range(3)]
        error = await refused(region, *urls)
        assert (error["code"], error["param"]) == (
            "media_too_many",
            "messages[0].content[3].image_url",
        )
        assert server.requests == []
        assert (await region.post(asking(*urls[:2]), CHAT))[0] == 200


@pytest.mark.parametrize("path", ["/slow", "/trickle"])
async def test_a_slow_server_costs_nobody_else(
    open_region: Any, server: MediaServer, path: str
) -> None:
    bounds = {"timeout_s": 1.0, "max_fetches": 3, "max_tenant_fetches": 2, "max_host_fetches": 3}
    keys = tuple(ApiKey(key=name * 32, name=name) for name in "ab")
    async with open_region(**settings(server, **bounds), api_keys=keys) as region:
        headers = {name: {"Authorization": f"Bearer {name * 32}"} for name in "ab"}
        began_s = time.monotonic()
        slow = [
            asyncio.create_task(
                region.post(asking(f"{server.url}{path}?{n}"), CHAT, headers=headers["a"])
            )
            for n in range(4)
        ]
        await region.until(lambda: server.num_open[path] == 2)
        # Neither another tenant nor a text of the same one waits.
        status, _, _ = await region.post(asking(server.url + "/a.png"), CHAT, headers=headers["b"])
        assert status == 200
        assert (await region.post({"model": "tiny", "prompt": "x"}, headers=headers["a"]))[0] == 200
        assert not any(task.done() for task in slow)
        answers = [
            (status, json.loads(said)["error"]["code"])
            for status, _, said in await asyncio.gather(*slow)
        ]
        # Those that waited may just have begun when their time was over.
        assert answers.count((400, "media_timeout")) >= 2
        assert set(answers) <= {(400, "media_timeout"), (429, "media_busy")}
        assert time.monotonic() - began_s < 10
        await region.assert_nothing_held()


async def test_a_slow_name_server_costs_nobody_else(open_region: Any, server: MediaServer) -> None:
    bounds = {"timeout_s": 0.3, "max_fetches": 3, "max_tenant_fetches": 2}
    keys = tuple(ApiKey(key=name * 32, name=name) for name in "ab")
    answer_now = asyncio.Event()
    loop = asyncio.get_running_loop()

    def resolve(host: str, _port: int) -> list[str]:
        if host == "slow.example":
            asyncio.run_coroutine_threadsafe(answer_now.wait(), loop).result()
        return ["127.0.0.1"]

    async with open_region(**settings(server, **bounds), api_keys=keys) as region:
        region.gateway._services.media._fetch._resolve = resolve
        headers = {name: {"Authorization": f"Bearer {name * 32}"} for name in "ab"}
        codes = []
        for n in range(4):
            url = f"http://slow.example:{server.port}/{n}"
            _, _, said = await region.post(asking(url), CHAT, headers=headers["a"])
            codes.append(json.loads(said)["error"]["code"])
        # Two threads still wait, and their tenant gets no more of them.
        assert codes == ["media_timeout"] * 2 + ["media_busy"] * 2
        url = f"http://quick.example:{server.port}/a.png"
        assert (await region.post(asking(url), CHAT, headers=headers["b"]))[0] == 200
        answer_now.set()
        await region.until(lambda: region.gateway._services.media._fetch._turns.num_running == 0)
        assert (await region.post(asking(url), CHAT, headers=headers["a"]))[0] == 200


async def test_tenants_share_no_fetch(open_region: Any, server: MediaServer) -> None:
    keys = tuple(ApiKey(key=name * 32, name=name) for name in "ab")
    async with open_region(**settings(server), api_keys=keys) as region:
        posts = [
            asyncio.create_task(
                region.post(
                    asking(server.url + "/slow"),
                    CHAT,
                    headers={"Authorization": f"Bearer {name * 32}"},
                )
            )
            for name in "ab"
        ]
        await region.until(lambda: server.num_open["/slow"] == 2)
        server.gate.set()
        assert [(await post)[0] for post in posts] == [200, 200]


async def test_who_is_over_a_limit_has_nothing_fetched(
    open_region: Any, server: MediaServer
) -> None:
    admission = {"default_tenant": {"max_requests": 1}}
    keys = (ApiKey(key="a" * 32, name="a"),)
    async with open_region(
        **settings(server), api_keys=keys, scheduling={"admission": admission}
    ) as region:
        headers = {"Authorization": "Bearer " + "a" * 32}
        first = asyncio.create_task(
            region.post(asking(server.url + "/slow"), CHAT, headers=headers)
        )
        await region.until(lambda: server.num_open["/slow"] == 1)
        status, _, _ = await region.post(asking(server.url + "/a.png"), CHAT, headers=headers)
        assert status == 429
        assert server.asked("/a.png") == 0
        server.gate.set()
        assert (await first)[0] == 200


@pytest.mark.parametrize(
    ("head", "more"),
    [
        (b"", b"HTTP/1.1 103 Early Hints\r\nLink: <x>\r\n\r\n" * 500),
        (b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nX\r\n" * 3000),
        (b"Transfer-Encoding: chunked\r\n\r\n", (b"8;" + b"x=y;" * 500 + b"\r\nXXXXXXXX\r\n") * 9),
    ],
)
async def test_a_server_that_sends_what_is_no_body_is_cut_off(
    open_region: Any, head: bytes, more: bytes
) -> None:
    """Not after the time for a fetch: such bytes cost much to parse, and are never too many."""
    num_sent, is_over = 0, asyncio.Event()

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_sent
        await reader.readuntil(b"\r\n\r\n")
        if head:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\n" + head)
        with suppress(ConnectionError):
            while True:
                writer.write(more)
                await writer.drain()
                num_sent += len(more)
        is_over.set()

    server = await asyncio.start_server(flood, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    allowed = {"private_networks": ["127.0.0.1/32"], "ports": [port], "timeout_s": 60}
    async with server, open_region(media=allowed) as region:
        error = await refused(region, f"http://127.0.0.1:{port}/x.png")
        assert error["code"] == "media_unreachable"
        await asyncio.wait_for(is_over.wait(), 30)
        # What the kernel buffers on the way comes on top.
        assert num_sent < 16 << 20
