"""Who may ask engines, and who sees the key to them. With real engines: tests/engine."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from certificates import make_authority, make_node
from openai_engine import OpenAiEngine, fixed

from deploy.gateway.config import TimeoutConfig
from deploy.gateway.errors import EngineLost
from deploy.gateway.proxy.engine import EngineHttpClient
from deploy.region.launch.plan import PlannedProcess, Planner
from deploy.region.launch.ports import resolve_ports
from deploy.region.launch.process_files import gateway_file
from deploy.region.launch.rundir import RunDirectory
from deploy.region.spec.loading import parse_region
from deploy.region.spec.region import RegionSpec
from kvmanager.vllm_connector.key_guard import KEY_FILE_VARIABLE
from prfaas.engines.access import EngineAccess
from prfaas.engines.client import EngineHttp, open_session
from prfaas.engines.command import KEY_GUARD
from transport import LocalError, TlsFiles
from transport.tls import server_context

EXAMPLE = Path(__file__).parents[2] / "deploy" / "region" / "examples" / "demo.yaml"
KEY = "ab" * 32


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "engine.key"
    path.touch(0o600)
    path.write_text(f"{KEY}\n")
    return path


def region_of(**changes: Any) -> RegionSpec:
    """The demo's region, its nodes at an address of the network."""
    text = EXAMPLE.read_text()
    document = parse_region(text, {"MODEL": "/models/tiny"}).model_dump(mode="json", by_alias=True)
    for cluster in document["clusters"]:
        for node in cluster["nodes"]:
            node["host"] = "10.0.0.5"
    return RegionSpec.model_validate(document | changes)


def planned(region: RegionSpec, root: Path) -> list[PlannedProcess]:
    resolved = resolve_ports(region, is_free=lambda _host, _port: True)
    return Planner(resolved, RunDirectory(root, Path("sockets")), {}).processes()


TLS = {"cert": "/tls/cert", "key": "/tls/key", "ca": "/tls/ca"}


@pytest.mark.parametrize(
    ("security", "address"),
    [
        ({}, "http://127.0.0.1:"),
        ({"tls": TLS}, "https://10.0.0.5:"),
        ({"trusted_network": True}, "http://10.0.0.5:"),
    ],
)
def test_engines_are_reached_over_loopback_or_tls(
    security: dict[str, Any], address: str, tmp_path: Path
) -> None:
    region = region_of(security=security)
    engines = [item for item in planned(region, tmp_path) if item.kind == "engine"]
    resolved = resolve_ports(region, is_free=lambda _host, _port: True)
    file = gateway_file(resolved, RunDirectory(tmp_path, tmp_path))
    instances = [*file.pd[0].instances, *(item for one in file.prefill for item in one.instances)]
    assert len(engines) == len(instances) == 3
    assert all(item.address.startswith(address) for item in engines)
    assert all(item.engine_url.startswith(address) for item in instances)
    for item in engines:
        argv = list(item.process.argv)
        host = address.split("/")[2].rstrip(":")
        assert argv[argv.index("--host") + 1] == host
        assert ("--ssl-certfile" in argv) == address.startswith("https")
        if address.startswith("https"):
            # ssl.CERT_REQUIRED: who shows no certificate of the region gets no connection.
            assert argv[argv.index("--ssl-cert-reqs") + 1] == "2"


def test_the_key_is_in_a_file_that_command_lines_and_environments_name(tmp_path: Path) -> None:
    processes = planned(region_of(), tmp_path)
    for item in processes:
        if item.kind == "engine":
            argv = list(item.process.argv)
            assert argv[argv.index("--middleware") + 1] == KEY_GUARD
            assert item.process.env[KEY_FILE_VARIABLE] == str(tmp_path / "engine.key")
        assert "--api-key" not in item.process.argv
        assert "VLLM_API_KEY" not in item.process.env


@asynccontextmanager
async def engine(context: ssl.SSLContext | None = None) -> AsyncIterator[OpenAiEngine]:
    made = OpenAiEngine()
    made.reply = fixed({})
    await made.start(tls=context)
    try:
        yield made
    finally:
        await made.stop()


async def is_healthy(url: str, access: EngineAccess | None = None) -> bool:
    async with open_session() as session:
        return await EngineHttp(url, session, access).health()


async def completes(url: str, access: EngineAccess | None = None) -> bool:
    """Whether the gateway's own client gets an answer."""
    client = EngineHttpClient(TimeoutConfig(), access or EngineAccess(), max_answer_bytes=1024)
    try:
        answer = await client.open("d0", url, "/v1/completions", b"{}", {})
    except EngineLost:
        return False
    finally:
        await client.close()
    return (answer.status, answer.begun) == (200, b"{}")


Asks = Callable[[str, EngineAccess | None], Awaitable[bool]]


@pytest.mark.parametrize("asks", [is_healthy, completes])
async def test_those_who_may_ask_show_the_key(key_file: Path, asks: Asks) -> None:
    async with engine() as asked:
        assert await asks(asked.url, EngineAccess(key_file))
        assert await asks(asked.url, None)
    assert asked.shown == [f"Bearer {KEY}", ""]


@pytest.mark.parametrize("asks", [is_healthy, completes])
async def test_an_engine_of_another_authority_is_shown_no_key(
    tmp_path: Path, key_file: Path, asks: Asks
) -> None:
    ours, theirs = make_authority(tmp_path, "ours"), make_authority(tmp_path, "theirs")
    own = make_node(tmp_path, "gateway", ours)
    engines = {
        "true": make_node(tmp_path, "node", ours),
        "foreign": make_node(tmp_path, "foreign", theirs, trusts=ours),
    }
    access = EngineAccess(key_file, own)
    for name, files in engines.items():
        async with engine(server_context(files)) as asked:
            assert await asks(asked.url, access) == (name == "true")
            # Without a certificate of the region there is no connection either.
            assert not await asks(asked.url, EngineAccess(key_file))
            assert not await asks(asked.url, EngineAccess(key_file, _strangers(tmp_path, theirs)))
            assert asked.shown == ([f"Bearer {KEY}"] if name == "true" else [])


def _strangers(folder: Path, ca: Path) -> TlsFiles:
    return make_node(folder, "stranger", ca, trusts=folder / "ours.pem")


async def test_clients_of_the_gateway_cannot_send_a_key_to_engines(
    open_region: Any, key_file: Path
) -> None:
    owned = {"engine_access": EngineAccess(key_file)}
    async with open_region(api_keys=("one",), owned=owned) as region:
        headers = {"Authorization": "Bearer one"}
        for body in ({"model": "tiny", "prompt": "x"}, region.long_body()):
            status, answered, answer = await region.post(body, headers=headers)
            assert status == 200
            assert KEY not in f"{answered}{answer!r}"
        sent = {headers["authorization"] for _, headers, _ in region.engine.requests}
        assert sent == {f"Bearer {KEY}"}
        assert len(region.engine.requests) == 3, "two answers and a rendering"


def test_a_key_that_others_may_read_is_not_used(key_file: Path) -> None:
    key_file.chmod(0o644)
    with pytest.raises(LocalError, match="others may read") as caught:
        EngineAccess(key_file)
    assert KEY not in str(caught.value)
