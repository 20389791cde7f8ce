"""A gateway of two processes on one port, as real processes: with a front, Redis and an engine."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import yaml
from eventually import eventually
from openai_engine import OpenAiEngine
from prometheus_client.parser import text_string_to_metric_families
from redis_server import RedisServer
from serving_process import gateway_file, only_engine, serving, started

pytestmark = pytest.mark.slow

LIMIT_S = 120
LITTLE = {"tokens_per_s": 0.001, "burst_tokens": 1}


class Gateway:
    """A gateway of several processes. Every question goes over a new connection, for which the
    kernel chooses a process.
    """

    def __init__(
        self,
        parent: asyncio.subprocess.Process,
        ready: dict[str, Any],
        file: Path,
        engine: OpenAiEngine,
    ) -> None:
        self.parent = parent
        self.url: str = ready["url"]
        self.pids: list[int] = ready["processes"]
        self.file = file
        self.engine = engine
        connector = aiohttp.TCPConnector(force_close=True)
        self.session = aiohttp.ClientSession(connector=connector)

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(self.url + path) as response:
            return response.status, await response.json()

    async def get_text(self, path: str) -> str:
        async with self.session.get(self.url + path) as response:
            return await response.text()

    async def post(self, **fields: Any) -> tuple[int, str, bytes]:
        """Status, request id and body of a completion."""
        body = {"model": "tiny", "prompt": "x" * 60, "max_tokens": 4} | fields
        async with self.session.post(self.url + "/v1/completions", json=body) as response:
            answer = await response.read()
            return response.status, response.headers.get("x-request-id", ""), answer

    async def num_requests(self) -> float:
        """The completions that ended, as a scrape shows them."""
        async with self.session.get(self.url + "/metrics") as response:
            assert response.status == 200
            families = text_string_to_metric_families(await response.text())
        return sum(
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == "prfaas_gateway_requests_total"
        )

    async def processes(self) -> list[dict[str, Any]]:
        _, page = await self.get("/prfaas/gateways")
        found: list[dict[str, Any]] = page["processes"]
        return found


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[Gateway]:
    async with AsyncExitStack() as stack:
        server = stack.enter_context(RedisServer(folder))
        engine = await OpenAiEngine("d0").start()
        stack.push_async_callback(engine.stop)
        front = {"name": "home", "listen": "127.0.0.1:0", **only_engine(engine.url)}
        (folder / "front.yaml").write_text(yaml.safe_dump(front))
        how = {"start_new_session": True}
        process = serving("pd", folder / "front.yaml", **how)
        _, said = await stack.enter_async_context(process)
        settings = {
            "port": 0,
            "processes": 2,
            "shared": {"redis": server.url, "region": "r"},
            "scheduling": {"calibration": {"mode": "off"}},
            "state": str(folder / "learned"),
        }
        pd = {"front": said["control"]}
        file = gateway_file(folder / "gateway.yaml", pd, gateway=settings)
        parent, ready = await stack.enter_async_context(serving("gateway", file, **how))
        gateway = Gateway(parent, ready, file, engine)
        stack.push_async_callback(gateway.session.close)
        yield gateway


async def test_two_processes_are_one_gateway(tmp_path: Path) -> None:
    async with opened(tmp_path) as gateway:
        assert len(set(gateway.pids)) == 2
        await both_answer_and_know_all(gateway)
        await orders_find_the_leader(gateway)
        await a_changed_file_reaches_both(gateway)
        await ctrl_c_drains_both(gateway)
        # What each has learnt is kept for its next start.
        assert (tmp_path / "learned").exists()
        assert (tmp_path / "learned.1").exists()


async def both_answer_and_know_all(gateway: Gateway) -> None:
    answers = [await gateway.post() for _ in range(20)]
    assert [status for status, _, _ in answers] == [200] * 20
    names = {(await gateway.get("/prfaas/gateways"))[1]["name"] for _ in range(40)}
    assert names == {"gateway.0", "gateway.1"}
    states = [(item["number"], item["state"]) for item in await gateway.processes()]
    assert states == [(0, "serving"), (1, "serving")]
    assert [item["pid"] for item in await gateway.processes()] == gateway.pids

    # Whoever is asked, all numbers and records are there.
    assert [await gateway.num_requests() for _ in range(8)] == [20] * 8
    ids = [request_id for _, request_id, _ in answers]
    for request_id in ids:
        status, found = await gateway.get(f"/prfaas/requests/{request_id}")
        assert (status, [item["request_id"] for item in found["requests"]]) == (200, [request_id])
    for _ in range(8):
        _, found = await gateway.get("/prfaas/requests?limit=5")
        assert [item["request_id"] for item in found["requests"]] == ids[:-6:-1]
        status, found = await gateway.get("/prfaas/requests/unknown")
        assert (status, found["error"]["code"]) == (404, "unknown_request")


async def orders_find_the_leader(gateway: Gateway) -> None:
    async def is_led() -> bool:
        pages = [(await gateway.get("/prfaas/gateways"))[1] for _ in range(4)]
        return all(page["state"] == "joined" and page["leader"] for page in pages)

    await eventually(is_led)
    # The only instance that decodes keeps its role, and the leader alone can say so.
    order = {"instance": "d0", "role": "prefill"}
    for _ in range(12):
        async with gateway.session.post(gateway.url + "/v1/pd_role", json=order) as response:
            found = await response.json()
            assert response.status == 409, found
            assert found["error"]["code"] != "not_leader"
    assert (await gateway.get("/v1/pd_role"))[0] == 200


async def a_changed_file_reaches_both(gateway: Gateway) -> None:
    content = yaml.safe_load(gateway.file.read_text())
    content["gateway"]["scheduling"]["admission"] = {"default_tenant": LITTLE}
    gateway.file.write_text(yaml.safe_dump(content))
    gateway.parent.send_signal(signal.SIGHUP)

    async def both_refuse() -> bool:
        return {(await gateway.post())[0] for _ in range(12)} == {429}

    await eventually(both_refuse)
    del content["gateway"]["scheduling"]["admission"]
    gateway.file.write_text(yaml.safe_dump(content))
    gateway.parent.send_signal(signal.SIGHUP)

    async def both_serve() -> bool:
        return {(await gateway.post())[0] for _ in range(12)} == {200}

    await eventually(both_serve)
    assert [item["pid"] for item in await gateway.processes()] == gateway.pids


async def ctrl_c_drains_both(gateway: Gateway) -> None:
    gateway.engine.first_token.clear()
    asking = [asyncio.create_task(gateway.post(stream=True)) for _ in range(8)]

    async def all_wait() -> bool:
        return gateway.engine.num_serving == 8

    await eventually(all_wait)
    # A terminal sends it to its whole process group.
    os.killpg(gateway.parent.pid, signal.SIGINT)

    async def both_drain() -> bool:
        return {(await gateway.get_text("/readyz")) for _ in range(12)} == {"draining\n"}

    await eventually(both_drain)
    assert [(await gateway.post())[0] for _ in range(12)] == [503] * 12
    gateway.engine.first_token.set()
    answers = await asyncio.gather(*asking)
    assert [status for status, _, _ in answers] == [200] * 8
    assert all(answer.endswith(b"data: [DONE]\n\n") for _, _, answer in answers)
    async with asyncio.timeout(LIMIT_S):
        assert await gateway.parent.wait() == 0
    assert not [pid for pid in gateway.pids if psutil.pid_exists(pid)]


async def test_one_process_is_killed_and_started_again(tmp_path: Path) -> None:
    async with opened(tmp_path) as gateway:
        broken: list[str] = []
        num_whole, is_over = 0, False

        async def ask_on() -> None:
            nonlocal num_whole
            while not is_over:
                try:
                    status, _, answer = await gateway.post()
                except aiohttp.ClientError as error:
                    broken.append(repr(error))
                    continue
                if status == 200:
                    num_whole += 1
                else:
                    broken.append(f"{status}: {answer!r}")

        scraped: list[float] = []

        async def scrape_on() -> None:
            while not is_over:
                try:
                    scraped.append(await gateway.num_requests())
                except aiohttp.ClientError:
                    continue  # its connection was the killed process's

        async def served_more(num: int) -> None:
            wanted = num_whole + num
            await eventually(lambda: num_whole >= wanted)

        tasks = [asyncio.create_task(ask_on()) for _ in range(4)]
        tasks.append(asyncio.create_task(scrape_on()))
        try:
            await served_more(50)
            assert broken == []
            os.kill(gateway.pids[0], signal.SIGKILL)
            await eventually(lambda: not psutil.pid_exists(gateway.pids[0]))
            await served_more(50)  # by the other one
            broken_by_kill = list(broken)

            async def is_back() -> bool:
                first, _ = await gateway.processes()
                return bool(first["state"] == "serving" and first["restarts"] == 1)

            await eventually(is_back)
            await served_more(50)
        finally:
            is_over = True
            await asyncio.gather(*tasks)
        # What the killed process had under way or waiting while the kernel closed its sockets, and
        # nothing else. No client got an error as an answer.
        assert broken == broken_by_kill
        assert not [text for text in broken if text[:3].isdigit()], broken
        assert scraped == sorted(scraped)
        assert scraped[-1] <= num_whole + len(broken)
        first, second = await gateway.processes()
        assert first["pid"] != gateway.pids[0]
        assert (second["pid"], second["restarts"]) == (gateway.pids[1], 0)
        await they_end_with_their_parent(gateway, [first["pid"], second["pid"]])


async def they_end_with_their_parent(gateway: Gateway, pids: list[int]) -> None:
    gateway.parent.kill()
    await eventually(lambda: not any(map(psutil.pid_exists, pids)))


async def test_a_file_that_needs_another_port_or_setting_says_so(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    content: dict[str, Any] = {
        "gateway": {
            "models": [{"name": "tiny"}],
            "processes": 2,
            "shared": {"redis": "unix:///nowhere", "region": "r"},
        },
        "pd": {"name": "home", "front": "127.0.0.1:1"},
        "log_dir": str(tmp_path),
    }

    async def failed(content: dict[str, Any]) -> tuple[int | None, str]:
        file.write_text(yaml.safe_dump(content))
        ended = await started("gateway", file, stderr=asyncio.subprocess.PIPE)
        async with asyncio.timeout(LIMIT_S):
            _, errors = await ended.communicate()
        return ended.returncode, errors.decode()

    async with await asyncio.start_server(lambda *_: None, "127.0.0.1", 0) as taken:
        port = taken.sockets[0].getsockname()[1]
        content["gateway"]["port"] = port
        status, errors = await failed(content)
        assert (status, f"cannot serve on 127.0.0.1:{port}" in errors) == (1, True), errors
    # Wrong in a way that only a process finds when it starts.
    content["gateway"]["port"] = 0
    content["granting_key"] = {"file": str(tmp_path / "none"), "region": "r"}
    status, errors = await failed(content)
    assert status in (1, 2), errors
    assert "of the gateway did not start: exit status" in errors
