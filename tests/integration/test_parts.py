"""One region file on two hosts: each starts its own part, in run directories of their own.

The hosts are two addresses of this machine, and everything is real but the engines' computing.
"""

from __future__ import annotations

import json
import random
import shutil
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from region_hosts import PATIENCE_S, RegionHost, make_keys, wait_for
from standin_engine import install

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROMPT = list(range(200))


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[dict[str, RegionHost]]:
    python_path = install(tmp_path / "engine")
    # Other addresses for every run, so that the ports that hosts work out are free.
    net = f"127.{random.randint(1, 254)}.{random.randint(1, 254)}"

    def node(name: str, host: int, role: str) -> dict[str, Any]:
        agent = {"arena_gib": 0.01, "arena_dir": str(tmp_path)}
        instances = [{"name": f"{name}-engine", "role": role}]
        return {"name": name, "host": f"{net}.{host}", "agent": agent, "instances": instances}

    region = {
        "name": "two",
        "gateway": {
            "port": 0,
            "host": f"{net}.1",
            "threshold_tokens": 100,
            "scheduling": {"routing": {"policy": "threshold"}},
        },
        "models": [
            {
                "name": "small",
                "path": str(tmp_path),
                "prefix_caching": False,
                "env": {"PYTHONPATH": python_path},
            }
        ],
        "clusters": [
            {"name": "far", "kind": "prefill", "nodes": [node("a1", 2, "prefill")]},
            {"name": "home", "kind": "pd", "nodes": [node("b1", 1, "both")]},
        ],
        "links": [{"from": "far", "to": "home"}],
        "security": {
            "tls": {name: f"keys/{name}.pem" for name in ("cert", "key", "ca")},
            "engine_key": "keys/engine.key",
            "granting_key": "keys/granting.key",
            "granting_keys": "keys/granting.pub",
        },
    }
    file = tmp_path / "region.yaml"
    file.write_text(json.dumps(region))
    make_keys(tmp_path / "made", file)
    both = {}
    for name in ("a1", "b1"):
        folder = tmp_path / f"host-{name}"
        shutil.copytree(tmp_path / "made" / name, folder / "keys")
        shutil.copy(file, folder)
        both[name] = RegionHost(name, folder)
    yield both
    for host in both.values():
        host.close()


def fetch(url: str, body: dict[str, Any] | None = None) -> tuple[dict[str, str], Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        return dict(response.headers), json.loads(response.read())


def test_two_hosts_with_one_file_are_one_region(hosts: dict[str, RegionHost]) -> None:
    prefill, home = hosts["a1"], hosts["b1"]
    # In any order: the gateway starts before the cluster whose front it asks.
    gateway = home.up()["gateway"]
    assert prefill.up()["gateway"] == ""

    reasons: list[str] = []

    def answer() -> str:
        """Where a long prompt was prefilled. The decode engine compares what landed."""
        body = {"model": "small", "prompt": PROMPT, "max_tokens": 4}
        headers, answer = fetch(f"{gateway}/v1/completions", body)
        assert answer["choices"][0]["text"]
        reasons.append(headers["x-prfaas-reason"])
        return headers["x-prfaas-route"]

    wait_for(lambda: answer() == "prefill_cluster", reasons)

    a_status, b_status = prefill.status(), home.status()
    assert a_status["state"]["part"] == "a1"
    assert [item["name"] for item in a_status["state"]["processes"]] == [
        "agent.a1", "a1-engine", "front.far",
    ]  # fmt: skip
    assert list(a_status["agents"]) == ["a1"]
    assert [item["name"] for item in b_status["state"]["processes"]] == [
        "agent.b1", "b1-engine", "gateway",
    ]  # fmt: skip
    assert b_status["plan"] is not None
    elsewhere = prefill.tell("role", "ls")
    assert "a part without the gateway; give its gateway with --gateway" in elsewhere.stderr
    measured = prefill.tell("doctor", "link", "a1", "b1", "--seconds", "1", "--json")
    assert measured.returncode == 0, measured.stdout + measured.stderr
    assert json.loads(measured.stdout)["measured"]["nbytes"] > 0

    changed = json.loads((home.folder / "region.yaml").read_text())
    changed["gateway"]["scheduling"]["admission"] = {"default_tenant": {"max_requests": 9}}
    (home.folder / "region.yaml").write_text(json.dumps(changed))
    reload = ("region", "reload", str(home.folder / "region.yaml"))
    assert "gateway runs on the host of node b1" in home.tell(*reload, "--node", "a1").stderr
    reloaded = home.tell(*reload, "--node", "b1", "--json")
    assert json.loads(reloaded.stdout) == {
        "made": ["gateway.scheduling.admission.default_tenant"],
        "needs_restart": [],
    }

    assert prefill.down() == "region two, part a1 is down\n"
    assert answer() == "local"
    assert "no region runs" in prefill.tell("status").stderr
    prefill.up()
    wait_for(lambda: answer() == "prefill_cluster", reasons)
    home.down()
    prefill.down()


def test_a_host_without_its_keys_is_told_what_to_copy(hosts: dict[str, RegionHost]) -> None:
    (hosts["b1"].folder / "keys" / "granting.key").unlink()
    file = str(hosts["b1"].folder / "region.yaml")
    refused = hosts["b1"].tell("up", file, "--node", "b1")
    assert refused.returncode == 2
    assert "security.granting_key: there is no " in refused.stderr
    assert "`prfaas certs init DIR FILE` makes it" in refused.stderr
