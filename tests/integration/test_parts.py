"""One region file on two hosts: each starts its own part, in run directories of their own.

The hosts are two addresses of this machine, and everything is real but the engines' computing.
"""

from __future__ import annotations

import json
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from eventually import wait_until
from free_ports import free_port
from region_hosts import PATIENCE_S, RegionHost
from two_hosts import two_hosts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROMPT = list(range(200))


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[dict[str, RegionHost]]:
    both = two_hosts(tmp_path)
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
        assert answer["choices"][0]["text"].startswith("answer ")
        reasons.append(headers["x-prfaas-reason"])
        return headers["x-prfaas-route"]

    wait_until(lambda: answer() == "prefill_cluster", what=reasons, timeout_s=PATIENCE_S)

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
    measured = prefill.tell("doctor", "link", "a1", "b1", "--seconds", "3", "--json")
    assert measured.returncode == 0, measured.stdout + measured.stderr
    assert json.loads(measured.stdout)["measured"]["nbytes"] > 0

    changed = json.loads((home.folder / "region.yaml").read_text())
    changed["gateway"]["scheduling"]["admission"] = {"default_tenant": {"max_requests": 9}}
    # Beside the file that the region follows by itself.
    (home.folder / "changed.yaml").write_text(json.dumps(changed))
    reload = ("region", "reload", str(home.folder / "changed.yaml"))
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
    wait_until(lambda: answer() == "prefill_cluster", what=reasons, timeout_s=PATIENCE_S)
    home.down()
    prefill.down()


def test_a_host_with_two_addresses_gets_connections_at_both(tmp_path: Path) -> None:
    # Its data port listens on all addresses of this machine, so that it must be free on all.
    port = free_port("0.0.0.0")

    def several(region: dict[str, Any]) -> None:
        first = region["clusters"][1]["nodes"][0]
        other = first["host"].removesuffix(".1") + ".3"
        addresses = [f"{first['host']}:{port}", f"{other}:{port}"]
        first["agent"] |= {"data_port": port, "advertise": addresses}

    both = two_hosts(tmp_path, several)
    prefill, home = both["a1"], both["b1"]
    try:
        home.begin()
        prefill.begin()
        gateway = home.ready()["gateway"]
        prefill.ready()
        body = {"model": "small", "prompt": PROMPT, "max_tokens": 4}
        routes: list[str] = []

        def answer() -> str:
            routes.append(fetch(f"{gateway}/v1/completions", body)[0]["x-prfaas-route"])
            return routes[-1]

        # The decode engine compares what landed.
        wait_until(lambda: answer() == "prefill_cluster", what=routes, timeout_s=PATIENCE_S)
        ends = Counter(
            one.raddr.ip
            for one in psutil.net_connections("tcp")
            if one.raddr and one.raddr.port == port
        )
        assert len(ends) == 2, ends
        assert max(ends.values()) - min(ends.values()) <= 1, ends
        home.down()
        prefill.down()
    finally:
        for host in both.values():
            host.close()


def test_a_host_without_its_keys_is_told_what_to_copy(hosts: dict[str, RegionHost]) -> None:
    (hosts["b1"].folder / "keys" / "granting.key").unlink()
    file = str(hosts["b1"].folder / "region.yaml")
    refused = hosts["b1"].tell("up", file, "--node", "b1")
    assert refused.returncode == 2
    assert "security.granting_key: there is no " in refused.stderr
    assert "`prfaas certs init DIR FILE` makes it" in refused.stderr
