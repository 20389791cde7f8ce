"""The part of a region on one host: what it writes, the keys that it makes, its ports."""

from __future__ import annotations

import logging.config
from pathlib import Path

import pytest
from granting import grant_files

from deploy.region.launch.parts import Part, part_of
from deploy.region.launch.plan import Planner, engine_logging
from deploy.region.launch.ports import resolve_part, resolve_ports, taken_ports
from deploy.region.launch.rundir import LOCK, RunDirectory
from deploy.region.launch.trust import make_keys
from deploy.region.spec.loading import parse_region
from deploy.region.spec.region import RegionSpec

TWO_SITES = """
name: two
models: [{name: m, path: org/m}]
clusters:
  - name: far
    kind: prefill
    nodes:
      - {name: a1, host: 10.0.0.1, instances: [{name: a1-p}]}
      - {name: a2, host: 10.0.0.2, instances: [{name: a2-p}]}
  - name: home
    kind: pd
    nodes: [{name: b1, host: 10.1.0.1, instances: [{name: b1-d}]}]
links: [{from: far, to: home}]
"""
KEYS = """
security:
  tls: {cert: /k/cert.pem, key: /k/key.pem, ca: /k/ca.pem}
  engine_key: /k/engine.key
  granting_key: /k/granting.key
  granting_keys: /k/granting.pub
"""


def region_of(more: str = KEYS, text: str = TWO_SITES) -> RegionSpec:
    return parse_region(text + more, {})


def planner(region: RegionSpec, part: Part) -> Planner:
    root = Path("/run/two")
    return Planner(resolve_part(region, part), RunDirectory(root, root / "sockets"), {})


def test_a_part_writes_only_what_its_processes_read() -> None:
    region = region_of()
    for node, expected in {
        "a1": {"region.json", "agent.a1.json", "front.far.json"},
        "a2": {"region.json", "agent.a2.json"},
        "b1": {"region.json", "agent.b1.json", "gateway.json"},
    }.items():
        files = planner(region, part_of(region, node=node)).files()
        assert {path.name for path in files} == expected


def test_a_site_has_the_parts_of_its_nodes() -> None:
    region = region_of()
    far = planner(region, part_of(region, site="far")).processes()
    assert [item.name for item in far] == ["agent.a1", "agent.a2", "a1-p", "a2-p", "front.far"]


def test_named_keys_are_not_made(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path, tmp_path)
    keys = tmp_path / "keys"
    keys.mkdir()
    private, public = grant_files(keys)
    region = region_of(KEYS.replace("/k/", f"{keys}/"))
    text = private.path.read_bytes()
    private.path.unlink()
    make_keys(region, directory, part_of(region, node="a1"))
    assert [path.name for path in tmp_path.iterdir()] == ["keys"]
    private.path.touch(mode=0o600)
    private.path.write_bytes(text)
    make_keys(region, directory, part_of(region, node="b1"))
    assert {path.name for path in tmp_path.iterdir()} == {"keys", "operator.key", LOCK}
    assert sorted(keys.iterdir()) == [private.path, public.path]


def test_only_the_ports_of_a_part_must_be_free_here() -> None:
    region = region_of(text=TWO_SITES.replace("10.0.0.1", "127.0.0.1"))
    part = part_of(region, node="a1")
    assert taken_ports(region, part) == []
    assert "cannot listen on 10.0.0.2" in taken_ports(region)[0].message
    twice = resolve_part(region, part).region
    node = twice.nodes[0]
    agent = node.agent.model_copy(update={"data_port": node.agent.control_port})
    cluster = twice.clusters[0]
    nodes = (node.model_copy(update={"agent": agent}), *cluster.nodes[1:])
    clusters = (cluster.model_copy(update={"nodes": nodes}), *twice.clusters[1:])
    (problem,) = taken_ports(twice.model_copy(update={"clusters": clusters}), part)
    assert "is given twice" in problem.message


def test_ports_are_free_ones() -> None:
    region = resolve_ports(region_of(), is_free=lambda _host, port: port % 2 == 0).region
    agents = [node.agent for node in region.nodes]
    ports = [port for item in agents for port in (item.data_port, item.control_port)]
    ports += [item.port for node in region.nodes for item in node.instances]
    assert all(port % 2 == 0 and 0 < port < 32768 for port in ports)
    with pytest.raises(OSError, match="no free port on"):
        resolve_ports(region_of(), is_free=lambda _host, _port: False)


def test_pythons_logging_takes_the_file_of_engines() -> None:
    formatters = engine_logging("warning")["formatters"]
    assert isinstance(formatters, dict)
    logging.config.DictConfigurator({}).configure_formatter(formatters["json"])
