"""Metrics name models, nodes and tenants: beyond loopback only who has their key reads them."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import yaml
from eventually import eventually
from free_ports import free_port
from grpc_health_probe import grpc_health
from prometheus_client import CollectorRegistry, Gauge
from pydantic import ValidationError

from kvmanager.agent.config import AgentConfig
from kvmanager.config_files.fields import Section
from kvmanager.directory.config import DirectoryConfig
from kvmanager.metrics_server import MetricsServer
from local_pd.front_config import PdFrontConfig
from prfaas.front_config import PrefillFrontConfig
from transport import Endpoint, LocalError
from transport.region_key import new_key

ANYWHERE = Endpoint("127.0.0.1", 0)
INSTANCE = {"name": "p", "url": "http://127.0.0.1:1", "agent": "127.0.0.1:1", "role": "both"}
FRONT = {"name": "c", "instances": [INSTANCE], "listen": "127.0.0.1:0"}
DIRECTORY = {"agents": {"c/n": "127.0.0.1:1"}, "listen": "127.0.0.1:0"}
PROCESSES: dict[str, tuple[type[Section], dict[str, Any]]] = {
    "agent": (AgentConfig, {}),
    "directory": (DirectoryConfig, DIRECTORY),
    "prefill": (PrefillFrontConfig, FRONT),
    "pd": (PdFrontConfig, FRONT),
}
PATHS = ("/metrics", "/health", "/", "/nothing")
CHILD_ENV = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    return keyed(tmp_path / "metrics.key", "right")


def keyed(path: Path, key: str, mode: int = 0o600) -> Path:
    """The file with this key, replaced in one step."""
    new = path.with_name("new")
    new.write_text(f"{key}\n")
    new.chmod(mode)
    new.replace(path)
    return path


@pytest.mark.parametrize("process", PROCESSES)
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "b.example"])
def test_nobody_shows_metrics_to_everybody(process: str, host: str) -> None:
    kind, settings = PROCESSES[process]
    assert kind.model_validate(settings).metrics_host == "127.0.0.1"
    shown = settings | {"metrics_host": host, "metrics_port": 9100}
    # Neither opens it: a scraper shows no certificate and signs no call.
    others = [{"region_key": {"file": "key", "region": "r", "name": "x"}}]
    tls = {"cert": "c", "key": "k", "ca": "a"}
    others.append({"tls_dir": "d"} if kind is AgentConfig else {"tls": tls})
    for more in ({}, *others):
        with pytest.raises(ValidationError, match="everybody could read the metrics"):
            kind.model_validate(shown | more)
    for more in ({"metrics_key_file": "key"}, {"trusted_network": True}):
        kind.model_validate(shown | more)


class Scraper:
    """Asks a metrics port."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def status(self, at: str, path: str = "/metrics", shown: str | None = None) -> int:
        headers = {} if shown is None else {"Authorization": shown}
        async with self._session.get(f"http://{at}{path}", headers=headers) as answer:
            text = await answer.text()
            assert answer.status != 401 or "prfaas_" not in text
            return answer.status


@pytest.fixture
async def scraper() -> AsyncIterator[Scraper]:
    async with aiohttp.ClientSession() as session:
        yield Scraper(session)


def registry() -> CollectorRegistry:
    made = CollectorRegistry()
    Gauge("prfaas_secret", "What only the region's operators may read.", registry=made)
    return made


async def test_a_port_with_a_key_answers_nobody_else(scraper: Scraper, key_file: Path) -> None:
    server = MetricsServer(registry(), ANYWHERE, key_file, ("everything",))
    at = str(await server.start())
    try:
        for path in PATHS:
            for shown in (None, "", "right", "Basic right", "Bearer", "Bearer wrong", "Bearer é"):
                assert await scraper.status(at, path, shown) == 401, (path, shown)
        assert await scraper.status(at, "/metrics", "Bearer right") == 200
        assert await scraper.status(at, "/health", "bearer  right ") == 200
        assert await scraper.status(at, "/nothing", "Bearer right") == 404
        # Probes have no key, and learn nothing but a state.
        assert await scraper.status(at, "/livez") == await scraper.status(at, "/readyz") == 200
        for path in ("/livez/", "//livez", "/livez/x", "/metrics/livez"):
            assert await scraper.status(at, path) == 401, path
    finally:
        await server.stop()


