"""Which ports a host of a region needs, seen from each host and from outside; certificates."""

from __future__ import annotations

import datetime
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography import x509

from deploy.region.certs import hosts_of, make
from deploy.region.doctor.certificates import Certificate, date_check, name_checks
from deploy.region.doctor.port_checks import port_checks
from deploy.region.doctor.reach import Reached
from deploy.region.doctor.viewpoint import RegionPort, find_viewpoint, region_ports
from deploy.region.launch.rundir import WhichRun
from deploy.region.spec.loading import parse_region
from transport import Endpoint

FILE = """
name: two
gateway: {host: 10.1.0.1, api_keys_env: KEYS}
models: [{name: m, path: org/m}]
clusters:
  - {name: far, kind: prefill, nodes: [{name: a1, host: 10.0.0.1, instances: [{name: p}]}]}
  - name: home
    kind: pd
    nodes:
      - {name: b1, host: 10.1.0.1, instances: [{name: d}]}
      - {name: b2, host: b2.example, instances: [{name: e}]}
links: [{from: far, to: home, endpoints: {b2: "198.51.100.7:7100"}}]
security:
  tls: {cert: /k/cert.pem, key: /k/key.pem, ca: /k/ca.pem}
  engine_key: /k/engine.key
  granting_key: /k/granting.key
  granting_keys: /k/granting.pub
"""


def ports(tmp_path: Path, node: str | None, text: str = FILE) -> dict[str, RegionPort]:
    region = parse_region(text, {})
    run_dir = None if node is None else tmp_path
    view = find_viewpoint(region, site=None, node=node, run_dir=run_dir)
    return {port.name: port for port in region_ports(view)}


def needed(found: dict[str, RegionPort]) -> set[str]:
    return {name for name, port in found.items() if port.needed}


def test_each_host_needs_other_ports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    nodes, words = ("a1", "b1", "b2"), ("control", "data")
    agents = {f"agent {node}, {word}" for node in nodes for word in words}
    from_a1 = ports(tmp_path, "a1")
    assert needed(from_a1) == agents | {
        "agent a1, metrics", "engine p", "front far", "front far, metrics",
        "link far-to-home to b2",
    }  # fmt: skip
    assert from_a1["front far"].at == Endpoint("10.0.0.1", 7200)
    # Metrics without a key are on loopback of their host.
    assert "agent b1, metrics" not in from_a1
    assert needed(ports(tmp_path, "b1")) == agents | {
        "agent b1, metrics", "engine d", "engine e", "front far", "gateway",
    }  # fmt: skip
    assert needed(ports(tmp_path, "b2")) == agents | {
        "agent b2, metrics", "engine e", "link far-to-home to b2",
    }  # fmt: skip
    outside = ports(tmp_path, None)
    assert needed(outside) == {name for name in agents if name.endswith("control")}
    assert {"engine p", "front far", "gateway"} <= set(outside)


def test_engines_with_nixl_reach_each_other(tmp_path: Path) -> None:
    text = FILE.replace("kind: pd", "kind: pd\n    hand_off: nixl")
    nixl = {"engine d, NIXL", "engine e, NIXL"}
    for node, needs in (("a1", set[str]()), ("b1", nixl), ("b2", nixl)):
        found = ports(tmp_path, node, text)
        assert {name for name, port in found.items() if port.kind == "nixl"} == nixl
        assert needed(found) & nixl == needs
    assert found["engine d, NIXL"].at == Endpoint("10.1.0.1", 7600)
    assert found["engine e, NIXL"].is_here


def test_each_of_several_gateways_has_its_ports(tmp_path: Path) -> None:
    several = "host: 0.0.0.0, admin: '0.0.0.0:8001', nodes: [b1, b2], shared: {redis: 'rediss://r'}"
    text = FILE.replace("host: 10.1.0.1, api_keys_env", f"{several}, api_keys_env", 1)
    found = ports(tmp_path, "b2", text)
    gateways = {name: port for name, port in found.items() if name.startswith("gateway")}
    assert {name: str(port.at) for name, port in gateways.items()} == {
        "gateway b1": "10.1.0.1:8000",
        "gateway b1, pages for operators": "10.1.0.1:8001",
        "gateway b2": "b2.example:8000",
        "gateway b2, pages for operators": "b2.example:8001",
    }
    assert {name for name in needed(found) if name in gateways} == {
        "gateway b2", "gateway b2, pages for operators",
    }  # fmt: skip


def test_a_region_of_one_host_must_run_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    text = FILE.replace("10.1.0.1", "10.0.0.1").replace("b2.example", "10.0.0.1")
    with pytest.raises(WhichRun, match="no region runs"):
        find_viewpoint(parse_region(text, {}), site=None, node=None, run_dir=None)


def test_what_cannot_be_reached_is_a_problem_where_it_is_needed() -> None:
    at = Endpoint("10.0.0.1", 7101)
    needs = RegionPort("x", "data", at, at.host, False, True, "agent")
    other = replace(needs, needed=False)
    wrong, fine = port_checks([Reached(needs, "refused"), Reached(other, "refused")])
    assert (wrong.level, fine.level) == ("problem", "ok")
    assert "does a firewall let 7101/tcp through" in wrong.fix
    assert fine.what.endswith("refused; it only has to be reached by agents that send KVCache")
    (foreign,) = port_checks([Reached(needs, tls_trouble="unable to get local issuer certificate")])
    assert foreign.fix.startswith("its certificate is of another authority")


def test_dates_and_names_of_certificates(tmp_path: Path) -> None:
    region = parse_region(FILE, {})
    make(region, tmp_path / "made", days=100)
    pem = (tmp_path / "made" / "b2" / "cert.pem").read_bytes()
    known = Certificate.of(x509.load_pem_x509_certificate(pem))
    now = datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=1)
    assert date_check("x", known, now).level == "ok"
    assert date_check("x", known, now + 80 * day).level == "warning"
    assert "has expired" in date_check("x", known, now + 101 * day).what
    assert date_check("x", known, now - day).level == "problem"
    addresses = hosts_of(region)[2].addresses
    assert set(addresses) == {"b2.example", "198.51.100.7"}
    assert name_checks("x", known, "two", roles={"agent", "operator"}, addresses=addresses) == []
    role, address = name_checks("x", known, "two", roles={"gateway"}, addresses={"10.9.9.9"})
    assert "needs role gateway of region two" in role.what
    assert address.what.startswith("it is not for 10.9.9.9")
    assert name_checks("x", known, "other", roles={"agent"}, addresses=[])[0].level == "problem"
