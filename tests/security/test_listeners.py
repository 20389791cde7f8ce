"""No process listens beyond loopback without authentication, unless its network is trusted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from deploy.gateway.api_keys import parse_api_keys
from deploy.gateway.cli import check_listener, exposure_of
from deploy.gateway.config import GatewayConfig, ModelConfig
from deploy.gateway.file import GatewayFile, load_gateway_file
from deploy.gateway.own_file import weaknesses
from kvmanager.agent.config import AgentConfig
from kvmanager.config_files.fields import Section
from kvmanager.config_files.problems import FileError
from kvmanager.config_files.security import exposure
from kvmanager.directory.config import DirectoryConfig, load
from local_pd.front_config import PdFrontConfig
from prfaas.front_config import PrefillFrontConfig
from transport import Identity, RegionKey

EVERYWHERE = "0.0.0.0:7999"
INSTANCE = {"name": "p", "url": "http://127.0.0.1:1", "agent": "127.0.0.1:1", "role": "both"}
FRONT = {"name": "c", "instances": [INSTANCE], "listen": EVERYWHERE}
TLS = {"tls": {"cert": "c", "key": "k", "ca": "a"}}
KEY = {"region_key": {"file": "key", "region": "r", "name": "x"}}
PROCESSES: dict[str, tuple[type[Section], dict[str, Any]]] = {
    "data": (AgentConfig, {"listen": EVERYWHERE, "advertise": "h"}),
    "control": (AgentConfig, {"control": EVERYWHERE}),
    "directory": (DirectoryConfig, {"agents": {"c/n": "h:1"}, "listen": EVERYWHERE}),
    "prefill": (PrefillFrontConfig, FRONT),
    "pd": (PdFrontConfig, FRONT),
}


@pytest.mark.parametrize("process", PROCESSES)
def test_everybody_may_not_call_by_default(process: str) -> None:
    kind, settings = PROCESSES[process]
    with pytest.raises(ValidationError, match="reachable from other hosts"):
        kind.model_validate(settings)
    allowed = [KEY, {"trusted_network": True}]
    allowed.append({"tls_dir": Path("d")} if kind is AgentConfig else TLS)
    for security in allowed:
        kind.model_validate(settings | security)


@pytest.mark.parametrize(
    ("url", "is_safe"),
    [
        ("redis://:secret@far:6379/0", False),
        ("redis://10.0.0.1", False),
        ("redis://127.0.0.1:6379", True),
        ("redis://localhost", True),
        ("redis://", True),
        ("rediss://far", True),
        ("unix:///run/redis.sock", True),
    ],
)
def test_a_far_redis_is_reached_with_tls(url: str, is_safe: bool) -> None:
    settings = {"agents": {"c/n": "h:1"}, "redis": url}
    load(None, settings | {"trusted_network": True})
    if is_safe:
        load(None, settings)
        return
    with pytest.raises(FileError, match="write rediss://, or set trusted_network") as caught:
        load(None, settings)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("process", PROCESSES)
def test_a_key_beside_tls_is_a_mistake(process: str) -> None:
    kind, settings = PROCESSES[process]
    tls = {"tls_dir": Path("d")} if kind is AgentConfig else TLS
    with pytest.raises(ValidationError, match="it signs calls where there is no TLS"):
        kind.model_validate(settings | tls | KEY)


def test_a_gateway_for_everybody_needs_keys() -> None:
    models = (ModelConfig(name="m", max_model_len=1),)
    everywhere = GatewayConfig(host="0.0.0.0", models=models)
    with pytest.raises(FileError, match="anybody could use the models; give api_keys_file"):
        check_listener(everywhere, trusted_network=False)
    check_listener(everywhere, trusted_network=True)
    keys = parse_api_keys("secret", "test")
    check_listener(everywhere.model_copy(update={"api_keys": keys}), trusted_network=False)
    check_listener(GatewayConfig(models=models), trusted_network=False)
    pages = GatewayConfig(models=models, admin=EVERYWHERE)
    with pytest.raises(FileError, match=r"gateway\.admin: 0\.0\.0\.0 .* change roles"):
        check_listener(pages, trusted_network=False)
    check_listener(pages.model_copy(update={"api_keys": keys}), trusted_network=False)


def test_a_gateway_says_what_everybody_may_do() -> None:
    def said(**settings: Any) -> str | None:
        gateway = {"models": [{"name": "m"}], "host": "0.0.0.0", "admin": EVERYWHERE} | settings
        pd = {"name": "p", "front": "h:1"}
        return exposure_of(
            GatewayFile.model_validate({"gateway": gateway, "pd": pd, "trusted_network": True})
        )

    found = str(said())
    assert "read and plant the KVCache of all tenants" in found
    assert "anybody could use the models" in found
    assert "anybody could change roles" in found
    assert "anybody could" not in str(said(api_keys=[{"key": "secret"}]))
    assert "anybody could" not in str(said(host="127.0.0.1", admin="127.0.0.1:1"))


def test_a_gateway_says_who_may_be_an_operator_and_read_its_keys(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ops one\nacme two\n")
    settings = tmp_path / "gateway.json"

    def said(mode: int, *operators: str) -> str:
        keys.chmod(mode)
        gateway = {"models": [{"name": "m"}], "operators": operators}
        pd = {"name": "p", "front": "h:1"}
        settings.write_text(json.dumps({"gateway": gateway, "pd": pd, "api_keys_file": str(keys)}))
        return "; ".join(weaknesses(load_gateway_file(settings)))

    assert said(0o600, "ops") == said(0o640, "ops") == ""
    assert "others may read" in said(0o644, "ops")
    assert "no API key opens the pages of operators" in said(0o600)


def test_what_a_trusted_network_leaves_open_is_said() -> None:
    said = exposure(None, trusted_network=True)
    assert said is not None
    assert "read and plant the KVCache of all tenants" in said
    key = RegionKey(Path("k"), Identity("r", "agent", "a"))
    assert "whoever listens on the network reads" in str(exposure(key, trusted_network=False))
    assert exposure(None, trusted_network=False) is None


def test_what_an_agent_without_grants_leaves_open_is_said() -> None:
    (said,) = AgentConfig().exposures
    assert "KVCache of all tenants sent to any address, and cache KVCache under any key" in said
    (said,) = AgentConfig(send_to=("b:7100",)).exposures
    assert "sent to the addresses of send_to" in said
    assert AgentConfig(granting_keys={"file": "k", "region": "r"}).exposures == []