async def test_a_key_that_is_replaced_opens_nothing(
    scraper: Scraper, key_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = MetricsServer(registry(), ANYWHERE, key_file)
    at = str(await server.start())
    try:
        assert await scraper.status(at, shown="Bearer right") == 200
        keyed(key_file, "new")
        await eventually(lambda: scraper.status(at, shown="Bearer right"), lambda seen: seen != 200)
        assert await scraper.status(at, shown="Bearer new") == 200
        keyed(key_file, "two words")
        async with asyncio.timeout(30):
            while "changed files are not used" not in caplog.text:
                assert await scraper.status(at, shown="Bearer new") == 200
                await asyncio.sleep(0.05)
        assert await scraper.status(at) == 401
    finally:
        await server.stop()


def test_a_key_that_others_can_read_starts_nothing(key_file: Path) -> None:
    with pytest.raises(LocalError, match="others may read"):
        MetricsServer(registry(), ANYWHERE, keyed(key_file, "right", 0o644))
    with pytest.raises(LocalError, match="No such file"):
        MetricsServer(registry(), ANYWHERE, key_file.with_name("missing"))


@contextmanager
def running(command: str, folder: Path, settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The process, until it is ready; what it says then."""
    path = folder / "settings.yaml"
    path.write_text(yaml.safe_dump(settings))
    argv = [sys.executable, "-m", "deploy.cli", command, "--config", str(path)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, env=CHILD_ENV, cwd=folder, text=True)
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()


def listening(pid: int) -> set[str]:
    """The addresses of all TCP ports of a process."""
    connections = psutil.Process(pid).net_connections("tcp")
    return {f"{c.laddr.ip}:{c.laddr.port}" for c in connections if c.status == "LISTEN"}


@pytest.mark.parametrize("process", PROCESSES)
async def test_real_processes_show_metrics_on_loopback_to_who_has_the_key(
    scraper: Scraper, key_file: Path, tmp_path: Path, process: str
) -> None:
    port = free_port()
    _, settings = PROCESSES[process]
    region_key = keyed(tmp_path / "region.key", new_key())
    listens = "listen" if "listen" in settings else "control"
    settings = settings | {
        # Whatever its peers may reach, its metrics stay on loopback.
        listens: "0.0.0.0:0",
        "region_key": {"file": str(region_key), "region": "r", "name": "x"},
        "metrics_port": port,
        "metrics_key_file": str(key_file),
    }
    if process == "agent":
        settings |= {"listen": "127.0.0.1:0", "socket": str(tmp_path / "agent.sock")}
        settings |= {"arena_dir": str(tmp_path), "arena_gib": 0.01}
    with running(process, tmp_path, settings) as ready:
        at = f"127.0.0.1:{port}"
        found = await asyncio.to_thread(listening, ready["pid"])
        assert {address for address in found if address.endswith(f":{port}")} == {at}
        assert any(address.startswith(("0.0.0.0:", ":::")) for address in found)
        for path in PATHS:
            assert await scraper.status(at, path) == 401
        assert await scraper.status(at, shown="Bearer right") == 200
        assert await scraper.status(at, "/health", shown="Bearer right") == 200
        # Nobody is behind the fronts.
        serves = process in ("agent", "directory")
        assert await scraper.status(at, "/livez") == 200
        assert await scraper.status(at, "/readyz") == (200 if serves else 503)
        asked = await grpc_health(ready["control"].replace("0.0.0.0", "127.0.0.1"))
        assert asked == ("SERVING" if serves else "NOT_SERVING")


@pytest.mark.parametrize("process", ["directory", "prefill"])
def test_a_taken_metrics_port_ends_the_command_with_a_message(tmp_path: Path, process: str) -> None:
    port = free_port()
    _, settings = PROCESSES[process]
    path = tmp_path / "settings.yaml"
    path.write_text(yaml.safe_dump(settings | {"metrics_port": port}))
    argv = [sys.executable, "-m", "deploy.cli", process, "--config", str(path)]
    with running(process, tmp_path, settings | {"metrics_port": port}):
        ended = subprocess.run(argv, env=CHILD_ENV, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "in use" in ended.stderr
    assert "Traceback" not in ended.stderr
